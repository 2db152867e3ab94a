"""Histories of captured steps: batches of decodes, the buffers after a refill, and the states.

Batches shrink and grow, and block tables get narrower. The expected contents of the buffers are
written out number by number.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....contract.kinds import PAD_SLOT_ID
from ....contract.v0.sequence_classes import SequenceAttentionMetadata
from ..steps import counts

LONGEST = 70_000
HARMLESS = {
    "slot_mapping": PAD_SLOT_ID,
    "seq_lens_tensor": 1,
    "block_tables": 0,
    "encoder_seq_lens_tensor": 1,
    "cross_slot_mapping": PAD_SLOT_ID,
    "cross_block_tables": 1,
}
"""Values of padding rows: they write to no slot and read one key, in a block that exists."""


@dataclass(frozen=True)
class DecodeBatch:
    """A batch of decodes.

    Args:
        lens: The number of tokens of each sequence.
        width: The width of the block table.
        cross_width: The width of the encoders' block table.
    """

    lens: tuple[int, ...]
    width: int
    cross_width: int = 1

    def metadata(
        self, device: torch.device, has_encoder: bool
    ) -> SequenceAttentionMetadata:
        """Return the metadata of the batch, with different numbers in every field."""
        reqs = len(self.lens)
        crossed: dict[str, Any] = {
            "encoder_seq_lens": [length // 2 + 1 for length in self.lens],
            "encoder_seq_lens_tensor": counts(
                [length // 2 + 1 for length in self.lens], device
            ),
            "max_encoder_seq_len": max(self.lens) // 2 + 1,
            "num_encoder_tokens": 0,
            "cross_slot_mapping": torch.zeros(0, dtype=torch.int64, device=device),
            "cross_block_tables": counts(
                range(80_000, 80_000 + reqs * self.cross_width), device
            ).view(reqs, self.cross_width),
        }
        return SequenceAttentionMetadata(
            num_decode_tokens=reqs,
            slot_mapping=torch.tensor(
                [100 * length + req for req, length in enumerate(self.lens)],
                device=device,
            ),
            seq_lens_tensor=counts(self.lens, device),
            max_decode_seq_len=max(self.lens),
            block_tables=counts(range(90_000, 90_000 + reqs * self.width), device).view(
                reqs, self.width
            ),
            **(crossed if has_encoder else {}),
        )

    def refilled(self, name: str, size: int, width: int) -> Tensor:
        """Return the expected contents of a buffer of that size after a refill."""
        source = getattr(self.metadata(torch.device("cpu"), True), name)
        shape = (size, width) if source.dim() == 2 else (size,)
        shape = (0,) if name == "cross_slot_mapping" else shape
        right = torch.full(shape, HARMLESS[name], dtype=source.dtype)
        for row, value in enumerate(source.tolist()):
            for column, number in enumerate(value if source.dim() == 2 else [value]):
                if source.dim() == 2:
                    right[row, column] = number
                else:
                    right[row] = number
        return right


@dataclass(frozen=True)
class GraphHistory:
    """Captured steps, and the batches that are replayed in them.

    Args:
        sizes: The number of requests of each captured step, in the order of capture.
        max_blocks: The width of the block tables.
        has_encoder: Whether the steps also read an encoder's keys.
        batches: The batches, in the order of their replays.
    """

    sizes: tuple[int, ...]
    max_blocks: int
    has_encoder: bool
    batches: tuple[DecodeBatch, ...]


@st.composite
def histories(draw: st.DrawFn) -> GraphHistory:
    """Return batches that fill a step, have one request, or follow longer batches."""
    pick = Random(draw(st.integers(0, 2**20)))
    sizes = pick.sample(range(1, 8), pick.choice([1, 2, 3]))
    most, width = max(sizes), pick.choice([1, 2, 4])
    made = []
    for _ in range(pick.choice([1, 3, 4])):
        reqs = pick.choice([most, 1, pick.randint(1, most), pick.choice(sizes)])
        made.append(
            DecodeBatch(
                tuple(pick.choice([1, LONGEST, 5]) for _ in range(reqs)),
                pick.choice([width, 1, pick.randint(0, width)]),
                pick.choice([width, 1]),
            )
        )
    return GraphHistory(tuple(sizes), width, pick.choice([True, False]), tuple(made))


def names_of(history: GraphHistory) -> tuple[str, ...]:
    """Return the fields that a captured step reads."""
    return tuple(HARMLESS)[: 6 if history.has_encoder else 3]


def mixed(
    sizes_run: list[int], metadata: SequenceAttentionMetadata, x: Tensor
) -> Tensor:
    """Return a result that depends on all inputs of a step; record its request count."""
    sizes_run.append(metadata.num_decode_tokens)
    assert metadata.seq_lens_tensor is not None and metadata.block_tables is not None
    found = x * metadata.seq_lens_tensor[:, None] + metadata.slot_mapping[:, None]
    if metadata.cross_block_tables is not None:
        found = found + metadata.cross_block_tables.sum(1)[:, None]
    return found + 7 * metadata.block_tables.sum(1)[:, None]

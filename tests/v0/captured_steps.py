"""Which captured steps are hard?

A layer that writes and attends, whose cache is NaN wherever no sequence lies, and buffers full of
ids and lengths that nothing has.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from pagetwin.conformance.cases.batches import NAN, BatchPlan, BatchTensors
from pagetwin.conformance.checks.dense import judge_attention
from pagetwin.contract.v0.graph_classes import GraphInputBuffers
from pagetwin.contract.v0.sequence_classes import SequenceAttentionMetadata
from support.twins import Twin
from torch import Tensor

GARBAGE = 10**6
LONGEST = 24


def int32(values: Any, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_state(
    twin: Twin, encoder: bool = False, max_blocks: int = 6, device: Any = "cpu"
) -> Any:
    return twin.CommonAttentionState(max_blocks, LONGEST, device, encoder)


def decodes(
    seq_lens: list[int],
    tables: list[list[int]],
    slots: list[int],
    encoder: tuple[list[int], list[list[int]]] | None = None,
    device: torch.device | str = "cpu",
    **changes: Any,
) -> SequenceAttentionMetadata:
    """Return the metadata of some decodes, written down by hand."""
    reqs = len(seq_lens)
    values: dict[str, Any] = {
        "num_prefills": 0,
        "num_prefill_tokens": 0,
        "num_decode_tokens": reqs,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=device),
        "multi_modal_placeholder_index_maps": None,
        "enable_kv_scales_calculation": False,
        "seq_lens_tensor": int32(seq_lens, device),
        "max_decode_seq_len": max(seq_lens, default=0),
        "block_tables": int32(tables, device),
    }
    if encoder is not None:
        values["encoder_seq_lens_tensor"] = int32(encoder[0], device)
        values["max_encoder_seq_len"] = max(encoder[0])
        values["cross_slot_mapping"] = torch.empty(0, dtype=torch.int64, device=device)
        values["cross_block_tables"] = int32(encoder[1], device)
    return SequenceAttentionMetadata(**(values | changes))


def poison(buffers: GraphInputBuffers) -> None:
    for buffer in buffers.present().values():
        buffer.fill_(GARBAGE)


def tensors(metadata: SequenceAttentionMetadata) -> dict[str, Tensor]:
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass
class CapturedLayer:
    """A cache, and a step that writes the new tokens to it and attends.

    Args:
        twin: whose operations it runs.
        device: where.
        max_blocks: of the longest sequence.
        crossed: attend through the encoder's lengths and tables instead, and write nothing.
    """

    twin: Twin
    device: torch.device
    dtype: torch.dtype = torch.float32
    block_size: int = 4
    max_blocks: int = 6
    num_blocks: int = 64
    kv_heads: int = 2
    group: int = 2
    head_size: int = 16
    crossed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        shape = (2, self.num_blocks, self.block_size, self.kv_heads, self.head_size)
        self.cache = torch.full(shape, NAN, dtype=self.dtype, device=self.device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def inputs(self, reqs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of a batch of decodes."""
        query = self.random(reqs, self.kv_heads * self.group, self.head_size)
        key, value = self.random(2, reqs, self.kv_heads, self.head_size)
        return query, key, value

    def step(
        self,
        metadata: SequenceAttentionMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        lens, tables = metadata.seq_lens_tensor, metadata.block_tables
        longest = metadata.max_decode_seq_len
        if self.crossed:
            lens = metadata.encoder_seq_lens_tensor
            tables = metadata.cross_block_tables
            longest = metadata.max_encoder_seq_len
        else:
            self.twin.raw.reshape_and_cache(
                key, value, self.cache[0], self.cache[1], metadata.slot_mapping
            )
        return self.twin.raw.paged_attention(
            query,
            self.cache[0],
            self.cache[1],
            tables,
            metadata.query_start_loc,
            lens,
            metadata.max_query_len,
            longest,
        )

    def batch(self, seq_lens: list[int]) -> SequenceAttentionMetadata:
        """Fill a fresh cache with sequences and return the step that brings their last tokens.

        Everything else in the cache is NaN, block 0 and 1, which padding rows see, included.
        """
        self.cache.fill_(NAN)
        free = (
            torch.randperm(self.num_blocks - 2, generator=self.generator) + 2
        ).tolist()
        counts = [-(-seq_len // self.block_size) for seq_len in seq_lens]
        rows = [[free.pop() for _ in range(count)] for count in counts]
        slots = []
        for row, seq_len in zip(rows, seq_lens, strict=True):
            written = seq_len if self.crossed else seq_len - 1
            for position in range(written):
                block_id, offset = (
                    row[position // self.block_size],
                    position % self.block_size,
                )
                self.cache[:, block_id, offset] = self.random(
                    2, self.kv_heads, self.head_size
                )
            last = seq_len - 1
            slots.append(
                row[last // self.block_size] * self.block_size + last % self.block_size
            )
        width = max(counts)
        # past a row's end is an id that no cache has
        tables = [row + [GARBAGE] * (width - len(row)) for row in rows]
        encoder = (seq_lens, tables) if self.crossed else None
        if self.crossed:
            # the decoder's own numbers are of no use here, but must be there
            return decodes(
                [1] * len(rows), [[0]] * len(rows), slots, encoder, self.device
            )
        return decodes(seq_lens, tables, slots, device=self.device)

    def judge(
        self,
        metadata: SequenceAttentionMetadata,
        query: Tensor,
        out: Tensor,
        reference: Twin,
    ) -> None:
        """Assert that an output is right for the sequences that the cache holds now."""
        lens = metadata.seq_lens_tensor
        tables = metadata.block_tables
        if self.crossed:
            lens, tables = metadata.encoder_seq_lens_tensor, metadata.cross_block_tables
        reqs = lens.shape[0]
        batch = BatchTensors(
            plan=BatchPlan(
                (1,) * reqs, tuple(lens.tolist()), self.block_size, dtype=self.dtype
            ),
            query=query,
            key_cache=self.cache[0],
            value_cache=self.cache[1],
            block_table=tables,
            query_start_loc=int32(range(reqs + 1), self.device),
            seq_lens=lens,
            max_query_len=1,
            max_seq_len=int(lens.max()),
            rows=tables.tolist(),
        )
        verdict, _ = judge_attention(batch, out, reference)
        assert verdict.ok, verdict

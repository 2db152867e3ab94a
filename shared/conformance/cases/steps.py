"""Steps for the metadata laws: requests of a step, their metadata, and the expected values.

A step consists of a few small numbers, so that a failing example can be read. Its blocks are
scattered, some are shared between requests, and some rows are longer than needed. Past the end of
every row there is garbage. The expected metadata is computed here token by token, and so are the
slots of the keys to which each new token attends.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from random import Random
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ...contract.metadata_classes import CommonAttentionMetadata
from .batches import table_of_rows

Case = TypeVar("Case")
MOST_LOGITS, LONGEST_ENCODER = 66_000, 160_000
"""Maxima of `whole_step`, larger than what they bound."""
FEW_IDS = 2**14
"""Block ids that are drawn one by one."""


class Runs(tuple[Any, ...]):
    """A tuple of many values, made of and shown as runs of equal ones: (value, count).

    Example:
        `Runs((1, 3), (7, 1))` equals (1, 1, 1, 7).
    """

    def __new__(cls, *runs: tuple[Any, int]) -> "Runs":
        """Return the values of all runs."""
        return super().__new__(cls, [value for value, n in runs for _ in range(n)])

    def __repr__(self) -> str:
        runs = [(value, len(list(own))) for value, own in groupby(self)]
        return f"Runs({', '.join(map(repr, runs))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, tuple((value, 1) for value in self)


@dataclass(frozen=True)
class Requests:
    """The requests of a step in small numbers.

    Args:
        new, computed: New tokens, and tokens in the cache, of each request.
        block_size: Slots per block.
        seed: Seed of the block ids, and of the metadata fields other than lengths.
    """

    new: tuple[int, ...]
    computed: tuple[int, ...]
    block_size: int = 4
    seed: int = 0

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence."""
        return [a + b for a, b in zip(self.new, self.computed, strict=True)]

    @property
    def starts(self) -> list[int]:
        """The first row of each request's new tokens, and the total."""
        return [0, *accumulate(self.new)]

    def owners(self) -> list[int]:
        """Return the request of every new token."""
        return [req for req, count in enumerate(self.new) for _ in range(count)]

    def positions(self) -> list[int]:
        """Return the position of every new token in its sequence."""
        return [
            old + token
            for old, new in zip(self.computed, self.new, strict=True)
            for token in range(new)
        ]

    def rows(self) -> list[list[int]]:
        """Return each request's block ids; some have one more than they need."""
        return list(map(list, _rows_of(self)))

    def _draw_rows(self) -> list[list[int]]:
        pick = Random(self.seed)
        count = sum(self.seq_lens) + 2 * len(self.new)
        if count < FEW_IDS:
            ids = pick.sample(range(1, 2**20), count)
        else:  # an odd factor permutes the numbers below a power of two
            ids = [index * 300_007 % 2**20 for index in range(1, count + 1)]
        if ids and pick.random() < 0.5:  # block 0 is a block like any other
            ids[-pick.randint(1, min(3, len(ids)))] = 0
        rows: list[list[int]] = []
        for seq_len in self.seq_lens:
            count = -(-seq_len // self.block_size) + pick.choice([0, 0, 1])
            row = [ids.pop() for _ in range(count)]
            if rows and len(row) > 1 and len(rows[0]) > 1 and pick.random() < 0.3:
                row[0] = rows[0][0]
            rows.append(row)
        return rows

    def slot(self, req: int, position: int) -> int:
        """Return the slot of the key at a position of a request."""
        block_id = self.rows()[req][position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def slots(self) -> list[int]:
        """Return the slot of every new token."""
        rows, size = self.rows(), self.block_size
        return [
            rows[req][position // size] * size + position % size
            for req, position in zip(self.owners(), self.positions(), strict=True)
        ]

    def seen(self, chunk: int | None = None) -> list[list[int]]:
        """Return the slots of the keys in the causal visible range of each new token.

        Args:
            chunk: Optional. Positions per chunk; only keys of the token's own chunk are visible.
                If None, all keys up to the token are visible.
        """
        rows, size = self.rows(), self.block_size
        found = []
        for req, last in zip(self.owners(), self.positions(), strict=True):
            first = 0 if chunk is None else last // chunk * chunk
            found.append(
                [
                    rows[req][position // size] * size + position % size
                    for position in range(first, last + 1)
                ]
            )
        return found


MANY = Requests(Runs((1, 298), (300, 1), (1, 1)), Runs((3, 299), (270, 1)))
"""300 requests, one of them with 300 new tokens: no number of the step fits eight bits."""
LONG = Requests((1, 2), (65_600, 70_000), 16)
"""Sequences whose lengths do not fit 16 bits, with few new tokens."""
PROMPT = Requests((65_600, 1), (300, 3), 16)
"""More new tokens than fit 16 bits. What compares all pairs of tokens takes too long."""
CROWD = Requests(Runs((0, 65_599), (2, 1)), Runs((0, 65_599), (3, 1)), 2)
"""More requests than fit 16 bits. The last one has tokens."""


@lru_cache(maxsize=8)
def _rows_of(step: Requests) -> list[list[int]]:
    return step._draw_rows()


def draw_requests(pick: Random, most: int = 4, fewest: int = 0) -> Requests:
    """Return requests whose lengths are on both sides of block edges, including 0 and 1."""
    size = pick.choice([1, 2, 3, 4, 4, 5, 16])
    edges = [0, 1, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size - 1]
    reqs = pick.choice(range(fewest, most + 1))
    # numbers that do not fit eight bits
    large = pick.choice([255, 256, 257, 300]) if pick.random() < 0.1 else 0
    return Requests(
        tuple(pick.choice([*edges, 7, large]) for _ in range(reqs)),
        tuple(pick.choice([*edges, pick.randint(0, 20), large]) for _ in range(reqs)),
        size,
        pick.randrange(1000),
    )


@st.composite
def requests(draw: st.DrawFn, most: int = 4, fewest: int = 0) -> Requests:
    """Return the requests of a step, all derived from one seed."""
    return draw_requests(Random(draw(st.integers(0, 2**20))), most, fewest)


@st.composite
def several(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> list[Case]:
    """Return many cases at once, for cheap laws; shrinking reduces a failure to few cases."""
    return [draw(cases) for _ in range(draw(st.integers(1, 24)))]


def counts(values: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return numbers as an int32 tensor."""
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def table_of(
    rows: Sequence[Sequence[int]], device: torch.device, spare: int = 1
) -> Tensor:
    """Return rows as one block table, with garbage past the end of each row."""
    width = max(map(len, rows), default=0) + spare
    return table_of_rows(rows, width).to(device)


def bare_step(step: Requests, device: torch.device) -> CommonAttentionMetadata:
    """Return the metadata of a step, built here and not by an implementation."""
    return CommonAttentionMetadata(
        query_start_loc=counts(step.starts, device),
        query_start_loc_cpu=counts(step.starts),
        seq_lens=counts(step.seq_lens, device),
        seq_lens_cpu=counts(step.seq_lens),
        num_computed_tokens_cpu=counts(step.computed),
        num_reqs=len(step.new),
        num_actual_tokens=sum(step.new),
        max_query_len=max(step.new, default=0),
        max_seq_len=max(step.seq_lens, default=0),
        block_table_tensor=table_of(step.rows(), device),
        slot_mapping=torch.tensor(step.slots(), dtype=torch.int64, device=device),
    )


def encoder_lens(reqs: int) -> list[int]:
    """Return the tokens that each request's encoder computes in the step: none, one or two."""
    return [(req + 1) % 3 for req in range(reqs)]


def encoder_slots(step: Requests) -> list[list[int]]:
    """Return the slots of the encoder tokens of each request."""
    lens = encoder_lens(len(step.new))
    return [
        [70_000 + 1000 * req + index for index in range(n)]
        for req, n in enumerate(lens)
    ]


def flags_of(step: Requests, salt: int) -> list[bool]:
    """Return a flag for each request; most steps contain both values."""
    pick = Random(step.seed + salt)
    return [pick.random() < 0.5 for _ in step.new]


def whole_step(
    step: Requests, device: torch.device, without: Collection[str] = ()
) -> CommonAttentionMetadata:
    """Return the metadata of a step with all fields set, without some that are named.

    The optional fields hold different numbers, so that a mistaken field is detected. None of them
    fits 16 bits.
    """
    reqs = len(step.new)
    wanted = logits_of(step)
    lens = encoder_lens(reqs)
    tree = torch.tensor([req % 2 == 0 for req in range(9 * reqs)]).view(reqs, 3, 3)
    fields_beside: dict[str, Any] = {
        "causal": torch.tensor(flags_of(step, 1), dtype=torch.bool, device=device),
        "logits_indices_padded": torch.tensor([*wanted, *_padding(wanted)]),
        "num_logits_indices": len(wanted),
        "max_logits_per_req": MOST_LOGITS,
        "encoder_seq_lens": counts([80_000 + req for req in range(reqs)], device),
        "encoder_seq_lens_cpu": counts([80_000 + req for req in range(reqs)]),
        "max_encoder_seq_len": LONGEST_ENCODER,
        "encoder_query_start_loc": counts([0, *accumulate(lens)], device),
        "encoder_query_start_loc_cpu": counts([0, *accumulate(lens)]),
        "cross_block_table_tensor": counts(
            [100_000 + index for index in range(80 * reqs)], device
        ).view(reqs, 80),
        "cross_slot_mapping": torch.tensor(
            [slot for own in encoder_slots(step) for slot in own],
            dtype=torch.int64,
            device=device,
        ),
        "dcp_local_seq_lens": counts([90_000 + req for req in range(reqs)], device),
        "dcp_local_seq_lens_cpu": counts([90_000 + req for req in range(reqs)]),
        "positions": torch.tensor(
            [110_000 + position for position in step.positions()],
            dtype=torch.int64,
            device=device,
        ),
        "is_prefilling": torch.tensor(flags_of(step, 2), dtype=torch.bool),
        "mm_req_doc_ranges": {req: [(req, req + 70_000)] for req in range(0, reqs, 2)},
        "tree_mask": tree.to(device),
    }
    for name in without:
        del fields_beside[name]
    return bare_step(step, device).replace(**fields_beside)


def _padding(wanted: Sequence[int]) -> list[int]:
    """Return padding for the indices of wanted tokens: repeated tokens and garbage."""
    return [*wanted[:1], 0, *wanted[-1:], 10**6]


def logits_of(step: Requests) -> list[int]:
    """Return the tokens whose logits are wanted: the last ones of each request, or none."""
    pick = Random(step.seed + 3)
    return [
        token
        for begin, end in zip(step.starts[:-1], step.starts[1:], strict=True)
        for token in range(end - pick.randint(0, min(3, end - begin)), end)
    ]


def padded(values: Sequence[int], length: int, value: int = PAD_SLOT_ID) -> list[int]:
    """Return numbers padded to a length."""
    return [*values, *[value] * (length - len(values))]

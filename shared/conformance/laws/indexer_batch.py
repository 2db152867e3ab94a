"""Laws of batches of the indexer: gathered keys, rows per rank, and drafts one by one.

The gathered keys are built as a list of keys with their positions, and every row is compared with
what it may score.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ..candidates.setting import Setting
from ..checks.canaries import kept
from ..checks.expect import expect_rejection, expect_same
from .law import law

CHUNK, SHARD = "build_prefill_chunk_metadata", "balanced_prefill_row_shard"
UNIFORM = "prepare_uniform_decode"


def int32(numbers: Any) -> torch.Tensor:
    """Return numbers on the host."""
    return torch.tensor(numbers, dtype=torch.int32)


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk of prompts.

    Args:
        query_lens, seq_lens: New tokens and tokens of each request of the batch.
        chunk: First request of the chunk, and the end.
        unit: Tokens per key.
        rows: Optional. First row and end of the slice; the end may be None.
        ranks, interleave: Of decode context parallelism.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    chunk: tuple[int, int]
    unit: int = 1
    rows: tuple[int | None, int | None] | None = None
    ranks: int = 1
    interleave: int = 1


CHUNKS = [
    ChunkPlan((3, 2), (5, 2), (0, 2)),
    ChunkPlan((3, 0, 4, 2), (5, 7, 9, 30), (1, 3)),
    ChunkPlan((6, 3, 1), (16, 9, 3), (0, 3), unit=4, rows=(2, 7)),
    ChunkPlan((4, 6, 3), (4, 16, 9), (1, 3), rows=(4, 50)),
    ChunkPlan((6,), (16,), (0, 1), rows=(None, 4)),
    ChunkPlan((6,), (16,), (0, 1), rows=(5, None)),
    ChunkPlan((6,), (16,), (0, 1), rows=(6, 9)),
    ChunkPlan((9, 5), (13, 7), (0, 2), ranks=2, interleave=2),
    ChunkPlan((9, 5), (33, 22), (0, 2), unit=2, rows=(3, 11), ranks=3, interleave=4),
    ChunkPlan((2, 3), (2, 3), (0, 2), unit=4),
    # more new tokens than the sequence has
    ChunkPlan((4, 3), (2, 5), (0, 2), unit=2),
    ChunkPlan((300, 1), (70_000, 9), (0, 2), unit=128, rows=(0, 290)),
]


@law(CHUNK, cases=CHUNKS)
def a_row_scores_the_keys_that_are_complete_at_its_position(
    setting: Setting, plan: ChunkPlan
) -> None:
    """On the rank that stores them. No key at all is None."""
    starts = int32([sum(plan.query_lens[:n]) for n in range(len(plan.query_lens) + 1)])
    lens, (first, end) = int32(plan.seq_lens), plan.chunk
    # a key is stored with the last token of its group
    stored = [
        [
            key * plan.unit // plan.interleave % plan.ranks
            for key in range(seq_len // plan.unit)
        ]
        for seq_len in plan.seq_lens[first:end]
    ]
    rows = [
        (req, plan.seq_lens[first + req] - new + token)
        for req, new in enumerate(plan.query_lens[first:end])
        for token in range(new)
    ]
    begin = (plan.rows or (0, 0))[0] or 0
    chosen = rows[begin : plan.rows[1] if plan.rows else None]
    totals = [
        sum(owners.count(rank) for owners in stored) for rank in range(plan.ranks)
    ]
    for rank in range(plan.ranks):
        with kept(query_start_loc_cpu=starts, seq_lens_cpu=lens):
            found = getattr(setting.candidate, CHUNK)(
                first, end, starts, lens, plan.unit,
                slice(*plan.rows) if plan.rows else None, plan.ranks, rank,
                plan.interleave, setting.device,
            )  # fmt: skip
        if not any(stored):
            expect_same("metadata without keys", found, None)
            continue
        own = [owners.count(rank) for owners in stored]
        ks = [sum(own[:req]) for req, _ in chosen]
        ke = [
            start + stored[req][: max(position + 1, 0) // plan.unit].count(rank)
            for start, (req, position) in zip(ks, chosen, strict=True)
        ]
        counts = [len(owners) for owners in stored]
        token = sum(plan.query_lens[:first]) + min(begin, len(rows))
        right = {
            "cu_seqlen_ks": ks,
            "cu_seqlen_ke": ke,
            "cu_seq_lens": [sum(counts[:req]) for req in range(len(counts) + 1)],
            "token_to_seq": [req for req, count in enumerate(counts) for _ in range(count)],
            "total_seq_lens": sum(counts),
            "max_seqlen_k": max(counts),
            "token_start": token,
            "token_end": token + len(chosen),
            "num_reqs": len(counts),
            "skip_kv_gather": begin > 0,
            "local_cu_seq_lens": [sum(own[:req]) for req in range(len(own) + 1)],
            "local_total_seq_lens": sum(own),
            "max_local_total_seq_lens": max(totals),
        }  # fmt: skip
        for name, value in right.items():
            field = getattr(found, name)
            if isinstance(value, list):
                field, value = field.cpu(), int32(value)
            expect_same(name, field, value)


@dataclass(frozen=True)
class ShardPlan:
    """Rows of prompts for several ranks; the arguments of the operation."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    unit: int
    ranks: int
    min_rows: int = 1


SHARDS = [
    ShardPlan((16,), (16,), 1, 2),
    ShardPlan((100, 0, 50), (900, 4, 50), 4, 3),
    # one share ends at a row
    ShardPlan((4,), (8,), 8, 2),
    ShardPlan((2, 2), (1001, 2), 1, 4),
    # the keys of two ranks end in the same row
    ShardPlan((2, 1, 3), (2, 900, 3), 1, 4),
    ShardPlan((7,), (7,), 1, 7),
    ShardPlan((7,), (7,), 1, 8),
    ShardPlan((5,), (5,), 128, 3),
    ShardPlan((9,), (9,), 1, 1),
    ShardPlan((9,), (9,), 1, 3, min_rows=3),
    ShardPlan((9,), (9,), 1, 3, min_rows=4),
    ShardPlan((300, 2), (66_000, 2), 1, 260),
]


@law(SHARD, cases=SHARDS)
def ranks_score_rows_with_equal_work(setting: Setting, plan: ShardPlan) -> None:
    """A rank takes rows as long as the ranks so far score no more than their share."""
    costs = [
        (seq_len - new + row + 1) // plan.unit
        for new, seq_len in zip(plan.query_lens, plan.seq_lens, strict=True)
        for row in range(new)
    ]
    right: list[int] | None = None
    if plan.ranks > 1 and len(costs) >= plan.min_rows * plan.ranks:
        taken, right = 0, []
        for rank in range(1, plan.ranks):
            end, last = taken + 1, len(costs) - plan.ranks + rank
            while (
                end < last and sum(costs[: end + 1]) * plan.ranks <= sum(costs) * rank
            ):
                end += 1
            right.append(end - taken)
            taken = end
        right.append(len(costs) - taken)
    found = getattr(setting.candidate, SHARD)(
        int32(plan.seq_lens),
        int32(plan.query_lens),
        plan.unit,
        plan.ranks,
        plan.min_rows,
    )
    expect_same("rows", found, right)


@law(UNIFORM, cases=[(1, (5, 0)), (2, (5, 9, 0, 1)), (3, ()), (260, (300,))])
def each_drafted_token_is_a_request_of_its_own(
    setting: Setting, case: tuple[int, tuple[int, ...]]
) -> None:
    """Of the request's blocks, and with the keys up to the token."""
    new, lens = case
    pick = Random(new)
    rows = [[pick.randrange(99) for _ in range(3)] for _ in lens]
    wide = torch.full((len(lens), 4), -9, dtype=torch.int32)
    wide[:, :-1] = int32(rows).view(len(lens), 3)
    wide, seq_lens = wide.to(setting.device), int32(lens).to(setting.device)
    with kept(block_table=wide, seq_lens=seq_lens):
        found = getattr(setting.candidate, UNIFORM)(seq_lens, wide[:, :-1], new)
    keys = [max(n - later, 0) for n in lens for later in reversed(range(new))]
    table = [row for row in rows for _ in range(new)]
    right = int32(keys), int32(table).view(-1, 3), int32([1] * len(keys))
    for name, own, expected in zip(("lens", "table", "new"), found, right, strict=True):
        expect_same(name, own.cpu(), expected)


BAD_BATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "a request past the batch": (CHUNK, {"end_idx": 3}),
    "no request": (CHUNK, {"start_idx": 2}),
    "starts that decrease": (CHUNK, {"query_start_loc_cpu": int32([0, 3, 2])}),
    "a length below 0": (CHUNK, {"seq_lens_cpu": int32([-1, 2])}),
    "a slice with a step": (CHUNK, {"query_slice": slice(0, 4, 2)}),
    "a slice that ends before it starts": (CHUNK, {"query_slice": slice(4, 2)}),
    "a slice from the end": (CHUNK, {"query_slice": slice(-2, None)}),
    "a rank past the last": (CHUNK, {"dcp_rank": 1}),
    "a key on two ranks": (CHUNK, {"dcp_world_size": 2, "compress_ratio": 2}),
    "no tokens per key": (CHUNK, {"compress_ratio": 0}),
    "lengths in 64 bits": (CHUNK, {"seq_lens_cpu": int32([5, 2]).long()}),
    "more new tokens than tokens": (SHARD, {"query_lens_cpu": int32([6])}),
    "a length too many": (SHARD, {"query_lens_cpu": int32([2, 2])}),
    "no ranks": (SHARD, {"tp_size": 0}),
    "no rows": (SHARD, {"min_rows": 0}),
    "no drafts": (UNIFORM, {"max_decode_len": 0}),
    "a row too many": (UNIFORM, {"block_table": int32([[1], [2]])}),
    "a table in 64 bits": (UNIFORM, {"block_table": int32([[1]]).long()}),
}


@law(CHUNK, SHARD, UNIFORM, cases=sorted(BAD_BATCHES), claim="rejects contents")
def impossible_batches_of_the_indexer_are_rejected(setting: Setting, what: str) -> None:
    name, changes = BAD_BATCHES[what]
    given: dict[str, Any] = {
        CHUNK: {
            "start_idx": 0, "end_idx": 2, "query_start_loc_cpu": int32([0, 3, 5]),
            "seq_lens_cpu": int32([5, 2]), "device": setting.device,
        },
        SHARD: {
            "seq_lens_cpu": int32([5]), "query_lens_cpu": int32([4]), "compress_ratio": 1,
            "tp_size": 2,
        },
        UNIFORM: {
            "seq_lens": int32([5]).to(setting.device), "max_decode_len": 2,
            "block_table": int32([[3]]).to(setting.device),
        },
    }[name]  # fmt: skip
    operation = getattr(setting.candidate, name)
    operation(**given)
    changes = {
        key: value.to(setting.device) if key == "block_table" else value
        for key, value in changes.items()
    }
    expect_rejection(what, lambda: operation(**given | changes))

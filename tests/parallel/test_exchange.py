"""Ranks that store into each other's memory, as processes with shared memory.

The interpreter runs the kernel of each rank in a process of its own. Their buffers are in shared
memory that was mapped before the processes were forked, so an address means the same in all.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.optimized import SymmetricRanks
from pagetwin.optimized.parallel.combine import ROW_PADDING, combine_received
from pagetwin.optimized.parallel.kernels.combine_ranks import Partners
from pagetwin.optimized.parallel.kernels.exchange import exchange_kernel
from pagetwin.optimized.parallel.warm_up_ranks import _without_others
from pagetwin.optimized.runtime.launcher import INTERPRETED
from torch import Tensor

PROGRAMS, CAPACITY = 4, 64
WORDS = (64, 37, 12, 1, 50, 64)
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="a GPU of its own per rank: tests/gpu/parallel.py"
)


def shared_zeros(words: int) -> Tensor:
    """Return memory of a rank: two halves of so many words each."""
    zeros = torch.zeros(2 * words, dtype=torch.int64)
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


def run_forked(ranks: int, work: Callable[[int], None]) -> None:
    """Run a function in one process per rank, and raise if one of them fails."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
                os._exit(0)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks


def sent_by(rank: int, number: int, words: int) -> Tensor:
    """Return what a rank sends in one exchange; small integers, which float32 adds exactly."""
    return torch.arange(words, dtype=torch.int32) + 1000 * rank + 7 * number


def exchange_often(rank: int, ranks: int, buffers: list[Tensor], calls: int) -> None:
    """Exchange tensors of each kind, and compare them with what the ranks have sent."""
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    counts = torch.full((PROGRAMS,), calls, dtype=torch.int32)
    late = torch.zeros(ranks, dtype=torch.int32)
    pick = Random(rank)
    for number, words in enumerate(WORDS):
        time.sleep(pick.random() * 0.02)
        kind = ("gather", "all to all", "add")[number % 3]
        size = words if kind == "gather" else ranks * words
        sent = [sent_by(sender, number, size) for sender in range(ranks)]
        if kind == "gather":
            right = torch.cat(sent)
        else:
            parts = torch.stack(
                [words_sent.view(ranks, words)[rank] for words_sent in sent]
            )
            right = parts.flatten() if kind == "all to all" else parts.sum(0).float()
        given = sent[rank].float() if kind == "add" else sent[rank]
        out = torch.zeros_like(right)
        exchange_kernel[(PROGRAMS,)](
            given.view(torch.int32), out, addresses, counts, late, rank, words,
            CAPACITY, 10**6, RANKS=ranks, TO_ALL=kind == "gather", ADDS=kind == "add",
            BLOCK=16,
        )  # fmt: skip
        assert torch.equal(out, right), (kind, words)
        assert not late.any()


@pytest.mark.sample(1)
@needs_interpreter
@pytest.mark.parametrize("calls", [0, 2**30 - 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_receive_what_the_others_have_stored(ranks: int, calls: int) -> None:
    """Also when the counter of the calls starts again."""
    buffers = [shared_zeros(ranks * CAPACITY) for _ in range(ranks)]
    run_forked(
        ranks, partial(exchange_often, ranks=ranks, buffers=buffers, calls=calls)
    )


@needs_interpreter
def test_a_rank_that_does_not_store_is_late() -> None:
    buffers = [shared_zeros(2 * CAPACITY) for _ in range(2)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    late = torch.zeros(2, dtype=torch.int32)
    sent = torch.arange(8, dtype=torch.int32)
    exchange_kernel[(PROGRAMS,)](
        sent, torch.zeros(16, dtype=torch.int32), addresses,
        torch.zeros(PROGRAMS, dtype=torch.int32), late, 0, 8, CAPACITY, 3, RANKS=2,
        TO_ALL=True, ADDS=False, BLOCK=16,
    )  # fmt: skip
    assert late.tolist() == [0, 1]


HEADS, TOKENS, SPLITS, SIZE = 3, 2, 2, 8


def rows_of(rank: int, ranks: int, number: int) -> Tensor:
    """Return the partial results of a rank in one step, some of them empty."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = TOKENS - number % 2
    shape = (ranks, HEADS, SPLITS, tokens, SIZE + ROW_PADDING)
    rows = torch.randn(shape, generator=generator)
    rows[..., SIZE] = rows[..., SIZE].where(rows[..., SIZE] < 1, -torch.inf)
    return rows


def combine(rows: Tensor, rank: int, partners: Partners | None) -> list[Tensor]:
    """Return the combined rows and log-sum-exps of a rank."""
    tokens = rows.shape[3]
    batch: Any = SimpleNamespace(
        splits=SPLITS, is_token=torch.ones(tokens, dtype=torch.bool)
    )
    out, lse = torch.zeros(tokens, HEADS, SIZE), torch.zeros(HEADS, tokens)
    order = torch.arange(len(rows) * SPLITS).flip(0)
    sinks = torch.arange(HEADS) + float(rank)
    combine_received(rows, order, batch, sinks, out, lse, partners)
    return [out, lse]


def partners_of(
    rank: int, buffers: list[Tensor], calls: int = 0, tries: int = 10**6
) -> Partners:
    """Return the partners of a rank whose memory is one of the buffers."""
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    counts, arrived = torch.tensor([[calls], [0]], dtype=torch.int32)
    late = torch.zeros(len(buffers), dtype=torch.int32)
    half = len(buffers[0]) // 2
    return Partners(addresses, counts, arrived, late, rank, tries, half)


def combine_often(rank: int, ranks: int, buffers: list[Tensor], calls: int) -> None:
    """Combine partial results of several steps, of other numbers of tokens."""
    partners, pick = partners_of(rank, buffers, calls), Random(rank)
    for number in range(6):
        time.sleep(pick.random() * 0.02)
        every = [rows_of(other, ranks, number) for other in range(ranks)]
        found = combine(every[rank], rank, partners)
        received = torch.stack([rows[rank] for rows in every])
        for result, right in zip(found, combine(received, rank, None), strict=True):
            assert torch.equal(result, right), number
    assert not partners.late.any() and not partners.arrived.any()


@pytest.mark.sample(1)
@needs_interpreter
@pytest.mark.parametrize("calls", [0, 2**30 - 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_exchange_what_they_combine(ranks: int, calls: int) -> None:
    """Bit for bit the result of rows that were exchanged before."""
    words = rows_of(0, ranks, 0).numel()
    buffers = [shared_zeros(words) for _ in range(ranks)]
    run_forked(ranks, partial(combine_often, ranks=ranks, buffers=buffers, calls=calls))


@needs_interpreter
def test_a_rank_that_sends_no_partial_results_is_late() -> None:
    rows = rows_of(1, 2, 0)
    buffers = [shared_zeros(rows.numel()) for _ in range(2)]
    partners = partners_of(1, buffers, tries=3)
    combine(rows, 1, partners)
    assert partners.late.tolist() == [1, 0]
    assert int(partners.calls) == 1 and int(partners.arrived) == 0
    # the second half is that of odd calls
    sent = buffers[0][rows.numel() :].view(rows.shape)[1, ..., : SIZE + 1]
    assert torch.equal(sent >> 32, torch.full_like(sent, 2))
    assert torch.equal(sent.int().view(torch.float32), rows[0, ..., : SIZE + 1])


def test_a_single_rank_needs_no_symmetric_memory() -> None:
    ranks = SymmetricRanks(device="cpu")
    tensor = torch.arange(4.0)
    assert torch.equal(ranks.all_gather(tensor), tensor[None])
    ranks.wait()


def test_a_capacity_that_is_not_a_multiple_of_16_bytes_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"capacity = 100: expected a positive"):
        SymmetricRanks(capacity=100, device="cpu")


@needs_interpreter
def test_a_warm_up_exchanges_nothing_and_does_not_wait() -> None:
    """It writes to memory of its own alone, and the group has no late rank."""
    rows = rows_of(1, 2, 0)
    buffers = [shared_zeros(rows.numel()) for _ in range(2)]
    partners = partners_of(1, buffers)
    alone, memory = _without_others(partners, rows.numel())
    combine(rows, 1, alone)
    assert memory.any() and not any(buffer.any() for buffer in buffers)
    assert not partners.late.any() and not partners.calls.any()

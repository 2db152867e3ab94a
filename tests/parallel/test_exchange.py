"""The exchange kernel: ranks that store into each other's memory, as processes with shared memory.

The interpreter runs the kernel of each rank in a process of its own. Their buffers are in shared
memory that was mapped before the processes were forked, so an address means the same in all.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
from pagetwin.optimized import SymmetricRanks
from pagetwin.optimized.parallel.kernels.exchange import exchange_kernel
from pagetwin.optimized.runtime.launcher import INTERPRETED
from torch import Tensor

PROGRAMS, CAPACITY = 4, 64
WORDS = (64, 37, 12, 1, 50, 64)
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="a GPU of its own per rank: tests/gpu/parallel.py"
)


def shared_zeros(*shape: int) -> Tensor:
    zeros = torch.zeros(shape, dtype=torch.int32)
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
    buffers = [
        shared_zeros(ranks * (PROGRAMS + 2 * CAPACITY)).fill_(calls)
        for _ in range(ranks)
    ]
    run_forked(
        ranks, partial(exchange_often, ranks=ranks, buffers=buffers, calls=calls)
    )


@needs_interpreter
def test_a_rank_that_does_not_store_is_late() -> None:
    buffers = [shared_zeros(2 * (PROGRAMS + 2 * CAPACITY)) for _ in range(2)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    late = torch.zeros(2, dtype=torch.int32)
    sent = torch.arange(8, dtype=torch.int32)
    exchange_kernel[(PROGRAMS,)](
        sent, torch.zeros(16, dtype=torch.int32), addresses,
        torch.zeros(PROGRAMS, dtype=torch.int32), late, 0, 8, CAPACITY, 3, RANKS=2,
        TO_ALL=True, ADDS=False, BLOCK=16,
    )  # fmt: skip
    assert late.tolist() == [0, 1]


def test_a_single_rank_needs_no_symmetric_memory() -> None:
    ranks = SymmetricRanks(device="cpu")
    tensor = torch.arange(4.0)
    assert torch.equal(ranks.all_gather(tensor), tensor[None])
    ranks.wait()


def test_a_capacity_that_is_not_a_multiple_of_16_bytes_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"capacity = 100: expected a positive"):
        SymmetricRanks(capacity=100, device="cpu")

"""Buffers of a parallel step, which captured CUDA graphs read and write at their addresses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagetwin.conformance.candidates.calls.ranks import run_ranks
from pagetwin.contract.operations import load_implementation
from pagetwin.engine.rank_group import RankGroup
from pagetwin.optimized.parallel.rank_buffers import RankBuffers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

LIKE = torch.zeros(0)


def memory_of(tensor: Tensor) -> Any:
    """Return a reference to the memory of a tensor that does not keep it."""
    make: Any = StorageWeakRef
    return make(tensor.untyped_storage())


def test_a_step_has_the_same_buffer_after_a_larger_one() -> None:
    """The larger step replaced the buffer, so it had another address and no one kept the first."""
    buffers = RankBuffers()
    addresses = []
    for tokens in (4, 9, 1000, 3, 4, 9, 1000):
        addresses.append(buffers.get("sent", (tokens, 2), LIKE).data_ptr())
    assert addresses[4:] == addresses[:3]
    assert addresses[3] == addresses[0]


def test_a_larger_step_frees_no_buffer() -> None:
    buffers = RankBuffers()
    small = memory_of(buffers.get("sent", (4, 2), LIKE))
    buffers.get("sent", (1000, 2), LIKE)
    buffers.get("sent", (4, 2), LIKE, torch.float16)
    assert not small.expired()


def test_buffers_of_growing_steps_have_at_most_four_times_the_largest_step() -> None:
    buffers = RankBuffers()
    shapes = [(tokens, 3) for tokens in range(1, 700)]
    kept = {}
    for shape in shapes:
        storage = buffers.get("sent", shape, LIKE).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
    assert sum(kept.values()) < 4 * 699 * 3 * 4


def test_buffers_of_two_names_or_dtypes_do_not_overlap() -> None:
    buffers = RankBuffers()
    views = [
        buffers.get(name, (5, 3), LIKE, dtype)
        for name in ("sent", "received")
        for dtype in (torch.float32, torch.int32)
    ]
    for number, view in enumerate(views):
        view.fill_(number)
    assert [{*view.flatten().tolist()} for view in views] == [{0}, {1}, {2}, {3}]


@pytest.mark.sample(1)
@pytest.mark.parametrize("operation", ["PrefillContextParallel", "RingContextParallel"])
@pytest.mark.usefixtures("unchecked_values")
def test_a_prefill_exchanges_the_same_memory_after_a_larger_one(
    operation: str, device: torch.device
) -> None:
    """A graph that was captured before the larger one would send and receive freed memory."""
    make = getattr(load_implementation("optimized"), operation)

    def work(ranks: RankGroup) -> None:
        exchanged: list[Tensor] = []
        gather, shift = ranks.all_gather, ranks.start_shift

        def all_gather(tensor: Tensor, out: Tensor, waits: bool) -> Tensor:
            exchanged.extend((tensor, out))
            return gather(tensor, out, waits)

        def start_shift(
            tensor: Tensor, out: Tensor, waits: bool
        ) -> Callable[[], Tensor]:
            exchanged.extend((tensor, out))
            return shift(tensor, out, waits)

        prefill = make(ranks, block_size=4, device=device)
        ranks.all_gather, ranks.start_shift = all_gather, start_shift  # type: ignore[method-assign,assignment]

        def attend(length: int) -> tuple[list[int], list[Any]]:
            share = prefill.prepare([length])
            rows = torch.ones(len(share.tokens), 1, 16, device=device)
            prefill.attend(rows, rows, rows, share)
            found = [memory_of(tensor) for tensor in exchanged]
            addresses = [tensor.data_ptr() for tensor in exchanged]
            exchanged.clear()
            return addresses, found

        addresses, memory = attend(9)
        attend(70)
        assert len(memory) == 2
        assert not any(reference.expired() for reference in memory)
        assert attend(9)[0] == addresses

    run_ranks(2, work, device=device)

"""Memory that outlives a call is in no memory pool of the caller."""

from collections.abc import Callable, Iterator

import pytest
import torch
from pagetwin.engine.kept_memory import make_kept
from pagetwin.integrations.flash_attn import calls
from pagetwin.optimized.parallel.rank_buffers import RankBuffers
from pagetwin.optimized.runtime import workspace
from torch import Tensor

NEEDS_GPU = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs memory pools"),
]
GPU = torch.device("cuda")


def workspace_of_a_new_stream() -> Iterator[Tensor]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield from workspace.find_workspace(GPU, 8, 8)
        yield from workspace.find_workspace(GPU, 8, workspace.MIN_KEPT_NUMBERS + 1)
        workspace._arenas.clear()
        workspace._streams.clear()
        workspace.find_workspace(GPU, 8, 8)
        yield workspace._arenas[torch.cuda.current_device()]._free


def constants() -> Iterator[Tensor]:
    for kind in ("starts", "rows", "filled"):
        yield calls._constant(kind, 3, 4099, GPU)


def buffers_of_ranks() -> Iterator[Tensor]:
    yield RankBuffers().get("sent", (5, 3), torch.zeros(0, device=GPU))


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(kept, marks=NEEDS_GPU, id=kept.__name__)
        for kept in (workspace_of_a_new_stream, constants, buffers_of_ranks)
    ],
)
def test_a_call_in_a_pool_keeps_nothing_there(
    kept: Callable[[], Iterator[Tensor]],
) -> None:
    """A first call in the warm-up of graphs made constants that later replays overwrote."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        seen = torch.empty(1 << 21, device=GPU)
        found = list(kept())
    segments = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in pool.snapshot()
    ]

    def is_inside(tensor: Tensor) -> bool:
        return any(begin <= tensor.data_ptr() < end for begin, end in segments)

    assert is_inside(seen)
    assert found
    assert not any(is_inside(tensor) for tensor in found)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs memory pools")
def test_what_is_made_has_its_contents_and_raises_what_was_raised() -> None:
    (made,) = make_kept(lambda: (torch.arange(3, device=GPU),), GPU)
    assert made.tolist() == [0, 1, 2]

    def fail() -> tuple[Tensor, ...]:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        make_kept(fail, GPU)


def test_on_a_cpu_it_is_made_by_the_caller() -> None:
    made = (torch.arange(3),)
    assert make_kept(lambda: made, made[0].device) is made

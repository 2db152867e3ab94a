"""The peak memory of a call: what torch allocates on a GPU, or on the host."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pagetwin.optimized import release_workspace
from torch.profiler import ProfilerActivity, profile


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors that exist during a call and did not before it.

    A workspace that an earlier call has left is released first, so it counts.
    """
    if device.type != "cuda":
        with _profiled() as found:
            run()
        return found[0]
    # torch keeps a workspace of cuBLAS, 32 MiB on Hopper, from the first product on
    one = torch.ones(1, 16, 16, dtype=torch.bfloat16, device=device)
    torch.bmm(one, one)
    release_workspace()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del results
    return peak


@contextmanager
def _profiled() -> Iterator[list[int]]:
    """Yield a list that then holds the peak of what torch has allocated on the host.

    The interpreter leaves tensors in cycles of references, so garbage is collected often.
    """
    found = [0]
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(500, 5, 5)
    try:
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            yield found
    finally:
        gc.set_threshold(*thresholds)
    assert profiler.profiler is not None and profiler.profiler.kineto_results
    events = profiler.profiler.kineto_results.events()
    held = 0
    for event in sorted(
        (event for event in events if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    ):
        held += event.nbytes()
        found[0] = max(found[0], held)

"""Workspace of split work: arrival counters, and memory for partial results.

Programs that share a request's keys count how many of them are done, and the last one sets the
counter back to 0. So a counter is zeroed once and serves one launch after another, as long as no
two launches that may run at the same time share it.

**Streams.** Each stream has a workspace of its own: the launches of one stream run in order. The
tensors are allocated on the stream that uses them. Torch's caching allocator gives a freed block
only to later work of the same stream. So a workspace may be dropped while kernels still use it,
from any thread, without waiting for the device.

**CUDA graphs.** A captured launch keeps the addresses of its workspace until the graph is
destroyed, and a graph may be replayed on any stream, beside other graphs. Partial results are
allocated during the capture, so they belong to the graph's memory pool. Counters have to be 0
before the first replay. They come from an arena outside the pool, which is zeroed once. The
launches that one stream issues during one capture run in order in every replay, and replays of one
graph run in order, so these launches share one set of counters. CUDA reports when a captured graph
has been destroyed and its last replay has finished (`graph_lifetime.py`), and then its counters
return to the arena.

**Bounds.** A stream keeps at most MAX_KEPT_NUMBERS. A launch that needs more gets a tensor of its
own, which returns to torch's allocator after the launch. The workspaces of at most MAX_STREAMS
streams are kept. So a stream that no longer exists costs memory only until others have replaced it.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from . import graph_lifetime
from .launcher import current_stream, is_capturing, next_power_of_2

CACHE_LINE = 32
"""Counters per cache line of 128 bytes. Launches do not share a line."""
NUM_COUNTERS = 1 << 12
"""Counters that a stream keeps, 16 KiB. A launch needs one per program and kv head at most."""
MIN_KEPT_NUMBERS = 1 << 20
"""Numbers that a stream keeps at first, 4 MiB."""
MAX_KEPT_NUMBERS = 1 << 23
"""Numbers that a stream keeps at most, 32 MiB. Decodes of an H200 with heads of 128 need 4.4 MiB
(16 rows) to 17.5 MiB (64 rows); splits of batch-invariant rows may need 256 MiB."""
MAX_STREAMS = 8
"""Streams whose workspaces are kept."""
ARENA_COUNTERS = 1 << 18
"""Counters of a device for captured launches, 1 MiB: about 900 graphs with 264 counters each."""


@dataclass
class StreamWorkspace:
    """The workspace of one stream.

    Args:
        counters: [NUM_COUNTERS] int32, all 0 between launches.
        numbers: float32 of any content.
    """

    counters: Tensor
    numbers: Tensor


class Arena:
    """Zeroed counters of a device, handed out in ranges to captured graphs.

    Args:
        counters: [n] int32, all 0.
    """

    def __init__(self, counters: Tensor) -> None:
        self._counters = counters
        self._free: list[tuple[int, int]] = [(0, len(counters))]

    def take(self, size: int) -> tuple[Tensor, tuple[int, int]] | None:
        """Return `size` counters and their range; None if no free range is long enough."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                taken = (begin, begin + size)
                self._free[index : index + 1] = (
                    [(begin + size, end)] if begin + size < end else []
                )
                return self._counters[begin : begin + size], taken
        return None

    def give_back(self, taken: tuple[int, int]) -> None:
        """Make a range available again. Its counters must be 0, as every launch leaves them."""
        ranges = sorted([*self._free, taken])
        merged = [ranges[0]]
        for begin, end in ranges[1:]:
            if begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged

    @property
    def free_counters(self) -> int:
        """Number of counters that no graph holds."""
        return sum(end - begin for begin, end in self._free)


_streams: dict[tuple[int, int], StreamWorkspace] = {}
"""By device and stream, the one that was created first at the front."""
_arenas: dict[int, Arena] = {}
_captures: dict[tuple[int, int], tuple[int, Tensor]] = {}
"""By device and stream: the newest capture and its counters."""
_lock = threading.Lock()


def find_workspace(
    device: torch.device, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return a launch's workspace on the current stream.

    Args:
        device: the device of the launch.
        counters: number of int32 counters, which are 0 when the launch begins.
        numbers: number of float32 numbers, of any content.

    Returns:
        counters and numbers, at least as many as requested.
    """
    if device.type != "cuda":
        return _allocate(device, counters, numbers)
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = current_stream(index)
    if is_capturing():
        return _find_captured(device, index, stream, counters, numbers)
    kept = _streams.get((index, stream))
    if (
        kept is None
        or kept.numbers.shape[0] < numbers
        or kept.counters.shape[0] < counters
    ):
        return _grow(device, index, stream, counters, numbers)
    return kept.counters, kept.numbers


def release_workspace() -> None:
    """Give the cached workspace of all streams back to torch's allocator.

    Kernels that are still running are not disturbed, and the next launch on a stream allocates a
    new workspace. Counters of captured graphs are kept until the graphs are destroyed. To return
    the memory to the device, call `torch.cuda.empty_cache()` afterwards.

    Example:
        >>> import torch
        >>> from pagetwin.optimized import release_workspace
        >>> release_workspace()
        >>> if torch.cuda.is_available():
        ...     torch.cuda.empty_cache()
    """
    with _lock:
        _streams.clear()
        _reclaim()


def _allocate(
    device: torch.device, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return new tensors on the current stream: zeros, and numbers of any content."""
    return (
        torch.zeros(counters, dtype=torch.int32, device=device),
        torch.empty(numbers, dtype=torch.float32, device=device),
    )


def _grow(
    device: torch.device, index: int, stream: int, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return a workspace for a launch that needs more than its stream keeps."""
    with _lock:
        if index not in _arenas:
            # allocated here, because a capture cannot allocate outside its pool
            _arenas[index] = Arena(_allocate(device, ARENA_COUNTERS, 0)[0])
            # a graph may be replayed on another stream
            torch.cuda.synchronize(device)
        _reclaim()
        kept = _streams.get((index, stream))
        if kept is None:
            while len(_streams) >= MAX_STREAMS:
                del _streams[next(iter(_streams))]
            kept = StreamWorkspace(*_allocate(device, NUM_COUNTERS, MIN_KEPT_NUMBERS))
            _streams[index, stream] = kept
        if kept.numbers.shape[0] < numbers <= MAX_KEPT_NUMBERS:
            kept.numbers = _allocate(device, 0, next_power_of_2(numbers))[1]
        found = kept.counters, kept.numbers
    # what is too large to be kept returns to torch's allocator after the launch
    if counters > NUM_COUNTERS:
        found = _allocate(device, counters, 0)[0], found[1]
    if numbers > MAX_KEPT_NUMBERS:
        found = found[0], _allocate(device, 0, numbers)[1]
    return found


def _find_captured(
    device: torch.device, index: int, stream: int, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return the workspace of a launch that a CUDA graph captures."""
    partials = _allocate(device, 0, numbers)[1]
    capture = graph_lifetime.find_capture(stream)
    with _lock:
        known = _captures.get((index, stream))
        if (
            known is not None
            and capture is not None
            and known[0] == capture.id
            and len(known[1]) >= counters
        ):
            return known[1], partials
        _reclaim()
        arena = _arenas.get(index)
        size = -(-counters // CACHE_LINE) * CACHE_LINE
        taken = None if arena is None else arena.take(size)
        if arena is not None and taken is not None:
            if capture is not None:
                _captures[index, stream] = capture.id, taken[0]
                capture.when_destroyed((index, taken[1]))
            return taken[0], partials
    # no launch preceded the capture, or the arena is full: each replay zeroes these
    return _allocate(device, counters, 0)[0], partials


def _reclaim() -> None:
    """Return the counters of destroyed graphs to their arenas."""
    for index, taken in graph_lifetime.destroyed():
        _arenas[index].give_back(taken)

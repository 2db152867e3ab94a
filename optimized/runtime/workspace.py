"""Workspace of split work: arrival counters, and memory for partial results.

Programs that share a request's keys count how many of them are done, and the last one sets the
counter back to 0. So a counter is zeroed once and serves one launch after another, as long as no
two launches that may run at the same time share it.

**Streams.** Each stream has a workspace of its own: the launches of one stream run in order. A kept
workspace is outside of the caller's memory pools (engine/kept_memory.py). Torch's caching allocator
gives its block to others only after the work that the stream has when it is freed. So a workspace
may be dropped while kernels still use it, from any thread, without waiting for the device.

**Threads.** Several threads may launch on one stream. A call that makes several launches holds the
stream's lock meanwhile (`launch_lock`). Otherwise another call could write to the workspace between
two of its launches.

**CUDA graphs.** A captured launch keeps the addresses of its workspace until the graph is
destroyed, and a graph may be replayed on any stream, beside other graphs. Partial results are
allocated during the capture, so they belong to the graph's memory pool. Counters have to be 0
before the first replay. They come from an arena outside the pool, which is zeroed once. The
launches that one stream issues during one capture run in order in every replay, and replays of one
graph run in order, so these launches share one set of counters. They are not reused after the graph
has been destroyed. The driver would report that through a user object, but a graph that holds one
takes 1.8 us longer per replay (H200, driver 580.159). When the arena is used up, further graphs
zero counters of their own in each replay.

**Bounds.** A stream keeps at most MAX_KEPT_NUMBERS, and one stream per device, the first that needs
more, at most MAX_LARGE_NUMBERS. Any other launch that needs more gets a tensor of its own, which
returns to torch's allocator after the launch. The workspaces of at most MAX_STREAMS streams are
kept. So a stream that no longer exists costs memory only until others have replaced it.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as count_modes
from torch.utils._python_dispatch import _disable_current_modes

from ...engine.kept_memory import make_kept
from ...engine.rank_waits import wait_for_ranks
from .capture import find_capture_id
from .launcher import RECORDING, current_stream, is_capturing, next_power_of_2

CACHE_LINE = 32
"""Counters per cache line of 128 bytes. Launches do not share a line."""
NUM_COUNTERS = 1 << 12
"""Counters that a stream keeps, 16 KiB. A launch needs one per program and kv head at most."""
MIN_KEPT_NUMBERS = 1 << 20
"""Numbers that a stream keeps at first, 4 MiB."""
MAX_KEPT_NUMBERS = 9 << 20
"""Numbers that a stream keeps at most, 36 MiB. Decodes of an H200 with heads of 128 need 4.4 MiB
(16 rows) to 17.5 MiB (64 rows), latent decodes up to 33.1 MiB; splits of batch-invariant rows may
need 256 MiB."""
MAX_LARGE_NUMBERS = 33 << 20
"""Numbers that one stream per device keeps at most, 132 MiB: a cache of 32,768 keys that is
converted to 16 bits, with 8 kv heads of 128. A repeated call then allocates nothing."""
LARGE_STEP = 4 << 20
"""A large workspace has a multiple of so many numbers, so that it grows in few steps."""
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

    Attributes:
        num_counters, num_numbers: their sizes.
        addresses: of both. To ask a tensor for its size and address costs as much as a launch's
            other arguments.
    """

    counters: Tensor
    numbers: Tensor

    def __post_init__(self) -> None:
        """Compute the attributes."""
        self.num_counters, self.num_numbers = len(self.counters), len(self.numbers)
        self.addresses = self.counters.data_ptr(), self.numbers.data_ptr()


@dataclass(frozen=True)
class WorkspaceNote:
    """One request for workspace of a call that is recorded, see repeat/calls.py.

    Args:
        device, index: the device of the launch, and its index.
        num_counters, num_numbers: what was requested.
        counters, numbers: what was found.
    """

    device: torch.device
    index: int
    num_counters: int
    num_numbers: int
    counters: Tensor
    numbers: Tensor


class Arena:
    """Zeroed counters of a device, handed out to captured graphs.

    Args:
        counters: [n] int32, all 0.
    """

    def __init__(self, counters: Tensor) -> None:
        self._free = counters

    def take(self, size: int) -> Tensor | None:
        """Return `size` counters that nothing else uses; None if fewer are left."""
        if len(self._free) < size:
            return None
        taken, self._free = self._free[:size], self._free[size:]
        return taken

    @property
    def free_counters(self) -> int:
        """Number of counters that no graph uses."""
        return len(self._free)


_NO_COUNTERS = torch.empty(0, dtype=torch.int32)
"""In place of counters that were not requested."""
_streams: dict[tuple[int, int], StreamWorkspace] = {}
"""By device and stream, the one that was created first at the front."""
_arenas: dict[int, Arena] = {}
_captures: dict[tuple[int, int], tuple[int, Tensor]] = {}
"""By device and stream: the newest capture and its counters."""
_lock = threading.Lock()
_launch_locks: dict[tuple[int, int], threading.Lock] = {}
"""By device and stream. They are kept: torch has a fixed number of streams."""


def launch_lock(index: int, stream: int) -> threading.Lock:
    """Return the lock that a call holds while it makes its launches on a stream.

    Args:
        index: index of the device.
        stream: raw handle of the stream.
    """
    found = _launch_locks.get((index, stream))
    if found is None:
        # one operation, so that two threads get the same lock
        found = _launch_locks.setdefault((index, stream), threading.Lock())
    return found


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
    found = find_on_stream(device, index, current_stream(index), counters, numbers)
    if RECORDING.notes is not None:
        RECORDING.notes.append(WorkspaceNote(device, index, counters, numbers, *found))
    return found


def find_on_stream(
    device: torch.device, index: int, stream: int, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return a launch's workspace on the current stream.

    Args:
        device: a CUDA device.
        index: its index.
        stream: raw handle of its current stream.
        counters: number of int32 counters, which are 0 when the launch begins.
        numbers: number of float32 numbers, of any content.

    Returns:
        counters and numbers, at least as many as requested. A launch uses those of the latest
        request, because repeat/calls.py relies on it.
    """
    if is_capturing():
        return _find_captured(device, index, stream, counters, numbers)
    kept = _streams.get((index, stream))
    if kept is None or kept.num_numbers < numbers or kept.num_counters < counters:
        return _grow(device, index, stream, counters, numbers)
    return kept.counters, kept.numbers


def find_addresses(
    device: torch.device, index: int, stream: int, counters: int, numbers: int
) -> tuple[Any, tuple[int, int]]:
    """Return what keeps a launch's workspace allocated, and the addresses of both tensors.

    Args:
        device, index, stream, counters, numbers: as in `find_on_stream`.
    """
    kept = _streams.get((index, stream))
    if kept is not None and kept.num_counters >= counters and not is_capturing():
        if kept.num_numbers >= numbers:
            # the tensors, because the workspace may be replaced by larger ones
            return (kept.counters, kept.numbers), kept.addresses
        if numbers > MAX_LARGE_NUMBERS and not count_modes():
            # too large to be kept: a long converted cache
            own = kept.numbers.new_empty(numbers)
            return (kept.counters, own), (kept.addresses[0], own.data_ptr())
    found = find_on_stream(device, index, stream, counters, numbers)
    return found, (found[0].data_ptr(), found[1].data_ptr())


def release_workspace() -> None:
    """Give the cached workspace of all streams back to torch's allocator.

    Kernels that are still running are not disturbed, and the next launch on a stream allocates a
    new workspace. Counters of captured graphs stay, as the graphs may be replayed. To return
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


def _allocate(
    device: torch.device, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return new tensors on the current stream: zeros, and numbers of any content."""
    if count_modes():
        # a call that is traced with fake tensors must not leave fake tensors in the cache
        with _disable_current_modes():
            return _allocate(device, counters, numbers)
    return (
        torch.zeros(counters, dtype=torch.int32, device=device)
        if counters
        else _NO_COUNTERS,
        torch.empty(numbers, dtype=torch.float32, device=device),
    )


def _make(device: torch.device, counters: int, numbers: int) -> tuple[Tensor, ...]:
    """Return new tensors that are kept: zeros, and numbers of any content."""
    return make_kept(lambda: _allocate(device, counters, numbers), device)


def _grow(
    device: torch.device, index: int, stream: int, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return a workspace for a launch that needs more than its stream keeps."""
    wait_for_ranks("a workspace is allocated")
    with _lock:
        if index not in _arenas:
            # allocated here, because a capture cannot allocate outside its pool
            _arenas[index] = Arena(_make(device, ARENA_COUNTERS, 0)[0])
        kept = _streams.get((index, stream))
        if kept is None:
            while len(_streams) >= MAX_STREAMS:
                del _streams[next(iter(_streams))]
            kept = StreamWorkspace(*_make(device, NUM_COUNTERS, MIN_KEPT_NUMBERS))
            _streams[index, stream] = kept
        size = _kept_size(index, stream, numbers)
        if kept.num_numbers < numbers <= size:
            larger = _make(device, 0, size)[1]
            kept = _streams[index, stream] = StreamWorkspace(kept.counters, larger)
        found = kept.counters, kept.numbers
    # what is too large to be kept returns to torch's allocator after the launch
    if counters > NUM_COUNTERS:
        found = _allocate(device, counters, 0)[0], found[1]
    if numbers > kept.num_numbers:
        found = found[0], _allocate(device, 0, numbers)[1]
    return found


def _kept_size(index: int, stream: int, numbers: int) -> int:
    """Return how many numbers a stream keeps that needs `numbers`; fewer if they are too many."""
    if numbers <= MAX_KEPT_NUMBERS:
        return min(next_power_of_2(numbers), MAX_KEPT_NUMBERS)
    is_large_elsewhere = any(
        place[0] == index and place[1] != stream and kept.num_numbers > MAX_KEPT_NUMBERS
        for place, kept in _streams.items()
    )
    if is_large_elsewhere or numbers > MAX_LARGE_NUMBERS:
        return 0
    # not a power of two: a converted cache has little more than one
    return min(-(-numbers // LARGE_STEP) * LARGE_STEP, MAX_LARGE_NUMBERS)


def _find_captured(
    device: torch.device, index: int, stream: int, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return the workspace of a launch that a CUDA graph captures."""
    partials = _allocate(device, 0, numbers)[1]
    capture = find_capture_id(stream)
    with _lock:
        known = _captures.get((index, stream))
        if known is not None and known[0] == capture and len(known[1]) >= counters:
            return known[1], partials
        arena = _arenas.get(index)
        size = -(-counters // CACHE_LINE) * CACHE_LINE
        taken = None if arena is None else arena.take(size)
        if taken is not None:
            if capture is not None:
                _captures[index, stream] = capture, taken
            return taken, partials
    # no launch preceded the capture, or the arena is used up: each replay zeroes these
    return _allocate(device, counters, 0)[0], partials

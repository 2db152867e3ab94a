"""Where do programs count who has arrived, and leave what others will join?

Programs that share a request's keys count how many of them are done; the last one sets the counter
back to 0. So a counter is zeroed once and serves one launch after another, as long as no two
launches that may run at the same time share it: each stream has a workspace of its own, and so has
each launch that a CUDA graph captures, as nobody knows on which streams the graph will run.
"""

import torch
from torch import Tensor

from .launcher import current_stream, is_capturing

ROOM = 1 << 20
"""Counters of a device that are kept for captured launches, 4 MiB."""
LINE = 32
"""Counters of a line of memory, 128 bytes."""
COUNTERS, NUMBERS = 1 << 12, 1 << 20
"""What a stream gets at first; more when a launch needs more."""

_of_streams: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
_for_graphs: dict[int, Tensor] = {}


def find_workspace(
    device: torch.device, counters: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Return a launch's workspace on the current stream.

    Args:
        device: where it runs.
        counters: int32 counters that it needs, 0 whenever it begins.
        numbers: float32 numbers that it needs, of any content.
    """
    if device.type != "cuda":
        zeros = torch.zeros(counters, dtype=torch.int32, device=device)
        return zeros, torch.empty(numbers, dtype=torch.float32, device=device)
    place = torch.cuda.current_device() if device.index is None else device.index
    # a line of memory each, so that no two launches share one
    counters = -(-counters // LINE) * LINE
    if is_capturing():
        # numbers belong to the graph; counters outlive it, as they must be 0 before it first runs
        kept = _for_graphs.get(place)
        if kept is None or len(kept) < counters:
            # zeroed by each replay
            zeros = torch.zeros(counters, dtype=torch.int32, device=device)
        else:
            zeros, _for_graphs[place] = kept[:counters], kept[counters:]
        return zeros, torch.empty(numbers, dtype=torch.float32, device=device)
    key = (place, current_stream(place))
    workspace = _of_streams.get(key)
    if (
        workspace is None
        or workspace[0].shape[0] < counters
        or workspace[1].shape[0] < numbers
    ):
        if place not in _for_graphs:
            _for_graphs[place] = torch.zeros(ROOM, dtype=torch.int32, device=device)
            # a graph may run on another stream
            torch.cuda.synchronize(device)
        workspace = _of_streams[key] = (
            torch.zeros(max(counters, COUNTERS), dtype=torch.int32, device=device),
            torch.empty(max(numbers, NUMBERS), dtype=torch.float32, device=device),
        )
    return workspace

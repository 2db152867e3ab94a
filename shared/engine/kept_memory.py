"""Memory that is kept from call to call, allocated outside of the caller's memory pools.

A call may run in a memory pool: in `torch.cuda.use_mem_pool`, in the warm-up of CUDA graphs that
share a pool, or in a function that `torch.compile` captures. Replays of earlier graphs overwrite
what such a call allocates, and its memory may return to the device together with the pool. That is
right for what ends with the call, and wrong for what outlives it.

Torch chooses a pool by the thread or by the stream. A thread and a stream of their own have none.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_own_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = threading.Lock()


def make_kept(
    make: Callable[[], tuple[Tensor, ...]], device: torch.device
) -> tuple[Tensor, ...]:
    """Return tensors that outlive this call: what `make` returns, outside of all memory pools.

    The host waits until their contents are written, and for nothing else. Memory that is freed
    serves others only after the work that the current stream has then.

    Args:
        make: Allocates on `device`. It runs in another thread, in which no mode of torch is on.
        device: Of the tensors. On a CPU `make` runs right here, and while the current stream is
            captured, because nothing can be allocated outside of the graph's pool then.

    Example:
        >>> import torch
        >>> from pagetwin.engine.kept_memory import make_kept
        >>> make_kept(lambda: (torch.arange(3),), torch.device("cpu"))
        (tensor([0, 1, 2]),)
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    user = torch.cuda.current_stream(device)
    make_stream: Any = torch.cuda.Stream
    with _lock:
        if user.device not in _own_streams:
            _own_streams[user.device] = make_stream(user.device)
        own = _own_streams[user.device]

    def make_on_own_stream() -> tuple[Tensor, ...]:
        with torch.cuda.stream(own):
            made = make()
        own.synchronize()
        for tensor in made:
            if tensor.is_cuda:
                tensor.record_stream(user)
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_on_own_stream).result()

"""Memory of a replay: judged before anything is allocated.

A system that promises more memory than it has ends a process that uses it, without a message.
"""

import re
from contextlib import suppress
from pathlib import Path

from .settings import ReplaySettings
from .tokens import VOCABULARY

BLOCK_BYTES = 600
"""Bytes of a block in the block manager: entries of its lists."""
GIB = 2**30
AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.M)
"""What Linux can give to a process without swapping."""


def check_memory(settings: ReplaySettings) -> None:
    """Raise if the caches and the synthetic model need more memory than is available.

    Args:
        settings: Those of a replay, whose number of blocks is known.

    Raises:
        MemoryError: The message names the sizes.
    """
    needed, available = bytes_needed(settings), bytes_available(settings.device)
    if available is not None and needed > available:
        raise MemoryError(
            f"num_blocks = {settings.num_blocks}, block_size = {settings.block_size}, kv_heads ="
            f" {settings.kv_heads}, head_size = {settings.head_size} and layers ="
            f" {settings.layers} need {needed / GIB:,.1f} GiB, for the reference and each of"
            f" {', '.join(settings.names)}: expected at most the {available / GIB:,.1f} GiB that"
            " are available"
        )


def bytes_needed(settings: ReplaySettings) -> int:
    """Return the bytes of a cache per twin, of the reference's cache and of the model."""
    assert settings.num_blocks is not None
    slots = settings.num_blocks * settings.block_size
    elements = slots * 2 * settings.kv_heads * settings.head_size * settings.layers
    caches = elements * settings.torch_dtype.itemsize * (len(settings.names) + 1)
    heads = 2 * settings.kv_heads + settings.query_heads
    tables = settings.layers * VOCABULARY * heads * settings.head_size * 4
    return caches + 2 * tables + BLOCK_BYTES * settings.num_blocks


def bytes_available(device: str) -> int | None:
    """Return the bytes that a device can still allocate, or None if the system does not say."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    found = []
    with suppress(OSError):
        entries = Path("/proc/meminfo").read_text(encoding="utf-8")
        found += [int(kib) * 1024 for kib in AVAILABLE.findall(entries)]
    with suppress(OSError, ValueError):
        # the limit of a container
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")
        found.append(int(limit))
    return min(found, default=None)

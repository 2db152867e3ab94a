"""Laws of cache operations on caches of more than 2**31 elements: addresses have 64 bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..candidates.setting import Setting
from ..cases.caches import any_bytes
from ..checks.canaries import packed
from ..checks.expect import expect_same
from .law import law

AXES = ("half", "block", "slot", "head", "element")
FAR_AXES = AXES[:4]


@dataclass(frozen=True)
class FarSlots:
    """A cache with one stride so large that its axis' last entry is past 2**31 elements.

    The allocation has as much memory again before the cache, so that an address that wraps around
    stays inside of it. Only used elements are touched, so it costs address space and no memory.
    """

    axis: str

    def cache(self, device: torch.device) -> Tensor:
        """Return [2, 3, 3, 3, 3] elements of one byte each."""
        shape, strides, packed = (2, 3, 3, 3, 3), [0] * 5, 1
        for number in reversed(range(5)):
            if AXES[number] != self.axis:
                strides[number], packed = packed, packed * shape[number]
        far = AXES.index(self.axis)
        strides[far] = 2**31 // (shape[far] - 1) + 128
        front = 2**31
        memory = torch.empty(
            front + packed + 2**31 + 512, dtype=torch.float8_e5m2, device=device
        )
        cache = memory.as_strided(shape, strides, front)
        return cache.copy_(any_bytes(shape, torch.float8_e5m2, 3))


FAR = [FarSlots(axis) for axis in FAR_AXES]


@law("reshape_and_cache", cases=FAR)
def slots_past_two_billion_elements_are_written(
    setting: Setting, far: FarSlots
) -> None:
    cache, device = far.cache(setting.device), setting.device
    right = cache.cpu().clone()
    new = any_bytes((2, 3, 3, 3), torch.float8_e5m2, 9)
    key, value = new.float().to(device)
    slots = [8, 0, 5]
    for half in range(2):
        for token, slot in enumerate(slots):
            right[half, slot // 3, slot % 3] = new[half, token]
    mapping = torch.tensor(slots, device=device)
    setting.candidate.reshape_and_cache(
        key, value, cache[0], cache[1], mapping, 1.0, 1.0
    )
    expect_same("cache", packed(cache), packed(right))


@law("gather_cache", cases=FAR)
def slots_past_two_billion_elements_are_read(setting: Setting, far: FarSlots) -> None:
    cache, device = far.cache(setting.device), setting.device
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 9], dtype=torch.int32, device=device)
    found = setting.candidate.gather_cache(cache[0], cache[1], table, starts, 9)
    for half, read in enumerate(found):
        right = cache[half].cpu()[[2, 0, 1]].flatten(0, 1)
        expect_same("gathered", packed(read), packed(right))


@law("copy_blocks", "swap_blocks", cases=FAR)
def blocks_past_two_billion_elements_are_moved(setting: Setting, far: FarSlots) -> None:
    """Blocks are copied within a cache, out of it, and into it."""
    cache = far.cache(setting.device)
    small = torch.zeros(2, 3, 3, 3, 3, device=setting.device).to(cache.dtype)
    right, other = cache.cpu().clone(), small.cpu().clone()
    setting.candidate.copy_blocks([cache], torch.tensor([[2, 0]]))
    right[:, 0] = right[:, 2].clone()
    setting.candidate.swap_blocks(cache, small, torch.tensor([[2, 1], [1, 0]]))
    other[:, 1], other[:, 0] = right[:, 2], right[:, 1]
    setting.candidate.swap_blocks(small, cache, torch.tensor([[0, 2]]))
    right[:, 2] = other[:, 0]
    expect_same("cache", packed(cache), packed(right))
    expect_same("the other cache", packed(small), other)


@law("reshape_and_cache", cases=["token", "head"])
def offsets_of_new_tokens_have_64_bits(setting: Setting, axis: str) -> None:
    """The tokens are a view of a large tensor, of which nothing else is touched."""
    shape, strides, compact = (3, 3, 3), [0, 0, 0], 1
    names = ("token", "head", "element")
    for number in reversed(range(3)):
        if names[number] != axis:
            strides[number], compact = compact, compact * 3
    strides[names.index(axis)] = 2**30 + 128
    front = 2**31
    long = torch.empty(front + 2**31 + 512, dtype=torch.float16, device=setting.device)
    key = long.as_strided(shape, strides, front)
    key.copy_(any_bytes(shape, torch.float16, 4))
    cache = torch.zeros(2, 1, 4, 3, 3, dtype=torch.float16, device=setting.device)
    slots = [2, 0, 3]
    mapping = torch.tensor(slots, device=setting.device)
    setting.candidate.reshape_and_cache(key, key, cache[0], cache[1], mapping)
    for half in cache.cpu():
        expect_same("cache", packed(half[0, slots]), packed(key))

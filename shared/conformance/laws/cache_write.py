"""Laws of `reshape_and_cache`: new keys and values are written to the slots of the mapping.

Bytes are moved, so every result is exactly right or wrong, for an FP8 cache too. After a write
whole allocations are compared: the slots that were not named, and the memory around the view.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ..base.support import Support
from ..candidates.setting import Setting
from ..cases.batches import NAN
from ..cases.caches import (
    DTYPES,
    FP8,
    CacheSizes,
    any_bytes,
    as_integers,
    codes_of,
    draw_scale,
    draw_sizes,
    nearest_codes,
    scale_column,
)
from ..cases.forms import FORMS, laid_out, nearest_form
from ..cases.reuse import compiled
from ..checks.canaries import copy_of, expect_memory, kept, packed
from ..checks.expect import expect_same
from .law import law

PADDING = (-1, -1, -7, -(2**31), -(2**40))


@dataclass(frozen=True)
class CacheWrite:
    """New tokens and the slots that they are written to.

    Args:
        slots: slot of each token. A token with a negative slot is not stored.
        padding: tokens past the end of the slot mapping.
        sizes: sizes of the cache.
        forms: memory layouts of the new keys and of the new values, each one of FORMS.
        stride: elements from one slot of the mapping to the next.
    """

    slots: tuple[int, ...]
    padding: int
    sizes: CacheSizes
    forms: tuple[str, str]
    stride: int
    seed: int

    def within(self, support: Support) -> "CacheWrite":
        """Return the write with supported sizes of caches and forms of tokens."""
        key, value = self.forms
        forms = (
            nearest_form("key", key, support),
            nearest_form("value", value, support),
        )
        return replace(self, sizes=self.sizes.within(support), forms=forms)

    def tokens(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return new keys and values of random numbers, with NaN in the padding."""
        heads, count = self.sizes.kv_heads, len(self.slots) + self.padding
        made = []
        for number, size in enumerate(
            (self.sizes.head_size, self.sizes.value_head_size)
        ):
            new = any_bytes((count, heads, size), dtype, self.seed + 7 * number)
            new[len(self.slots) :] = NAN
            made.append(laid_out(new.to(device), self.forms[number]))
        return made

    def mapping(self, device: torch.device) -> Tensor:
        """Return the slots as a view of this stride, with slot 0 in the gaps."""
        wide = torch.zeros(len(self.slots), self.stride, dtype=torch.int64)
        wide[:, 0] = torch.tensor(self.slots, dtype=torch.int64)
        return wide.flatten().to(device)[:: self.stride]

    def written(self, cache: Tensor, new: Tensor) -> Tensor:
        """Return the same view of a copied allocation, with each token in its slot."""
        right = copy_of(cache)
        for token, slot in enumerate(self.slots):
            if slot >= 0:
                block_id, offset = divmod(slot, self.sizes.block_size)
                right[block_id, offset] = new[token].cpu()
        return right


@st.composite
def writes(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = (*DTYPES[:3], *DTYPES)
) -> CacheWrite:
    """Return a write to scattered slots, the last one often among them, and negative ones."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    sizes = draw_sizes(pick, kernel, dtypes)
    total = sizes.num_blocks * sizes.block_size
    count = min(pick.choice([0, 1, 2, 5, 9, 40]), total)
    slots = pick.sample(range(total), count)
    if count and total - 1 not in slots:
        slots[pick.randrange(count)] = pick.choice([total - 1, slots[0]])
    slots = list(dict.fromkeys(slots))
    for index in range(len(slots) + 1):
        if pick.random() < 0.2:
            slots.insert(index, pick.choice(PADDING))
    return CacheWrite(
        tuple(slots),
        pick.choice([0, 0, 1, 4]),
        sizes,
        (kernel.choice(FORMS), kernel.choice(FORMS)),
        kernel.choice([1, 1, 2]),
        pick.randrange(2**16),
    )


def expect_written(
    setting: Setting,
    write: CacheWrite,
    dtype: torch.dtype,
    stored: Callable[[Tensor, int], Tensor],
    tokens: list[Tensor],
    **scales: Any,
) -> None:
    """Raise Disagreement if any byte differs from the expected one after a write."""
    caches = write.sizes.caches(setting.device, write.seed + 31)
    slot_mapping = write.mapping(setting.device)
    shared = caches[0].untyped_storage().data_ptr() == (
        caches[1].untyped_storage().data_ptr()
    )
    right = [
        write.written(cache, stored(new, number))
        for number, (cache, new) in enumerate(zip(caches, tokens, strict=True))
    ]
    if shared:  # one allocation: each half is in the memory around the other
        for one, other in (right, right[::-1]):
            as_other = one.as_strided(
                other.shape, other.stride(), other.storage_offset()
            )
            as_other.copy_(other)
    tensors = {
        name: scale for name, scale in scales.items() if isinstance(scale, Tensor)
    }
    with kept(key=tokens[0], value=tokens[1], slot_mapping=slot_mapping, **tensors):
        found = setting.candidate.reshape_and_cache(
            *tokens, *caches, slot_mapping, **scales
        )
    expect_same("what a write returns", found, None)
    for name, cache, wanted in zip(("key", "value"), caches, right, strict=True):
        expect_memory(f"{name} cache", cache, wanted)


@law("reshape_and_cache", cases=writes())
def each_token_is_written_to_its_slot_and_nothing_else_changes(
    setting: Setting, write: CacheWrite
) -> None:
    """Tokens past the last slot are padding. A token with a negative slot is not stored."""
    dtype = write.sizes.dtype
    tokens = write.tokens(setting.device, dtype)
    expect_written(setting, write, dtype, lambda new, _: new, tokens)


@law("reshape_and_cache", "gather_cache", cases=list(DTYPES))
def every_bit_pattern_is_preserved(setting: Setting, dtype: torch.dtype) -> None:
    """Payloads of NaN, subnormals, minus zero: the operations move bytes, not numbers."""
    generator = torch.Generator().manual_seed(dtype.itemsize)
    size = (48, 1, 8, dtype.itemsize)
    drawn = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    drawn[::2, ..., -2:] = torch.tensor([0xF1, 0x7F], dtype=torch.uint8)
    key = drawn.view(dtype).squeeze(-1).to(setting.device)
    value = key.flip(0)
    cache = torch.zeros(2, 3, 16, 1, 8, dtype=dtype, device=setting.device)
    slots = torch.randperm(48, generator=generator)
    setting.candidate.reshape_and_cache(
        key, value, cache[0], cache[1], slots.to(setting.device)
    )
    for half, new in zip(cache.cpu(), (key.cpu(), value.cpu()), strict=True):
        expect_same("cache", as_integers(half.flatten(0, 1)[slots]), as_integers(new))
    found = setting.candidate.gather_cache(
        cache[0],
        cache[1],
        torch.tensor([[2, 0, 1]], dtype=torch.int32, device=setting.device),
        torch.tensor([0, 48], dtype=torch.int32, device=setting.device),
        48,
    )
    for half, read in zip(cache.cpu(), found, strict=True):
        right = half[[2, 0, 1]].flatten(0, 1)
        expect_same("gathered", as_integers(read.cpu()), as_integers(right))


@law("reshape_and_cache", cases=writes(dtypes=FP8))
def an_fp8_cache_holds_the_nearest_codes_of_the_scaled_numbers(
    setting: Setting, write: CacheWrite
) -> None:
    """Inputs are codes, midpoints of two codes, numbers next to midpoints and past the largest."""
    pick = Random(write.seed)
    generator = np.random.default_rng(write.seed)
    dtype = pick.choice(DTYPES[:3])
    scales = {
        name: draw_scale(pick, write.sizes.kv_heads, setting.device)
        for name in ("k_scale", "v_scale")
    }
    _, exact = codes_of(write.sizes.dtype)
    halfway = (exact[1:] + exact[:-1]) / 2
    points = np.concatenate([exact, halfway, halfway * (1 + 2**-10), exact[-1:] * 4])
    tokens = write.tokens(setting.device, dtype)
    for new, scale in zip(tokens, scales.values(), strict=True):
        live = new[: len(write.slots)]
        drawn = generator.choice(points, live.shape)
        signs = generator.choice([-1, 1], live.shape)
        numbers = torch.from_numpy(drawn * signs) * scale_column(scale)
        live.copy_(numbers.to(dtype))

    def stored(new: Tensor, number: int) -> Tensor:
        column = scale_column(list(scales.values())[number])
        return nearest_codes(new.cpu().float() / column, write.sizes.dtype)

    expect_written(setting, write, dtype, stored, tokens, **scales)


@law("reshape_and_cache", cases=list(FP8))
def conversion_to_fp8_saturates_and_preserves_nan(
    setting: Setting, dtype: torch.dtype
) -> None:
    """Infinities too. Minus zero and numbers that round to zero keep their sign."""
    largest, inf = torch.finfo(dtype).max, float("inf")
    numbers = [inf, -inf, 3e38, -3e38, 0.0, -0.0, 1e-30, -1e-30, NAN, -NAN]
    numbers += [largest, -largest, largest * 1.02, largest * 1.2, -1.2 * largest, 1.0]
    key = torch.tensor(numbers).view(2, 1, 8).to(setting.device)
    cache = torch.zeros(2, 1, 2, 1, 8, device=setting.device).to(dtype)
    slots = torch.tensor([1, 0], device=setting.device)
    setting.candidate.reshape_and_cache(key, -key, cache[0], cache[1], slots, 1.0, 1.0)
    for half, new in zip(cache.cpu(), (key.cpu(), -key.cpu()), strict=True):
        right = nearest_codes(new.flip(0), dtype).view(half.shape)
        is_nan = half.float().isnan()
        expect_same("where NaN stands", is_nan, right.float().isnan())
        for stored in (half, right):
            stored.view(torch.uint8)[is_nan] = 0
        expect_same("cache", packed(half), right)

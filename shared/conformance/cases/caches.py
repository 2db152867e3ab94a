"""Caches for the laws of cache operations: sizes, layouts, contents, FP8 codes and scales."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...contract.cache_formats import FORMATS
from ..base.support import Support, has_same_caches
from .batches import LAYOUTS, empty_cache
from .forms import nearest_layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = tuple(
    form.dtype for form in FORMATS.values() if form.file == "fp8" and form.dtype
)
"""Dtypes of FP8 caches."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

BLOCK_SIZES = (1, 3, 16, 16, 24)
HEAD_SIZES = (1, 8, 8, 24, 80)


@dataclass(frozen=True)
class CacheSizes:
    """The sizes, dtype and memory layouts of a cache.

    Args:
        num_blocks, block_size, kv_heads, head_size, value_head_size: sizes of the cache.
        dtype: element type of the cache.
        layout, value_layout: memory layouts of the key and the value cache. If they are equal and
            the head sizes are too, both caches are halves of one allocation.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    head_size: int
    value_head_size: int
    dtype: torch.dtype
    layout: str = "separate"
    value_layout: str = "separate"

    def within(self, support: Support) -> "CacheSizes":
        """Return the sizes with a supported dtype, head size and layouts. FP8 keeps its dtype.

        Numbers of blocks, slots and heads are kept: the slots of a write depend on them.
        """
        taken = [
            dtype
            for dtype in DTYPES
            for name in [str(dtype).removeprefix("torch.")]
            if support.dtypes is None or name in support.dtypes
            if support.cache_dtypes is None or name in support.cache_dtypes
        ]
        turn = self.num_blocks
        dtype, head_size = self.dtype, self.head_size
        if not (dtype in taken or dtype in FP8 or not taken):
            dtype = taken[turn % len(taken)]
        if support.head_sizes is not None and head_size not in support.head_sizes:
            head_size = list(support.head_sizes)[turn % len(support.head_sizes)]
        value_size = self.value_head_size if head_size == self.head_size else head_size
        if support.why_not_options({"value_head_size": value_size}):
            value_size = head_size
        layout = nearest_layout(self.layout, support, head_size, dtype, turn)
        other = nearest_layout(self.value_layout, support, value_size, dtype, turn)
        return replace(
            self,
            dtype=dtype,
            head_size=head_size,
            value_head_size=value_size,
            layout=layout,
            value_layout=layout if has_same_caches(support) else other,
        )

    def caches(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return a key cache and a value cache, filled with random bytes."""
        sizes = (self.num_blocks, self.block_size, self.kv_heads)
        whole = empty_cache(self.layout, *sizes, self.head_size, self.dtype, device)
        other = whole
        if (self.layout, self.head_size) != (self.value_layout, self.value_head_size):
            other = empty_cache(
                self.value_layout, *sizes, self.value_head_size, self.dtype, device
            )
        for number, cache in enumerate((whole, other)):
            cache.copy_(any_bytes(cache.shape, self.dtype, seed + number))
        return whole[0], other[1]


def any_bytes(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random finite bit patterns: NaN is left out, as a copy may make it quiet."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape, dtype.itemsize)
    drawn = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    found = drawn.view(dtype).squeeze(-1)
    finite = torch.isfinite(found.float() if dtype in FP8 else found)
    return torch.where(finite.unsqueeze(-1), drawn, 1).view(dtype).squeeze(-1)


def draw_sizes(
    pick: Random, kernel: Random, dtypes: Sequence[torch.dtype]
) -> CacheSizes:
    """Return cache sizes, odd ones among them, with any layouts.

    Args:
        pick: Random numbers of the case.
        kernel: Those from which what kernels are compiled for is drawn.
        dtypes: Element types of the caches.
    """
    block_size, head_size = kernel.choice(BLOCK_SIZES), kernel.choice(HEAD_SIZES)
    kv_heads, layout = kernel.choice([1, 2, 3, 3]), kernel.choice(LAYOUTS)
    corner = kernel.random()
    if corner < 0.1:  # a token has more elements than a program may process
        block_size, kv_heads, head_size = 3, 3, 400
    elif corner < 0.2:
        block_size, kv_heads, head_size = 544, 1, 8
    return CacheSizes(
        num_blocks=pick.choice([1, 2, 4, 5]),
        block_size=block_size,
        kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=kernel.choice([head_size, 3, 16, 40]),
        dtype=kernel.choice(dtypes),
        layout=layout,
        value_layout=kernel.choice([layout, *LAYOUTS]),
    )


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of each element as an integer."""
    # an axis of size 1 may have any stride, and such a tensor cannot be viewed as integers
    packed = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return packed.view(INTEGERS[tensor.element_size()])


def codes_of(dtype: torch.dtype) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the finite codes of an FP8 dtype from 0 up, and their numbers."""
    codes = np.arange(128, dtype=np.uint8)
    mantissa_bits = 2 if dtype == torch.float8_e5m2 else 3
    bias = 15 if dtype == torch.float8_e5m2 else 7
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2.0**mantissa_bits
    numbers = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias),
        (1 + fraction) * 2.0 ** (exponent.astype(np.float64) - bias),
    )
    count = 124 if dtype == torch.float8_e5m2 else 127
    return codes[:count], numbers[:count]


def nearest_codes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the FP8 codes of float32 numbers: round to nearest even, saturate, keep NaN."""
    codes, exact = codes_of(dtype)
    sizes = numbers.double().abs().numpy()
    above = np.searchsorted(exact, sizes).clip(0, len(exact) - 1)
    below = (above - 1).clip(0)
    to_above, to_below = exact[above] - sizes, sizes - exact[below]
    is_even = codes[above] % 2 == 0
    takes_above = (to_above < to_below) | ((to_above == to_below) & is_even)
    found = np.where(takes_above | (sizes >= exact[-1]), codes[above], codes[below])
    signs = np.signbit(numbers.numpy()).astype(np.uint8) << 7
    found = np.where(np.isnan(sizes), 0x7F, found | signs).astype(np.uint8)
    return torch.from_numpy(found).view(dtype)


def draw_scale(pick: Random, heads: int, device: torch.device) -> Tensor | float:
    """Return a scale far from 1: a number, a scalar tensor, or one scale per head."""
    numbers = [pick.choice([0.013, 0.25, 0.3, 1.7, 40.0]) for _ in range(heads)]
    kind = pick.choice(["number", "tensor", *["a head", "a head, apart"] * 2])
    if kind == "number":
        return numbers[0]
    if kind == "tensor":
        return torch.tensor(numbers[0], device=device)
    if kind == "a head":
        return torch.tensor(numbers, device=device)
    wide = torch.full((heads, 2), 999.0)
    wide[:, 0] = torch.tensor(numbers)
    return wide.to(device)[:, 0]


def scale_column(scale: Tensor | float) -> Tensor:
    """Return a scale in float32 on the host, broadcastable to [tokens, heads, elements]."""
    found = torch.as_tensor(scale, dtype=torch.float32).cpu()
    return found[:, None] if found.dim() else found

"""Caches of formats that measure their scales, for workloads of the benchmark."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...contract.cache_formats import CacheFormat, find_format, split_page
from ...contract.nvfp4_pages import split_nvfp4_page
from ...reference.cache.formats import FILES

GLOBAL_SCALE = 2.0**-8
"""What block scales are multiplied by. Those of normal numbers are up to about 200 then."""


class Coded(NamedTuple):
    """A cache of codes and scales.

    Args:
        key, value: [num_blocks, block_size, kv_heads, elements].
        k_scale, v_scale: [num_blocks, block_size, kv_heads], or [num_blocks, block_size, kv_heads,
            blocks] of block scales.
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor
    v_scale: Tensor


def empty_coded(
    form: CacheFormat,
    slots: tuple[int, int, int],
    sizes: tuple[int, int],
    in_page: bool,
    device: torch.device | str,
) -> Coded:
    """Return a cache of zeros.

    Args:
        slots: num_blocks, block_size, kv_heads.
        sizes: Elements of a key and of a value.
        in_page: Whether codes and scales share pages, as in vLLM. If not, each has a tensor of its
            own.
    """
    assert form.dtype is not None
    stored = [form.elements(size) for size in sizes]
    row = sum(map(form.row_bytes, sizes))
    page = torch.zeros(*slots, row if in_page else 0, dtype=torch.uint8, device=device)
    if in_page and form.channels_per_scale:
        return Coded(*split_nvfp4_page(page.flatten(1), *slots[1:], *sizes))
    if in_page:
        return Coded(*split_page(page, *sizes, form))
    codes = [
        torch.zeros(*slots, elements, dtype=torch.uint8, device=device).view(form.dtype)
        for elements in stored
    ]
    scales = [form.empty_scales(of_cache).zero_() for of_cache in codes]
    return Coded(codes[0], codes[1], scales[0], scales[1])


def encode(form: CacheFormat, numbers: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Store numbers by the reference, block by block: a few hundred MB at a time.

    Args:
        numbers: [num_blocks, block_size, kv_heads, elements] in the dtype of keys and values.
        codes, scale: Modified in place.
    """
    assert form.dtype is not None
    step = max(1, (1 << 26) // numbers[0].numel())
    for begin in range(0, len(numbers), step):
        part = slice(begin, begin + step)
        given = GLOBAL_SCALE if form.channels_per_scale else scale[part]
        made, measured = FILES[form.file].store(numbers[part], given, form.dtype)
        as_bytes(codes)[part] = as_bytes(made)
        scale[part] = measured


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes and scales mean, by the reference.

    Args:
        codes: [..., block_size, kv_heads, elements].
        scale: [..., block_size, kv_heads], or [..., block_size, kv_heads, blocks].
    """
    form = find_format(codes.dtype, scale)
    numbers: Tensor = FILES[form.file].load(codes, scale, torch.float32)
    return (numbers * GLOBAL_SCALE if form.channels_per_scale else numbers).to(dtype)


def as_bytes(codes: Tensor) -> Tensor:
    """Return codes as bytes, because torch does not index FP8 tensors everywhere."""
    return codes.view(torch.uint8)

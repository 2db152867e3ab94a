"""Formats of an engine's layers, and pages whose scales are stored beside the codes.

The bytes of one slot and head are, in this order, the codes of its key, the key's scale, the codes
of its value and the value's scale. In vLLM 0.25 keys and values are halves of a block instead, each
with its scales. vLLM's pages with block scales are those of `nvfp4_pages.py`.
"""

from math import lcm

import torch
from torch import Tensor

from .cache_formats import FORMATS, PLAIN, CacheFormat, ScaleAxes, split_page
from .nvfp4_pages import split_nvfp4_cache


def is_layer_format(form: CacheFormat) -> bool:
    """Return whether layers take a format: scales that are measured, one for all, or none."""
    return form is PLAIN or form.is_measured or ScaleAxes.TENSOR in form.scales


def layer_format(name: str) -> CacheFormat:
    """Return the format of a layer's cache by vLLM's name, or one of ours.

    Raises:
        ValueError: no format that layers take has this name.
    """
    for form in FORMATS.values():
        if name in (form.name, *form.aliases) and is_layer_format(form):
            return form
    names = [
        name
        for form in FORMATS.values()
        if is_layer_format(form)
        for name in (*form.aliases, form.name)
    ]
    raise ValueError(f"kv_cache_dtype = {name!r}: expected {', '.join(names)}")


def check_stored_format(name: str, dtype: torch.dtype, *head_sizes: int) -> CacheFormat:
    """Return the format of pages that store their scales; raise if heads do not fit it.

    Args:
        name: name of the format.
        dtype: dtype of the cache's elements.
        head_sizes: elements of a key, and of a value.

    Raises:
        ValueError: the scales of the format are not stored, its codes have another dtype, or a
            page cannot hold the heads.
    """
    form = measured_format(name)
    if form is None:
        names = ", ".join(name for name in FORMATS if measured_format(name))
        raise ValueError(
            f"kv_cache_dtype = {name!r}: expected None, or a format whose scales are stored in"
            f" the page: {names}"
        )
    if form.dtype != dtype:
        raise ValueError(
            f"dtype = {dtype} with kv_cache_dtype = {name!r}: expected {form.dtype}"
        )
    for size in head_sizes:
        if reason := why_no_page(form, size):
            raise ValueError(reason)
    return form


def measured_format(name: str) -> CacheFormat | None:
    """Return the format with vLLM's name whose scales are measured; None for others.

    Args:
        name: vLLM's name of a cache's dtype, or one of ours.
    """
    form = FORMATS.get(name)
    return form if form is not None and form.is_measured else None


def why_no_page(form: CacheFormat, head_size: int) -> str:
    """Return why a page cannot hold keys or values of a format; empty if it can.

    Args:
        form: A format whose scales are measured.
        head_size: Elements of a key or value.

    Example:
        >>> why_no_page(FORMATS["int4_per_token_head"], 100)
        'head_size = 100 with kv_cache_dtype = int4_per_token_head: expected a multiple of 8, as \
scales begin at multiples of 4 bytes'
    """
    assert form.dtype is not None
    unit = form.scale_dtype.itemsize
    aligned = unit // form.dtype.itemsize * form.codes_per_element
    step = lcm(aligned, form.head_size_step)
    if head_size % step == 0:
        return ""
    why = f"as scales begin at multiples of {unit} bytes"
    if form.channels_per_scale:
        why = "the channels of a scale"
    return (
        f"head_size = {head_size} with kv_cache_dtype = {form.name}: expected a multiple of"
        f" {step}, {why}"
    )


def state_bytes(form: CacheFormat, head_size: int, value_head_size: int) -> int:
    """Return the bytes of one slot and head: codes and scales of a key, and those of a value.

    Args:
        form: A format whose scales are measured.
        head_size, value_head_size: Elements of a key and of a value.

    Raises:
        ValueError: A page cannot hold them.

    Example:
        A head size of 128 in int8: 128 + 4 + 128 + 4.

        >>> state_bytes(FORMATS["int8_per_token_head"], 128, 128)
        264
    """
    assert form.dtype is not None
    for size in (head_size, value_head_size):
        if reason := why_no_page(form, size):
            raise ValueError(reason)
    return form.page_bytes(1, 1, head_size, value_head_size, form.dtype)


def head_slots(
    form: CacheFormat, kv_heads: int, head_size: int, value_head_size: int
) -> tuple[int, int]:
    """Return the head slots of vLLM's page, and the bytes of one slot of a block in each.

    Args:
        form: A format whose scales are measured.
        kv_heads: Heads of keys and values.
        head_size, value_head_size: Elements of a key and of a value.

    Raises:
        ValueError: A page cannot hold them.

    Example:
        In nvfp4 the keys of a head and its values have head slots of their own, if they have one
        size.

        >>> head_slots(FORMATS["nvfp4"], 8, 128, 128)
        (16, 72)
        >>> head_slots(FORMATS["int8_per_token_head"], 8, 128, 128)
        (8, 264)
    """
    content = state_bytes(form, head_size, value_head_size)
    if form.channels_per_scale and head_size == value_head_size:
        return 2 * kv_heads, content // 2
    return kv_heads, content


def split_scaled_cache(
    kv_cache: Tensor, head_size: int, form: CacheFormat
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of keys, values and their scales in one layer's cache.

    Args:
        kv_cache: uint8 or int8, with any strides but 1 for the last axis. [num_blocks, 2,
            block_size, kv_heads, bytes] as in vLLM 0.25, whose halves hold keys and values with a
            scale at the end; or [num_blocks, kv_heads, block_size, bytes], as in 0.26 and later.
            With block scales, as in `split_nvfp4_cache`.
        head_size: Elements of a key.
        form: A format whose scales are measured.

    Returns:
        key_cache, value_cache, k_scale, v_scale, as `reshape_and_cache` takes them.

    Raises:
        ValueError: the cache has neither of the two shapes, or a scale does not begin at a multiple
            of 4 bytes.

    Example:
        [100, 8, 16, 264] in int8_per_token_head with head_size 128: two views [100, 16, 8, 128] of
        codes, and two [100, 16, 8] of scales.
    """
    assert form.dtype is not None
    if reason := why_no_page(form, head_size):
        raise ValueError(reason)
    if form.channels_per_scale:
        return split_nvfp4_cache(kv_cache, head_size)
    codes = form.elements(head_size) * form.dtype.itemsize
    width = kv_cache.shape[-1]
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2 and width == codes + 4:
        halves = kv_cache.unbind(1)
    elif kv_cache.dim() == 4 and width > codes + 8:
        value_codes = (width - codes - 8) // form.dtype.itemsize
        value_size = value_codes * form.codes_per_element
        return split_page(kv_cache.transpose(1, 2), head_size, value_size, form)
    else:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected [num_blocks, 2, block_size,"
            f" kv_heads, {codes + 4}] or [num_blocks, kv_heads, block_size, bytes] with more than"
            f" {codes + 8} bytes, codes and a scale of each key and value"
        )
    (key, k_scale), (value, v_scale) = (
        split_half(half, head_size, head_size, form) for half in halves
    )
    return key, value, k_scale, v_scale


def split_half(
    half: Tensor, head_size: int, first: int, form: CacheFormat
) -> tuple[Tensor, Tensor]:
    """Return views of the codes and the scales of the keys, or of the values.

    Args:
        half: [num_blocks, block_size, kv_heads, bytes], codes of a head and then their scales.
        head_size: elements that have a place in it.
        first: elements whose codes are returned, the first ones.
        form: a format whose scales are measured.

    Returns:
        [num_blocks, block_size, kv_heads, elements], and [num_blocks, block_size, kv_heads] or
        [num_blocks, block_size, kv_heads, blocks].

    Raises:
        ValueError: a scale does not begin at a multiple of its own bytes.
    """
    assert form.dtype is not None
    starts = [*half.stride()[:-1], half.storage_offset()]
    unit = form.scale_dtype.itemsize
    if half.stride(-1) != 1 or any(start % unit for start in starts):
        raise ValueError(
            f"kv_cache has strides {list(half.stride())} and begins at byte"
            f" {half.storage_offset()}: expected scales at multiples of {unit} bytes, in bytes"
            " without gaps"
        )
    sizes = [form.elements(head_size), form.scale_bytes(head_size)]
    codes, scales = torch.split(half, sizes, dim=-1)
    used = form.view_scales(scales[..., : form.scale_bytes(first)])
    return codes[..., : form.elements(first)].view(form.dtype), used

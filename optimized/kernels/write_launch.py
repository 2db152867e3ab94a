"""Launches of the kernels that write keys and values to their cache."""

from typing import Any, NamedTuple

import triton
from torch import Tensor

from ...contract.cache_formats import CacheFormat, head_size_of
from ..runtime.launcher import INTERPRETED
from .fp8 import has_fp8_encoding, scale_arguments
from .kv_cache import (
    ELEMENTS_PER_WRITE,
    MAX_TOKENS_PER_WRITE,
    CacheHalf,
    NewTokens,
    as_bits,
    choose_tile,
    choose_tokens,
    write_kv_kernel,
)
from .measured_write import (
    align_rows,
    choose_rows,
    measured_half,
    write_measured_kv_kernel,
)
from .rotated_write import (
    ROWS_PER_PROGRAM,
    takes_rows,
    write_rotated_kv_kernel,
)


class WriteLaunch(NamedTuple):
    """A launch of a write.

    Args:
        tokens: tokens of a program.
        arguments: in the order of the kernel's parameters.
    """

    kernel: Any
    tokens: int
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    num_warps: int = 4


def lower_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    form: CacheFormat,
) -> WriteLaunch:
    """Return the launch of a write whose scales are given, or that copies."""
    num_slots = slot_mapping.shape[0]
    _, block_size, kv_heads, head_size = key_cache.shape
    value_head_size = value_cache.shape[3]
    elements = kv_heads * max(head_size, value_head_size)
    tile = choose_tile(elements)
    tokens = choose_tokens(tile)
    grid = (triton.cdiv(num_slots, tokens), triton.cdiv(elements, tile))
    if k_scale is None:
        key, value = as_bits(key, value)
    key_cache, value_cache = as_bits(key_cache, value_cache)
    arguments = (
        NewTokens(key, *key.stride()),
        NewTokens(value, *value.stride()),
        CacheHalf(key_cache, *scale_arguments(k_scale), *key_cache.stride()),
        CacheHalf(value_cache, *scale_arguments(v_scale), *value_cache.stride()),
        slot_mapping,
        num_slots,
        kv_heads,
        slot_mapping.stride(0),
        # BLOCK_SIZE, HEAD_SIZE, VALUE_HEAD_SIZE, CACHE_FORMAT, NATIVE_FP8, TOKENS, ELEMENTS
        block_size,
        head_size,
        value_head_size,
        form.name,
        k_scale is not None and has_fp8_encoding(key_cache.device),
        tokens,
        tile,
    )
    return WriteLaunch(write_kv_kernel, tokens, grid, arguments)


def lower_measured_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Any,
    v_scale: Any,
    k_global_scale: float | None,
    v_global_scale: float | None,
    form: CacheFormat,
) -> WriteLaunch:
    """Return the launch of a write whose scales are measured."""
    count = slot_mapping.shape[0]
    _, block_size, kv_heads, _ = key_cache.shape
    sizes = head_size_of(key_cache), head_size_of(value_cache)
    caches = as_bits(key_cache, value_cache)
    alignments = [align_rows(cache) for cache in caches]
    tensors = (
        NewTokens(key, *key.stride()),
        NewTokens(value, *value.stride()),
        measured_half(caches[0], k_scale, k_global_scale),
        measured_half(caches[1], v_scale, v_global_scale),
        slot_mapping,
        count,
        kv_heads,
        slot_mapping.stride(0),
    )
    if form.is_rotated and all(map(takes_rows, caches, sizes, alignments)):
        tokens, heads = choose_rows(ROWS_PER_PROGRAM, kv_heads)
        grid = (triton.cdiv(count, tokens), 2 * triton.cdiv(kv_heads, heads))
        rule = (form.includes_zero, not INTERPRETED)
        arguments = (*tensors, block_size, *sizes, *rule, tokens, heads, *alignments)
        return WriteLaunch(write_rotated_kv_kernel, tokens, grid, arguments, 1)
    tiles = [triton.next_power_of_2(size) for size in sizes]
    tokens, heads = choose_rows(ELEMENTS_PER_WRITE // max(tiles), kv_heads)
    tokens = min(tokens, MAX_TOKENS_PER_WRITE)
    grid = (triton.cdiv(count, tokens), triton.cdiv(kv_heads, heads))
    is_native = has_fp8_encoding(key_cache.device)
    tile = (tokens, heads, *tiles, *alignments)
    arguments = (*tensors, block_size, *sizes, form.name, is_native, *tile)
    return WriteLaunch(write_measured_kv_kernel, tokens, grid, arguments)

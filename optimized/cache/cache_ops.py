"""Cache operations: write, gather, copy and swap keys and values.

One launch moves all tokens, or all blocks of a layer (kernels/write_launch.py,
kernels/gather_kv.py, kernels/kv_cache.py). Elements are copied as integers of their width, so no
bit changes. Only between a quantized cache and a wider dtype are they converted, and there both
twins agree bitwise too.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.cache_formats import find_format, head_size_of
from ...contract.shapes import (
    BlockMapping,
    BlockTable,
    DestinationKVCache,
    Key,
    KeyCache,
    LayerKVCache,
    Scale,
    SlotMapping,
    SourceKVCache,
    StartLoc,
    Value,
    ValueCache,
)
from ...validation import (
    check_copy_blocks,
    check_gather_cache,
    check_reshape_and_cache,
    check_swap_blocks,
    values_checked,
    values_may_be_checked,
)
from ..kernels.fp8 import has_native_fp8, scale_arguments
from ..kernels.gather_kv import (
    TOKENS_PER_PROGRAM,
    gather_kv_kernel,
    gather_measured_kv_kernel,
)
from ..kernels.kv_cache import CacheHalf, as_bits, choose_tile, copy_blocks_kernel
from ..kernels.measured_write import align_rows, measured_half
from ..kernels.write_launch import lower_measured_write, lower_write
from ..runtime.launcher import check_launch, launch_kernel, must_widen
from ..runtime.operators import operator
from ..runtime.repeat.writes import WRITES, record_write, sign_write


@typed
def _check_write_types(
    key: Key,
    value: Value,
    key_cache: KeyCache,
    value_cache: ValueCache,
    slot_mapping: SlotMapping,
) -> None:
    """Raise for another type, other axes, and gradients: a repeated write is not looked at."""


@operator(
    changed=["key_cache", "value_cache", "k_scale_tensor", "v_scale_tensor"],
    is_repeated=True,
)
def reshape_and_cache(
    key: Key,
    value: Value,
    key_cache: KeyCache,
    value_cache: ValueCache,
    slot_mapping: SlotMapping,
    k_scale: Scale | float | None = None,
    v_scale: Scale | float | None = None,
    kv_cache_dtype: str | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
) -> None:
    """Write each new token's key and value to its slot."""
    write = (key, value), (key_cache, value_cache), slot_mapping, (k_scale, v_scale)
    signature = sign_write(*write, kv_cache_dtype, k_global_scale, v_global_scale)
    repeated = None if signature is None else WRITES.get(signature)
    if repeated is not None and not values_may_be_checked() and repeated.launch(*write):
        return
    contents = values_checked(key_cache)
    _check_write_types(key, value, key_cache, value_cache, slot_mapping)
    check_reshape_and_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        kv_cache_dtype,
        k_global_scale,
        v_global_scale,
        contents=contents,
    )
    check_launch(key_cache)
    if not slot_mapping.shape[0] or not key_cache.numel() or not value_cache.numel():
        return
    form = find_format(key_cache.dtype, k_scale, kv_cache_dtype)
    given = key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
    if form.is_measured:
        launch = lower_measured_write(*given, k_global_scale, v_global_scale, form)
    else:
        launch = lower_write(*given, form)
    compiled = launch_kernel(
        launch.kernel, launch.grid, *launch.arguments, num_warps=launch.num_warps
    )
    record_write(signature, compiled, launch.tokens, launch.grid[1], launch.arguments)


@operator(sizes={"tokens": "num_tokens"})
def gather_cache(
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    seq_start_loc: StartLoc,
    num_tokens: int,
    k_scale: Scale | float | None = None,
    v_scale: Scale | float | None = None,
    dtype: torch.dtype | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
) -> tuple[Key, Value]:
    """Return the keys and values of whole sequences, concatenated."""
    check_gather_cache(
        key_cache,
        value_cache,
        block_table,
        seq_start_loc,
        num_tokens,
        k_scale,
        v_scale,
        dtype,
        k_global_scale,
        v_global_scale,
        contents=values_checked(key_cache),
    )
    check_launch(key_cache)
    _, block_size, kv_heads, _ = key_cache.shape
    head_size, value_head_size = (
        cache.shape[3] if dtype is None else head_size_of(cache)
        for cache in (key_cache, value_cache)
    )
    result_dtype = key_cache.dtype if dtype is None else dtype
    buffer_dtype = torch.float32 if must_widen(result_dtype) and dtype else result_dtype
    key = key_cache.new_empty(num_tokens, kv_heads, head_size, dtype=buffer_dtype)
    value = key.new_empty(num_tokens, kv_heads, value_head_size)
    if not key.numel() or not value.numel():
        return key.to(result_dtype), value.to(result_dtype)
    key_bits, value_bits = as_bits(key_cache, value_cache)
    results = (key, value) if dtype else as_bits(key, value)
    num_reqs = block_table.shape[0]
    form = find_format(key_cache.dtype, k_scale)
    common = (
        *results,
        block_table,
        seq_start_loc.contiguous(),
        num_tokens,
        kv_heads,
        block_size,
        num_reqs,
        num_reqs.bit_length(),
        *block_table.stride(),
        head_size,
        value_head_size,
        form.name,
        dtype is not None and has_native_fp8(key_cache.device),
    )
    programs = triton.cdiv(num_tokens, TOKENS_PER_PROGRAM)
    if form.is_measured and dtype is not None:
        gather_measured_kv_kernel[(programs, kv_heads)](
            measured_half(key_bits, k_scale, k_global_scale),
            measured_half(value_bits, v_scale, v_global_scale),
            *common,
            TOKENS=TOKENS_PER_PROGRAM,
            BLOCK_D=triton.next_power_of_2(head_size),
            BLOCK_DV=triton.next_power_of_2(value_head_size),
            K_ALIGNMENT=align_rows(key_bits),
            V_ALIGNMENT=align_rows(value_bits),
        )
        return key.to(result_dtype), value.to(result_dtype)
    elements = kv_heads * max(head_size, value_head_size)
    tile = choose_tile(elements)
    gather_kv_kernel[(programs, triton.cdiv(elements, tile))](
        CacheHalf(key_bits, *scale_arguments(k_scale), *key_cache.stride()),
        CacheHalf(value_bits, *scale_arguments(v_scale), *value_cache.stride()),
        *common,
        TOKENS=TOKENS_PER_PROGRAM,
        ELEMENTS=tile,
    )
    return key.to(result_dtype), value.to(result_dtype)


@operator(changed=["kv_caches"])
def copy_blocks(kv_caches: Sequence[LayerKVCache], block_mapping: BlockMapping) -> None:
    """Copy whole blocks to other blocks, in every layer."""
    check_copy_blocks(kv_caches, block_mapping)
    for kv_cache in kv_caches:
        _copy_on_device(kv_cache, kv_cache, block_mapping)


@operator(changed=["destination"])
def swap_blocks(
    source: SourceKVCache,
    destination: DestinationKVCache,
    block_mapping: BlockMapping,
) -> None:
    """Copy whole blocks from one cache to another, possibly on another device.

    Between devices the blocks are gathered into one buffer, copied and scattered. The call
    returns when the copy has finished.
    """
    check_swap_blocks(source, destination, block_mapping)
    if source.device == destination.device:
        _copy_on_device(source, destination, block_mapping)
        return
    from_blocks = block_mapping[:, 0].to(source.device)
    to_blocks = block_mapping[:, 1].to(destination.device)
    source, destination = as_bits(source, destination)
    destination[:, to_blocks] = source[:, from_blocks].to(destination.device)


def _copy_on_device(source: Tensor, destination: Tensor, block_mapping: Tensor) -> None:
    check_launch(source)
    pairs = block_mapping.shape[0]
    _, _, block_size, kv_heads, head_size = source.shape
    elements = block_size * kv_heads * head_size
    if not pairs or not elements:
        return
    tile = choose_tile(elements)
    source, destination = as_bits(source, destination)
    copy_blocks_kernel[(pairs, 2, triton.cdiv(elements, tile))](
        source,
        destination,
        block_mapping.to(source.device).contiguous(),
        elements,
        *source.stride(),
        *destination.stride(),
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        ELEMENTS=tile,
    )

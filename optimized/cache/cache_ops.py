"""Cache operations: write, gather, copy and swap keys and values.

One launch moves all tokens; each program copies a tile of tokens by elements, with any strides.
Elements are copied as integers of their width, so no bit changes. Only between an FP8 cache and a
wider dtype are they converted, and there both twins agree bitwise too. Addresses are 64-bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    check_block_mapping,
    check_gather_cache,
    check_kv_caches_alike,
    check_reshape_and_cache,
    values_checked,
)
from ..kernels.fp8 import (
    decode_fp8,
    encode_fp8,
    has_native_fp8,
    load_scale,
    scale_arguments,
)
from ..launch.launcher import check_launch, must_widen
from ..launch.operators import operator
from .slot_mapping import find_request

TOKENS_PER_PROGRAM = 4
MAX_ELEMENTS_PER_PROGRAM = 1024

AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@operator(changed=["key_cache", "value_cache"])
def reshape_and_cache(
    key: Key,
    value: Value,
    key_cache: KeyCache,
    value_cache: ValueCache,
    slot_mapping: SlotMapping,
    k_scale: Scale | float | None = None,
    v_scale: Scale | float | None = None,
) -> None:
    """Write each new token's key and value to its slot."""
    check_reshape_and_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        contents=values_checked(),
    )
    check_launch(key_cache)
    num_slots = slot_mapping.shape[0]
    _, block_size, kv_heads, head_size = key_cache.shape
    value_head_size = value_cache.shape[3]
    elements = kv_heads * max(head_size, value_head_size)
    if not num_slots or not key_cache.numel() or not value_cache.numel():
        return
    dtype = key_cache.dtype
    if k_scale is None:
        key, value = as_bits(key, value)
    key_cache, value_cache = as_bits(key_cache, value_cache)
    tile = min(MAX_ELEMENTS_PER_PROGRAM, triton.next_power_of_2(elements))
    grid = (triton.cdiv(num_slots, TOKENS_PER_PROGRAM), triton.cdiv(elements, tile))
    _write_kernel[grid](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *scale_arguments(k_scale),
        *scale_arguments(v_scale),
        num_slots,
        kv_heads,
        block_size,
        slot_mapping.stride(0),
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        HEAD_SIZE=head_size,
        VALUE_HEAD_SIZE=value_head_size,
        E5M2=dtype == torch.float8_e5m2,
        TOKENS=TOKENS_PER_PROGRAM,
        ELEMENTS=tile,
    )


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
        contents=values_checked(),
    )
    check_launch(key_cache)
    _, block_size, kv_heads, head_size = key_cache.shape
    value_head_size = value_cache.shape[3]
    result_dtype = key_cache.dtype if dtype is None else dtype
    buffer_dtype = torch.float32 if must_widen(result_dtype) and dtype else result_dtype
    key = key_cache.new_empty(num_tokens, kv_heads, head_size, dtype=buffer_dtype)
    value = key.new_empty(num_tokens, kv_heads, value_head_size)
    elements = kv_heads * max(head_size, value_head_size)
    if not key.numel() or not value.numel():
        return key.to(result_dtype), value.to(result_dtype)
    results = (key, value) if dtype else as_bits(key, value)
    num_reqs = block_table.shape[0]
    tile = min(MAX_ELEMENTS_PER_PROGRAM, triton.next_power_of_2(elements))
    grid = (triton.cdiv(num_tokens, TOKENS_PER_PROGRAM), triton.cdiv(elements, tile))
    _gather_kernel[grid](
        *as_bits(key_cache, value_cache),
        *results,
        block_table,
        seq_start_loc.contiguous(),
        *scale_arguments(k_scale),
        *scale_arguments(v_scale),
        num_tokens,
        kv_heads,
        block_size,
        num_reqs,
        num_reqs.bit_length(),
        *block_table.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        HEAD_SIZE=head_size,
        VALUE_HEAD_SIZE=value_head_size,
        E5M2=key_cache.dtype == torch.float8_e5m2,
        NATIVE_FP8=dtype is not None and has_native_fp8(key_cache.device),
        TOKENS=TOKENS_PER_PROGRAM,
        ELEMENTS=tile,
    )
    return key.to(result_dtype), value.to(result_dtype)


@operator(changed=["kv_caches"])
def copy_blocks(kv_caches: Sequence[LayerKVCache], block_mapping: BlockMapping) -> None:
    """Copy whole blocks to other blocks, in every layer."""
    check_kv_caches_alike(kv_caches)
    for kv_cache in kv_caches:
        num_blocks = kv_cache.shape[1]
        check_block_mapping(block_mapping, num_blocks, num_blocks, same_cache=True)
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
    check_kv_caches_alike([source, destination])
    check_block_mapping(
        block_mapping, source.shape[1], destination.shape[1], same_cache=False
    )
    if source.device == destination.device:
        _copy_on_device(source, destination, block_mapping)
        return
    from_blocks = block_mapping[:, 0].to(source.device)
    to_blocks = block_mapping[:, 1].to(destination.device)
    source, destination = as_bits(source, destination)
    destination[:, to_blocks] = source[:, from_blocks].to(destination.device)


def as_bits(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of the tensors as integers of the same width."""
    return tuple(each.view(AS_INTEGERS[each.element_size()]) for each in tensors)


def _copy_on_device(source: Tensor, destination: Tensor, block_mapping: Tensor) -> None:
    check_launch(source)
    pairs = block_mapping.shape[0]
    _, _, block_size, kv_heads, head_size = source.shape
    elements = block_size * kv_heads * head_size
    if not pairs or not elements:
        return
    tile = min(MAX_ELEMENTS_PER_PROGRAM, triton.next_power_of_2(elements))
    source, destination = as_bits(source, destination)
    _copy_kernel[(pairs, 2, triton.cdiv(elements, tile))](
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


@triton.jit(do_not_specialize=["num_slots"])
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    k_scale_stride,
    v_scale,
    v_scale_stride,
    num_slots,
    kv_heads,
    block_size,
    mapping_stride,
    key_stride_token,
    key_stride_head,
    key_stride_element,
    value_stride_token,
    value_stride_head,
    value_stride_element,
    key_cache_stride_block,
    key_cache_stride_slot,
    key_cache_stride_head,
    key_cache_stride_element,
    value_cache_stride_block,
    value_cache_stride_slot,
    value_cache_stride_head,
    value_cache_stride_element,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    E5M2: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS).to(tl.int64)
    head, part = element // HEAD_SIZE, element % HEAD_SIZE
    value_head, value_part = element // VALUE_HEAD_SIZE, element % VALUE_HEAD_SIZE
    slot = tl.load(
        slot_mapping + token * mapping_stride, mask=token < num_slots, other=-1
    )
    # step: skip tokens without a slot
    stored = (slot >= 0)[:, None] & (head < kv_heads)[None, :]
    value_stored = (slot >= 0)[:, None] & (value_head < kv_heads)[None, :]
    # step: find block and offset
    block_id, offset = slot // block_size, slot % block_size
    source = (token * key_stride_token)[:, None]
    source += (head * key_stride_head + part * key_stride_element)[None, :]
    new_key = tl.load(key + source, mask=stored, other=0)
    source = (token * value_stride_token)[:, None]
    source += (value_head * value_stride_head + value_part * value_stride_element)[
        None, :
    ]
    new_value = tl.load(value + source, mask=value_stored, other=0)
    # step: divide by the scales if the cache is FP8
    if k_scale is not None:
        scale = load_scale(k_scale, k_scale_stride, head, head < kv_heads)
        new_key = encode_fp8(tl.div_rn(new_key.to(tl.float32), scale), E5M2)
        scale = load_scale(v_scale, v_scale_stride, value_head, value_head < kv_heads)
        new_value = encode_fp8(tl.div_rn(new_value.to(tl.float32), scale), E5M2)
    # step: store the key and the value
    slots = block_id * key_cache_stride_block + offset * key_cache_stride_slot
    parts = head * key_cache_stride_head + part * key_cache_stride_element
    tl.store(key_cache + slots[:, None] + parts[None, :], new_key, mask=stored)
    slots = block_id * value_cache_stride_block + offset * value_cache_stride_slot
    parts = value_head * value_cache_stride_head
    parts += value_part * value_cache_stride_element
    tl.store(
        value_cache + slots[:, None] + parts[None, :], new_value, mask=value_stored
    )


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "num_halvings", "table_stride_req"]
)
def _gather_kernel(
    key_cache,
    value_cache,
    key,
    value,
    block_table,
    seq_start_loc,
    k_scale,
    k_scale_stride,
    v_scale,
    v_scale_stride,
    num_tokens,
    kv_heads,
    block_size,
    num_reqs,
    num_halvings,
    table_stride_req,
    table_stride_entry,
    key_cache_stride_block,
    key_cache_stride_slot,
    key_cache_stride_head,
    key_cache_stride_element,
    value_cache_stride_block,
    value_cache_stride_slot,
    value_cache_stride_head,
    value_cache_stride_element,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS).to(tl.int64)
    head, part = element // HEAD_SIZE, element % HEAD_SIZE
    value_head, value_part = element // VALUE_HEAD_SIZE, element % VALUE_HEAD_SIZE
    req = find_request(seq_start_loc, token, num_reqs, num_halvings)
    owned = (token < num_tokens) & (req < num_reqs)
    position = token - tl.load(seq_start_loc + req, mask=owned, other=0)
    # step: look up the block
    row = block_table + req.to(tl.int64) * table_stride_req
    entry = (position // block_size).to(tl.int64) * table_stride_entry
    block_id = tl.load(row + entry, mask=owned, other=0).to(tl.int64)
    # step: add the offset in the block
    offset = (position % block_size).to(tl.int64)
    # step: copy the key and the value
    inside, value_inside = head < kv_heads, value_head < kv_heads
    slots = block_id * key_cache_stride_block + offset * key_cache_stride_slot
    parts = head * key_cache_stride_head + part * key_cache_stride_element
    read = owned[:, None] & inside[None, :]
    one_key = tl.load(key_cache + slots[:, None] + parts[None, :], mask=read, other=0)
    slots = block_id * value_cache_stride_block + offset * value_cache_stride_slot
    parts = value_head * value_cache_stride_head
    parts += value_part * value_cache_stride_element
    read = owned[:, None] & value_inside[None, :]
    one_value = tl.load(
        value_cache + slots[:, None] + parts[None, :], mask=read, other=0
    )
    # step: multiply by the scales if another dtype is requested
    if k_scale is not None:
        scale = load_scale(k_scale, k_scale_stride, head, inside)
        one_key = decode_fp8(one_key, E5M2, NATIVE_FP8).to(tl.float32) * scale
        scale = load_scale(v_scale, v_scale_stride, value_head, value_inside)
        one_value = decode_fp8(one_value, E5M2, NATIVE_FP8).to(tl.float32) * scale
    written = (token < num_tokens)[:, None]
    to = token.to(tl.int64)[:, None] * (kv_heads * HEAD_SIZE) + element[None, :]
    tl.store(key + to, one_key, mask=written & inside[None, :])
    to = token.to(tl.int64)[:, None] * (kv_heads * VALUE_HEAD_SIZE) + element[None, :]
    tl.store(value + to, one_value, mask=written & value_inside[None, :])


@triton.jit
def _copy_kernel(
    source,
    destination,
    block_mapping,
    elements,
    source_stride_half,
    source_stride_block,
    source_stride_slot,
    source_stride_head,
    source_stride_element,
    destination_stride_half,
    destination_stride_block,
    destination_stride_slot,
    destination_stride_head,
    destination_stride_element,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    pair = tl.program_id(0)
    half = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
    slot = (element // (KV_HEADS * HEAD_SIZE)).to(tl.int64)
    head = (element // HEAD_SIZE % KV_HEADS).to(tl.int64)
    part = (element % HEAD_SIZE).to(tl.int64)
    taken = tl.load(block_mapping + 2 * pair)
    given = tl.load(block_mapping + 2 * pair + 1)
    inside = element < elements
    start = source + half * source_stride_half + taken * source_stride_block
    place = slot * source_stride_slot + head * source_stride_head
    moved = tl.load(start + place + part * source_stride_element, mask=inside)
    start = (
        destination + half * destination_stride_half + given * destination_stride_block
    )
    place = slot * destination_stride_slot + head * destination_stride_head
    tl.store(start + place + part * destination_stride_element, moved, mask=inside)

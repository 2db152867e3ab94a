"""How do keys and values get into the cache, out of it, and from block to block?

Each loop over tokens becomes one launch whose programs move a tile of tokens by elements, through
whatever strides the tensors have, bit for bit: 16-bit and 32-bit elements travel as integers, so
no rounding can touch them. Addresses are 64-bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shared.refusals import (
    check_block_mapping,
    check_gather_cache,
    check_kv_caches_alike,
    check_reshape_and_cache,
    values_checked,
)
from ..shared.shapes import (
    BlockMapping,
    BlockTable,
    DestinationKVCache,
    Key,
    KeyCache,
    KVCache,
    SlotMapping,
    SourceKVCache,
    StartLoc,
    Value,
    ValueCache,
)
from ._launch import check_launch
from .slot_mapping import find_request

TOKENS_PER_PROGRAM = 4
MAX_ELEMENTS_PER_PROGRAM = 1024

AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def reshape_and_cache(
    key: Key,
    value: Value,
    key_cache: KeyCache,
    value_cache: ValueCache,
    slot_mapping: SlotMapping,
) -> None:
    """Write each new token's key and value to its slot."""
    check_reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, contents=values_checked()
    )
    check_launch(key_cache)
    num_slots = slot_mapping.shape[0]
    _, block_size, kv_heads, head_size = key_cache.shape
    elements = kv_heads * head_size
    if not num_slots or not key_cache.numel():
        return
    key, value, key_cache, value_cache = as_bits(key, value, key_cache, value_cache)
    tile = min(MAX_ELEMENTS_PER_PROGRAM, triton.next_power_of_2(elements))
    grid = (triton.cdiv(num_slots, TOKENS_PER_PROGRAM), triton.cdiv(elements, tile))
    _write_kernel[grid](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_slots,
        elements,
        block_size,
        slot_mapping.stride(0),
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        HEAD_SIZE=head_size,
        TOKENS=TOKENS_PER_PROGRAM,
        ELEMENTS=tile,
    )


def gather_cache(
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    seq_start_loc: StartLoc,
    num_tokens: int,
) -> tuple[Key, Value]:
    """Return the keys and values of whole sequences, one after another."""
    check_gather_cache(
        key_cache,
        value_cache,
        block_table,
        seq_start_loc,
        num_tokens,
        contents=values_checked(),
    )
    check_launch(key_cache)
    _, block_size, kv_heads, head_size = key_cache.shape
    key = key_cache.new_empty(num_tokens, kv_heads, head_size)
    value = torch.empty_like(key)
    elements = kv_heads * head_size
    if not key.numel():
        return key, value
    bits = as_bits(key_cache, value_cache, key, value)
    num_reqs = block_table.shape[0]
    tile = min(MAX_ELEMENTS_PER_PROGRAM, triton.next_power_of_2(elements))
    grid = (triton.cdiv(num_tokens, TOKENS_PER_PROGRAM), triton.cdiv(elements, tile))
    _gather_kernel[grid](
        *bits,
        block_table,
        seq_start_loc.contiguous(),
        num_tokens,
        elements,
        block_size,
        num_reqs,
        num_reqs.bit_length(),
        *block_table.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        HEAD_SIZE=head_size,
        TOKENS=TOKENS_PER_PROGRAM,
        ELEMENTS=tile,
    )
    return key, value


def copy_blocks(kv_caches: Sequence[KVCache], block_mapping: BlockMapping) -> None:
    """Copy whole blocks to other blocks, in every layer."""
    check_kv_caches_alike(kv_caches)
    for kv_cache in kv_caches:
        num_blocks = kv_cache.shape[1]
        check_block_mapping(block_mapping, num_blocks, num_blocks, same_cache=True)
    for kv_cache in kv_caches:
        _copy_on_device(kv_cache, kv_cache, block_mapping)


def swap_blocks(
    source: SourceKVCache,
    destination: DestinationKVCache,
    block_mapping: BlockMapping,
) -> None:
    """Copy whole blocks from one cache to another, which may lie on another device.

    Between devices the blocks are gathered into one buffer, sent, and scattered; the call
    returns when they have arrived.
    """
    check_kv_caches_alike([source, destination])
    check_block_mapping(
        block_mapping, source.shape[1], destination.shape[1], same_cache=False
    )
    if source.device == destination.device:
        _copy_on_device(source, destination, block_mapping)
        return
    taken = block_mapping[:, 0].to(source.device)
    given = block_mapping[:, 1].to(destination.device)
    destination[:, given] = source[:, taken].to(destination.device)


def as_bits(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors seen as integers of the same width."""
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
    num_slots,
    elements,
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
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    head, part = element // HEAD_SIZE, element % HEAD_SIZE
    slot = tl.load(
        slot_mapping + token * mapping_stride, mask=token < num_slots, other=-1
    )
    # step: skip tokens without a slot
    stored = (slot >= 0)[:, None] & (element < elements)[None, :]
    # step: find block and offset
    block_id, offset = slot // block_size, slot % block_size
    # step: store the key and the value
    source = (token * key_stride_token)[:, None]
    source += (head * key_stride_head + part * key_stride_element)[None, :]
    slots = block_id * key_cache_stride_block + offset * key_cache_stride_slot
    parts = head * key_cache_stride_head + part * key_cache_stride_element
    moved = tl.load(key + source, mask=stored, other=0)
    tl.store(key_cache + slots[:, None] + parts[None, :], moved, mask=stored)
    source = (token * value_stride_token)[:, None]
    source += (head * value_stride_head + part * value_stride_element)[None, :]
    slots = block_id * value_cache_stride_block + offset * value_cache_stride_slot
    parts = head * value_cache_stride_head + part * value_cache_stride_element
    moved = tl.load(value + source, mask=stored, other=0)
    tl.store(value_cache + slots[:, None] + parts[None, :], moved, mask=stored)


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
    num_tokens,
    elements,
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
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    head, part = element // HEAD_SIZE, element % HEAD_SIZE
    req = find_request(seq_start_loc, token, num_reqs, num_halvings)
    owned = (token < num_tokens) & (req < num_reqs)
    position = token - tl.load(seq_start_loc + req, mask=owned, other=0)
    # step: look the block up
    row = block_table + req.to(tl.int64) * table_stride_req
    entry = (position // block_size).to(tl.int64) * table_stride_entry
    block_id = tl.load(row + entry, mask=owned, other=0).to(tl.int64)
    # step: count slots into it
    offset = (position % block_size).to(tl.int64)
    # step: copy the key and the value
    read = owned[:, None] & (element < elements)[None, :]
    written = (token < num_tokens)[:, None] & (element < elements)[None, :]
    to = token.to(tl.int64)[:, None] * elements + element[None, :]
    slots = block_id * key_cache_stride_block + offset * key_cache_stride_slot
    parts = head * key_cache_stride_head + part * key_cache_stride_element
    moved = tl.load(key_cache + slots[:, None] + parts[None, :], mask=read, other=0)
    tl.store(key + to, moved, mask=written)
    slots = block_id * value_cache_stride_block + offset * value_cache_stride_slot
    parts = head * value_cache_stride_head + part * value_cache_stride_element
    moved = tl.load(value_cache + slots[:, None] + parts[None, :], mask=read, other=0)
    tl.store(value + to, moved, mask=written)


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
    head, part = element // HEAD_SIZE % KV_HEADS, element % HEAD_SIZE
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

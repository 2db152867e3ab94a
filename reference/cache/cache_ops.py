"""Cache operations: write, gather, copy and swap keys and values.

A step first writes the keys and values of its new tokens, each to its slot. Attention then reads
whole sequences back through the block table. Blocks also move as blocks: a copy when two sequences
that share one begin to differ, a swap when memory runs out and a sequence waits on the host. A
cache of eight bits a number (FP8) holds each number divided by a scale, so that what keys and
values reach fits what eight bits reach; who reads it multiplies by the scale again.
"""

from collections.abc import Sequence

import torch

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
)
from ._fp8 import dequantise, quantise


def reshape_and_cache(
    key: Key,
    value: Value,
    key_cache: KeyCache,
    value_cache: ValueCache,
    slot_mapping: SlotMapping,
    k_scale: Scale | float | None = None,
    v_scale: Scale | float | None = None,
) -> None:
    """Write each new token's key and value to its slot.

    Args:
        key: [tokens, kv_heads, head_size], any strides (a slice of a fused projection is fine).
        value: [tokens, kv_heads, value_head_size], any strides.
        key_cache: [num_blocks, block_size, kv_heads, head_size], changed.
        value_cache: [num_blocks, block_size, kv_heads, value_head_size], changed.
        slot_mapping: [slots] slot of the first `slots` tokens; a negative one is not stored.
            Tokens past its end are padding and are not stored either.
        k_scale, v_scale: of an FP8 cache, what its numbers are multiplied with when they are
            read: one for all or [kv_heads] float32, above 0. What is stored is the number
            divided by it, rounded to nearest even; past the largest FP8 number, that number.
            None: the cache is not quantised.

    Raises:
        IndexError: a slot lies outside the cache.
        ValueError: shapes or devices that do not fit, two tokens for one slot, an FP8 cache
            without scales or scales without one.
        TypeError: key or value of another dtype than the cache, or FP8 before they are written.

    Source:
        vLLM's `reshape_and_cache_flash`.

    Example:
        block_size 4, slot_mapping [9, -1]: token 0 goes to offset 1 of block 2, token 1 nowhere.

        >>> key_cache = torch.zeros(3, 4, 1, 1)
        >>> key = torch.tensor([[[5.0]], [[6.0]]])
        >>> slot_mapping = torch.tensor([9, -1])
        >>> reshape_and_cache(key, key, key_cache, key_cache.clone(), slot_mapping)
        >>> key_cache.flatten()
        tensor([0., 0., 0., 0., 0., 0., 0., 0., 0., 5., 0., 0.])
        >>> key_cache = torch.zeros(3, 4, 1, 1, dtype=torch.float8_e4m3fn)
        >>> value_cache = key_cache.clone()
        >>> reshape_and_cache(
        ...     key, key, key_cache, value_cache, slot_mapping,
        ...     k_scale=0.5, v_scale=0.01,
        ... )
        >>> float(key_cache[2, 1]), float(value_cache[2, 1])
        (10.0, 448.0)
    """
    check_reshape_and_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        contents=True,
    )
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        # step: skip tokens without a slot
        if slot < 0:
            continue
        # step: find block and offset
        block_id, offset = divmod(slot, block_size)
        new_key, new_value = key[token], value[token]
        # step: divide by the scales if the cache is FP8
        if k_scale is not None and v_scale is not None:
            new_key = quantise(new_key, k_scale, key_cache.dtype)
            new_value = quantise(new_value, v_scale, value_cache.dtype)
        # step: store the key and the value
        key_cache[block_id, offset] = new_key
        value_cache[block_id, offset] = new_value


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
    """Return the keys and values of whole sequences, one after another.

    Args:
        key_cache: [num_blocks, block_size, kv_heads, head_size].
        value_cache: [num_blocks, block_size, kv_heads, value_head_size].
        block_table: [reqs, max_blocks].
        seq_start_loc: [reqs + 1] where each sequence starts in the result.
        num_tokens: rows of the result; what lies past the last sequence is zero.
        k_scale, v_scale: what the numbers of an FP8 cache are multiplied with, in float32, for a
            result in `dtype`: one for all or [kv_heads] float32, above 0.
        dtype: of the result; None: that of the cache, an FP8 cache's bytes as they are.

    Returns:
        Key [num_tokens, kv_heads, head_size] and value [num_tokens, kv_heads, value_head_size].

    Raises:
        IndexError: a sequence longer than its row, or a block id outside the cache.
        ValueError: lengths or devices that do not fit, scales or a dtype for a cache that is not
            FP8, the one without the other.
        TypeError: a dtype that is not a float of 16 bits or more.

    Source:
        vLLM's `gather_cache`.

    Example:
        >>> key_cache = torch.arange(12.0).view(3, 4, 1, 1)
        >>> key, value = gather_cache(
        ...     key_cache,
        ...     key_cache,
        ...     block_table=torch.tensor([[2, 0]], dtype=torch.int32),
        ...     seq_start_loc=torch.tensor([0, 6], dtype=torch.int32),
        ...     num_tokens=6,
        ... )
        >>> key.flatten()
        tensor([ 8.,  9., 10., 11.,  0.,  1.])
        >>> key, value = gather_cache(
        ...     key_cache.to(torch.float8_e4m3fn),
        ...     key_cache.to(torch.float8_e4m3fn),
        ...     block_table=torch.tensor([[2, 0]], dtype=torch.int32),
        ...     seq_start_loc=torch.tensor([0, 6], dtype=torch.int32),
        ...     num_tokens=6,
        ...     k_scale=0.5,
        ...     v_scale=1.0,
        ...     dtype=torch.float32,
        ... )
        >>> key.flatten()
        tensor([4.0000, 4.5000, 5.0000, 5.5000, 0.0000, 0.5000])
    """
    check_gather_cache(
        key_cache,
        value_cache,
        block_table,
        seq_start_loc,
        num_tokens,
        k_scale,
        v_scale,
        dtype,
        contents=True,
    )
    block_size, kv_heads, head_size = key_cache.shape[1:]
    key = key_cache.new_zeros(num_tokens, kv_heads, head_size)
    value = value_cache.new_zeros(num_tokens, kv_heads, value_cache.shape[-1])
    starts = seq_start_loc.tolist()
    for req, row in enumerate(block_table):
        positions = torch.arange(starts[req + 1] - starts[req], device=row.device)
        # step: look up the block
        block_ids = row[positions // block_size].long()
        # step: add the offset in the block
        offsets = positions % block_size
        # step: copy the key and the value
        key[starts[req] : starts[req + 1]] = key_cache[block_ids, offsets]
        value[starts[req] : starts[req + 1]] = value_cache[block_ids, offsets]
    # step: multiply by the scales if another dtype is requested
    if dtype is not None and k_scale is not None and v_scale is not None:
        key = dequantise(key, k_scale, dtype)
        value = dequantise(value, v_scale, dtype)
    return key, value


def copy_blocks(kv_caches: Sequence[LayerKVCache], block_mapping: BlockMapping) -> None:
    """Copy whole blocks to other blocks, in every layer.

    Args:
        kv_caches: for each layer [2, num_blocks, block_size, kv_heads, head_size], changed.
        block_mapping: [pairs, 2] int64 on the host: source block, destination block.

    Raises:
        IndexError: a block id outside the cache.
        ValueError: a block that is written twice, or written and read: the result would depend
            on the order.

    Source:
        vLLM's `copy_blocks`, which leaves that order undefined.

    Example:
        >>> kv_cache = torch.arange(6.0).view(2, 3, 1, 1, 1)
        >>> copy_blocks([kv_cache], torch.tensor([[2, 0]]))
        >>> kv_cache.flatten()
        tensor([2., 1., 2., 5., 4., 5.])
    """
    check_kv_caches_alike(kv_caches)
    for kv_cache in kv_caches:
        num_blocks = kv_cache.shape[1]
        check_block_mapping(block_mapping, num_blocks, num_blocks, same_cache=True)
    for kv_cache in kv_caches:
        for source, destination in block_mapping.tolist():
            kv_cache[:, destination] = kv_cache[:, source]


def swap_blocks(
    source: SourceKVCache,
    destination: DestinationKVCache,
    block_mapping: BlockMapping,
) -> None:
    """Copy whole blocks from one cache to another, which may lie on another device.

    Args:
        source: [2, source_blocks, block_size, kv_heads, head_size].
        destination: [2, destination_blocks, block_size, kv_heads, head_size], changed.
        block_mapping: [pairs, 2] int64 on the host: block of source, block of destination.

    Raises:
        IndexError: a block id outside its cache.
        ValueError: caches that do not fit, or a block written twice.

    Source:
        vLLM's `swap_blocks`.

    Example:
        >>> on_device = torch.arange(6.0).view(2, 3, 1, 1, 1)
        >>> on_host = torch.zeros(2, 2, 1, 1, 1)
        >>> swap_blocks(on_device, on_host, torch.tensor([[2, 0]]))
        >>> on_host.flatten()
        tensor([2., 0., 5., 0.])
    """
    check_kv_caches_alike([source, destination])
    check_block_mapping(
        block_mapping, source.shape[1], destination.shape[1], same_cache=False
    )
    for taken, given in block_mapping.tolist():
        destination[:, given] = source[:, taken].to(destination.device)

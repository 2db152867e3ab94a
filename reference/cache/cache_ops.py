"""Cache operations: write, gather, copy and swap keys and values.

A step first writes the keys and values of its new tokens to their slots. Attention then reads
whole sequences through the block table. Whole blocks are copied when two sequences that share a
block diverge, and swapped to the host when device memory runs out. A quantized cache stores codes
of eight or four bits, which readers multiply by a scale (formats/). The scales of an FP8 cache are
given. In the formats with a scale per token and head, or per block of channels, each write measures
them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.cache_formats import head_size_of
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
    validated,
)
from .formats import encode, load_slots


@validated(check_reshape_and_cache)
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
    """Write each new token's key and value to its slot.

    Args:
        key: [tokens, kv_heads, head_size], any strides (for example a slice of a fused projection).
        value: [tokens, kv_heads, value_head_size], any strides.
        key_cache: [num_blocks, block_size, kv_heads, head_size], modified in place.
        value_cache: [num_blocks, block_size, kv_heads, value_head_size], modified in place.
        slot_mapping: [slots] slot of the first `slots` tokens. A token with a negative slot is
            not stored. Tokens past the end are padding and are not stored either.
        k_scale, v_scale: Optional. Scales of an FP8 cache: one number or [kv_heads] float32,
            above 0. Readers multiply by them. The stored number is divided by the scale, rounded
            to nearest even and saturated. Scales of a format with one per token and head:
            [num_blocks, block_size, kv_heads] float32 with any strides, modified in place: each
            slot gets those of its token. Scales of a format with one per block of channels:
            [num_blocks, block_size, kv_heads, head_size / 16] float8_e4m3fn, modified in place.
            If None, the cache is not quantized.
        kv_cache_dtype: Optional. Name of the format, for formats that differ in what is written
            alone, such as "int4_per_token_head_vllm" or "nvfp4_4over6". If None, the first format
            that the dtype and the scales have.
        k_global_scale, v_global_scale: Optional. What block scales are multiplied by, above 0. If
            None, the format has no block scales.

    Raises:
        IndexError: a slot is outside the cache.
        ValueError: shapes or devices are inconsistent, two tokens have the same slot, a quantized
            cache has no scales, another cache has some, or the name is that of another format.
        TypeError: key or value has another dtype than the cache, or is FP8 already.

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
        >>> codes, scales = torch.zeros(3, 4, 1, 1, dtype=torch.int8), torch.zeros(3, 4, 1)
        >>> reshape_and_cache(
        ...     key, key, codes, codes.clone(), slot_mapping,
        ...     k_scale=scales, v_scale=scales.clone(),
        ... )
        >>> int(codes[2, 1]), round(float(scales[2, 1]), 4)
        (127, 0.0394)
        >>> pair = torch.tensor([[[4.0, 1.0]]])
        >>> packed = torch.zeros(2, 3, 4, 1, 1, dtype=torch.uint8)
        >>> steps = torch.zeros(2, 3, 4, 1)
        >>> reshape_and_cache(pair, pair, *packed, slot_mapping[:1], *steps)
        >>> int(packed[0, 2, 1]), round(float(steps[0, 2, 1]), 4)
        (249, 0.3333)
        >>> row = torch.tensor([6.0, 4.8, -1.0, 0.4] + [0.0] * 12).view(1, 1, 16)
        >>> four_bits = torch.zeros(2, 3, 4, 1, 8, dtype=torch.uint8)
        >>> blocks = torch.zeros(2, 3, 4, 1, 1).to(torch.float8_e4m3fn)
        >>> reshape_and_cache(
        ...     row, row, *four_bits, slot_mapping[:1], *blocks,
        ...     k_global_scale=0.5, v_global_scale=0.5,
        ... )
        >>> four_bits[0, 2, 1, 0, :2].tolist(), float(blocks[0, 2, 1])
        ([103, 26], 2.0)
    """
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        # step: skip tokens without a slot
        if slot < 0:
            continue
        # step: find block and offset
        block_id, offset = divmod(slot, block_size)
        for new, cache, scale, global_scale in (
            (key[token], key_cache, k_scale, k_global_scale),
            (value[token], value_cache, v_scale, v_global_scale),
        ):
            # step: encode the key and the value in the format of the cache
            codes, measured = encode(new, cache, scale, kv_cache_dtype, global_scale)
            # step: store the key and the value
            cache[block_id, offset] = codes
            if measured is not None and isinstance(scale, Tensor):
                scale[block_id, offset] = measured


@validated(check_gather_cache)
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
    """Return the keys and values of whole sequences, concatenated.

    Args:
        key_cache: [num_blocks, block_size, kv_heads, head_size].
        value_cache: [num_blocks, block_size, kv_heads, value_head_size].
        block_table: [reqs, max_blocks].
        seq_start_loc: [reqs + 1] start of each sequence in the result.
        num_tokens: rows of the result. Rows past the last sequence are zero.
        k_scale, v_scale: Optional. Scales of a quantized cache, as in `reshape_and_cache`. The
            product is computed in float32 and rounded to `dtype`.
        dtype: Optional. Dtype of the result. If None, the dtype of the cache, unscaled.
        k_global_scale, v_global_scale: Optional. What block scales are multiplied by, as in
            `reshape_and_cache`.

    Returns:
        Key [num_tokens, kv_heads, head_size] and value [num_tokens, kv_heads, value_head_size].

    Raises:
        IndexError: a sequence is longer than its row, or a block id is outside the cache.
        ValueError: lengths or devices are inconsistent, or scales and dtype are not given
            together and for a quantized cache only.
        TypeError: the dtype is not a float of at least 16 bits.

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
    block_size, kv_heads = key_cache.shape[1:3]
    sizes = [
        cache.shape[-1] if dtype is None else head_size_of(cache)
        for cache in (key_cache, value_cache)
    ]
    key = key_cache.new_zeros(num_tokens, kv_heads, sizes[0], dtype=dtype)
    value = value_cache.new_zeros(num_tokens, kv_heads, sizes[1], dtype=dtype)
    starts = seq_start_loc.tolist()
    for req, row in enumerate(block_table):
        positions = torch.arange(starts[req + 1] - starts[req], device=row.device)
        # step: look up the block
        block_ids = row[positions // block_size].long()
        # step: add the offset in the block
        offsets = positions % block_size
        for result, cache, scale, global_scale in (
            (key, key_cache, k_scale, k_global_scale),
            (value, value_cache, v_scale, v_global_scale),
        ):
            # step: copy the key and the value
            slots = cache[block_ids, offsets]
            # step: multiply by the scales if another dtype is requested
            if dtype is not None:
                slots = load_slots(
                    cache, block_ids, offsets, torch.float32, scale, global_scale
                )
            result[starts[req] : starts[req + 1]] = slots
    return key, value


@typed
def copy_blocks(kv_caches: Sequence[LayerKVCache], block_mapping: BlockMapping) -> None:
    """Copy whole blocks to other blocks, in every layer.

    Args:
        kv_caches: per layer [2, num_blocks, block_size, kv_heads, head_size], modified in place.
            Scales in tensors of their own are copied by a call of their own, as [..., 1] or
            [..., blocks].
        block_mapping: [pairs, 2] int64 on the host: source block, destination block.

    Raises:
        IndexError: a block id is outside the cache.
        ValueError: a block is written twice, or both written and read: the result would depend
            on the order of the copies.

    Source:
        vLLM's `copy_blocks`.

    Example:
        >>> kv_cache = torch.arange(6.0).view(2, 3, 1, 1, 1)
        >>> copy_blocks([kv_cache], torch.tensor([[2, 0]]))
        >>> kv_cache.flatten()
        tensor([2., 1., 2., 5., 4., 5.])
    """
    check_copy_blocks(kv_caches, block_mapping)
    for kv_cache in kv_caches:
        for source, destination in block_mapping.tolist():
            kv_cache[:, destination] = kv_cache[:, source]


@typed
def swap_blocks(
    source: SourceKVCache,
    destination: DestinationKVCache,
    block_mapping: BlockMapping,
) -> None:
    """Copy whole blocks from one cache to another, possibly on another device.

    Args:
        source: [2, source_blocks, block_size, kv_heads, head_size].
        destination: [2, destination_blocks, block_size, kv_heads, head_size], modified in place.
        block_mapping: [pairs, 2] int64 on the host: block of source, block of destination.

    Raises:
        IndexError: a block id is outside its cache.
        ValueError: the caches have different layouts, or a block is written twice.

    Source:
        vLLM's `swap_blocks`.

    Example:
        >>> on_device = torch.arange(6.0).view(2, 3, 1, 1, 1)
        >>> on_host = torch.zeros(2, 2, 1, 1, 1)
        >>> swap_blocks(on_device, on_host, torch.tensor([[2, 0]]))
        >>> on_host.flatten()
        tensor([2., 0., 5., 0.])
    """
    check_swap_blocks(source, destination, block_mapping)
    for from_block, to_block in block_mapping.tolist():
        destination[:, to_block] = source[:, from_block].to(destination.device)

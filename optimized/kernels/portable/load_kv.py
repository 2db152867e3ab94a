"""Loading of KV tiles: block-table lookup, masked loads, decoding."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .formats.cache_format import (
    decode_k,
    decode_v,
    has_two_parts,
    is_packed,
    load_tile_scales,
)


class KVSource(NamedTuple):
    """The keys and values of one kv head of one request.

    Args:
        k, v: pointers to the head: in the cache, or to the request's first key.
        block_table: Pointer to the request's row; () without a block table.
        kv_head: the head.
    """

    k: Any
    v: Any
    block_table: Any
    kv_head: Any


@triton.jit
def locate_kv(call, req, kv_head, config: tl.constexpr):
    """Return the keys and values of one kv head of a request, and their number."""
    tensors, strides = call.tensors, call.strides
    k = tensors.k + kv_head.to(tl.int64) * strides.k_head
    v = tensors.v + kv_head.to(tl.int64) * strides.v_head
    block_table = ()
    if config.BLOCK_SIZE > 0:
        seq_len = tl.load(tensors.seq_lens + req)
        block_table = (
            tensors.block_table + tl.cast(req, tl.int64) * call.table_stride_req
        )
    else:
        key_start = tl.load(tensors.seq_lens + req)
        seq_len = tl.load(tensors.seq_lens + req + 1) - key_start
        k += key_start.to(tl.int64) * strides.k_slot
        v += key_start.to(tl.int64) * strides.v_slot
    return KVSource(k, v, block_table, kv_head), seq_len


@triton.jit
def kv_offsets(kv, strides, keys, config: tl.constexpr, MASKED: tl.constexpr):
    """Return the offsets of a tile's keys and of its values, and their blocks and slots.

    All are [BLOCK_N]. Without a block table the last two are the keys' indices.
    """
    n = keys.n
    is_key = keys.is_key
    if config.BLOCK_SIZE > 0:
        index = n // config.BLOCK_SIZE
        if config.INDEX_64:
            index = index.to(tl.int64)
        entry = kv.block_table + index * strides.table_entry
        block_id = tl.load(entry, mask=is_key, other=0) if MASKED else tl.load(entry)
        # tiles begin at multiples of their size
        in_tile = tl.arange(0, config.BLOCK_N)
        slot = in_tile if config.BLOCK_N % config.BLOCK_SIZE == 0 else n
        slot = slot % config.BLOCK_SIZE
        if config.INDEX_64:
            block_id = block_id.to(tl.int64)
            slot = slot.to(tl.int64)
        k_offset = block_id * strides.k_block + slot * strides.k_slot
        v_offset = block_id * strides.v_block + slot * strides.v_slot
    else:
        block_id = n.to(tl.int64) if config.INDEX_64 else n
        slot = block_id
        k_offset = slot * strides.k_slot
        v_offset = slot * strides.v_slot
    return k_offset, v_offset, block_id, slot


@triton.jit
def load_kv_tile(call, kv, keys, dtype, config: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile of keys and one of values. With ROPE_DIM the values are columns of the keys.

    Masked rows of V may hold NaN, and 0 * NaN = NaN, so they are loaded as 0.

    Args:
        call: KernelCall.
        kv: KVSource.
        keys: KVTileKeys.
        dtype: of the queries as they are multiplied.

    Returns:
        k: [BLOCK_N, BLOCK_D].
        k_rope: [BLOCK_N, BLOCK_ROPE], the elements after those of k; () without ROPE_DIM.
        v: [BLOCK_N, BLOCK_DV]; k itself with ROPE_DIM.
        scales: TileScales.
    """
    strides = call.strides
    k_offset, v_offset, block_id, slot = kv_offsets(kv, strides, keys, config, MASKED)
    k = load_columns(
        kv.k, k_offset, strides.k_element, keys.is_key, 0, config.HEAD_DIM,
        config.BLOCK_D, config, MASKED,
    )  # fmt: skip
    if config.ROPE_DIM > 0:
        k_rope = load_columns(
            kv.k, k_offset, strides.k_element, keys.is_key, config.HEAD_DIM,
            config.ROPE_DIM, config.BLOCK_ROPE, config, MASKED,
        )  # fmt: skip
        v = k
    else:
        k_rope = ()
        v = load_columns(
            kv.v, v_offset, strides.v_element, keys.is_key, 0, config.V_HEAD_DIM,
            config.BLOCK_DV, config, MASKED,
        )  # fmt: skip
    scales = load_tile_scales(call, kv.kv_head, block_id, slot, keys, config, MASKED)
    if config.ROPE_DIM > 0:
        k_rope = decode_k(k_rope, scales, dtype, config)
        v = decode_v(v, scales, dtype, config)
        k = v
    else:
        k = decode_k(k, scales, dtype, config)
        if has_two_parts(config.CACHE_FORMAT, dtype):
            # weights times the scales of values may exceed float16
            dtype = call.tensors.q.dtype.element_ty
        v = decode_v(v, scales, dtype, config)
    return k, k_rope, v, scales


@triton.jit
def load_columns(
    kv, offset, stride, is_key, FIRST: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, config: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return elements of a tile's keys or values from FIRST on, as they are stored.

    Args:
        kv: pointer to a head.
        offset, is_key: [BLOCK_N] where its keys or values begin, and which of them exist.
        stride: from element to element.
        COLUMNS: how many elements; further ones are 0.
        BLOCK: those, rounded up to a power of two.

    Returns:
        [BLOCK_N, BLOCK]; half as many columns if a byte has two codes.
    """
    codes: tl.constexpr = 2 if is_packed(config.CACHE_FORMAT) else 1
    d = tl.arange(0, BLOCK // codes)
    mask = (d < COLUMNS // codes)[None, :]
    if MASKED:
        mask = is_key[:, None] & mask
    places = offset[:, None] + ((FIRST + d) * stride)[None, :]
    return tl.load(kv + places, mask=mask, other=0)

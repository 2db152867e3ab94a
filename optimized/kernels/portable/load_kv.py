"""Loading of KV tiles: block-table lookup, masked loads, FP8 decoding."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..fp8 import decode_fp8, decode_fp8_pinned


class KVSource(NamedTuple):
    """The keys and values of one kv head of one request.

    Args:
        k, v: pointers to the head: in the cache, or to the request's first key.
        block_table: Pointer to the request's row; () without a block table.
    """

    k: Any
    v: Any
    block_table: Any


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
    return KVSource(k, v, block_table), seq_len


@triton.jit
def kv_offsets(kv, strides, keys, config: tl.constexpr, MASKED: tl.constexpr):
    """Return the offsets of a tile's keys and of its values: [BLOCK_N] each."""
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
        index = n.to(tl.int64) if config.INDEX_64 else n
        k_offset = index * strides.k_slot
        v_offset = index * strides.v_slot
    return k_offset, v_offset


@triton.jit
def load_kv_tile(kv, strides, keys, dtype, config: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile of keys, [BLOCK_N, BLOCK_D], and of values, [BLOCK_N, BLOCK_DV].

    Masked rows of V may hold NaN, and 0 * NaN = NaN, so they are loaded as 0.

    Args:
        kv, strides: KVSource, Strides.
        keys: KVTileKeys.
        dtype: of the queries, in which both are returned.
    """
    d = tl.arange(0, config.BLOCK_D)
    dv = tl.arange(0, config.BLOCK_DV)
    k_mask = (d < config.HEAD_DIM)[None, :]
    v_mask = (dv < config.V_HEAD_DIM)[None, :]
    if MASKED:
        k_mask = keys.is_key[:, None] & k_mask
        v_mask = keys.is_key[:, None] & v_mask
    k_offset, v_offset = kv_offsets(kv, strides, keys, config, MASKED)
    k = tl.load(
        kv.k + k_offset[:, None] + (d * strides.k_element)[None, :],
        mask=k_mask,
        other=0,
    )
    v = tl.load(
        kv.v + v_offset[:, None] + (dv * strides.v_element)[None, :],
        mask=v_mask,
        other=0,
    )
    if config.CACHE_FP8:
        k = decode_fp8(k, config.CACHE_FP8 == 2, config.NATIVE_FP8).to(dtype)
        if config.PIN_FP8_V:
            v = decode_fp8_pinned(v, config.CACHE_FP8 == 2, config.NATIVE_FP8)
        else:
            v = decode_fp8(v, config.CACHE_FP8 == 2, config.NATIVE_FP8)
        v = v.to(dtype)
    elif config.UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    return k, v

"""Conversion of the keys and values of long requests from codes to 16 bits, in blocks of 128.

A prefill reads each key once per query tile. So keys are converted once before it, and not once
per read. FP8 numbers and codes of eight bits are exact in float16 and in bfloat16. Scales of heads
are left to the softmax and the epilogue, and those of keys to the scores, so neither is rounded.
A value that has a scale of its own is multiplied by it and rounded, as weights are.

Rows of int4 are rotated back. Before their scale they are integers, up to 1,920 in rotations of
128 channels. Keys are exact in float16 then, and their scales are left to the scores too. If scores
are small and the log-sum-exp is not wanted, keys with scales of their own are multiplied and
rounded as values are (`CodePrefillPlan`).

A cache of 16 bits is copied, if the prefill kernel does not load its blocks by TMA.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...fp8 import load_scale
from ...portable.formats.cache_format import (
    decode_codes,
    has_slot_scales,
    is_packed,
    is_plain,
    is_rotated,
)
from ...portable.formats.int4_per_token_head import count_channels, split_scales
from ...portable.options.visible_range import visible_range
from ..common.entry import Number, Option, Pointer, make_kernel
from .rotation import decode_rotated

BLOCK = tl.constexpr(128)
"""Keys per block of the converted cache: the most that one TMA box of the prefill kernel loads."""


class CacheStrides(NamedTuple):
    """Strides of keys or values, in elements.

    Args:
        block, slot, head, element: of the cache of codes.
        converted_slot: of the converted cache.
        table_entry: of the block table.
    """

    block: Any
    slot: Any
    head: Any
    element: Any
    converted_slot: Any
    table_entry: Any


class UpcastArguments(NamedTuple):
    """The arguments of `upcast_kernel`, in their order.

    Args:
        k, v: cache of codes, FP8 as uint8, or of numbers in 16 bits.
        k_out, v_out: [reqs * num_blocks, BLOCK, kv_heads, head size] in 16 bits; keys may have
            another dtype than values. Rows past the end of a sequence, and blocks that no query
            attends to, are not written.
        table_out: [reqs, num_blocks] block table of the converted cache.
        k_scales_out, v_scales_out: [query_heads] float32 scale of each query head; not written for
            a cache of 16 bits. If each key has
            a scale, `k_scales_out` is [kv_heads, reqs * num_blocks * BLOCK] instead, or None if
            keys are multiplied by them. Values always are.
        k_scale, v_scale: scales of the cache: pointers or numbers.
        short_rows: requests of at most so many rows are not converted.
        num_blocks: blocks per request.
    """

    k: Pointer
    v: Pointer
    block_table: Pointer
    query_start_loc: Pointer
    seq_lens: Pointer
    k_out: Pointer
    v_out: Pointer
    table_out: Pointer
    k_scales_out: Pointer
    v_scales_out: Pointer
    k_scale: Option
    v_scale: Option
    short_rows: Number
    num_blocks: Number
    table_stride_req: Number


@triton.jit
def _convert(
    base, block_table, n, is_key, is_stored, head, out, strides, scale, scale_strides,
    factors, config: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store one block of one head of the converted cache.

    Args:
        n: [BLOCK] indices in the sequence.
        is_key: [BLOCK] keys that some query attends to. Others that are stored become 0.
        out: pointer to the block's first key of this head.
        strides: `CacheStrides`.
        scale, scale_strides: of the cache.
        factors: Optional. Pointer to where the scales of the block's keys are stored. If None,
            numbers that have scales of their own are multiplied by them.
    """
    # constants of their own: triton 3.6 takes no field of a NamedTuple for one
    FORMAT: tl.constexpr = config.CACHE_FORMAT
    ALIGNMENT: tl.constexpr = config.ALIGNMENT
    CODES: tl.constexpr = 2 if is_packed(FORMAT) else 1
    d = tl.arange(0, BLOCK_D // CODES)
    is_element = (d < HEAD_DIM // CODES)[None, :]
    entry = (n // config.BLOCK_SIZE).to(tl.int64) * strides.table_entry
    block = tl.load(block_table + entry, mask=is_key, other=0).to(tl.int64)
    slot = (n % config.BLOCK_SIZE).to(tl.int64)
    offset = block * strides.block + slot * strides.slot
    offset = (
        offset[:, None]
        + head.to(tl.int64) * strides.head
        + (d * strides.element)[None, :]
    )
    elements = base + offset
    if ALIGNMENT > 1:
        elements = tl.multiple_of(elements, [1, ALIGNMENT])
    codes = tl.load(elements, mask=is_key[:, None] & is_element, other=0)
    in_block = tl.arange(0, BLOCK)
    if has_slot_scales(FORMAT):
        places = scale + head.to(tl.int64) * scale_strides.head
        places += block * scale_strides.block + slot * scale_strides.slot
        of_slot = tl.load(places, mask=is_key, other=0.0)
        if is_rotated(FORMAT):
            of_slot, zero_point = split_scales(of_slot)
            numbers = decode_rotated(codes, zero_point, HEAD_DIM, BLOCK_D)
            of_slot *= 1.0 / count_channels(HEAD_DIM)
        else:
            numbers = decode_codes(codes, FORMAT, config.NATIVE_FP8)
        if factors is None:
            numbers = numbers * of_slot[:, None]
        else:
            tl.store(factors + in_block, of_slot, mask=is_stored)
    elif is_plain(FORMAT):
        numbers = codes
    else:
        numbers = decode_codes(codes, FORMAT, config.NATIVE_FP8)
    d = tl.arange(0, BLOCK_D)
    is_element = (d < HEAD_DIM)[None, :]
    tl.store(
        out + (in_block * strides.converted_slot)[:, None] + d[None, :],
        numbers.to(out.dtype.element_ty),
        mask=is_stored[:, None] & is_element,
    )


@triton.jit
def upcast_blocks(args, k_strides, v_strides, scale_strides, config: tl.constexpr):
    """Convert the keys or the values of one block of one head of one request.

    Grid: (2 * kv_heads, num_blocks, reqs). The first programs have keys, the others values.

    Args:
        args: `UpcastArguments`.
        k_strides, v_strides: `CacheStrides`.
        scale_strides: ScaleStrides.
        config: Config, with the masks of the call.
    """
    kv_heads = tl.num_programs(0) // 2
    head = tl.program_id(0) % kv_heads
    has_keys = tl.program_id(0) < kv_heads
    block = tl.program_id(1)
    req = tl.program_id(2)
    number = req * args.num_blocks + block
    if tl.program_id(0) == 0:
        tl.store(args.table_out + number, number)
    if not (has_slot_scales(config.CACHE_FORMAT) or is_plain(config.CACHE_FORMAT)):
        for i in range(config.GROUP_SIZE if (number == 0) & has_keys else 0):
            query_head = head * config.GROUP_SIZE + i
            factor = load_scale(args.k_scale, scale_strides.k, head, True)
            tl.store(args.k_scales_out + query_head, factor)
            factor = load_scale(args.v_scale, scale_strides.v, head, True)
            tl.store(args.v_scales_out + query_head, factor)
    query_len = tl.load(args.query_start_loc + req + 1) - tl.load(
        args.query_start_loc + req
    )
    seq_len = tl.load(args.seq_lens + req)
    begin, _ = visible_range(seq_len - query_len, seq_len, True, config)
    first = block * BLOCK
    is_long = query_len * config.GROUP_SIZE > args.short_rows
    if is_long & (first < seq_len) & (first + BLOCK > begin):
        n = first + tl.arange(0, BLOCK)
        is_stored = n < seq_len
        is_key = is_stored & (n >= begin)
        entries = args.block_table + tl.cast(req, tl.int64) * args.table_stride_req
        slot = number.to(tl.int64) * BLOCK
        if has_keys:
            factors = None
            if args.k_scales_out is not None:
                blocks = tl.num_programs(1).to(tl.int64) * tl.num_programs(2)
                factors = args.k_scales_out + (head * blocks) * BLOCK + slot
            _convert(
                args.k, entries, n, is_key, is_stored, head,
                args.k_out + slot * k_strides.converted_slot + head * config.HEAD_DIM,
                k_strides, args.k_scale, scale_strides.k, factors,
                config, config.BLOCK_D, config.HEAD_DIM,
            )  # fmt: skip
        else:
            _convert(
                args.v, entries, n, is_key, is_stored, head,
                args.v_out + slot * v_strides.converted_slot + head * config.V_HEAD_DIM,
                v_strides, args.v_scale, scale_strides.v, None,
                config, config.BLOCK_DV, config.V_HEAD_DIM,
            )  # fmt: skip


upcast_kernel = make_kernel(
    "upcast_kernel", upcast_blocks, UpcastArguments, triton.jit, is_aligned=True
)

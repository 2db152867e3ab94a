"""Conversion of the keys and values of long requests from FP8 to 16 bits.

A prefill reads each key once per query tile. So keys are converted once before it, and not once
per read. FP8 numbers are exact in float16 and in bfloat16. Their scales are left to
the softmax and the epilogue, so nothing is rounded.
"""

import triton
import triton.language as tl

from ...fp8 import decode_fp8, load_scale
from ...portable.options.visible_range import visible_range

BLOCK = tl.constexpr(128)
"""Keys per block of the converted cache: the most that one TMA box of the prefill kernel loads."""

NUMBERS = ["short_rows", "num_blocks", "table_stride_req"]


@triton.jit
def _convert(
    base, block_table, n, is_key, is_stored, head, out, strides,
    config: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store one block of one head of the converted cache.

    Args:
        n: [BLOCK] indices in the sequence.
        is_key: [BLOCK] keys that some query attends to. Others that are stored become 0.
        out: pointer to the block's first key of this head.
        strides: of the cache's blocks, slots, heads and elements, and of the converted slots.
    """
    d = tl.arange(0, BLOCK_D)
    is_element = (d < HEAD_DIM)[None, :]
    entry = (n // config.BLOCK_SIZE).to(tl.int64) * strides[5]
    block = tl.load(block_table + entry, mask=is_key, other=0)
    slot = (n % config.BLOCK_SIZE).to(tl.int64)
    offset = block.to(tl.int64) * strides[0] + slot * strides[1]
    offset = (
        offset[:, None] + head.to(tl.int64) * strides[2] + (d * strides[3])[None, :]
    )
    codes = tl.load(base + offset, mask=is_key[:, None] & is_element, other=0)
    numbers = decode_fp8(codes, config.CACHE_FP8 == 2, config.NATIVE_FP8)
    in_block = tl.arange(0, BLOCK)
    tl.store(
        out + (in_block * strides[4])[:, None] + d[None, :],
        numbers.to(out.dtype.element_ty),
        mask=is_stored[:, None] & is_element,
    )


@triton.jit(do_not_specialize=NUMBERS)
def upcast_kernel(
    k,
    v,
    block_table,
    query_start_loc,
    seq_lens,
    k_out,
    v_out,
    table_out,
    k_scales_out,
    v_scales_out,
    k_scale,
    v_scale,
    short_rows,
    num_blocks,
    table_stride_req,
    k_strides,
    v_strides,
    scale_strides,
    config: tl.constexpr,
):
    """Convert one block of one head of one request. Grid: (kv_heads, num_blocks, reqs).

    Args:
        k, v: uint8 cache.
        k_out, v_out: [reqs * num_blocks, BLOCK, kv_heads, head size] in 16 bits. Rows past the end
            of a sequence, and blocks that no query attends to, are not written.
        table_out: [reqs, num_blocks] block table of the converted cache.
        k_scales_out, v_scales_out: [query_heads] float32 scale of each query head.
        k_scale, v_scale: scales of the cache: pointers or numbers.
        short_rows: requests of at most so many rows are not converted.
        num_blocks: blocks per request.
        k_strides, v_strides: see `_convert`.
        scale_strides: ScaleStrides.
        config: Config, with the masks of the call.
    """
    head = tl.program_id(0)
    block = tl.program_id(1)
    req = tl.program_id(2)
    number = req * num_blocks + block
    if head == 0:
        tl.store(table_out + number, number)
    if number == 0:
        for i in range(config.GROUP_SIZE):
            query_head = head * config.GROUP_SIZE + i
            factor = load_scale(k_scale, scale_strides.k, head, True)
            tl.store(k_scales_out + query_head, factor)
            factor = load_scale(v_scale, scale_strides.v, head, True)
            tl.store(v_scales_out + query_head, factor)
    query_len = tl.load(query_start_loc + req + 1) - tl.load(query_start_loc + req)
    seq_len = tl.load(seq_lens + req)
    begin, _ = visible_range(seq_len - query_len, seq_len, True, config)
    first = block * BLOCK
    is_long = query_len * config.GROUP_SIZE > short_rows
    if is_long & (first < seq_len) & (first + BLOCK > begin):
        n = first + tl.arange(0, BLOCK)
        is_stored = n < seq_len
        is_key = is_stored & (n >= begin)
        entries = block_table + tl.cast(req, tl.int64) * table_stride_req
        slot = number.to(tl.int64) * BLOCK
        _convert(
            k, entries, n, is_key, is_stored, head,
            k_out + slot * k_strides[4] + head * config.HEAD_DIM,
            k_strides, config, config.BLOCK_D, config.HEAD_DIM,
        )  # fmt: skip
        _convert(
            v, entries, n, is_key, is_stored, head,
            v_out + slot * v_strides[4] + head * config.V_HEAD_DIM,
            v_strides, config, config.BLOCK_DV, config.V_HEAD_DIM,
        )  # fmt: skip

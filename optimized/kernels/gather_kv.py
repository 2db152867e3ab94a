"""Triton kernels that gather keys and values of whole sequences from their paged cache.

Elements come as they are stored, as integers of their width, or as the numbers that they stand for.
Offsets are 64-bit.
"""

import triton
import triton.language as tl

from .find_request import find_request
from .fp8 import load_scale
from .kv_cache import locate
from .measured_write import locate_rows
from .portable.formats.cache_format import decode_codes, decode_measured

TOKENS_PER_PROGRAM = 4
"""Tokens that a program gathers."""


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "num_halvings", "table_stride_req"]
)
def gather_kv_kernel(
    key_cache,
    value_cache,
    key,
    value,
    block_table,
    seq_start_loc,
    num_tokens,
    kv_heads,
    block_size,
    num_reqs,
    num_halvings,
    table_stride_req,
    table_stride_entry,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Copy a tile of tokens of concatenated sequences from the cache.

    Args:
        key_cache, value_cache: CacheHalf.
        num_halvings: bits of num_reqs.
        CACHE_FORMAT: name of the format of the cache.
        TOKENS, ELEMENTS: tokens of the tile, and elements of all heads of a token.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS).to(tl.int64)
    head, part = element // HEAD_SIZE, element % HEAD_SIZE
    value_head, value_part = element // VALUE_HEAD_SIZE, element % VALUE_HEAD_SIZE
    block_id, offset, is_token = find_slots(
        token, block_table, seq_start_loc, num_tokens, block_size, num_reqs,
        num_halvings, table_stride_req, table_stride_entry,
    )  # fmt: skip
    # step: copy the key and the value
    is_head, is_value_head = head < kv_heads, value_head < kv_heads
    at = locate(key_cache, block_id, offset, head, part)
    one_key = tl.load(at, mask=is_token[:, None] & is_head[None, :], other=0)
    at = locate(value_cache, block_id, offset, value_head, value_part)
    one_value = tl.load(at, mask=is_token[:, None] & is_value_head[None, :], other=0)
    # step: multiply by the scales if another dtype is requested
    if key_cache.scale is not None:
        one_key = dequantise(
            one_key, key_cache, head, is_head, CACHE_FORMAT, NATIVE_FP8
        )
        one_value = dequantise(
            one_value, value_cache, value_head, is_value_head, CACHE_FORMAT, NATIVE_FP8
        )
    written = (token < num_tokens)[:, None]
    to = token.to(tl.int64)[:, None] * (kv_heads * HEAD_SIZE) + element[None, :]
    tl.store(key + to, one_key, mask=written & is_head[None, :])
    to = token.to(tl.int64)[:, None] * (kv_heads * VALUE_HEAD_SIZE) + element[None, :]
    tl.store(value + to, one_value, mask=written & is_value_head[None, :])


@triton.jit
def dequantise(
    codes, cache, head, is_head, CACHE_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr
):
    """Return the numbers that the codes of a cache mean: [TOKENS, ELEMENTS] float32.

    Args:
        head, is_head: [ELEMENTS].
    """
    scale = load_scale(cache.scale, cache.scale_stride, head, is_head)
    return decode_codes(codes, CACHE_FORMAT, NATIVE_FP8) * scale


@triton.jit
def find_slots(
    token, block_table, seq_start_loc, num_tokens, block_size, num_reqs, num_halvings,
    table_stride_req, table_stride_entry,
):  # fmt: skip
    """Return the blocks and offsets of tokens of concatenated sequences, and which exist.

    All are [TOKENS], as `token` is.
    """
    req = find_request(seq_start_loc, token, num_reqs, num_halvings)
    is_token = (token < num_tokens) & (req < num_reqs)
    position = token - tl.load(seq_start_loc + req, mask=is_token, other=0)
    # step: look up the block
    row = block_table + req.to(tl.int64) * table_stride_req
    entry = (position // block_size).to(tl.int64) * table_stride_entry
    block_id = tl.load(row + entry, mask=is_token, other=0).to(tl.int64)
    # step: add the offset in the block
    return block_id, (position % block_size).to(tl.int64), is_token


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "num_halvings", "table_stride_req"]
)
def gather_measured_kv_kernel(
    key_cache,
    value_cache,
    key,
    value,
    block_table,
    seq_start_loc,
    num_tokens,
    kv_heads,
    block_size,
    num_reqs,
    num_halvings,
    table_stride_req,
    table_stride_entry,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    K_ALIGNMENT: tl.constexpr,
    V_ALIGNMENT: tl.constexpr,
):
    """Copy one head of a tile of tokens from a cache with a scale per slot and head, as numbers.

    Grid: (tiles of tokens, kv_heads).

    Args:
        key_cache, value_cache: MeasuredHalf.
        num_halvings: bits of num_reqs.
        CACHE_FORMAT, NATIVE_FP8: name of the format of the cache, and whether FP8 numbers are
            decoded by an instruction.
        TOKENS, BLOCK_D, BLOCK_DV: tokens of the tile, and elements of a key and of a value,
            rounded up to powers of two.
        K_ALIGNMENT, V_ALIGNMENT: see `align_rows`.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    block_id, offset, is_token = find_slots(
        token, block_table, seq_start_loc, num_tokens, block_size, num_reqs,
        num_halvings, table_stride_req, table_stride_entry,
    )  # fmt: skip
    row = token.to(tl.int64) * kv_heads + head
    _gather_measured(
        key, key_cache, row, head, block_id, offset, is_token, token < num_tokens,
        HEAD_SIZE, BLOCK_D, CACHE_FORMAT, NATIVE_FP8, K_ALIGNMENT,
    )  # fmt: skip
    _gather_measured(
        value, value_cache, row, head, block_id, offset, is_token, token < num_tokens,
        VALUE_HEAD_SIZE, BLOCK_DV, CACHE_FORMAT, NATIVE_FP8, V_ALIGNMENT,
    )  # fmt: skip


@triton.jit
def _gather_measured(
    result, cache, row, head, block_id, offset, is_token, is_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CACHE_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Copy the keys or the values of one head of some tokens.

    Args:
        result: [tokens, kv_heads, SIZE], packed.
        row: [TOKENS] rows of the result.
        block_id, offset, is_token, is_row: [TOKENS] their slots, which tokens exist, and which
            rows do.
    """
    # step: copy the key and the value
    at, of_scale, is_code, has_scale = locate_rows(
        cache, block_id, offset, head, is_token, SIZE, BLOCK, CACHE_FORMAT, ALIGNMENT
    )
    codes = tl.load(at, mask=is_code, other=0)
    scale = tl.load(of_scale, mask=has_scale, other=0)
    # step: multiply by the scales if another dtype is requested
    numbers = decode_measured(
        codes, scale, cache.global_scale, SIZE, BLOCK, CACHE_FORMAT, NATIVE_FP8
    )
    numbers = tl.where(is_token[:, None], numbers, 0.0)
    part = tl.arange(0, BLOCK)
    to = row[:, None] * SIZE + part[None, :]
    tl.store(result + to, numbers, mask=is_row[:, None] & (part < SIZE)[None, :])

"""Triton kernels of attention over records: a tile of records is decoded in registers.

A decoded tile of latents is the keys and the values of all heads. Rows of a query tile are query
tokens times heads of one request. The keys of a request may be split over several programs. Their
partial results are combined by a second kernel, in the order of the keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..softmax import LN_2, finite, normalize, start_softmax, update_softmax
from .record import COLUMNS, ROPE, find_slots, load_latents, load_rope


class Batch(NamedTuple):
    """The requests of a call, as a kernel's argument.

    Args:
        block_table, query_start_loc, seq_lens: As in `latent_decode_attention`. If the call names
            slots, an entry of the table is a slot.
        table_stride_req, table_stride_entry: Strides of the block table.
        block_size: Tokens per block of the cache.
        window: Optional. Keys that a query attends to, its own included. If None, all are visible.
    """

    block_table: Any
    query_start_loc: Any
    seq_lens: Any
    table_stride_req: Any
    table_stride_entry: Any
    block_size: Any
    window: Any


class Results(NamedTuple):
    """Where rows are stored, as a kernel's argument, with strides in elements.

    Args:
        out: [splits, tokens, heads, RANK].
        lse: Optional. [splits, heads, tokens].
    """

    out: Any
    lse: Any
    stride_split: Any
    stride_token: Any
    stride_head: Any
    lse_stride_split: Any
    lse_stride_head: Any
    lse_stride_token: Any


class DecodeTiles(NamedTuple):
    """Sizes and dtypes of a decode's tiles, compile-time constants.

    Args:
        BLOCK_M, BLOCK_N: Rows of a query tile, and records of a KV tile.
        DOT: Dtype of the products' operands. Decoded latents are exact in bfloat16, if their scales
            are powers of two or FP8 numbers. Those of some formats are outside of the range of
            float16 (`choose_dot_dtype`).
        PRECISION: Of products of float32 operands. tf32 holds every float16 mantissa.
        ROUND: Dtype that weights are rounded to.
        IS_SPLIT: Whether partial results are stored, with a log-sum-exp in base 2.
        NAMES_SLOTS: Whether the entries of the block table are slots, not blocks.
    """

    BLOCK_M: int
    BLOCK_N: int
    DOT: Any
    PRECISION: str
    ROUND: Any
    IS_SPLIT: bool
    NAMES_SLOTS: bool


@triton.jit(do_not_specialize=["num_splits"])
def decode_records_kernel(
    query, kv_cache, batch, results, qk_scale, num_heads, num_splits,
    config: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Attend with one query tile to one split of its request's records.

    Args:
        query: [tokens, heads, RANK + ROPE], packed.
        kv_cache, batch, results: RecordCache, Batch, Results.
        qk_scale: Factor of the dot products, in base 2.
        config, tiles: RecordConfig, DecodeTiles.
    """
    req, split = tl.program_id(1), tl.program_id(2)
    start = tl.load(batch.query_start_loc + req)
    query_len = tl.load(batch.query_start_loc + req + 1) - start
    seq_len = tl.load(batch.seq_lens + req)
    row = tl.program_id(0) * tiles.BLOCK_M + tl.arange(0, tiles.BLOCK_M)
    first_token = tl.program_id(0) * tiles.BLOCK_M // num_heads
    if first_token >= query_len:
        return
    is_row = row < query_len * num_heads  # [BLOCK_M]
    token, head = row // num_heads, row % num_heads
    position = seq_len - query_len + token
    last_token = tl.minimum(
        ((tl.program_id(0) + 1) * tiles.BLOCK_M - 1) // num_heads, query_len - 1
    )
    end = seq_len - query_len + last_token + 1
    begin = tl.zeros_like(end)
    if batch.window is not None:
        first_key = seq_len - query_len + first_token - batch.window + 1
        begin = tl.maximum(first_key, 0) // tiles.BLOCK_N * tiles.BLOCK_N
    kv_tiles = tl.cdiv(tl.cdiv(end - begin, tiles.BLOCK_N), num_splits)
    begin += split * kv_tiles * tiles.BLOCK_N
    end = tl.minimum(end, begin + kv_tiles * tiles.BLOCK_N)
    global_row = (start + token).to(tl.int64) * num_heads + head  # [BLOCK_M]
    element, rope_element = tl.arange(0, COLUMNS), tl.arange(0, ROPE)
    rows = query + (global_row * (config.RANK + ROPE))[:, None]
    is_element = is_row[:, None] & (element < config.RANK)[None, :]
    q = tl.load(rows + element[None, :], mask=is_element, other=0.0).to(tiles.DOT)
    q_rope = tl.load(
        rows + config.RANK + rope_element[None, :], mask=is_row[:, None], other=0.0
    ).to(tiles.DOT)
    acc, l_i, m_i = start_softmax(tiles.BLOCK_M, COLUMNS)
    table_row = batch.block_table + req.to(tl.int64) * batch.table_stride_req
    for start_n in range(begin, end, tiles.BLOCK_N):
        # gather the sequence's records and decode them
        key = start_n + tl.arange(0, tiles.BLOCK_N)  # [BLOCK_N]
        is_key = key < end
        if tiles.NAMES_SLOTS:
            entry = key.to(tl.int64) * batch.table_stride_entry
            slot = tl.load(table_row + entry, mask=is_key, other=0).to(tl.int64)
            block_id, offset = slot // batch.block_size, slot % batch.block_size
        else:
            entry = (key // batch.block_size).to(tl.int64) * batch.table_stride_entry
            block_id = tl.load(table_row + entry, mask=is_key, other=0).to(tl.int64)
            offset = (key % batch.block_size).to(tl.int64)
        slots = find_slots(kv_cache, block_id, offset, batch.block_size, is_key, config)
        kv = load_latents(kv_cache, slots, tl.float32, config).to(tiles.DOT)
        k_rope = load_rope(kv_cache, slots, config).to(tiles.DOT)
        # compute the scaled dot products of queries and keys
        qk = tl.dot(q_rope, tl.trans(k_rope), input_precision=tiles.PRECISION)
        qk = tl.dot(q, tl.trans(kv), qk, input_precision=tiles.PRECISION)
        qk *= qk_scale  # [BLOCK_M, BLOCK_N]
        # mask the keys that are not visible
        visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if batch.window is not None:
            visible &= key[None, :] > position[:, None] - batch.window
        qk = tl.where(visible, qk, -float("inf"))
        # turn scores into weights (softmax) and average the latents by them
        p, acc, l_i, m_i = update_softmax(acc, l_i, m_i, qk, True)
        p = p.to(tiles.ROUND).to(tiles.DOT)
        acc = tl.dot(p, kv, acc, input_precision=tiles.PRECISION)
    result, lse = normalize(acc, l_i, m_i)
    places = (split.to(tl.int64) * results.stride_split)[None]
    places += (start + token).to(tl.int64) * results.stride_token
    places += head * results.stride_head
    stored: tl.constexpr = results.out.dtype.element_ty
    tl.store(
        results.out + places[:, None] + element[None, :],
        result.to(stored),
        mask=is_element,
    )
    if results.lse is not None:
        if not tiles.IS_SPLIT:
            lse *= LN_2
        store_lse(results, lse, split, start + token, head, is_row)


@triton.jit
def store_lse(results, lse, split, token, head, is_row):
    """Store the log-sum-exp of rows: [BLOCK_M], all of one split."""
    places = token.to(tl.int64) * results.lse_stride_token
    places += head.to(tl.int64) * results.lse_stride_head
    places += split.to(tl.int64) * results.lse_stride_split
    tl.store(results.lse + places, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_splits"])
def combine_records_kernel(
    partial_out, partial_lse, results, num_tokens, num_heads, num_splits,
    config: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one row.

    Args:
        partial_out: [splits, tokens, heads, RANK] float32, packed.
        partial_lse: [splits, heads, tokens] float32 in base 2, packed; -inf without a key.
        results: Results of one split.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    element = tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], dtype=tl.float32)
    l_i, m_i = 0.0, -float("inf")
    for split in range(num_splits):
        partial = tl.load(partial_lse + (split * num_heads + head) * num_tokens + token)
        row = (split * num_tokens + token).to(tl.int64) * num_heads + head
        # a row without a key was not stored
        stored_elements = tl.where(partial == -float("inf"), 0, config.RANK)
        result = tl.load(
            partial_out + row * config.RANK + element,
            mask=element < stored_elements,
            other=0.0,
        )
        m_new = tl.maximum(m_i, partial)
        shift = finite(m_new)
        alpha, weight = tl.exp2(m_i - shift), tl.exp2(partial - shift)
        acc = acc * alpha + result * weight
        l_i = l_i * alpha + weight
        m_i = m_new
    divisor = tl.where(l_i > 0, l_i, 1.0)
    places = token.to(tl.int64) * results.stride_token + head * results.stride_head
    stored: tl.constexpr = results.out.dtype.element_ty
    tl.store(
        results.out + places + element,
        (acc / divisor).to(stored),
        mask=element < config.RANK,
    )
    if results.lse is not None:
        lse = (m_i + tl.log2(divisor)) * LN_2
        places = token.to(tl.int64) * results.lse_stride_token
        places += head.to(tl.int64) * results.lse_stride_head
        tl.store(results.lse + places, lse)

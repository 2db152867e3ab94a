"""Attention of one query tile: the loop over KV tiles with an online softmax."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..softmax import normalize, start_softmax, update_softmax
from .formats.cache_format import (
    divides_weights,
    has_two_parts,
    scale_scores,
    scale_values,
    scale_weights,
)
from .formats.token_scales import divide_weights
from .load_kv import load_kv_tile, locate_kv
from .load_q import find_rows, load_q
from .options.score import load_score_terms, modify_scores
from .options.sinks import start_with_sinks
from .options.visible_range import (
    element_mask,
    find_visible_keys,
    full_tiles,
    locate_keys,
)


class QueryTile(NamedTuple):
    """A query tile and what it attends to.

    Args:
        rows: QueryRows.
        q: [BLOCK_M, BLOCK_D].
        q_low: what is added to q, of the same shape; () if it has one part.
        q_rope: [BLOCK_M, BLOCK_ROPE], the elements after those of q; () without ROPE_DIM.
        qk_scale: scale of the dot products: a number, or [BLOCK_M, 1].
        visible: VisibleKeys.
        terms: ScoreTerms.
        kv: KVSource.
    """

    rows: Any
    q: Any
    q_low: Any
    q_rope: Any
    qk_scale: Any
    visible: Any
    terms: Any
    kv: Any


@triton.jit
def load_query_tile(
    call, req, start, query_len, first_row, kv_head, config: tl.constexpr
):
    """Return a query tile.

    Args:
        call: KernelCall.
        req: index of the request.
        start, query_len: its first token in the batch, and how many it has.
        first_row: first row of the tile in the request.
    """
    kv, seq_len = locate_kv(call, req, kv_head, config)
    return make_query_tile(
        call, kv, seq_len, req, start, query_len, first_row, kv_head, config
    )


@triton.jit
def make_query_tile(
    call, kv, seq_len, req, start, query_len, first_row, part, config: tl.constexpr
):
    """Return a query tile that attends to `seq_len` keys.

    Args:
        As in `load_query_tile`, and kv: KVSource of the keys; part: part of the query heads, of
            GROUP_SIZE. It is the kv head, unless several parts share one.
    """
    rows = find_rows(start, query_len, first_row, part, config)
    q, q_low, q_rope, qk_scale = load_q(call, rows, kv.kv_head, config)
    visible = find_visible_keys(call, req, rows, seq_len, config)
    terms = load_score_terms(call, rows)
    return QueryTile(rows, q, q_low, q_rope, qk_scale, visible, terms, kv)


@triton.jit
def attend_with_tile(
    call, tile, begin, end, counts_sink, kv_head, config: tl.constexpr
):
    """Return the rows of a query tile and their log-sum-exp, over the keys from `begin` to `end`.

    Args:
        begin, end: a multiple of BLOCK_N, and any index.
        counts_sink: whether the result is final, and so counts the sinks.

    Returns:
        [BLOCK_M, BLOCK_DV], scaled; [BLOCK_M] in base 2.
    """
    acc, l_i, m_i = start_softmax(config.BLOCK_M, config.BLOCK_DV)
    l_i, m_i = start_with_sinks(
        l_i, m_i, call.option_tensors.sinks, tile.rows.head, tile.rows.is_row,
        counts_sink,
    )  # fmt: skip
    acc, l_i, m_i = attend_to_keys(acc, l_i, m_i, call, tile, begin, end, config)
    result, lse = normalize(acc, l_i, m_i)
    return scale_values(result, call, kv_head, config), lse


@triton.jit
def attend_to_keys(acc, l_i, m_i, call, tile, begin, end, config: tl.constexpr):
    """Return acc, l_i and m_i after the keys from `begin` to `end`.

    Args:
        acc: [BLOCK_M, BLOCK_DV] float32; l_i, m_i: [BLOCK_M] float32.
        call, tile: KernelCall, QueryTile.
        begin, end: a multiple of BLOCK_N, and any index.
    """
    HAS_LOWER_BOUND: tl.constexpr = config.masks.HAS_LOWER_BOUND
    if config.MASK_ALL_TILES:
        # a decode waits for memory, not for its masks: one loop, whose pipeline is never drained
        acc, l_i, m_i = loop_over_kv_tiles(
            acc, l_i, m_i, call, tile, begin, end, config, True, HAS_LOWER_BOUND
        )
    else:
        full_begin, full_end = full_tiles(tile.visible, begin, end, config.BLOCK_N)
        if HAS_LOWER_BOUND:
            acc, l_i, m_i = loop_over_kv_tiles(
                acc, l_i, m_i, call, tile, begin, full_begin, config, True, True
            )
        acc, l_i, m_i = loop_over_kv_tiles(
            acc, l_i, m_i, call, tile, full_begin, full_end, config, False, False
        )
        acc, l_i, m_i = loop_over_kv_tiles(
            acc, l_i, m_i, call, tile, full_end, end, config, True, HAS_LOWER_BOUND
        )
    return acc, l_i, m_i


@triton.jit
def loop_over_kv_tiles(
    acc, l_i, m_i, call, tile, begin, end,
    config: tl.constexpr, MASKED: tl.constexpr, HAS_LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    """Return acc, l_i and m_i after the KV tiles from `begin` to `end`.

    Args:
        MASKED: whether some row does not attend to some of these keys.
        HAS_LOWER_BOUND: whether the interval of some row begins after the first key.
    """
    visible = tile.visible
    for start_n in range(begin, end, config.BLOCK_N):
        # step: gather the sequence's keys and values
        keys = locate_keys(
            call, visible, start_n, config.BLOCK_N, MASKED, HAS_LOWER_BOUND
        )
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_ROPE], [BLOCK_N, BLOCK_DV]
        k, k_rope, v, scales = load_kv_tile(
            call, tile.kv, keys, tile.q.dtype, config, MASKED
        )
        # step: compute the scaled dot products of queries and keys
        qk = multiply_qk(tile.q, k, config.ROW_SUMS)  # [BLOCK_M, BLOCK_N]
        if has_two_parts(config.CACHE_FORMAT, tile.q.dtype):
            qk += multiply_qk(tile.q_low, k, config.ROW_SUMS)
        if config.ROPE_DIM > 0:
            qk += multiply_qk(tile.q_rope, k_rope, config.ROW_SUMS)
        qk = scale_scores(qk, scales, config)
        qk = modify_scores(
            qk, tile.qk_scale, call, tile.terms, visible.position, keys.position,
            config.scores.LOGITS_SOFT_CAP,
        )  # fmt: skip
        # step: mask the keys outside the visible range
        if MASKED:
            mask = element_mask(call, visible, keys, HAS_LOWER_BOUND)
            qk = tl.where(mask, qk, -float("inf"))
        # step: turn scores into weights (softmax)
        p, acc, l_i, m_i = update_softmax(acc, l_i, m_i, qk, MASKED)
        # step: average the values by the weights
        p = scale_weights(p, scales, config)
        if divides_weights(config.CACHE_FORMAT, v.dtype):
            p, largest = divide_weights(p)
            added = accumulate_pv(tl.zeros_like(acc), p, v, config.ROW_SUMS)
            acc += added * largest[:, None]
        else:
            acc = accumulate_pv(acc, p, v, config.ROW_SUMS)  # [BLOCK_M, BLOCK_DV]
    return acc, l_i, m_i


@triton.jit
def multiply_qk(q, k, ROW_SUMS: tl.constexpr):
    """Return the dot products of queries and keys: [BLOCK_M, BLOCK_N] float32."""
    if ROW_SUMS:
        k = k.to(tl.float32)
        qk = tl.sum(q.to(tl.float32)[:, None, :] * k[None, :, :], 2)
    else:
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    return qk


@triton.jit
def accumulate_pv(acc, p, v, ROW_SUMS: tl.constexpr):
    """Return acc with the values of a tile, weighted: [BLOCK_M, BLOCK_DV]."""
    p = p.to(v.dtype)
    if ROW_SUMS:
        v = v.to(tl.float32)
        acc += tl.sum(p.to(tl.float32)[:, :, None] * v[None, :, :], 1)
    else:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    return acc

"""Attention of one query tile to FP8 keys: each warp attends to its own keys, then all are joined.

In the loop over KV tiles no number goes from warp to warp. The words of the next tile are loaded
into registers as soon as those of this one are decoded, and the block ids of the one after that.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...portable.formats.cache_format import scale_values
from ...portable.load_q import number_rows
from ...portable.options.score import modify_scores
from ...portable.options.sinks import start_with_sinks
from ...portable.options.visible_range import find_visible_keys
from ...softmax import finite, normalize
from .config import (
    PAGE,
    product_layout,
    rows_layout,
    words_layout,
    words_shape,
)
from .operands import (
    k_operand,
    load_blocks,
    load_q,
    load_words,
    make_words,
    order_columns,
    v_operand,
)


class DecodeTile(NamedTuple):
    """A query tile and what it attends to.

    Args:
        q: [WARPS, BLOCK_M, D] float16 left operand.
        qk_scale: [BLOCK_M] scale of the dot products.
        visible: VisibleKeys.
        kv: KVSource.
    """

    q: Any
    qk_scale: Any
    visible: Any
    kv: Any


@gluon.jit
def make_tile(call, kv, seq_len, req, start, query_len, kv_head, config: gl.constexpr):
    """Return the query tile of a decode request that attends to `seq_len` keys.

    The arguments are those of `attention_tile.make_query_tile`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = product_layout(WARPS)
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    of_scores: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, scores))
    of_q: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, operand))
    in_tile = gl.arange(0, config.BLOCK_M, of_q)
    rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
    q, qk_scale = load_q(call, rows, kv_head, operand, WARPS, config.BLOCK_D)
    in_tile = gl.arange(0, config.BLOCK_M, of_scores)
    rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
    visible = find_visible_keys(call, req, rows, seq_len, config)
    return DecodeTile(q, gl.convert_layout(qk_scale, of_scores), visible, kv)


@gluon.jit
def attend(
    call, tile, start, query_len, begin, end, counts_sink, kv_head, never,
    config: gl.constexpr,
):  # fmt: skip
    """Return the rows of a query tile over the keys from `begin` to `end`.

    Args:
        start, query_len: the request's first token in the batch, and how many it has.
        begin, end, counts_sink: as in portable/attention_tile.py.
        never: [1] mbarrier whose phase 0 never ends.

    Returns:
        [BLOCK_M, BLOCK_DV] scaled rows, [BLOCK_M] log-sum-exp in base 2, and their QueryRows. The
        layouts are those of `rows_layout`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    acc, l_i, m_i = _attend_to_keys(call, tile, begin, end, never, config)
    # join the warps
    m_all = gl.max(m_i, 0)  # [BLOCK_M]
    weight = gl.exp2(m_i - finite(m_all)[None, :])  # [WARPS, BLOCK_M]
    l_all = gl.sum(l_i * weight, 0)
    acc = order_columns(gl.sum(acc * weight[:, :, None], 0), config.BLOCK_DV)
    layout: gl.constexpr = rows_layout(WARPS)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    acc = gl.convert_layout(acc, layout)
    l_all = gl.convert_layout(l_all, of_rows)
    m_all = gl.convert_layout(m_all, of_rows)
    in_tile = gl.arange(0, config.BLOCK_M, of_rows)
    rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
    if call.option_tensors.sinks is not None:
        l_sink, m_sink = start_with_sinks(
            gl.full_like(l_all, 0.0), gl.full_like(m_all, -float("inf")),
            call.option_tensors.sinks, rows.head, rows.is_row, counts_sink,
        )  # fmt: skip
        m_new = gl.maximum(m_all, m_sink)
        alpha = gl.exp2(m_all - finite(m_new))
        l_all = l_all * alpha + l_sink * gl.exp2(m_sink - finite(m_new))
        acc = acc * alpha[:, None]
        m_all = m_new
    result, lse = normalize(acc, l_all, m_all)
    return scale_values(result, call, kv_head, config), lse, rows


@gluon.jit
def _update_softmax(acc, l_i, m_i, qk):
    """Return the weights of one more tile, and the rescaled running values, as softmax.py does."""
    m_new = gl.maximum(m_i, gl.max(qk, 2))  # [WARPS, BLOCK_M]
    shift = finite(m_new)
    alpha = gl.exp2(m_i - shift)
    p = gl.exp2(qk - shift[:, :, None])  # [WARPS, BLOCK_M, KEYS]
    l_i = l_i * alpha + gl.sum(p, 2)
    return p, acc * alpha[:, :, None], l_i, m_new


@gluon.jit
def _attend_to_keys(call, tile, begin, end, never, config: gl.constexpr):
    """Return the running values of each warp's keys.

    Returns:
        acc: [WARPS, BLOCK_M, BLOCK_DV], its columns in the order of `v_operand`.
        l_i, m_i: [WARPS, BLOCK_M].
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_N: gl.constexpr = config.BLOCK_N
    KEYS: gl.constexpr = BLOCK_N // WARPS
    E5M2: gl.constexpr = config.CACHE_FORMAT == "fp8_e5m2"
    K_SHAPE: gl.constexpr = words_shape(WARPS, KEYS // PAGE, config.BLOCK_D // 4, True)
    V_SHAPE: gl.constexpr = words_shape(
        WARPS, KEYS // PAGE, config.BLOCK_DV // 4, False
    )
    K: gl.constexpr = words_layout(WARPS, K_SHAPE)
    V: gl.constexpr = words_layout(WARPS, V_SHAPE)
    product: gl.constexpr = product_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    of_rows: gl.constexpr = gl.SliceLayout(2, product)
    of_keys: gl.constexpr = gl.SliceLayout(1, product)
    kv, strides, visible = tile.kv, call.strides, tile.visible
    first = gl.maximum(begin, visible.begin)
    of_k = make_words(
        kv.k, kv.block_table, strides.k_block, strides.k_slot, strides.table_entry,
        first, end,
    )  # fmt: skip
    of_v = make_words(
        kv.v, kv.block_table, strides.v_block, strides.v_slot, strides.table_entry,
        first, end,
    )  # fmt: skip
    m_i = gl.full([WARPS, config.BLOCK_M], -float("inf"), gl.float32, of_rows)
    l_i = gl.full([WARPS, config.BLOCK_M], 0.0, gl.float32, of_rows)
    acc = gl.full([WARPS, config.BLOCK_M, config.BLOCK_DV], 0.0, gl.float32, product)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, of_keys))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, of_keys))
    in_tile = warp[:, None] * KEYS + key[None, :]  # [WARPS, KEYS]
    k_blocks = load_blocks(of_k, begin, K, K_SHAPE, config)
    v_blocks = load_blocks(of_v, begin, V, V_SHAPE, config)
    k_words = load_words(of_k, k_blocks, begin, True, K, K_SHAPE, config)
    v_words = load_words(of_v, v_blocks, begin, False, V, V_SHAPE, config)
    k_blocks = load_blocks(of_k, begin + BLOCK_N, K, K_SHAPE, config)
    v_blocks = load_blocks(of_v, begin + BLOCK_N, V, V_SHAPE, config)
    for start_n in range(begin, end, BLOCK_N):
        # step: gather the sequence's keys and values
        next_n = start_n + BLOCK_N
        k = k_operand(k_words, right, WARPS, E5M2)
        # step: compute the scaled dot products of queries and keys
        qk = gl.full([WARPS, config.BLOCK_M, KEYS], 0.0, gl.float32, product)
        qk = mma_v2(tile.q, k, qk)
        k_words = load_words(of_k, k_blocks, next_n, True, K, K_SHAPE, config)
        k_blocks = load_blocks(of_k, next_n + BLOCK_N, K, K_SHAPE, config)
        # This wait is over at once, but it ends a basic block. Without it ptxas moves the loads to
        # the end of the loop, where their numbers are needed next, and nothing is in flight while a
        # tile is computed.
        mbarrier.wait(never.index(0), 1)
        qk = modify_scores(
            qk, tile.qk_scale[None, :, None], call, (), visible.position, (),
            config.scores.LOGITS_SOFT_CAP,
        )  # fmt: skip
        # step: mask the keys outside the visible range
        position = (start_n + in_tile)[:, None, :]
        mask = position < gl.minimum(visible.row_end, end)[None, :, None]
        if config.masks.HAS_LOWER_BOUND:
            mask &= position >= visible.row_begin[None, :, None]
        qk = gl.where(mask, qk, -float("inf"))
        # step: turn scores into weights (softmax)
        p, acc, l_i, m_i = _update_softmax(acc, l_i, m_i, qk)
        # step: average the values by the weights
        v = v_operand(v_words, right, WARPS, E5M2)
        p = gl.convert_layout(p.to(gl.float16), left, assert_trivial=True)
        acc = mma_v2(p, v, acc)
        v_words = load_words(of_v, v_blocks, next_n, False, V, V_SHAPE, config)
        v_blocks = load_blocks(of_v, next_n + BLOCK_N, V, V_SHAPE, config)
    return acc, l_i, m_i

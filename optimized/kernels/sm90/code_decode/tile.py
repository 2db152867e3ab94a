"""Attention of one query tile to codes: each warp attends to its own keys, then all are joined.

In the loop over KV tiles no number goes from warp to warp. The words of the next tile are loaded
into registers as soon as those of this one are decoded, and the block ids of the one after that.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...portable.formats.fp8 import scale_fp8_values
from ...portable.load_q import number_rows
from ...portable.options.score import modify_scores
from ...portable.options.sinks import start_with_sinks
from ...portable.options.visible_range import find_visible_keys
from ...softmax import finite, normalize
from .config import (
    PAGE,
    codes_of_word,
    has_levels,
    has_slot_scales,
    keys_layout,
    product_layout,
    rotation_layout,
    rows_layout,
    words_layout,
    words_shape,
)
from .queries import load_q, load_rotated_q
from .rotation import rotate_back
from .words import (
    k_operand,
    load_blocks,
    load_scale_blocks,
    load_scales,
    load_words,
    make_words,
    order_columns,
    v_operand,
    zero_points,
)

LEVELS = gl.constexpr(2.0**24)
"""Levels of keys are subnormal numbers, see codes.py: so many times a product is one of levels."""


class DecodeTile(NamedTuple):
    """A query tile and what it attends to.

    Args:
        q: [WARPS, D, ROWS] float16 right operand.
        q_low: what is added to q, of the same shape; () if it has one part.
        q_sum: [ROWS] sum of the elements of q and q_low, by which keys that are levels are larger;
            () in other formats.
        qk_scale: [ROWS] scale of the dot products.
        visible: VisibleKeys.
        kv: KVSource.
    """

    q: Any
    q_low: Any
    q_sum: Any
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
    operand: gl.constexpr = gl.DotOperandLayout(1, scores, 2)
    of_scores: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, scores))
    q_low = ()
    if codes_of_word(config.CACHE_FORMAT) == 8:
        right: gl.constexpr = gl.DotOperandLayout(1, rotation_layout(WARPS), 2)
        in_tile = gl.arange(0, config.BLOCK_M, gl.SliceLayout(0, right))
        rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
        q, q_low, q_sum, qk_scale = load_rotated_q(call, rows, operand, WARPS, config)
    else:
        of_q: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, operand))
        in_tile = gl.arange(0, config.BLOCK_M, of_q)
        rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
        q, q_sum, qk_scale = load_q(call, rows, kv_head, operand, WARPS, config)
    in_tile = gl.arange(0, config.BLOCK_M, of_scores)
    rows = number_rows(start, query_len, 0, in_tile, kv_head, config)
    visible = find_visible_keys(call, req, rows, seq_len, config)
    qk_scale = gl.convert_layout(qk_scale, of_scores)
    if has_levels(config.CACHE_FORMAT):
        q_sum = gl.convert_layout(q_sum, of_scores)
    return DecodeTile(q, q_low, q_sum, qk_scale, visible, kv)


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
    acc, l_i, m_i, n_i = _attend_to_keys(call, tile, kv_head, begin, end, never, config)
    # join the warps
    m_all = gl.max(m_i, 0)  # [ROWS]
    weight = gl.exp2(m_i - finite(m_all)[None, :])  # [WARPS, ROWS]
    l_all = gl.sum(l_i * weight, 0)
    if has_slot_scales(config.CACHE_FORMAT):
        weight *= n_i
    acc = order_columns(gl.sum(acc * weight[:, None, :], 0), config)  # [BLOCK_DV, ROWS]
    if codes_of_word(config.CACHE_FORMAT) == 8:
        # before the division, which is the same for all columns of a row
        acc = rotate_back(acc, WARPS)
    acc = acc.permute([1, 0])
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
    if not has_slot_scales(config.CACHE_FORMAT):
        result = scale_fp8_values(result, call, kv_head)
    return result, lse, rows


@gluon.jit
def _update_softmax(acc, l_i, m_i, n_i, qk, v_scale, MEASURED: gl.constexpr):
    """Return the weights of one more tile, and the rescaled running values, as softmax.py does.

    If each value has a scale, weights are multiplied by it, and divided by the largest such product
    of the row so far, n_i. So they fit float16, whatever the scales are.

    Args:
        n_i: [WARPS, ROWS] what acc is divided by.
        v_scale: [WARPS, KEYS] if MEASURED.
    """
    m_new = gl.maximum(m_i, gl.max(qk, 1))  # [WARPS, ROWS]
    shift = finite(m_new)
    alpha = gl.exp2(m_i - shift)
    p = gl.exp2(qk - shift[:, None, :])  # [WARPS, KEYS, ROWS]
    l_i = l_i * alpha + gl.sum(p, 1)
    if MEASURED:
        p = p * v_scale[:, :, None]
        before = n_i * alpha
        n_i = gl.maximum(before, gl.max(p, 1))
        inverse = gl.where(n_i > 0, 1.0 / n_i, 0.0)
        p = p * inverse[:, None, :]
        alpha = before * inverse
    return p, acc * alpha[:, None, :], l_i, m_new, n_i


@gluon.jit
def _scale_scores(qk, bits, q_sum, FORMAT: gl.constexpr):
    """Return dot products times the scale of each key, without what zero points added to them.

    Args:
        bits: [WARPS, KEYS] scales; of int4 with the zero point in the last bits.
        q_sum: [ROWS] sums of the queries' elements if keys are levels.
    """
    scale = bits
    if has_levels(FORMAT):
        if codes_of_word(FORMAT) == 8:
            zero = (bits.to(gl.int32, bitcast=True) & 15).to(gl.float32)
            scale = _clear_zero_points(bits, FORMAT)
            added = zero[:, :, None] * q_sum[None, None, :]
        else:
            added = (q_sum * 128.0)[None, None, :]
        qk = qk * LEVELS - added
    return qk * scale[:, :, None]


@gluon.jit
def _clear_zero_points(scale, FORMAT: gl.constexpr):
    """Return scales without the zero points in their last bits."""
    if codes_of_word(FORMAT) == 8:
        bits = scale.to(gl.int32, bitcast=True) & -16
        scale = bits.to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def _attend_to_keys(call, tile, kv_head, begin, end, never, config: gl.constexpr):
    """Return the running values of each warp's keys.

    Returns:
        acc: [WARPS, BLOCK_DV, ROWS], its columns in the order of `v_operand`, divided by n_i.
        l_i, m_i, n_i: [WARPS, ROWS].
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = config.BLOCK_M
    BLOCK_N: gl.constexpr = config.BLOCK_N
    KEYS: gl.constexpr = BLOCK_N // WARPS
    FORMAT: gl.constexpr = config.CACHE_FORMAT
    MEASURED: gl.constexpr = has_slot_scales(FORMAT)
    CODES: gl.constexpr = codes_of_word(FORMAT)
    K_SHAPE: gl.constexpr = words_shape(
        WARPS, KEYS // PAGE, config.BLOCK_D // CODES, True
    )
    V_SHAPE: gl.constexpr = words_shape(
        WARPS, KEYS // PAGE, config.BLOCK_DV // CODES, False
    )
    K: gl.constexpr = words_layout(WARPS, K_SHAPE)
    V: gl.constexpr = words_layout(WARPS, V_SHAPE)
    product: gl.constexpr = product_layout(WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, product)
    of_keys: gl.constexpr = gl.SliceLayout(2, product)
    each_key: gl.constexpr = keys_layout(WARPS, KEYS)
    kv, strides, visible = tile.kv, call.strides, tile.visible
    scales, scale_strides = call.option_tensors, call.scale_strides
    first = gl.maximum(begin, visible.begin)
    of_k = make_words(
        kv.k, kv.block_table, strides.k_block, strides.k_slot, strides.table_entry,
        first, end, scales.k_scale, scale_strides.k, kv_head, config, True, MEASURED,
    )  # fmt: skip
    of_v = make_words(
        kv.v, kv.block_table, strides.v_block, strides.v_slot, strides.table_entry,
        first, end, scales.v_scale, scale_strides.v, kv_head, config, False, MEASURED,
    )  # fmt: skip
    m_i = gl.full([WARPS, ROWS], -float("inf"), gl.float32, of_rows)
    l_i = gl.full([WARPS, ROWS], 0.0, gl.float32, of_rows)
    n_i = gl.full([WARPS, ROWS], 0.0, gl.float32, of_rows)
    acc = gl.full([WARPS, config.BLOCK_DV, ROWS], 0.0, gl.float32, product)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, of_keys))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, of_keys))
    in_warp = warp[:, None] * 0 + key[None, :]  # [WARPS, KEYS]
    in_tile = warp[:, None] * KEYS + in_warp
    k_blocks = load_blocks(of_k, begin, K, K_SHAPE, config)
    v_blocks = load_blocks(of_v, begin, V, V_SHAPE, config)
    k_words = load_words(of_k, k_blocks, begin, True, K, K_SHAPE, config)
    v_words = load_words(of_v, v_blocks, begin, False, V, V_SHAPE, config)
    k_blocks = load_blocks(of_k, begin + BLOCK_N, K, K_SHAPE, config)
    v_blocks = load_blocks(of_v, begin + BLOCK_N, V, V_SHAPE, config)
    k_scale, v_scale = (), ()
    if MEASURED:
        s_blocks = load_scale_blocks(of_k, begin, each_key, config)
        k_scale = load_scales(of_k, s_blocks, begin, each_key, config)
        v_scale = load_scales(of_v, s_blocks, begin, each_key, config)
        s_blocks = load_scale_blocks(of_k, begin + BLOCK_N, each_key, config)
    # from shared memory in each tile, which leaves registers for more warps
    Q: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 2, 0])
    q = gl.allocate_shared_memory(gl.float16, [WARPS, config.BLOCK_D, ROWS], Q, tile.q)
    if CODES == 8:
        q_low = gl.allocate_shared_memory(
            gl.float16, [WARPS, config.BLOCK_D, ROWS], Q, tile.q_low
        )
    for start_n in range(begin, end, BLOCK_N):
        # step: gather the sequence's keys and values
        next_n = start_n + BLOCK_N
        k = k_operand(k_words, left, WARPS, FORMAT)
        # step: compute the scaled dot products of queries and keys
        qk = gl.full([WARPS, KEYS, ROWS], 0.0, gl.float32, product)
        qk = mma_v2(k, q.load(right), qk)
        if CODES == 8:
            qk = mma_v2(k, q_low.load(right), qk)
        k_words = load_words(of_k, k_blocks, next_n, True, K, K_SHAPE, config)
        k_blocks = load_blocks(of_k, next_n + BLOCK_N, K, K_SHAPE, config)
        # This wait is over at once, but it ends a basic block. Without it ptxas moves the loads to
        # the end of the loop, where their numbers are needed next, and nothing is in flight while a
        # tile is computed.
        mbarrier.wait(never.index(0), 1)
        value_scale, weight_scale = v_scale, ()
        if MEASURED:
            qk = _scale_scores(qk, gl.gather(k_scale, in_warp, 1), tile.q_sum, FORMAT)
            weight_scale = gl.gather(v_scale, in_warp, 1)
            weight_scale = _clear_zero_points(weight_scale, FORMAT)
            k_scale = load_scales(of_k, s_blocks, next_n, each_key, config)
            v_scale = load_scales(of_v, s_blocks, next_n, each_key, config)
            s_blocks = load_scale_blocks(of_k, next_n + BLOCK_N, each_key, config)
        qk = modify_scores(
            qk, tile.qk_scale[None, None, :], call, (), visible.position, (),
            config.scores.LOGITS_SOFT_CAP,
        )  # fmt: skip
        # step: mask the keys outside the visible range
        position = (start_n + in_tile)[:, :, None]
        mask = position < gl.minimum(visible.row_end, end)[None, None, :]
        if config.masks.HAS_LOWER_BOUND:
            mask &= position >= visible.row_begin[None, None, :]
        qk = gl.where(mask, qk, -float("inf"))
        # step: turn scores into weights (softmax)
        p, acc, l_i, m_i, n_i = _update_softmax(
            acc, l_i, m_i, n_i, qk, weight_scale, MEASURED
        )
        # step: average the values by the weights
        v_zeros = ()
        if CODES == 8:
            v_zeros = zero_points(value_scale, V, V_SHAPE)
        v = v_operand(v_words, v_zeros, left, WARPS, FORMAT)
        p = gl.convert_layout(p.to(gl.float16), right)
        acc = mma_v2(v, p, acc)
        v_words = load_words(of_v, v_blocks, next_n, False, V, V_SHAPE, config)
        v_blocks = load_blocks(of_v, next_n + BLOCK_N, V, V_SHAPE, config)
    return acc, l_i, m_i, n_i

"""Consumer warpgroups of the Hopper prefill kernel.

The mainloop over a work item's KV tiles is in `common/mainloop.py`, normalization and store in
`epilogue.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..common.config import WARPGROUP_M
from ..common.mma import clear_acc, number_columns, select_tiles
from ..common.own_tiles import attend_to_item
from ..common.pipeline import release_stored_q
from ..common.roles import consume_items
from ..common.score import softmax_scale
from ..common.softmax import rescale
from ..common.tile_range import find_tiles
from ..common.traits import (
    acc_columns,
    acc_layout,
    count_tokens,
    has_row_scales,
    has_unused_rows,
)
from ..common.work_item import find_rows
from .epilogue import normalize, store_tile
from .fitting import fit_queries


@gluon.jit
def consume_prefills(
    shared, output, score, config: gl.constexpr, CONSUMER: gl.constexpr
):
    """Run a consumer warpgroup.

    Args:
        shared: `SharedStorage`.
        output: `PrefillArguments`.
        score: `ScoreArgs`.
        CONSUMER: index of the warpgroup.
    """
    PARTS: gl.constexpr = acc_columns(config)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, acc_layout(PARTS[0][1]))
    # computed before the loop: in `store_tile` they would change what is spilled
    column = ()
    for i in gl.static_range(len(PARTS)):
        of_part = number_columns(PARTS[i][0], PARTS[i][1])
        column = column + (of_part,)  # type: ignore[assignment]  # noqa: RUF005
    row = CONSUMER * WARPGROUP_M + gl.arange(0, WARPGROUP_M, ACC_ROWS)
    consume_items(shared, (output, score, row, column), compute_tile, config, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def compute_tile(
    shared, kv, kv_state, q_state, work, args,
    config: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute and store a warpgroup's rows of a work item (`roles.consume_items`).

    Args:
        args: `PrefillArguments`, `ScoreArgs`, [WARPGROUP_M] rows in the work item, and columns of
            each part of `acc_columns`.
    """
    output, score, row, column = args
    ACC_ROWS: gl.constexpr = row.type.layout
    acc = clear_acc(config)
    lse = gl.full([WARPGROUP_M], -float("inf"), gl.float32, ACC_ROWS)
    sink = None
    scale_log2 = score.scale_log2
    if score.k_scales is not None:
        # the query heads of a tile share a KV head and its scales
        scale_log2 *= gl.load(score.k_scales + work.head * config.GROUP)
    factors = None
    if score.key_factors is not None:
        # the blocks of a request's table row are those of its factors
        first_key = work.table_row.to(gl.int64) * output.block_table_stride
        kv_head = work.head // output.group_size
        first_key *= config.BLOCK_SIZE
        first_key += kv_head.to(gl.int64) * output.factor_stride_head
        factors = score.key_factors + first_key
        factors = gl.multiple_of(factors, [16])
    token, head = find_rows(work, row, config)
    if score.sinks is not None:
        # loaded here, needed after this item's keys
        sink = gl.load(score.sinks + head)
        lse = gl.full([WARPGROUP_M], 0.0, gl.float32, ACC_ROWS) + sink
    tiles = select_tiles(shared, kv, q_state, config, CONSUMER)
    if work.num_kv_tiles > 0:
        position = work.position + CONSUMER * count_tokens(config)
        row_scale = scale_log2
        if config.FITS_QUERIES:
            row_scale = scale_log2 * fit_queries(shared, tiles.q, q_state, config)
        carry, kv_state = attend_to_item(
            shared, tiles, acc, kv_state, q_state, work,
            find_tiles(work, position, config), position, row_scale, config, CONSUMER,
            factors,
        )  # fmt: skip
        scale = softmax_scale(row_scale, config)
        if has_row_scales(config):
            scale = gl.convert_layout(scale, ACC_ROWS)
        acc, lse = normalize(carry.acc, carry.m_i, carry.l_i, scale, sink)
        if score.v_scales is not None:
            v_scale = gl.load(score.v_scales + work.head * config.GROUP)
            acc = rescale(acc, gl.full(lse.shape, v_scale, gl.float32, lse.type.layout))
        q_state = q_state.advance()
    if has_unused_rows(config):
        # again, so that they take no registers in the main loops
        token, head = find_rows(work, row, config)
    store_tile(
        shared, output, tiles.q_tile, acc, lse, work, token, head, column, config,
        CONSUMER,
    )  # fmt: skip
    release_stored_q(shared, q_state, work, config)
    return kv_state, q_state

"""Queries in bfloat16 that are multiplied with keys in float16: a tile is fitted to float16.

Keys that are integers up to 2,048 are exact in float16, and not in bfloat16. A bfloat16 number has
8 significant bits, so it is exact in float16 after a division by a power of two, unless it is less
than 2 ** -30 of the largest in its row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.config import BOX_COLUMNS, WARPGROUP_M
from ..common.mma import select_columns
from ..common.traits import acc_layout, qk_layout

LARGEST_LOG2 = gl.constexpr(15.0)
"""Binary logarithm of the largest fitted query, at most. Float16 has numbers up to 15.99."""


@gluon.jit
def fit_queries(shared, q, q_state, config: gl.constexpr):
    """Replace a warpgroup's query tile by fitted queries, and return the divisor of each row.

    Args:
        shared: `SharedStorage`.
        q: [WARPGROUP_M, KEY_DIM] float16 in shared memory, the bits of bfloat16 numbers.
        q_state: state of the work item's queries.

    Returns:
        [WARPGROUP_M] float32 powers of two, in the layout of the rows of qk.
    """
    gl.static_assert(config.TAIL_DIM == 0)
    BOXES: gl.constexpr = config.KEY_DIM // BOX_COLUMNS
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout(config.BLOCK_N))
    OF_BOX: gl.constexpr = gl.SliceLayout(1, acc_layout(BOX_COLUMNS))
    shared.q_pipe.consumer_wait(q_state)
    largest = gl.full([WARPGROUP_M], 2.0**-100, gl.float32, ROWS)
    for i in gl.static_range(BOXES):
        size = gl.max(gl.abs(_load_box(q, i, config)), 1)
        largest = gl.maximum(largest, gl.convert_layout(size, ROWS))
    exponent = gl.ceil(gl.log2(largest)) - LARGEST_LOG2  # [WARPGROUP_M]
    inverse = gl.convert_layout(gl.exp2(-exponent), OF_BOX)
    for i in gl.static_range(BOXES):
        numbers = _load_box(q, i, config) * inverse[:, None]
        box = select_columns(q, i * BOX_COLUMNS, BOX_COLUMNS)
        box.store(numbers.to(gl.float16))
    # ordinary stores, before the tensor cores read through the async proxy
    fence_async_shared()
    return gl.exp2(exponent)


@gluon.jit
def _load_box(q, i: gl.constexpr, config: gl.constexpr):
    """Return 64 columns of a query tile in float32, with 0 in those that no head has."""
    LAYOUT: gl.constexpr = acc_layout(BOX_COLUMNS)
    box = select_columns(q, i * BOX_COLUMNS, BOX_COLUMNS).load(LAYOUT)
    numbers = box.to(gl.bfloat16, bitcast=True).to(gl.float32)
    if (i + 1) * BOX_COLUMNS > config.KEY_SIZE:
        column = i * BOX_COLUMNS + gl.arange(0, BOX_COLUMNS, gl.SliceLayout(0, LAYOUT))
        numbers = gl.where((column < config.KEY_SIZE)[None, :], numbers, 0.0)
    return numbers

"""Queries in bfloat16 that are multiplied with keys in float16: a tile is fitted to float16.

Keys that are integers up to 2,048 are exact in float16, and not in bfloat16. A bfloat16 number has
8 significant bits, so it is exact in float16 after a division by a power of two, unless it is less
than 2 ** -30 of the largest in its row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.config import WARPGROUP_M
from ..common.traits import acc_layout, qk_layout, split_columns

LARGEST_LOG2 = gl.constexpr(15.0)
"""Binary logarithm of the largest fitted query, at most. Float16 has numbers up to 15.99."""


@gluon.jit
def fit_queries(shared, q, q_state, config: gl.constexpr):
    """Replace a warpgroup's query tile by fitted queries, and return the divisor of each row.

    Args:
        shared: `SharedStorage`.
        q: [WARPGROUP_M, HEAD_DIM] float16 in shared memory, the bits of bfloat16 numbers.
        q_state: state of the work item's queries.

    Returns:
        [WARPGROUP_M] float32 powers of two, in the layout of the rows of qk.
    """
    PARTS: gl.constexpr = split_columns(config.HEAD_SIZE)
    ROWS: gl.constexpr = gl.SliceLayout(1, qk_layout(config.BLOCK_N))
    shared.q_pipe.consumer_wait(q_state)
    largest = gl.full([WARPGROUP_M], 2.0**-100, gl.float32, ROWS)
    for i in gl.static_range(len(PARTS)):
        size = gl.max(gl.abs(_load_part(q, PARTS[i][0], PARTS[i][1])), 1)
        largest = gl.maximum(largest, gl.convert_layout(size, ROWS))
    exponent = gl.ceil(gl.log2(largest)) - LARGEST_LOG2  # [WARPGROUP_M]
    inverse = gl.exp2(-exponent)
    for i in gl.static_range(len(PARTS)):
        numbers = _load_part(q, PARTS[i][0], PARTS[i][1])
        of_part: gl.constexpr = gl.SliceLayout(1, acc_layout(PARTS[i][1]))
        numbers = numbers * gl.convert_layout(inverse, of_part)[:, None]
        q.slice(PARTS[i][0], PARTS[i][1], 1).store(numbers.to(gl.float16))
    # ordinary stores, before the tensor cores read through the async proxy
    fence_async_shared()
    return gl.exp2(exponent)


@gluon.jit
def _load_part(q, FIRST: gl.constexpr, SIZE: gl.constexpr):
    """Return columns of a query tile in float32."""
    part = q.slice(FIRST, SIZE, 1).load(acc_layout(SIZE))
    return part.to(gl.bfloat16, bitcast=True).to(gl.float32)

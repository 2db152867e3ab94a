"""Score modification: scale, soft cap, ALiBi and position bias, composed in this order.

A new score option is a file beside this one, and is called in `modify_scores`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..softmax import LOG2_E
from .alibi import add_alibi, load_slopes
from .position_bias import add_position_bias, find_bias_rows
from .soft_cap import cap_scores


class ScoreTerms(NamedTuple):
    """What is added to the scores of a query tile.

    Args:
        slope: [BLOCK_M] ALiBi slope of each row; () without ALiBi.
        bias: [BLOCK_M] pointer to the position biases of each row; () without them.
    """

    slope: Any
    bias: Any


@triton.jit
def load_score_terms(call, rows):
    """Return what is added to the scores of a query tile."""
    tensors = call.option_tensors
    slope = ()
    if tensors.alibi_slopes is not None:
        slope = load_slopes(tensors.alibi_slopes, rows)
    bias = ()
    if tensors.position_bias is not None:
        bias = find_bias_rows(tensors.position_bias, call.options.position_bias, rows)
    return ScoreTerms(slope, bias)


@triton.jit
def modify_scores(
    qk, qk_scale, call, terms, position, key_position, SOFT_CAP: tl.constexpr
):
    """Return scores in base 2: [BLOCK_M, BLOCK_N].

    Args:
        qk: [BLOCK_M, BLOCK_N] dot products.
        qk_scale: scale of the dot products: a number, or [BLOCK_M, 1].
        call, terms: KernelCall, ScoreTerms.
        position, key_position: [BLOCK_M], [BLOCK_N].
    """
    HAS_SLOPES: tl.constexpr = call.option_tensors.alibi_slopes is not None
    HAS_BIAS: tl.constexpr = call.option_tensors.position_bias is not None
    if SOFT_CAP > 0:
        qk = cap_scores(qk, qk_scale, SOFT_CAP)
    elif HAS_SLOPES or HAS_BIAS:
        qk = qk * qk_scale
    if HAS_SLOPES or HAS_BIAS:
        distance = key_position[None, :] - position[:, None]  # [BLOCK_M, BLOCK_N]
        if HAS_SLOPES:
            qk = add_alibi(qk, terms.slope, distance)
        if HAS_BIAS:
            qk = add_position_bias(qk, terms.bias, call.options.position_bias, distance)
    IS_SCALED: tl.constexpr = SOFT_CAP > 0 or HAS_SLOPES or HAS_BIAS
    return qk * (LOG2_E if IS_SCALED else qk_scale * LOG2_E)

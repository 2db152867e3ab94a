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
        slope: Optional. [BLOCK_M] ALiBi slope of each row.
        bias: Optional. [BLOCK_M] pointer to the position biases of each row.
        bias_table: Optional. BiasTable.
    """

    slope: Any
    bias: Any
    bias_table: Any


@triton.jit
def load_score_terms(option_tensors, options, rows):
    """Return what is added to the scores of a query tile."""
    slope = load_slopes(option_tensors.alibi_slopes, rows)
    bias = find_bias_rows(option_tensors.position_bias, options.position_bias, rows)
    return ScoreTerms(slope, bias, options.position_bias)


@triton.jit
def modify_scores(qk, qk_scale, terms, position, key_position, SOFT_CAP: tl.constexpr):
    """Return scores in base 2: [BLOCK_M, BLOCK_N].

    Args:
        qk: [BLOCK_M, BLOCK_N] dot products.
        qk_scale: scale of the dot products: a number, or [BLOCK_M, 1].
        position, key_position: [BLOCK_M], [BLOCK_N].
    """
    HAS_TERMS: tl.constexpr = terms.slope is not None or terms.bias is not None
    if SOFT_CAP > 0:
        qk = cap_scores(qk, qk_scale, SOFT_CAP)
    elif HAS_TERMS:
        qk = qk * qk_scale
    if HAS_TERMS:
        distance = key_position[None, :] - position[:, None]  # [BLOCK_M, BLOCK_N]
        if terms.slope is not None:
            qk = add_alibi(qk, terms.slope, distance)
        if terms.bias is not None:
            qk = add_position_bias(qk, terms.bias, terms.bias_table, distance)
    IS_SCALED: tl.constexpr = SOFT_CAP > 0 or HAS_TERMS
    return qk * (LOG2_E if IS_SCALED else qk_scale * LOG2_E)

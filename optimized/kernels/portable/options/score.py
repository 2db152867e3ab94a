"""Score modification: scale, soft cap, ALiBi and position bias, composed in this order.

A new score option is a file beside this one, and an entry in `ScoreConstants`, or in
`ScoreArguments` and `OptionTensors`. `modify_scores` calls it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .....contract.attention_options import AttentionOptions
from ...fp8 import scale_arguments
from ...softmax import LOG2_E
from . import position_bias
from .alibi_slopes import add_alibi, load_slopes
from .logits_soft_cap import cap_scores
from .position_bias import add_position_bias, find_bias_rows


class ScoreConstants(NamedTuple):
    """Compile-time constants of the score options. 0 if an option is absent."""

    LOGITS_SOFT_CAP: float


class ScoreArguments(NamedTuple):
    """Arguments of score options that stay as they are in launches of one plan. None if absent."""

    position_bias: position_bias.BiasTable | None


class OptionTensors(NamedTuple):
    """Options that are passed anew at each launch: tensors of scores, and scales of codes.

    A scale is a tensor or a number. A field is None if its option is absent.
    """

    alibi_slopes: Any
    sinks: Any
    position_bias: Any
    k_scale: Any
    v_scale: Any
    k_global_scale: Any
    v_global_scale: Any
    out_scale: Any


def lower_scores(options: AttentionOptions) -> tuple[ScoreArguments, ScoreConstants]:
    """Return what the score options are for the kernels of one plan."""
    arguments = ScoreArguments(position_bias=position_bias.lower(options.position_bias))
    return arguments, ScoreConstants(LOGITS_SOFT_CAP=options.logits_soft_cap or 0.0)


def lower_tensors(options: AttentionOptions) -> OptionTensors:
    """Return the options that are passed anew at each launch."""
    slopes, sinks = options.alibi_slopes, options.sinks
    return OptionTensors(
        alibi_slopes=None if slopes is None else slopes.contiguous(),
        sinks=None if sinks is None else sinks.contiguous(),
        position_bias=options.position_bias,
        k_scale=scale_arguments(options.k_scale)[0],
        v_scale=scale_arguments(options.v_scale)[0],
        k_global_scale=scale_arguments(options.k_global_scale)[0],
        v_global_scale=scale_arguments(options.v_global_scale)[0],
        out_scale=scale_arguments(options.out_scale)[0],
    )


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
        bias = find_bias_rows(tensors.position_bias, call.scores.position_bias, rows)
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
            qk = add_position_bias(qk, terms.bias, call.scores.position_bias, distance)
    IS_SCALED: tl.constexpr = SOFT_CAP > 0 or HAS_SLOPES or HAS_BIAS
    return qk * (LOG2_E if IS_SCALED else qk_scale * LOG2_E)

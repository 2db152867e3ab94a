"""Mask and score options: one file per option, composed here.

An option's file holds its device functions and `lower`, which turns the option into arguments of
the kernels. visible_range.py composes the masks, score.py the score modifications. To add an
option, write its file, call its functions in one of those two, and lower it here.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ....contract.attention_options import AttentionOptions
from ..fp8 import ScaleStrides, scale_arguments
from . import (
    attention_chunk,
    causal,
    position_bias,
    query_ranges,
    sliding_window,
    soft_cap,
    tree,
)


class OptionTensors(NamedTuple):
    """Options that are passed anew at each launch: pointers, and scales that are numbers."""

    alibi_slopes: Any
    sinks: Any
    position_bias: Any
    k_scale: Any
    v_scale: Any
    out_scale: Any


class OptionArguments(NamedTuple):
    """Arguments of the options that stay as they are in launches of one plan. None if absent."""

    causal: causal.CausalFlags | None
    tree: tree.TreeMask | None
    tree_depth: Tensor | None
    query_ranges: query_ranges.QueryRanges | None
    position_bias: position_bias.BiasTable | None
    scales: ScaleStrides


class OptionConstants(NamedTuple):
    """Compile-time constants of the options. 0 if absent."""

    CAUSAL: int
    SLIDING_WINDOW: int
    CHUNK_SIZE: int
    SOFT_CAP: float


def lower_tensors(options: AttentionOptions) -> OptionTensors:
    """Return the options that are passed anew at each launch."""
    return OptionTensors(
        alibi_slopes=_contiguous(options.alibi_slopes),
        sinks=_contiguous(options.sinks),
        position_bias=options.position_bias,
        k_scale=scale_arguments(options.k_scale)[0],
        v_scale=scale_arguments(options.v_scale)[0],
        out_scale=scale_arguments(options.out_scale)[0],
    )


def lower_options(
    options: AttentionOptions, query_start_loc: Tensor
) -> tuple[OptionArguments, OptionConstants]:
    """Return what the options are for the kernels of one plan."""
    # `choose_options` has replaced None by the operation's default
    causal_constant, causal_flags = causal.lower(options.causal)  # type: ignore[arg-type]
    arguments = OptionArguments(
        causal=causal_flags,
        tree=tree.lower(options.tree_mask),
        tree_depth=tree.lower_depth(
            options.tree_mask, bool(options.counting_positions), query_start_loc
        ),
        query_ranges=query_ranges.lower(options.query_ranges),
        position_bias=position_bias.lower(options.position_bias),
        scales=ScaleStrides(
            k=scale_arguments(options.k_scale)[1],
            v=scale_arguments(options.v_scale)[1],
            out=scale_arguments(options.out_scale)[1],
        ),
    )
    constants = OptionConstants(
        CAUSAL=causal_constant,
        SLIDING_WINDOW=sliding_window.lower(options.sliding_window),
        CHUNK_SIZE=attention_chunk.lower(options.attention_chunk_size),
        SOFT_CAP=soft_cap.lower(options.logits_soft_cap),
    )
    return arguments, constants


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()

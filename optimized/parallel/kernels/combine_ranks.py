"""Combination of the partial results that a rank has received, in the order of their splits.

One program combines one row: a token and a head. The received buffer is read in place, so partial
results are neither reordered nor unpacked, and the output is written in its own dtype.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...kernels.merge import (
    add_partial,
    finish,
    load_lse,
    load_output,
    store_state,
    weigh,
)


class Received(NamedTuple):
    """Where partial results are in [ranks, heads, splits, tokens, elements].

    Args:
        order: [ranks * splits] int64, where each partial result is, as rank * splits + split.
        splits: Splits of each rank.
        stride_rank, stride_split: In elements.
    """

    order: Any
    splits: Any
    stride_rank: Any
    stride_split: Any


@triton.jit(do_not_specialize=["num_partials"])
def combine_ranks_kernel(
    received,
    first,
    num_partials,
    merged,
    sinks,
    is_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine the partial results of one row.

    Args:
        received: `Received`.
        first: `State` of the partial result of rank 0 and its first split. Triton 3.6 does not
            compile it inside of `received`.
        num_partials: Partial results of each row.
        merged: `State` of the output.
        sinks: [heads] one more score per head. Optional. If None, there are none.
        is_token: [tokens] False for padding, which gets no sink.
    """
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # [1]
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, BLOCK_D)
    everything = token >= 0
    acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    l_i = tl.zeros([1], dtype=tl.float32)
    m_i = tl.full([1], -float("inf"), dtype=tl.float32)
    for partial in range(num_partials):
        place = tl.load(received.order + partial)
        begin = place // received.splits * received.stride_rank
        begin += place % received.splits * received.stride_split
        lse = load_lse(first, begin, token, head, everything, True)
        value = load_output(
            first, begin, lse, token, head, element, everything, HEAD_DIM
        )
        alpha, weight, m_i = weigh(m_i, lse, True)
        acc, l_i = add_partial(acc, l_i, value, alpha, weight)
    if sinks is not None:
        # a sink has a score and no value; one that is not finite is none
        sink = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32)  # [1]
        has_sink = (tl.load(is_token + token) != 0) & (sink - sink == 0)
        lse = tl.where(has_sink, sink, -float("inf"))
        alpha, weight, m_i = weigh(m_i, lse, True)
        acc, l_i = add_partial(acc, l_i, tl.zeros_like(acc), alpha, weight)
    result, lse = finish(acc, l_i, m_i, True)
    store_state(merged, result, lse, token, head, element, everything, HEAD_DIM)

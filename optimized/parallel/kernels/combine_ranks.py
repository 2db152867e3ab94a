"""Combination of the partial results of ranks, in the order of their splits.

One program combines one row: a token and a head. The ranks have exchanged their partial results
before, or each program does that first: it sends the rows that the others combine, word by word
(exchange.py), and waits for those of its own row. Buffers are read in place, so partial results are
neither reordered nor unpacked, and the output is written in its own dtype.
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
from .exchange import find_memory, next_call, receive, send


class Received(NamedTuple):
    """Where partial results are in [ranks, heads, splits, tokens, elements].

    The entries are those of the ranks that sent them, or with `Partners` for each rank.

    Args:
        order: [ranks * splits] int64, where each partial result is, as rank * splits + split.
        splits: Splits of each rank.
        stride_rank, stride_split: In elements.
    """

    order: Any
    splits: Any
    stride_rank: Any
    stride_split: Any


class Partners(NamedTuple):
    """The ranks that exchange their partial results in a launch.

    Args:
        buffers: [ranks] int64 addresses of the ranks' memory: two halves, each as large as the
            partial results of a rank.
        calls: [1] int32 calls so far.
        arrived: [1] int32 programs of this launch that have finished.
        late: [ranks] int32, set to 1 for a rank whose words do not arrive.
        rank: This rank.
        tries: How often missing words are read before a rank counts as late.
        half_words: Words of a half.
    """

    buffers: Any
    calls: Any
    arrived: Any
    late: Any
    rank: Any
    tries: Any
    half_words: Any


@triton.jit
def _send_rows(
    partners, received, first, row, element, call,
    HEAD_DIM: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Send each rank the rows that it combines in the program with this index.

    Args:
        row: [1] offset of the row in an entry, of its first split.
    """
    is_element = element < HEAD_DIM
    for peer in tl.static_range(RANKS):
        if peer != partners.rank:
            entry = find_memory(partners.buffers, peer, call, partners.half_words)
            for split in range(received.splits):
                place = row + split * received.stride_split  # [1]
                words = first.output + peer * received.stride_rank + place
                words = words.to(tl.pointer_type(tl.int32), bitcast=True)
                to = entry + partners.rank * received.stride_rank + place
                value = tl.load(words + element, mask=is_element)
                lse = tl.load(words + HEAD_DIM)
                send(to + element, value, call, is_element)
                send(to + HEAD_DIM, lse, call, place >= 0)


@triton.jit
def _receive_row(partners, rank, place, element, call, tries, HEAD_DIM: tl.constexpr):
    """Return the log-sum-exp and the values of a row from another rank, and the tries left.

    Args:
        place: [1] offset of the row in this rank's memory.
    """
    memory = find_memory(partners.buffers, partners.rank, call, partners.half_words)
    late = partners.late + rank
    places = memory + place[:, None] + element[None, :]
    words, tries = receive(places, call, (element < HEAD_DIM)[None, :], late, tries)
    lse, tries = receive(memory + place + HEAD_DIM, call, place >= 0, late, tries)
    value = words.to(tl.float32, bitcast=True)
    return lse.to(tl.float32, bitcast=True), value, tries


@triton.jit(do_not_specialize=["num_partials"])
def combine_ranks_kernel(
    received,
    first,
    num_partials,
    merged,
    sinks,
    is_token,
    partners,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Combine the partial results of one row. Grid: (tokens, heads).

    Args:
        received: `Received`.
        first: `State` of the partial result of rank 0 and its first split, whose log-sum-exps
            follow their values. Triton 3.6 does not compile it inside of `received`.
        num_partials: Partial results of each row.
        merged: `State` of the output.
        sinks: [heads] one more score per head. Optional. If None, there are none.
        is_token: [tokens] False for padding, which gets no sink.
        partners: `Partners`. Optional. If None, the partial results have been exchanged.
        RANKS: How many ranks there are, with `partners`.
    """
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # [1]
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, BLOCK_D)
    everything = token >= 0
    acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    l_i = tl.zeros([1], dtype=tl.float32)
    m_i = tl.full([1], -float("inf"), dtype=tl.float32)
    if partners is not None:
        call, tries = next_call(partners.calls), partners.tries
        row = token * first.stride_token + head * first.stride_head  # [1]
        _send_rows(partners, received, first, row, element, call, HEAD_DIM, RANKS)
    for partial in range(num_partials):
        place = tl.load(received.order + partial)
        rank = place // received.splits
        begin = rank * received.stride_rank
        begin += place % received.splits * received.stride_split
        if partners is None or rank == partners.rank:
            lse = load_lse(first, begin, token, head, everything, True)
            value = load_output(
                first, begin, lse, token, head, element, everything, HEAD_DIM
            )
        else:
            lse, value, tries = _receive_row(
                partners, rank, begin + row, element, call, tries, HEAD_DIM
            )
            # inf - inf and NaN - NaN are NaN, so only finite numbers stay
            lse = tl.where(lse - lse == 0, lse, -float("inf"))
            value = tl.where((lse > -float("inf"))[:, None], value, 0.0)
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
    if partners is not None:
        programs = tl.num_programs(0) * tl.num_programs(1)
        if tl.atomic_add(partners.arrived, 1, sem="acq_rel") == programs - 1:
            tl.store(partners.arrived, 0)
            tl.store(partners.calls, call)

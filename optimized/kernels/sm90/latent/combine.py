"""Combination of the partial results of the Hopper latent decode kernel, in a dependent launch.

A row tile that spans several segments has a partial result in each: the normalized rows and their
log-sum-exp in base 2. The partials are combined in the order of their keys.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from ...softmax import finite, normalize, start_softmax
from ..common.entry import Number, Pointer, make_kernel
from . import config

LN_2 = tl.constexpr(math.log(2.0))
RANK = tl.constexpr(config.RANK.value)
MAX_SEGMENTS = tl.constexpr(256)
"""More than a Hopper chip has processors, and so than a launch has segments."""


class LatentCombineArguments(NamedTuple):
    """The arguments of `latent_combine_kernel`, in their order.

    Args:
        out: [tokens, heads, RANK]; lse: [heads, tokens], or None.
        partial_out, partial_lse, splits, partial_rows: as in `LatentArguments`.
        query_start_loc: [reqs + 1] first token of each request.
        num_segments: segments of the first launch.
    """

    out: Pointer
    lse: Pointer
    partial_out: Pointer
    partial_lse: Pointer
    splits: Pointer
    query_start_loc: Pointer
    num_reqs: Number
    num_heads: Number
    num_tokens: Number
    partial_rows: Number
    num_segments: Number
    out_stride_token: Number
    out_stride_head: Number
    lse_stride_head: Number
    lse_stride_token: Number


@triton.jit
def _store_rows(args, result, row_lse, token, head, is_row):
    """Store rows of the output and, unless it is None, of the log-sum-exp.

    Args:
        args: `LatentCombineArguments`.
        result: [ROWS, RANK]; row_lse: [ROWS] in base 2.
        token, head, is_row: [ROWS].
    """
    column = tl.arange(0, RANK)
    token = token.to(tl.int64)
    offset = token * args.out_stride_token + head * args.out_stride_head
    # rows begin at a multiple of 16 bytes
    address = tl.multiple_of(args.out + offset[:, None] + column[None, :], [1, 16])
    tl.store(address, result.to(args.out.dtype.element_ty), mask=is_row[:, None])
    if args.lse is not None:
        offset = (
            token * args.lse_stride_token + head.to(tl.int64) * args.lse_stride_head
        )
        tl.store(args.lse + offset, row_lse * LN_2, mask=is_row)


@triton.jit
def _fold_partials(acc, l_i, m_i, results, lse):
    """Return the running values of rows with several more partial results.

    Args:
        acc: [ROWS, RANK]; l_i, m_i: [ROWS].
        results: [SPLITS, ROWS, RANK]; lse: [SPLITS, ROWS].
    """
    m_new = tl.maximum(m_i, tl.max(lse, 0))
    shift = finite(m_new)
    alpha = tl.exp2(m_i - shift)
    weights = tl.exp2(lse - shift[None, :])
    acc = acc * alpha[:, None] + tl.sum(results * weights[:, :, None], 0)
    return acc, l_i * alpha + tl.sum(weights, 0), m_new


@triton.jit
def _combine_rows(
    args, row, is_row, first, last, ROWS: tl.constexpr, SPLITS: tl.constexpr
):
    """Return the combined rows and their log-sum-exp.  # [ROWS, RANK], [ROWS]

    Args:
        args: `LatentCombineArguments`.
        row, is_row: [ROWS] rows of the row tile, of which those of the request are combined.
        first, last: the row tile's segments.
    """
    column = tl.arange(0, RANK)
    acc, l_i, m_i = start_softmax(ROWS, RANK)
    for begin in range(first, last + 1, SPLITS):
        segment = begin + tl.arange(0, SPLITS)  # [SPLITS]
        is_partial = (segment <= last)[:, None] & is_row[None, :]  # [SPLITS, ROWS]
        partial = segment * 2 + (segment == first).to(tl.int32)
        offset = partial.to(tl.int64)[:, None] * args.partial_rows + row[None, :]
        lse = tl.load(args.partial_lse + offset, mask=is_partial, other=-float("inf"))
        # [SPLITS, ROWS, RANK]
        results = tl.load(
            args.partial_out + offset[:, :, None] * RANK + column[None, None, :],
            mask=is_partial[:, :, None],
            other=0.0,
        )
        acc, l_i, m_i = _fold_partials(acc, l_i, m_i, results, lse)
    return normalize(acc, l_i, m_i)


@triton.jit
def _find_split(splits, index, num_segments):
    """Return the segment in which split row tile `index` begins; MAX_SEGMENTS if there is none."""
    segment = tl.arange(0, MAX_SEGMENTS)
    last = tl.load(splits + 4 * segment, mask=segment < num_segments, other=-1)
    is_split = last >= 0  # [MAX_SEGMENTS]
    is_found = is_split & (tl.cumsum(is_split.to(tl.int32), 0) == index + 1)
    return tl.min(tl.where(is_found, segment, MAX_SEGMENTS), 0)


@triton.jit
def combine_latent_partials(args, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Store the rows of split row tiles, and clear the rows of no request.

    Grid: (groups of ROWS rows of a row tile, split row tiles + 1). The programs of the last index
    clear the rows of no request.

    Args:
        args: `LatentCombineArguments`.
        ROWS: rows per program.
        SPLITS: partial results that are loaded at once.
    """
    # every program waits, so that the end of this launch is the end of both
    tl.extra.cuda.gdc_wait()
    group = tl.program_id(0)
    index = tl.program_id(1)
    in_group = tl.arange(0, ROWS)
    if index == tl.num_programs(1) - 1:
        start = tl.load(args.query_start_loc + args.num_reqs).to(tl.int32)
        end = (args.num_tokens - start) * args.num_heads
        for first_row in range(group * ROWS, end, tl.num_programs(0) * ROWS):
            row = first_row + in_group
            _store_rows(
                args, tl.zeros([ROWS, RANK], tl.float32),
                tl.full([ROWS], -float("inf"), tl.float32),
                start + row // args.num_heads, row % args.num_heads, row < end,
            )  # fmt: skip
    else:
        first = _find_split(args.splits, index, args.num_segments)
        if first < MAX_SEGMENTS:
            last = tl.load(args.splits + 4 * first)
            in_tile = group * ROWS + in_group
            row = tl.load(args.splits + 4 * first + 1) + in_tile
            is_row = in_tile < tl.load(args.splits + 4 * first + 2)
            result, row_lse = _combine_rows(
                args, in_tile, is_row, first, last,
                ROWS, SPLITS,
            )  # fmt: skip
            _store_rows(
                args, result, row_lse, row // args.num_heads, row % args.num_heads, is_row,
            )  # fmt: skip


latent_combine_kernel = make_kernel(
    "latent_combine_kernel",
    combine_latent_partials,
    LatentCombineArguments,
    triton.jit,
    is_aligned=True,
)

"""How are a tile's rows found, begun, finished, and stored?

A row is one query head of one new token. The rows of one kv head of a request are numbered token by
token, and within a token head by head.
"""

import math

import triton
import triton.language as tl

from .fp8 import encode_fp8, load_scale

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def find_tile(
    query_start_loc,
    tile,
    num_reqs,
    num_halvings,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the request of a tile of rows and the tile's first row in it.

    Request r's tiles begin at query_start_loc[r] * GROUP_SIZE // ROWS + r, which leaves each
    request room for one tile that is not full.
    """
    low = 0
    high = num_reqs
    for _ in range(num_halvings):
        middle = (low + high) // 2
        search = low < high
        start = tl.load(query_start_loc + middle + 1, mask=search, other=0)
        begins = start * GROUP_SIZE // ROWS + middle + 1
        low = tl.where(search & (begins <= tile), middle + 1, low)
        high = tl.where(search & (begins > tile), middle, high)
    start = tl.load(query_start_loc + low)
    return low, (tile - start * GROUP_SIZE // ROWS - low) * ROWS


@triton.jit
def start_rows(sinks, head, is_row, is_first, ROWS: tl.constexpr):
    """Return the sums and maxima (base 2) of rows that have seen no key yet.

    A sink is a score of weight 1 at its own maximum, and adds no value; where a row is joined from
    parts, it is counted once, where `is_first`.
    """
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0)
        row_sum = tl.where(is_first, row_sum + 1.0, row_sum)
        row_max = tl.where(is_first, sink * LOG2_E, row_max)
    return row_sum, row_max


@triton.jit
def tanh(x):
    """Return tanh(x), to a few roundings for small x too, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -far, far))


@triton.jit
def fold_part(total, row_sum, row_max, value, part_lse):
    """Return the running sums of rows with one more finished part (log-sum-exp in base 2).

    Wherever this is compiled the same roundings are made: each sum fuses one product, named here.
    """
    new_max = tl.maximum(row_max, part_lse)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    fade = tl.exp2(row_max - shift)
    weight = tl.exp2(part_lse - shift)
    total = tl.fma(
        total, tl.broadcast_to(fade[:, None], total.shape), value * weight[:, None]
    )
    return total, tl.fma(row_sum, fade, weight), new_max


@triton.jit
def fold_parts(total, row_sum, row_max, values, part_lse):
    """Return the running sums of rows with finished parts, which lie along the first axis."""
    new_max = tl.maximum(row_max, tl.max(part_lse, 0))
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    fade = tl.exp2(row_max - shift)
    weights = tl.exp2(part_lse - shift[None, :])
    total = total * fade[:, None] + tl.sum(values * weights[:, :, None], 0)
    return total, row_sum * fade + tl.sum(weights, 0), new_max


@triton.jit
def finish_rows(total, row_sum, row_max):
    """Return the rows' averages and their log-sum-exp in base 2.

    A row that saw nothing has the sum 0: its average is 0, its log-sum-exp -inf.
    """
    divisor = tl.where(row_sum > 0, row_sum, 1.0)
    return total / divisor[:, None], row_max + tl.log2(divisor)


@triton.jit
def store_rows(
    out,
    lse,
    out_scale,
    out_scale_stride,
    result,
    row_lse,
    token,
    head,
    element,
    is_row,
    out_stride_token,
    out_stride_head,
    out_stride_element,
    lse_stride_head,
    lse_stride_token,
    VALUE_SIZE: tl.constexpr,
    OUT_FP8: tl.constexpr,
):
    """Write finished rows; the log-sum-exp leaves base 2 for base e."""
    if OUT_FP8:
        result = result / load_scale(out_scale, out_scale_stride, 0, True)
        result = encode_fp8(result, OUT_FP8 == 2)
    tl.store(
        out
        + (token.to(tl.int64) * out_stride_token)[:, None]
        + (head.to(tl.int64) * out_stride_head)[:, None]
        + (element * out_stride_element)[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (element < VALUE_SIZE)[None, :],
    )
    if lse is not None:
        place = (
            head.to(tl.int64) * lse_stride_head + token.to(tl.int64) * lse_stride_token
        )
        tl.store(lse + place, (row_lse * LN_2).to(lse.dtype.element_ty), mask=is_row)


@triton.jit
def clear_tokens(
    out,
    lse,
    first,
    end,
    step,
    kv_head,
    out_stride_token,
    out_stride_head,
    out_stride_element,
    lse_stride_head,
    lse_stride_token,
    GROUP_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write what tokens of no request have: 0, and a log-sum-exp of -inf."""
    element = tl.arange(0, VALUE_TILE)
    for token in range(first, end, step):
        for place in range(0, GROUP_SIZE, HEADS):
            of_group = place + tl.arange(0, HEADS)
            head = (kv_head * GROUP_SIZE + of_group).to(tl.int64)
            is_head = of_group < GROUP_SIZE
            at = tl.cast(token, tl.int64) * out_stride_token + head * out_stride_head
            nothing = tl.zeros([HEADS, VALUE_TILE], dtype=tl.float32)
            tl.store(
                out + at[:, None] + (element * out_stride_element)[None, :],
                nothing.to(out.dtype.element_ty),
                mask=is_head[:, None] & (element < VALUE_SIZE)[None, :],
            )
            if lse is not None:
                unseen = tl.full([HEADS], -float("inf"), dtype=tl.float32)
                tl.store(
                    lse
                    + head * lse_stride_head
                    + tl.cast(token, tl.int64) * lse_stride_token,
                    unseen.to(lse.dtype.element_ty),
                    mask=is_head,
                )

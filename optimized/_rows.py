"""How are a tile's rows found, finished, stored, and joined from parts?

A row is one query head of one new token. The rows of one kv head of a request are numbered token by
token, and within a token head by head.
"""

import math

import triton
import triton.language as tl

from ._fp8 import encode_fp8, load_scale

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
def start_rows(sinks, head, is_row, ROWS: tl.constexpr):
    """Return the sums and maxima (base 2) of rows that have seen no key yet.

    A sink is a score of weight 1 at its own maximum, and adds no value.
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0)
        return tl.full([ROWS], 1.0, dtype=tl.float32), sink * LOG2_E
    row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    return tl.zeros([ROWS], dtype=tl.float32), row_max


@triton.jit
def tanh(x):
    """Return tanh(x), to a few roundings for small x too, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -far, far))


@triton.jit
def fold_part(total, row_sum, row_max, value, part_lse):
    """Return the running sums of rows with one more finished part (log-sum-exp in base 2)."""
    new_max = tl.maximum(row_max, part_lse)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    fade = tl.exp2(row_max - shift)
    weight = tl.exp2(part_lse - shift)
    total = total * fade[:, None] + value * weight[:, None]
    return total, row_sum * fade + weight, new_max


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
        + (head * out_stride_head)[:, None]
        + (element * out_stride_element)[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (element < VALUE_SIZE)[None, :],
    )
    if lse is not None:
        place = head * lse_stride_head + token.to(tl.int64) * lse_stride_token
        tl.store(lse + place, (row_lse * LN_2).to(lse.dtype.element_ty), mask=is_row)


@triton.jit
def part_place(req, kv_head, split, num_splits, part_rows):
    """Return where a part's first row lies in [reqs, kv_heads, splits, part_rows]."""
    part = (req.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits + split
    return part * part_rows


@triton.jit(
    do_not_specialize=["num_splits", "part_rows", "lse_stride_head", "lse_stride_token"]
)
def join_kernel(
    query_start_loc,
    out,
    lse,
    part_out,
    part_lse,
    sinks,
    out_scale,
    out_scale_stride,
    num_splits,
    short_rows,
    part_rows,
    out_stride_token,
    out_stride_head,
    out_stride_element,
    lse_stride_head,
    lse_stride_token,
    GROUP_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    OUT_FP8: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Join the parts of a short request's rows, each weighted by its share of the sum."""
    req = tl.program_id(0)
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + req)
    num_rows = (tl.load(query_start_loc + req + 1) - start) * GROUP_SIZE
    if num_rows > short_rows or num_rows == 0:
        return
    row = tl.arange(0, ROWS)
    element = tl.arange(0, VALUE_TILE)
    is_row = row < num_rows
    total = tl.zeros([ROWS, VALUE_TILE], dtype=tl.float32)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    row_sum, row_max = start_rows(sinks, head, is_row, ROWS)
    for split in range(num_splits):
        place = part_place(req, kv_head, split, num_splits, part_rows) + row
        part = tl.load(part_lse + place, mask=is_row, other=-float("inf"))
        value = tl.load(
            part_out + place[:, None] * VALUE_SIZE + element[None, :],
            mask=is_row[:, None] & (element < VALUE_SIZE)[None, :],
            other=0.0,
        )
        total, row_sum, row_max = fold_part(total, row_sum, row_max, value, part)
    result, row_lse = finish_rows(total, row_sum, row_max)
    store_rows(
        out, lse, out_scale, out_scale_stride, result, row_lse, start + row // GROUP_SIZE,
        head, element, is_row,
        out_stride_token, out_stride_head, out_stride_element,
        lse_stride_head, lse_stride_token, VALUE_SIZE, OUT_FP8,
    )  # fmt: skip

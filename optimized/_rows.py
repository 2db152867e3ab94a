"""How are a tile's rows found, finished, stored, and joined from parts?

A row is one query head of one new token. The rows of one kv head of a request are numbered token by
token, and within a token head by head.
"""

import math

import triton
import triton.language as tl

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
    HEAD_SIZE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write finished rows; the log-sum-exp leaves base 2 for base e."""
    tl.store(
        out
        + (token.to(tl.int64) * out_stride_token)[:, None]
        + (head * out_stride_head)[:, None]
        + (element * out_stride_element)[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (element < HEAD_SIZE)[None, :],
    )
    if HAS_LSE:
        place = head * lse_stride_head + token.to(tl.int64) * lse_stride_token
        tl.store(lse + place, (row_lse * LN_2).to(lse.dtype.element_ty), mask=is_row)


@triton.jit
def part_place(req, kv_head, split, num_splits, part_rows):
    """Return where a part's first row lies in [reqs, kv_heads, splits, part_rows]."""
    part = (req.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits + split
    return part * part_rows


@triton.jit
def join_kernel(
    query_start_loc,
    out,
    lse,
    part_out,
    part_lse,
    short_rows,
    part_rows,
    out_stride_token,
    out_stride_head,
    out_stride_element,
    lse_stride_head,
    lse_stride_token,
    GROUP_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Join the parts of a short request's rows, each weighted by its share of the sum."""
    req = tl.program_id(0)
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + req)
    num_rows = (tl.load(query_start_loc + req + 1) - start) * GROUP_SIZE
    if num_rows > short_rows or num_rows == 0:
        return
    row = tl.arange(0, ROWS)
    element = tl.arange(0, HEAD_TILE)
    is_row = row < num_rows
    total = tl.zeros([ROWS, HEAD_TILE], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    for split in range(NUM_SPLITS):
        place = part_place(req, kv_head, split, NUM_SPLITS, part_rows) + row
        part = tl.load(part_lse + place, mask=is_row, other=-float("inf"))
        value = tl.load(
            part_out + place[:, None] * HEAD_SIZE + element[None, :],
            mask=is_row[:, None] & (element < HEAD_SIZE)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, part)
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        fade = tl.exp2(row_max - shift)
        weight = tl.exp2(part - shift)
        total = total * fade[:, None] + value * weight[:, None]
        row_sum = row_sum * fade + weight
        row_max = new_max
    result, row_lse = finish_rows(total, row_sum, row_max)
    store_rows(
        out, lse, result, row_lse, start + row // GROUP_SIZE,
        kv_head * GROUP_SIZE + row % GROUP_SIZE, element, is_row,
        out_stride_token, out_stride_head, out_stride_element,
        lse_stride_head, lse_stride_token, HEAD_SIZE, HAS_LSE,
    )  # fmt: skip

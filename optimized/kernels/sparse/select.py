"""Triton kernel of the selection: the positions of a row's largest scores, in their order.

A radix selection: three passes find the smallest score that is selected, digit by digit from the
highest, and a fourth one writes the positions. A program computes a row, so nothing is sorted, and
equal scores have no order but that of their positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.launcher import launch_kernel
from .rows import PAD

LONG_ROW = 16384
"""Scores of a row from which on a program has 16 warps."""
MOST_ENTRIES = 4096
"""Scores that a program reads at once. With 8,192, it spills."""
DIGITS = tl.constexpr(2048)
"""Values of a digit. The three digits of a score have 11, 11 and 10 bits."""


@triton.jit
def order_scores(scores, columns, width, ENTRIES: tl.constexpr):
    """Return scores as uint32 of the same order; 0 for what is not selected.

    Args:
        scores: address of the row.
        columns: [ENTRIES] positions.
    """
    score = tl.load(scores + columns, mask=columns < width, other=-float("inf"))
    # both zeros are equal
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    # neither -inf nor NaN
    return tl.where(score > -float("inf"), ordered, tl.zeros([ENTRIES], tl.uint32))


@triton.jit
def find_digit(
    scores, width, above, wanted, SHIFT: tl.constexpr, BITS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Return the next digit of the smallest selected score, and how many more are wanted there.

    Args:
        above: the digits before, as an ordered score without the rest. Any if there are none.
        wanted: how many scores with these digits are selected.
    """
    counts = tl.zeros([DIGITS], tl.int32)
    for begin in range(0, width, ENTRIES):
        columns = begin + tl.arange(0, ENTRIES)
        ordered = order_scores(scores, columns, width, ENTRIES)
        is_alike = ordered != 0
        if SHIFT + BITS < 32:
            is_alike &= ordered >> (SHIFT + BITS) == above >> (SHIFT + BITS)
        digit = ((ordered >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        counts += tl.histogram(digit, DIGITS, mask=is_alike)
    # how many are larger
    larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    digits = tl.arange(0, DIGITS)
    has_enough = larger + counts >= wanted
    found = tl.maximum(tl.max(tl.where(has_enough, digits, -1), 0), 0)
    rest = wanted - tl.sum(tl.where(digits == found, larger, 0), 0)
    return found.to(tl.uint32), rest


@triton.jit
def select_keys_kernel(
    scores, selected, width, topk, stride_token, stride_selected, ENTRIES: tl.constexpr
):
    """Write the positions of the `topk` largest scores of a row, and -1 after the last one.

    Args:
        scores: [tokens, width] float32, of which the last axis is packed.
        selected: [tokens, topk] int32, of which the last axis is packed.
    """
    token = tl.program_id(0).to(tl.int64)
    scores += token * stride_token
    selected += token * stride_selected
    first, wanted = find_digit(
        scores, width, tl.zeros([], tl.uint32), topk, 21, 11, ENTRIES
    )
    least = first << 21
    second, wanted = find_digit(scores, width, least, wanted, 10, 11, ENTRIES)
    least |= second << 10
    third, wanted = find_digit(scores, width, least, wanted, 0, 10, ENTRIES)
    least |= third
    # with fewer scores than are wanted, all digits are 0
    count, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, width, ENTRIES):
        columns = begin + tl.arange(0, ENTRIES)
        ordered = order_scores(scores, columns, width, ENTRIES)
        is_equal = (ordered == least) & (ordered != 0)
        rank = equal + tl.cumsum(is_equal.to(tl.int32), 0)
        is_chosen = (ordered > least) | (is_equal & (rank <= wanted))
        place = count + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(selected + place, columns, mask=is_chosen)
        count += tl.sum(is_chosen.to(tl.int32), 0)
        equal += tl.sum(is_equal.to(tl.int32), 0)
    for begin in range(0, topk, ENTRIES):
        columns = begin + tl.arange(0, ENTRIES)
        is_free = (columns >= count) & (columns < topk)
        tl.store(selected + columns, tl.full([ENTRIES], PAD, tl.int32), mask=is_free)


def select_positions(scores: Tensor, topk: int) -> Tensor:
    """Return the positions of the largest scores of each row: [tokens, topk] int32, or -1.

    Args:
        scores: [tokens, width] float32.
    """
    tokens, width = scores.shape
    selected = scores.new_empty(tokens, topk, dtype=torch.int32)
    if tokens:
        if scores.stride(1) != 1:
            scores = scores.contiguous()
        entries = min(MOST_ENTRIES, max(16, triton.next_power_of_2(width)))
        launch_kernel(
            select_keys_kernel, (tokens,), scores, selected, width, topk, scores.stride(0),
            selected.stride(0), ENTRIES=entries, num_warps=16 if width >= LONG_ROW else 8,
        )  # fmt: skip
    return selected

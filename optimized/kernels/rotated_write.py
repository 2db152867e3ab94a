"""Triton kernel that writes keys and values to a cache of rotated rows in codes of four bits.

A thread has a whole row, in groups of eight channels, so the stages of the transform exchange
nothing between threads. Otherwise it is the write of `measured_write.py`, with the same bits.
"""

# ruff: noqa: RUF005 - Triton has no unpacking in tuples
import triton
import triton.language as tl
from torch import Tensor

from .measured_write import find_rows, locate_begins
from .portable.formats.int4_per_token_head import (
    count_channels,
    group_signs,
    measure_levels,
    round_to,
    to_level,
    transform,
)

ROWS_PER_PROGRAM = 32
"""Rows of keys, or of values, that a program writes: one per thread of its only warp."""
CHANNELS = tl.constexpr(8)
"""Channels of a group: 16 bytes of 16-bit numbers, and a word of codes."""
MAX_CHANNELS = 128
"""Channels of a row, at most: more do not fit the registers of a thread."""


def takes_rows(cache: Tensor, head_size: int, alignment: int) -> bool:
    """Return whether the kernel writes keys or values of so many channels.

    Args:
        cache: [num_blocks, block_size, kv_heads, head_size / 2] bytes.
        alignment: its `align_rows`.
    """
    is_small = head_size % CHANNELS.value == 0 and head_size <= MAX_CHANNELS
    return is_small and cache.stride(3) == 1 and alignment >= 4


@triton.jit(do_not_specialize=["num_slots"])
def write_rotated_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    num_slots,
    kv_heads,
    mapping_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    K_ALIGNMENT: tl.constexpr,
    V_ALIGNMENT: tl.constexpr,
):
    """Write the keys or the values of a tile of tokens and heads, with the scale of each.

    Grid: (tiles of tokens, 2 times tiles of heads).

    Args:
        key, value: NewTokens.
        key_cache, value_cache: MeasuredHalf.
        HAS_ZERO: as in `encode_int4`.
        NATIVE: whether an instruction rounds to bfloat16, and a minimum or a maximum leaves NaN
            out. In the interpreter neither does.
        TOKENS, HEADS: tokens of the tile, and heads of each: powers of two.
        K_ALIGNMENT, V_ALIGNMENT: see `align_rows`.
    """
    rows = find_rows(
        slot_mapping, mapping_stride, num_slots, kv_heads, tl.program_id(1) // 2,
        BLOCK_SIZE, TOKENS, HEADS,
    )  # fmt: skip
    if tl.program_id(1) % 2 == 0:
        _write_rows(key, key_cache, rows, HEAD_SIZE, HAS_ZERO, NATIVE, K_ALIGNMENT)
    else:
        _write_rows(
            value, value_cache, rows, VALUE_HEAD_SIZE, HAS_ZERO, NATIVE, V_ALIGNMENT
        )


@triton.jit
def _write_rows(
    new, cache, rows,
    SIZE: tl.constexpr, HAS_ZERO: tl.constexpr, NATIVE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Write the keys or the values of some tokens and heads.

    Args:
        rows: NewRows.
    """
    dtype: tl.constexpr = new.tensor.dtype.element_ty
    parts = _load_rotated(new, rows.token, rows.head, rows.exists, SIZE)
    # step: encode the key and the value in the format of the cache
    smallest = tl.full(parts[0].shape, float("inf"), tl.float32)
    largest = -smallest
    rounded = ()
    for number in tl.static_range(SIZE // CHANNELS):
        part = round_to(parts[number], dtype, NATIVE, HAS_ZERO)
        rounded = rounded + (part,)  # type: ignore[assignment]
        if NATIVE:
            smallest, largest = tl.minimum(smallest, part), tl.maximum(largest, part)
        else:
            is_number = part == part
            smallest = tl.where(is_number, tl.minimum(smallest, part), smallest)
            largest = tl.where(is_number, tl.maximum(largest, part), largest)
    inverse, zero_point, scale = measure_levels(
        tl.min(smallest, 1), tl.max(largest, 1), HAS_ZERO
    )
    shifts = (4 * tl.arange(0, CHANNELS))[None, :]
    words = ()
    for number in tl.static_range(SIZE // CHANNELS):
        levels = to_level(
            rounded[number] * inverse[:, None], zero_point[:, None], NATIVE
        )
        words = words + (tl.sum(levels << shifts, 1),)  # type: ignore[assignment]
    # step: store the key and the value
    to, of_scale = locate_begins(
        cache, rows.block_id, rows.offset, rows.head, ALIGNMENT
    )
    to = to.to(tl.pointer_type(tl.int32))
    _store_words(words, to, rows.stored, SIZE // CHANNELS)
    tl.store(of_scale, scale, mask=rows.stored)


@triton.jit
def _load_rotated(new, token, head, is_row, SIZE: tl.constexpr):
    """Return new rows, rotated: a tuple of [ROWS, CHANNELS] float32, one per group of channels."""
    rows = new.tensor + (token * new.stride_token + head * new.stride_head)
    part = tl.arange(0, CHANNELS)
    GROUPS: tl.constexpr = SIZE // CHANNELS
    ROTATED: tl.constexpr = count_channels(SIZE)
    parts = ()
    for number in tl.static_range(GROUPS):
        at = (number * CHANNELS + part) * new.stride_element
        numbers = tl.load(
            rows[:, None] + at[None, :], mask=is_row[:, None], other=0
        ).to(tl.float32)
        numbers *= group_signs(number * CHANNELS % ROTATED, CHANNELS)[None, :]
        parts = parts + (transform(numbers, CHANNELS, CHANNELS),)  # type: ignore[assignment]
    # stages of 8, 16, 32 and 64 channels, between groups
    for power in tl.static_range(count_stages(ROTATED)):
        made = ()
        for number in tl.static_range(GROUPS):
            if (number >> power) % 2 == 0:
                rows = parts[number] + parts[number + (1 << power)]
            else:
                rows = parts[number - (1 << power)] - parts[number]
            made = made + (rows,)  # type: ignore[assignment]
        parts = made
    return parts


@triton.constexpr_function
def count_stages(rotated: int) -> int:
    """Return the stages of the transform of so many channels that exchange whole groups."""
    return (rotated // CHANNELS.value).bit_length() - 1


@triton.jit
def _store_words(words, to, stored, COUNT: tl.constexpr):
    """Store the words of rows in vectors of four, two or one.

    Args:
        words: COUNT tensors [ROWS] int32, each eight codes.
        to: [ROWS] pointers to the first words.
    """
    WIDTH: tl.constexpr = 4 if COUNT % 4 == 0 else 2 if COUNT % 2 == 0 else 1
    places = to[:, None] + tl.arange(0, WIDTH)[None, :]
    for first in tl.static_range(0, COUNT, WIDTH):
        if WIDTH == 4:
            even = tl.join(words[first], words[first + 2])
            odd = tl.join(words[first + 1], words[first + 3])
            vector = tl.reshape(tl.join(even, odd), [to.shape[0], WIDTH])
        elif WIDTH == 2:
            vector = tl.join(words[first], words[first + 1])
        else:
            vector = words[first][:, None]
        tl.store(places + first, vector, mask=stored[:, None])

"""Triton kernel that writes keys and values to a cache of rotated rows in codes of four bits.

A thread has a whole row, in groups of eight channels, so the stages of the transform exchange
nothing between threads. Otherwise it is the write of `kv_cache.py`, with the same bits.
"""

# ruff: noqa: RUF005 - Triton has no unpacking in tuples
import triton
import triton.language as tl
from torch import Tensor

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
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS
    head = (tl.program_id(1) // 2).to(tl.int64) * HEADS + row % HEADS
    is_row = (token < num_slots) & (head < kv_heads)
    # step: skip tokens without a slot
    slot = tl.load(slot_mapping + token * mapping_stride, mask=is_row, other=-1)
    # step: find block and offset
    block_id = slot // BLOCK_SIZE
    offset = slot - block_id * BLOCK_SIZE
    if tl.program_id(1) % 2 == 0:
        _write_rows(
            key, key_cache, token, head, block_id, offset, is_row, slot >= 0,
            HEAD_SIZE, HAS_ZERO, NATIVE, K_ALIGNMENT,
        )  # fmt: skip
    else:
        _write_rows(
            value, value_cache, token, head, block_id, offset, is_row, slot >= 0,
            VALUE_HEAD_SIZE, HAS_ZERO, NATIVE, V_ALIGNMENT,
        )  # fmt: skip


@triton.jit
def _write_rows(
    new, cache, token, head, block_id, offset, is_row, stored,
    SIZE: tl.constexpr, HAS_ZERO: tl.constexpr, NATIVE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Write the keys or the values of some tokens and heads.

    Args:
        token, head, block_id, offset: [ROWS] the tokens and heads, and their places.
        is_row, stored: [ROWS] which exist, and which are stored.
    """
    dtype: tl.constexpr = new.tensor.dtype.element_ty
    parts = _load_rotated(new, token, head, is_row, SIZE)
    # step: encode the key and the value in the format of the cache
    smallest = tl.full(parts[0].shape, float("inf"), tl.float32)
    largest = -smallest
    rounded = ()
    for number in tl.static_range(SIZE // CHANNELS):
        rows = round_to(parts[number], dtype, NATIVE)
        rounded = rounded + (rows,)  # type: ignore[assignment]
        if NATIVE:
            smallest, largest = tl.minimum(smallest, rows), tl.maximum(largest, rows)
        else:
            is_number = rows == rows
            smallest = tl.where(is_number, tl.minimum(smallest, rows), smallest)
            largest = tl.where(is_number, tl.maximum(largest, rows), largest)
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
    to = block_id * cache.stride_block + offset * cache.stride_slot
    to = tl.multiple_of(cache.tensor + (to + head * cache.stride_head), ALIGNMENT)
    _store_words(words, to.to(tl.pointer_type(tl.int32)), stored, SIZE // CHANNELS)
    of_scale = block_id * cache.scale_stride_block + offset * cache.scale_stride_slot
    of_scale += head * cache.scale_stride_head
    tl.store(cache.scale + of_scale, scale, mask=stored)


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

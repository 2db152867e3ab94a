"""Triton kernel that writes keys and values to a cache whose scales the write measures.

A program moves whole rows, since a scale follows from all channels of its block or row. Offsets are
64-bit.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import as_bits
from .portable.formats.cache_format import (
    channels_per_scale,
    encode_measured,
    is_packed,
)


class MeasuredHalf(NamedTuple):
    """The keys or the values of a cache whose scales are measured, as a kernel's argument.

    Args:
        tensor: [num_blocks, block_size, kv_heads, head_size].
        scale: [num_blocks, block_size, kv_heads], or bytes [num_blocks, block_size, kv_heads,
            parts] of block scales.
        scale_stride_part, global_scale: of block scales. None without them.
    """

    tensor: Any
    scale: Any
    scale_stride_block: Any
    scale_stride_slot: Any
    scale_stride_head: Any
    scale_stride_part: Any
    global_scale: Any
    stride_block: Any
    stride_slot: Any
    stride_head: Any
    stride_element: Any


class NewRows(NamedTuple):
    """Tokens and heads that a program writes, and their places: [ROWS] each, 64-bit.

    Args:
        token, head: indices of the new keys or values.
        block_id, offset: where they are stored.
        exists, stored: which rows exist, and which have a slot.
    """

    token: Any
    head: Any
    block_id: Any
    offset: Any
    exists: Any
    stored: Any


def measured_half(
    tensor: Tensor, scale: Any, global_scale: float | None
) -> MeasuredHalf:
    """Return keys or values of a cache whose scales are measured, as a kernel's argument."""
    block, slot, head, *parts = scale.stride()
    part = None
    if parts:
        (scale,), (part,) = as_bits(scale), parts
    of_scale = block, slot, head, part
    return MeasuredHalf(tensor, scale, *of_scale, global_scale, *tensor.stride())


def choose_rows(rows: int, kv_heads: int) -> tuple[int, int]:
    """Return the tokens and the heads of each that a program of so many rows writes.

    Example:
        16 rows: 2 tokens of 8 heads, 8 tokens of 2 heads, or 1 token of 16 of 40 heads.
    """
    heads = min(max(1, rows), triton.next_power_of_2(kv_heads))
    return max(1, rows // heads), heads


def align_rows(cache: Tensor) -> int:
    """Return the power of two, at most 16, of which the address of each row is a multiple.

    In pages that hold scales between rows of codes it may be 4 or 8. The compiler finds multiples
    of 16 by itself, and would store single bytes otherwise.

    Args:
        cache: [num_blocks, block_size, kv_heads, bytes] codes.
    """
    bits = cache.data_ptr() | 16
    for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True):
        bits |= stride if size > 1 else 0
    return bits & -bits


@triton.jit(do_not_specialize=["num_slots"])
def write_measured_kv_kernel(
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
    CACHE_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    K_ALIGNMENT: tl.constexpr,
    V_ALIGNMENT: tl.constexpr,
):
    """Write the keys and values of a tile of tokens and heads, with the scale of each.

    Grid: (tiles of tokens, tiles of heads). Keys and values of tokens without a slot are read too,
    so that no read waits for the slots.

    Args:
        key, value: NewTokens.
        key_cache, value_cache: MeasuredHalf.
        CACHE_FORMAT: name of the format of the cache.
        NATIVE_FP8: whether FP8 numbers are encoded by an instruction.
        TOKENS, HEADS, BLOCK_D, BLOCK_DV: tokens and heads of the tile, and elements of a key and of
            a value, rounded up to powers of two.
        K_ALIGNMENT, V_ALIGNMENT: see `align_rows`.
    """
    rows = find_rows(
        slot_mapping, mapping_stride, num_slots, kv_heads, tl.program_id(1),
        BLOCK_SIZE, TOKENS, HEADS,
    )  # fmt: skip
    _write_measured(
        key, key_cache, rows,
        HEAD_SIZE, BLOCK_D, CACHE_FORMAT, NATIVE_FP8, K_ALIGNMENT,
    )  # fmt: skip
    _write_measured(
        value, value_cache, rows,
        VALUE_HEAD_SIZE, BLOCK_DV, CACHE_FORMAT, NATIVE_FP8, V_ALIGNMENT,
    )  # fmt: skip


@triton.jit
def find_rows(
    slot_mapping, mapping_stride, num_slots, kv_heads, head_tile,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Return the NewRows of a program: a tile of tokens and heads.

    Args:
        head_tile: index of the tile of heads; program_id(0) is that of the tile of tokens.
    """
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS
    head = head_tile.to(tl.int64) * HEADS + row % HEADS
    exists = (token < num_slots) & (head < kv_heads)
    # step: skip tokens without a slot
    slot = tl.load(slot_mapping + token * mapping_stride, mask=exists, other=-1)
    # step: find block and offset
    block_id = slot // BLOCK_SIZE
    offset = slot - block_id * BLOCK_SIZE
    return NewRows(token, head, block_id, offset, exists, slot >= 0)


@triton.jit
def _write_measured(
    new, cache, rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, CACHE_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Write the keys or the values of some tokens and heads.

    Args:
        rows: NewRows.
    """
    part = tl.arange(0, BLOCK)
    read = rows.exists[:, None] & (part < SIZE)[None, :]
    begin = new.tensor + (rows.token * new.stride_token + rows.head * new.stride_head)
    numbers = tl.load(
        begin[:, None] + (part * new.stride_element)[None, :], mask=read, other=0
    ).to(tl.float32)
    # step: encode the key and the value in the format of the cache
    dtype: tl.constexpr = new.tensor.dtype.element_ty
    codes, scale = encode_measured(
        numbers, cache.global_scale, dtype, SIZE, BLOCK, CACHE_FORMAT, NATIVE_FP8
    )
    # step: store the key and the value
    to, of_scale, is_code, has_scale = locate_rows(
        cache, rows.block_id, rows.offset, rows.head, rows.stored,
        SIZE, BLOCK, CACHE_FORMAT, ALIGNMENT,
    )  # fmt: skip
    tl.store(to, codes, mask=is_code)
    tl.store(of_scale, scale, mask=has_scale)


@triton.jit
def locate_begins(cache, block_id, offset, head, ALIGNMENT: tl.constexpr):
    """Return pointers to the first code of slots and heads, and to their first scale: [ROWS] each.

    Args:
        cache, block_id, offset, head, ALIGNMENT: as in `locate_rows`.
    """
    row = block_id * cache.stride_block + offset * cache.stride_slot
    row = tl.multiple_of(cache.tensor + (row + head * cache.stride_head), ALIGNMENT)
    scale = block_id * cache.scale_stride_block + offset * cache.scale_stride_slot
    return row, cache.scale + (scale + head * cache.scale_stride_head)


@triton.jit
def locate_rows(
    cache, block_id, offset, head, is_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, CACHE_FORMAT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Return pointers to the codes of slots and heads and to their scales.

    Args:
        cache: MeasuredHalf.
        block_id, offset, head, is_row: [ROWS]; `head` may be one number.
        ALIGNMENT: see `align_rows`.

    Returns:
        [ROWS, stored elements] and [ROWS], or [ROWS, parts] for block scales; and which codes and
        which scales exist, of the same shapes.
    """
    codes: tl.constexpr = 2 if is_packed(CACHE_FORMAT) else 1
    part = tl.arange(0, BLOCK // codes)
    row, of_scale = locate_begins(cache, block_id, offset, head, ALIGNMENT)
    to = row[:, None] + (part * cache.stride_element)[None, :]
    is_code = is_row[:, None] & (part < SIZE // codes)[None, :]
    has_scale = is_row
    step: tl.constexpr = channels_per_scale(CACHE_FORMAT)
    if step:
        block = tl.arange(0, BLOCK // step)
        of_scale = of_scale[:, None] + (block * cache.scale_stride_part)[None, :]
        has_scale = is_row[:, None] & (block < SIZE // step)[None, :]
    return to, of_scale, is_code, has_scale

"""Triton kernels that write keys and values to their paged cache, and copy blocks.

A program moves a tile of tokens, or of a block, by elements, with any strides. Elements are copied
as integers of their width, so no bit changes. Only between a quantized cache and a wider dtype are
they converted. Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import load_scale
from .portable.formats.cache_format import (
    channels_per_scale,
    encode_given,
    encode_measured,
    is_packed,
)

MAX_ELEMENTS_PER_PROGRAM = 1024
"""Elements of a token or block that a program moves, at most."""
ELEMENTS_PER_WRITE = 2048
"""Elements of keys that a program writes, of all its tokens, and as many of values.

20 writes of 1 to 29,462 tokens of 256 to 2,048 elements (H200, bfloat16 and FP8) take 1.017 times
the fastest of 1, 2, 4 and 8 tokens per program (geometric mean, at worst 1.06). With 1,024 elements
that is 1.013 and 1.08, with 4,096 1.066 and 1.13, and with 4 tokens of any size 1.044 and 1.12. If
tokens have 1,024 elements, 45 tokens take 5.28 us with 2 per program and 5.89 with 4, and 17,847
take 41.3 and 42.5. With 512 elements, 29,462 take 28.7 with 4, 31.0 with 2 and 36.7 with 1."""
MAX_TOKENS_PER_WRITE = 8
"""Tokens that a program writes, at most: more were not measured."""

AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NewTokens(NamedTuple):
    """New keys or values, as a kernel's argument, with strides in elements.

    Args:
        tensor: [tokens, kv_heads, head_size].
    """

    tensor: Any
    stride_token: Any
    stride_head: Any
    stride_element: Any


class CacheHalf(NamedTuple):
    """The keys or the values of a cache, as a kernel's argument, with strides in elements.

    Args:
        tensor: [num_blocks, block_size, kv_heads, head_size].
        scale, scale_stride: Optional. The scale of a quantized cache and its stride, see
            `scale_arguments`.
    """

    tensor: Any
    scale: Any
    scale_stride: Any
    stride_block: Any
    stride_slot: Any
    stride_head: Any
    stride_element: Any


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


def as_bits(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of the tensors as integers of the same width."""
    return tuple(tensor.view(AS_INTEGERS[tensor.element_size()]) for tensor in tensors)


def choose_tile(elements: int) -> int:
    """Return the elements that a program moves, of `elements` per token or block."""
    return min(MAX_ELEMENTS_PER_PROGRAM, triton.next_power_of_2(elements))


def choose_tokens(tile: int) -> int:
    """Return the tokens that a program writes.

    Args:
        tile: elements of each token that it writes, a power of 2 as `choose_tile` returns it.

    Example:
        8 heads of 128: tiles of 1,024 elements, and 2 tokens. 2 heads of 128: 256, and 8.
    """
    return min(MAX_TOKENS_PER_WRITE, ELEMENTS_PER_WRITE // tile)


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
def write_kv_kernel(
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
    ELEMENTS: tl.constexpr,
):
    """Write the keys and values of a tile of tokens to their slots.

    Keys and values of tokens without a slot are read too, so that no read waits for the slots.

    Args:
        key, value: NewTokens.
        key_cache, value_cache: CacheHalf.
        CACHE_FORMAT: name of the format of the cache.
        NATIVE_FP8: whether FP8 numbers are encoded by an instruction.
        TOKENS, ELEMENTS: tokens of the tile, and elements of all heads of a token.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS).to(tl.int64)
    head, part = element // HEAD_SIZE, element % HEAD_SIZE
    value_head, value_part = element // VALUE_HEAD_SIZE, element % VALUE_HEAD_SIZE
    is_token = token < num_slots
    slot = tl.load(slot_mapping + token * mapping_stride, mask=is_token, other=-1)
    is_key, is_value = head < kv_heads, value_head < kv_heads
    new_key = _load_new(key, token, head, part, is_token[:, None] & is_key)
    new_value = _load_new(
        value, token, value_head, value_part, is_token[:, None] & is_value
    )
    # step: skip tokens without a slot
    stored = (slot >= 0)[:, None] & is_key
    value_stored = (slot >= 0)[:, None] & is_value
    # step: find block and offset
    block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    # step: encode the key and the value in the format of the cache
    if key_cache.scale is not None:
        new_key = _quantise(new_key, key_cache, head, is_key, CACHE_FORMAT, NATIVE_FP8)
        new_value = _quantise(
            new_value, value_cache, value_head, is_value, CACHE_FORMAT, NATIVE_FP8
        )
    # step: store the key and the value
    to = locate(key_cache, block_id, offset, head, part)
    tl.store(to, new_key, mask=stored)
    to = locate(value_cache, block_id, offset, value_head, value_part)
    tl.store(to, new_value, mask=value_stored)


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
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS
    head = tl.program_id(1).to(tl.int64) * HEADS + row % HEADS
    is_row = (token < num_slots) & (head < kv_heads)
    # step: skip tokens without a slot
    slot = tl.load(slot_mapping + token * mapping_stride, mask=is_row, other=-1)
    # step: find block and offset
    block_id = slot // BLOCK_SIZE
    offset = slot - block_id * BLOCK_SIZE
    _write_measured(
        key, key_cache, token, head, block_id, offset, is_row, slot >= 0,
        HEAD_SIZE, BLOCK_D, CACHE_FORMAT, NATIVE_FP8, K_ALIGNMENT,
    )  # fmt: skip
    _write_measured(
        value, value_cache, token, head, block_id, offset, is_row, slot >= 0,
        VALUE_HEAD_SIZE, BLOCK_DV, CACHE_FORMAT, NATIVE_FP8, V_ALIGNMENT,
    )  # fmt: skip


@triton.jit
def _write_measured(
    new, cache, token, head, block_id, offset, is_row, stored,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, CACHE_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Write the keys or the values of some tokens and heads.

    Args:
        token, head, block_id, offset: [ROWS] the tokens and heads, and their places.
        is_row, stored: [ROWS] which exist, and which are stored.
    """
    part = tl.arange(0, BLOCK)
    read = is_row[:, None] & (part < SIZE)[None, :]
    rows = new.tensor + (token * new.stride_token + head * new.stride_head)
    numbers = tl.load(
        rows[:, None] + (part * new.stride_element)[None, :], mask=read, other=0
    ).to(tl.float32)
    # step: encode the key and the value in the format of the cache
    dtype: tl.constexpr = new.tensor.dtype.element_ty
    codes, scale = encode_measured(
        numbers, cache.global_scale, dtype, SIZE, BLOCK, CACHE_FORMAT, NATIVE_FP8
    )
    # step: store the key and the value
    to, of_scale, is_code, has_scale = locate_rows(
        cache, block_id, offset, head, stored, SIZE, BLOCK, CACHE_FORMAT, ALIGNMENT
    )
    tl.store(to, codes, mask=is_code)
    tl.store(of_scale, scale, mask=has_scale)


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
    row = block_id * cache.stride_block + offset * cache.stride_slot
    row = tl.multiple_of(cache.tensor + (row + head * cache.stride_head), ALIGNMENT)
    of_scale = block_id * cache.scale_stride_block + offset * cache.scale_stride_slot
    of_scale = cache.scale + (of_scale + head * cache.scale_stride_head)
    to = row[:, None] + (part * cache.stride_element)[None, :]
    is_code = is_row[:, None] & (part < SIZE // codes)[None, :]
    has_scale = is_row
    step: tl.constexpr = channels_per_scale(CACHE_FORMAT)
    if step:
        block = tl.arange(0, BLOCK // step)
        of_scale = of_scale[:, None] + (block * cache.scale_stride_part)[None, :]
        has_scale = is_row[:, None] & (block < SIZE // step)[None, :]
    return to, of_scale, is_code, has_scale


@triton.jit
def _load_new(new, token, head, part, is_new):
    """Return elements of new keys or values: [TOKENS, ELEMENTS]."""
    offsets = (token * new.stride_token)[:, None]
    offsets += (head * new.stride_head + part * new.stride_element)[None, :]
    return tl.load(new.tensor + offsets, mask=is_new, other=0)


@triton.jit
def _quantise(
    numbers, cache, head, is_head,
    CACHE_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Return numbers as the bytes of a cache whose scales are given: [TOKENS, ELEMENTS]."""
    scale = load_scale(cache.scale, cache.scale_stride, head, is_head)
    is_number: tl.constexpr = cache.scale_stride is None
    numbers = numbers.to(tl.float32)
    return encode_given(numbers, scale, CACHE_FORMAT, NATIVE_FP8, is_number)


@triton.jit
def locate(cache, block_id, offset, head, part):
    """Return pointers to elements of slots: [TOKENS, ELEMENTS]."""
    slots = block_id * cache.stride_block + offset * cache.stride_slot
    parts = head * cache.stride_head + part * cache.stride_element
    return cache.tensor + slots[:, None] + parts[None, :]


@triton.jit
def copy_blocks_kernel(
    source,
    destination,
    block_mapping,
    elements,
    source_stride_half,
    source_stride_block,
    source_stride_slot,
    source_stride_head,
    source_stride_element,
    destination_stride_half,
    destination_stride_block,
    destination_stride_slot,
    destination_stride_head,
    destination_stride_element,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Copy a tile of the keys, or of the values, of one block to another block."""
    pair = tl.program_id(0)
    half = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
    slot = (element // (KV_HEADS * HEAD_SIZE)).to(tl.int64)
    head = (element // HEAD_SIZE % KV_HEADS).to(tl.int64)
    part = (element % HEAD_SIZE).to(tl.int64)
    taken = tl.load(block_mapping + 2 * pair)
    given = tl.load(block_mapping + 2 * pair + 1)
    inside = element < elements
    start = source + half * source_stride_half + taken * source_stride_block
    place = slot * source_stride_slot + head * source_stride_head
    moved = tl.load(start + place + part * source_stride_element, mask=inside)
    start = (
        destination + half * destination_stride_half + given * destination_stride_block
    )
    place = slot * destination_stride_slot + head * destination_stride_head
    tl.store(start + place + part * destination_stride_element, moved, mask=inside)

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
from .portable.formats.cache_format import encode_given

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

"""Parts of records that formats share: sizes of tiles, powers of two, bfloat16 elements."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)


class RecordCache(NamedTuple):
    """A cache of records, as a kernel's argument: three views of the same memory.

    Args:
        codes: Its bytes as uint8.
        halves: The same as int16.
        words: The same as float32.
        stride_block, stride_slot: Bytes from block to block, and from slot to slot.
    """

    codes: Any
    halves: Any
    words: Any
    stride_block: Any
    stride_slot: Any


class Slots(NamedTuple):
    """Where the records of tokens start, in bytes from the start of the cache.

    Args:
        data, scales: [TOKENS] int64 first byte of the data, and of the scales if a block stores
            them last.
        is_token: [TOKENS] whether the token is read or written.
    """

    data: Any
    scales: Any
    is_token: Any


@triton.jit
def locate_slots(
    cache, block_id, offset, block_size, is_token, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, SCALES_LAST: tl.constexpr,
):  # fmt: skip
    """Return the Slots of tokens.

    Args:
        block_id, offset, is_token: [TOKENS], the first two int64.
    """
    block = block_id * cache.stride_block
    if SCALES_LAST:
        data = block + offset * DATA_BYTES
        scales = block + block_size * DATA_BYTES + offset * SCALE_BYTES
    else:
        data = block + offset * cache.stride_slot
        scales = data + DATA_BYTES
    return Slots(data, scales, is_token)


@triton.jit
def finite_size(tiles):
    """Return the largest size of each tile without NaN, at most the largest float32.

    Args:
        tiles: [..., TILE] float32.
    """
    size = tl.where(tiles == tiles, tl.abs(tiles), 0.0)
    return tl.minimum(tl.max(size, len(size.shape) - 1), LARGEST_FLOAT32)


@triton.jit
def ceil_log2(size):
    """Return the exponent of the smallest power of two that is at least `size`, a normal number."""
    bits = size.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent as float32; the exponent is that of a normal number."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_bfloat16(numbers):
    """Return float32 numbers as the bits of bfloat16, rounded to nearest even. NaN is 0x7FC0."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x7F800000)
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    signed = tl.where(is_nan, 0x7FC0, rounded | ((bits >> 16) & 0x8000))
    return signed.to(tl.int16)


@triton.jit
def decode_bfloat16(bits):
    """Return the bits of bfloat16 elements as float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def canonical_fp8(codes, numbers):
    """Return float8_e4m3fn codes of numbers, with one byte for every NaN."""
    return tl.where(numbers == numbers, codes, 0x7F).to(tl.uint8)


@triton.jit
def load_rope_bits(cache, slots, OFFSET: tl.constexpr, ROPE: tl.constexpr):
    """Return bfloat16 rope keys as float32: [TOKENS, ROPE]. Those of no token are 0."""
    element = tl.arange(0, ROPE)
    places = ((slots.data + OFFSET) // 2)[:, None] + element[None, :]
    bits = tl.load(cache.halves + places, mask=slots.is_token[:, None], other=0)
    return decode_bfloat16(bits)


@triton.jit
def store_rope_bits(cache, slots, rope, OFFSET: tl.constexpr, ROPE: tl.constexpr):
    """Store float32 rope keys as bfloat16."""
    element = tl.arange(0, ROPE)
    places = ((slots.data + OFFSET) // 2)[:, None] + element[None, :]
    tl.store(cache.halves + places, encode_bfloat16(rope), mask=slots.is_token[:, None])


@triton.jit
def load_codes(
    cache, slots, OFFSET: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr
):
    """Return bytes of each record: [TOKENS, WIDTH]. Those of no token, and past BYTES, are 0."""
    byte = tl.arange(0, WIDTH)
    places = (slots.data + OFFSET)[:, None] + byte[None, :]
    is_byte = slots.is_token[:, None] & (byte < BYTES)[None, :]
    return tl.load(cache.codes + places, mask=is_byte, other=0)


@triton.jit
def store_codes(cache, slots, codes, OFFSET: tl.constexpr, BYTES: tl.constexpr):
    """Store the first BYTES bytes of each record from OFFSET on.

    Args:
        codes: [TOKENS, WIDTH] uint8.
    """
    byte = tl.arange(0, codes.shape[1])
    places = (slots.data + OFFSET)[:, None] + byte[None, :]
    is_byte = slots.is_token[:, None] & (byte < BYTES)[None, :]
    tl.store(cache.codes + places, codes, mask=is_byte)


@triton.jit
def scale_tiles(numbers, scale):
    """Return numbers times the scale of their tile.

    Args:
        numbers: [TOKENS, WIDTH].
        scale: [TOKENS, TILES].
    """
    TILE: tl.constexpr = numbers.shape[1] // scale.shape[1]
    tiles = tl.reshape(numbers, [scale.shape[0], scale.shape[1], TILE])
    return tl.reshape(tiles * scale[:, :, None], [numbers.shape[0], numbers.shape[1]])

"""nvfp4: float4_e2m1 codes with a float8_e4m3fn scale per block of 16 channels, and a global scale.

A code times its block scale has 6 significant bits and is between 2^-10 and 2,688: exact in
float16 and bfloat16. Tiles are decoded to these products. The global scale is applied to the scores
of keys, and to the results of values.
"""

import triton
import triton.language as tl

from .....contract.cache_formats import FORMATS
from ...fp4 import decode_e2m1, encode_e2m1
from ...fp8 import decode_fp8, encode_fp8

CHANNELS = tl.constexpr(FORMATS["nvfp4"].channels_per_scale)
"""Channels of a block."""


@triton.jit
def encode_nvfp4(numbers, global_scale):
    """Return the codes of rows, two in a byte, and the scales of their blocks as bytes.

    Args:
        numbers: [ROWS, ELEMENTS] float32. Elements past the end of a row are 0.
        global_scale: A number.

    Returns:
        [ROWS, ELEMENTS / 2] uint8, [ROWS, ELEMENTS / 16] uint8.
    """
    blocks = into_blocks(numbers)
    scales = measure_blocks(blocks, global_scale, 6.0)
    return in_pairs(nearest_codes(blocks, scales, global_scale)), scales


@triton.jit
def into_blocks(numbers):
    """Return numbers in blocks: [ROWS, BLOCKS, 16]."""
    BLOCKS: tl.constexpr = numbers.shape[1] // CHANNELS
    return tl.reshape(numbers, [numbers.shape[0], BLOCKS, CHANNELS])


@triton.jit
def measure_blocks(blocks, global_scale, LARGEST: tl.constexpr):
    """Return the scales, as bytes, that make the largest size of each block LARGEST.

    NaN does not count.

    Args:
        blocks: [ROWS, BLOCKS, 16] float32.
    """
    size = tl.max(tl.where(blocks == blocks, tl.abs(blocks), 0.0), 2)
    return encode_fp8(tl.div_rn(tl.div_rn(size, LARGEST), global_scale), False)


@triton.jit
def nearest_codes(blocks, scales, global_scale):
    """Return the code of each element as int32: [ROWS, BLOCKS, 16]."""
    steps = (decode_fp8(scales, False, False).to(tl.float32) * global_scale)[:, :, None]
    is_zero = steps == 0.0
    quotients = tl.div_rn(blocks, tl.where(is_zero, 1.0, steps))
    return tl.where(is_zero, 0, encode_e2m1(quotients))


@triton.jit
def in_pairs(codes):
    """Return the codes of blocks, two in a byte: [ROWS, ELEMENTS / 2] uint8."""
    PAIRS: tl.constexpr = codes.shape[1] * CHANNELS // 2
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], PAIRS, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def decode_nvfp4(codes, scales, dtype):
    """Return codes times the scales of their blocks, each exact: [ROWS, ELEMENTS].

    Args:
        codes: [ROWS, ELEMENTS / 2] bytes.
        scales: [ROWS, ELEMENTS / 16] bytes.
    """
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    codes = codes.to(tl.int32)
    numbers = decode_e2m1(tl.join(codes & 15, (codes >> 4) & 15))
    blocks = tl.reshape(numbers, [ROWS, BLOCKS, CHANNELS])
    blocks *= decode_fp8(scales, False, False)[:, :, None]
    return tl.reshape(blocks, [ROWS, BLOCKS * CHANNELS]).to(dtype)


@triton.jit
def load_block_scales(
    scale, strides, kv_head, block_id, slot, is_key, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the scales of the blocks of slots as bytes: [BLOCK_N, BLOCK / 16].

    Masked ones may be NaN, and 0 * NaN = NaN, so they are loaded as 0.

    Args:
        scale, strides: [num_blocks, block_size, kv_heads, blocks] bytes, and its BlockStrides.
        block_id, slot, is_key: [BLOCK_N].
        SIZE, BLOCK: channels of a key or value, and the same as a power of two.
    """
    part = tl.arange(0, BLOCK // CHANNELS)
    places = block_id * strides.block + slot * strides.slot
    places = places[:, None] + (part * strides.part)[None, :]
    mask = (part < SIZE // CHANNELS)[None, :]
    if MASKED:
        mask = is_key[:, None] & mask
    start = scale + kv_head.to(tl.int64) * strides.head
    return tl.load(start + places, mask=mask, other=0)


@triton.jit
def scale_block_scores(qk_scale, call):
    """Return the scale of dot products with the global scale of the keys."""
    return qk_scale * call.option_tensors.k_global_scale


@triton.jit
def scale_block_values(result, call):
    """Return finished rows with the global scale of the values: [BLOCK_M, BLOCK_DV]."""
    return result * call.option_tensors.v_global_scale

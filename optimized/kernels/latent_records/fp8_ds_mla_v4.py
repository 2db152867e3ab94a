"""fp8_ds_mla_v4: 448 float8_e4m3fn codes, 64 bfloat16 rope elements, 7 exponents and a 0.

Latents are padded to 512 columns in registers.
"""

import triton
import triton.language as tl

from ..fp8 import decode_fp8, encode_fp8
from .fields import (
    canonical_fp8,
    ceil_log2,
    finite_size,
    load_codes,
    load_rope_bits,
    power_of_two,
    scale_tiles,
    store_codes,
    store_rope_bits,
)

SMALLEST_SIZE = tl.constexpr(1e-4)


@triton.jit
def store_v4_records(cache, slots, latents, rope):
    """Store the records of tokens.

    Args:
        cache, slots: RecordCache, Slots.
        latents: [TOKENS, 512] float32; columns from 448 on are 0.
        rope: [TOKENS, 64] float32.
    """
    tiles = tl.reshape(latents, [latents.shape[0], 8, 64])
    size = tl.maximum(finite_size(tiles), SMALLEST_SIZE)
    exponent = ceil_log2(tl.div_rn(size, 448.0))  # [TOKENS, 8]
    # the product with a power of two is the quotient
    quotients = scale_tiles(latents, power_of_two(-exponent))
    codes = canonical_fp8(encode_fp8(quotients, False), quotients)
    store_codes(cache, slots, codes, 0, 448)
    store_rope_bits(cache, slots, rope, 448, 64)
    number = tl.arange(0, 8)[None, :]
    scales = tl.where(number < 7, exponent + 127, 0).to(tl.uint8)
    places = slots.scales[:, None] + number
    tl.store(cache.codes + places, scales, mask=slots.is_token[:, None])


@triton.jit
def load_v4_latents(cache, slots, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return the latents of records: [TOKENS, 512] in `dtype`; columns from 448 on are 0."""
    codes = load_codes(cache, slots, 0, 448, 512)
    number = tl.arange(0, 8)[None, :]
    is_scale = slots.is_token[:, None] & (number < 7)
    places = slots.scales[:, None] + number
    byte = tl.load(cache.codes + places, mask=is_scale, other=127).to(tl.int32)
    # byte 0 is 2^-127, a subnormal number, and 255 is NaN
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    scale = bits.to(tl.float32, bitcast=True).to(dtype)
    return scale_tiles(decode_fp8(codes, False, NATIVE_FP8).to(dtype), scale)


@triton.jit
def load_v4_rope(cache, slots):
    """Return the rope keys of records: [TOKENS, 64] float32."""
    return load_rope_bits(cache, slots, 448, 64)

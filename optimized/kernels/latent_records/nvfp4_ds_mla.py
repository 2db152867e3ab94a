"""nvfp4_ds_mla: 512 float4_e2m1 codes, 64 float8_e4m3fn rope elements, 32 float8_e4m3fn scales."""

import triton
import triton.language as tl

from ..fp4 import decode_e2m1, encode_e2m1
from ..fp8 import decode_fp8, encode_fp8
from .fields import canonical_fp8, finite_size, load_codes, scale_tiles, store_codes

SMALLEST_SCALE = tl.constexpr(2.0**-9)


@triton.jit
def store_nvfp4_records(cache, slots, even, odd, rope):
    """Store the records of tokens.

    Args:
        cache, slots: RecordCache, Slots.
        even, odd: [TOKENS, 256] float32 elements of the latents.
        rope: [TOKENS, 64] float32.
    """
    shape: tl.constexpr = [even.shape[0], 32, 8]
    size = tl.maximum(
        finite_size(tl.reshape(even, shape)), finite_size(tl.reshape(odd, shape))
    )
    scales = encode_fp8(tl.maximum(size * (1 / 6), SMALLEST_SCALE), False)
    inverse = tl.div_rn(1.0, decode_fp8(scales, False, False).to(tl.float32))
    low = encode_e2m1(scale_tiles(even, inverse))
    high = encode_e2m1(scale_tiles(odd, inverse))
    store_codes(cache, slots, (low | (high << 4)).to(tl.uint8), 0, 256)
    store_codes(cache, slots, canonical_fp8(encode_fp8(rope, False), rope), 256, 64)
    places = (slots.data + 320)[:, None] + scale_byte()[None, :]
    tl.store(cache.codes + places, scales, mask=slots.is_token[:, None])


@triton.jit
def scale_byte():
    """Return which byte of the scales is that of each tile: [32]."""
    tile = tl.arange(0, 32)
    return 8 * (tile % 4) + tile // 4


@triton.jit
def load_nvfp4_latents(cache, slots, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return the latents of records: [TOKENS, 512] in `dtype`, float32 or float64."""
    pairs = load_codes(cache, slots, 0, 256, 256)
    places = (slots.data + 320)[:, None] + scale_byte()[None, :]
    scales = tl.load(cache.codes + places, mask=slots.is_token[:, None], other=0)
    scale = decode_fp8(scales, False, NATIVE_FP8).to(dtype)  # [TOKENS, 32]
    low, high = decode_e2m1(pairs & 15).to(dtype), decode_e2m1(pairs >> 4).to(dtype)
    numbers = tl.reshape(tl.join(low, high), [pairs.shape[0], 512])
    return scale_tiles(numbers, scale)


@triton.jit
def load_nvfp4_rope(cache, slots, NATIVE_FP8: tl.constexpr):
    """Return the rope keys of records: [TOKENS, 64] float32."""
    codes = load_codes(cache, slots, 256, 64, 64)
    return decode_fp8(codes, False, NATIVE_FP8).to(tl.float32)

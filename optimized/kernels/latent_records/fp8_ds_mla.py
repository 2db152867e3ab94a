"""fp8_ds_mla: 512 float8_e4m3fn codes, 4 float32 scales, 64 bfloat16 rope elements."""

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

SMALLEST_SCALE = tl.constexpr(1e-4)


@triton.jit
def store_fp8_records(cache, slots, latents, rope):
    """Store the records of tokens.

    Args:
        cache, slots: RecordCache, Slots.
        latents: [TOKENS, 512] float32.
        rope: [TOKENS, 64] float32.
    """
    tiles = tl.reshape(latents, [latents.shape[0], 4, 128])
    size = finite_size(tiles) * (1 / 448)
    exponent = ceil_log2(tl.maximum(size, SMALLEST_SCALE))  # [TOKENS, 4]
    # the product with a power of two is the quotient
    quotients = scale_tiles(latents, power_of_two(-exponent))
    codes = canonical_fp8(encode_fp8(quotients, False), quotients)
    store_codes(cache, slots, codes, 0, 512)
    places = (slots.data // 4 + 128)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(cache.words + places, power_of_two(exponent), mask=slots.is_token[:, None])
    store_rope_bits(cache, slots, rope, 528, 64)


@triton.jit
def load_fp8_latents(cache, slots, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return the latents of records: [TOKENS, 512] in `dtype`, float32 or float64."""
    codes = load_codes(cache, slots, 0, 512, 512)
    places = (slots.data // 4 + 128)[:, None] + tl.arange(0, 4)[None, :]
    scale = tl.load(cache.words + places, mask=slots.is_token[:, None], other=0.0)
    return scale_tiles(decode_fp8(codes, False, NATIVE_FP8).to(dtype), scale.to(dtype))


@triton.jit
def load_fp8_rope(cache, slots):
    """Return the rope keys of records: [TOKENS, 64] float32."""
    return load_rope_bits(cache, slots, 528, 64)

"""FP8 cache: codes are decoded, and the scale of a head is applied to its scores and results.

`../../fp8.py` has the conversions.
"""

import triton
import triton.language as tl

from ...fp8 import decode_fp8, decode_fp8_pinned, load_scale

FP8_FORMATS = ("fp8_e4m3", "fp8_e5m2")
"""Names of the formats."""


@triton.jit
def decode_fp8_k(k, dtype, config: tl.constexpr):
    """Return keys as numbers: [BLOCK_N, BLOCK_D]."""
    return decode_fp8(k, config.CACHE_FORMAT == "fp8_e5m2", config.NATIVE_FP8).to(dtype)


@triton.jit
def decode_fp8_v(v, dtype, config: tl.constexpr):
    """Return values as numbers: [BLOCK_N, BLOCK_DV]."""
    if config.PIN_FP8_V:
        v = decode_fp8_pinned(v, config.CACHE_FORMAT == "fp8_e5m2", config.NATIVE_FP8)
    else:
        v = decode_fp8(v, config.CACHE_FORMAT == "fp8_e5m2", config.NATIVE_FP8)
    return v.to(dtype)


@triton.jit
def scale_fp8_queries(q, q_rope, qk_scale, call, kv_head, config: tl.constexpr):
    """Return queries in the dtype of their products, and the scale of their dot products.

    The scale is a number; with keys that are decoded to float16 it is [BLOCK_M, 1].

    Args:
        q, q_rope: as in `scale_queries`.
    """
    k_scale = call.option_tensors.k_scale
    qk_scale *= load_scale(k_scale, call.scale_strides.k, kv_head, True)
    if config.NATIVE_FP8 and q.dtype != tl.float32:
        power = find_power(q)
        if config.ROPE_DIM > 0:
            power = tl.maximum(power, find_power(q_rope))
            q_rope = divide_rows(q_rope, power)
        q = divide_rows(q, power)
        qk_scale = (qk_scale * power)[:, None]
    return q, q_rope, qk_scale


@triton.jit
def fit_float16(q):
    """Return queries in float16, and the power of two by which each row was divided to fit it.

    FP8 keys are exact in float16. A product with bfloat16 queries would round them.
    """
    power = find_power(q)
    return divide_rows(q, power), power


@triton.jit
def find_power(q):
    """Return the least power of two that no element of a row exceeds: [BLOCK_M]."""
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)  # [BLOCK_M]
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 2.0**-100))))


@triton.jit
def divide_rows(q, power):
    """Return rows divided by their powers of two, in float16."""
    return (q.to(tl.float32) / power[:, None]).to(tl.float16)


@triton.jit
def scale_fp8_values(result, call, kv_head):
    """Return rows with the scale of the values: [BLOCK_M, BLOCK_DV]."""
    v_scale = call.option_tensors.v_scale
    result *= load_scale(v_scale, call.scale_strides.v, kv_head, True)
    return result

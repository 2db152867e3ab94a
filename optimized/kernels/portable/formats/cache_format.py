"""The formats of caches, composed: a branch per format, of which one is compiled.

The constant CACHE_FORMAT is the name of the format. Attention decodes KV tiles and applies scales
to queries, scores, weights and results. Writes encode, gathers decode.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .....contract.cache_formats import FORMATS
from ...fp8 import decode_fp8, quantise
from .fp8 import decode_fp8_k, decode_fp8_v, scale_fp8_queries, scale_fp8_values
from .fp8_per_token_head import encode_fp8_rows
from .int4_per_token_head import (
    count_channels,
    decode_int4,
    encode_int4,
    rotate_back,
    rotate_queries,
    rotate_values,
    split_scales,
)
from .int8_per_token_head import decode_int8, encode_int8
from .nvfp4 import (
    decode_nvfp4,
    encode_nvfp4,
    load_block_scales,
    scale_block_scores,
    scale_block_values,
)
from .nvfp4_4over6 import encode_4over6
from .plain import upcast
from .token_scales import load_slot_scales


class TileScales(NamedTuple):
    """The scales of a KV tile's keys and values, in formats whose scales are measured.

    Args:
        k, v: [BLOCK_N] float32, or [BLOCK_N, blocks of channels] bytes; () in other formats.
        k_zero, v_zero: [BLOCK_N] float32 zero points; () in formats without them.
    """

    k: Any
    v: Any
    k_zero: Any
    v_zero: Any


@triton.constexpr_function
def has_slot_scales(name: str) -> bool:
    """Return whether a format has a scale per token and head."""
    return FORMATS[name].has_token_scales


@triton.constexpr_function
def channels_per_scale(name: str) -> int:
    """Return the channels of a block scale; 0 in a format without them."""
    return FORMATS[name].channels_per_scale


@triton.constexpr_function
def is_plain(name: str) -> bool:
    """Return whether numbers are stored as they are."""
    return not FORMATS[name].is_quantised


@triton.constexpr_function
def is_packed(name: str) -> bool:
    """Return whether a byte of a format holds two codes."""
    return FORMATS[name].codes_per_element == 2


@triton.constexpr_function
def is_rotated(name: str) -> bool:
    """Return whether keys and values of a format are rotated before they are codes."""
    return FORMATS[name].is_rotated


@triton.constexpr_function
def includes_zero(name: str) -> bool:
    """Return whether every row of a format has a code for 0."""
    return FORMATS[name].includes_zero


@triton.jit
def encode_given(
    numbers, scale, CACHE_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    IS_NUMBER: tl.constexpr,
):  # fmt: skip
    """Return the codes of float32 numbers as bytes, of a format whose scales are given.

    Args:
        scale, NATIVE_FP8, IS_NUMBER: as in `quantise` in ../../fp8.py.
    """
    return quantise(numbers, scale, CACHE_FORMAT == "fp8_e5m2", NATIVE_FP8, IS_NUMBER)


@triton.jit
def encode_measured(
    numbers, global_scale, dtype, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CACHE_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Return the codes of rows of float32 numbers, and the scale or the block scales of each row.

    Args:
        numbers: [ROWS, BLOCK]. Elements past the end of a row are 0.
        global_scale: of block scales.
        dtype: of the numbers before they were float32.
        SIZE: elements of a row.
        NATIVE_FP8: whether FP8 numbers are encoded by an instruction.
    """
    if CACHE_FORMAT == "int8_per_token_head":
        codes, scale = encode_int8(numbers)
    elif CACHE_FORMAT == "nvfp4":
        codes, scale = encode_nvfp4(numbers, global_scale)
    elif CACHE_FORMAT == "nvfp4_4over6":
        codes, scale = encode_4over6(numbers, global_scale)
    elif is_rotated(CACHE_FORMAT):
        has_zero: tl.constexpr = includes_zero(CACHE_FORMAT)
        codes, scale = encode_int4(numbers, dtype, SIZE, BLOCK, has_zero)
    else:
        tl.static_assert(CACHE_FORMAT == "fp8_per_token_head")
        codes, scale = encode_fp8_rows(numbers, NATIVE_FP8)
    return codes, scale


@triton.jit
def decode_codes(codes, CACHE_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return what bytes of a cache mean in float32, before they are multiplied by a scale."""
    if CACHE_FORMAT == "int8_per_token_head":
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        is_e5m2: tl.constexpr = CACHE_FORMAT == "fp8_e5m2"
        numbers = decode_fp8(codes, is_e5m2, NATIVE_FP8).to(tl.float32)
    return numbers


@triton.jit
def decode_measured(
    codes, scale, global_scale, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CACHE_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Return what rows of codes mean, times their scales: [ROWS, BLOCK] float32.

    Args:
        codes: [ROWS, BLOCK] bytes; half as many if a byte holds two codes.
        scale: [ROWS], or block scales [ROWS, blocks] as bytes.
        global_scale: of block scales.
        SIZE: elements of a row.
    """
    if channels_per_scale(CACHE_FORMAT):
        numbers = decode_nvfp4(codes, scale, tl.float32) * global_scale
    elif is_rotated(CACHE_FORMAT):
        scale, zero_point = split_scales(scale)
        rows = decode_int4(codes, zero_point, tl.float32)
        # the rotation adds integers, which is exact
        rows = rotate_back(rows, SIZE, BLOCK)
        numbers = rows * (scale * (1.0 / count_channels(SIZE)))[:, None]
    else:
        numbers = decode_codes(codes, CACHE_FORMAT, NATIVE_FP8) * scale[:, None]
    return numbers


@triton.jit
def scale_queries(q, q_rope, qk_scale, call, kv_head, config: tl.constexpr):
    """Return queries, and the scale of their dot products, with the keys' scale of this head.

    Args:
        q: [BLOCK_M, BLOCK_D].
        q_rope: [BLOCK_M, BLOCK_ROPE]; () without ROPE_DIM.
        qk_scale: A number; what is returned may be [BLOCK_M, 1].

    Returns:
        The queries, a second part that is added to them, `q_rope`, and the scale. The second part
        is () in formats whose queries are not rotated.
    """
    low = ()
    if config.CACHE_FORMAT == "fp8_e4m3" or config.CACHE_FORMAT == "fp8_e5m2":
        q, q_rope, qk_scale = scale_fp8_queries(
            q, q_rope, qk_scale, call, kv_head, config
        )
    elif channels_per_scale(config.CACHE_FORMAT):
        qk_scale = scale_block_scores(qk_scale, call)
    elif is_rotated(config.CACHE_FORMAT):
        q, low, qk_scale = rotate_queries(q, qk_scale, config.HEAD_DIM)
    return q, low, q_rope, qk_scale


@triton.constexpr_function
def has_two_parts(name: str, dtype: Any) -> bool:
    """Return whether queries in a dtype are two parts, which are multiplied with keys one by one.

    Args:
        name: of the format.
        dtype: of the parts.
    """
    return FORMATS[name].is_rotated and dtype != tl.float32


@triton.constexpr_function
def divides_weights(name, dtype):
    """Return whether weights with the scales of values are divided by the largest of their row.

    Args:
        name: of the format.
        dtype: in which weights are multiplied by values.
    """
    return FORMATS[name].has_token_scales and dtype == tl.float16


@triton.jit
def decode_k(k, scales, dtype, config: tl.constexpr):
    """Return keys as numbers in the dtype of the queries: [BLOCK_N, BLOCK_D]."""
    if config.CACHE_FORMAT == "auto":
        k = upcast(k, config)
    elif channels_per_scale(config.CACHE_FORMAT):
        k = decode_nvfp4(k, scales.k, dtype)
    elif is_rotated(config.CACHE_FORMAT):
        k = decode_int4(k, scales.k_zero, dtype)
    elif config.CACHE_FORMAT == "int8_per_token_head":
        k = decode_int8(k, dtype)
    else:
        k = decode_fp8_k(k, dtype, config)
    return k


@triton.jit
def decode_v(v, scales, dtype, config: tl.constexpr):
    """Return values as numbers: [BLOCK_N, BLOCK_DV].

    Args:
        dtype: of the result; that of the queries as they are multiplied, or in a rotated format as
            they are given.
    """
    if config.CACHE_FORMAT == "auto":
        v = upcast(v, config)
    elif channels_per_scale(config.CACHE_FORMAT):
        v = decode_nvfp4(v, scales.v, dtype)
    elif is_rotated(config.CACHE_FORMAT):
        v = decode_int4(v, scales.v_zero, dtype)
    elif config.CACHE_FORMAT == "int8_per_token_head":
        v = decode_int8(v, dtype)
    else:
        v = decode_fp8_v(v, dtype, config)
    return v


@triton.jit
def load_tile_scales(
    call, kv_head, block_id, slot, keys, config: tl.constexpr, MASKED: tl.constexpr
):
    """Return the scales of a KV tile.

    Args:
        block_id, slot: [BLOCK_N] where its keys are stored.
        keys: KVTileKeys.
    """
    k_scale, v_scale, k_zero, v_zero = (), (), (), ()
    if channels_per_scale(config.CACHE_FORMAT):
        k_scale = load_block_scales(
            call.option_tensors.k_scale, call.scale_strides.k, kv_head, block_id, slot,
            keys.is_key, config.HEAD_DIM, config.BLOCK_D, MASKED,
        )  # fmt: skip
        v_scale = load_block_scales(
            call.option_tensors.v_scale, call.scale_strides.v, kv_head, block_id, slot,
            keys.is_key, config.V_HEAD_DIM, config.BLOCK_DV, MASKED,
        )  # fmt: skip
    elif has_slot_scales(config.CACHE_FORMAT):
        k_scale = load_slot_scales(
            call.option_tensors.k_scale, call.scale_strides.k, kv_head, block_id, slot,
            keys.is_key, MASKED,
        )  # fmt: skip
        v_scale = load_slot_scales(
            call.option_tensors.v_scale, call.scale_strides.v, kv_head, block_id, slot,
            keys.is_key, MASKED,
        )  # fmt: skip
        if is_rotated(config.CACHE_FORMAT):
            k_scale, k_zero = split_scales(k_scale)
            v_scale, v_zero = split_scales(v_scale)
    return TileScales(k_scale, v_scale, k_zero, v_zero)


@triton.jit
def scale_scores(qk, scales, config: tl.constexpr):
    """Return dot products with the scale of each key: [BLOCK_M, BLOCK_N]."""
    if has_slot_scales(config.CACHE_FORMAT):
        qk = qk * scales.k[None, :]
    return qk


@triton.jit
def scale_weights(p, scales, config: tl.constexpr):
    """Return weights with the scale of each value: [BLOCK_M, BLOCK_N]."""
    if has_slot_scales(config.CACHE_FORMAT):
        p = p * scales.v[None, :]
    return p


@triton.jit
def scale_values(result, call, kv_head, config: tl.constexpr):
    """Return finished rows with the values' scale of this head: [BLOCK_M, BLOCK_DV]."""
    if config.CACHE_FORMAT == "fp8_e4m3" or config.CACHE_FORMAT == "fp8_e5m2":
        result = scale_fp8_values(result, call, kv_head)
    elif channels_per_scale(config.CACHE_FORMAT):
        result = scale_block_values(result, call)
    elif is_rotated(config.CACHE_FORMAT):
        result = rotate_values(result, config.V_HEAD_DIM)
    return result

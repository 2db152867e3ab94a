"""The formats of records, composed: a branch per format, of which one is compiled."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....contract.latent_formats import LatentFormat
from .fields import RecordCache, decode_bfloat16, locate_slots
from .fp8_ds_mla import load_fp8_latents, load_fp8_rope, store_fp8_records
from .fp8_ds_mla_v4 import load_v4_latents, load_v4_rope, store_v4_records
from .nvfp4_ds_mla import load_nvfp4_latents, load_nvfp4_rope, store_nvfp4_records

COLUMNS = tl.constexpr(512)
"""Columns of latents in registers: those of the formats, padded to a power of two."""
ROPE = tl.constexpr(64)
"""Elements of a rope key, in every format."""


class RecordConfig(NamedTuple):
    """What a kernel is compiled for.

    Args:
        FORMAT: Name of the format.
        RANK: Elements of a latent.
        DATA_BYTES, SCALE_BYTES, SCALES_LAST: As in `LatentFormat`.
        NATIVE_FP8: `has_native_fp8` of the device.
    """

    FORMAT: str
    RANK: int
    DATA_BYTES: int
    SCALE_BYTES: int
    SCALES_LAST: bool
    NATIVE_FP8: bool


def make_config(form: LatentFormat, native_fp8: bool) -> RecordConfig:
    """Return the constants of a format."""
    return RecordConfig(
        form.name,
        form.kv_lora_rank,
        form.data_bytes,
        form.scale_bytes,
        form.scales_last,
        native_fp8,
    )


def record_cache(kv_cache: Tensor) -> RecordCache:
    """Return a cache of records as kernels take it."""
    return RecordCache(
        kv_cache,
        kv_cache.view(torch.int16),
        kv_cache.view(torch.float32),
        *kv_cache.stride()[:2],
    )


@triton.jit
def find_slots(cache, block_id, offset, block_size, is_token, config: tl.constexpr):
    """Return the Slots of tokens: block ids and offsets are [TOKENS] int64."""
    return locate_slots(
        cache, block_id, offset, block_size, is_token, config.DATA_BYTES,
        config.SCALE_BYTES, config.SCALES_LAST,
    )  # fmt: skip


@triton.jit
def load_new_latents(new, token, is_token, STEP: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr, ELEMENTS: tl.constexpr):  # fmt: skip
    """Return elements FIRST, FIRST + STEP, ... of new tokens: [TOKENS, COUNT] float32.

    Args:
        new: NewLatents.
        ELEMENTS: Those that a token has; further ones are 0.
    """
    element = FIRST + STEP * tl.arange(0, COUNT).to(tl.int64)
    offsets = (token * new.stride_token)[:, None]
    offsets += (element * new.stride_element)[None, :]
    is_element = is_token[:, None] & (element < ELEMENTS)[None, :]
    numbers = tl.load(new.tensor + offsets, mask=is_element, other=0.0)
    if new.tensor.dtype.element_ty == tl.bfloat16:
        # the interpreter's own conversion loses subnormal numbers
        numbers = decode_bfloat16(numbers.to(tl.int16, bitcast=True))
    return numbers.to(tl.float32)


@triton.jit
def store_records(cache, slots, kv_c, k_pe, token, config: tl.constexpr):
    """Encode new tokens and store their records.

    Args:
        kv_c, k_pe: NewLatents.
        token: [TOKENS] int64.
    """
    rope = load_new_latents(k_pe, token, slots.is_token, 1, 0, ROPE, ROPE)
    if config.FORMAT == "nvfp4_ds_mla":
        HALF: tl.constexpr = COLUMNS // 2
        even = load_new_latents(kv_c, token, slots.is_token, 2, 0, HALF, config.RANK)
        odd = load_new_latents(kv_c, token, slots.is_token, 2, 1, HALF, config.RANK)
        store_nvfp4_records(cache, slots, even, odd, rope)
    else:
        latents = load_new_latents(
            kv_c, token, slots.is_token, 1, 0, COLUMNS, config.RANK
        )
        if config.FORMAT == "fp8_ds_mla":
            store_fp8_records(cache, slots, latents, rope)
        else:
            tl.static_assert(config.FORMAT == "fp8_ds_mla_v4")
            store_v4_records(cache, slots, latents, rope)


@triton.jit
def load_latents(cache, slots, dtype: tl.constexpr, config: tl.constexpr):
    """Return latents as numbers: [TOKENS, COLUMNS] in `dtype`, float32 or float64.

    Those of no token, and columns from RANK on, are 0.
    """
    if config.FORMAT == "nvfp4_ds_mla":
        latents = load_nvfp4_latents(cache, slots, dtype, config.NATIVE_FP8)
    elif config.FORMAT == "fp8_ds_mla":
        latents = load_fp8_latents(cache, slots, dtype, config.NATIVE_FP8)
    else:
        tl.static_assert(config.FORMAT == "fp8_ds_mla_v4")
        latents = load_v4_latents(cache, slots, dtype, config.NATIVE_FP8)
    return latents


@triton.jit
def load_rope(cache, slots, config: tl.constexpr):
    """Return rope keys as numbers: [TOKENS, ROPE] float32. Those of no token are 0."""
    if config.FORMAT == "nvfp4_ds_mla":
        rope = load_nvfp4_rope(cache, slots, config.NATIVE_FP8)
    elif config.FORMAT == "fp8_ds_mla":
        rope = load_fp8_rope(cache, slots)
    else:
        tl.static_assert(config.FORMAT == "fp8_ds_mla_v4")
        rope = load_v4_rope(cache, slots)
    return rope

"""Launches that write records and gather latents of any cache as numbers.

A kernel finds the request of each token by bisection, so the host reads no lengths.
"""

import torch
import triton
from torch import Tensor

from ....contract.latent_formats import (
    LatentFormat,
    find_latent_format,
    latent_width,
)
from ...runtime.launcher import launch_kernel, must_widen
from ..fp8 import has_native_fp8
from ..kv_cache import as_bits
from ..latent_cache import NewLatents, gather_latents_kernel, grid
from .move import TOKENS_PER_PROGRAM, gather_records_kernel, write_records_kernel
from .record import make_config, record_cache


def write_records(
    form: LatentFormat,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Launch a write of records."""
    num_slots = slot_mapping.shape[0]
    launch_kernel(
        write_records_kernel,
        (triton.cdiv(num_slots, TOKENS_PER_PROGRAM.value),),
        NewLatents(kv_c, *kv_c.stride()),
        NewLatents(k_pe, *k_pe.stride()),
        record_cache(kv_cache),
        slot_mapping,
        num_slots,
        slot_mapping.stride(0),
        kv_cache.shape[1],
        make_config(form, has_native_fp8(kv_cache.device)),
    )


def is_decoded_in_place(kv_cache: Tensor, latents: Tensor) -> bool:
    """Return whether a kernel writes decoded records to their rows."""
    return kv_cache.dtype == torch.uint8 and not must_widen(latents.dtype)


def gather_latents(
    kv_cache: Tensor,
    block_table: Tensor,
    start_loc: Tensor,
    begin: int,
    num_tokens: int,
    scale: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return [num_tokens, width] latents from token `begin` on, 0 past the last sequence.

    Args:
        scale: Factor of the numbers of an FP8 cache. If None, the cache is not quantised, or has
            records.
        dtype: Dtype of decoded latents.
    """
    width = latent_width(kv_cache)
    if kv_cache.dtype == torch.uint8:
        buffer_dtype = torch.float32 if must_widen(dtype) else dtype
        rows = kv_cache.new_empty(num_tokens, width, dtype=buffer_dtype)
        gather_records(kv_cache, block_table, start_loc, begin, rows)
        return rows.to(dtype)
    _, block_size, _ = kv_cache.shape
    num_reqs = block_table.shape[0]
    latents = kv_cache.new_empty(num_tokens, width)
    if latents.numel():
        gather_latents_kernel[grid(num_tokens, width)](
            *as_bits(kv_cache, latents),
            block_table,
            start_loc,
            begin,
            num_tokens,
            block_size,
            num_reqs,
            num_reqs.bit_length(),
            *block_table.stride(),
            *kv_cache.stride(),
            WIDTH=width,
        )
    if scale is None:
        return latents
    exact = torch.promote_types(dtype, torch.float32)
    return (latents.to(exact) * scale).to(dtype)


def gather_records(
    kv_cache: Tensor, block_table: Tensor, start_loc: Tensor, begin: int, rows: Tensor
) -> None:
    """Decode records to `rows`, [num_tokens, width], from token `begin` on."""
    form = find_latent_format(kv_cache)
    num_tokens, num_reqs = rows.shape[0], block_table.shape[0]
    if form is None or not num_tokens:
        return
    launch_kernel(
        gather_records_kernel,
        (triton.cdiv(num_tokens, TOKENS_PER_PROGRAM.value),),
        record_cache(kv_cache),
        rows,
        block_table,
        start_loc,
        begin,
        num_tokens,
        kv_cache.shape[1],
        num_reqs,
        num_reqs.bit_length(),
        *block_table.stride(),
        *rows.stride(),
        make_config(form, has_native_fp8(kv_cache.device)),
    )

"""Validation of latent caches: elements, FP8 elements with a scale, or records of bytes."""

import torch
from torch import Tensor

from ..contract.cache_formats import TENSOR_SCALE_DTYPES
from ..contract.latent_formats import (
    LATENT_FORMATS,
    RECORD_BYTES,
    LatentFormat,
    find_latent_format,
    latent_width,
)
from .attention_options import check_scale
from .batch import check_block_ids, check_block_table, check_start_loc
from .memory import check_results_apart
from .primitives import FLOATS, check_dtype, check_same_device


def dtypes_of_numbers(kv_cache: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that latents, queries and gathered rows may have."""
    has_codes = kv_cache.dtype in (*TENSOR_SCALE_DTYPES, torch.uint8)
    return FLOATS if has_codes else (kv_cache.dtype,)


def check_latent_cache(
    kv_cache: Tensor, name: str, scale: Tensor | float | None, contents: bool
) -> None:
    """Reject a tensor that is not a latent cache, and a missing or superfluous scale."""
    check_dtype("kv_cache", kv_cache, *FLOATS, *TENSOR_SCALE_DTYPES, torch.uint8)
    if kv_cache.dim() != 3:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected [num_blocks, block_size,"
            " kv_lora_rank + qk_rope_head_dim]"
        )
    if kv_cache.dtype == torch.uint8:
        form = _check_records(kv_cache)
        if scale is not None:
            raise ValueError(
                f"{name} is given but kv_cache has records of {form.name}: expected None, as"
                " each record stores its scales"
            )
    is_quantised = kv_cache.dtype in TENSOR_SCALE_DTYPES
    if scale is None and is_quantised:
        raise ValueError(
            f"{name} = None: expected a scale, as kv_cache is {kv_cache.dtype}; 1.0 takes"
            " its numbers as they are"
        )
    if scale is not None and not is_quantised:
        raise ValueError(
            f"{name} is given but kv_cache is {kv_cache.dtype}: expected None, as only an"
            " FP8 cache has a scale"
        )
    check_scale(name, scale, {"kv_cache": kv_cache}, None, contents)


def _check_records(kv_cache: Tensor) -> LatentFormat:
    """Return the format of a cache of records; reject other sizes and strides."""
    form = find_latent_format(kv_cache)
    if form is None:
        sizes = [
            f"{form.record_bytes} ({name})" for name, form in LATENT_FORMATS.items()
        ]
        raise ValueError(
            f"kv_cache has {kv_cache.shape[2]} bytes per token: expected"
            f" {', '.join(sizes[:-1])} or {sizes[-1]}"
        )
    block, slot, byte = kv_cache.stride()
    if byte != 1:
        raise ValueError(
            f"kv_cache has a stride of {byte} between the bytes of a record: expected 1"
        )
    if form.scales_last and slot != form.record_bytes:
        raise ValueError(
            f"kv_cache has a stride of {slot} between records of {form.name}: expected"
            f" {form.record_bytes}, since a block stores the scales of all tokens last"
        )
    for what, size in (
        ("a stride between blocks", block),
        ("a stride between records", slot),
        ("an offset in its memory", kv_cache.storage_offset()),
    ):
        if size % 4:
            raise ValueError(
                f"kv_cache has {what} of {size} bytes: expected a multiple of 4, the size of a"
                " scale"
            )
    return form


def check_latent_width(kv_cache: Tensor, rank: int, rope: int) -> None:
    """Reject widths of latents and rope keys that are not those of the cache."""
    widths = f"kv_lora_rank = {rank} and qk_rope_head_dim = {rope}"
    form = find_latent_format(kv_cache)
    if form is not None:
        own = form.kv_lora_rank, form.qk_rope_head_dim
        if own == (rank, rope):
            return
        fitting = [
            f"{other.record_bytes} bytes ({name})"
            for name, other in LATENT_FORMATS.items()
            if (other.kv_lora_rank, other.qk_rope_head_dim) == (rank, rope)
        ]
        advice = f"records of {' or '.join(fitting)}" if fitting else "elements"
        raise ValueError(
            f"kv_cache has {form.record_bytes} bytes per token, which is {form.name} with"
            f" kv_lora_rank = {own[0]} and qk_rope_head_dim = {own[1]}: expected a cache of"
            f" {advice} for {widths}"
        )
    found = kv_cache.shape[2]
    if found != rank + rope:
        records = ""
        if found in RECORD_BYTES:
            records = f"; a cache of records of {RECORD_BYTES[found].name} is uint8"
        raise ValueError(
            f"kv_cache keeps {found} elements a token: expected {rank + rope}, {widths}"
            f"{records}"
        )


def check_gather_latent_cache(
    kv_cache: Tensor,
    latents: Tensor,
    block_table: Tensor,
    seq_start_loc: Tensor,
    scale: Tensor | float | None,
    contents: bool,
) -> None:
    """Reject a gather that does not fit the cache, before anything is written."""
    check_latent_cache(kv_cache, "scale", scale, contents)
    check_dtype("latents", latents, *dtypes_of_numbers(kv_cache))
    width = latent_width(kv_cache)
    if latents.dim() != 2 or latents.shape[1] != width:
        raise ValueError(
            f"latents has shape {list(latents.shape)}: expected [tokens, {width}], latent and"
            " rope key of each token"
        )
    check_block_table(block_table)
    check_same_device(
        kv_cache=kv_cache,
        latents=latents,
        block_table=block_table,
        seq_start_loc=seq_start_loc,
    )
    check_results_apart({"latents": latents}, {"kv_cache": kv_cache})
    num_tokens = latents.shape[0]
    check_start_loc(
        "seq_start_loc", seq_start_loc, block_table.shape[0], num_tokens, contents
    )
    if contents:
        num_blocks, block_size = kv_cache.shape[:2]
        check_block_ids(block_table, seq_start_loc.diff(), block_size, num_blocks)

"""Latent cache formats: a token's latent and rope key as a record of bytes, one file per format.

Each file defines `store`, which returns the records of tokens, and `load`, which returns the
numbers that records mean.
"""

import torch
from torch import Tensor

from ....contract.latent_formats import (
    LATENT_FORMATS,
    LatentFormat,
    find_latent_format,
    latent_width,
)
from ....contract.option_files import import_files

FILES = import_files(
    __name__, __path__, tuple(LATENT_FORMATS), "a latent format: expected its name"
)


def encode_records(form: LatentFormat, kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return the record of each token: [tokens, record_bytes] uint8.

    Args:
        kv_c: [tokens, kv_lora_rank].
        k_pe: [tokens, qk_rope_head_dim].
    """
    records: Tensor = FILES[form.name].store(kv_c.float(), k_pe.float())
    return records


def load_latents(
    kv_cache: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    scale: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the latents and rope keys of some slots: [slots, width] in `dtype`.

    Products of codes and scales of records are exact in float64. In float32 a number beyond its
    range becomes infinite.

    Args:
        kv_cache: [num_blocks, block_size, latent_width], or bytes per record in the last axis.
        block_ids, offsets: [slots].
        scale: What the elements of an FP8 cache are multiplied by. If None, it is not quantised,
            or records have their scales.
    """
    form = find_latent_format(kv_cache)
    if form is None:
        elements = kv_cache[block_ids, offsets].to(dtype)
        return elements if scale is None else (elements * scale).to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    records = load_records(form, kv_cache, block_ids, offsets)
    numbers: Tensor = FILES[form.name].load(records, exact)
    return numbers.to(dtype)


def load_records(
    form: LatentFormat, kv_cache: Tensor, block_ids: Tensor, offsets: Tensor
) -> Tensor:
    """Return the records of some slots: [slots, record_bytes] uint8."""
    pieces = [part[block_ids, offsets] for part in form.parts(kv_cache)]
    return torch.cat(pieces, 1)


def gather_latents(
    kv_cache: Tensor,
    block_table: Tensor,
    start_loc: Tensor,
    begin: int,
    end: int,
    scale: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the cached vectors of sequences, concatenated; those from `begin` to `end`.

    Args:
        kv_cache, scale: As in `load_latents`.
        block_table: [reqs, max_blocks].
        start_loc: [reqs + 1], where each sequence starts in the concatenation.
        begin, end: The range that is wanted. Past the last sequence there is nothing.
        dtype: Of the result, in which it is multiplied.

    Returns:
        [at most end - begin, width].
    """
    starts, block_size = start_loc.tolist(), kv_cache.shape[1]
    chunks = [kv_cache.new_empty(0, latent_width(kv_cache), dtype=dtype)]
    for req, row in enumerate(block_table):
        first, last = max(begin, starts[req]), min(end, starts[req + 1])
        positions = torch.arange(first, max(first, last), device=row.device)
        positions -= starts[req]
        block_ids = row[positions // block_size].long()
        offsets = positions % block_size
        chunks.append(load_latents(kv_cache, block_ids, offsets, scale, dtype))
    return torch.cat(chunks)

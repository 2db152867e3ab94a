"""Caches of latent records for laws: poison in all bytes, and records that are put by hand."""

import torch
from torch import Tensor

from ...contract.latent_formats import LatentFormat

POISON = 0xFF
"""A byte that means NaN, as a code and in a scale."""


def empty_records(
    form: LatentFormat, num_blocks: int, block_size: int, device: torch.device
) -> Tensor:
    """Return a cache full of poison; its blocks have bytes after their records."""
    size = form.block_bytes(block_size)
    pages = torch.full((num_blocks + 1, size + 8), POISON, dtype=torch.uint8)
    # the first page and the first bytes of each page belong to something else
    return form.view_cache(pages.to(device)[1:, 8:], block_size)


def put_record(form: LatentFormat, kv_cache: Tensor, slot: int, record: Tensor) -> None:
    """Write the record of one slot by hand, through the bytes of its block."""
    num_blocks, size, _ = kv_cache.shape
    block, offset = divmod(slot, size)
    total = size * form.record_bytes
    strides = (kv_cache.stride(0), 1)
    blocks = kv_cache.as_strided((num_blocks, total), strides)
    if form.name == "fp8_ds_mla_v4":
        blocks[block, offset * 576 : offset * 576 + 576] = record[:576]
        scales = size * 576 + offset * 8
        blocks[block, scales : scales + 8] = record[576:]
    else:
        first = offset * len(record)
        blocks[block, first : first + len(record)] = record


def on_device(cache: Tensor, device: torch.device) -> Tensor:
    """Return the same view of the same memory on a device."""
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    place = cache.shape, cache.stride(), cache.storage_offset()
    return memory.to(device).as_strided(*place)

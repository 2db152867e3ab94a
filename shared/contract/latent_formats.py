"""Latent cache formats: how a uint8 cache stores the latent and the rope key of a token as bytes.

A token is one record. It has codes, the scales that codes are multiplied by, and the rope key.
The number of bytes per record tells the format: the last axis of `kv_cache`. The write measures the
scales and stores them in the record, so no call gets them.

A format has one file of its name in each of these folders: `reference/cache/latent_formats/` (store
and load) and `optimized/kernels/latent_records/` (the same in kernels).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_positive


@dataclass(frozen=True)
class LatentFormat:
    """How a cache stores the latent and the rope key of a token.

    Args:
        name: Name of the format and of its files.
        kv_cache_dtype: vLLM's name.
        kv_lora_rank, qk_rope_head_dim: Elements of the latent and of the rope key.
        tile: Elements of the latent that share a scale.
        data_bytes, scale_bytes: Bytes of a record: codes and rope key, then scales.
        scales_last: Whether a block stores the data of all its tokens, then the scales of all. If
            not, records are stored one after the other.
        alignment: The bytes of a block are a multiple of it.

    Example:
        DeepSeek-V3.2: 512 FP8 codes, 4 scales of 4 bytes, and 64 rope elements of 2 bytes. In
        bfloat16 a token has 2 * 576 = 1,152 bytes.

        >>> LATENT_FORMATS["fp8_ds_mla"].record_bytes
        656
        >>> LATENT_FORMATS["fp8_ds_mla_v4"].block_bytes(block_size=64)
        37440
    """

    name: str
    kv_cache_dtype: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    tile: int
    data_bytes: int
    scale_bytes: int
    scales_last: bool = False
    alignment: int = 1

    @property
    def width(self) -> int:
        """Elements of a token: those of its latent, then those of its rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def record_bytes(self) -> int:
        """Bytes of a token, the last axis of a cache."""
        return self.data_bytes + self.scale_bytes

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block, its padding included."""
        check_positive(block_size=block_size)
        return -(-block_size * self.record_bytes // self.alignment) * self.alignment

    def view_cache(self, pages: Tensor, block_size: int) -> Tensor:
        """Return pages as a cache, without a copy.

        Args:
            pages: [num_blocks, bytes] uint8, packed bytes per page: `block_bytes`, or any number
                that holds the records.
            block_size: Tokens per block.

        Returns:
            [num_blocks, block_size, record_bytes], a view of the first bytes of each page.

        Raises:
            TypeError: The pages are not uint8.
            ValueError: The pages have too few bytes, or their bytes are not packed.

        Example:
            >>> pages = torch.zeros(10, 37440, dtype=torch.uint8)
            >>> LATENT_FORMATS["fp8_ds_mla_v4"].view_cache(pages, block_size=64).shape
            torch.Size([10, 64, 584])
        """
        if pages.dtype != torch.uint8:
            raise TypeError(f"pages is {pages.dtype}: expected torch.uint8")
        check_positive(block_size=block_size)
        least = block_size * self.record_bytes
        if pages.dim() != 2 or pages.shape[1] < least or pages.stride(1) != 1:
            raise ValueError(
                f"pages has shape {list(pages.shape)} and strides {list(pages.stride())}:"
                f" expected [num_blocks, bytes], at least {least} bytes one after the other,"
                f" for {block_size} records of {self.name}"
            )
        return pages.as_strided(
            (pages.shape[0], block_size, self.record_bytes),
            (pages.stride(0), self.record_bytes, 1),
        )

    def parts(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Return views of a cache that together have the bytes of each record, in their order.

        Args:
            kv_cache: [num_blocks, block_size, record_bytes] uint8.

        Returns:
            [num_blocks, block_size, bytes]: the cache; or data and scales, if a block stores the
            scales last.
        """
        if not self.scales_last:
            return (kv_cache,)
        num_blocks, block_size, _ = kv_cache.shape
        block, start = kv_cache.stride(0), kv_cache.storage_offset()
        parts = []
        for size in (self.data_bytes, self.scale_bytes):
            shape, strides = (num_blocks, block_size, size), (block, size, 1)
            parts.append(kv_cache.as_strided(shape, strides, start))
            start += block_size * size
        return tuple(parts)


LATENT_FORMATS = {
    form.name: form
    for form in (
        LatentFormat(
            name="fp8_ds_mla",
            kv_cache_dtype="fp8_ds_mla",
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            tile=128,
            data_bytes=640,
            scale_bytes=16,
        ),
        LatentFormat(
            name="nvfp4_ds_mla",
            kv_cache_dtype="nvfp4_ds_mla",
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            tile=16,
            data_bytes=320,
            scale_bytes=32,
        ),
        LatentFormat(
            name="fp8_ds_mla_v4",
            kv_cache_dtype="fp8_ds_mla",
            kv_lora_rank=448,
            qk_rope_head_dim=64,
            tile=64,
            data_bytes=576,
            scale_bytes=8,
            scales_last=True,
            alignment=576,
        ),
    )
}
"""All latent formats by name."""

RECORD_BYTES = {form.record_bytes: form for form in LATENT_FORMATS.values()}
"""All latent formats by the bytes of a record."""


def find_latent_format(kv_cache: Tensor) -> LatentFormat | None:
    """Return the format of a latent cache; None if it stores elements of a floating dtype.

    Args:
        kv_cache: [num_blocks, block_size, bytes] uint8, or a cache of another dtype.

    Example:
        >>> find_latent_format(torch.zeros(2, 16, 352, dtype=torch.uint8)).name
        'nvfp4_ds_mla'
    """
    if kv_cache.dtype != torch.uint8:
        return None
    return RECORD_BYTES.get(kv_cache.shape[-1])


def find_record_heads(key_cache: Tensor, value_cache: Tensor) -> LatentFormat | None:
    """Return the format of latents that are given as keys and values of one head, or None.

    Both are the whole cache of records with an axis of heads, `kv_cache[:, :, None]`.

    Args:
        key_cache, value_cache: [num_blocks, block_size, kv_heads, elements].

    Example:
        >>> records = torch.zeros(2, 64, 656, dtype=torch.uint8)[:, :, None]
        >>> find_record_heads(records, records).name
        'fp8_ds_mla'
    """
    shape, dtypes = key_cache.shape, {key_cache.dtype, value_cache.dtype}
    if dtypes != {torch.uint8} or shape != value_cache.shape or len(shape) != 4:
        return None
    return RECORD_BYTES.get(shape[3]) if shape[2] == 1 else None


def latent_width(kv_cache: Tensor) -> int:
    """Return the elements of a cached token, its latent and its rope key.

    Args:
        kv_cache: [num_blocks, block_size, elements], or bytes per record in the last axis.
    """
    form = find_latent_format(kv_cache)
    return kv_cache.shape[2] if form is None else form.width

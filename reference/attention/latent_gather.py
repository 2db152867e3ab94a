"""Gather of a latent cache: the latents and rope keys of whole sequences as numbers.

A latent cache stores elements as they are, FP8 elements that one number multiplies, or records of
bytes with scales of their own (`cache/latent_formats/`).
"""

import torch

from ...contract.shapes import BlockTable, LatentCache, LatentRows, Scale, StartLoc
from ...validation import validated
from ...validation.latent_cache import check_gather_latent_cache
from ..cache.latent_formats import gather_latents


@validated(check_gather_latent_cache)
def gather_latent_cache(
    kv_cache: LatentCache,
    latents: LatentRows,
    block_table: BlockTable,
    seq_start_loc: StartLoc,
    scale: Scale | float | None = None,
) -> None:
    """Write the latents and rope keys of whole sequences, concatenated, to rows of numbers.

    Args:
        kv_cache: As in `concat_and_cache_mla`: elements, FP8 elements, or records in uint8.
        latents: [tokens, kv_lora_rank + qk_rope_head_dim], modified in place. Rows past the last
            sequence become 0. Any float dtype; that of the cache if its elements are not codes.
        block_table: [reqs, max_blocks].
        seq_start_loc: [reqs + 1] start of each sequence in `latents`.
        scale: What the elements of an FP8 cache are multiplied by. If None, the cache is not
            quantised, or its records store scales.

    Raises:
        IndexError: A sequence is longer than its row, or a block id is outside the cache.
        ValueError: Shapes, lengths or devices do not match, or only one of an FP8 cache and its
            scale is given.
        TypeError: A dtype is not the expected one.

    Source:
        vLLM's `gather_and_maybe_dequant_cache` and `cp_gather_and_upconvert_fp8_kv_cache`.

    Example:
        Blocks of 2 slots. The sequence has its first two tokens in block 1, the third in block 0.

        >>> latents = torch.zeros(3, 2)
        >>> gather_latent_cache(
        ...     kv_cache=torch.tensor([[[6.0, 60.0], [0.0, 0.0]], [[2.0, 20.0], [4.0, 40.0]]]),
        ...     latents=latents,
        ...     block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        ...     seq_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        ... )
        >>> latents.flatten()
        tensor([ 2., 20.,  4., 40.,  6., 60.])
    """
    dtype, end = latents.dtype, int(seq_start_loc[-1])
    if kv_cache.dtype != dtype:
        dtype = torch.promote_types(dtype, torch.float32)
    # step: gather the latents and rope keys of all sequences as numbers
    rows = gather_latents(kv_cache, block_table, seq_start_loc, 0, end, scale, dtype)
    # step: write them, and zeros after the last sequence
    latents[:end] = rows
    latents[end:] = 0

"""Latent vectors: contexts in chunks, and their expansion to keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..cache.latent_formats import gather_latents


def context_chunks(
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    num_context_tokens: int,
    max_context_chunk: int | None,
    k_scale: Tensor | float | None,
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the cached contexts of all requests, concatenated, in chunks.

    Args:
        context_lens: [reqs] cached tokens before each request's new ones.
        num_context_tokens: At least their sum.
        max_context_chunk: Tokens per chunk. If None, there is one chunk.
        kv_cache, block_table, k_scale, dtype: As in `gather_latents`.

    Yields:
        latents: [at most max_context_chunk, width].
        starts: [reqs + 1] where each request starts in the chunk.
    """
    start_loc = torch.nn.functional.pad(context_lens.cumsum(0), (1, 0)).int()
    chunk = num_context_tokens if max_context_chunk is None else max_context_chunk
    for begin in range(0, num_context_tokens, max(chunk, 1)):
        # step: gather the next chunk of the context
        end = begin + chunk
        latents = gather_latents(
            kv_cache, block_table, start_loc, begin, end, k_scale, dtype
        )
        yield latents, (start_loc - begin).clamp(0, len(latents))


def expand_latents(
    latent: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of every head.

    Args:
        latent: [tokens, kv_lora_rank].
        k_pe: [tokens, qk_rope_head_dim], the part of the key that all heads share.
        w_uk: [heads, qk_nope_head_dim, kv_lora_rank].
        w_uv: [heads, kv_lora_rank, v_head_dim].

    Returns:
        [tokens, heads, qk_nope_head_dim + qk_rope_head_dim] and [tokens, heads, v_head_dim].
    """
    nope = torch.einsum("tl,hnl->thn", latent, w_uk)
    rope = k_pe[:, None].expand(-1, len(w_uk), -1)
    return torch.cat([nope, rope], dim=2), torch.einsum("tl,hlv->thv", latent, w_uv)

"""How do latents come out of their cache, and become keys and values again?"""

import torch
from torch import Tensor


def gather_latents(
    kv_cache: Tensor,
    block_table: Tensor,
    start_loc: Tensor,
    k_scale: Tensor | float | None,
    dtype: torch.dtype,
    begin: int = 0,
    end: int | None = None,
) -> Tensor:
    """Return what the cache keeps of a line of sequences, which lie one after another in it.

    Args:
        kv_cache: [num_blocks, block_size, latent_width].
        block_table: [reqs, max_blocks].
        start_loc: [reqs + 1] where each sequence starts in the line.
        k_scale: what the numbers of an FP8 cache are multiplied with; None: nothing.
        dtype: of the result, in which it is multiplied.
        begin, end: the part of the line that is wanted; None: to its end.

    Returns:
        [at most end - begin, latent_width].
    """
    starts = start_loc.tolist()
    end = starts[-1] if end is None else end
    block_size = kv_cache.shape[1]
    parts = [kv_cache.new_empty(0, kv_cache.shape[2])]
    for req, row in enumerate(block_table):
        first, last = max(begin, starts[req]), min(end, starts[req + 1])
        positions = torch.arange(first, max(first, last), device=row.device)
        positions -= starts[req]
        block_ids = row[positions // block_size].long()
        parts.append(kv_cache[block_ids, positions % block_size])
    latents = torch.cat(parts).to(dtype)
    return latents if k_scale is None else (latents * k_scale).to(dtype)


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

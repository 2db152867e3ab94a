"""Attention over selected latents by pagetwin's `sparse_attention`."""

import math

import torch
from pagetwin.optimized import sparse_attention


@torch.no_grad()
def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of each query over its slots, and its log-sum-exp in base 2."""
    # one tensor holds both parts of a key; an engine stores them like this, here it is a copy
    latents = torch.cat([ckv_cache, kpe_cache], dim=-1)[:, :, None]
    output = torch.empty_like(q_nope)
    tokens, heads, rank = q_nope.shape
    lse = q_nope.new_empty(heads, tokens, dtype=torch.float32)
    sparse_attention(
        torch.cat([q_nope, q_pe], dim=-1),
        latents,
        latents[..., :rank],
        sparse_indices,
        float(sm_scale),
        out=output,
        lse=lse,
    )
    return output, lse.T / math.log(2)

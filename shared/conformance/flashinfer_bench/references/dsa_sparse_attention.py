"""Attention over selected latents (DeepSeek Sparse Attention) in plain torch and float64."""

import math

import torch


@torch.no_grad()
def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of each query over its slots, and its log-sum-exp.

    A latent is the value, and its first part of the key; the rope key is the second part. All
    heads share them. A slot that is named twice is two keys.

    Args:
        q_nope: [num_tokens, num_qo_heads, head_dim_ckv].
        q_pe: [num_tokens, num_qo_heads, head_dim_kpe].
        ckv_cache: [num_pages, page_size, head_dim_ckv] latents.
        kpe_cache: [num_pages, page_size, head_dim_kpe] rope keys.
        sparse_indices: [num_tokens, topk] slots, page id * page_size + offset; -1 selects
            nothing.
        sm_scale: Factor of the scores.

    Returns:
        [num_tokens, num_qo_heads, head_dim_ckv] in the dtype of `q_nope`, and [num_tokens,
        num_qo_heads] float32 in base 2. A query without a slot gets 0 and -inf.
    """
    output = torch.zeros_like(q_nope)
    device = q_nope.device
    lse = torch.full(q_nope.shape[:2], -math.inf, dtype=torch.float32, device=device)
    latents, ropes = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)
    for token, row in enumerate(sparse_indices.long()):
        # gather the latents and rope keys of the slots
        named = row[row >= 0]
        if not len(named):
            continue
        latent, rope = latents[named].double(), ropes[named].double()
        # compute the scaled dot products
        scores = torch.einsum("hl,kl->hk", q_nope[token].double(), latent)
        scores += torch.einsum("hr,kr->hk", q_pe[token].double(), rope)
        scores *= sm_scale
        # turn scores into weights, and average the latents
        weights = torch.softmax(scores, 1)
        output[token] = (weights @ latent).to(q_nope.dtype)
        lse[token] = (torch.logsumexp(scores, 1) / math.log(2)).float()
    return output, lse

"""Attention over keys and values that are stored request after request, causal, in plain torch."""

import math

import torch


@torch.no_grad()
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and its log-sum-exp, computed in float64.

    Args:
        q: [total_q, num_qo_heads, head_dim], request after request.
        k, v: [total_kv, num_kv_heads, head_dim], request after request.
        qo_indptr, kv_indptr: [len_indptr] where each request's queries and keys start.
        sm_scale: Factor of the scores.

    Returns:
        [total_q, num_qo_heads, head_dim] in the dtype of `q`, and [total_q, num_qo_heads] float32
        in base 2. A query without a visible key gets 0 and -inf.
    """
    group = q.shape[1] // k.shape[1]
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for req in range(len(kv_indptr) - 1):
        # the keys and values of the request
        kept = slice(int(kv_indptr[req]), int(kv_indptr[req + 1]))
        key, value = (x[kept].double().repeat_interleave(group, 1) for x in (k, v))
        # compute the scaled dot products
        rows = slice(int(qo_indptr[req]), int(qo_indptr[req + 1]))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), key) * sm_scale
        # the last query is at the position of the last key
        _, queries, keys = scores.shape
        own = torch.arange(queries, device=q.device) + keys - queries
        masked = torch.arange(keys, device=q.device) > own[:, None]
        scores = scores.masked_fill(masked, -math.inf)
        # turn scores into weights, and average the values
        row_lse = torch.logsumexp(scores, 2)  # [num_qo_heads, queries]
        # the softmax over no key is 0 / 0
        is_empty = row_lse == -math.inf
        weights = torch.softmax(scores, 2).masked_fill(is_empty[..., None], 0.0)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype)
        lse[rows] = (row_lse.T / math.log(2)).float()
    return output, lse

"""Attention over the pages of a KV cache, causal, in plain torch and float64."""

import math

import torch


@torch.no_grad()
def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and its log-sum-exp.

    Args:
        q: [total_q, num_qo_heads, head_dim], request after request.
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim].
        qo_indptr: [len_indptr] where each request's queries start.
        kv_indptr: [len_indptr] where each request's page ids start in `kv_indices`.
        kv_indices: [num_kv_indices] page ids.
        kv_last_page_len: [batch_size] tokens in the last page of each request.
        sm_scale: Factor of the scores.

    Returns:
        [total_q, num_qo_heads, head_dim] in the dtype of `q`, and [total_q, num_qo_heads] float32
        in base 2. A query without a visible key gets 0 and -inf.
    """
    group = q.shape[1] // k_cache.shape[2]
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for req, (first_page, last_page) in enumerate(
        zip(kv_indptr.tolist()[:-1], kv_indptr.tolist()[1:], strict=True)
    ):
        # gather the keys and values of the request's pages
        pages = kv_indices[first_page:last_page].long()
        keys = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[req])
        keys = keys if len(pages) else 0
        k, v = (cache[pages].flatten(0, 1)[:keys] for cache in (k_cache, v_cache))
        k, v = (tensor.double().repeat_interleave(group, 1) for tensor in (k, v))
        # compute the scaled dot products
        rows = slice(int(qo_indptr[req]), int(qo_indptr[req + 1]))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * sm_scale
        # the last query is at the position of the last key
        queries = scores.shape[1]
        own = torch.arange(queries, device=q.device) + keys - queries
        masked = torch.arange(keys, device=q.device) > own[:, None]
        scores = scores.masked_fill(masked, -math.inf)
        # turn scores into weights, and average the values
        row_lse = torch.logsumexp(scores, 2)  # [num_qo_heads, queries]
        # the softmax over no key is 0 / 0
        is_empty = row_lse == -math.inf
        weights = torch.softmax(scores, 2).masked_fill(is_empty[..., None], 0.0)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        lse[rows] = (row_lse.T / math.log(2)).float()
    return output, lse

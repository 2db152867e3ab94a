"""Attention over the latents (MLA) of a paged cache, causal, in plain torch and float64."""

import math

import torch


@torch.no_grad()
def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of queries in the space of the latents, and its log-sum-exp.

    A latent is the value, and its first part of the key; the rope key is the second part. All
    heads share them.

    Args:
        q_nope: [total_q, num_qo_heads, head_dim_ckv], request after request.
        q_pe: [total_q, num_qo_heads, head_dim_kpe].
        ckv_cache: [num_pages, page_size, head_dim_ckv] latents.
        kpe_cache: [num_pages, page_size, head_dim_kpe] rope keys.
        qo_indptr: [len_indptr] where each request's queries start.
        kv_indptr: [len_indptr] where each request's page ids start in `kv_indices`.
        kv_indices: [num_kv_indices] page ids.
        kv_last_page_len: [batch_size] tokens in the last page of each request.
        sm_scale: Factor of the scores.

    Returns:
        [total_q, num_qo_heads, head_dim_ckv] in the dtype of `q_nope`, and [total_q, num_qo_heads]
        float32 in base 2. A query without a visible key gets 0 and -inf.
    """
    output = torch.zeros_like(q_nope)
    device = q_nope.device
    lse = torch.full(q_nope.shape[:2], -math.inf, dtype=torch.float32, device=device)
    for req, (first_page, last_page) in enumerate(
        zip(kv_indptr.tolist()[:-1], kv_indptr.tolist()[1:], strict=True)
    ):
        # gather the latents and rope keys of the request's pages
        pages = kv_indices[first_page:last_page].long()
        keys = (len(pages) - 1) * ckv_cache.shape[1] + int(kv_last_page_len[req])
        keys = keys if len(pages) else 0
        latent = ckv_cache[pages].flatten(0, 1)[:keys].double()
        rope = kpe_cache[pages].flatten(0, 1)[:keys].double()
        # compute the scaled dot products
        rows = slice(int(qo_indptr[req]), int(qo_indptr[req + 1]))
        scores = torch.einsum("qhl,kl->hqk", q_nope[rows].double(), latent)
        scores += torch.einsum("qhr,kr->hqk", q_pe[rows].double(), rope)
        scores *= sm_scale
        # the last query is at the position of the last key
        queries = scores.shape[1]
        own = torch.arange(queries, device=device) + keys - queries
        masked = torch.arange(keys, device=device) > own[:, None]
        scores = scores.masked_fill(masked, -math.inf)
        # turn scores into weights, and average the latents
        row_lse = torch.logsumexp(scores, 2)  # [num_qo_heads, queries]
        # the softmax over no key is 0 / 0
        is_empty = row_lse == -math.inf
        weights = torch.softmax(scores, 2).masked_fill(is_empty[..., None], 0.0)
        output[rows] = torch.einsum("hqk,kl->qhl", weights, latent).to(q_nope.dtype)
        lse[rows] = (row_lse.T / math.log(2)).float()
    return output, lse

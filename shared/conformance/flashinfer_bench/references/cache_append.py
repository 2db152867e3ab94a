"""Append of new keys and values to a paged KV cache, in plain torch."""

import torch


@torch.no_grad()
def append(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both caches after the append.

    Args:
        append_key, append_value: [total_tokens, num_kv_heads, head_dim].
        batch_indices: [total_tokens] the request of each token.
        positions: [total_tokens] the position of each token in its request, from 0.
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim].
        kv_indices: [num_kv_indices] page ids, request after request.
        kv_indptr: [len_indptr] where the page ids of each request start.

    Returns:
        Two tensors of the shape and dtype of the caches. Slots to which no token belongs keep
        their contents.
    """
    page_size = k_cache.shape[1]
    # the page of a token is found by its position, and so is its slot in the page
    first = kv_indptr.long()[batch_indices.long()]
    pages = kv_indices.long()[first + positions.long() // page_size]
    offsets = positions.long() % page_size
    results = []
    for cache, new in ((k_cache, append_key), (v_cache, append_value)):
        result = cache.clone()
        result[pages, offsets] = new
        results.append(result)
    return results[0], results[1]

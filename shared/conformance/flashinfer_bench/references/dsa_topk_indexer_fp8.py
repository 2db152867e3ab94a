"""Selection of the keys with the largest scores of an indexer, in plain torch and float64."""

import torch


@torch.no_grad()
def select(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """Return the slots of the largest scores of each request.

    Args:
        q_index_fp8: [batch_size, num_index_heads, index_head_dim] FP8 (e4m3).
        k_index_cache_fp8: [num_pages, page_size, 1, index_head_dim + 4] int8. A page has the codes
            of all its tokens, then the float32 scales of all.
        weights: [batch_size, num_index_heads] float32.
        seq_lens: [batch_size] keys of each request.
        block_table: [batch_size, max_num_pages] page ids in sequence order.
        topk: Slots that are selected at most.

    Returns:
        [batch_size, topk] int32 slots, page id * page_size + offset, by falling score; -1 after the
        last one where a request has fewer keys.
    """
    size = k_index_cache_fp8.shape[1]
    shape, device = (len(seq_lens), topk), block_table.device
    found = torch.full(shape, -1, dtype=torch.int32, device=device)
    for req in range(len(seq_lens)):
        scores = score_keys(
            q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, req
        )
        # of equal scores the lowest positions
        position = scores.argsort(descending=True, stable=True)[:topk]
        slots = block_table[req].long()[position // size] * size + position % size
        found[req, : len(slots)] = slots.int()
    return found


@torch.no_grad()
def score_keys(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    req: int,
) -> torch.Tensor:
    """Return [keys] float64 scores of the keys of a request."""
    size, dim = k_index_cache_fp8.shape[1], q_index_fp8.shape[2]
    keys = int(seq_lens[req])
    pages = k_index_cache_fp8[block_table[req, : -(-keys // size)].long()]
    stored = pages.view(torch.uint8).flatten(1)
    codes = stored[:, : size * dim].contiguous().view(torch.float8_e4m3fn)
    scale = stored[:, size * dim :].contiguous().view(torch.float32).flatten()[:keys]
    key = codes.reshape(-1, dim)[:keys].double() * scale.double()[:, None]
    # each head's dot products, cut off below 0, and added up by weight
    products = (q_index_fp8[req].double() @ key.T).relu()
    return weights[req].double() @ products

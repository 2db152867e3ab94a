"""Which attention calls are refused?"""

import torch
from torch import Tensor

from .batch import check_block_ids, check_block_table, check_start_loc
from .cache import check_caches
from .primitives import (
    check_dtype,
    check_length,
    check_not_negative,
    check_positive,
    check_same_device,
)


def check_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor | None,
    lse: Tensor | None,
    contents: bool,
) -> None:
    """Refuse a batch whose attention is not defined, before anything is computed."""
    check_caches(key_cache, value_cache)
    num_blocks, block_size, kv_heads, head_size = key_cache.shape
    check_dtype("query", query, key_cache.dtype)
    if query.dim() != 3 or query.shape[2] != head_size:
        raise ValueError(
            f"query has shape {list(query.shape)}: expected [tokens, query_heads,"
            f" {head_size}], as the cache has"
        )
    tokens, query_heads, _ = query.shape
    check_positive(num_query_heads=query_heads, num_kv_heads=kv_heads)
    if query_heads % kv_heads:
        raise ValueError(
            f"num_query_heads = {query_heads} is not a multiple of num_kv_heads ="
            f" {kv_heads}"
        )
    check_block_table(block_table)
    check_dtype("seq_lens", seq_lens, torch.int32)
    reqs, max_blocks = block_table.shape
    check_length("seq_lens", seq_lens, reqs, "rows of the block table")
    check_same_device(
        key_cache=key_cache,
        query=query,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        out=out,
        lse=lse,
    )
    check_not_negative(max_query_len=max_query_len, max_seq_len=max_seq_len)
    if max_seq_len > max_blocks * block_size:
        raise IndexError(
            f"max_seq_len = {max_seq_len}: expected at most {max_blocks * block_size}, what"
            f" a row of {max_blocks} blocks of {block_size} holds"
        )
    if out is not None and out.shape != query.shape:
        raise ValueError(
            f"out has shape {list(out.shape)}: expected {list(query.shape)}, as query has"
        )
    if lse is not None and tuple(lse.shape) != (query_heads, tokens):
        raise ValueError(
            f"lse has shape {list(lse.shape)}: expected [{query_heads}, {tokens}]"
        )
    check_start_loc("query_start_loc", query_start_loc, reqs, tokens, contents)
    if not contents:
        return
    check_block_ids(block_table, seq_lens, block_size, num_blocks)
    batch = zip(query_start_loc.diff().tolist(), seq_lens.tolist(), strict=True)
    for req, (query_len, seq_len) in enumerate(batch):
        if query_len > seq_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens but seq_lens[{req}] = {seq_len}:"
                " expected the new tokens to be part of the sequence"
            )
        if query_len > max_query_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens: expected at most max_query_len"
                f" = {max_query_len}"
            )
        if seq_len > max_seq_len:
            raise ValueError(
                f"seq_lens[{req}] = {seq_len}: expected at most max_seq_len = {max_seq_len}"
            )

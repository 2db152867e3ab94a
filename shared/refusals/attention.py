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
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
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
    check_scores(sliding_window, logits_soft_cap, alibi_slopes, sinks, query)
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


def check_scores(
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    query: Tensor,
) -> None:
    """Refuse a window, a cap, slopes or sinks that no score can have."""
    if sliding_window is not None:
        check_positive(sliding_window=sliding_window)
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(
            f"logits_soft_cap = {logits_soft_cap}: expected a number above 0, or None for"
            " no cap"
        )
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is None:
            continue
        check_dtype(name, tensor, torch.float32)
        check_length(name, tensor, query.shape[1], "query heads")
        check_same_device(query=query, **{name: tensor})


def check_impl(
    num_heads: int,
    num_kv_heads: int,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    attn_type: str,
    sinks: Tensor | None,
) -> None:
    """Refuse a layer that no backend here runs."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads = {num_heads} is not a multiple of num_kv_heads = {num_kv_heads}"
        )
    if sliding_window is not None:
        check_positive(sliding_window=sliding_window)
    if logits_soft_cap is not None and logits_soft_cap < 0:
        raise ValueError(
            f"logits_soft_cap = {logits_soft_cap}: expected a number above 0, or None for"
            " no cap"
        )
    for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if given is not None and len(given) != num_heads:
            raise ValueError(
                f"{name} has {len(given)} entries: expected {num_heads}, one a query head"
            )
    if kv_cache_dtype != "auto":
        raise NotImplementedError(
            f"kv_cache_dtype = {kv_cache_dtype!r}: expected 'auto'; quantised caches are not"
            " there yet"
        )
    if attn_type != "decoder":
        raise NotImplementedError(
            f"attn_type = {attn_type!r}: expected 'decoder'; encoders are not there yet"
        )


def check_impl_forward(
    output: Tensor | None,
    output_scale: Tensor | None,
    output_block_scale: Tensor | None,
) -> Tensor:
    """Return the output of a layer, or refuse one that is missing or quantised."""
    for name, scale in (
        ("output_scale", output_scale),
        ("output_block_scale", output_block_scale),
    ):
        if scale is not None:
            raise NotImplementedError(
                f"{name} is given: expected None; quantise the output after the call"
            )
    if output is None:
        raise ValueError("output = None: expected a tensor of the shape of query")
    return output

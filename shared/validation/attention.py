"""Validation of paged and ragged attention calls."""

import torch
from torch import Tensor

from ..contract.attention_options import AttentionOptions
from ..contract.cache_formats import find_format, head_size_of
from .attention_options import (
    check_cache_scales,
    check_options,
    check_positions,
    reject_options,
)
from .batch import check_block_ids, check_block_table, check_start_loc
from .cache import check_caches
from .primitives import (
    FLOATS,
    check_dtype,
    check_length,
    check_not_negative,
    check_positive,
    check_same_device,
)
from .results import check_results
from .score_numbers import check_score_scale


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
    options: AttentionOptions,
    contents: bool,
    scale: float | None = None,
) -> None:
    """Validate a batch of paged attention, before anything is computed."""
    options = options.with_causal(True)
    check_caches(key_cache, value_cache)
    num_blocks, block_size, _, _ = key_cache.shape
    check_query(query, {"key_cache": key_cache, "value_cache": value_cache}, out, lse)
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
    check_start_loc("query_start_loc", query_start_loc, reqs, query.shape[0], contents)
    check_cache_scales(options, key_cache, value_cache, contents)
    check_score_scale(scale)
    check_options(options, query, reqs, out, contents)
    if not contents:
        return
    check_block_ids(block_table, seq_lens, block_size, num_blocks)
    query_lens = query_start_loc.diff().tolist()
    check_positions(options, query_lens, seq_lens.tolist())
    check_bound(
        "max_query_len", max_query_len, query_lens, "request {} has {} new tokens"
    )
    check_bound("max_seq_len", max_seq_len, seq_lens.tolist(), "seq_lens[{}] = {}")


def check_encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    max_key_len: int,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    contents: bool,
    scale: float | None = None,
) -> None:
    """Validate a batch of ragged keys and values."""
    options = options.with_causal(False)
    reject_options(
        options,
        ("tree_mask", "k_scale", "v_scale", "k_global_scale", "v_global_scale"),
        "the keys and values are not read from a cache",
    )
    check_dtype("key", key, *FLOATS)
    check_dtype("value", value, key.dtype)
    if key.dim() != 3 or value.dim() != 3 or key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"key has shape {list(key.shape)} and value {list(value.shape)}: expected"
            " [tokens, kv_heads, head_size], alike but for the head size"
        )
    check_query(query, {"key": key, "value": value}, out, lse)
    check_same_device(
        query=query,
        key=key,
        value=value,
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        out=out,
        lse=lse,
    )
    check_not_negative(max_query_len=max_query_len, max_key_len=max_key_len)
    reqs = max(query_start_loc.shape[0] - 1, 0) if query_start_loc.dim() else 0
    check_start_loc("query_start_loc", query_start_loc, reqs, query.shape[0], contents)
    check_start_loc("key_start_loc", key_start_loc, reqs, key.shape[0], contents)
    check_score_scale(scale)
    check_options(options, query, reqs, out, contents)
    if not contents:
        return
    query_lens = query_start_loc.diff().tolist()
    key_lens = key_start_loc.diff().tolist()
    check_positions(options, query_lens, key_lens)
    check_bound("max_query_len", max_query_len, query_lens, "request {} has {} queries")
    check_bound("max_key_len", max_key_len, key_lens, "request {} has {} keys")


def check_bound(name: str, bound: int, counts: list[int], words: str) -> None:
    """Reject a count above the upper bound that the caller gave."""
    for req, count in enumerate(counts):
        if count > bound:
            raise ValueError(
                f"{words.format(req, count)}: expected at most {name} = {bound}"
            )


def check_query(
    query: Tensor, keys: dict[str, Tensor], out: Tensor | None, lse: Tensor | None
) -> None:
    """Reject queries and outputs that do not fit keys and values.

    Args:
        query: [tokens, query_heads, head_size].
        keys: [..., kv_heads, head_size] the keys and then the values, by their arguments' names.
        out, lse: Optional. The results.
    """
    key, value = keys.values()
    kv_heads, head_size = key.shape[-2], head_size_of(key)
    dtypes = FLOATS if find_format(key.dtype).is_quantised else (key.dtype,)
    check_dtype("query", query, *dtypes)
    if query.dim() != 3 or query.shape[2] != head_size:
        raise ValueError(
            f"query has shape {list(query.shape)}: expected [tokens, query_heads,"
            f" {head_size}], as the keys have"
        )
    tokens, query_heads, _ = query.shape
    check_positive(num_query_heads=query_heads, num_kv_heads=kv_heads)
    if query_heads % kv_heads:
        raise ValueError(
            f"num_query_heads = {query_heads} is not a multiple of num_kv_heads ="
            f" {kv_heads}"
        )
    expected = (tokens, query_heads, head_size_of(value))
    if out is not None and tuple(out.shape) != expected:
        raise ValueError(
            f"out has shape {list(out.shape)}: expected {list(expected)}, queries by the"
            " elements of a value"
        )
    if lse is not None and tuple(lse.shape) != (query_heads, tokens):
        raise ValueError(
            f"lse has shape {list(lse.shape)}: expected [{query_heads}, {tokens}]"
        )
    check_results(out, lse, {"query": query, **keys}, takes_fp8=True)

"""Validation of the indexer of sparse attention: its cache, its scores and the selection."""

import torch
from torch import Tensor

from ..contract.indexer_cache import SCALE_BYTES
from .batch import check_block_ids, check_block_table, check_start_loc
from .latent import check_slots
from .memory import check_own_memory
from .primitives import (
    FLOATS,
    check_dtype,
    check_length,
    check_not_negative,
    check_positive,
    check_same_device,
)

SCALE_FORMATS = (None, "ue8m0")
"""Scales as measured, or rounded up to a power of two, which eight bits of exponent hold."""


def check_indexer_write(
    k: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale_fmt: str | None,
    contents: bool,
) -> None:
    """Raise an error for a write that does not fit the cache, before anything is written."""
    _check_indexer_cache(kv_cache)
    check_dtype("k", k, *FLOATS)
    dim = kv_cache.shape[2] - SCALE_BYTES
    if k.dim() != 2 or k.shape[1] != dim:
        raise ValueError(
            f"k has shape {list(k.shape)}: expected [tokens, {dim}], as kv_cache has {dim} codes"
            " and a scale of 4 bytes per token"
        )
    if scale_fmt not in SCALE_FORMATS:
        raise ValueError(
            f"scale_fmt = {scale_fmt!r}: expected {' or '.join(map(repr, SCALE_FORMATS))}"
        )
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > k.shape[0]:
        raise ValueError(
            f"slot_mapping has shape {list(slot_mapping.shape)}: expected at most"
            f" [{k.shape[0]}], the tokens of k"
        )
    check_same_device(kv_cache=kv_cache, k=k, slot_mapping=slot_mapping)
    check_own_memory(kv_cache=kv_cache)
    if contents:
        check_slots(slot_mapping.tolist(), kv_cache.shape[0] * kv_cache.shape[1])


def check_index_scores(
    query: Tensor,
    weights: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    contents: bool,
) -> None:
    """Raise an error for queries that do not fit the cache, and for wrong lengths."""
    _check_indexer_cache(kv_cache)
    check_dtype("query", query, *FLOATS, torch.float8_e4m3fn)
    dim = kv_cache.shape[2] - SCALE_BYTES
    if query.dim() != 3 or query.shape[2] != dim:
        raise ValueError(
            f"query has shape {list(query.shape)}: expected [tokens, index_heads, {dim}], as"
            f" kv_cache has {dim} codes and a scale of 4 bytes per token"
        )
    check_dtype("weights", weights, torch.float32)
    if weights.shape != query.shape[:2]:
        raise ValueError(
            f"weights has shape {list(weights.shape)}: expected {list(query.shape[:2])}, one"
            " per token and head of the query"
        )
    check_positive(index_heads=query.shape[1])
    check_block_table(block_table)
    reqs = block_table.shape[0]
    num_blocks, block_size = kv_cache.shape[:2]
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_length("seq_lens", seq_lens, reqs, "rows of the block table")
    check_same_device(
        kv_cache=kv_cache,
        query=query,
        weights=weights,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )
    check_not_negative(max_seq_len=max_seq_len)
    check_start_loc("query_start_loc", query_start_loc, reqs, query.shape[0], contents)
    if not contents:
        return
    check_block_ids(block_table, seq_lens, block_size, num_blocks)
    for req, seq_len in enumerate(seq_lens.tolist()):
        if seq_len > max_seq_len:
            raise ValueError(
                f"seq_lens[{req}] = {seq_len}: expected at most max_seq_len = {max_seq_len}"
            )


def check_select_keys(scores: Tensor, topk: int) -> None:
    """Raise an error for scores that are not one row of float32 per token."""
    check_positive(topk=topk)
    check_dtype("scores", scores, torch.float32)
    if scores.dim() != 2:
        raise ValueError(
            f"scores has shape {list(scores.shape)}: expected [tokens, keys]"
        )


def _check_indexer_cache(kv_cache: Tensor) -> None:
    """Reject what is not blocks of codes and scales, each block contiguous."""
    check_dtype("kv_cache", kv_cache, torch.uint8)
    shape = list(kv_cache.shape)
    if len(shape) != 3 or shape[2] <= SCALE_BYTES or shape[2] % SCALE_BYTES:
        raise ValueError(
            f"kv_cache has shape {shape}: expected [num_blocks, block_size, codes + 4] with a"
            " number of codes above 0 that is a multiple of 4, the bytes of a scale"
        )
    check_positive(block_size=shape[1])
    block, slot, byte = kv_cache.stride()
    if byte != 1 or (shape[1] > 1 and slot != shape[2]):
        raise ValueError(
            f"kv_cache has strides {[block, slot, byte]}: expected contiguous blocks, since a"
            " block stores the scales of all tokens after their codes"
        )
    for what, size in (
        ("a stride between blocks", block),
        ("an offset in its memory", kv_cache.storage_offset()),
    ):
        if size % SCALE_BYTES:
            raise ValueError(
                f"kv_cache has {what} of {size} bytes: expected a multiple of 4, the bytes of"
                " a scale"
            )

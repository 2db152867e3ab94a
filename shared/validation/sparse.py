"""Validation of sparse attention: selected positions, and the cache slots that queries name."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..contract.argument_kinds import INT32
from ..contract.attention_options import AttentionOptions
from ..contract.cache_formats import find_format
from ..contract.latent_formats import LatentFormat, find_record_heads
from .attention import check_query
from .attention_options import check_cache_scales, check_options, reject_options
from .batch import check_block_table
from .cache import check_caches
from .latent_cache import check_latent_cache
from .memory import is_same_view
from .primitives import (
    FLOATS,
    check_dtype,
    check_length,
    check_positive,
    check_same_device,
)
from .results import check_results
from .score_numbers import check_score_scale
from .step_shapes import check_ranks

TAKEN = (
    *("logits_soft_cap", "sinks", "k_scale", "v_scale", "out_scale"),
    "batch_invariant",
)
"""Options that need no position of a key."""


def check_convert_indices(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    dcp_world_size: int,
    dcp_rank: int,
    dcp_kv_cache_interleave_size: int,
    contents: bool,
) -> None:
    """Raise an error for selections of other tokens, and for entries that are not block ids."""
    check_positive(block_size=block_size)
    check_ranks(dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    check_block_table(block_table)
    check_selection("token_indices", token_indices)
    check_dtype("req_id", req_id, torch.int32)
    check_length("req_id", req_id, token_indices.shape[0], "rows of token_indices")
    check_same_device(
        token_indices=token_indices, req_id=req_id, block_table=block_table
    )
    if not contents:
        return
    check_owners(req_id, block_table)
    size = dcp_kv_cache_interleave_size
    period = size * dcp_world_size
    positions = token_indices.long()
    local = positions // period * size + positions % size
    is_read = (positions >= 0) & (req_id >= 0)[:, None]
    is_read &= positions // size % dcp_world_size == dcp_rank
    is_read &= local < block_table.shape[1] * block_size
    tokens = is_read.nonzero()[:, 0]
    owner, entry = req_id[tokens].long(), local[is_read] // block_size
    check_read_ids(block_table, owner, entry, block_size)


def check_read_ids(
    block_table: Tensor, owner: Tensor, entry: Tensor, block_size: int
) -> None:
    """Raise an error for entries that are not block ids, or whose slots exceed 32 bits.

    Args:
        owner, entry: [read] rows and columns of the block table.
    """
    block_id = block_table[owner, entry].long()
    largest = INT32 // block_size - 1
    wrong = (block_id < 0) | (block_id > largest)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise IndexError(
            f"block_table[{int(owner[first])}, {int(entry[first])}] ="
            f" {int(block_id[first])}: expected a block id from 0 to {largest}, whose slots"
            " have 32 bits"
        )


def check_selection(name: str, selection: Tensor) -> None:
    """Raise an error for what is not one row of int32 per token."""
    check_dtype(name, selection, torch.int32)
    if selection.dim() != 2:
        raise ValueError(
            f"{name} has shape {list(selection.shape)}: expected [tokens, selected]"
        )


def check_owners(req_id: Tensor, block_table: Tensor) -> None:
    """Raise an error for a token whose request has no row in the block table."""
    reqs = block_table.shape[0]
    for token, owner in enumerate(req_id.tolist()):
        if owner >= reqs:
            raise IndexError(
                f"req_id[{token}] = {owner}: expected a request below {reqs}, the rows of"
                " the block table, or a negative number for padding"
            )


def check_sparse_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    req_id: Tensor | None,
    block_table: Tensor | None,
    contents: bool,
    scale: float | None = None,
) -> None:
    """Validate sparse attention, before anything is computed."""
    check_caches(key_cache, value_cache)
    form = find_record_heads(key_cache, value_cache)
    if form is not None:
        _check_records(form, query, key_cache, value_cache, out, lse, options)
    else:
        _check_format(key_cache, options)
        caches = {"key_cache": key_cache, "value_cache": value_cache}
        check_query(query, caches, out, lse)
    check_selection("slots", slots)
    tokens = query.shape[0]
    if slots.shape[0] != tokens:
        raise ValueError(
            f"slots has shape {list(slots.shape)}: expected [{tokens}, selected], a row per"
            " token of the query"
        )
    if (req_id is None) != (block_table is None):
        given = "req_id" if block_table is None else "block_table"
        raise ValueError(
            f"{given} is given alone: expected req_id and block_table, which tell the"
            " blocks of each token's request, or neither"
        )
    check_same_device(
        key_cache=key_cache,
        query=query,
        slots=slots,
        out=out,
        lse=lse,
        req_id=req_id,
        block_table=block_table,
    )
    if req_id is not None and block_table is not None:
        check_block_table(block_table)
        check_dtype("req_id", req_id, torch.int32)
        check_length("req_id", req_id, tokens, "tokens of the query")
    taken = tuple(name for name in options.given if name not in TAKEN)
    reject_options(options, taken, "a slot does not tell the position of its key")
    if form is None:
        check_cache_scales(options, key_cache, value_cache, contents)
    check_score_scale(scale)
    check_options(options, query, tokens, out, contents)
    if not contents:
        return
    num_blocks, block_size = key_cache.shape[:2]
    _check_slots(slots, num_blocks * block_size)
    if req_id is not None and block_table is not None:
        check_owners(req_id, block_table)
        _check_own_blocks(slots, req_id, block_table, block_size)


def _check_records(
    form: LatentFormat,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
) -> None:
    """Reject what does not fit a cache of records, whose keys and values are one tensor."""
    is_known = key_cache.numel() and not is_compiling()
    if is_known and not is_same_view(key_cache, value_cache):
        raise ValueError(
            f"key_cache and value_cache have records of {form.name} in different memory: expected"
            " one tensor, since a record is the key and the value of its token"
        )
    check_latent_cache(key_cache[:, :, 0], "k_scale", None, False)
    check_dtype("query", query, *FLOATS)
    if query.dim() != 3 or query.shape[2] != form.width:
        raise ValueError(
            f"query has shape {list(query.shape)}: expected [tokens, query_heads,"
            f" {form.width}], as the records of {form.name} have"
        )
    tokens, query_heads, _ = query.shape
    check_positive(num_query_heads=query_heads)
    expected = (tokens, query_heads, form.kv_lora_rank)
    if out is not None and tuple(out.shape) != expected:
        raise ValueError(
            f"out has shape {list(out.shape)}: expected {list(expected)}, queries by the"
            " elements of a latent"
        )
    if lse is not None and tuple(lse.shape) != (query_heads, tokens):
        raise ValueError(
            f"lse has shape {list(lse.shape)}: expected [{query_heads}, {tokens}]"
        )
    check_results(out, lse, {"query": query, "key_cache": key_cache})
    reject_options(
        options,
        options.given,
        f"attention to the slots of records ({form.name}) takes no option, and records store"
        " their scales",
    )


def _check_format(key_cache: Tensor, options: AttentionOptions) -> None:
    """Reject caches whose scales the write measures: each slot has scales of its own."""
    form = find_format(key_cache.dtype, options.k_scale)
    if form.is_measured:
        raise NotImplementedError(
            f"the cache has the format {form.name}: expected numbers, or FP8 with scales that"
            " all slots share; paged_attention takes it"
        )


def _check_slots(slots: Tensor, num_slots: int) -> None:
    """Raise an error for a slot outside the cache."""
    wrong = (slots < -1) | (slots >= num_slots)
    if bool(wrong.any()):
        token, column = wrong.nonzero()[0].tolist()
        raise IndexError(
            f"slots[{token}, {column}] = {int(slots[token, column])} is outside the cache:"
            f" expected -1 (no key) or 0 <= slot < {num_slots}"
        )


def _check_own_blocks(
    slots: Tensor, req_id: Tensor, block_table: Tensor, block_size: int
) -> None:
    """Raise an error for a slot in a block that the row of the token's request does not name."""
    for token, owner in enumerate(req_id.tolist()):
        row = slots[token]
        own = block_table[owner] if owner >= 0 else block_table.new_empty(0)
        wrong = (row >= 0) & ~torch.isin(row // block_size, own)
        if bool(wrong.any()):
            column = int(wrong.nonzero()[0])
            whose = f"request {owner}" if owner >= 0 else "no request"
            raise IndexError(
                f"slots[{token}, {column}] = {int(row[column])} is in block"
                f" {int(row[column]) // block_size}, but the token is of {whose}: expected a"
                " slot in a block of its request; convert_req_index_to_global_index returns"
                " such slots"
            )

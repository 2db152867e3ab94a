"""Caches and tokens of each rank: what is left of a drawn call on one rank of several."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batches import NAN
from .drawn_numbers import Ints, bits, rows_of, to_device
from .ranks import RankLayout
from .signatures import SignedBatch
from .signed_calls import SignedCall, draw_table, empty_pair


@dataclass(frozen=True)
class RankCall:
    """What a rank of a step gets, on the device of the candidate.

    Args:
        own: Its query heads.
        query: [tokens, query_heads, head_size] of its query heads.
        tokens: Keys and values of the new tokens for its KV heads. NaN in rows of padding.
        caches: Its key cache and value cache. The new tokens are missing in them, unless they are
            FP8.
        after: What the caches hold when the new tokens are written.
        arguments: `block_table`, `query_start_loc`, `seq_lens` and `max_seq_len` by name.
        options: Those of the call, for its heads.
    """

    own: slice
    query: Tensor
    tokens: tuple[Tensor, Tensor]
    caches: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    arguments: dict[str, Any]
    options: dict[str, Any]


def rank_call(batch: SignedBatch, built: SignedCall, rank: int) -> RankCall:
    """Return what a rank gets.

    Slots without one of its keys have the batch's poison, entries past the end of its rows the
    batch's entries. Equal arguments give equal tensors.

    Args:
        batch: A batch of a signature with ranks.
        built: The tensors of the batch on one rank.
        rank: Index among the tensor-parallel ranks.
    """
    signature, call = batch.signature, built.call
    assert signature.ranks is not None
    own, stored = signature.ranks.heads_of(
        rank, signature.query_heads, signature.kv_heads
    )
    table, old, new = _slots_of(batch, signature.ranks, rank)
    pair = (built.keys, built.values)
    caches: list[Tensor] = []
    after: list[Tensor] = []
    # numbers that are quantised cannot be written again
    is_written = pair[0].element_size() > 1
    for is_after in (False, True):
        parts = (old, new) if is_after or not is_written else (old,)
        filled = empty_pair(batch, table.num_blocks, signature.block_size, pair)
        for cache, numbers in zip(filled, pair, strict=True):
            for index, slots in parts:
                at = to_device(
                    np.stack(np.divmod(slots, signature.block_size)), cache.device
                )
                bits(cache)[tuple(at)] = bits(numbers)[to_device(index, cache.device)]
            (after if is_after else caches).append(cache[:, :, stored])
    given = call.arguments
    options = dict(given)
    for name in ("query", "key_cache", "value_cache", "max_query_len", *LENGTHS):
        options.pop(name)
    if "sinks" in options:
        options["sinks"] = options["sinks"][own]
    for name in ("k_scale", "v_scale"):
        scale = options.get(name)
        if isinstance(scale, Tensor) and scale.numel() == signature.kv_heads > 1:
            options[name] = scale[stored]
    return RankCall(
        own=own,
        query=call.query[:, own],
        tokens=new_tokens(batch, pair, stored),
        caches=(caches[0], caches[1]),
        after=(after[0], after[1]),
        arguments={name: given[name] for name in LENGTHS}
        | {"block_table": to_device(table.entries, call.query.device)},
        options=options,
    )


LENGTHS = ("block_table", "query_start_loc", "seq_lens", "max_seq_len")
"""Arguments of a call that are not options of a rank."""


@dataclass(frozen=True)
class _Table:
    """The block table of a rank, [reqs, max_blocks], and the number of its blocks."""

    entries: Any
    num_blocks: int


def _slots_of(
    batch: SignedBatch, ranks: RankLayout, rank: int
) -> tuple[_Table, tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Return the block table of a rank, and its old and its new keys.

    Returns:
        The table, then for old keys and for new ones the indices among all keys of the batch, and
        their slots on this rank.
    """
    size, of_group = batch.signature.block_size, rank % ranks.world_size
    key_lens, new_lens = np.array(batch.key_lens), np.array(batch.query_lens)
    request, position = rows_of(key_lens)
    index = ranks.stored_on(of_group, position)
    is_own = index >= 0
    share = np.bincount(request[is_own], minlength=len(key_lens))
    counts = -(-share // size)
    longest = max(batch.signature.max_key_len, *batch.key_lens)
    bound = int((ranks.stored_on(of_group, np.arange(longest)) >= 0).sum())
    width = max(1, -(-bound // size) + rank % 2)
    generator = np.random.default_rng([batch.seed, rank])
    scattered = replace(batch, table="scattered")
    table, num_blocks = draw_table(scattered, counts, width, generator)
    if batch.table == "shared prefix":
        context = key_lens - new_lens
        both = np.minimum(_shared_keys(batch), np.minimum(context, context[0]))
        last = position_of_last(ranks, of_group, size, width)
        is_shared = last < both[:, None]
        table = np.where(is_shared, table[:1], table)
    slots = table[request, np.maximum(index, 0) // size].astype(np.int64) * size
    slots += np.maximum(index, 0) % size
    is_new = position >= (key_lens - new_lens)[request]
    old, new = (np.flatnonzero(is_own & is_kind) for is_kind in (~is_new, is_new))
    return _Table(table, num_blocks), (old, slots[old]), (new, slots[new])


def _shared_keys(batch: SignedBatch) -> Ints:
    """Return how many keys of each request are those of the first one. None of its own are."""
    size = batch.signature.block_size
    counts = -(-np.array(batch.key_lens) // size)
    shared = np.minimum(counts, counts[0]) // 2 * size
    shared[0] = 0
    found: Ints = shared
    return found


def position_of_last(ranks: RankLayout, rank: int, block_size: int, width: int) -> Ints:
    """Return [width] the position of the key in the last slot of each block of a rank."""
    index = (np.arange(width) + 1) * block_size - 1
    run, within = np.divmod(index, ranks.interleave_size)
    found: Ints = (run * ranks.world_size + rank) * ranks.interleave_size + within
    return found


def new_tokens(
    batch: SignedBatch, pair: tuple[Tensor, Tensor], heads: slice
) -> tuple[Tensor, Tensor]:
    """Return keys and values of the new tokens for some KV heads, NaN in rows of padding."""
    key_lens, new_lens = np.array(batch.key_lens), np.array(batch.query_lens)
    request, position = rows_of(key_lens)
    index = np.flatnonzero(position >= (key_lens - new_lens)[request])
    found = []
    for numbers in pair:
        own = bits(numbers)[to_device(index, numbers.device)].view(numbers.dtype)
        rows = torch.full(
            (len(own) + batch.padding, *own.shape[1:]), NAN, device=own.device
        ).to(own.dtype)
        bits(rows)[: len(own)] = bits(own)
        found.append(rows[:, heads])
    return found[0], found[1]

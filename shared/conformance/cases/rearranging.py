"""Transformations of calls that must not change the result.

Blocks moved to other ids, other numbers in slots that are not allocated, requests in another order
or alone, a prompt split into chunks: each function returns a call whose result must be the same for
the rows that it keeps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..oracles.brute_force import Answer, attends, positions_of
from .batches import NAN
from .options import Call, starts_of

CACHES = ("key_cache", "value_cache")


def rows_of(call: Call, reqs: Sequence[int]) -> list[int]:
    """Return the output rows of some requests."""
    starts = [0, *accumulate(call.query_lens)]
    return [token for req in reqs for token in range(starts[req], starts[req + 1])]


def rows_of_answer(answer: Answer, rows: list[int] | slice) -> Answer:
    """Return the exact result of some rows."""
    return Answer(
        answer.out[rows],
        answer.lse[:, rows],
        answer.sizes[rows],
        answer.scores[:, rows],
        answer.lost[rows],
        answer.moved[rows],
        answer.joined[rows],
        answer.value_range[:, rows],
    )


def only(call: Call, reqs: Sequence[int]) -> Call:
    """Return a paged call of some requests, in that order, without padding."""
    cuts = [(req, 0, call.query_lens[req]) for req in reqs]
    return of_parts(call, cuts)


def of_parts(call: Call, parts: Sequence[tuple[int, int, int]]) -> Call:
    """Return a paged call in which each of the given parts of requests is a separate request.

    Args:
        call: The call. It must not have a tree mask, unless all parts are whole requests.
        parts: (request, first query, end) of each part. Its keys end with its last query. A part
            that is a whole request keeps all of its keys.
    """
    starts = [0, *accumulate(call.query_lens)]
    rows = [starts[req] + own for req, begin, end in parts for own in range(begin, end)]
    reqs = [req for req, _, _ in parts]
    key_lens = [
        call.key_lens[req] - call.query_lens[req] + end for req, _, end in parts
    ]
    given, device = call.arguments, call.query.device
    each_token = {
        name: given[name][rows] for name in ("query", "query_ranges") if name in given
    }
    each_request = {
        name: given[name][reqs]
        for name in ("block_table", "tree_mask", "causal")
        if isinstance(given.get(name), Tensor)
    }
    query_lens = tuple(end - begin for _, begin, end in parts)
    return replace(
        call.changed(
            **each_token,
            **each_request,
            query_start_loc=starts_of(query_lens, device),
            seq_lens=torch.tensor(key_lens, dtype=torch.int32, device=device),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(key_lens, default=0),
        ),
        query_lens=query_lens,
        key_lens=tuple(key_lens),
        rows=[call.rows[req] for req in reqs],
    )


def moved_pages(call: Call, pick: Random) -> Call:
    """Return a paged call whose blocks have other ids; memory outside of blocks is NaN."""
    num_blocks = call.arguments["key_cache"].shape[0]
    order = list(range(num_blocks))
    pick.shuffle(order)
    moved_to = torch.tensor(order, device=call.query.device)
    changes: dict[str, Tensor] = {}
    for name in (*CACHES, "k_scale", "v_scale"):
        cache = call.arguments.get(name)
        # a scale of a head or of all keys has no blocks
        if not isinstance(cache, Tensor) or cache.dim() < 3:
            continue
        changes[name] = copy_of(cache)
        changes[name][moved_to] = cache
    table = call.arguments["block_table"].clone()
    for req, row in enumerate(call.rows):
        table[req, : len(row)] = moved_to[row].int()
    return replace(
        call.changed(**changes, block_table=table),
        rows=[[order[block_id] for block_id in row] for row in call.rows],
    )


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, and NaN or 0 between its elements."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((max(size, 1) - 1) * stride for size, stride in sizes)
    number = NAN if tensor.dtype.is_floating_point else 0
    memory = torch.full((extent,), number, device=tensor.device).to(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def copied(call: Call) -> Call:
    """Return a call on copies of its tensors."""
    return replace(
        call,
        arguments={
            name: copy_of(argument) if isinstance(argument, Tensor) else argument
            for name, argument in call.arguments.items()
        },
    )


def poisoned(call: Call, poison: float) -> Call:
    """Return a call with other numbers in all elements that must not be read.

    These are the slots that are not allocated, the query rows after the last request and their
    ranges, the block table past the end of each row, and entries of trees past the new tokens of a
    request.
    """
    call = copied(call)
    given, tokens = call.arguments, sum(call.query_lens)
    for name in (*CACHES, "key", "value"):
        if name in given:
            numbers = given[name].float()
            others = torch.where(numbers.isnan(), poison, numbers)
            given[name].copy_(others.to(given[name].dtype))
    given["query"][tokens:] = poison
    if "block_table" in given and given["block_table"] is not None:
        for req, row in enumerate(call.rows):
            given["block_table"][req, len(row) :] = 0
    if "query_ranges" in given:
        given["query_ranges"][tokens:] = -1
    if "tree_mask" in given:
        for req, query_len in enumerate(call.query_lens):
            given["tree_mask"][req, query_len:] = False
            given["tree_mask"][req, :, query_len:] = False
    return call


def given_away(call: Call) -> Call:
    """Return a paged call with NaN in all blocks that are before every window or chunk."""
    call = copied(call)
    block_size = call.arguments["key_cache"].shape[1]
    kept: set[int] = set()
    token = 0
    options = {
        name: argument.cpu() if isinstance(argument, Tensor) else argument
        for name, argument in call.arguments.items()
        if argument is not None
    }
    for req, (query_len, key_len) in enumerate(
        zip(call.query_lens, call.key_lens, strict=True)
    ):
        both = positions_of(req, query_len, key_len, options)
        first = min(
            (
                key
                for own in range(query_len)
                for key in range(key_len)
                if attends(req, token + own, own, key, *both, options)
            ),
            default=key_len,
        )
        kept |= set(call.rows[req][first // block_size :])
        token += query_len
    gone = [
        block_id
        for block_id in range(call.arguments["key_cache"].shape[0])
        if block_id not in kept
    ]
    for name in CACHES:
        cache = call.arguments[name]
        cache[gone] = torch.tensor(NAN, device=cache.device).to(cache.dtype)
    return call


def with_other_requests(call: Call, kept: int, pick: Random) -> Call:
    """Return a paged call in which the queries and keys of all requests but one are changed.

    The blocks of the kept request do not change.
    """
    call = copied(call)
    rows = set(rows_of(call, [kept]))
    others = [row for row in range(sum(call.query_lens)) if row not in rows]
    call.query[others] = call.query[others] * -0.5
    own = set(call.rows[kept])
    theirs = sorted(
        {block_id for row in call.rows for block_id in row if block_id not in own}
    )
    order = list(theirs)
    pick.shuffle(order)
    for name in CACHES:
        cache = call.arguments[name]
        cache[theirs] = cache[order].clone()
    return call


def with_strided(tensor: Tensor, garbage: int) -> Tensor:
    """Return the same integers as a strided view, with garbage between them."""
    wide = tensor.repeat_interleave(2, dim=-1).clone()
    wide[..., 1::2] = garbage
    return wide[..., ::2]


def apart(tensor: Tensor, garbage: Any = NAN) -> Tensor:
    """Return the same numbers with garbage past the end of each row of the last axis."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), garbage)
    wide = wide.to(tensor.dtype).to(tensor.device)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def as_views(call: Call, names: Iterable[str]) -> Call:
    """Return the call with strided views as some tensors, and garbage between their elements."""
    changes: dict[str, Tensor] = {}
    for name in names:
        argument = call.arguments[name]
        if not isinstance(argument, Tensor):
            continue
        if argument.dtype == torch.int32:
            changes[name] = with_strided(argument, 10**6)
        elif argument.dtype == torch.bool:
            changes[name] = with_strided(argument, 1)
        elif argument.dim() == 2:
            changes[name] = apart(argument.T).T
        else:
            changes[name] = apart(argument[:, None], NAN)[:, 0]
    return call.changed(**changes)

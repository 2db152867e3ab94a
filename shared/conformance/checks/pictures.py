"""Picture of a failing attention call: the row with the largest error, its mask and its blocks.

The picture consists of numbers and words, so it can be stored. `reports/page.py` draws it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cases.options import Call
from ..oracles.brute_force import Answer, attends, biases, column, positions_of

MAX_QUERIES, MAX_KEYS = 32, 128
"""Queries and keys that a picture shows, at most."""
MAX_TOKENS, MAX_HEADS = 64, 32
"""Tokens and heads whose errors a picture shows, at most."""
MAX_BLOCKS = 256
"""Blocks that a picture shows, at most."""
EXPLAINED = 0.02
"""Share of the error that may remain if a mask explains the result."""
EDGES = (512, 256, 128, 64, 32, 16)
"""Sizes of tiles, at whose edges a key is worth a remark."""


@dataclass(frozen=True)
class Failure:
    """A call whose result is wrong.

    Args:
        call: The call.
        out: The candidate's output, on the host.
        answer: The exact result.
        token: Row of the largest error relative to its budget.
    """

    call: Call
    out: Tensor
    answer: Answer
    token: int


def picture_of(failure: Failure) -> dict[str, Any]:
    """Return what a report shows of a wrong result.

    Empty if the row belongs to no request, or if the call's blocks hold only a part of the keys, as
    those of a rank.
    """
    call, token = failure.call, failure.token
    place = _request_of(call, token)
    if place is None or not _holds_all_keys(call):
        return {}
    req, own = place
    errors = _errors(failure)
    head = int(errors[token].argmax())
    kv_heads = _keys_of(call).shape[-2]
    given = _on_host(call)
    queries, keys = positions_of(req, call.query_lens[req], call.key_lens[req], given)
    first_token = token - own
    visible = [
        [
            attends(req, first_token + query, query, n, queries, keys, given)
            for n in _all(keys)
        ]
        for query in _window(own, len(queries), MAX_QUERIES)
    ]
    row = visible[own - _window(own, len(queries), MAX_QUERIES).start]
    flipped = _explaining_keys(failure, req, own, head, row)
    middle = (
        flipped[0] if flipped else max((n for n in _all(keys) if row[n]), default=0)
    )
    shown = _window(middle, len(keys), MAX_KEYS)
    tile = {
        "first_query": _window(own, len(queries), MAX_QUERIES).start,
        "first_key": shown.start,
        "visible": ["".join(".#"[seen[n]] for n in shown) for seen in visible],
        "keys": flipped,
    }
    where = (
        f"Token {token} is new token {own} of request {req}, at position {queries[own]} of"
        f" {call.key_lens[req]} keys. Query head {head} reads kv head"
        f" {head * kv_heads // call.query.shape[1]}."
    )
    return {
        "where": where,
        "finding": _finding(call, req, queries[own], row, flipped),
        "request": req,
        "query": own,
        "token": token,
        "head": head,
        "query_lens": list(call.query_lens),
        "key_lens": list(call.key_lens),
        "tile": tile,
        "errors": [
            [_short(error) for error in line[:MAX_HEADS].tolist()]
            for line in errors[:MAX_TOKENS]
        ],
        "blocks": _blocks(call, req, flipped),
    }


def _request_of(call: Call, token: int) -> tuple[int, int] | None:
    """Return the request of a token and its index among the request's new tokens."""
    for req, length in enumerate(call.query_lens):
        if token < length:
            return req, token
        token -= length
    return None


def _holds_all_keys(call: Call) -> bool:
    """Return whether each row of the block table has a block for every key."""
    if "key_cache" not in call.arguments:
        return True
    block_size = _keys_of(call).shape[1]
    return all(
        key_len <= len(row) * block_size
        for key_len, row in zip(call.key_lens, call.rows, strict=True)
    )


def _keys_of(call: Call) -> Tensor:
    arguments = call.arguments
    keys: Tensor = arguments["key_cache" if "key_cache" in arguments else "key"]
    return keys


def _on_host(call: Call) -> dict[str, Any]:
    """Return the arguments with the operation's default of `causal`, tensors on the host."""
    given = {"causal": call.operation == "paged_attention"} | call.arguments
    return {
        name: option.cpu() if isinstance(option, Tensor) else option
        for name, option in given.items()
        if option is not None
    }


def _errors(failure: Failure) -> Tensor:
    """Return [tokens, query_heads] the largest error of each head; infinity if not finite."""
    scale = float(failure.call.arguments.get("out_scale", 1.0))
    found = failure.out.cpu().double() * scale
    return (found - failure.answer.out).abs().nan_to_num(torch.inf, torch.inf).amax(2)


def _all(keys: list[int]) -> range:
    return range(len(keys))


def _window(middle: int, size: int, most: int) -> range:
    """Return at most `most` indices around one."""
    first = min(max(0, middle - most // 2), max(0, size - most))
    return range(first, min(size, first + most))


def _short(number: float) -> float | str:
    """Return a number with three digits; infinity as a word, because JSON has none."""
    return "inf" if number == float("inf") else float(f"{number:.3g}")


def _candidates(row: list[bool]) -> Iterator[list[int]]:
    """Yield sets of keys whose mask may be inverted: single keys, and runs at tile edges."""
    count = len(row)
    visible = [key for key in range(count) if row[key]]
    near = visible[-1] if visible else 0
    yield from ([key] for key in sorted(range(count), key=lambda key: abs(key - near)))
    masked = [key for key in range(count) if not row[key]]
    if masked:
        yield masked
    for size in (16, 32, 64, 128):
        for first in range(0, count, size):
            yield [key for key in visible if first <= key < first + size]
            yield [key for key in visible if key >= first]


def _explaining_keys(
    failure: Failure, req: int, own: int, head: int, row: list[bool]
) -> list[int]:
    """Return the keys whose inverted mask gives the candidate's result, or an empty list."""
    found = failure.out.cpu()[failure.token, head].double()
    found = found * float(failure.call.arguments.get("out_scale", 1.0))
    if not bool(found.isfinite().all()):
        return []
    before = float((found - failure.answer.out[failure.token, head]).abs().max())
    scores, values, sinks = _scores(failure.call, req, own, head)
    mask = torch.tensor(row, dtype=torch.bool)
    for keys in _candidates(row):
        visible = mask.clone()
        visible[keys] ^= True
        weights = torch.cat([scores[visible], sinks]).softmax(0)[: int(visible.sum())]
        other = (weights[:, None] * values[visible]).sum(0)
        if float((found - other).abs().max()) <= EXPLAINED * before:
            return keys
    return []


def _scores(call: Call, req: int, own: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return [keys] scores, [keys, size] values and [0 or 1] sink of a row, without a mask."""
    given, request = _on_host(call), call.requests()[req]
    heads, head_size = request.query.shape[1:]
    kv_heads = request.key.shape[1]
    kv_head = head * kv_heads // heads
    scales = [
        # with a scale per token the request has numbers
        column(1.0 if request.k_scale is not None else given.get(name, 1.0), kv_heads)
        for name in ("k_scale", "v_scale")
    ]
    key = request.key[:, kv_head].double() * scales[0][kv_head]
    value = request.value[:, kv_head].double() * scales[1][kv_head]
    score = (key * request.query[own, head].double()).sum(1)
    score = score * given.get("scale", head_size**-0.5)
    if "logits_soft_cap" in given:
        cap = given["logits_soft_cap"]
        score = cap * torch.tanh(score / cap)
    queries, keys = positions_of(req, len(request.query), len(request.key), given)
    distances = [key - queries[own] for key in keys]
    for added in biases(distances, heads, given):
        score = score + added[head]
    sinks = score.new_empty(0)
    if "sinks" in given:
        sinks = given["sinks"].double()[head : head + 1]
    return score, value, sinks


def _finding(
    call: Call, req: int, position: int, row: list[bool], keys: list[int]
) -> str:
    """Return which key is lost or added, in the terms of the field."""
    if not keys:
        return ""
    names = f"key {keys[0]}"
    if len(keys) > 1:
        names = f"keys {keys[0]} to {keys[-1]}"
    kind = "without" if row[keys[0]] else "with the masked"
    words = [f"The result equals attention {kind} {names}"]
    key = keys[0]
    if not row[key] and key > position:
        words.append("after the query's own position")
    if row[key] and key == position:
        words.append("the query's own key")
    if key == call.key_lens[req] - 1:
        words.append("the last key of the sequence")
    if call.rows:
        size = _keys_of(call).shape[1]
        edge = {0: "the first slot", size - 1: "the last slot"}.get(key % size)
        slot = edge or f"slot {key % size}"
        words.append(f"{slot} of entry {key // size} in the request's block-table row")
    edges = [size for size in EDGES if key and key % size == 0]
    if edges:
        words.append(f"the first key of a tile of {edges[0]} keys")
    return ", ".join(words) + "."


def _blocks(call: Call, req: int, keys: list[int]) -> dict[str, Any]:
    """Return the blocks of the cache, the requests that use them, and the slots of some keys."""
    if not call.rows:
        return {}
    cache = _keys_of(call)
    size = int(cache.shape[1])
    row = call.rows[req]
    # the blocks of the failing request come first if not all of them are shown
    used = list(
        dict.fromkeys([*row, *(block for blocks in call.rows for block in blocks)])
    )
    count = int(cache.shape[0])
    shown = range(count) if count <= MAX_BLOCKS else used[:MAX_BLOCKS]
    return {
        "block_size": size,
        "num_blocks": count,
        "shown": list(shown),
        "rows": [blocks[:MAX_BLOCKS] for blocks in call.rows],
        "keys": [[row[key // size], key % size] for key in keys[:MAX_KEYS]],
    }

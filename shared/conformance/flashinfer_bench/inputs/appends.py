"""Cache appends: writes to slots as the inputs of a definition, and their results in the caches.

A definition fixes the page size, the number of heads and the head size. The laws write to caches of
any sizes. Their slots are numbered one after another, so they can be cut into pages of any size.
Heads and elements are placed among those of the definition as in `calls.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..definitions import Definition
from .calls import PAST, HeadMap, draw_columns, map_heads, spread, take

MOST_REQUESTS = 4
"""Requests that the tokens of a write are distributed over, at most."""


@dataclass(frozen=True)
class AppendPages:
    """The pages of some requests, and the request and position of each token.

    Args:
        requests: [tokens] request of each token.
        positions: [tokens] position of each token in its request.
        rows: Page ids of each request, in sequence order.
    """

    requests: list[int]
    positions: list[int]
    rows: list[list[int]]


def draw_pages(
    slots: list[int], num_pages: int, page_size: int, seed: int
) -> AppendPages:
    """Return requests whose pages have the given slots.

    Each page that is written belongs to one request. Requests begin with pages to which nothing is
    appended, if there are any.

    Args:
        slots: [tokens] different slots, each page id * page_size + offset.
        num_pages: AppendPages of the cache.
        page_size: Slots per page.
        seed: Seed of the choice of requests.
    """
    pick = Random(seed)
    written = list(dict.fromkeys(slot // page_size for slot in slots))
    pick.shuffle(written)
    free = [page for page in range(num_pages) if page not in set(written)]
    pick.shuffle(free)
    rows = [
        [free.pop() for _ in range(pick.choice([0, 1, 2])) if free]
        for _ in range(pick.randint(1, MOST_REQUESTS))
    ]
    at: dict[int, tuple[int, int]] = {}
    for page in written:
        req = pick.randrange(len(rows))
        at[page] = req, len(rows[req])
        rows[req].append(page)
    found = [(*at[slot // page_size], slot % page_size) for slot in slots]
    requests = [req for req, _, _ in found]
    return AppendPages(
        requests, [n * page_size + offset for _, n, offset in found], rows
    )


def paged(cache: Tensor, page_size: int) -> Tensor:
    """Return [num_pages, page_size, heads, elements] with the slots of a cache, in order.

    The last page is filled up with slots of zeros.
    """
    slots = cache.flatten(0, 1)
    count = -(-len(slots) // page_size)
    found = slots.new_zeros(count * page_size, *slots.shape[1:])
    found[: len(slots)] = slots
    return found.view(count, page_size, *slots.shape[1:])


def unpaged(pages: Tensor, like: Tensor) -> Tensor:
    """Return the slots of some pages as blocks of another size: the inverse of `paged`."""
    blocks, block_size = like.shape[:2]
    slots = pages.flatten(0, 1)[: blocks * block_size]
    return slots.view(blocks, block_size, *slots.shape[1:])


def append_inputs(
    definition: Definition,
    tokens: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots: list[int],
    seed: int,
) -> dict[str, Any]:
    """Return the inputs of an append, in the definition's order.

    Args:
        definition: The definition.
        tokens: New keys and values, [tokens, num_kv_heads, head_dim].
        caches: [num_pages, page_size, num_kv_heads, head_dim] keys and values.
        slots: [tokens] different slots.
        seed: Seed of the choice of requests.
    """
    device = tokens[0].device
    num_pages, page_size = caches[0].shape[:2]
    found = draw_pages(slots, num_pages, page_size, seed)

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    offsets = [0]
    for row in found.rows:
        offsets.append(offsets[-1] + len(row))
    ids = [page for row in found.rows for page in row]
    inputs: dict[str, Any] = {
        "append_key": tokens[0].contiguous(),
        "append_value": tokens[1].contiguous(),
        "batch_indices": ints(found.requests),
        "positions": ints(found.positions),
        "k_cache": caches[0].contiguous(),
        "v_cache": caches[1].contiguous(),
        # page ids outside of the cache are in memory after the last one
        "kv_indices": ints([*ids, *[PAST] * 8])[: len(ids)],
        "kv_indptr": ints(offsets),
    }
    return {name: inputs[name] for name in definition.inputs}


@dataclass(frozen=True)
class Placement:
    """Where some heads and elements of a write are in the tensors of a definition.

    Args:
        heads: The map of the heads.
        first: The first of these heads.
        parts: The elements of keys, and those of values.
        columns: The columns of the definition that these elements have.
        width: Elements per head of the definition.
    """

    heads: HeadMap
    first: int
    parts: tuple[slice, slice]
    columns: tuple[list[int], list[int]]
    width: int

    def put(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values with the heads and elements of the definition."""
        one, other = (
            take(
                spread(tensor[..., part], self.width, columns),
                tensor.dim() - 2,
                self.heads.kv_sources,
            )
            for tensor, part, columns in zip(
                pair, self.parts, self.columns, strict=True
            )
        )
        return one, other

    def take(self, found: tuple[Tensor, ...], results: list[Tensor]) -> None:
        """Store the pages of a definition in both caches; `results` are modified."""
        places = self.heads.query_places
        own = slice(self.first, self.first + len(places))
        for pages, result, part, columns in zip(
            found, results, self.parts, self.columns, strict=True
        ):
            narrow = pages[:, :, places][..., columns]
            result[:, :, own, part] = unpaged(narrow, result)


def placements(
    definition: Definition, count: int, widths: tuple[int, int], seed: int
) -> Iterator[Placement]:
    """Yield placements that together have all heads and elements of a write.

    Args:
        definition: The definition.
        count: KV heads of the write.
        widths: Elements per head of keys and of values.
        seed: Determines the order of heads and columns.
    """
    sizes = definition.constants
    most, width = sizes["num_kv_heads"], sizes["head_dim"]

    def part_of(size: int, begin: int) -> slice:
        begin = (
            begin if begin < size else 0
        )  # the shorter one: its first elements again
        return slice(begin, min(begin + width, size))

    for first in range(0, count, most):
        some = range(first, min(first + most, count))
        heads = map_heads(some, 1, most, seed + count)
        for begin in range(0, max(widths), width):
            parts = part_of(widths[0], begin), part_of(widths[1], begin)
            columns = [
                draw_columns(part.stop - part.start, width, seed + begin)
                for part in parts
            ]
            yield Placement(heads, first, parts, (columns[0], columns[1]), width)


def append_in_parts(
    definition: Definition,
    run: Callable[[dict[str, Any]], tuple[Tensor, ...]],
    pair: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
) -> None:
    """Write new keys and values, some heads and elements after another.

    Args:
        definition: The definition.
        run: The function of a solution: it takes the inputs, and returns both caches.
        pair: [tokens, heads, elements] new keys and values. Those past the end of the slot mapping
            are padding.
        caches: [num_blocks, block_size, heads, elements], modified in place.
        slot_mapping: The slot of each token. Tokens with a negative slot are not stored.
    """
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept].tolist()
    new = pair[0][kept], pair[1][kept]
    size = definition.constants["page_size"]
    pages = paged(caches[0], size), paged(caches[1], size)
    results = [cache.clone() for cache in caches]
    widths = pair[0].shape[2], pair[1].shape[2]
    for place in placements(definition, pair[0].shape[1], widths, len(slots)):
        both = place.put(new), place.put(pages)
        inputs = append_inputs(definition, *both, slots, seed=len(slots))
        place.take(run(inputs), results)
    for cache, result in zip(caches, results, strict=True):
        cache.copy_(result)

"""Calls of a definition: pagetwin's arguments as the definition's inputs.

A definition fixes the numbers of heads and the widths of latents. The cases of the laws have
others, mostly smaller ones. They are placed in tensors of the fixed sizes: each KV head of the case
is repeated on several heads of the definition, and each column of a latent goes to a column of the
definition, both in an order that differs from case to case.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..definitions import Definition

PAST = 2**31 - 1
"""Page id after the last one of a call, in memory that a kernel must not read."""


@dataclass(frozen=True)
class HeadMap:
    """Where the heads of a case are among the heads of a definition.

    Args:
        kv_sources: [num_kv_heads] the case's KV head of each head of the definition.
        query_sources: [num_qo_heads] the same for query heads.
        query_places: For each query head of the case, one head of the definition that has it.
    """

    kv_sources: list[int]
    query_sources: list[int]
    query_places: list[int]


def map_heads(heads: range, group: int, num_kv_heads: int, seed: int) -> HeadMap:
    """Return a map of some KV heads of a case to all heads of a definition.

    Args:
        heads: KV heads of the case, at most `num_kv_heads`.
        group: Query heads per KV head.
        num_kv_heads: KV heads of the definition.
        seed: Determines the order, if there are fewer heads than the definition has.
    """
    kv_sources = list(heads)
    if len(heads) < num_kv_heads:
        pick = Random(seed)
        kv_sources += pick.choices(heads, k=num_kv_heads - len(heads))
        pick.shuffle(kv_sources)
    query_sources = [kv * group + one for kv in kv_sources for one in range(group)]
    first = heads.start * group
    places = [query_sources.index(first + n) for n in range(len(heads) * group)]
    return HeadMap(kv_sources, query_sources, places)


def take(tensor: Tensor, axis: int, sources: list[int]) -> Tensor:
    """Return the given elements of an axis; the same tensor if these are all, in order."""
    if sources == list(range(tensor.shape[axis])):
        return tensor
    return tensor.index_select(axis, torch.tensor(sources, device=tensor.device))


def spread(tensor: Tensor, width: int, columns: list[int]) -> Tensor:
    """Return [..., width] with the elements of the last axis at some columns, and 0 elsewhere."""
    if columns == list(range(width)):
        return tensor
    found = tensor.new_zeros(*tensor.shape[:-1], width)
    found[..., columns] = tensor
    return found


def draw_columns(count: int, width: int, seed: int) -> list[int]:
    """Return different columns for some elements; the same ones in order if they fill the width."""
    if count == width:
        return list(range(width))
    return Random(seed).sample(range(width), count)


@dataclass(frozen=True)
class Lengths:
    """The lengths of a call, on the host.

    Args:
        starts: [reqs + 1] where the queries of each request start.
        keys: [reqs] keys of each request.
    """

    starts: list[int]
    keys: list[int]

    @property
    def tokens(self) -> int:
        """Queries of all requests."""
        return self.starts[-1]


def lengths_of(arguments: dict[str, Any]) -> Lengths:
    """Return the lengths of a call of an attention operation."""
    starts, keys = arguments["query_start_loc"], arguments["seq_lens"]
    return Lengths(starts.tolist(), keys.tolist())


def index_inputs(
    definition: Definition, lengths: Lengths, table: Tensor, page_size: int
) -> dict[str, Tensor]:
    """Return the inputs that say which queries and pages belong to each request.

    Args:
        definition: The definition.
        lengths: The lengths of the requests.
        table: [reqs, max_blocks] block table.
        page_size: Tokens per page. If keys are not paged, 1.
    """
    device = table.device

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    counts = [-(-keys // page_size) for keys in lengths.keys]
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    rows = [table[req, :count] for req, count in enumerate(counts)]
    ids = torch.cat([*rows, ints([PAST] * 8)]).int()[: offsets[-1]]
    last = [(keys - 1) % page_size + 1 if keys else 0 for keys in lengths.keys]
    found = {
        "qo_indptr": ints(lengths.starts),
        "kv_indptr": ints(offsets),
        "kv_indices": ids,
        "kv_last_page_len": ints(last),
    }
    return {name: value for name, value in found.items() if name in definition.inputs}


def ragged_rows(cache: Tensor, lengths: Lengths, table: Tensor) -> Tensor:
    """Return [total_kv, kv_heads, head_size], the rows of a cache request after request.

    NaN is in memory after the last row.
    """
    size = cache.shape[1]
    found = [
        cache[table[req, : -(-keys // size)].long()].flatten(0, 1)[:keys]
        for req, keys in enumerate(lengths.keys)
    ]
    past = cache.new_full((8, *cache.shape[2:]), torch.nan)
    return torch.cat([*found, past])[: sum(lengths.keys)]


def paged_inputs(
    definition: Definition, arguments: dict[str, Any], heads: HeadMap
) -> dict[str, Any]:
    """Return the inputs of a call of `paged_attention`, in the definition's order."""
    lengths, table = lengths_of(arguments), arguments["block_table"]
    query = arguments["query"][: lengths.tokens]
    keys, values = arguments["key_cache"], arguments["value_cache"]
    found: dict[str, Any] = {"q": take(query, 1, heads.query_sources).contiguous()}
    for names, cache in ((("k_cache", "k"), keys), (("v_cache", "v"), values)):
        paged, ragged = names
        if definition.family.is_paged:
            found[paged] = take(cache, 2, heads.kv_sources).contiguous()
        else:
            rows = ragged_rows(cache, lengths, table)
            found[ragged] = take(rows, 1, heads.kv_sources).contiguous()
    size = keys.shape[1] if definition.family.is_paged else 1
    found |= index_inputs(definition, lengths, table, size)
    scale = arguments.get("scale")
    found["sm_scale"] = float(query.shape[2] ** -0.5 if scale is None else scale)
    return {name: found[name] for name in definition.inputs}


def latent_inputs(
    definition: Definition,
    arguments: dict[str, Any],
    heads: list[int],
    columns: tuple[list[int], list[int]],
) -> dict[str, Any]:
    """Return the inputs of a call of `latent_decode_attention`, in the definition's order.

    Args:
        definition: The definition.
        arguments: The arguments of the call, by name.
        heads: [num_qo_heads] the case's head of each head of the definition.
        columns: The columns of the definition that the elements of a latent and of a rope key
            have.
    """
    lengths, table = lengths_of(arguments), arguments["block_table"]
    nope = arguments["q_nope"][: lengths.tokens]
    rope = arguments["q_pe"][: lengths.tokens]
    w_uk, cache = arguments["w_uk"], arguments["kv_cache"]
    rank = w_uk.shape[2]
    # step: project the queries into the space of the latents
    query = torch.einsum("thn,hnl->thl", nope.double(), w_uk.double()).to(nope.dtype)
    widths = definition.constants["head_dim_ckv"], definition.constants["head_dim_kpe"]

    def placed(tensor: Tensor, part: int) -> Tensor:
        return spread(tensor, widths[part], columns[part]).contiguous()

    found: dict[str, Any] = {
        "q_nope": placed(take(query, 1, heads), 0),
        "q_pe": placed(take(rope, 1, heads), 1),
        "ckv_cache": placed(cache[..., :rank], 0),
        "kpe_cache": placed(cache[..., rank:], 1),
    }
    found |= index_inputs(definition, lengths, table, cache.shape[1])
    scale = arguments.get("scale")
    width = nope.shape[2] + rope.shape[2]
    found["sm_scale"] = float(width**-0.5 if scale is None else scale)
    return {name: found[name] for name in definition.inputs}

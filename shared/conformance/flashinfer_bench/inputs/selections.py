"""Attention over selected slots as the inputs of a definition, whose keys are latents.

A latent is the value and the first part of the key. Keys and values that are not latents become
latents: values and keys have columns of their own, and the query is 0 in the columns of the values.
Slots are numbered one after another, so they are cut into pages of the definition's size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..definitions import Definition
from .calls import draw_columns, spread, take


@dataclass(frozen=True)
class Latents:
    """Queries and a cache of one KV head, in the widths of a definition.

    Args:
        q_nope: [tokens, heads, head_dim_ckv].
        q_pe: [tokens, heads, head_dim_kpe].
        ckv_cache: [num_pages, page_size, head_dim_ckv].
        kpe_cache: [num_pages, page_size, head_dim_kpe].
        value_columns: The columns of `ckv_cache` that have the elements of the values.
    """

    q_nope: Tensor
    q_pe: Tensor
    ckv_cache: Tensor
    kpe_cache: Tensor
    value_columns: list[int]


def place_latents(
    definition: Definition, query: Tensor, caches: tuple[Tensor, Tensor], seed: int
) -> Latents:
    """Return the queries and the cache of a KV head in columns of a definition.

    Args:
        definition: The definition.
        query: [tokens, heads, head_size].
        caches: [num_blocks, block_size, head_size] keys, and values.
        seed: Seed of the choice of columns.

    Raises:
        ValueError: They are wider than the definition.
    """
    sizes = definition.constants
    rank, rope = sizes["head_dim_ckv"], sizes["head_dim_kpe"]
    width, value = query.shape[2], caches[1].shape[2]
    keys, values = (
        paged_rows(cache, sizes["page_size"], torch.nan) for cache in caches
    )
    are_latents = value < width and caches[0].data_ptr() == caches[1].data_ptr()
    if are_latents and value <= rank and width - value <= rope:
        columns = draw_columns(value, rank, seed)
        rest = draw_columns(width - value, rope, seed)
        return Latents(
            spread(query[..., :value], rank, columns),
            spread(query[..., value:], rope, rest),
            spread(values, rank, columns),
            spread(keys[..., value:], rope, rest),
            columns,
        )
    if value + width > rank:
        raise ValueError(
            f"keys of {width} and values of {value} elements: expected at most {rank} together,"
            f" or latents of {rank} with rope keys of {rope}"
        )
    columns = draw_columns(value + width, rank, seed)
    # values and keys side by side; the query is 0 where the values are
    both = torch.cat([values, keys], dim=-1)
    nothing = query.new_zeros(*query.shape[:2], value)
    return Latents(
        spread(torch.cat([nothing, query], dim=-1), rank, columns),
        query.new_zeros(*query.shape[:2], rope),
        spread(both, rank, columns),
        keys.new_zeros(*keys.shape[:2], rope),
        columns[:value],
    )


def paged_rows(cache: Tensor, page_size: int, fill: float) -> Tensor:
    """Return [num_pages, page_size, elements] with the slots of a cache, in order.

    Args:
        cache: [num_blocks, block_size, elements].
        page_size: Slots per page.
        fill: What the slots after the last one hold.
    """
    slots = cache.flatten(0, 1)
    count = -(-len(slots) // page_size)
    found = slots.new_full((count * page_size, slots.shape[1]), fill)
    found[: len(slots)] = slots
    return found.view(count, page_size, slots.shape[1])


def sparse_inputs(
    definition: Definition,
    latents: Latents,
    slots: Tensor,
    heads: list[int],
    scale: float,
) -> dict[str, Any]:
    """Return the inputs of a call of `sparse_attention`, in the definition's order.

    Args:
        definition: The definition.
        latents: Queries and cache of one KV head.
        slots: [tokens, selected] int32, at most `topk` columns.
        heads: [num_qo_heads] the query head of the case of each head of the definition.
        scale: Factor of the scores.
    """
    more = definition.constants["topk"] - slots.shape[1]
    found: dict[str, Any] = {
        "q_nope": take(latents.q_nope, 1, heads).contiguous(),
        "q_pe": take(latents.q_pe, 1, heads).contiguous(),
        "ckv_cache": latents.ckv_cache.contiguous(),
        "kpe_cache": latents.kpe_cache.contiguous(),
        "sparse_indices": torch.nn.functional.pad(slots, (0, more), value=-1),
        "sm_scale": float(scale),
    }
    return {name: found[name] for name in definition.inputs}

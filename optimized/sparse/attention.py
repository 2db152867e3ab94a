"""Sparse attention: each query attends to the cache slots that it names.

The kernels are those of `paged_attention`. They get the cache as blocks of one slot, a view of the
same memory, and each token as a request of one query, whose row of the block table is its row of
slots. Nothing is gathered. Slots are moved to the front of their row on the device, and the host
reads no lengths. So a captured CUDA graph may contain the call. Records of latents have a kernel
that finds them by slots, and decodes a tile of them in registers.
"""

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from ...contract.argument_kinds import INT32
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.kinds import PAD_SLOT_ID
from ...contract.latent_formats import find_record_heads
from ...contract.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    Query,
    Selected,
    TokenRequests,
    ValueCache,
)
from ...validation import values_checked
from ...validation.sparse import check_convert_indices, check_sparse_attention
from ..attention.paged import paged_attention
from ..dispatch.dispatch import reject_compute_dtype
from ..kernels.latent_records.attend import attend_to_records, check_record_queries
from ..kernels.sparse.move_to_front import move_to_front
from ..runtime.launcher import check_launch
from ..runtime.operators import operator


@operator()
def convert_req_index_to_global_index(
    req_id: TokenRequests,
    block_table: BlockTable,
    token_indices: Selected,
    block_size: int,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    dcp_kv_cache_interleave_size: int = 1,
    compact_valid_to_front: bool = False,
) -> tuple[Selected, TokenRequests]:
    """Return the cache slots of the keys that each token selected, and how many it has."""
    check_convert_indices(
        req_id, block_table, token_indices, block_size, dcp_world_size, dcp_rank,
        dcp_kv_cache_interleave_size, contents=values_checked(token_indices),
    )  # fmt: skip
    reqs, max_blocks = block_table.shape
    if not token_indices.numel() or not block_table.numel():
        return torch.full_like(token_indices, PAD_SLOT_ID), torch.zeros_like(req_id)
    # step: find the rank of the position, and its position there
    position, interleave = token_indices, dcp_kv_cache_interleave_size
    turn, offset = position // interleave, position % interleave
    local = turn // dcp_world_size * interleave + offset
    is_here = turn % dcp_world_size == dcp_rank
    # step: skip what has no slot
    owner = req_id.long()[:, None]
    has_slot = (owner >= 0) & (owner < reqs) & (position >= 0) & is_here
    has_slot &= local // block_size < max_blocks
    # step: look up the slot in the request's row
    owner, local = owner.clamp(0, reqs - 1), torch.where(has_slot, local, 0)
    block_id = block_table[owner, local // block_size]
    slots = block_id * block_size + local % block_size
    slots = torch.where(has_slot, slots, PAD_SLOT_ID)
    count = has_slot.sum(1, dtype=torch.int32)
    return move_to_front(slots) if compact_valid_to_front else slots, count


@operator(out=["out", "lse"], takes_records=True)
def sparse_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    slots: Selected,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
    req_id: TokenRequests | None = None,
    block_table: BlockTable | None = None,
) -> Output:
    """Return attention of each token over the cache slots that its row names.

    Raises:
        NotImplementedError: what `paged_attention` does not compute, or keys and values whose
            strides between blocks and slots have different ratios.
    """
    if compute_dtype != torch.float32:
        reject_compute_dtype(compute_dtype)
    check_sparse_attention(
        query, key_cache, value_cache, slots, out, lse, options, req_id, block_table,
        contents=values_checked(query), scale=scale,
    )  # fmt: skip
    tokens, selected = slots.shape
    form = find_record_heads(key_cache, value_cache)
    if form is not None:
        check_launch(key_cache)
        check_record_queries(query, "query")
    # step: leave out the entries without a slot
    lens = (slots >= 0).sum(1, dtype=torch.int32)
    named = move_to_front(slots).clamp(min=0)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=query.device)
    if form is not None:
        scale = query.shape[2] ** -0.5 if scale is None else scale
        mean = attend_to_records(
            form, query.contiguous(), key_cache[:, :, 0], named, starts, lens, 1, selected, scale,
            None, lse, names_slots=True,
        )  # fmt: skip
        return mean if out is None else out.copy_(mean)
    # step: gather the keys and values of the slots
    block_step, slot_step = _steps(key_cache, value_cache)
    block_size = key_cache.shape[1]
    rows = named // block_size * block_step + named % block_size * slot_step
    # step: compute the scaled dot products of the query and the keys
    # step: turn scores into weights (softmax)
    # step: average the values by the weights
    return paged_attention(
        query, _blocks_of_one(key_cache, block_step, slot_step),
        _blocks_of_one(value_cache, block_step, slot_step), rows, starts, lens, 1, selected,
        scale=scale, out=out, lse=lse, options=replace(options, causal=False),
    )  # fmt: skip


def _steps(key_cache: Tensor, value_cache: Tensor) -> tuple[int, int]:
    """Return how many blocks of one are from one block to the next, and from slot to slot.

    In a cache without gaps they are the block size and 1. If a head's slots are contiguous, blocks
    of one overlap, because the next slot of a head comes before the next head.
    """
    steps = []
    for cache in (key_cache, value_cache):
        block, slot = (
            stride if size > 1 else 0
            for stride, size in zip(cache.stride()[:2], cache.shape[:2], strict=True)
        )
        unit = gcd(block, slot) or 1
        steps.append((block // unit, slot // unit))
    if steps[0] != steps[1]:
        raise NotImplementedError(
            f"key_cache has strides {list(key_cache.stride())} and value_cache"
            f" {list(value_cache.stride())}: expected the same ratio of the strides between"
            " blocks and between slots, so that a number tells the key and the value of a slot"
        )
    return steps[0]


def _blocks_of_one(cache: Tensor, block_step: int, slot_step: int) -> Tensor:
    """Return [blocks of one, 1, kv_heads, head_size], a view of the same memory.

    Args:
        cache: [num_blocks, block_size, kv_heads, head_size].
        block_step, slot_step: What `_steps` returns.
    """
    num_blocks, block_size = cache.shape[:2]
    number = 0
    if cache.shape[0] and cache.shape[1]:
        number = 1 + (num_blocks - 1) * block_step + (block_size - 1) * slot_step
    if number > INT32:
        raise NotImplementedError(
            f"the cache has {number} blocks of one: expected at most {INT32}, as block tables"
            " have 32 bits"
        )
    block, slot, head, element = cache.stride()
    unit = slot // slot_step if slot_step else block // (block_step or 1)
    return cache.as_strided((number, 1, *cache.shape[2:]), (unit, unit, head, element))

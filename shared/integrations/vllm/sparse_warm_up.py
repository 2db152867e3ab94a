"""Warm-up of sparse layers inside vLLM: each token of a step is a request with one query."""

from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from .warm_up import StepBounds, warm_up_layers

MOST_TOKENS = 1025
"""More tokens of a step launch the same kernels."""
RECORD_TOKENS = (1, 2, 16, 512)
"""Tokens of the steps whose kernels over records are compiled. Triton compiles one for a stride of
1, one for multiples of 16 and one for other numbers. The last step has no splits."""


def warm_up_sparse(
    run: Any,
    caches: tuple[Tensor, Tensor],
    query: Tensor,
    buffer_size: tuple[int, ...],
    scale: float,
    options: AttentionOptions,
    bounds: StepBounds,
) -> None:
    """Compile the kernels of sparse layers, once per process and kind of layer.

    Args:
        run: the implementation.
        caches: keys and values, [num_blocks, block_size, 1, elements], as calls pass them.
        query: [1, heads, width] in the dtype of the queries.
        buffer_size: most tokens of a step, and positions that a token selects.
        scale, options: of the calls.
        bounds: upper bounds of the engine's steps.
    """
    tokens, selected = buffer_size
    nothing = torch.full((1, selected), -1, dtype=torch.int32, device=query.device)
    req_id, table = nothing.new_zeros(1), nothing.new_zeros(1, 1)
    run.convert_req_index_to_global_index(req_id, table, nothing, caches[0].shape[1])
    if caches[0].dtype == torch.uint8:
        for count in RECORD_TOKENS:
            rows = query.new_zeros(min(count, tokens), *query.shape[1:])
            slots = torch.full(
                (len(rows), selected), -1, dtype=torch.int32, device=rows.device
            )
            run.sparse_attention(rows, *caches, slots, scale, options=options)
        return
    bounds = replace(
        bounds,
        max_num_reqs=min(tokens, MOST_TOKENS),
        max_query_len=1,
        max_seq_len=selected,
        decode_query_len=1,
        has_cascades=False,
    )
    key, value = map(_as_slots, caches)
    warm_up_layers(
        run.name, (key, value), query.shape[1], query.dtype,
        [replace(options, causal=False)], bounds, scale=scale,
    )  # fmt: skip
    # rows of slots become a table by a kernel of their own
    run.sparse_attention(query, *caches, nothing, scale, options=options)


def _as_slots(cache: Tensor) -> Tensor:
    """Return a cache as blocks of one slot, as the kernels of sparse attention read it."""
    block, slot, head, element = cache.stride()
    unit = gcd(block, slot)
    number = 1 + ((cache.shape[0] - 1) * block + (cache.shape[1] - 1) * slot) // unit
    size = (number, 1, *cache.shape[2:])
    return cache.as_strided(size, (unit, unit, head, element))

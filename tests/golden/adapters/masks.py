"""Masks: the keys to which each query attends, seen from the result of attention.

Queries and keys are zero, so all visible keys have the same weight. The values are one-hot in their
slot, so a row of the output is the row of weights.
"""

from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from torch import Tensor

from golden.adapters.attention import starts_of
from golden.cases import SKIP, adapter

PIECE = 256
"""Elements of a head at most, so that the kernels take any number of slots."""
BLOCK_SIZE = 16


def visible_slots(
    twin: Any,
    query_lens: list[int],
    seq_lens: list[int],
    table: Tensor,
    block_size: int,
    options: AttentionOptions,
    num_heads: int = 1,
) -> list[list[int]]:
    """Return the slots that each new token attends to, the same ones for every head.

    Args:
        twin: the operations.
        query_lens, seq_lens: new tokens and tokens of each request.
        table: [reqs, max_blocks] int32.
        block_size: slots in a block.
        options: the masks.
        num_heads: query heads of the one KV head.
    """
    blocks = int(table.max()) + 1 if table.numel() else 0
    slots, tokens = blocks * block_size, sum(query_lens)
    seen: list[list[int]] = [[] for _ in range(tokens)]
    total = torch.zeros(tokens, num_heads)
    eye = torch.eye(slots).view(blocks, block_size, 1, slots)
    for first in range(0, slots if tokens else 0, PIECE):
        values = eye[..., first : first + PIECE].contiguous()
        out = twin.paged_attention(
            torch.zeros(tokens, num_heads, values.shape[-1]),
            torch.zeros_like(values),
            values,
            table,
            starts_of(query_lens),
            torch.tensor(seq_lens, dtype=torch.int32),
            max(query_lens),
            max(seq_lens),
            options=options,
        )
        total += out.sum(-1)
        for row, weights in zip(seen, out, strict=True):
            assert ((weights > 0) == (weights[0] > 0)).all(), "heads differ"
            found = weights[0].nonzero().flatten().tolist()
            row += [first + slot for slot in found]
    has_keys = torch.tensor([float(bool(row)) for row in seen])[:, None]
    assert torch.allclose(total, has_keys.expand_as(total)), (
        "weights do not add up to 1"
    )
    return seen


@adapter("paged_block_diagonal_causal_mask", on_device=True)
def paged_mask(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """xFormers' mask against what our attention visits."""
    query_lens, seq_lens = inputs["q_seqlen"], inputs["kv_seqlen"]
    table, page = inputs["block_tables"].to(torch.int32), inputs["page_size"]
    options = AttentionOptions(causal=inputs.get("causal", True))
    seen = visible_slots(twin, query_lens, seq_lens, table, page, options)
    width = table.shape[1] * page
    slots = (int(table.max()) + 1) * page if table.numel() else 0
    return {
        "class": SKIP,
        "q_seqstart": starts_of(query_lens),
        "k_seqlen": seq_lens,
        "k_padding": width,
        "k_seqstart": [width * req for req in range(len(seq_lens) + 1)],
        "page_size": page,
        "block_tables": inputs["block_tables"],
        "materialized_shape": [sum(query_lens), slots],
        "only_zero_or_minus_inf": True,
        "visible_physical_keys": seen,
    }


@adapter("v033_mm_prefix_rswa_visible_keys", on_device=True)
@adapter("v033_unified_attention_masks", on_device=True)
def visible_keys(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    query_lens, seq_lens = inputs["query_lens"], inputs["seq_lens"]
    # a row of blocks per request, so that a slot says request and position
    width = -(-max(seq_lens) // BLOCK_SIZE)
    table = torch.arange(width * len(seq_lens), dtype=torch.int32).view(-1, width)
    window, causal = inputs["sliding_window"], inputs["causal"]
    lookback = inputs.get("chunk_lookback")
    is_chunked = window is not None and lookback is not None and lookback >= 0
    prompts = inputs.get("rswa_window") is not None
    if prompts:
        window = inputs["rswa_window"]
    options = AttentionOptions(
        causal=torch.tensor(causal) if isinstance(causal, list) else causal,
        sliding_window=None if is_chunked else window,
        attention_chunk_size=window // (lookback + 1) if is_chunked else None,
        query_ranges=(ranges_of_prompts if prompts else ranges_of_tokens)(twin, inputs),
    )
    heads = inputs["query_heads_per_kv_head"]
    seen = visible_slots(twin, query_lens, seq_lens, table, BLOCK_SIZE, options, heads)
    first_slots = [
        req * width * BLOCK_SIZE
        for req, new in enumerate(query_lens)
        for _ in range(new)
    ]
    pairs = zip(seen, first_slots, strict=True)
    return {
        "visible": [[slot - first for slot in row] for row, first in pairs],
        # wrong in vLLM: keys in the sum of the weights that do not exist or have no value
        "vllm_phantom_keys": SKIP,
        "vllm_value_dropped": SKIP,
    }


def ranges_of_tokens(twin: Any, inputs: dict[str, Any]) -> Tensor | None:
    """Return the range of each new token; (-1, -1) outside of all images.

    Ranges that share a token have one range together, so each is filled in by itself. A request
    has as many recorded ranges as the others.
    """
    recorded = inputs.get("mm_prefix_range")
    if recorded is None:
        return None
    found = torch.full((sum(inputs["query_lens"]), 2), -1, dtype=torch.int32)
    for index in range(recorded.shape[1]):
        out = torch.full_like(found, -1)
        twin.fill_mm_prefix_query_ranges(
            out,
            {req: [tuple(row[index])] for req, row in enumerate(recorded.tolist())},
            starts_of(inputs["query_lens"]),
            torch.tensor(inputs["seq_lens"], dtype=torch.int32),
            inputs["sliding_window"],
            inputs.get("mm_prefix_clamp_sliding_window", False),
        )
        # no range is -1: the later first position is that of the only range
        first = torch.where(
            (found < 0) | (out < 0), found.maximum(out), found.minimum(out)
        )
        found = torch.stack([first[:, 0], found.maximum(out)[:, 1]], 1)
    return found


def ranges_of_prompts(twin: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the range of each new token that its window does not hide."""
    out = torch.empty(sum(inputs["query_lens"]), 2, dtype=torch.int32)
    twin.fill_rswa_query_ranges(
        out,
        inputs["rswa_prefix_lens"],
        starts_of(inputs["query_lens"]),
        torch.tensor(inputs["seq_lens"], dtype=torch.int32),
    )
    return out

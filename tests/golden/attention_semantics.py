"""Executable semantics of vLLM's attention functions: models, as in semantics.py.

Where a function reads past the end of a row, what it reads is not modelled: such rows are zeros.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .semantics import Model

ATTENTION_MODELS: dict[str, Model] = {}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
"""As recorded."""


def models(file: str) -> Callable[[Model], Model]:
    """Register the model of a case file."""

    def register(model: Model) -> Model:
        ATTENTION_MODELS[file] = model
        return model

    return register


def attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    bias: Tensor | None = None,
    sinks: Any = None,
) -> Tensor:
    """Return the output of one query, the last of its sequence.

    Args:
        query: [heads, head_size].
        keys, values: [keys, kv_heads, head_size].
        scale: factor of the scores.
        window: Optional. The number of visible keys. If None, all.
        cap: Optional. Soft cap of the scores. If None or 0, none.
        bias: Optional. [heads, keys], added to the scores. If None, none.
        sinks: Optional. A score of each head, without a value. If None, none.
    """
    group, hidden = (
        len(query) // keys.shape[1],
        max(0, len(keys) - (window or len(keys))),
    )
    keys, values = (
        states.double().repeat_interleave(group, 1) for states in (keys, values)
    )
    scores = torch.einsum("hd,khd->hk", query.double(), keys) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    scores[:, :hidden] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, torch.tensor(sinks).double()[:, None]], 1)
    weights = scores.softmax(-1)[:, : len(keys)]
    return torch.einsum("hk,khd->hd", weights, values).float()


def cached(cache: Tensor, row: Tensor, count: int) -> Tensor:
    """Return the first keys or values of a row; zeros where the row has ended.

    Args:
        cache: [blocks, block_size, kv_heads, head_size].
        row: block ids.
        count: number of keys.
    """
    slots = cache[row.long()].flatten(0, 1)[:count]
    return torch.nn.functional.pad(slots, (0, 0, 0, 0, 0, count - len(slots)))


def tokens_of(starts: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the request, the index in its new tokens, and the index in the batch of each token."""
    for req, (begin, end) in enumerate(itertools.pairwise(starts)):
        for index in range(int(end - begin)):
            yield req, index, int(begin) + index


@models("unified_attention_paged")
def unified_attention(inputs: dict[str, Any]) -> dict[str, Any]:
    assert inputs["causal"]
    starts, lens = inputs["cu_seqlens_q"], inputs["seqused_k"]
    left, out = inputs["window_size"][0], torch.zeros_like(inputs["q"])
    for req, index, token in tokens_of(starts):
        context = int(lens[req] - starts.diff()[req])
        count, bias = max(0, context + index + 1), None
        if inputs["alibi_slopes"] is not None:
            slopes = torch.tensor(inputs["alibi_slopes"]).double()
            bias = slopes[:, None] * (torch.arange(count) - context)
        keys, values = (
            cached(inputs[name], inputs["block_table"][req], count) for name in "kv"
        )
        out[token] = attended(
            inputs["q"][token],
            keys,
            values,
            inputs["softmax_scale"],
            None if left < 0 else left + 1,
            inputs["softcap"],
            bias,
            inputs["sinks"],
        )
    return {"out": out, "tolerance": TOLERANCE}


@models("context_attention_fwd_v0_paged")
def context_attention(inputs: dict[str, Any]) -> dict[str, Any]:
    slopes, sinks = inputs["alibi_slopes"], inputs["sinks"]
    assert slopes is None or sinks is None
    starts = inputs["b_start_loc"]
    keys_of = inputs["k_cache"].permute(0, 3, 1, 2, 4).flatten(3)
    values_of = inputs["v_cache"].permute(0, 3, 1, 2)
    window = max(inputs["sliding_window"] or 0, 0) if slopes is None else 0
    out = torch.full_like(inputs["q"], inputs["output_fill"])
    for req, index, token in tokens_of(starts):
        new = int(starts.diff()[req])
        context = max(0, int(inputs["b_seq_len"][req]) - new)
        if inputs["skip_decode"] and new == 1:
            continue
        bias = None
        if slopes is not None:
            distances = torch.arange(-context - index, 1)
            bias = torch.tensor(slopes).double()[:, None] * distances
        own = slice(int(starts[req]), token + 1)
        keys = torch.cat(
            [cached(keys_of, inputs["b_loc"][req], context), inputs["k"][own]]
        )
        values = torch.cat(
            [cached(values_of, inputs["b_loc"][req], context), inputs["v"][own]]
        )
        scale = inputs["sm_scale"] or inputs["q"].shape[-1] ** -0.5
        out[token] = attended(
            inputs["q"][token], keys, values, scale, window or None, None, bias, sinks
        )
    return {"o": out, "tolerance": TOLERANCE}


@models("xformers_impl_forward")
def xformers_layer(inputs: dict[str, Any]) -> dict[str, Any]:
    common, impl = inputs["common_attn_metadata"], inputs["impl"]
    is_run = not inputs["attn_metadata_is_none"]
    decodes = count_decodes(inputs) if is_run else 0
    assert inputs["output_given"]
    if not inputs["output_scale"] is inputs["output_block_scale"] is None:
        raise ValueError("vLLM raises NotImplementedError")
    out, cache = torch.full_like(inputs["query"], -7.0), inputs["kv_cache"].clone()
    slots = common["slot_mapping"] if is_run else common["slot_mapping"][:0]
    kept = (slots >= 0).nonzero().flatten()
    for half, new in enumerate((inputs["key"], inputs["value"])):
        cache[half].flatten(0, 1)[slots[kept]] = new[kept]
    starts = common["query_start_loc_cpu"]
    for req, index, token in tokens_of(starts) if is_run else ():
        count = int(common["seq_lens_cpu"][req] - starts.diff()[req]) + index + 1
        row, is_decode = common["block_table_tensor"][req], req < decodes
        keys, values = (cached(half, row, count) for half in cache)
        out[token] = attended(
            inputs["query"][token],
            keys,
            values,
            impl["scale"],
            None if is_decode else impl["sliding_window"],
            None if is_decode else impl["logits_soft_cap"],
        )
    return {"output": out, "num_written_slots": len(kept), "tolerance": TOLERANCE}


def count_decodes(inputs: dict[str, Any]) -> int:
    """Return how many requests vLLM's builder counts as decodes.

    Raises:
        AssertionError: A short request follows a prefill, or a decode has more keys than its row.
    """
    common, size = inputs["common_attn_metadata"], inputs["kv_cache"].shape[2]
    lens: list[int] = common["query_start_loc_cpu"].diff().tolist()
    decodes = len(lens)
    if common["max_query_len"] > 1:
        longer = [req for req, count in enumerate(lens) if count > 1]
        decodes = longer[0] if longer else decodes
        assert len(longer) == len(lens) - decodes
    room = common["block_table_tensor"].shape[1] * size
    assert all(length <= room for length in common["seq_lens_cpu"][:decodes].tolist())
    return decodes

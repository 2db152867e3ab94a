"""Attention, cache writes and partial results."""

import math
from typing import Any

import torch
from torch import Tensor

from golden.deviations import deviation

UNIFIED = "unified_attention_paged"


# ---- batches that contradict themselves


def contradictions(inputs: dict[str, Any]) -> set[str]:
    """Return in which ways the lengths of a batch contradict each other."""
    queries = inputs["cu_seqlens_q"].diff().tolist()
    keys, table = inputs["seqused_k"].tolist(), inputs["block_table"]
    room = table.shape[1] * inputs["k"].shape[1]
    found = set()
    if any(query > key for query, key in zip(queries, keys, strict=True)):
        found.add("queries")
    if max(keys, default=0) > room:
        found.add("row")
    if max(queries, default=0) > inputs["max_seqlen_q"]:
        found.add("max_seqlen_q")
    if not max(keys, default=0) <= inputs["max_seqlen_k"] <= room:
        found.add("max_seqlen_k")
    return found


@deviation(
    UNIFIED, fields=["raises"], right="a ValueError or IndexError for the number"
)
def lengths_contradict_each_other(inputs: dict[str, Any]) -> bool:
    """vLLM's kernel reads past a row, hides all keys from queries before the sequence, and does
    not compare the maxima."""
    return bool(inputs["causal"]) and bool(contradictions(inputs))


@deviation("decode_attention_fwd_paged", fields=["raises"], right="raises")
def a_decode_has_no_keys_or_too_many(inputs: dict[str, Any]) -> bool:
    """vLLM's kernel divides by a weight of 0, or reads past the end of a row."""
    room = inputs["req_to_token"].shape[1] * inputs["k_buffer"].shape[1]
    return any(not 0 < each <= room for each in inputs["b_seq_len"].tolist())


# ---- cache writes


def stored(inputs: dict[str, Any]) -> list[int]:
    return [slot for slot in inputs["slot_mapping"].tolist() if slot >= 0]


@deviation("reshape_and_cache_flash", fields=["raises"], right="a ValueError")
def two_tokens_have_one_slot(inputs: dict[str, Any]) -> bool:
    """vLLM writes both tokens to the slot, in any order."""
    slots = stored(inputs)
    is_written = inputs["layout"] != "HND" or inputs["cache_shape"][1] == 1
    return is_written and len(set(slots)) < len(slots)


@deviation("reshape_and_cache_flash", fields=["raises"], right="any strides")
def a_token_is_not_contiguous(inputs: dict[str, Any]) -> bool:
    """vLLM's Triton version rejects a cache whose heads are not contiguous per token."""
    slots = stored(inputs)
    is_strided = inputs["layout"] == "HND" and inputs["cache_shape"][1] > 1
    return is_strided and len(set(slots)) == len(slots)


# ---- partial results


def read_parts(outputs: Tensor, lses: Tensor, is_empty: Tensor) -> Tensor:
    """Return the unnormalized sum of the parts that are not empty.

    Args:
        outputs: [parts, tokens, heads, size].
        lses, is_empty: [parts, tokens, heads, 1].
    """
    known = torch.where(is_empty, -torch.inf, lses)
    top = known.amax(0)
    weights = torch.exp(known - torch.where(top.isinf(), 0.0, top))
    return torch.where(is_empty, 0.0, weights * outputs).sum(0)


def has_unread_nan(outputs: Tensor, lses: Tensor, is_empty: Tensor) -> Tensor:
    """Return where an empty part gives NaN in vLLM, although the others give a number."""
    read = read_parts(outputs, lses, is_empty)
    return ((~outputs.isfinite() & is_empty) & ~read.isnan()).any(0)


def parts(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return both outputs, their log-sum-exps, and whether each part is empty."""
    lses = torch.stack([inputs["prefix_lse"], inputs["suffix_lse"]])
    lses = lses.transpose(1, 2)[..., None]
    outputs = torch.stack([inputs["prefix_output"], inputs["suffix_output"]])
    count = inputs.get("prefill_tokens_with_context")
    if count is not None:  # later tokens are copied
        outputs, lses = outputs[:, :count], lses[:, :count]
    return outputs, lses, lses.isinf()


@deviation(
    "merge_attn_states_triton_0_10_2",
    fields=["output", "output_lse"],
    right="0 and -inf, as in 0.33",
)
def both_parts_are_empty(inputs: dict[str, Any]) -> bool:
    """vLLM's kernel of 0.10.2 gives NaN where both log-sum-exps are infinite."""
    _, _, is_empty = parts(inputs)
    return bool(is_empty.all(0).any())


@deviation(
    "merge_attn_states_triton_0_10_2",
    "merge_attn_states_torch",
    fields=["output"],
    right="the output of an empty part is not read",
)
def an_empty_part_is_not_finite(inputs: dict[str, Any]) -> bool:
    """vLLM multiplies an infinite or NaN output by a weight of 0, which gives NaN."""
    outputs, lses, is_empty = parts(inputs)
    found = has_unread_nan(outputs, lses, is_empty)
    return bool((found & ~is_empty.all(0)).any())


@deviation(
    "lse_weighted_combine",
    fields=["result"],
    right="the output of an empty part is not read",
)
def an_empty_rank_is_not_finite(inputs: dict[str, Any]) -> bool:
    """vLLM multiplies an infinite or NaN output by a weight of 0, which gives NaN."""
    lses = inputs["lses"][..., None]
    if not inputs["is_lse_base_on_e"]:
        lses = lses * math.log(2)
    is_empty = ~lses.isfinite()
    return bool(has_unread_nan(inputs["outputs"], lses, is_empty).any())


# ---- the xFormers layer


def decode_output(inputs: dict[str, Any], uses_options: bool) -> Tensor:
    """Return the output of the decodes, with or without the window and the soft cap."""
    impl, common = inputs["impl"], inputs["common_attn_metadata"]
    cache = inputs["kv_cache"].clone().flatten(1, 2)  # [2, slots, kv_heads, head_size]
    slots = common["slot_mapping"]
    kept = (slots >= 0).nonzero().flatten()
    for half, new in enumerate((inputs["key"], inputs["value"])):
        cache[half, slots[kept]] = new[kept]
    size, group = inputs["kv_cache"].shape[2], impl["num_heads"] // impl["num_kv_heads"]
    window = impl["sliding_window"] if uses_options else None
    cap = impl["logits_soft_cap"] if uses_options else None
    rows = []
    for req, begin in enumerate(common["query_start_loc_cpu"].tolist()[:-1]):
        if common["query_start_loc_cpu"][req + 1] - begin != 1:
            break
        seq_len = int(common["seq_lens_cpu"][req])
        positions = torch.arange(seq_len)[max(0, seq_len - window) if window else 0 :]
        blocks = common["block_table_tensor"][req].long()[positions // size]
        keys, values = cache[:, blocks * size + positions % size]
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
        scores = (
            torch.einsum("hd,khd->hk", inputs["query"][begin], keys) * impl["scale"]
        )
        scores = cap * torch.tanh(scores / cap) if cap else scores
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(rows) if rows else torch.zeros(0)


@deviation(
    "xformers_impl_forward",
    fields=["output"],
    right="decodes and prefills use the same options",
)
def options_change_a_decode(inputs: dict[str, Any]) -> bool:
    """vLLM's decodes ignore the window and the soft cap, which its prefills use."""
    impl = inputs["impl"]
    has_options = impl["sliding_window"] is not None or impl["logits_soft_cap"]
    is_run = inputs["output_given"] and not inputs["attn_metadata_is_none"]
    is_plain = inputs["output_scale"] is None and inputs["output_block_scale"] is None
    if not (has_options and is_run and is_plain):
        return False
    with_options = decode_output(inputs, uses_options=True)
    without = decode_output(inputs, uses_options=False)
    return not torch.allclose(with_options, without, rtol=1e-4, atol=2e-5)

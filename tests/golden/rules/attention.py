"""Attention, cache writes and partial results."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from golden.deviations import deviation
from golden.rules.layer import (
    first_prefill,
    makes_a_mask,
    outgrows_its_row,
    query_lens,
    trusts_its_maximum,
)

UNIFIED = "unified_attention_paged"
FORWARD = "xformers_impl_forward"


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


@deviation(
    UNIFIED,
    fields=["out"],
    right="a bias is relative to its query, so the weight of a sink is that of any chunking",
)
def a_sink_is_beside_slopes(inputs: dict[str, Any]) -> bool:
    """vLLM's bias is relative to the first new token of a request, so that the weight of a sink
    depends on where a chunk begins."""
    if inputs["alibi_slopes"] is None or inputs["sinks"] is None:
        return False
    is_later = bool((inputs["cu_seqlens_q"].diff() > 1).any())
    is_taken = bool(inputs["causal"]) and not contradictions(inputs)
    return is_taken and is_later and any(map(bool, inputs["alibi_slopes"]))


# ---- new tokens after a cached context

CONTEXT = "context_attention_fwd_v0_paged"


def contexts(inputs: dict[str, Any]) -> list[int]:
    """Return the number of cached tokens of each request."""
    found: list[int] = (inputs["b_seq_len"] - inputs["b_start_loc"].diff()).tolist()
    return found


def are_cached(inputs: dict[str, Any]) -> bool:
    """Return whether every request's row holds its context, and its tokens are its last ones."""
    room = inputs["b_loc"].shape[1] * inputs["v_cache"].shape[3]
    return all(0 <= context <= room for context in contexts(inputs))


def has_slopes_and_sinks(inputs: dict[str, Any]) -> bool:
    return inputs["alibi_slopes"] is not None and inputs["sinks"] is not None


@deviation(CONTEXT, fields=["raises"], right="raises")
def a_context_is_not_in_its_row(inputs: dict[str, Any]) -> bool:
    """vLLM reads past the end of a row, and accepts more new tokens than tokens."""
    is_plain = inputs["kv_cache_dtype"] == "auto" and not has_slopes_and_sinks(inputs)
    return is_plain and not are_cached(inputs)


@deviation(CONTEXT, fields=["raises"], right="both options in one call")
def slopes_are_beside_sinks(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that slopes come without sinks."""
    is_plain = inputs["kv_cache_dtype"] == "auto"
    return is_plain and has_slopes_and_sinks(inputs) and are_cached(inputs)


@deviation(CONTEXT, fields=["o"], right="the window, as without slopes")
def slopes_hide_a_window(inputs: dict[str, Any]) -> bool:
    """vLLM's kernel for slopes has no window."""
    window, is_plain = inputs["sliding_window"], inputs["kv_cache_dtype"] == "auto"
    if inputs["alibi_slopes"] is None or inputs["sinks"] is not None or not window:
        return False
    new = inputs["b_start_loc"].diff().tolist()
    skipped = 1 if inputs["skip_decode"] else 0
    pairs = zip(new, inputs["b_seq_len"].tolist(), strict=True)
    is_cut = any(count > skipped and length > window for count, length in pairs)
    return is_plain and are_cached(inputs) and window > 0 and is_cut


@deviation("decode_attention_fwd_paged", fields=["raises"], right="raises")
def a_decode_has_no_keys_or_too_many(inputs: dict[str, Any]) -> bool:
    """vLLM's kernel divides by a weight of 0, or reads past the end of a row."""
    room = inputs["req_to_token"].shape[1] * inputs["k_buffer"].shape[1]
    return any(not 0 < length <= room for length in inputs["b_seq_len"].tolist())


# ---- cache writes


def stored(inputs: dict[str, Any]) -> list[int]:
    return [slot for slot in inputs["slot_mapping"].tolist() if slot >= 0]


@deviation("reshape_and_cache_flash", fields=["raises"], right="a ValueError")
def two_tokens_have_one_slot(inputs: dict[str, Any]) -> bool:
    """vLLM writes both tokens to the slot, in any order."""
    slots = stored(inputs)
    is_written = inputs["layout"] != "HND" or inputs["cache_shape"][1] == 1
    is_written &= inputs["kv_cache_dtype"] == "auto"
    return is_written and len(set(slots)) < len(slots)


@deviation("reshape_and_cache_flash", fields=["raises"], right="any strides")
def a_token_is_not_contiguous(inputs: dict[str, Any]) -> bool:
    """vLLM's Triton version rejects a cache whose heads are not contiguous per token."""
    slots = stored(inputs)
    is_strided = inputs["layout"] == "HND" and inputs["cache_shape"][1] > 1
    is_strided &= inputs["kv_cache_dtype"] == "auto"
    is_strided &= inputs["slot_mapping"].dtype == torch.int64
    return is_strided and len(set(slots)) == len(slots)


@deviation(
    "v033_reshape_and_cache_fp8_per_token_head",
    "v033_reshape_and_cache_int4_per_token_head",
    "v033_reshape_and_cache_int8_per_token_head",
    fields=["raises"],
    right="a TypeError: 64 bits",
)
def slots_of_measured_codes_have_32_bits(inputs: dict[str, Any]) -> bool:
    """vLLM takes slots of any integer type."""
    return bool(inputs["slot_mapping"].dtype != torch.int64)


@deviation(
    "v033_reshape_and_cache_fp8_per_token_head",
    "v033_reshape_and_cache_int4_per_token_head",
    "v033_reshape_and_cache_int8_per_token_head",
    fields=["raises"],
    right="a ValueError",
)
def two_measured_tokens_have_one_slot(inputs: dict[str, Any]) -> bool:
    """vLLM writes both tokens to the slot, in any order."""
    slots = stored(inputs)
    is_wide = inputs["slot_mapping"].dtype == torch.int64
    return is_wide and len(set(slots)) < len(slots)


@deviation("reshape_and_cache_flash", fields=["raises"], right="a TypeError: 64 bits")
def slots_have_32_bits(inputs: dict[str, Any]) -> bool:
    """vLLM's Triton version takes slots of any integer type."""
    is_strided = inputs["layout"] == "HND" and inputs["cache_shape"][1] > 1
    is_plain = inputs["kv_cache_dtype"] == "auto" and not is_strided
    return is_plain and inputs["slot_mapping"].dtype != torch.int64


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
    right="a part that is not empty is read, so that its NaN is visible",
)
def a_rank_without_weight_is_not_finite(inputs: dict[str, Any]) -> bool:
    """vLLM does not read the output of a part whose weight is 0 in float32, although its
    log-sum-exp is finite."""
    base = 1.0 if inputs["is_lse_base_on_e"] else math.log(2)
    lses = inputs["lses"][..., None] * base
    is_empty = ~lses.isfinite()
    known = torch.where(is_empty, -torch.inf, lses)
    top = known.amax(0)
    weights = torch.exp(known - torch.where(top.isinf(), 0.0, top))
    outputs = inputs["outputs"] * weights
    here = torch.where(is_empty, 0.0, outputs).sum(0)
    there = torch.where(weights == 0, 0.0, outputs).sum(0)
    return bool((here.isnan() != there.isnan()).any())


def is_counted(inputs: dict[str, Any]) -> bool:
    """Return whether as many tokens have a context as there are, or fewer."""
    count = inputs.get("prefill_tokens_with_context")
    return count is None or 0 <= count <= len(inputs["suffix_output"])


@deviation("merge_attn_states_torch", fields=["raises"], right="a ValueError")
def more_tokens_have_a_context_than_there_are(inputs: dict[str, Any]) -> bool:
    """vLLM merges all tokens for a larger number, and counts a negative one from the end."""
    return not is_counted(inputs)


@deviation(
    "merge_attn_states_torch",
    fields=["output"],
    right="0, as for every token that attends to no key",
)
def a_copied_row_is_empty(inputs: dict[str, Any]) -> bool:
    """vLLM copies the suffix's output for tokens without a context, also where the suffix is
    empty."""
    count = inputs.get("prefill_tokens_with_context")
    if count is None or not is_counted(inputs):
        return False
    is_empty = inputs["suffix_lse"][:, count:].isinf().T[..., None]
    return bool((is_empty & (inputs["suffix_output"][count:] != 0)).any())


# ---- the xFormers layer


def built(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the builder that makes the layer's metadata."""
    size = inputs["kv_cache"].shape[2]
    common = inputs["common_attn_metadata"]
    return {"common_attn_metadata": common, "kv_cache_spec": {"block_size": size}}


def is_run(inputs: dict[str, Any]) -> bool:
    """Return whether the layer attends: it has metadata, an output and no scale of it."""
    is_plain = inputs["output_scale"] is None and inputs["output_block_scale"] is None
    return is_plain and inputs["output_given"] and not inputs["attn_metadata_is_none"]


def has_long_rows(inputs: dict[str, Any]) -> bool:
    """Return whether a request with new tokens has more keys than its row."""
    reqs = len(inputs["common_attn_metadata"]["seq_lens_cpu"])
    return outgrows_its_row(built(inputs), reqs, live=True)


@deviation(
    FORWARD, fields=["raises"], right="any order; a row that is too short is rejected"
)
def a_layer_gets_an_unordered_batch_or_short_rows(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that decodes come first and fit their rows, and reads past the rows of
    prefills."""
    return is_run(inputs) and makes_a_mask(built(inputs)) == has_long_rows(inputs)


def decode_output(inputs: dict[str, Any], uses_options: bool) -> Tensor:
    """Return the output of vLLM's decodes, with or without the window and the soft cap."""
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
    for token, req, position in decode_tokens(common):
        positions = torch.arange(
            max(0, position + 1 - (window or position + 1)), position + 1
        )
        blocks = common["block_table_tensor"][req].long()[positions // size]
        keys, values = cache[:, blocks * size + positions % size]
        keys, values = (states.repeat_interleave(group, 1) for states in (keys, values))
        scores = (
            torch.einsum("hd,khd->hk", inputs["query"][token], keys) * impl["scale"]
        )
        scores = cap * torch.tanh(scores / cap) if cap else scores
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(rows) if rows else torch.zeros(0)


def decode_tokens(common: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield token, request and position of what vLLM counts as decodes."""
    starts, lens = common["query_start_loc_cpu"].tolist(), query_lens(common)
    decodes = len(lens) if trusts_its_maximum(common) else first_prefill(common)
    for req in range(decodes):
        context = int(common["seq_lens_cpu"][req]) - lens[req]
        for index in range(lens[req]):
            yield starts[req] + index, req, context + index


@deviation(
    FORWARD, fields=["output"], right="decodes and prefills use the same options"
)
def options_change_a_decode(inputs: dict[str, Any]) -> bool:
    """vLLM's decodes ignore the window and the soft cap, which its prefills use."""
    impl = inputs["impl"]
    has_options = impl["sliding_window"] is not None or impl["logits_soft_cap"]
    if not (has_options and is_run(inputs) and makes_a_mask(built(inputs))):
        return False
    if has_long_rows(inputs):
        return False
    with_options = decode_output(inputs, uses_options=True)
    without = decode_output(inputs, uses_options=False)
    return not torch.allclose(with_options, without, rtol=1e-4, atol=2e-5)

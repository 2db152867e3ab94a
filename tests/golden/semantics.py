"""Executable semantics of some of vLLM's functions, written from their observed results.

A model takes a case's inputs and returns the fields of `expected`. The recorded cases check the
models. The models then give the expected result of any drawn input, so that the rules are tested
on inputs that were not recorded.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checking import recorded

Model = Callable[[dict[str, Any]], dict[str, Any]]
MODELS: dict[str, Model] = {}


def models(file: str) -> Callable[[Model], Model]:
    """Register the model of a case file."""

    def register(model: Model) -> Model:
        MODELS[file] = model
        return model

    return register


def result_of(
    file: str, inputs: dict[str, Any], models_of: dict[str, Model] = MODELS
) -> dict[str, Any]:
    """Return what vLLM returns, in recorded form; {"raises": name} if it raises."""
    try:
        found: dict[str, Any] = recorded(models_of[file](inputs))
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        return {"raises": type(error).__name__, "message": ""}
    return found


# ---- slots


@models("compute_slot_mapping_start_idx")
def start_idx(inputs: dict[str, Any]) -> dict[str, Any]:
    window = inputs["sliding_window"]
    if not inputs["is_prompt"] or window is None:
        return {"start_idx": 0}
    return {"start_idx": max(0, inputs["query_len"] - window)}


@models("compute_slot_mapping")
def slot_mapping(inputs: dict[str, Any]) -> dict[str, Any]:
    before, seq_len, start = (
        inputs[name] for name in ("slot_mapping", "seq_len", "start_idx")
    )
    if inputs["is_profile_run"]:
        added = [-1] * seq_len
    else:
        row = inputs["block_tables"][str(inputs["seq_id"])]
        size, context = inputs["block_size"], inputs["context_len"]
        stored = range(max(start, context), seq_len)
        added = [-1] * max(0, start - context)
        added += [row[position // size] * size + position % size for position in stored]
    return {"slot_mapping": before + added, "num_appended": len(added)}


# ---- boundaries


def step(inputs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    common = inputs["common_attn_metadata"]
    return common["query_start_loc_cpu"].tolist(), common


@models("split_decodes_and_prefills")
def split(inputs: dict[str, Any]) -> dict[str, Any]:
    starts, common = step(inputs)
    most, uniform = inputs["decode_threshold"], inputs.get("require_uniform", False)
    reqs, tokens = len(starts) - 1, common["num_actual_tokens"]
    lens = [end - begin for begin, end in pairwise(starts)]
    if common["max_query_len"] <= most and not (uniform and most > 1):
        return {"result": [reqs, 0, tokens, 0]}
    if lens[0] > most:
        return {"result": [0, reqs, 0, tokens]}
    is_prefill = [length != lens[0] if uniform else length > most for length in lens]
    cut = is_prefill.index(True) if True in is_prefill else reqs
    end = starts[cut] if cut < reqs else tokens
    return {"result": [cut, reqs - cut, end, tokens - end]}


@models("split_decodes_prefills_and_extends")
def split_three(inputs: dict[str, Any]) -> dict[str, Any]:
    starts, common = step(inputs)
    most, tokens = inputs["decode_threshold"], common["num_actual_tokens"]
    lens = [end - begin for begin, end in pairwise(starts)]
    reqs, whole = len(lens), common["seq_lens_cpu"].tolist()
    if common["max_query_len"] <= most:
        return {"result": [reqs, 0, 0, tokens, 0, 0]}
    extends = [index for index, length in enumerate(lens) if length > most]
    if not extends:
        return {"result": [0] * 6}
    prefills = [index for index in extends if whole[index] == lens[index]]
    one, other = extends[0], prefills[0] if prefills else reqs
    ends = starts[one], starts[other] if prefills else tokens
    counts = [one, other - one, reqs - other]
    return {"result": [*counts, ends[0], ends[1] - ends[0], tokens - ends[1]]}


# ---- micro-batches and buffers


@models("make_metadata_with_slice")
def micro_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    common = inputs["attn_metadata"]
    first, stop = inputs["ubatch_slice"]["request_slice"]
    begin, end = inputs["ubatch_slice"]["token_slice"]
    starts = common["query_start_loc_cpu"].tolist()
    assert first != stop and begin != end
    assert starts[first] <= begin < starts[first + 1]
    assert starts[stop - 1] <= end - 1 < starts[stop]
    own = [start - starts[first] for start in starts[first : stop + 1]]
    # the cut at the start moves all later starts
    skipped = begin - starts[first]
    own = [own[0], *(start - skipped for start in own[1:])]
    lens = common["seq_lens_cpu"][first:stop].clone()
    if end < starts[stop]:
        # a start of the micro-batch is compared with a token index of the step
        left_out = own[-1] - end
        own[-1] -= left_out
        lens[-1] -= left_out
    own_starts = common["query_start_loc_cpu"].new_tensor(own)
    rows = slice(first, stop)
    return {
        "result": {
            "query_start_loc": own_starts,
            "query_start_loc_cpu": own_starts,
            "seq_lens": lens,
            "seq_lens_cpu": lens,
            "num_computed_tokens_cpu": common["num_computed_tokens_cpu"][rows],
            "num_reqs": stop - first,
            "num_actual_tokens": end - begin,
            "max_query_len": int(own_starts.diff().abs().max()),
            "max_seq_len": int(lens.max()),
            "block_table_tensor": common["block_table_tensor"][rows],
            "slot_mapping": common["slot_mapping"][begin:end],
            "causal": True,
        },
        "input_unchanged": True,
    }


def halves(buffer: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the device's and the host's half of a buffer."""
    host = torch.tensor(buffer["np"], dtype=torch.int32)
    device = buffer.get("gpu")
    return host if device is None else torch.tensor(device).int(), host


@models("build_attn_metadata")
def every_layer(inputs: dict[str, Any]) -> dict[str, Any]:
    reqs, groups, calls = inputs["num_reqs"], inputs["kv_cache_groups"], []
    builders = range(inputs.get("num_builders", len(groups)))
    (device_starts, starts), (device_lens, lens) = (
        halves(inputs[name]) for name in ("query_start_loc", "seq_lens")
    )
    if not reqs:
        raise ValueError
    for number, _ in enumerate(groups):
        common = {
            "query_start_loc": device_starts[: reqs + 1],
            "query_start_loc_cpu": starts[: reqs + 1],
            "seq_lens": device_lens[:reqs],
            "seq_lens_cpu": lens[:reqs],
            "num_computed_tokens_cpu": inputs["num_computed_tokens_cpu"],
            "num_reqs": reqs,
            "num_actual_tokens": inputs["num_tokens"],
            "max_query_len": int(starts[: reqs + 1].max()),
            "max_seq_len": int(lens[:reqs].max()),
            "block_table_tensor": inputs["block_tables"][number],
            "slot_mapping": inputs["slot_mappings"][number],
            "causal": True,
        }
        calls.append(
            {
                "builder": builders[number],
                "common_prefix_len": 0,
                "common_attn_metadata": common,
                "max_query_len_type": "int",
            }
        )
    return {
        "calls": calls,
        "layer_to_group": {
            name: number
            for number, group in enumerate(groups)
            for name in group["layer_names"]
        },
    }


# ---- ranks, counts and scales


@models("get_dcp_local_seq_lens")
def local_seq_lens(inputs: dict[str, Any]) -> dict[str, Any]:
    ranks, run = inputs["dcp_world_size"], inputs["interleave_size"]
    one = inputs["dcp_rank"]
    lens = inputs["seq_lens"].to(torch.int32)[:, None]
    offsets = torch.tensor([list(range(ranks)) if one is None else [one]])
    whole = lens // run // ranks * run
    found = (whole + (lens - whole * ranks - offsets * run).clamp(0, run)).int()
    return {"result": found[:, 0] if found.shape[1] == 1 else found}


@models("get_num_prefill_decode_query_kv_tokens")
def token_counts(inputs: dict[str, Any]) -> dict[str, Any]:
    given, kind = inputs["attn_metadata"], inputs["attn_type"]
    encoder, prefill = given["num_encoder_tokens"], given["num_prefill_tokens"]
    assert kind not in ("encoder", "encoder_decoder") or encoder is not None
    if kind == "encoder":
        return {"result": [encoder, encoder, 0]}
    keys = encoder if kind == "encoder_decoder" else prefill
    return {"result": [prefill, keys, given["num_decode_tokens"]]}


@models("attention_layer_calc_kv_scales")
def scales(inputs: dict[str, Any]) -> dict[str, Any]:
    ranges, found = {"query": 200.0, "key": 200.0, "value": 100.0}, {}
    for name, largest in ranges.items():
        if not inputs[name].numel():
            raise ValueError
        found[f"_{name[0]}_scale"] = inputs[name].abs().max().float() / largest
    floats = {f"{name}_float": float(found[name]) for name in ("_k_scale", "_v_scale")}
    numbers = {"calculate_kv_scales": False, "ranges": list(ranges.values())}
    return {**found, **floats, **numbers}


# ---- cache writes and partial results


@models("reshape_and_cache_flash")
def write(inputs: dict[str, Any]) -> dict[str, Any]:
    """Two tokens in one slot are written in the order of the tokens."""
    assert inputs["layout"] != "HND" or inputs["cache_shape"][1] == 1
    found = {}
    for name in ("key", "value"):
        cache = torch.full(inputs["cache_shape"], inputs["cache_fill"])
        for token, slot in enumerate(inputs["slot_mapping"].tolist()):
            if slot >= 0:
                cache.flatten(0, 1)[slot] = inputs[name][token]
        found[f"{name}_cache"] = cache
    return found


def merged(inputs: dict[str, Any], empty: float) -> tuple[Tensor, Tensor]:
    """Return the sum of both parts by their weights, and the joint log-sum-exp.

    Args:
        inputs: both parts.
        empty: log-sum-exp from which exponents are taken where both parts are empty.
    """
    lses = torch.stack([inputs["prefix_lse"], inputs["suffix_lse"]])
    lses = torch.where(lses == torch.inf, -torch.inf, lses)
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top.isinf(), empty, top))
    total = weights.sum(0)
    shares = (weights / total).transpose(1, 2)[..., None]
    outputs = torch.stack([inputs["prefix_output"], inputs["suffix_output"]])
    return (outputs * shares).sum(0), total.log() + top


@models("merge_attn_states_triton_0_10_2")
def merge_0_10_2(inputs: dict[str, Any]) -> dict[str, Any]:
    output, lse = merged(inputs, -torch.inf)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    kept = lse if inputs["want_output_lse"] else None
    return {"output": output, "output_lse": kept, "tolerance": tolerance}


@models("lse_weighted_combine")
def combine(inputs: dict[str, Any]) -> dict[str, Any]:
    base = 1.0 if inputs["is_lse_base_on_e"] else math.log(2)
    lses = torch.where(inputs["lses"].isfinite(), inputs["lses"] * base, -torch.inf)
    top = lses.amax(0)
    top = torch.where(top.isinf(), 0.0, top)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    shares = (weights / total.clamp(min=1e-10))[..., None]
    outputs = torch.where(shares == 0, 0.0, inputs["outputs"])
    lse = (total.log() + top) / base
    return {
        "result": (outputs * shares).sum(0),
        "global_lse": lse if inputs["return_lse"] else None,
        "tolerance": {"rtol": 1e-5, "atol": 1e-6},
    }

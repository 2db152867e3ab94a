"""The rules of tests/golden/rules predict equal and deviating results on drawn inputs.

The expected results are those of the models in tests/golden/semantics.py, which the recorded cases
check.
"""

import importlib
import pkgutil
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import golden.adapters
import golden.rules
from golden.cases import FOLDER, Case, decode, differences, read_cases
from golden.checking import check, copied
from golden.semantics import MODELS, result_of

for package in (golden.adapters, golden.rules):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


@pytest.mark.parametrize("file", sorted(MODELS))
def test_a_model_returns_what_was_recorded(file: str) -> None:
    for case in read_cases(FOLDER, file):
        found, expected = result_of(file, copied(case.inputs)), dict(case.expected)
        assert ("raises" in found) == ("raises" in expected), case.name
        if "raises" in expected:
            continue
        tolerance = expected.pop("tolerance", None)
        # the model has the fields that vLLM computes, without its constants and defaults
        common = _fields_of_both(decode(found), expected)
        wrong = list(differences(decode(found), common, tolerance))
        assert not wrong, f"{file}/{case.name}: {wrong}"


def _fields_of_both(found: Any, expected: Any) -> Any:
    """Return what was recorded, without the fields that the model does not have."""
    is_tensor = isinstance(expected, dict) and "dtype" in expected
    if isinstance(found, dict) and isinstance(expected, dict) and not is_tensor:
        return {
            name: _fields_of_both(found[name], expected_value)
            for name, expected_value in expected.items()
            if name in found
        }
    are_lists = isinstance(found, list) and isinstance(expected, list)
    if are_lists and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return [_fields_of_both(one, other) for one, other in pairs]
    return expected


# ---- inputs around each condition


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw_lens(pick: Random) -> tuple[list[int], list[int]]:
    """Return new tokens and contexts of a ragged batch, with padding and in any order."""
    reqs = pick.randint(1, 5)
    new = [pick.choice([0, 1, 1, 1, 2, 3, 6]) for _ in range(reqs)]
    return new, [pick.choice([0, 0, 1, 3, 9]) for _ in range(reqs)]


def draw_step(pick: Random) -> dict[str, Any]:
    new, contexts = draw_lens(pick)
    starts = [sum(new[:req]) for req in range(len(new) + 1)]
    lens = [one + other for one, other in zip(new, contexts, strict=True)]
    return {
        "query_start_loc": ints(starts),
        "query_start_loc_cpu": ints(starts),
        "seq_lens": ints(lens),
        "seq_lens_cpu": ints(lens),
        "num_computed_tokens_cpu": ints(contexts),
        "num_reqs": len(new),
        "num_actual_tokens": starts[-1],
        "max_query_len": max(new),
        "max_seq_len": max(lens),
        "block_table_tensor": torch.arange(3 * len(new)).int().view(-1, 3),
        "slot_mapping": torch.arange(starts[-1] + pick.choice([0, 0, 2])),
        "causal": pick.choice([True, True, True, False]),
    }


def draw_start_idx(pick: Random) -> dict[str, Any]:
    return {
        "is_prompt": pick.random() < 0.8,
        "query_len": pick.randint(0, 9),
        "context_len": pick.choice([0, 1, 3, 9]),
        "sliding_window": pick.choice([None, 0, 1, 4, 8, 9, 12, 18]),
    }


def draw_slot_mapping(pick: Random) -> dict[str, Any]:
    size, blocks = pick.choice([1, 2, 4]), pick.randint(0, 4)
    seq_len = pick.randint(0, size * blocks + 2)
    row = [pick.randint(0, 99) for _ in range(blocks)]
    return {
        "is_profile_run": pick.random() < 0.1,
        "slot_mapping": [7] * pick.randint(0, 1),
        "seq_id": 0,
        "seq_len": seq_len,
        "context_len": pick.choice([0, seq_len // 2, seq_len, seq_len + 1]),
        "start_idx": pick.choice([0, 0, seq_len - 1, seq_len, seq_len + 2]),
        "block_size": size,
        "block_tables": pick.choice([{"0": row}] * 6 + [{"0": None}, {"1": row}]),
    }


def draw_split(pick: Random) -> dict[str, Any]:
    """Return a batch whose maximum is right, too low or too high."""
    step, most = draw_step(pick), pick.choice([1, 1, 2, 3])
    names = ("query_start_loc_cpu", "seq_lens_cpu", "num_reqs", "num_actual_tokens")
    common = {name: step[name] for name in names}
    common["num_actual_tokens"] += pick.choice([0, 0, 2])
    exact = step["max_query_len"]
    common["max_query_len"] = pick.choice([exact, exact, 0, most, most + 1])
    return {"common_attn_metadata": common, "decode_threshold": most}


def draw_uniform_split(pick: Random) -> dict[str, Any]:
    return draw_split(pick) | {"require_uniform": pick.random() < 0.6}


def draw_micro_batch(pick: Random) -> dict[str, Any]:
    """Return a cut at any token, whose requests are often those of its tokens."""
    step = draw_step(pick)
    starts = step["query_start_loc_cpu"].tolist()
    tokens, reqs = starts[-1], len(starts) - 1
    first = pick.randint(0, max(tokens - 1, 0))
    stop = pick.randint(first, tokens)
    owner = max(req for req in range(reqs) if starts[req] <= first)
    last = max(req for req in range(reqs) if starts[req] <= max(stop - 1, 0))
    requests = [max(owner - pick.choice([0, 0, 0, 1]), 0), last + 1]
    if pick.random() < 0.2:
        requests[1] = min(reqs, requests[1] + 1)
    return {
        "ubatch_slice": {"request_slice": requests, "token_slice": [first, stop]},
        "attn_metadata": step,
    }


def draw_buffers(pick: Random) -> dict[str, Any]:
    """Return buffers that are as long as the batch, longer or shorter."""
    step, spare = draw_step(pick), pick.choice([0, 0, 1])
    short = pick.choice([0] * 6 + [1])
    groups, reqs = pick.randint(1, 2), step["num_reqs"]
    tokens = step["num_actual_tokens"]

    def buffer(values: Tensor) -> list[int]:
        return [*values.tolist(), *[0] * spare]

    return {
        "num_reqs": reqs,
        "num_tokens": tokens,
        "query_start_loc": {"np": buffer(step["query_start_loc_cpu"]), "gpu": None},
        "seq_lens": {"np": buffer(step["seq_lens_cpu"]), "gpu": None},
        "num_computed_tokens_cpu": ints(buffer(step["num_computed_tokens_cpu"])),
        "block_tables": [
            torch.zeros(reqs + spare - short, 2, dtype=torch.int32)
            for _ in range(groups)
        ],
        "slot_mappings": torch.zeros(
            groups, tokens + pick.choice([0, 2]), dtype=torch.int64
        ),
        "kv_cache_groups": [{"layer_names": [f"l.{index}"]} for index in range(groups)],
        "num_builders": groups + pick.choice([0] * 6 + [-1, 1]),
    }


def draw_ranks(pick: Random) -> dict[str, Any]:
    """Return lengths of 32 or 64 bits, for one rank, all ranks, or one that does not exist."""
    ranks = pick.choice([1, 2, 3])
    lens = torch.tensor([pick.randint(0, 40) for _ in range(pick.randint(0, 3))])
    return {
        "seq_lens": lens.to(pick.choice([torch.int32, torch.int64])),
        "dcp_world_size": ranks,
        "dcp_rank": pick.choice([None, None, 0, ranks - 1, ranks, -1]),
        "interleave_size": pick.choice([1, 2, 16]),
    }


def draw_counts(pick: Random) -> dict[str, Any]:
    kinds = ["decoder", "encoder", "encoder_only", "encoder_decoder", "other", ""]
    numbers = {"num_prefill_tokens": 3, "num_decode_tokens": 2}
    encoder = {"num_encoder_tokens": pick.choice([None, 0, 5])}
    return {"attn_metadata": numbers | encoder, "attn_type": pick.choice(kinds)}


def draw_scales(pick: Random) -> dict[str, Any]:
    def tensor() -> Tensor:
        shape = pick.choice(
            [(2, 3), (1, 1), (0, 3)] if pick.random() < 0.2 else [(2, 3)]
        )
        return torch.randn(shape) * pick.choice([0.0, 1.0, 1.0])

    return {"query": tensor(), "key": tensor(), "value": tensor()}


def draw_write(pick: Random) -> dict[str, Any]:
    """Return slots that are distinct, equal or -1, for a cache of either layout."""
    blocks, size, heads = 3, pick.choice([1, 4]), 1
    tokens = pick.randint(1, 4)
    slots = pick.sample(range(-1, blocks * size), min(tokens, blocks * size))
    if pick.random() < 0.4:
        slots = [pick.choice(slots) for _ in slots]
    return {
        "key": torch.randn(len(slots), heads, 4),
        "value": torch.randn(len(slots), heads, 4),
        "cache_shape": [blocks, size, heads, 4],
        "cache_fill": -1.0,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "kv_cache_dtype": "auto",
        "layout": pick.choice(["NHD", "NHD", "HND"]),
    }


def draw_merge(pick: Random) -> dict[str, Any]:
    """Return parts of which some are empty, and outputs of which some are not finite."""
    tokens, heads = pick.randint(1, 3), pick.randint(1, 2)
    numbers = [0.0, 1.0, -3.0, 200.0]
    if pick.random() < 0.5:
        numbers += [torch.inf, -torch.inf]
    not_finite = pick.choice([0.0, 0.0, torch.inf, torch.nan])

    def lse() -> Tensor:
        rows = [[pick.choice(numbers) for _ in range(tokens)] for _ in range(heads)]
        return torch.tensor(rows)

    def output() -> Tensor:
        found = torch.randn(tokens, heads, 4)
        if not_finite:
            found[pick.randrange(tokens)] = not_finite
        return found

    return {
        "prefix_output": output(),
        "prefix_lse": lse(),
        "suffix_output": output(),
        "suffix_lse": lse(),
        "want_output_lse": pick.random() < 0.7,
    }


def draw_combine(pick: Random) -> dict[str, Any]:
    """Return results of ranks, some of them empty or not finite."""
    ranks, tokens = pick.randint(1, 3), pick.randint(1, 3)
    numbers = [0.0, 1.0, -3.0, 200.0]
    if pick.random() < 0.5:
        numbers += [torch.inf, -torch.inf, torch.nan]
    outputs = torch.randn(ranks, tokens, 1, 4)
    outputs[pick.randrange(ranks)] += pick.choice([0.0, 0.0, torch.inf, torch.nan])
    rows = [[[pick.choice(numbers)] for _ in range(tokens)] for _ in range(ranks)]
    return {
        "outputs": outputs,
        "lses": torch.tensor(rows),
        "is_lse_base_on_e": pick.random() < 0.5,
        "return_lse": pick.random() < 0.7,
    }


DRAWN = {
    "attention_layer_calc_kv_scales": draw_scales,
    "build_attn_metadata": draw_buffers,
    "compute_slot_mapping": draw_slot_mapping,
    "compute_slot_mapping_start_idx": draw_start_idx,
    "get_dcp_local_seq_lens": draw_ranks,
    "get_num_prefill_decode_query_kv_tokens": draw_counts,
    "lse_weighted_combine": draw_combine,
    "make_metadata_with_slice": draw_micro_batch,
    "merge_attn_states_triton_0_10_2": draw_merge,
    "reshape_and_cache_flash": draw_write,
    "split_decodes_and_prefills": draw_uniform_split,
    "split_decodes_prefills_and_extends": draw_split,
}


def test_every_model_has_drawn_inputs() -> None:
    assert DRAWN.keys() == MODELS.keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize("file", sorted(DRAWN))
@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_the_rules_predict_where_a_drawn_input_deviates(file: str, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = DRAWN[file](Random(seed))
    case = Case(file, f"seed {seed}", inputs, result_of(file, copied(inputs)), {})
    for twin in ("reference", "optimized"):
        check(case, twin, "")

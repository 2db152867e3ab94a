"""Specs of caches, layouts and masks: equal to vLLM 0.33 on drawn inputs, or as the rules predict.

As in test_golden_rules.py, with the models of tests/golden/spec_semantics.py.
"""

import importlib
import pkgutil
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import golden.adapters
import golden.rules
from golden.cases import FOLDER, Case, decode, differences, is_error, read_cases
from golden.checking import check, copied
from golden.not_tried import why_not_tried
from golden.semantics import result_of
from golden.spec_semantics import BYTES, PAGES, SPEC_MODELS

for package in (golden.adapters, golden.rules):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


@pytest.mark.parametrize("file", sorted(SPEC_MODELS))
def test_a_model_of_specs_returns_what_was_recorded(file: str) -> None:
    tried = [case for case in read_cases(FOLDER, file) if not why_not_tried(case)]
    assert tried
    for case in tried:
        found = result_of(file, copied(case.inputs), SPEC_MODELS)
        assert is_error(found) == is_error(case.expected), case.name
        if not is_error(found):
            expected = {name: case.expected[name] for name in found}
            wrong = list(differences(decode(found), expected, None))
            assert not wrong, f"{file}/{case.name}: {wrong}"


# ---- inputs around each condition


def some(pick: Random, chance: float, **choices: list[Any]) -> dict[str, Any]:
    """Return some of the arguments, each with one of its values."""
    return {
        name: pick.choice(values)
        for name, values in choices.items()
        if pick.random() < chance
    }


KINDS = {
    "FullAttentionSpec": {},
    "SlidingWindowSpec": {"sliding_window": [1, 2, 100, 4096]},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": [1, 16, 256, 8192]},
    "CrossAttentionSpec": {},
    "MLAAttentionSpec": {},
}


def draw_spec(pick: Random) -> dict[str, Any]:
    """Return any arguments of a class, padding that is too small and states that do not fit."""
    kind = pick.choice(list(KINDS))
    sizes = {
        "block_size": pick.choice([1, 8, 16, 20, 64, 96, 256]),
        "num_kv_heads": pick.choice([1, 2, 5]),
        "head_size": pick.choice([1, 7, 64, 576]),
        "dtype": pick.choice(list(BYTES)),
    }
    spec = {"class": kind, **sizes, **some(pick, 1, **KINDS[kind])}
    spec |= some(
        pick,
        0.25,
        num_head_slots=[None, 1, 4],
        state_content_bytes=[None, 36, 656],
        tokens_per_state=[1, 4, 128, "1/4", "1/3"],
        kv_quant_mode=["NONE"],
    )
    if kind == "SlidingWindowSpec":
        spec |= some(pick, 0.3, extra_retained_tokens=[0, 3, 50])
    if kind == "MLAAttentionSpec":
        spec |= some(pick, 0.4, alignment=[None, 512, 576], max_tp_shards=[1])
        spec |= some(pick, 0.2, model_version=["deepseek_v4"])
    else:
        spec |= some(pick, 0.3, head_size_v=[1, 64, 128])
    if not spec.get("alignment"):
        spec |= some(pick, 0.2, page_size_padded=[None, 100, 10000, 10**8])
    return spec


def draw_sizes(pick: Random) -> dict[str, Any]:
    alignment: list[Any] = [None, 1, 512, 0, -4]
    alignment += [{"multiple_of": multiple} for multiple in (1, 16, 24, 64, 128)]
    return draw_spec(pick) | some(pick, 0.5, block_stride_alignment=alignment)


def draw_memory(pick: Random) -> dict[str, Any]:
    config = {
        "max_model_len": pick.choice([1, 17, 1000, 4096]),
        "decode_context_parallel_size": pick.choice([1, 1, 2, 4]),
        "max_in_flight_tokens": pick.choice([1, 8, 512, 2048]),
        "mamba_cache_mode": "none",
        "max_num_encoder_input_tokens": pick.choice([0, 1, 1500]),
    }
    sharded = some(pick, 0.4, dcp_sharded=[True, False])
    return {**draw_spec(pick), **sharded, "config": config}


def draw_merge(pick: Random) -> dict[str, Any]:
    """Return specs that are equal, differ in one field, or see other parts of the sequence."""
    spec = draw_spec(pick)
    if pick.random() < 0.4:
        return {**spec, "new_block_size": pick.choice([1, 9, 16, 36, 64, 72, 128])}
    kind = spec.pop("class")
    specs = [dict(spec) for _ in range(pick.choice([1, 2, 3]))]
    if pick.random() < 0.3:
        specs[-1] |= some(pick, 0.4, head_size=[1, 64], block_size=[16, 64])
    if kind == "FullAttentionSpec":
        for fields in specs:
            fields |= some(
                pick, 0.3, sliding_window=[None, 64, 128], attention_chunk_size=[256]
            )
    return {"class": kind, "specs": specs}


def draw_strides(pick: Random) -> dict[str, Any]:
    name = pick.choice(list(PAGES))
    kernels = {"attn": [None, 1, 8, 16], "mla656": [None, 32, 64]}
    return {
        "spec": name,
        "num_blocks": pick.choice([1, 2, 5]),
        "num_layers": pick.choice([1, 3]),
        "layout": pick.choice(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]),
        "kernel_block_size": pick.choice(kernels.get(name, [None])),
    }


def draw_mask(pick: Random) -> dict[str, Any]:
    """Return short requests with windows, chunks, and images of any order and overlap."""
    new = [pick.choice([0, 1, 1, 3, 9, 20]) for _ in range(pick.choice([1, 1, 2, 3]))]
    new[0] = max(new[0], 1)
    lens = [tokens + pick.choice([0, 0, 1, 8, 20]) for tokens in new]
    causal = pick.choice([True, True, False, [pick.random() < 0.5 for _ in new]])
    inputs = {
        "query_lens": new,
        "seq_lens": [max(length, 1) for length in lens],
        "sliding_window": pick.choice([None, 1, 2, 5, 30]),
        "causal": causal,
        "query_heads_per_kv_head": pick.choice([1, 1, 2, 8]),
    }
    return inputs | some(pick, 0.2, split_k_segments=[4])


def draw_prompts(pick: Random) -> dict[str, Any]:
    inputs = draw_mask(pick)
    prompts = [pick.choice([0, 1, 5, 12, 40]) for _ in inputs["query_lens"]]
    inputs["rswa_prefix_lens"] = torch.tensor(prompts, dtype=torch.int32)
    return inputs | {"causal": True, "rswa_window": pick.choice([1, 2, 7, 30])}


def draw_images(pick: Random) -> dict[str, Any]:
    if pick.random() < 0.3:
        return draw_prompts(pick)
    inputs, count = draw_mask(pick), pick.choice([1, 2, 3])
    ranges = [
        [[pick.randint(0, 20), pick.randint(0, 24)] for _ in range(count)]
        for _ in inputs["query_lens"]
    ]
    inputs["mm_prefix_range"] = torch.tensor(ranges, dtype=torch.int32)
    return inputs | some(pick, 0.8, mm_prefix_clamp_sliding_window=[False, True])


def draw_chunks(pick: Random) -> dict[str, Any]:
    if pick.random() < 0.3:
        return draw_images(pick)
    return draw_mask(pick) | some(pick, 0.5, chunk_lookback=[None, 0])


DRAWN = {
    "v033_kv_cache_layout_strides": draw_strides,
    "v033_kv_cache_spec_memory": draw_memory,
    "v033_kv_cache_spec_merge": draw_merge,
    "v033_kv_cache_spec_sizes": draw_sizes,
    "v033_mm_prefix_rswa_visible_keys": draw_images,
    "v033_unified_attention_masks": draw_chunks,
}


def test_every_model_of_specs_has_drawn_inputs() -> None:
    assert DRAWN.keys() == SPEC_MODELS.keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize("file", sorted(DRAWN))
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_the_rules_predict_where_specs_and_masks_deviate(file: str, seed: int) -> None:
    inputs = DRAWN[file](Random(seed))
    expected = result_of(file, copied(inputs), SPEC_MODELS)
    case = Case(file, f"seed {seed}", inputs, expected, {})
    for twin in ("reference", "optimized"):
        check(case, twin, "")

"""Prefills from caches with a scale per token and head on Hopper chips: conversion, results."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.cases.options import Call, paged_call
from pagetwin.conformance.checks.coded_caches import APART, PAGES, coded_call
from pagetwin.conformance.checks.dense import judge_attention, judge_lse, same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS, CacheFormat
from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.dispatch.choice import make_attention_plan
from pagetwin.optimized.kernels.sm90.code_prefill import family
from pagetwin.optimized.kernels.sm90.code_prefill.kernel import BLOCK
from pagetwin.optimized.runtime import cost_layer
from pagetwin.optimized.runtime.attention_call import AttentionCall
from pagetwin.reference import gather_cache
from support.compiler_process import json_lines
from support.hopper_codes import to_family
from support.sm90_calls import build, launched, needs_hopper, planned, to_call
from support.twins import Twin
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16
FORMS = [form for form in FORMATS.values() if form.has_token_scales]
INT4 = FORMATS["int4_per_token_head"]
ORDERS = (APART, *PAGES)
SCRIPT = Path(__file__).parents[1] / "support/compile_conversions.py"
BATCHES = {
    "ragged": BatchPlan((17, 9, 0, 40), (300, 9, 40, 128), head_size=64, padding=2),
    "head size 80": BatchPlan((30,), (133,), head_size=80, group=2),
    "head size 96": BatchPlan((30, 8), (70, 8), head_size=96, block_size=48),
    "head size 128": BatchPlan((130,), (261,), head_size=128, kv_heads=3),
    "head size 256": BatchPlan((20,), (140,), head_size=256, group=1),
}


def make_call(
    plan: BatchPlan,
    form: CacheFormat,
    order: str,
    device: torch.device,
    has_lse: bool,
    **options: Any,
) -> tuple[Call, AttentionCall]:
    """Return a call over codes, as the laws make it and as a kernel family takes it."""
    needles = [(req, keys - 1) for req, keys in enumerate(plan.kv_lens)]
    call = paged_call(plan, device, needles, **options)
    call = replace(coded_call(call, form, plan.seed, order), wants_lse=has_lse)
    return call, to_family(call, has_lse)[0]


def is_exact(form: CacheFormat, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether converted keys are exact in front of their scales."""
    return not form.is_rotated or head_size <= 128


def numbers_of(call: AttentionCall, req: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a request in float32, by the reference."""
    length = int(call.lengths[req])
    starts = torch.tensor([0, length], dtype=torch.int32, device=call.query.device)
    assert call.block_table is not None
    options = call.options
    return gather_cache(
        call.key, call.value, call.block_table[req : req + 1], starts, length,
        options.k_scale, options.v_scale, dtype=torch.float32,
    )  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.usefixtures("without_native_fp8")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("has_lse", [False, True], ids=["no lse", "lse"])
@pytest.mark.parametrize("name", BATCHES)
def test_converted_keys_times_their_factors_are_exact_and_others_are_rounded_once(
    name: str,
    has_lse: bool,
    order: str,
    form: CacheFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    plan = replace(BATCHES[name], dtype=dtype, seed=3)
    call = make_call(plan, form, order, device, has_lse)[1]
    exact = is_exact(form, dtype, plan.head_size)
    if has_lse and not exact:
        with pytest.raises(NotImplementedError, match="use the portable kernel"):
            family.plan(call)
        return
    found, _, scales, factors = family.plan(call).convert(call, 8)
    assert scales == (None, None)
    rounds = not has_lse and (dtype == BF16 or not exact)
    assert (factors is None) is rounds
    assert found.key.dtype == (FP16 if form.is_rotated and not rounds else dtype)
    assert found.value.dtype == dtype
    for req, length in enumerate(plan.kv_lens):
        if plan.query_lens[req] * plan.group <= 8:
            continue
        key, value = numbers_of(call, req)
        assert found.block_table is not None
        rows = found.block_table[req].long()
        keys, values = (
            cache[rows].flatten(0, 1)[:length] for cache in (found.key, found.value)
        )
        if factors is not None:
            of_keys = factors[:, req, :length].T[..., None]
            assert same_bits(keys.float() * of_keys, key)
        # Triton's interpreter truncates to bfloat16
        if dtype == FP16 or device.type == "cuda":
            assert same_bits(values, value.to(dtype))
            assert factors is not None or same_bits(keys, key.to(dtype))


@pytest.mark.usefixtures("without_native_fp8")
def test_keys_before_a_window_become_0(device: torch.device) -> None:
    """The prefill kernel loads some of them, and 0 * NaN = NaN."""
    plan = replace(BATCHES["head size 128"], query_lens=(20,), dtype=FP16)
    call = make_call(plan, INT4, APART, device, False, sliding_window=70)[1]
    first = 261 - 20 - 70 + 1
    assert call.block_table is not None
    call.block_table[0, : first // plan.block_size] = 2**31 - 1
    found = family.plan(call).convert(call, 8)[0]
    for cache in (found.key, found.value):
        rows = cache.flatten(0, 1)[:261]
        assert not rows[BLOCK.value : first].any()
        assert rows[first:].any(-1).all()


def make_copied(
    block_size: int, layout: str, dtype: torch.dtype, device: str
) -> tuple[BatchTensors, AttentionCall]:
    """Return a batch whose blocks TMA does not load, and its call."""
    plan = BatchPlan(
        (17, 130, 0, 40), (300, 261, 40, 128), head_size=80, group=4, dtype=dtype,
        block_size=block_size, layout=layout, needle="block edge",
    )  # fmt: skip
    batch = build(plan, device)
    return batch, to_call(batch, *batch.fresh())


COPIED = [(1, "separate"), (4, "hnd"), (12, "interleaved"), (16, "padded")]


@pytest.mark.usefixtures("without_native_fp8")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("block_size", "layout"), COPIED)
def test_blocks_of_any_size_are_copied_bit_for_bit(
    block_size: int, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    batch, call = make_copied(block_size, layout, dtype, device.type)
    found, _, scales, factors = family.plan(call).convert(call, 0)
    assert scales == (None, None) and factors is None
    assert found.block_table is not None
    for req, length in enumerate(batch.plan.kv_lens):
        if not batch.plan.query_lens[req]:
            continue
        copied, rows = found.block_table[req].long(), batch.rows[req]
        for before, after in ((call.key, found.key), (call.value, found.value)):
            expected = before[rows].flatten(0, 1)[:length]
            assert same_bits(after[copied].flatten(0, 1)[:length], expected)


@needs_hopper
@pytest.mark.parametrize(("block_size", "layout"), COPIED)
def test_rows_over_copied_blocks_are_within_their_error_budget(
    block_size: int, layout: str, reference: Twin
) -> None:
    batch, call = make_copied(block_size, layout, BF16, "cuda")
    out, lse = call.out, call.lse
    assert lse is not None
    launched(partial(planned(family, call).launch_prefill, call, 0), out, lse)
    verdict, exact_lse = judge_attention(batch, out, reference)
    assert verdict.ok, verdict
    assert judge_lse(batch, lse, exact_lse) <= 1


@pytest.mark.usefixtures("without_native_fp8")
def test_bfloat16_queries_are_fitted_for_int4_alone() -> None:
    """Keys of eight bits are exact in bfloat16, and an integer up to 1,920 is not."""
    device = torch.device("cpu")
    for form in FORMS:
        for dtype in (BF16, FP16):
            plan = replace(BATCHES["ragged"], dtype=dtype)
            made = family.plan(make_call(plan, form, APART, device, False)[1])
            is_fitted = form.is_rotated and dtype == BF16
            assert made.exact is not None
            assert made.exact.config.FITS_QUERIES is is_fitted


@pytest.mark.compile
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_conversion_compiles_for_every_head_size(form: CacheFormat) -> None:
    """Prefills from int4 with head size 16 failed on a GPU: products add up 16 numbers at least."""
    sizes = (8, 16, 24, 80, 128, 256)
    lines = json_lines(SCRIPT, form.name, *sizes)
    assert [line["head_size"] for line in lines] == list(sizes)
    for line in lines:
        assert line["spills"] == 0, line


@pytest.mark.usefixtures("without_native_fp8")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_keys_are_rounded_for_small_scores_alone(
    head_size: int, form: CacheFormat, device: torch.device
) -> None:
    """A score of 40 times a rounding of its key changes its weight by 8 %."""
    plan = replace(BATCHES["head size 128"], head_size=head_size, dtype=BF16)
    exact = is_exact(form, BF16, head_size)
    for has_lse in (False, True):
        call = make_call(plan, form, APART, device, has_lse)[1]
        if has_lse and not exact:
            with pytest.raises(NotImplementedError, match="use the portable kernel"):
                family.plan(call)
            continue
        made = family.plan(call)
        for factor in (1.0, 2.0, 2.1):
            scaled = call._replace(scale=factor * head_size**-0.5)
            rounds = not has_lse and factor <= 2.0
            assert made.takes(scaled) is (rounds or exact)
            if made.takes(scaled):
                assert (made.convert(scaled, 8)[3] is None) is rounds


@pytest.mark.usefixtures("without_native_fp8")
def test_caches_that_begin_beside_a_multiple_of_4_bytes_are_not_taken_from_pages() -> (
    None
):
    """Their rows are loaded in words of 4 bytes."""
    device = torch.device("cpu")
    plan = replace(BATCHES["ragged"], dtype=FP16)
    for order, is_taken in ((PAGES[0], False), (APART, True)):
        call = make_call(plan, INT4, order, device, False)[1]
        made = family.plan(call)
        assert made.takes(call)
        size = call.key.untyped_storage().nbytes()
        memory = torch.zeros(size + 16, dtype=torch.uint8)
        begin = call.key.storage_offset() + 1
        key = memory.as_strided(call.key.shape, call.key.stride(), begin)
        assert made.takes(call._replace(key=key)) is is_taken, order


@pytest.mark.parametrize(
    ("reqs", "new", "keys", "block_size", "of_boxes", "copied"),
    [
        (4, 2048, 2048, 8, 273.4, 254.7), (1, 2048, 16384, 8, 801.9, 778.9),
        (32, 64, 2048, 8, 149.0, 179.3), (4, 2048, 2048, 24, 315.8, 255.2),
        (1, 2048, 16384, 24, 963.1, 778.8), (32, 64, 2048, 24, 165.0, 189.8),
        (4, 2048, 2048, 40, 315.1, 255.0), (1, 2048, 16384, 40, 966.9, 782.6),
        (32, 64, 2048, 40, 164.2, 189.0), (4, 2048, 2048, 16, 248.4, 255.6),
        (1, 2048, 16384, 48, 784.1, 771.6), (4, 2048, 2048, 80, 260.7, 256.1),
    ],
)  # fmt: skip
def test_blocks_of_small_boxes_are_copied_if_that_is_faster(
    reqs: int,
    new: int,
    keys: int,
    block_size: int,
    of_boxes: float,
    copied: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Microseconds of an H200, 2026-11-30. The way that is chosen takes 2 % more at most."""
    monkeypatch.setattr(cost_layer, "count_processors", lambda _: 132)
    blocks = -(-keys // block_size)
    with torch.device("meta"):
        query = torch.empty(reqs * new, 32, 128, dtype=BF16)
        cache = torch.empty(reqs * blocks, block_size, 8, 128, dtype=BF16)
        call = AttentionCall(
            query, cache, cache, torch.empty(reqs, blocks, dtype=torch.int32),
            torch.empty(reqs + 1, dtype=torch.int32),
            torch.empty(reqs, dtype=torch.int32), new, keys, 0.1, query, None,
            AttentionOptions(causal=True),
        )  # fmt: skip
    times = {False: of_boxes, True: copied}
    try:
        is_copied = family.plan(call).takes(call)
    except NotImplementedError:
        is_copied = False
    assert times[is_copied] <= 1.02 * min(times.values())


@needs_hopper
@pytest.mark.parametrize("has_lse", [False, True], ids=["no lse", "lse"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BATCHES)
def test_prefills_are_converted_and_right(
    name: str, order: str, form: CacheFormat, dtype: torch.dtype, has_lse: bool
) -> None:
    plan = replace(BATCHES[name], dtype=dtype, seed=5)
    call, of_family = make_call(plan, form, order, torch.device("cuda"), has_lse)
    planned = make_attention_plan(of_family).prefills[0]
    is_planned = is_exact(form, dtype, plan.head_size) or not has_lse
    assert isinstance(planned, family.CodePrefillPlan) is is_planned
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))


@needs_hopper
@pytest.mark.parametrize("size", [2.0**-60, 1e-3, 1.0, 1e3, 2.0**60])
def test_bfloat16_queries_of_any_size_are_fitted(size: float) -> None:
    """Each row has a size of its own. The scale keeps scores as they are."""
    plan = replace(BATCHES["head size 128"], dtype=BF16, seed=8)
    call, _ = make_call(plan, INT4, APART, torch.device("cuda"), True)
    call.query[:] = torch.randn_like(call.query.float()) * size
    call.query[::2] *= 0.015625
    # after the needles: their keys are as large as the scale is small
    call.arguments["scale"] = 128**-0.5 / size
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))


@needs_hopper
@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_scores_of_any_size_over_int4_are_within_their_budgets(scale: float) -> None:
    """With keys in bfloat16 outputs took up to 4 times their budget."""
    plan = replace(BATCHES["head size 128"], dtype=BF16, seed=9, scale=scale)
    call = coded_call(paged_call(plan, torch.device("cuda")), INT4, 9, APART)
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))


@needs_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_prefills_with_large_scores_are_right(
    form: CacheFormat, dtype: torch.dtype
) -> None:
    plan = replace(BATCHES["head size 128"], dtype=dtype, seed=7, scale=1.0)
    call, _ = make_call(plan, form, APART, torch.device("cuda"), False)
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))


@needs_hopper
@pytest.mark.parametrize("has_lse", [False, True], ids=["no lse", "lse"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 100}, {"attention_chunk_size": 100}, {"logits_soft_cap": 5.0},
    ],
    ids=str,
)  # fmt: skip
def test_prefills_from_int4_with_options_are_right(
    options: dict[str, Any], dtype: torch.dtype, has_lse: bool
) -> None:
    plan = replace(BATCHES["head size 128"], dtype=dtype, seed=6)
    call, _ = make_call(plan, INT4, PAGES[0], torch.device("cuda"), has_lse, **options)
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))


@needs_hopper
@pytest.mark.parametrize("group", [1, 4, 3])
@pytest.mark.parametrize(
    "head_size", [8, 16, 24, 40, 64, 72, 80, 96, 104, 112, 120, 128]
)
def test_fitted_queries_of_every_head_size_are_within_their_error_budget(
    head_size: int, group: int
) -> None:
    plan = BatchPlan(
        (70, 9, 0, 200), (170, 9, 40, 300), head_size=head_size, group=group, dtype=BF16,
        padding=2, seed=5,
    )  # fmt: skip
    call, of_family = make_call(plan, INT4, APART, torch.device("cuda"), True)
    planned = family.plan(of_family)
    assert planned.exact is not None and planned.exact.config.FITS_QUERIES
    lse = of_family.lse
    assert lse is not None
    planned.launch_prefill(of_family, 0)
    call.assert_right(of_family.out, lse, load_implementation("reference"))

"""Tests of prefills from FP8 caches on Hopper chips: the conversion, results on a GPU."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, build
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.dispatch.choice import make_attention_plan
from pagetwin.optimized.kernels.sm90.code_prefill import family
from pagetwin.optimized.kernels.sm90.code_prefill.kernel import BLOCK
from pagetwin.optimized.runtime.cost_constants import DECODE_BYTES_PER_US
from pagetwin.optimized.runtime.cost_layer import BatchBounds, Layer
from support.compile_fp8_decode_sm90 import E4M3, E5M2
from support.compile_prefill_sm90 import BF16, FP16
from support.fp8_calls import assert_right, make_batch, make_options, to_call
from support.sm90_calls import (
    check_captured,
    launched,
    needs_hopper,
    own_counters,
    planned,
)
from support.twins import TWINS, Twin
from torch import Tensor

__all__ = ["own_counters"]


def gather(batch: BatchTensors, cache: Tensor, req: int) -> Tensor:
    """Return the keys or values of a request.  # [keys, heads, head size]"""
    slots = cache[torch.tensor(batch.rows[req], device=cache.device)]
    return slots.flatten(0, 1)[: batch.plan.kv_lens[req]]


CONVERTED = {
    "ragged": (BatchPlan((17, 9, 0, 40), (300, 9, 40, 128), padding=2), {}),
    "a window": (BatchPlan((20, 300), (513, 300)), {"sliding_window": 70}),
    "chunks": (BatchPlan((20, 30), (513, 300)), {"attention_chunk_size": 100}),
    "blocks of 48": (BatchPlan((20, 30), (333, 70), block_size=48), {}),
    "heads before slots": (BatchPlan((20, 30), (333, 70), layout="hnd"), {}),
    "interleaved": (BatchPlan((20,), (333,), layout="interleaved"), {}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", CONVERTED)
def test_the_conversion_keeps_every_number_that_a_query_attends_to(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows before a window become 0: the prefill kernel loads some, and 0 * NaN = NaN."""
    plan, given = CONVERTED[name]
    plan = replace(plan, head_size=64, group=4, dtype=FP16)
    batch = make_batch(plan, dtype, str(device))
    options = make_options(batch, **given)
    limit = given.get("sliding_window")
    for req, (new, keys) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
        first = 0 if limit is None else max(0, keys - new - limit + 1)
        # blocks before the window are not read
        batch.block_table[req, : first // plan.block_size] = 2**31 - 1
    call = to_call(batch, options, *batch.fresh())
    launch_plan = family.plan(call)
    short_rows = 40
    converted, _, scales, factors = launch_plan.convert(call, short_rows)
    assert factors is None
    for found, scale in zip(scales, (options.k_scale, options.v_scale), strict=True):
        assert isinstance(scale, Tensor)
        assert same_bits(found, scale.repeat_interleave(4))
    table = converted.block_table
    assert table is not None
    for req, (new, keys) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
        if new * plan.group <= short_rows:
            continue
        context = keys - new
        first = 0 if limit is None else max(0, context - limit + 1)
        if "attention_chunk_size" in given:
            first = context // 100 * 100
        for cache, exact in (
            (converted.key, batch.key_cache),
            (converted.value, batch.value_cache),
        ):
            rows = cache[table[req].long()].flatten(0, 1)[:keys]
            numbers = gather(batch, exact, req).to(FP16)
            assert same_bits(rows[first:], numbers[first:])
            edge = first // BLOCK.value * BLOCK.value
            assert not rows[edge:first].any()


@pytest.mark.usefixtures("without_native_fp8")
def test_calls_that_the_prefill_kernel_does_not_take_have_no_plan() -> None:
    plan = BatchPlan((20, 30), (333, 70), group=4, head_size=64, dtype=BF16)
    batch = make_batch(plan, device="cpu")
    options = make_options(batch)

    def is_planned(batch: BatchTensors, options: AttentionOptions) -> bool:
        try:
            family.plan(to_call(batch, options, *batch.fresh()))
        except NotImplementedError:
            return False
        return True

    assert is_planned(batch, options)
    assert not family.supports(to_call(batch, options, *batch.fresh()))
    assert not is_planned(build(plan), AttentionOptions(causal=True))
    unsupported: list[dict[str, Any]] = [
        {"alibi_slopes": torch.ones(8)},
        {"batch_invariant": True},
        {"position_bias": torch.ones(8, 9)},
    ]
    for given in unsupported:
        assert not is_planned(batch, replace(options, **given)), given
    other = make_batch(replace(plan, head_size=36), device="cpu")
    assert not is_planned(other, make_options(other))


@pytest.mark.usefixtures("without_native_fp8")
def test_a_call_whose_converted_cache_is_too_large_is_left_to_the_portable_kernel() -> (
    None
):
    """The host knows only the longest request, so each is counted with its keys."""
    plan = BatchPlan((20, 30), (333, 70), group=4, head_size=64, dtype=BF16)
    batch = make_batch(plan, device="cpu")
    call = to_call(batch, make_options(batch), *batch.fresh())
    launch_plan = family.plan(call)
    assert launch_plan.takes(call)
    per_key = 2 * 2 * plan.kv_heads * plan.head_size
    most = family.MAX_BYTES // per_key // 2
    assert launch_plan.takes(call._replace(max_key_len=most))
    assert not launch_plan.takes(call._replace(max_key_len=most + 1))


@pytest.mark.usefixtures("without_native_fp8")
def test_the_cost_model_counts_the_conversion() -> None:
    """A few rows over many keys are split: to convert the keys would take longer."""
    layer = Layer(
        group_size=4, kv_heads=8, numbers=256, key_bytes=256, causal=True,
        max_visible_keys=None, processors=132,
    )  # fmt: skip
    batch = BatchBounds(8, 8 * 400, 400, 131072)
    shape = replace(BATCHES["ragged"], head_size=128, group=4, dtype=BF16)
    made = make_batch(shape, device="cpu")
    plan = family.plan(to_call(made, make_options(made), *made.fresh()))
    extra = plan.estimate(layer, batch).time - plan.prefill.estimate(layer, batch).time
    read_once = 8 * 8 * 131072 * 256 / (DECODE_BYTES_PER_US * 132)
    assert 3 * read_once < extra < 3 * read_once + 20


def run(
    batch: BatchTensors, options: AttentionOptions, short_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the kernels into an output and a log-sum-exp full of NaN."""
    out, lse = batch.fresh()
    call = to_call(batch, options, out, lse)
    launch = partial(planned(family, call).launch_prefill, call, short_rows)
    return launched(launch, out, lse)


BATCHES = {
    "a prompt": BatchPlan((400,), (400,), needle="first"),
    "a chunk of a prompt": BatchPlan((130,), (515,), needle="tile edge"),
    "ragged": BatchPlan(
        (1, 200, 0, 77, 129, 3), (50, 200, 40, 300, 129, 260), needle="last"
    ),
    "many requests": BatchPlan(
        (2,) * 70 + (100,), (5,) * 70 + (300,), needle="first new"
    ),
    "blocks of 48": BatchPlan((150,), (333,), block_size=48, needle="block edge"),
    "blocks of 1": BatchPlan((50,), (133,), block_size=1, needle="last"),
    "interleaved": BatchPlan((150, 66), (333, 66), layout="interleaved"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "a window": {"sliding_window": 100},
    "a window of several tiles": {"sliding_window": 330},
    "chunks": {"attention_chunk_size": 100},
    "a cap": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 90, "logits_soft_cap": 20.0, "sinks": True},
    "scales that are numbers": {"k_scale": 0.7, "v_scale": 2.5},
}


@needs_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_within_its_error_budget(
    name: str,
    head_size: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    reference: Twin,
) -> None:
    plan = replace(BATCHES[name], head_size=head_size, group=4, dtype=dtype)
    batch = make_batch(plan, cache_dtype)
    options = make_options(batch)
    assert_right(batch, *run(batch, options), reference, options)


@needs_hopper
@pytest.mark.parametrize("needle", ["first new", "tile edge"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_row_of_a_call_with_options_is_within_its_error_budget(
    name: str, needle: str, reference: Twin
) -> None:
    plan = BatchPlan(
        (1, 200, 0, 77, 129, 300), (50, 200, 40, 300, 129, 700),
        head_size=128, group=4, dtype=BF16, needle=needle,
    )  # fmt: skip
    batch = make_batch(plan)
    options = make_options(batch, **OPTIONS[name])
    assert_right(batch, *run(batch, options), reference, options)


@needs_hopper
@pytest.mark.parametrize("needle", ["first", "tile edge"])
def test_a_needle_among_128k_keys_is_found(needle: str, reference: Twin) -> None:
    plan = BatchPlan(
        (40,), (131072 - 3,), kv_heads=1, group=4, head_size=128, dtype=BF16,
        needle=needle,
    )  # fmt: skip
    batch = make_batch(plan)
    options = make_options(batch)
    assert_right(batch, *run(batch, options), reference, options)


@needs_hopper
def test_short_and_long_requests_of_a_batch_are_both_computed(reference: Twin) -> None:
    plan = BatchPlan(
        (1, 1100, 1, 4), (700, 1300, 65, 129), head_size=128, group=4, dtype=BF16,
        needle="last", padding=2,
    )  # fmt: skip
    batch = make_batch(plan)
    options = make_options(batch)
    out, lse = batch.fresh()
    call = to_call(batch, options, out, lse)
    planned = make_attention_plan(call)
    assert isinstance(planned.prefills[0], family.CodePrefillPlan)
    bounds = BatchBounds(4, 1106, 1100, 1300)
    plans = planned.every[0], planned.decodes[0], planned.prefills[0]
    assert planned.choose(*plans, bounds) is None
    TWINS["optimized"].paged_attention(
        **batch.arguments(), out=out, lse=lse, options=options
    )
    assert_right(batch, out, lse, reference, options)


@needs_hopper
def test_unallocated_slots_do_not_change_a_bit() -> None:
    plan = replace(BATCHES["ragged"], head_size=128, group=4, dtype=BF16)
    batch = make_batch(plan)
    options = make_options(batch)
    expected, expected_lse = run(batch, options)
    for cache in (batch.key_cache, batch.value_cache):
        codes = cache.view(torch.uint8)
        codes[cache.float().isnan()] = 0x7E
    out, lse = run(batch, options)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


@needs_hopper
def test_one_captured_launch_serves_other_lengths(reference: Twin) -> None:
    plan = BatchPlan((150, 66), (900, 300), group=4, head_size=128, dtype=BF16)
    batch = make_batch(plan)
    options = make_options(batch)
    out, lse = run(batch, options)
    call = to_call(batch, options, out, lse)
    launch = partial(family.plan(call).launch_prefill, call, 0)
    launch()
    check = partial(assert_right, batch, out, lse, reference, options)
    check_captured(launch, batch, out, lse, check)

"""Tests of the Hopper prefill kernel: compiled code, and results on a GPU."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.checks.dense import judge_attention, judge_lse, same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.common.config import (
    NARROW_TILE_KEYS,
    WARPGROUP_M,
    choose_consumers,
)
from pagetwin.optimized.runtime import workspace
from pagetwin.optimized.runtime.direct_launch import find_direct_launch
from support.compile_prefill_sm90 import BF16, CASES, EVERY_DAY, FP16
from support.compiler_process import json_lines
from support.prefill_batches import BATCHES, OPTIONS
from support.sm90_calls import (
    NAN,
    assert_right,
    build,
    build_sizes,
    check_captured_batches,
    make_options,
    make_plan,
    needs_hopper,
    own_counters,
    run,
    to_call,
)
from support.twins import Twin
from torch import Tensor
from triton.backends.nvidia.driver import wrap_handle_tensordesc

__all__ = ["own_counters"]
SCRIPT = Path(__file__).parents[1] / "support/compile_prefill_sm90.py"


SIZES = [64, 96, 128, 192, 256]
"""Head sizes of most tests. Those of 192 have values of 128."""


@pytest.mark.compile
def test_the_assembler_lets_products_and_softmax_overlap(
    report_lines: Callable[..., None],
) -> None:
    """Earlier faults: serialized wgmma, 16-bit numbers unpacked and packed, register spills, and
    single numbers loaded and stored where a thread has two neighbours."""
    lines = json_lines(SCRIPT, *range(EVERY_DAY))
    assert len(lines) == EVERY_DAY
    for case, line in zip(CASES, lines, strict=False):
        report_lines(
            f"sm_90   {line['case']:<40} {line['registers']:>3} registers"
            f" {line['spilled']:>4} bytes spilled {line['shared']:>7} bytes shared"
        )
        assert not line["warnings"], line
        assert line["shared"] <= 232448, line
        # the spills are in the producer warps and at the ends of a work item, of which
        # batch-invariant rows have one per split, and appends combine partial results
        is_invariant = "batch_invariant" in case.options
        is_split = is_invariant or case.is_append
        assert line["spilled"] <= (288 if is_split else 256), line
        consumers = choose_consumers(
            case.head_size,
            case.value_size or case.head_size,
            is_split or case.is_prefix,
        )
        few_rows = case.max_query_len * case.group <= WARPGROUP_M.value
        if case.is_narrow or (case.is_append and few_rows):
            consumers = 1
        # pairs of neighbours: 32 bits of an output, 64 bits of a partial result
        widths = line["widths"]
        assert not {"LDG 16", "STG 16"} & widths.keys(), line
        if is_split or case.is_prefix:
            assert widths["STG 64"] >= case.head_size // 4 * consumers, line
        has_left_edge = "sliding_window" in case.options
        loops = 2 + has_left_edge + (case.head_size > 128 or is_split)
        assert len(line["loops"]) == loops * consumers, line
        for consumer in range(consumers):
            of_consumer = line["loops"][consumer * loops : (consumer + 1) * loops]
            # the loop without masks, which has most iterations
            hot = min(of_consumer, key=lambda loop: loop["instructions"])
            # wgmma instructions are in flight within one block
            has_narrow_tiles = case.head_size == 64 and has_left_edge
            tile_products = 4 if case.head_size == 256 or has_narrow_tiles else 8
            if case.head_size == 96:
                # 64 and 32 columns of P @ V, and then Q @ K
                tile_products = 8 + 8 + 96 // 16
            assert hot["HGMMA"] == tile_products, line
            if consumers == 3:
                # they also pass their turn on, before all exponentials are done
                assert hot["MUFU before BAR"] < hot["MUFU"] * 0.8, line
            for loop in of_consumer:
                # nothing is repacked; loops with masks have few iterations, and one instruction
                # in 64 of theirs may store or load what was spilled
                few = loop["instructions"] // 64
                assert loop["PRMT"] <= 1, line
                num_barriers = 3 if case.head_size == 96 else max(1, consumers - 1)
                assert loop["BAR"] <= num_barriers, line
                assert loop["STL"] <= (0 if loop is hot else few), line
                assert loop["LDL"] <= (1 if loop is hot else few), line


EVERY_SIZE = (
    8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 160, 168, 184,
    192, 200, 208, 224, 240, 256,
)  # fmt: skip
"""Head sizes, with each shape of tiles and of parts of products and accumulators."""


@needs_hopper
@pytest.mark.parametrize("head_size", EVERY_SIZE)
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_within_its_error_budget(
    name: str, head_size: int, reference: Twin
) -> None:
    plan = replace(BATCHES[name], head_size=head_size, dtype=BF16)
    assert_right(build(plan, "cuda"), reference)


@needs_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "name", ["ragged", "four heads to one", "seven heads to one", "heads before slots"]
)
@pytest.mark.parametrize(
    ("key_size", "value_size"),
    [
        (192, 128), (192, 192), (128, 64), (64, 128), (96, 64), (256, 128), (64, 256),
        (160, 96), (72, 200), (136, 40), (200, 160),
    ],
)  # fmt: skip
def test_keys_and_values_of_different_sizes_are_within_their_error_budget(
    key_size: int, value_size: int, name: str, causal: bool, reference: Twin
) -> None:
    plan = replace(BATCHES[name], dtype=BF16, needle="none")
    batch = build_sizes(plan, key_size, value_size, "cuda")
    assert_right(batch, reference, options=AttentionOptions(causal=causal))


@needs_hopper
@pytest.mark.parametrize("place", range(16))
def test_the_weight_of_the_largest_score_is_one(place: int, reference: Twin) -> None:
    """For each column of a thread's: some exponentials are computed by a polynomial."""
    plan = BatchPlan((300,), (300,), head_size=128, dtype=BF16, needle="first")
    batch = build(plan, "cuda")
    block = batch.rows[0][0]
    for cache in (batch.key_cache, batch.value_cache):
        cache[block, [0, place]] = cache[block, [place, 0]].clone()
    assert_right(batch, reference)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("group", [7, 8])
@pytest.mark.parametrize("needle", ["none", "first new", "tile edge"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_row_of_a_call_with_options_is_within_its_error_budget(
    name: str, needle: str, group: int, head_size: int, reference: Twin
) -> None:
    """Nine tokens of seven query heads are 63 of 64 rows; eight of eight are all of them."""
    plan = BatchPlan(
        (1, 200, 0, 77, 129, 300),
        (50, 200, 40, 300, 129, 700),
        group=group,
        head_size=head_size,
        dtype=BF16,
        needle=needle,
    )
    batch = build(plan, "cuda")
    assert_right(batch, reference, options=make_options(batch, OPTIONS[name]))


@needs_hopper
@pytest.mark.parametrize("head_size", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("group", [1, 7, 8])
@pytest.mark.parametrize("needle", ["none", "first new", "tile edge"])
@pytest.mark.parametrize(
    "given",
    [
        {"sliding_window": 1},
        {"sliding_window": 65},
        {"sliding_window": 150, "sinks": True},
        {"sliding_window": 330},
        {"attention_chunk_size": 100},
        {"sliding_window": 40, "attention_chunk_size": 150},
    ],
)
def test_windows_and_chunks_to_both_sides_are_within_their_error_budget(
    given: dict[str, Any], needle: str, group: int, head_size: int, reference: Twin
) -> None:
    """From a cache, and ragged keys give the same bits."""
    plan = BatchPlan(
        (1, 200, 0, 77, 129, 300),
        (50, 200, 40, 300, 129, 700),
        group=group,
        head_size=head_size,
        dtype=BF16,
        needle=needle,
    )
    batch = build(plan, "cuda")
    options = replace(make_options(batch, given), causal=False)
    assert_right(batch, reference, options=options)
    expected, expected_lse = run(batch, options=options)
    keys, values, starts = ragged(batch)
    out, lse = batch.fresh()
    call = to_call(batch, out, lse, options)._replace(
        key=keys, value=values, block_table=None, lengths=starts
    )
    make_plan(call).launch_prefill(call, 0)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


@needs_hopper
@pytest.mark.parametrize("needle", ["none", "first new", "tile edge"])
@pytest.mark.parametrize("limit", [NARROW_TILE_KEYS, NARROW_TILE_KEYS + 1])
@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_windows_and_chunks_around_the_change_of_the_kv_tile(
    name: str, limit: int, needle: str, reference: Twin
) -> None:
    """With one key more, tiles of head size 64 have 128 keys and not 64.

    The first new token of the second request outweighs all other keys, and leaves the window of
    its last 200 rows.
    """
    plan = BatchPlan(
        (300, 1230, 77), (1500, 1231, 2300), head_size=64, dtype=BF16, needle=needle
    )
    batch = build(plan, "cuda")
    assert_right(batch, reference, options=make_options(batch, {name: limit}))


@needs_hopper
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_blocks_before_every_window_are_not_read(
    name: str, head_size: int, block_size: int
) -> None:
    """They may have been reallocated, and then hold NaN."""
    plan = BatchPlan(
        (150, 40), (777, 295), head_size=head_size, block_size=block_size, dtype=BF16
    )
    batch = build(plan, "cuda")
    options = AttentionOptions(causal=True, **{name: 70})
    before = run(batch, options=options)
    caches = batch.key_cache.clone(), batch.value_cache.clone()
    for query_len, kv_len, row in zip(
        plan.query_lens, plan.kv_lens, batch.rows, strict=True
    ):
        first = kv_len - query_len
        first = first - 69 if name == "sliding_window" else first // 70 * 70
        for cache in caches:
            cache[row[: max(first, 0) // block_size]] = NAN
    again = replace(batch, key_cache=caches[0], value_cache=caches[1])
    after = run(again, options=options)
    for one, other in zip(before, after, strict=True):
        assert bool(one.isfinite().all())
        assert same_bits(one, other)


@needs_hopper
@pytest.mark.parametrize("head_size", [64, 128, 192])
@pytest.mark.parametrize("name", ["ragged", "a chunk of a prompt", "a large scale"])
def test_every_row_of_float16_is_within_its_error_budget(
    name: str, head_size: int, reference: Twin
) -> None:
    plan = replace(BATCHES[name], head_size=head_size, dtype=FP16)
    assert_right(build(plan, "cuda"), reference)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("group", [2, 3])
def test_short_requests_are_not_written(
    group: int, head_size: int, reference: Twin
) -> None:
    plan = replace(BATCHES["ragged"], head_size=head_size, group=group, dtype=BF16)
    for short_rows in (2, 3, 16, 154, 155, 258):
        assert_right(build(plan, "cuda"), reference, short_rows)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("poison", [0.0, float("inf"), 1e4])
def test_unallocated_slots_do_not_change_a_bit(head_size: int, poison: float) -> None:
    """NaN or another value past a sequence's end gives bitwise equal results."""
    plan = BatchPlan((40, 150, 7), (40, 333, 129), head_size=head_size, dtype=BF16)
    batch = build(plan, "cuda")
    before = run(batch)
    caches = [
        torch.where(cache.isnan(), poison, cache)
        for cache in (batch.key_cache, batch.value_cache)
    ]
    table = batch.block_table.clone()
    for req, row in enumerate(batch.rows):
        table[req, len(row) :] = 0
    after = run(
        replace(batch, key_cache=caches[0], value_cache=caches[1], block_table=table)
    )
    for one, other in zip(before, after, strict=True):
        assert bool(one.isfinite().all())
        assert same_bits(one, other)


@needs_hopper
def test_a_query_without_a_visible_key_gets_zero() -> None:
    """A sequence shorter than its queries: the first of them precede its first key."""
    plan = BatchPlan((300, 40), (300, 40), head_size=128, dtype=BF16)
    batch = build(plan, "cuda")
    whole, whole_lse = run(batch)
    short = torch.tensor([100, 0], dtype=torch.int32, device="cuda")
    out, lse = run(replace(batch, seq_lens=short))
    assert bool((out[:200] == 0).all() and (lse[:, :200] == -torch.inf).all())
    assert bool((out[300:] == 0).all() and (lse[:, 300:] == -torch.inf).all())
    assert bool(out[200:300].isfinite().all() and lse[:, 200:300].isfinite().all())
    assert bool(whole.isfinite().all() and whole_lse.isfinite().all())


def ragged(batch: BatchTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch's keys and values concatenated, and the index of each request's first."""
    rows = []
    for kv_len, row in zip(batch.plan.kv_lens, batch.rows, strict=True):
        size = batch.plan.block_size
        rows += [row[p // size] * size + p % size for p in range(kv_len)]
    rows += [0] * 40  # padding
    index = torch.tensor(rows, device=batch.query.device)
    keys, values = (
        cache.reshape(-1, *cache.shape[2:])[index]
        for cache in (batch.key_cache, batch.value_cache)
    )
    keys[-40:] = NAN
    values[-40:] = NAN
    starts = torch.tensor([0, *batch.plan.kv_lens], device=batch.query.device)
    return keys, values, starts.cumsum(0).int()


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_keys_give_the_same_bits_as_a_cache(
    head_size: int, causal: bool
) -> None:
    plan = replace(BATCHES["ragged"], head_size=head_size, dtype=BF16)
    batch = build(plan, "cuda")
    options = AttentionOptions(causal=causal)
    expected, expected_lse = run(batch, options=options)
    keys, values, starts = ragged(batch)
    out, lse = batch.fresh()
    call = to_call(batch, out, lse, options)._replace(
        key=keys, value=values, block_table=None, lengths=starts
    )
    make_plan(call).launch_prefill(call, 0)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
def test_without_a_mask_every_query_attends_to_its_whole_sequence(
    head_size: int,
) -> None:
    plan = BatchPlan((200, 5, 90), (300, 0, 129), head_size=head_size, dtype=BF16)
    batch = build(plan, "cuda")
    out, lse = run(batch, options=AttentionOptions(causal=False))
    keys, values, starts = ragged(batch)
    begins = batch.query_start_loc.tolist()
    for req, (begin, end) in enumerate(itertools.pairwise(begins)):
        own = slice(int(starts[req]), int(starts[req + 1]))
        if own.start == own.stop:
            assert bool((out[begin:end] == 0).all())
            assert bool((lse[:, begin:end] == -torch.inf).all())
            continue
        key, value = (
            states[own].double().repeat_interleave(plan.group, 1)
            for states in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", batch.query[begin:end].double(), key)
        scores *= head_size**-0.5
        exact = torch.einsum("hqk,khd->qhd", scores.softmax(2), value)
        # one rounding of the result, and of each weight
        budget = 4 * torch.finfo(BF16).eps * value.abs().amax()
        assert float((out[begin:end].double() - exact).abs().max()) < float(budget) / 4
        assert torch.allclose(
            lse[:, begin:end].double(), scores.logsumexp(2), atol=1e-5
        )


@needs_hopper
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("layout", ["heads first", "padded rows"])
def test_the_output_may_have_any_strides(layout: str, group: int) -> None:
    plan = BatchPlan((150, 20), (333, 20), head_size=128, group=group, dtype=BF16)
    batch = build(plan, "cuda")
    expected, _ = run(batch)
    tokens, heads, size = expected.shape
    if layout == "heads first":
        memory = torch.full((heads, tokens, size), NAN, dtype=BF16, device="cuda")
        out = memory.transpose(0, 1)
    else:
        memory = torch.full(
            (tokens + 2, heads, size + 8), NAN, dtype=BF16, device="cuda"
        )
        out = memory[1:-1, :, :size]
    run(batch, out=out)
    assert same_bits(out, expected)
    assert int(memory.isnan().sum()) == memory.numel() - out.numel()


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
def test_an_output_of_float32_is_rounded_to_the_output_of_16_bits(
    head_size: int,
) -> None:
    """Latent prefill merges outputs of float32, which TMA does not store."""
    plan = BatchPlan((150, 20), (333, 20), head_size=head_size, dtype=BF16, padding=2)
    batch = build(plan, "cuda")
    expected, expected_lse = run(batch)
    out, lse = run(batch, out=torch.full_like(expected, NAN, dtype=torch.float32))
    assert same_bits(out[:170].to(BF16), expected[:170])
    assert same_bits(lse[:, :170], expected_lse[:, :170])
    assert bool((out[:170] != expected[:170]).any())
    # the kernel of keys of 192 and values of 128 leaves rows of no request as they are
    rest = out[170:]
    assert bool((rest.isnan() if head_size == 192 else rest == 0).all())


@needs_hopper
def test_one_captured_launch_serves_other_lengths(reference: Twin) -> None:
    plans = [
        BatchPlan((200, 3, 90), (300, 40, 129), head_size=128, dtype=BF16),
        BatchPlan((93, 0, 200), (129, 40, 300), head_size=128, dtype=BF16, seed=1),
        BatchPlan((50, 50, 193), (50, 200, 300), head_size=128, dtype=BF16, seed=2),
    ]
    check_captured_batches(
        plans,
        lambda call: partial(make_plan(call).launch_prefill, call, 0),
        reference,
    )


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
def test_calls_of_one_plan_may_have_any_number_of_tokens(
    head_size: int, reference: Twin
) -> None:
    """A plan does not depend on the tokens and addresses of the first call."""
    launch_plan = None
    for query_len in (40, 500, 1, 130):
        plan = BatchPlan((query_len,), (500,), head_size=head_size, dtype=BF16)
        batch = build(replace(plan, seed=query_len), "cuda")
        out, lse = batch.fresh()
        call = to_call(batch, out, lse)
        launch_plan = launch_plan or make_plan(call)
        assert launch_plan.takes(call)
        launch_plan.launch_prefill(call, 0)
        verdict, exact_lse = judge_attention(batch, out, reference)
        assert verdict.ok, verdict
        assert judge_lse(batch, lse, exact_lse) <= 1


def test_a_kernel_whose_launch_cannot_be_found_is_left_to_triton() -> None:
    """A direct launch needs a part of Triton's launcher. Without it the launch is still right."""
    options = {"launch_cooperative_grid": False, "launch_pdl": False}
    of_triton_37 = {"arg_annotations": (), "kernel_signature": b""}
    scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
    maker: Any = SimpleNamespace(launch=print, **options, **of_triton_37)
    compiled = SimpleNamespace(
        run=maker, function=7, packed_metadata=(4, 1, 0), metadata=SimpleNamespace()
    )
    usual = find_direct_launch(compiled, 0)
    assert usual is not None and usual.function is maker
    vars(maker).update(scratch)
    direct = find_direct_launch(compiled, 0)
    assert direct is not None and direct.function is print
    maker.launch = lambda *arguments: arguments
    usual = find_direct_launch(compiled, 0)
    assert usual is not None and usual.function is maker
    compiled.metadata.tensordesc_meta = [{"swizzle": 3}]
    assert find_direct_launch(compiled, 0) is None

    # as this version of triton wraps the launch of a kernel with tensor maps
    kinds = {"query": "tensordesc<fp16[64, 64]>", "scale": "fp32"}
    maker.launch = wrap_handle_tensordesc(print, kinds, [{"swizzle": 3}])
    direct = find_direct_launch(compiled, 0)
    assert direct is not None and direct.function is print
    maker.global_scratch_size = 128
    usual = find_direct_launch(compiled, 0)
    # a copy of Triton's launcher object, which takes encoded tensor maps
    assert usual is not None and usual.function.launch is print


@needs_hopper
def test_many_launches_in_a_row_give_the_same_bits() -> None:
    """Each takes its work items from the counter that the launch before set back to 0."""
    plan = BatchPlan(
        (300, 5, 170), (400, 40, 300), head_size=64, dtype=BF16, kv_heads=4
    )
    batch = build(plan, "cuda")
    expected = run(batch)
    for _ in range(50):
        for one, other in zip(run(batch), expected, strict=True):
            assert torch.equal(one, other)
    for kept in workspace._streams.values():
        assert not bool(kept.counters.any())

"""Tests of the Hopper latent decode kernel: supported calls, compiled code, results on a GPU."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compile_latent_sm90 import BF16, CASES, FP16, Case, make_call
from pagetwin.conformance.api.check import load_candidate, make_setting
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.conformance.laws import latents as laws
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.dispatch.dispatch import PIPELINE
from pagetwin.optimized.kernels.sm90.latent import family as latent_family
from pagetwin.optimized.kernels.sm90.latent import plan as latent_plan
from pagetwin.optimized.kernels.sm90.latent.combination import ONE_ROW, TWO_ROWS
from pagetwin.optimized.kernels.sm90.latent.combine import (
    LatentCombineArguments,
    latent_combine_kernel,
)
from pagetwin.optimized.kernels.sm90.latent.config import BLOCK_M, RANK
from pagetwin.optimized.kernels.sm90.latent.plan import LatentDecodePlan
from pagetwin.optimized.runtime.attention_call import AttentionCall
from pagetwin.optimized.runtime.family import Task
from pagetwin.optimized.runtime.launcher import Launcher
from support import sm90_calls
from support.compiler_process import json_lines
from support.latent_batches import BATCHES, LATENTS, assert_right, make_batch
from support.sm90_calls import (
    check_captured,
    launched,
    needs_hopper,
    planned,
)
from support.twins import Twin
from torch import Tensor

SCRIPT = Path(__file__).with_name("compile_latent_sm90.py")
NAN = float("nan")


@pytest.mark.compile
def test_the_assembler_neither_spills_nor_serializes_wgmma(
    report_lines: Callable[..., None],
) -> None:
    """Each consumer carries 128 accumulator registers, so a spill would be in its mainloop."""
    lines = json_lines(SCRIPT)
    assert len(lines) == len(CASES)
    for line in lines:
        report_lines(
            f"sm_90   latent decode {line['case']:<60} {line['registers']:>3} registers"
            f" {line['spilled']:>4} bytes spilled {line['shared']:>7} bytes shared"
        )
        assert not line["warnings"], line
        assert line["shared"] <= 232448, line
        # The producer of four row boxes per tile spills seven registers. That does not cost time:
        # docs/kernel_notes.md has times of blocks of 16, of which a tile has four, and of 64.
        # A copying producer of blocks of 12 spills three, outside of the loop over KV tiles.
        most = {16: 28, 12: 12}.get(line["numbers"]["BLOCK_SIZE"], 0)
        assert line["spilled"] <= most, line


def _plan_is_made(call: AttentionCall) -> bool:
    try:
        latent_family.plan(call)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latent_decodes_are_planned(case: Case) -> None:
    """The kernel takes slices of a wider cache too."""
    assert _plan_is_made(make_call(case))
    call = make_call(case, 640)
    assert latent_family.plan(call).takes(call)
    assert latent_family.plan(call).kv_stride == 640


def test_what_the_kernel_does_not_compute_has_no_plan() -> None:
    """Other head sizes, more kv heads, values of another width, FP8, options."""
    call = make_call(CASES[0])
    key = call.key
    assert not _plan_is_made(call._replace(value=key[..., :256]))
    assert not _plan_is_made(call._replace(query=call.query[..., :512]))
    assert not _plan_is_made(call._replace(key=key.repeat(1, 1, 2, 1)))
    assert not _plan_is_made(call._replace(key=key.float(), value=key[..., :512]))
    odd = key.new_zeros(4, 64, 1, 580)[..., :576]
    assert not _plan_is_made(call._replace(key=odd, value=odd[..., :512]))
    for options in (
        AttentionOptions(causal=torch.ones(2, dtype=torch.bool)),
        AttentionOptions(causal=True, sliding_window=8),
        AttentionOptions(causal=True, attention_chunk_size=8),
        AttentionOptions(causal=True, logits_soft_cap=1.0),
        AttentionOptions(causal=True, sinks=torch.zeros(call.query.shape[1])),
        AttentionOptions(causal=True, batch_invariant=True),
    ):
        assert not _plan_is_made(call._replace(options=options))


def test_an_output_whose_heads_are_far_apart_has_no_plan() -> None:
    """The offset of a head is a product of 32 bits, which was not checked."""
    call = make_call(CASES[0])
    _, heads, size = call.out.shape
    for most, is_planned in ((2**31 - 1, True), (2**31 + 8 * heads, False)):
        strides = (size, most // heads // 8 * 8, 1)
        out = torch.empty_strided(
            call.out.shape, strides, dtype=call.out.dtype, device="meta"
        )
        assert _plan_is_made(call._replace(out=out)) is is_planned


def test_a_plan_takes_only_values_that_are_the_first_columns_of_the_keys() -> None:
    """Addresses and lengths are not part of a signature."""
    call = make_call(CASES[0])
    plan = latent_family.plan(call)
    assert plan.takes(call)
    assert not plan.takes(call._replace(value=call.key[..., 64:]))
    assert not plan.takes(call._replace(scale=-1.0))
    assert plan.takes(call._replace(max_query_len=500))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_launches_get_plain_numbers(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher takes the address of an option that is not a float."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, *args: given.append(args))
    monkeypatch.setattr(latent_plan, "count_processors", lambda device: 132)
    call = make_call(case)
    latent_family.plan(call).launch(call)
    assert len(given) == 2
    for grid, pointers, options, numbers, *_ in given:
        assert all(type(option) is float for option in options)
        assert all(type(number) is int for number in (*grid, *pointers, *numbers))


@pytest.mark.extended
@pytest.mark.parametrize("constants", [ONE_ROW, TWO_ROWS])
def test_partial_results_are_combined_by_their_log_sum_exp(
    constants: dict[str, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row tiles in one segment keep their rows; rows of no request are cleared."""
    if device.type == "cpu":
        monkeypatch.setattr(triton.language.extra.cuda, "gdc_wait", lambda: None)
    torch.manual_seed(0)
    # the third request is in one segment, the fourth has no queries, the last has three row tiles
    heads, lengths, segments = 40, [1, 1, 1, 0, 4], 14
    # request, row tile, first and last segment
    found_splits = [(0, 0, 0, 1), (1, 0, 1, 10), (4, 0, 11, 12), (4, 2, 12, 13)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(starts[-1]) + 2
    partial = torch.full((segments, 2, BLOCK_M.value, RANK.value), NAN)
    partial_lse = torch.full((segments, 2, BLOCK_M.value), NAN)
    splits = torch.full((segments, 4), -1)
    out = torch.full((tokens * heads, RANK.value), 7.0)
    lse = torch.full((heads, tokens), 7.0)
    expected, expected_lse = out.clone(), lse.T.flatten()
    expected[starts[-1] * heads :] = 0
    expected_lse[starts[-1] * heads :] = -torch.inf
    for req, row_tile, first, last in found_splits:
        skipped = row_tile * BLOCK_M.value
        rows = min(lengths[req] * heads - skipped, BLOCK_M.value)
        begin = int(starts[req]) * heads + skipped
        splits[first, :3] = torch.tensor([last, begin, rows])
        segment = torch.arange(first, last + 1)
        own = (segment, (segment == first).long(), slice(0, rows))
        values = torch.randn(len(segment), rows, RANK.value)
        sums = 3 * torch.randn(len(segment), rows)
        sums[0, 0] = -torch.inf  # a part whose keys are all masked
        partial[own], partial_lse[own] = values, sums
        sums = sums * math.log(2)
        mean = (values * sums.softmax(0)[..., None]).sum(0)
        expected[begin : begin + rows] = mean
        expected_lse[begin : begin + rows] = sums.logsumexp(0)
    out = out.view(tokens, heads, RANK.value)
    expected = expected.view_as(out)
    expected_lse = expected_lse.view(tokens, heads).T
    # in a launch there may be more programs than row tiles that are split
    for splits_bound in (len(found_splits), segments):
        found, found_lse = out.to(device, copy=True), lse.to(device, copy=True)
        arguments = LatentCombineArguments(
            out=found,
            lse=found_lse,
            partial_out=partial.to(device),
            partial_lse=partial_lse.to(device),
            splits=splits.int().to(device),
            query_start_loc=starts.int().to(device),
            num_reqs=len(lengths),
            num_heads=heads,
            num_tokens=tokens,
            partial_rows=BLOCK_M.value,
            num_segments=segments,
            out_stride_token=out.stride(0),
            out_stride_head=out.stride(1),
            lse_stride_head=lse.stride(0),
            lse_stride_token=lse.stride(1),
        )
        grid = (BLOCK_M.value // constants["ROWS"], splits_bound + 1, 1)
        latent_combine_kernel[grid](*arguments, **constants)
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close(found_lse.cpu(), expected_lse)


def to_call(batch: BatchTensors, out: Tensor, lse: Tensor | None) -> AttentionCall:
    """Return the call that computes a batch, with the batch's own bound on keys."""
    call = sm90_calls.to_call(batch, out, lse)
    return call._replace(max_key_len=batch.max_seq_len)


def run(batch: BatchTensors) -> tuple[Tensor, Tensor]:
    """Launch the kernel into an output and a log-sum-exp full of NaN."""
    out, lse = batch.fresh()
    call = to_call(batch, out, lse)
    return launched(partial(planned(latent_family, call).launch, call), out, lse)


@needs_hopper
@pytest.mark.parametrize("heads", [1, 16, 40, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_within_its_error_budget(
    name: str, heads: int, reference: Twin
) -> None:
    """Blocks that no request has, and the ends of last blocks, hold NaN."""
    batch = make_batch(replace(BATCHES[name], group=heads, dtype=BF16))
    assert_right(batch, *run(batch), reference)


@needs_hopper
@pytest.mark.parametrize("heads", [16, 128])
def test_rows_in_float16_are_within_their_error_budgets(
    heads: int, reference: Twin
) -> None:
    plan = replace(BATCHES["one to four query tokens"], group=heads, dtype=FP16)
    batch = make_batch(plan)
    assert_right(batch, *run(batch), reference)


@needs_hopper
@pytest.mark.parametrize("heads", [16, 128])
def test_many_launches_in_a_row_give_the_same_bits(heads: int) -> None:
    """With the log-sum-exp and without it."""
    plan = replace(BATCHES["many splits of four tokens"], group=heads, dtype=BF16)
    batch = make_batch(plan)
    expected, expected_lse = run(batch)
    for has_lse in (True, False):
        out, lse = batch.fresh()
        call = to_call(batch, out, lse if has_lse else None)
        launch_plan = planned(latent_family, call)
        for _ in range(20):
            out.fill_(NAN)
            launch_plan.launch(call)
            assert same_bits(out, expected)
        assert not has_lse or same_bits(lse, expected_lse)


@needs_hopper
@pytest.mark.parametrize("heads", [16, 128])
def test_one_captured_launch_serves_other_lengths(heads: int, reference: Twin) -> None:
    lengths = (900, 300, 1300, 64)
    plan = BatchPlan((1, 1, 2, 1), lengths, group=heads, dtype=BF16, needle="first")
    batch = make_batch(plan)
    out, lse = run(batch)  # compiles
    call = to_call(batch, out, lse)
    launch = partial(planned(latent_family, call).launch, call)
    launch()
    check = partial(assert_right, batch, out, lse, reference)
    check_captured(launch, batch, out, lse, check)


@needs_hopper
@pytest.mark.parametrize("needle", ["none", "first", "last", "tile edge"])
@pytest.mark.parametrize("heads", [3, 128])
def test_the_laws_on_latents_hold_for_the_widths_of_the_kernel(
    heads: int, needle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laws draw smaller widths, which the portable kernels compute."""
    launched = []
    launch = LatentDecodePlan.launch

    def count(self: LatentDecodePlan, call: AttentionCall, task: Task) -> None:
        launched.append(call)
        launch(self, call, task)

    monkeypatch.setattr(LatentDecodePlan, "launch", count)
    PIPELINE.plans.clear()  # a call that was repeated would not be planned
    setting = make_setting(load_candidate("optimized"), "cuda")
    plan = replace(LATENTS, heads=heads, needle=needle)
    for is_rope in (False, True):
        laws.a_needle_among_latents_is_found(
            setting, ("latent_decode_attention", replace(plan, is_rope=is_rope))
        )
    assert len(launched) == 2


@needs_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("block_size", [1, 3, 8, 12, 16])
def test_blocks_of_any_size_are_read_in_place(
    block_size: int, heads: int, causal: bool, reference: Twin
) -> None:
    """Slots without a token hold NaN, and table entries past the end of a row any number."""
    for dtype, query_lens, kv_lens in (
        (BF16, (1,) * 9, (1, 63, 64, 65, 2048, 127, 128, 129, 700)),
        (FP16, (1, 0, 4, 70, 2), (2048, 5, 131, 331, 64)),
    ):
        plan = BatchPlan(
            query_lens, kv_lens, group=heads, dtype=dtype, block_size=block_size,
            padding=3, needle="block edge",
        )  # fmt: skip
        batch = make_batch(plan)
        out, lse = batch.fresh()
        options = AttentionOptions(causal=causal)
        call = to_call(batch, out, lse)._replace(options=options)
        launch_plan = planned(latent_family, call)
        assert launch_plan.is_copied is (block_size != 16)
        launched(partial(launch_plan.launch, call), out, lse)
        sm90_calls.assert_rows_right(
            batch, out, lse, reference, options, batch.value_cache.abs()
        )


@needs_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_blocks_of_one_slot_are_read_in_place(name: str, reference: Twin) -> None:
    """Rows of 640, padding, many splits, more requests than are counted at once."""
    plan = replace(BATCHES[name], group=16, dtype=BF16, block_size=1)
    batch = make_batch(plan)
    assert planned(latent_family, to_call(batch, *batch.fresh())).is_copied
    assert_right(batch, *run(batch), reference)


@needs_hopper
def test_many_copied_launches_in_a_row_give_the_same_bits() -> None:
    """A read of a tile before its copies have ended would show now and then."""
    for heads in (8, 128):
        plan = BatchPlan(
            (1,) * 40, (2048,) * 20 + (100,) * 20, group=heads, dtype=BF16, block_size=1
        )
        batch = make_batch(plan)
        expected, _ = run(batch)
        out, lse = batch.fresh()
        call = to_call(batch, out, lse)
        launch_plan = planned(latent_family, call)
        for _ in range(50):
            out.fill_(NAN)
            launch_plan.launch(call)
            assert same_bits(out, expected)


@needs_hopper
def test_requests_without_keys_have_outputs_of_zero() -> None:
    """In blocks that TMA reads, and in copied ones."""
    for block_size in (16, 1):
        plan = BatchPlan(
            (1, 2, 1), (200, 5, 131), group=16, dtype=BF16, block_size=block_size
        )
        batch = make_batch(plan)
        batch.seq_lens.copy_(torch.tensor([0, 0, 70]))
        out, lse = batch.fresh()
        call = to_call(batch, out, lse)
        call = call._replace(options=AttentionOptions(causal=False))
        launched(partial(planned(latent_family, call).launch, call), out, lse)
        assert not bool(out[:3].any()) and bool((lse[:, :3] == -torch.inf).all())
        assert bool(out[3].isfinite().all() and lse[:, 3].isfinite().all())


@needs_hopper
def test_slots_at_the_end_of_a_large_cache_are_read_in_place(
    reference: Twin,
) -> None:
    """4 million rows of 640 elements: offsets of elements need more than 32 bits."""
    rows = 2**22
    cache = torch.empty(rows, 1, 1, 640, dtype=BF16, device="cuda")[..., :576]
    slots = torch.arange(rows - 130, rows, device="cuda", dtype=torch.int32)
    cache[rows - 130 :] = torch.randn(130, 1, 1, 576, device="cuda")
    query = torch.randn(1, 16, 576, device="cuda", dtype=BF16)
    out = query.new_full((1, 16, 512), NAN)
    starts = torch.tensor([0, 1], device="cuda", dtype=torch.int32)
    call = AttentionCall(
        query, cache, cache[..., :512], slots[None], starts, starts[1:] * 130, 1, 130,
        0.05, out, None, AttentionOptions(causal=False),
    )  # fmt: skip
    planned(latent_family, call).launch(call)
    near = cache[rows - 130 :].clone()
    right = reference.sparse_attention(
        query, near, near[..., :512], (slots - slots[0])[None], scale=0.05
    )
    torch.testing.assert_close(out, right, atol=0.02, rtol=0.02)

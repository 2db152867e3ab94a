"""Tests of the Hopper FP8 decode kernel: supported calls, compiled code, results on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, build
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.portable.host import make_launches as prepare
from pagetwin.optimized.kernels.portable.options.score import lower_scores
from pagetwin.optimized.kernels.portable.options.visible_range import lower_masks
from pagetwin.optimized.kernels.sm90.code_decode import family
from pagetwin.optimized.runtime.attention_call import AttentionCall
from support.compile_fp8_decode_sm90 import CASES, E4M3, E5M2, EVERY_DAY
from support.compile_prefill_sm90 import BF16, FP16
from support.compiler_process import json_lines
from support.fp8_calls import assert_right, make_batch, make_options
from support.sm90_calls import NAN, check_captured, launched, needs_hopper, own_counters
from support.twins import TWINS, Twin
from torch import Tensor

__all__ = ["own_counters"]
SCRIPT = Path(__file__).parents[1] / "support/compile_fp8_decode_sm90.py"


@pytest.fixture
def optimized() -> Twin:
    """Return the operations of the optimized twin."""
    return TWINS["optimized"]


@pytest.mark.compile
def test_keys_and_values_go_to_registers_and_not_through_shared_memory(
    report_lines: Callable[..., None],
) -> None:
    """In the loop over keys nothing is stored in shared memory or spilled."""
    lines = json_lines(SCRIPT, *range(EVERY_DAY))
    assert len(lines) == EVERY_DAY
    for case, line in zip(CASES, lines, strict=False):
        report_lines(
            f"sm_90   FP8 decode {line['case']:<48} {line['registers']:>3} registers"
            f" {line['spilled']:>4} bytes spilled {line['shared']:>7} bytes shared"
        )
        loop = line["loop"]
        # four programs of 64 threads per SM
        assert line["registers"] <= 256, line
        assert line["shared"] <= 232448 // 4 - 1024, line
        # outside the loop over keys; more in the rotation of int4
        is_packed = case.cache_dtype == torch.uint8
        assert line["spilled"] <= (512 if is_packed else 16), line
        assert not loop["STS"] + loop["LDS"] + loop["LDL"] + loop["STL"], line
        # 16 bytes per load, or 8 of values with head size 64, and ids of at most four blocks; of
        # scales two loads and the ids of their blocks
        loads = 16 if case.head_size == 128 else 12
        loads = 12 if is_packed else loads
        assert loads < loop["LDG"] <= loads + 7, line
        # tiles of 8 rows or 16; queries of int4 have two parts
        products = case.head_size // (4 if case.query_len == 1 else 2)
        assert loop["HMMA"] == products + is_packed * products // 2, line


def is_chosen(batch: BatchTensors, options: AttentionOptions) -> bool:
    """Return whether the kernel computes the decodes of a batch."""
    call = AttentionCall(
        batch.query, batch.key_cache, batch.value_cache, batch.block_table,
        batch.query_start_loc, batch.seq_lens, batch.max_query_len, batch.max_seq_len,
        1.0, batch.fresh()[0], None, options,
    )  # fmt: skip
    return family.supports(call)


def run(
    batch: BatchTensors, optimized: Twin, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Compute a batch into an output and a log-sum-exp full of NaN."""
    assert is_chosen(batch, options)
    out, lse = batch.fresh()
    return launched(attention_of(batch, optimized, options, out, lse), out, lse)


def attention_of(
    batch: BatchTensors,
    optimized: Twin,
    options: AttentionOptions,
    out: Tensor,
    lse: Tensor,
) -> Callable[[], object]:
    """Return a function that computes a batch."""
    given = batch.arguments() | {"out": out, "lse": lse, "options": options}
    return partial(optimized.paged_attention, **given)


BATCHES = {
    "one key": BatchPlan((1,), (1,)),
    "a page": BatchPlan((1,), (16,), needle="last"),
    "a warp and a key": BatchPlan((1,), (33,), needle="last"),
    "one tile": BatchPlan((1,), (128,), needle="last"),
    "one tile and a key": BatchPlan((1,), (129,), needle="last"),
    "a key less": BatchPlan((1,), (127,), needle="tile edge"),
    "ragged": BatchPlan(
        (1, 1, 1, 0, 1, 1, 1), (50, 200, 1, 40, 64, 129, 63), needle="last", padding=3
    ),
    "drafts": BatchPlan(
        (2, 1, 4, 3, 0, 1, 4), (300, 700, 4, 65, 5, 1, 131), needle="first new", seed=1
    ),
    "blocks of 48": BatchPlan((1, 2), (333, 70), block_size=48, needle="block edge"),
    "blocks of 256": BatchPlan((1, 2), (600, 70), block_size=256, needle="first"),
    "heads before slots": BatchPlan((1, 2), (333, 64), layout="hnd", needle="last"),
    "interleaved": BatchPlan((1, 2), (333, 64), layout="interleaved", needle="last"),
    "shared blocks": BatchPlan((1, 1), (333, 400), table="shared prefix"),
    "one split request": BatchPlan((1,), (5000,), kv_heads=1, needle="tile edge"),
    "split drafts": BatchPlan((4,), (3201,), needle="first"),
    "a long request beside short ones": BatchPlan(
        (1,) * 41, (3000,) + (70,) * 40, needle="first"
    ),
    "more requests than are counted at once": BatchPlan(
        (1, 2) * 65, (2, 3, 65, 17, 130) * 26, needle="last"
    ),
    "bounds above the maxima": BatchPlan((1, 2), (333, 70), spare_max=2, scale=0.1),
}


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("head_size", family.HEAD_SIZES)
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_within_its_error_budget(
    name: str, head_size: int, dtype: torch.dtype, optimized: Twin, reference: Twin
) -> None:
    """Blocks that no request has, and the ends of last blocks, hold NaN."""
    plan = replace(BATCHES[name], head_size=head_size, group=4, dtype=BF16)
    batch = make_batch(plan, dtype)
    options = make_options(batch)
    assert_right(batch, *run(batch, optimized, options), reference, options)


@needs_hopper
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_rows_of_float16_and_of_any_group_are_within_their_error_budgets(
    group: int, optimized: Twin, reference: Twin
) -> None:
    query_len = 16 // group
    plan = BatchPlan(
        (1, query_len, 0, 1), (300, 700, 4, 65), group=group, head_size=128,
        dtype=FP16, needle="first new", padding=2,
    )  # fmt: skip
    batch = make_batch(plan)
    options = make_options(batch)
    assert_right(batch, *run(batch, optimized, options), reference, options)


OPTIONS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "a window of one key": {"sliding_window": 1},
    "a window": {"sliding_window": 100},
    "a window of a tile": {"sliding_window": 128},
    "a window in both directions": {"sliding_window": 50, "causal": False},
    "chunks": {"attention_chunk_size": 100},
    "a window in chunks": {"sliding_window": 40, "attention_chunk_size": 150},
    "a cap": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 90, "logits_soft_cap": 20.0, "sinks": True},
    "scales that are numbers": {"k_scale": 0.7, "v_scale": 2.5},
}


@needs_hopper
@pytest.mark.parametrize("needle", ["none", "first new", "tile edge"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_row_of_a_call_with_options_is_within_its_error_budget(
    name: str, needle: str, optimized: Twin, reference: Twin
) -> None:
    plan = BatchPlan(
        (1, 4, 0, 2, 1), (50, 700, 40, 300, 2100), group=4, head_size=128,
        dtype=BF16, needle=needle,
    )  # fmt: skip
    batch = make_batch(plan)
    options = make_options(batch, **OPTIONS[name])
    assert_right(batch, *run(batch, optimized, options), reference, options)


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("needle", ["first", "tile edge", "last"])
def test_a_needle_among_128k_keys_is_found(
    needle: str, dtype: torch.dtype, optimized: Twin, reference: Twin
) -> None:
    plan = BatchPlan(
        (1,), (131072 - 3,), kv_heads=1, group=4, head_size=64, dtype=BF16,
        needle=needle,
    )  # fmt: skip
    batch = make_batch(plan, dtype)
    options = make_options(batch)
    assert_right(batch, *run(batch, optimized, options), reference, options)


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("head_size", family.HEAD_SIZES)
def test_every_code_counts_as_its_number_at_every_element(
    head_size: int, dtype: torch.dtype, optimized: Twin
) -> None:
    """One key per request: the weight is 1, and one-hot queries select elements of the key."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()]
    requests = head_size
    offset = torch.arange(requests)[:, None] * 5 + torch.arange(head_size)
    keys = codes[offset % len(codes)].cuda()
    cache = torch.full((requests, 16, 1, head_size), 0x7F, dtype=torch.uint8).cuda()
    cache[:, 0, 0] = keys.view(torch.uint8)
    cache = cache.view(dtype)
    for first in range(0, head_size, 16):
        query = torch.zeros(requests, 16, head_size, dtype=BF16, device="cuda")
        for head in range(16):
            query[:, head, first + head] = 3.0
        lse = torch.full((16, requests), NAN, device="cuda")
        out = optimized.paged_attention(
            query,
            cache,
            cache,
            torch.arange(requests, dtype=torch.int32, device="cuda")[:, None],
            torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
            torch.ones(requests, dtype=torch.int32, device="cuda"),
            1,
            1,
            scale=0.5,
            lse=lse,
            options=AttentionOptions(k_scale=0.25, v_scale=2.0),
        )
        numbers = keys.float()
        expected = 3.0 * 0.25 * 0.5 * numbers[:, first : first + 16].T
        torch.testing.assert_close(lse, expected, rtol=1e-6, atol=0)
        assert torch.equal(out.float(), 2.0 * numbers[:, None].expand_as(out))


@needs_hopper
@pytest.mark.parametrize("poison", [0x00, 0x7E, 0xFF])
def test_unallocated_slots_do_not_change_a_bit(poison: int, optimized: Twin) -> None:
    plan = replace(BATCHES["ragged"], head_size=128, group=4, dtype=BF16)
    batch = make_batch(plan)
    options = make_options(batch)
    expected, expected_lse = run(batch, optimized, options)
    for cache in (batch.key_cache, batch.value_cache):
        codes = cache.view(torch.uint8)
        codes[cache.float().isnan()] = poison
    out, lse = run(batch, optimized, options)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


@needs_hopper
@pytest.mark.parametrize("block_size", [16, 48])
def test_blocks_before_every_window_are_not_read(
    block_size: int, optimized: Twin
) -> None:
    """Their entries of the block table are not ids."""
    plan = BatchPlan(
        (1, 2), (900, 300), group=4, head_size=128, dtype=BF16, block_size=block_size
    )
    batch = make_batch(plan)
    options = make_options(batch, sliding_window=70)
    expected, _ = run(batch, optimized, options)
    for req, (query_len, kv_len) in enumerate(
        zip(plan.query_lens, plan.kv_lens, strict=True)
    ):
        first = kv_len - query_len - 70 + 1
        batch.block_table[req, : first // block_size] = 2**31 - 1
    out, _ = run(batch, optimized, options)
    assert same_bits(out, expected)


@needs_hopper
def test_a_cache_that_is_not_aligned_is_computed_by_the_portable_kernel(
    optimized: Twin, reference: Twin
) -> None:
    plan = replace(BATCHES["ragged"], head_size=128, group=4, dtype=BF16)
    batch = make_batch(plan)
    options = make_options(batch)
    run(batch, optimized, options)
    moved = torch.zeros(batch.key_cache.numel() + 8, dtype=torch.uint8, device="cuda")
    moved[8:] = batch.key_cache.view(torch.uint8).flatten()
    key_cache = moved[8:].view(batch.key_cache.dtype).view(batch.key_cache.shape)
    batch = replace(batch, key_cache=key_cache)
    assert not family.is_aligned(batch.key_cache, batch.value_cache, 16)
    assert_right(batch, *run(batch, optimized, options), reference, options)


@needs_hopper
def test_many_launches_in_a_row_give_the_same_bits(optimized: Twin) -> None:
    plan = replace(BATCHES["split drafts"], head_size=128, group=4, dtype=BF16)
    batch = make_batch(plan)
    options = make_options(batch)
    expected, expected_lse = run(batch, optimized, options)
    for _ in range(20):
        out, lse = run(batch, optimized, options)
        assert same_bits(out, expected)
        assert same_bits(lse, expected_lse)


@needs_hopper
def test_one_captured_launch_serves_other_lengths(
    optimized: Twin, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a captured call cannot read the contents of tensors
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "0")
    lengths = (900, 300, 1300, 64)
    plan = BatchPlan(
        (1, 1, 2, 1), lengths, group=4, head_size=128, dtype=BF16, needle="first"
    )
    batch = make_batch(plan)
    options = make_options(batch)
    out, lse = run(batch, optimized, options)
    launch = attention_of(batch, optimized, options, out, lse)
    check = partial(assert_right, batch, out, lse, reference, options)
    check_captured(launch, batch, out, lse, check)


def takes(batch: BatchTensors, options: AttentionOptions, short_rows: int = 16) -> bool:
    """Return whether the kernel takes calls with a batch's signature, whatever their device."""
    config = prepare._make_config(
        batch.query, batch.key_cache, batch.value_cache, batch.block_table,
        batch.query, options, *[lowered[1] for lowered in _lowered(batch, options)],
    )  # fmt: skip
    strides = prepare._strides(
        batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.query
    )
    return family.takes_signature(
        batch.query, batch.key_cache, strides, config, options, short_rows
    )


def _lowered(batch: BatchTensors, options: AttentionOptions) -> list[Any]:
    return [lower_masks(options, batch.query_start_loc), lower_scores(options)]


@pytest.mark.usefixtures("without_native_fp8")
def test_other_caches_options_and_strides_are_left_to_the_portable_kernel() -> None:
    plan = BatchPlan((1, 2), (33, 70), group=4, head_size=128, dtype=BF16)
    batch = make_batch(plan, device="cpu")
    options = make_options(batch)
    assert takes(batch, options)
    assert not takes(batch, options, 32)
    assert not takes(batch, options, 0)
    assert not takes(build(plan), AttentionOptions(causal=True))
    assert not takes(replace(batch, query=batch.query.float()), options)
    for name in ("key_cache", "value_cache"):
        cache = getattr(batch, name)
        every_other = cache.repeat_interleave(2, -1)[..., ::2]
        # rows of 136 bytes begin at multiples of 8
        padded = torch.cat([cache, cache[..., :8]], -1)[..., :128]
        for strided in (every_other, padded):
            changes: dict[str, Any] = {name: strided}
            assert not takes(replace(batch, **changes), options)
    others: list[dict[str, Any]] = [
        {"head_size": 96},
        {"head_size": 256},
        {"block_size": 24},
    ]
    for changes in others:
        other = make_batch(replace(plan, **changes), device="cpu")
        assert not takes(other, make_options(other))
    unsupported: list[dict[str, Any]] = [
        {"alibi_slopes": torch.ones(8)},
        {"position_bias": torch.ones(8, 257)},
        {"causal": torch.ones(2, dtype=torch.bool)},
    ]
    for given in unsupported:
        assert not takes(batch, replace(options, **given)), given


@pytest.mark.usefixtures("without_native_fp8")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)
def test_no_call_is_supported_on_another_device() -> None:
    plan = BatchPlan((1, 2), (33, 70), group=4, head_size=128, dtype=BF16)
    batch = make_batch(plan, device="cpu")
    assert not is_chosen(batch, make_options(batch))

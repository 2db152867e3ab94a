"""Tests of the batch-invariant Hopper kernels: supported calls, results and bits on a GPU."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hopper_launches import Way, record_launches
from kernel_faults import changed_kernels
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.checks.dense import judge_attention, judge_lse, same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.common.config import (
    WARPGROUP_M,
    Sm90Config,
    choose_consumers,
)
from pagetwin.optimized.kernels.sm90.common.traits import (
    MASK_BEGIN,
    MASK_END,
    choose_masks,
)
from pagetwin.optimized.kernels.sm90.invariant import family
from schedule_kernels import FoundItem, find_items
from support.compile_prefill_sm90 import BF16, FP16
from support.sm90_calls import (
    build,
    check_supported,
    launched,
    make_options,
    needs_hopper,
    own_counters,
    planned,
    to_call,
)
from support.twins import Twin
from torch import Tensor

__all__ = ["own_counters"]

INVARIANT = AttentionOptions(causal=True, batch_invariant=True)


def run(
    batch: BatchTensors,
    options: AttentionOptions = INVARIANT,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels into an output and a log-sum-exp full of NaN.

    Args:
        splits: Optional. Work items per query tile. If None, the plan chooses.
    """
    out, lse = batch.fresh()
    call = to_call(batch, out, lse, options)
    plan = planned(family, call)
    if splits is not None:
        plan.count_splits = lambda *_: splits
    return launched(partial(plan.launch, call), out, lse)


def part_of(
    batch: BatchTensors, req: int, first: int, end: int, others: int = 0
) -> BatchTensors:
    """Return the batch of some new tokens of a request, and of other requests after it.

    Args:
        first, end: the tokens, counted from the request's first new one.
        others: how often the last token of the batch's request 0 follows as a decode.
    """
    plan = batch.plan
    starts = batch.query_start_loc.tolist()
    kv_len = plan.kv_lens[req] - plan.query_lens[req] + end
    device = batch.query.device
    query = batch.query[starts[req] + first : starts[req] + end]
    last = batch.query[starts[1] - 1 : starts[1]]
    rows = [req] + [0] * others
    lens = [kv_len] + [plan.kv_lens[0]] * others
    counts = [end - first] + [1] * others
    begins = [0, *itertools.accumulate(counts)]
    return replace(
        batch,
        plan=replace(plan, query_lens=tuple(counts), kv_lens=tuple(lens)),
        query=torch.cat([query, *[last] * others]),
        block_table=batch.block_table[rows].contiguous(),
        query_start_loc=torch.tensor(begins, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        max_query_len=max(counts),
        max_seq_len=max(lens),
        rows=[batch.rows[row] for row in rows],
    )


def check_splits(config: Sm90Config, items: list[FoundItem]) -> None:
    """Assert that the work items of a request divide its KV tiles at the bounds of splits.

    Every warpgroup computes the KV tiles of its rows once, with the masks that they need.
    """
    query_len, kv_len, num_splits = items[0][:3]
    block_n, tokens = config.BLOCK_N, WARPGROUP_M.value // config.GROUP
    masks = choose_masks.fn(config)
    keys = np.arange(-(-kv_len // block_n) * block_n)
    computed: dict[int, list[tuple[int, int]]] = {}
    for item in items:
        work = item.work
        assert work.head == 0
        if work.num_kv_tiles <= 0:
            continue
        for consumer, own in enumerate(item.tiles):
            position = work.position + consumer * tokens
            if position >= kv_len:
                continue
            last, found = own.last, computed.setdefault(position, [])
            while last >= own.first:
                part = item.splits[consumer][last]
                assert part.first <= part.full_begin <= part.full_end <= part.last
                assert part.first // config.SPLIT_TILES == last // config.SPLIT_TILES
                for tile in range(last, part.first - 1, -1):
                    mask = 0
                    if tile == last or tile >= part.full_end:
                        mask = masks[0]
                    elif tile < part.full_begin:
                        mask = masks[1]
                    found.append((tile, mask))
                # only the last work item of a query tile has several splits
                last = part.first - 1
                if last >= own.first:
                    assert work.split == num_splits - 1
    for first in range(kv_len - query_len, kv_len, tokens):
        rows = np.arange(max(first, 0), min(first + tokens, kv_len))[:, None]
        begins = rows * 0
        if config.WINDOW:
            begins = np.maximum(begins, rows - config.WINDOW + 1)
        ends = rows + 1 if config.CAUSAL else rows * 0 + kv_len
        found = dict(computed.get(first, []))
        assert len(found) == len(computed.get(first, []))
        for tile in range(len(keys) // block_n):
            columns = keys[tile * block_n : (tile + 1) * block_n]
            is_after, is_before = columns >= ends, columns < begins
            if bool((~is_after & ~is_before).any()):
                assert tile in found
            if tile in found:
                assert found[tile] & MASK_END.value or not is_after.any()
                assert found[tile] & MASK_BEGIN.value or not is_before.any()


def check_all_splits() -> None:
    """Run `check_splits` for windows, groups and numbers of splits."""
    shapes = [(1, 1), (1, 700), (64, 64), (150, 700), (40, 514)]
    for head_dim, block_n in ((64, 64), (128, 128)):
        for group, window in itertools.product((1, 4, 64), (0, 70, 330)):
            # a query tile has one or two tokens of such a group
            lens = shapes if group < 64 else [(1, 700), (9, 9), (21, 514)]
            for causal in (True, False) if not window else (True,):
                config = Sm90Config(
                    *[head_dim] * 4, 16, block_n, 2, causal, window, GROUP=group,
                    SPLIT_TILES=2, CONSUMERS=choose_consumers(head_dim, head_dim, True),
                )  # fmt: skip
                found, _ = find_items(config, lens, (1, 2, 4))
                for _, items in itertools.groupby(found, lambda item: item[:3]):
                    check_splits(config, list(items))


def test_work_items_divide_the_kv_tiles_of_a_query_tile_at_fixed_positions() -> None:
    check_all_splits()


WRONG_SPLITS = {
    "a split begins a tile late": (
        "last // SPLIT_TILES * SPLIT_TILES",
        "last // SPLIT_TILES * SPLIT_TILES + 1",
    ),
    "a split is counted from the window": (
        "last // SPLIT_TILES * SPLIT_TILES",
        "last - (last - own.first) % SPLIT_TILES",
    ),
    "tiles before the window are computed": (
        "gl.maximum(first, split * SPLIT_TILES)",
        "split * SPLIT_TILES",
    ),
    "the last work item has one split": (
        "if split < num_splits - 1:",
        "if split < num_splits:",
    ),
    "every work item has all further splits": (
        "if split < num_splits - 1:",
        "if split < 0:",
    ),
    "a work item ends a tile early": (
        "(split + 1) * SPLIT_TILES",
        "(split + 1) * SPLIT_TILES - 1",
    ),
    "a producer begins at the first split": (
        "gl.maximum(tile, work.split * config.SPLIT_TILES)",
        "tile",
    ),
    "no mask on the diagonal of a split": (
        "gl.minimum(gl.maximum(own.full_end, first), last)",
        "last",
    ),
    "no mask at the begin of the window": (
        "gl.minimum(gl.maximum(own.full_begin, first), full_end)",
        "first",
    ),
    "the first row stands for the last": (
        "last_row = position + count_tokens(config) - 1",
        "last_row = position",
    ),
    "a window begins before its work item": (
        "own_first = gl.maximum(own_first, first)",
        "pass",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WRONG_SPLITS)
def test_a_wrong_bound_of_the_splits_is_found(name: str, tmp_path: Path) -> None:
    files = "sm90/common/tile_range.py", "sm90/invariant/scheduler.py"
    with (
        changed_kernels(tmp_path, *WRONG_SPLITS[name], *files),
        pytest.raises(AssertionError),
    ):
        check_all_splits()


@pytest.mark.parametrize(
    ("given", "is_supported"),
    [
        ({}, True),
        ({"batch_invariant": False}, False),
        ({"sliding_window": 5, "logits_soft_cap": 3.0}, True),
        ({"alibi_slopes": torch.ones(8)}, False),
        ({"causal": False}, False),
    ],
)
def test_batch_invariant_calls_with_options_of_the_prefill_kernel_are_supported(
    given: dict[str, Any], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = build(BatchPlan((8,), (8,), head_size=128, group=4, dtype=BF16))
    options = AttentionOptions(**{"causal": True, "batch_invariant": True} | given)
    call = to_call(batch, *batch.fresh(), options)
    check_supported(family, call, is_supported, monkeypatch)


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 4), (7, 8), (64, 64)])
def test_a_query_tile_has_the_heads_of_a_group_rounded_up_to_a_power_of_two(
    group: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    batch = build(BatchPlan((8,), (8,), head_size=128, group=group, dtype=BF16))
    plan = family.plan(to_call(batch, *batch.fresh(), INVARIANT))
    config = plan.constants["config"]
    assert rows == config.GROUP
    assert plan.boxes[0] == (64 // rows, rows, 64)  # type: ignore[comparison-overlap]
    assert config.SPLIT_TILES * config.BLOCK_N == family.SPLIT_KEYS


def test_no_call_is_supported_on_another_device() -> None:
    batch = build(BatchPlan((8,), (8,), head_size=128, dtype=BF16))
    assert not family.supports(to_call(batch, *batch.fresh(), INVARIANT))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("query_len", [1, 5000])
def test_a_launch_gives_every_argument_of_the_kernels_its_value(
    query_len: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tiles are one launch; few tiles of many keys are two, which share the states."""
    found = record_launches(family, monkeypatch)

    plan = BatchPlan((query_len,), (9000,), head_size=128, group=4, dtype=BF16)
    batch = build(replace(plan, kv_lens=(10,), query_lens=(1,)))
    query = torch.zeros(query_len, 8, 128, dtype=BF16)
    sinks = torch.zeros(8) if has_sinks else None
    out, lse = torch.zeros_like(query), torch.zeros(8, query_len)
    options = replace(INVARIANT, sinks=sinks)
    call = to_call(replace(batch, query=query), out, lse, options)
    call = call._replace(max_key_len=9000, max_query_len=query_len)
    family.plan(call).launch(call)
    tensors = {"out": out, "lse": lse, "query_start_loc": call.query_start_loc}
    assert len(found) == (2 if query_len == 1 else 1)
    for _, values in found:
        for name, tensor in tensors.items():
            assert values[name] == tensor.data_ptr()
        assert values["sinks"] is sinks
        assert (values["num_reqs"], values["num_tokens"]) == (1, query_len)
        assert (values["num_heads"], values["out_stride_head"]) == (8, 128)
        assert (values["lse_stride_head"], values["lse_stride_token"]) == (query_len, 1)
        assert values["num_splits"] == (3 if query_len == 1 else 1)
    grid, first = found[0]
    assert (first["q_desc"], first["k_desc"], first["v_desc"]) == (0, 1, 2)
    assert (first["group_size"], first["k_block_rows"]) == (4, 16)
    # 3 splits of 2 KV heads; 157 tiles of 32 tokens and one more
    assert grid == (6 if query_len == 1 else 16, 1, 1)
    if query_len == 1:
        grid, second = found[1]
        assert grid == (1, 1, 1)
        assert second["num_programs"] == 6
        assert second["states"] == first["states"]


WAYS = [
    Way(128, BF16, 4, 16, {}),
    Way(64, BF16, 8, 16, {"sinks": True}),
    Way(64, FP16, 4, 48, {}),
    Way(96, BF16, 3, 16, {}),
    Way(192, BF16, 1, 16, {}),
    Way(256, BF16, 2, 16, {}),
    Way(128, BF16, 4, 16, {"sliding_window": 700}),
    Way(128, FP16, 2, 16, {"sliding_window": family.SPLIT_KEYS + 70, "sinks": True}),
    Way(64, BF16, 8, 16, {"sliding_window": 128}),
    Way(64, BF16, 2, 16, {"sliding_window": family.SPLIT_KEYS + 70}),
    Way(128, BF16, 1, 64, {"attention_chunk_size": 300}),
    Way(128, BF16, 7, 16, {"logits_soft_cap": 20.0}),
    Way(256, FP16, 64, 16, {"logits_soft_cap": 20.0}),
    Way(80, FP16, 2, 256, {}),
]
# first and end token, decodes after them, and work items per query tile. Tokens 148 and 149 are
# the last of the first split and the first of the second
CUTS = [
    (0, 300, 0, 1), (0, 300, 0, 2), (0, 1, 0, None), (0, 17, 0, 1), (17, 153, 5, 2),
    (147, 148, 0, 1), (148, 149, 0, 2), (149, 150, 0, 1), (149, 150, 0, 2),
    (150, 151, 3, 2), (151, 300, 0, 1), (299, 300, 0, None), (299, 300, 600, None),
    (120, 260, 600, None),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_row_has_the_same_bits_in_any_chunk_batch_and_division_of_its_splits(
    way: Way,
) -> None:
    """The tokens end before and after the edges of splits, KV tiles and query tiles."""
    plan = BatchPlan(
        (40, 300), (60, family.SPLIT_KEYS + 150), block_size=way.block_size,
        head_size=way.head_size, dtype=way.dtype, group=way.group, needle="first new",
    )  # fmt: skip
    batch = build(plan, "cuda")
    options = make_options(batch, way.options, batch_invariant=True)
    whole, whole_lse = run(batch, options)
    assert bool(whole[:340].isfinite().all() and whole_lse[:, :340].isfinite().all())
    wrong = []
    for cut in CUTS:
        first, end, others, splits = cut
        out, lse = run(part_of(batch, 1, first, end, others), options, splits)
        rows = slice(40 + first, 40 + end)
        if not same_bits(out[: end - first], whole[rows]):
            wrong.append((cut, "output"))
        if not same_bits(lse[:, : end - first], whole_lse[:, rows]):
            wrong.append((cut, "log-sum-exp"))
    assert not wrong


@needs_hopper
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_row_is_within_its_error_budget(way: Way, reference: Twin) -> None:
    """Of ragged batches, and of long rows whose splits one program folds, or several."""
    sizes = {
        "head_size": way.head_size, "dtype": way.dtype, "group": way.group,
        "block_size": way.block_size,
    }  # fmt: skip
    long = 2 * family.SPLIT_KEYS + 200
    mixed = (1, 200, 0, 77, 129, 3), (50, 200, 40, 300, 700, 260)
    wrong: list[tuple[Any, ...]] = []
    for needle, lens, divisions in (
        ("none", mixed, (None,)),
        ("first new", mixed, (None,)),
        ("tile edge", ((70, 1), (long, long - 100)), (1, 3)),
    ):
        batch = build(BatchPlan(*lens, needle=needle, padding=3, **sizes), "cuda")
        options = make_options(batch, way.options, batch_invariant=True)
        # in the reference every query of a batch-invariant call is a request of its own
        plain = replace(options, batch_invariant=False)
        attend = partial(reference.paged_attention, options=plain)
        judged = SimpleNamespace(paged_attention=attend)
        for splits in divisions:
            out, lse = run(batch, options, splits)
            verdict, exact_lse = judge_attention(batch, out, judged)
            if not verdict.ok:
                wrong.append((needle, splits, str(verdict)))
            share = judge_lse(batch, lse, exact_lse)
            if not share <= 1:
                wrong.append((needle, splits, f"log-sum-exp: {share}"))
            if not bool((out[batch.tokens :] == 0).all()):
                wrong.append((needle, splits, "padding"))
    assert not wrong


@needs_hopper
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("poison", [0.0, float("inf"), 1e4])
def test_unallocated_slots_do_not_change_a_bit(head_size: int, poison: float) -> None:
    plan = BatchPlan((40, 150, 1), (40, 333, 129), head_size=head_size, dtype=BF16)
    batch = build(plan, "cuda")
    before = run(batch)
    caches = [
        torch.where(cache.isnan(), poison, cache)
        for cache in (batch.key_cache, batch.value_cache)
    ]
    after = run(replace(batch, key_cache=caches[0], value_cache=caches[1]))
    for one, other in zip(before, after, strict=True):
        assert bool(one.isfinite().all())
        assert same_bits(one, other)

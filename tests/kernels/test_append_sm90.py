"""Tests of the Hopper append kernel: supported calls, segments, and results on a GPU."""

import itertools
from collections import Counter
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
from pagetwin.optimized.dispatch.choice import launch_attention, make_attention_plan
from pagetwin.optimized.kernels.portable.host.plans import PortableAppendPlan
from pagetwin.optimized.kernels.sm90.append import family
from pagetwin.optimized.kernels.sm90.append.cost import count_partials, segment_length
from pagetwin.optimized.kernels.sm90.append.segments import MAX_SEGMENTS
from pagetwin.optimized.kernels.sm90.common.config import Sm90Config
from pagetwin.optimized.runtime.family import Task
from schedule_kernels import run_segments
from support.compile_prefill_sm90 import BF16, FP16
from support.forced_choices import one_launch_for_all
from support.sm90_calls import (
    build,
    check_captured_batches,
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


# ---- segments

SHAPES = {
    "even": ((6,) * 6, (1100,) * 6),
    "ragged": ((1, 20, 0, 64, 5, 9, 3), (50, 2200, 40, 3001, 130, 5, 700)),
    "several query tiles": ((150, 1, 70), (3300, 1290, 70)),
    "more queries than keys": ((70, 9), (40, 0)),
    "more requests than a pass": ((5, 0, 40) * 86, (300, 90, 513) * 86),
    "no queries": ((0, 0), (50, 90)),
}


def visible_tiles(config: Sm90Config, first: int, end: int, kv_len: int) -> range:
    """Return the KV tiles with a key that tokens at these positions attend to."""
    keys = np.arange(max(kv_len, 0))
    begin = max(0, first - config.WINDOW + 1) if config.WINDOW else 0
    found = keys[(keys >= begin) & (keys < end)] // config.BLOCK_N
    return range(found[0], found[-1] + 1) if len(found) else range(0)


def check_segments() -> None:
    """Assert that the segments divide the KV tiles of every query tile.

    Each tile is computed once, the items tell which segments have a part of their query tile, and
    no two partial results have the same memory.
    """
    tile_tokens, most = 32, MAX_SEGMENTS.value
    for (query_lens, kv_lens), window, num_segments in itertools.product(
        SHAPES.values(), (0, 200), (1, 4, 13)
    ):
        config = Sm90Config(
            128, 128, 128, 128, 16, 128, 2, True, window, GROUP=4, SPLIT_TILES=1
        )
        items = run_segments(query_lens, kv_lens, num_segments, config)
        found: dict[int, list[tuple[int, int, int, range]]] = {}
        for segment, work in items:
            first = max(0, work.position - window + 1) // 128 if window else 0
            first = max(first, work.split)
            tiles = range(first, first + work.num_kv_tiles)
            assert work.head == work.span // most**2 == 0
            part = segment, work.span // most, work.span % most, tiles
            found.setdefault(work.query_start, []).append(part)
        slots = [
            (segment, segment == first)
            for parts in found.values()
            for segment, first, last, _ in parts
            if first != last
        ]
        assert len(set(slots)) == len(slots)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        for req, query_len in enumerate(query_lens):
            for token in range(0, query_len, tile_tokens):
                position = kv_lens[req] - query_len + token
                end = min(position + tile_tokens, kv_lens[req])
                expected = visible_tiles(config, position, end, kv_lens[req])
                parts = found.pop(int(starts[req]) + token)
                assert [tile for part in parts for tile in part[3]] == list(expected)
                spans = {(first, last) for _, first, last, _ in parts}
                assert len(spans) == 1
                first, last = spans.pop()
                assert [part[0] for part in parts] == list(range(first, last + 1))
        assert not found


def test_the_segments_divide_the_kv_tiles_of_every_query_tile() -> None:
    check_segments()


WRONG_SEGMENTS = {
    "a segment begins a tile late": (
        "gl.minimum(index * length, total)",
        "gl.minimum(index * length + 1, total)",
    ),
    "a segment ends a tile early": (
        "gl.minimum(begin + length, total)",
        "gl.minimum(begin + length - 1, total)",
    ),
    "the last request of a segment is left out": (
        "gl.where(begin < end, end_req + 1, first_req)",
        "end_req",
    ),
    "tiles of earlier requests are counted from 0": (
        "tile_index = segment.first_tile",
        "tile_index = segment.first_tile * 0",
    ),
    "tiles of earlier passes are not counted": (
        "tiles_end = counted +",
        "tiles_end = counted * 0 +",
    ),
    "a request without a key has no tile": (
        "gl.maximum(ceil_div(seq_len, BLOCK_N) - first, 1)",
        "gl.maximum(ceil_div(seq_len, BLOCK_N) - first, 0)",
    ),
    "query tiles are rounded down": (
        "ceil_div(query_len, TILE_TOKENS))",
        "query_len // TILE_TOKENS)",
    ),
    "a span ends a segment late": (
        "(tile_index + tiles.kv_tiles - 1) // segment.length",
        "(tile_index + tiles.kv_tiles) // segment.length",
    ),
    "a span begins in the segment": (
        "first_segment = tile_index // segment.length",
        "first_segment = gl.maximum(tile_index, segment.begin) // segment.length",
    ),
    "tiles after the diagonal are computed": (
        "gl.maximum(position + TILE_TOKENS, 0)",
        "gl.maximum(position + TILE_TOKENS + BLOCK_N, 0)",
    ),
    "tiles before the window are counted": (
        "gl.maximum(begin, first_visible_key(position, config) // BLOCK_N)",
        "begin",
    ),
    "the first query tile of a segment is the request's": (
        "first = gl.maximum(segment.begin - tile_index, 0) // tiles.kv_tiles",
        "first = 0",
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("num_segments", [1, 4, 13, 16, 66])
@pytest.mark.parametrize(
    ("reqs", "query_len", "kv_len"),
    [(1, 8, 65536), (1, 8, 300), (3, 64, 30000), (5, 5, 20000), (8, 32, 4096), (16, 9, 900)],
)  # fmt: skip
def test_the_cost_model_cuts_query_tiles_as_the_kernel_does(
    reqs: int, query_len: int, kv_len: int, num_segments: int
) -> None:
    """Its partial results are an upper bound, and exact if no query tile is cut unevenly."""
    config = Sm90Config(128, 128, 128, 128, 16, 128, 2, False, GROUP=4, SPLIT_TILES=1)
    items = run_segments((query_len,) * reqs, (kv_len,) * reqs, num_segments, config)
    parts = Counter(work.query_start for _, work in items)
    tiles, kv_tiles = reqs * -(-query_len // 32), -(-kv_len // 128)
    length = segment_length(tiles, kv_tiles, num_segments)
    assert sum(work.num_kv_tiles for _, work in items) == tiles * kv_tiles
    assert max(pair.segment for pair in items) == -(-tiles * kv_tiles // length) - 1
    assert (
        length == sum(work.num_kv_tiles for segment, work in items if segment == 0)
        or tiles * kv_tiles <= length
    )
    found, most = max(parts.values()), count_partials(tiles, kv_tiles, length)
    assert (found if found > 1 else 0) in (most, most - 1)
    if kv_tiles % length == 0 or length % kv_tiles == 0:
        assert (found if found > 1 else 0) == most


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WRONG_SEGMENTS)
def test_a_wrong_bound_of_the_segments_is_found(name: str, tmp_path: Path) -> None:
    changed = changed_kernels(
        tmp_path, *WRONG_SEGMENTS[name], "sm90/append/segments.py"
    )
    with changed, pytest.raises((AssertionError, KeyError, IndexError)):
        check_segments()


@pytest.mark.parametrize(
    ("given", "is_supported"),
    [
        ({}, True),
        ({"batch_invariant": True}, False),
        ({"sliding_window": 5, "logits_soft_cap": 3.0}, True),
        ({"alibi_slopes": torch.ones(8)}, False),
        ({"causal": False}, False),
    ],
)
def test_causal_calls_with_options_of_the_prefill_kernel_are_supported(
    given: dict[str, Any], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = build(BatchPlan((8,), (8,), head_size=128, group=4, dtype=BF16))
    options = AttentionOptions(**{"causal": True} | given)
    call = to_call(batch, *batch.fresh(), options)
    check_supported(family, call, is_supported, monkeypatch)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_launch_gives_every_argument_of_the_kernels_its_value(
    has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = record_launches(family, monkeypatch)
    lent: list[tuple[int, int]] = []

    def find(device: Any, counters: int, numbers: int) -> tuple[Tensor, Tensor]:
        lent.append((counters, numbers))
        return torch.zeros(counters, dtype=torch.int32), torch.zeros(numbers)

    monkeypatch.setattr(family, "find_workspace", find)
    batch = build(BatchPlan((20,), (9000,), head_size=128, group=4, dtype=BF16))
    sinks = torch.zeros(8) if has_sinks else None
    out, lse = batch.fresh()
    call = to_call(batch, out, lse, AttentionOptions(causal=True, sinks=sinks))
    family.plan(call).launch(call)
    ((grid, values),) = found
    assert grid == (2, 8, 1)
    assert values["out"] == out.data_ptr() and values["lse"] == lse.data_ptr()
    assert values["query_start_loc"] == call.query_start_loc.data_ptr()
    assert values["block_table"] == call.block_table.data_ptr()  # type: ignore[union-attr]
    assert values["kv_lens"] == call.lengths.data_ptr()
    assert values["sinks"] is sinks
    assert (values["num_reqs"], values["num_tokens"]) == (1, 20)
    assert (values["group_size"], values["partial_rows"]) == (4, 80)
    assert (values["out_stride_token"], values["out_stride_head"]) == out.stride()[:2]
    assert (values["lse_stride_head"], values["lse_stride_token"]) == lse.stride()
    assert (values["q_desc"], values["k_desc"], values["v_desc"]) == (0, 1, 2)
    # 2 KV heads x 8 segments: a counter per warpgroup, and room for two partial results
    assert lent == [(2 * 8 * 2, 2 * 8 * 2 * 80 * (128 + 1))]


@pytest.mark.parametrize(
    ("given", "row_tiles"),
    [
        ({"head_size": 128}, (64, 128)),
        ({"head_size": 128, "sliding_window": 700}, (128,)),
        ({"head_size": 128, "attention_chunk_size": 300}, (128,)),
        ({"head_size": 96}, (128,)),
        ({"head_size": 64}, (192,)),
        ({"head_size": 256}, (128,)),
    ],
)
def test_few_rows_get_a_query_tile_of_one_warpgroup_where_it_was_measured(
    given: dict[str, Any], row_tiles: tuple[int, ...]
) -> None:
    options = {name: given[name] for name in given if name != "head_size"}
    batch = build(
        BatchPlan((20,), (900,), head_size=given["head_size"], group=4, dtype=BF16)
    )
    call = to_call(batch, *batch.fresh(), AttentionOptions(causal=True, **options))
    assert family.plan(call).row_tiles == row_tiles


@pytest.mark.parametrize(
    ("query_len", "segments", "grid", "consumers"),
    [
        (16, 0, (2, 8, 1), 1),
        (16, 3, (2, 3, 1), 1),
        (17, 3, (2, 3, 1), 2),
        (17, 500, (2, 8, 1), 2),
    ],
)
def test_a_launch_has_the_tile_of_its_longest_request_and_the_given_segments(
    query_len: int, segments: int, grid: tuple[int, int, int], consumers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A group of 4 query heads: 16 tokens have 64 rows."""
    found: list[tuple[Any, int]] = []
    monkeypatch.setattr(family, "count_processors", lambda device: 16)
    monkeypatch.setattr(
        family.AppendPlan,
        "launch_with_maps",
        lambda plan, call, grid, *_: found.append((grid, plan.config.CONSUMERS)),
    )
    batch = build(BatchPlan((query_len,), (9000,), head_size=128, group=4, dtype=BF16))
    call = to_call(batch, *batch.fresh(), AttentionOptions(causal=True))
    plan = family.plan(call)
    plan.launch(call, Task(division=segments))
    assert found == [(grid, consumers)]
    # a warm-up up to this length launches each tile that a shorter request may have
    tiles = []
    for query_length in plan.query_lens(query_len):
        plan.launch(call._replace(max_query_len=query_length))
        tiles.append(found[-1][1])
    assert tiles == list(range(1, consumers + 1))


def test_a_call_that_the_kernel_does_not_take_is_split_by_the_portable_one(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A negative scale, for which the running maximum may not be taken before the scale."""
    launched: list[str] = []
    for plan_type, name in (
        (family.AppendPlan, "launch"),
        (PortableAppendPlan, "launch"),
    ):
        monkeypatch.setattr(
            plan_type, name, lambda plan, *_: launched.append(type(plan).__name__)
        )
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    batch = build(
        BatchPlan((20,), (900,), head_size=128, group=4, dtype=BF16), str(device)
    )
    call = to_call(batch, *batch.fresh())
    plan = make_attention_plan(call)
    with one_launch_for_all(32):
        launch_attention(plan, call)
        launch_attention(plan, call._replace(scale=-1.0))
    assert launched == ["AppendPlan", "PortableAppendPlan"]


# ---- results


def run(
    batch: BatchTensors, options: AttentionOptions, has_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Launch the kernels into an output and a log-sum-exp full of NaN."""
    out, lse = batch.fresh()
    call = to_call(batch, out, lse if has_lse else None, options)
    return launched(partial(planned(family, call).launch, call), out, lse)


WAYS = [
    Way(128, BF16, 4, 16, {}),
    Way(64, BF16, 8, 16, {"sinks": True}),
    Way(128, BF16, 4, 16, {"sliding_window": 700}),
    Way(256, BF16, 2, 16, {}),
    Way(128, FP16, 7, 32, {"logits_soft_cap": 20.0, "sinks": True}),
    Way(96, BF16, 1, 16, {}),
    Way(192, BF16, 1, 16, {}),
    Way(64, BF16, 2, 64, {"sliding_window": 100}),
    Way(128, BF16, 3, 16, {"attention_chunk_size": 300}),
]
# new tokens and keys per request, and the needle
LENS = {
    "one request": ((6,), (5000,), "tile edge"),
    "verification": ((6,) * 9, (1100,) * 9, "none"),
    "ragged": ((1, 20, 0, 64, 5, 9, 3), (50, 2200, 40, 3001, 130, 9, 700), "first new"),
    "several query tiles": ((150, 1, 70), (3300, 1290, 70), "first new"),
    "more requests than a pass": ((5,) * 261, (10, 260, 130) * 87, "none"),
}


@needs_hopper
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_row_is_within_its_error_budget(way: Way, reference: Twin) -> None:
    """Also rows of no key, of several segments, and padding."""
    wrong: list[tuple[str, str]] = []
    for name, (query_lens, kv_lens, needle) in LENS.items():
        plan = BatchPlan(
            query_lens, kv_lens, needle=needle, padding=5, spare_max=9,
            head_size=way.head_size, dtype=way.dtype, group=way.group,
            block_size=way.block_size,
        )  # fmt: skip
        batch = build(plan, "cuda")
        options = make_options(batch, way.options)
        attend = partial(reference.paged_attention, options=options)
        out, lse = run(batch, options)
        verdict, exact_lse = judge_attention(
            batch, out, SimpleNamespace(paged_attention=attend)
        )
        if not verdict.ok:
            wrong.append((name, str(verdict)))
        share = judge_lse(batch, lse, exact_lse)
        if not share <= 1:
            wrong.append((name, f"log-sum-exp: {share}"))
        if not bool((out[batch.tokens :] == 0).all()):
            wrong.append((name, "padding"))
        if not bool((lse[:, batch.tokens :] == -torch.inf).all()):
            wrong.append((name, "log-sum-exp of padding"))
        if not way.options.get("logits_soft_cap"):
            # a soft cap without a log-sum-exp has another tanh
            alone = run(batch, options, has_lse=False)[0]
            if not same_bits(out, alone):
                wrong.append((name, "without a log-sum-exp"))
    assert not wrong


@needs_hopper
def test_one_captured_launch_serves_other_lengths(reference: Twin) -> None:
    plans = [
        BatchPlan((20, 3, 60), (3000, 40, 129), head_size=128, dtype=BF16, group=4),
        BatchPlan((13, 0, 64), (129, 40, 3000), head_size=128, dtype=BF16, group=4, seed=1),
        BatchPlan((1, 5, 77), (50, 2200, 1300), head_size=128, dtype=BF16, group=4, seed=2),
    ]  # fmt: skip
    check_captured_batches(
        plans, lambda call: partial(family.plan(call).launch, call), reference
    )

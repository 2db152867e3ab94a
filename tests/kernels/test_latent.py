"""Portable latent attention: partition, combination, and results with one tile for K and V.

The tests run the kernels on a GPU if there is one. On a Hopper chip the Hopper kernel is off.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, build
from pagetwin.contract.attention_options import pack_options
from pagetwin.optimized.dispatch.dispatch import PIPELINE
from pagetwin.optimized.kernels.portable.host import latent, latent_tiles
from pagetwin.optimized.kernels.portable.host.latent import (
    LatentGrid,
    PortableLatentPlan,
)
from pagetwin.optimized.kernels.sm90.latent import family as sm90
from pagetwin.optimized.runtime.attention_call import AttentionCall
from support.planted_keys import plant
from support.twins import TWINS
from torch import Tensor

WIDTH, RANK = 48, 32
BATCHES = {
    "one key": BatchPlan((1,), (1,), group=16),
    "two segments": BatchPlan((1,), (64,), group=16, needle="first"),
    "as many segments as programs": BatchPlan(
        (1,), (300,), group=4, needle="tile edge"
    ),
    "ragged": BatchPlan((1,) * 5, (50, 200, 1, 64, 129), group=8, needle="last"),
    "requests of no token": BatchPlan(
        (0, 2, 0, 1), (50, 90, 0, 33), group=12, padding=3
    ),
    "query tiles side by side": BatchPlan((1, 1), (170, 95), group=40, needle="first"),
    "more query tiles than columns": BatchPlan((5, 2), (130, 70), group=40),
    "a chunk beside decodes": BatchPlan(
        (40, 1, 1, 2, 1), (60, 170, 33, 90, 5), group=6, padding=2, spare_max=7
    ),
    "new tokens alone": BatchPlan((30,), (30,), group=3),
    "more requests than a pass": BatchPlan((1, 2) * 5, (40, 70) * 5, group=20),
    "blocks of 24": BatchPlan((1, 3), (199, 70), group=20, block_size=24),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "window, cap": {"sliding_window": 37, "logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.linspace(-3.0, 4.0, 20)},
    "ALiBi, chunk": {
        "alibi_slopes": torch.linspace(0.01, 0.5, 20),
        "attention_chunk_size": 48,
    },
    "not causal": {"causal": False},
}


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LatentGrid]]:
    """Yield the launches of latent attention that are made."""
    found: list[LatentGrid] = []
    choose = PortableLatentPlan.choose

    def note(*arguments: Any) -> LatentGrid:
        found.append(choose(*arguments))
        return found[-1]

    monkeypatch.setattr(PortableLatentPlan, "choose", note)
    monkeypatch.setattr(sm90, "is_hopper", lambda device: False)
    PIPELINE.plans.clear()  # a call that was repeated would not be planned
    yield found
    PIPELINE.plans.clear()


def make_batch(plan: BatchPlan, device: torch.device, rank: int = RANK) -> BatchTensors:
    """Return a batch whose values are the first columns of its keys."""
    batch = build(replace(plan, kv_heads=1, head_size=WIDTH), device)
    return replace(batch, value_cache=batch.key_cache[..., :rank])


def expect_equal(
    arguments: dict[str, Any], grids: list[LatentGrid], **options: Any
) -> None:
    """Compare outputs and log-sum-exps of both twins."""
    heads, tokens = arguments["query"].shape[1], arguments["query"].shape[0]
    found = []
    for twin in ("optimized", "reference"):
        lse = arguments["query"].new_zeros(heads, tokens)
        out = TWINS[twin].paged_attention(
            **arguments, lse=lse, **pack_options(**options)
        )
        found.append((out, lse))
    assert len(grids) == 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BATCHES)
def test_rows_of_any_number_are_right(
    name: str, grids: list[LatentGrid], device: torch.device
) -> None:
    """Unallocated slots and the ends of last blocks hold NaN, which K and V would both read."""
    expect_equal(make_batch(BATCHES[name], device).arguments(), grids)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_paged_attention_hold_over_latents(
    name: str, grids: list[LatentGrid], device: torch.device
) -> None:
    options = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in OPTIONS[name].items()
    }
    batch = make_batch(BatchPlan((3, 1), (150, 200), group=20), device)
    expect_equal(batch.arguments(), grids, **options)


EDGES = [key for edge in range(32, 200, 32) for key in (edge - 1, edge) if key < 190]


@pytest.mark.sample(3)
@pytest.mark.parametrize("position", EDGES)
def test_no_key_is_lost_at_the_edge_of_a_tile_or_a_segment(
    position: int, grids: list[LatentGrid], device: torch.device
) -> None:
    """One latent outweighs all others, for the rows of every query tile and column."""
    batch = make_batch(BatchPlan((2, 1), (200, 195), group=20), device)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    expect_equal(batch.arguments(), grids)
    assert grids[0].columns > 1
    assert grids[0].segments > 1


@pytest.mark.parametrize("rank", [16, 24, 47])
def test_ranks_other_than_powers_of_two_are_right(
    rank: int, grids: list[LatentGrid], device: torch.device
) -> None:
    """The columns past the rank are a part of their own, which is not a value."""
    batch = make_batch(BatchPlan((1, 2), (130, 70), group=5), device, rank)
    expect_equal(batch.arguments(), grids)


@pytest.mark.parametrize("is_wide_rope", [False, True])
def test_fp8_latents_are_multiplied_by_their_scales(
    is_wide_rope: bool, grids: list[LatentGrid], device: torch.device
) -> None:
    """Queries of FP8 keys are fitted to float16 by a power of two, which both parts share."""
    batch = make_batch(BatchPlan((1, 2), (130, 70), group=20), device)
    if is_wide_rope:
        batch.query[..., RANK:] *= 1e5
        batch.key_cache[..., RANK:] *= 1e-5
    codes = batch.key_cache.nan_to_num(0).to(torch.float8_e4m3fn)
    arguments = batch.arguments() | {
        "key_cache": codes, "value_cache": codes[..., :RANK],
    }  # fmt: skip
    scale = torch.full((1,), 0.5, device=device)
    expect_equal(arguments, grids, k_scale=scale, v_scale=scale)


@pytest.mark.parametrize("few_rows", [0, 1 << 20])
def test_both_combinations_ignore_what_the_workspace_held_before(
    few_rows: int,
    grids: list[LatentGrid],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes that look like notes of split tiles, where the launch before left its own."""
    memory = torch.full((1 << 20,), 1, dtype=torch.int32, device=device)

    def find(_: torch.device, counters: int, numbers: int) -> tuple[Tensor, Tensor]:
        memory.fill_(1)
        return memory[:counters], memory[:numbers].view(torch.float32)

    monkeypatch.setattr(latent, "find_workspace", find)
    monkeypatch.setattr(latent_tiles, "FEW_ROWS", few_rows)
    sinks = torch.linspace(-3.0, 4.0, 20, device=device)
    batch = make_batch(BatchPlan((1, 2, 1), (30, 170, 95), group=20), device)
    expect_equal(batch.arguments(), grids, sinks=sinks)
    assert grids[0].combiner is not None


@pytest.mark.usefixtures("unchecked_values")
def test_an_understated_query_length_writes_nothing_outside_of_its_workspace(
    grids: list[LatentGrid], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace has room for the rows of `max_query_len` tokens; others are not stored."""
    lent: list[Tensor] = []

    def find(_: torch.device, counters: int, numbers: int) -> tuple[Tensor, Tensor]:
        memory = torch.full((numbers + 4096,), 7.0, device=device)
        lent.append(memory[numbers:])
        return memory[:counters].int(), memory[:numbers]

    monkeypatch.setattr(latent, "find_workspace", find)
    batch = make_batch(BatchPlan((9, 9), (200, 180), group=4), device)
    TWINS["optimized"].raw.paged_attention(**(batch.arguments() | {"max_query_len": 2}))
    assert grids[0].partial_rows < 9 * 4
    for beyond in lent:
        assert (beyond == 7).all()


def test_values_that_are_not_the_first_columns_go_elsewhere(
    grids: list[LatentGrid], device: torch.device
) -> None:
    """Addresses are not in a signature. Batch-invariant rows have kernels with fixed splits."""
    batch = make_batch(BatchPlan((1, 2), (130, 70), group=5), device)
    others = batch.key_cache[..., WIDTH - RANK :]
    for given, options in (
        ({"value_cache": others}, {}),
        ({"value_cache": batch.value_cache.clone()}, {}),
        ({}, {"batch_invariant": True}),
    ):
        arguments = batch.arguments() | given
        found = [
            TWINS[twin].paged_attention(**arguments, **pack_options(**options))
            for twin in ("optimized", "reference")
        ]
        torch.testing.assert_close(*found, atol=2e-6, rtol=2e-6)
    assert not grids


@pytest.mark.parametrize(
    ("width", "rank", "is_taken"),
    [
        (576, 512, True),
        (288, 256, True),
        (17, 16, True),
        (640, 512, False),
        (576, 64, True),
        (584, 520, False),
        (64, 64, False),
    ],
)
def test_widths_without_a_compiled_tile_go_elsewhere(
    width: int, rank: int, is_taken: bool
) -> None:
    """Latents of 512 with 128 rope columns would take more shared memory than a chip has."""
    batch = build(BatchPlan((1,), (16,), kv_heads=1, head_size=width))
    assert latent.is_latent(make_call(batch, rank)) is is_taken


def make_call(batch: BatchTensors, rank: int) -> AttentionCall:
    """Return the call of a batch whose values are the first `rank` columns of its keys."""
    return AttentionCall(
        batch.query, batch.key_cache, batch.key_cache[..., :rank], batch.block_table,
        batch.query_start_loc, batch.seq_lens, 1, 16, 1.0,
        batch.query[..., :rank].clone(), None, pack_options(causal=True)["options"],
    )  # fmt: skip


def test_programs_fill_the_chip_and_read_latents_side_by_side(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Columns times segments are the programs that run at once, unless there is less work."""
    monkeypatch.setattr(latent, "count_processors", lambda device: 132)
    monkeypatch.setattr(latent, "MIN_KEYS", 128)
    tiles = latent_tiles.LatentTiles(latent_tiles.Tiles(64, 64, 8, 3), 1)
    monkeypatch.setattr(latent, "choose_latent_tiles", lambda *_: tiles)
    for heads, reqs, query_len, keys, expected in (
        (64, 1, 1, 65536, (1, 132)),
        (64, 1, 1, 1000, (1, 8)),
        (128, 1, 1, 65536, (2, 66)),
        (128, 64, 2, 4096, (4, 33)),
        (16, 256, 1, 1024, (1, 132)),
        (128, 1, 16, 65536, (8, 16)),
    ):
        batch = make_batch(BatchPlan((1,), (16,), group=heads), device)
        call = make_call(batch, RANK)
        bounds = latent.BatchBounds(reqs, reqs * query_len, query_len, keys)
        grid = PortableLatentPlan(call).choose(bounds)
        assert (grid.columns, grid.segments) == expected
        assert grid.splits < max(grid.segments, 2)

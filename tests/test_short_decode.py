"""Tests of few decodes, whose programs per request are fixed before the launch."""

from itertools import product
from typing import Any

import pytest
import torch
from conftest import TWINS
from pagetwin.conformance.generators.batches import BatchPlan, build
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.launch import dispatch, portable, tuning
from pagetwin.optimized.launch.tuning import split_short_decodes
from test_append import plant

CHIP = (64, 132, False)  # keys of a KV tile, multiprocessors, no FP8 decode kernel


def test_few_decodes_have_no_more_programs_than_the_chip_has_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "SHORT_TILES", 20)
    for pairs, num_tiles in product(range(1, 140), range(180)):
        splits = split_short_decodes(pairs, num_tiles, *CHIP)
        assert splits * pairs <= 132
        assert splits <= max(1, num_tiles)
        if splits:
            split_tiles = -(-max(1, num_tiles) // splits)
            assert split_tiles <= 20
            # no split is empty, and no number of splits has fewer tiles each
            assert split_tiles * (splits - 1) < max(1, num_tiles)
            assert split_tiles == max(1, -(-num_tiles // (132 // pairs)))


def test_decodes_over_more_keys_than_were_measured_stay_in_the_stream_k_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "SHORT_TILES", 20)
    monkeypatch.setattr(tuning, "MIN_SEGMENT", 512)
    most = {
        # two programs per pair, one, and less than one
        66: 2 * 20,
        67: 512 // 64,
        132: 512 // 64,
        133: -1,
    }
    for pairs, num_tiles in most.items():
        assert split_short_decodes(pairs, num_tiles + 1, *CHIP) == 0
        if num_tiles > 0:
            assert split_short_decodes(pairs, num_tiles, *CHIP) == 132 // pairs
    # an FP8 decode kernel computes splits of more than one tile
    for num_tiles, splits in ((66, 66), (67, 0)):
        assert split_short_decodes(2, num_tiles, *CHIP[:2], True) == splits


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return kernels and grids of decode launches, of which each batch is short."""
    found: list[tuple[str, Any]] = []
    plan_decode = portable.PortablePlan.plan_decode

    def note(*arguments: Any, **named: Any) -> portable.DecodeLaunch:
        decode = plan_decode(*arguments, **named)
        found.append((decode.launcher.name, decode.grid))
        return decode

    monkeypatch.setattr(portable.PortablePlan, "plan_decode", note)
    # a repeated call is not planned again
    dispatch.PLANS.clear()
    # the interpreter has 4 multiprocessors: 4 programs per request, 2, or 1
    monkeypatch.setattr(tuning, "SHORT_TILES", 8)
    monkeypatch.setattr(tuning, "MIN_SEGMENT", 256)
    return found


def expect_equal(
    plan: BatchPlan, device: torch.device, grids: list[Any], **options: Any
) -> None:
    """Compare outputs and log-sum-exps of both twins, launched twice on the same counters."""
    batch = build(plan, device)
    heads, tokens = batch.query.shape[1], batch.query.shape[0]
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.1, 1.0, heads, device=device)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2.0, 3.0, heads, device=device)
    found = []
    for twin in ("reference", "optimized", "optimized"):
        lse = batch.query.new_zeros(heads, tokens)
        out = TWINS[twin].paged_attention(
            **batch.arguments(), lse=lse, options=AttentionOptions(**options)
        )
        found.append((out, lse))
    assert {name for name, _ in grids} == {"short_decode_kernel"}
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], atol=2e-6, rtol=2e-6)


BATCHES = {
    "one key": BatchPlan((1,), (1,), kv_heads=1),
    "one tile": BatchPlan((1,), (32,), kv_heads=1),
    "one key more than a tile": BatchPlan((1,), (33,), kv_heads=1),
    "splits of one tile": BatchPlan((1,), (128,), kv_heads=1, needle="last"),
    "splits of two tiles": BatchPlan((1,), (250,), kv_heads=1, needle="last"),
    "an odd number of tiles": BatchPlan((1,), (129,), kv_heads=1, needle="last"),
    "two kv heads": BatchPlan((1,), (250,), kv_heads=2, needle="first"),
    "two splits": BatchPlan((1, 1), (250, 90), kv_heads=1, needle="first"),
    "one program per request": BatchPlan((1,) * 4, (99, 1, 7, 33), kv_heads=1),
    "ragged": BatchPlan((1, 1, 1), (120, 7, 33), kv_heads=1, needle="tile edge"),
    "a long one and others of one key": BatchPlan((1, 1), (1, 255), kv_heads=1),
    "drafts": BatchPlan((4, 1), (110, 90), group=4, kv_heads=1, needle="first new"),
    "requests of no token": BatchPlan((0, 1, 0), (50, 90, 0), kv_heads=1),
    "padding": BatchPlan((1, 1), (60, 33), kv_heads=1, padding=5, spare_max=7),
    "loose bounds": BatchPlan((1, 1), (60, 33), kv_heads=1, spare_max=300),
}


@pytest.mark.parametrize("name", BATCHES)
def test_short_decodes_are_right(
    name: str, grids: list[Any], device: torch.device
) -> None:
    expect_equal(BATCHES[name], device, grids)


OPTIONS: dict[str, dict[str, Any]] = {
    "a window that begins within a tile": {"sliding_window": 70},
    "chunks": {"attention_chunk_size": 64},
    "sinks": {"sinks": True},
    "a window and sinks": {"sliding_window": 45, "sinks": True},
    "a cap": {"logits_soft_cap": 2.0},
    "slopes": {"alibi_slopes": True},
    "not causal": {"causal": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_short_decodes_with_options_are_right(
    name: str, grids: list[Any], device: torch.device
) -> None:
    plan = BatchPlan((1, 2), (190, 130), kv_heads=1, group=3, needle="tile edge")
    expect_equal(plan, device, grids, **OPTIONS[name])


def test_a_request_without_a_key_has_a_zero_row(
    grids: list[Any], device: torch.device
) -> None:
    plan = BatchPlan((1, 1), (0, 90), kv_heads=1)
    expect_equal(plan, device, grids, causal=False)


@pytest.mark.parametrize("reqs", [1, 2, 3])
@pytest.mark.parametrize("position", [31, 32, 63, 64, 127, 128, 191, 192, 198])
def test_no_key_is_lost_at_the_edge_of_a_split(
    position: int, reqs: int, grids: list[Any], device: torch.device
) -> None:
    """One key outweighs all others. One request has splits of 2 tiles, two of 4, three one."""
    plan = BatchPlan((1,) * reqs, (199,) * reqs, group=4, kv_heads=1)
    batch = build(plan, device)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    found = [
        TWINS[twin].paged_attention(**batch.arguments())
        for twin in ("optimized", "reference")
    ]
    torch.testing.assert_close(*found, atol=2e-6, rtol=2e-6)
    assert {name for name, _ in grids} == {"short_decode_kernel"}


def test_keys_that_the_bound_left_out_are_divided_as_all_others(
    grids: list[Any], device: torch.device
) -> None:
    """A `max_seq_len` that is too small costs time, not keys."""
    batch = build(BatchPlan((1,), (250,), kv_heads=1, needle="last"), device)
    arguments = batch.arguments()
    right = TWINS["reference"].paged_attention(**arguments)
    found = TWINS["optimized"].raw.paged_attention(**arguments | {"max_seq_len": 70})
    assert grids[-1][0] == "short_decode_kernel" and grids[-1][1][1] < 4
    torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-6)


def test_the_programs_of_a_request_do_not_depend_on_its_length(
    grids: list[Any], device: torch.device
) -> None:
    """A CUDA graph is launched again when the lengths have changed, and its bounds have not."""
    batch = build(BatchPlan((1, 1), (250, 250), kv_heads=1, needle="last"), device)
    arguments = batch.arguments()
    for lens in ((250, 250), (1, 250), (33, 64), (249, 2)):
        arguments["seq_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
        right = TWINS["reference"].paged_attention(**arguments)
        found = TWINS["optimized"].raw.paged_attention(**arguments)
        torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-6)
    assert len(set(grids)) == 1

"""Tests of short decodes: few requests over short sequences, one program per split."""

from typing import Any

import pytest
import torch
from conftest import TWINS
from pagetwin.conformance.generators.batches import BatchPlan, build
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.launch import dispatch, portable, tuning
from pagetwin.optimized.launch.tuning import max_short_keys
from test_append import plant


def test_short_decodes_have_no_more_programs_than_the_chip_has_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "SHORT_PROGRAMS", 1)
    chip = (8, 64, 132)  # kv heads, keys of a KV tile, multiprocessors
    limits = [max_short_keys(reqs, *chip) for reqs in (1, 2, 4, 16, 17)]
    assert limits == [16 * 64, 8 * 64, 4 * 64, 64, 0]


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
    # the interpreter has 4 multiprocessors; a GPU has more than enough
    monkeypatch.setattr(tuning, "SHORT_PROGRAMS", 4)
    return found


def expect_equal(
    plan: BatchPlan, device: torch.device, grids: list[Any], **options: Any
) -> None:
    """Compare outputs and log-sum-exps of both twins, launched twice on the same counters."""
    batch = build(plan, device)
    heads, tokens = batch.query.shape[1], batch.query.shape[0]
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
    "one split": BatchPlan((1,), (32,), kv_heads=1),
    "one key more than a split": BatchPlan((1,), (33,), kv_heads=1),
    "several splits": BatchPlan((1,), (250,), kv_heads=1, needle="last"),
    "two kv heads": BatchPlan((1,), (250,), kv_heads=2, needle="first"),
    "ragged": BatchPlan((1, 1, 1), (120, 7, 33), kv_heads=1, needle="tile edge"),
    "drafts": BatchPlan((4, 1), (110, 90), group=4, kv_heads=1, needle="first new"),
    "requests of no token": BatchPlan((0, 1, 0), (50, 90, 0), kv_heads=1),
    "padding": BatchPlan((1, 1), (60, 33), kv_heads=1, padding=5, spare_max=7),
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
}


@pytest.mark.parametrize("name", OPTIONS)
def test_short_decodes_with_options_are_right(
    name: str, grids: list[Any], device: torch.device
) -> None:
    plan = BatchPlan((1, 2), (190, 130), kv_heads=1, group=3, needle="tile edge")
    expect_equal(plan, device, grids, **OPTIONS[name])


@pytest.mark.parametrize("position", [31, 32, 63, 64, 127, 128, 191, 192, 198])
def test_no_key_is_lost_at_the_edge_of_a_split(
    position: int, grids: list[Any], device: torch.device
) -> None:
    """One key outweighs all others."""
    batch = build(BatchPlan((1, 1), (199, 199), group=4, kv_heads=1), device)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    found = [
        TWINS[twin].paged_attention(**batch.arguments())
        for twin in ("optimized", "reference")
    ]
    torch.testing.assert_close(*found, atol=2e-6, rtol=2e-6)
    assert {name for name, _ in grids} == {"short_decode_kernel"}


def test_the_last_program_takes_keys_that_the_bound_left_out(
    grids: list[Any], device: torch.device
) -> None:
    """A `max_seq_len` that is too small costs time, not keys."""
    batch = build(BatchPlan((1,), (250,), kv_heads=1, needle="last"), device)
    arguments = batch.arguments()
    right = TWINS["reference"].paged_attention(**arguments)
    found = TWINS["optimized"].raw.paged_attention(**arguments | {"max_seq_len": 70})
    assert grids[-1][0] == "short_decode_kernel" and grids[-1][1][1] < 8
    torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-6)

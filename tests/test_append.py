"""Verification and append: the choice between decode, split and prefill, and the append kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compiler_process import json_lines
from conftest import TWINS
from pagetwin.conformance.generators.batches import BatchPlan, build
from pagetwin.optimized.launch import cost_model, portable
from pagetwin.optimized.launch.cost_model import (
    DECODE,
    PREFILL,
    Choice,
    Layer,
    choose_path,
    count_long,
    estimate_append,
    estimate_prefill,
)
from pagetwin.optimized.launch.dispatch import PLANS
from pagetwin.tools.bench.workloads import load_workloads
from torch import Tensor

TESTS = Path(__file__).parent

# what is not named here is decoded, or computed by the prefill kernel of Hopper chips
PATHS_ON_AN_H200 = {
    "decode-1x512": "few decodes",
    "decode-16x512": "few decodes",
    "decode-2x2k": "few decodes",
    "verify-48x6k-q6": "sm90 append",
    "verify-16x16k-q16": "sm90 append",
    "verify-8x8k-q32": "sm90 append",
    "mla-decode-128h-32x8k": "sm90 latent",
    "mla-decode-16h-256x1k": "sm90 latent",
    "mla-verify-q2-128h-64x4k": "sm90 latent",
    "cascade-128x4k+256": "sm90 prefix; short rest, 16 rows",
    "prefill-2x4k-alibi": "portable prefill",
    "decode-64x4k-fp8": "sm90 FP8 decode",
    "decode-24x12k-fp8": "sm90 FP8 decode",
    "decode-skew-fp8": "sm90 FP8 decode",
    "invariant-prefill-1x8k": "sm90 invariant",
    "invariant-decode-64x4k": "sm90 invariant",
}
DECODED = ("decode", "verify", "cross")


def test_the_kernels_of_every_workload_are_those_of_the_table() -> None:
    """A changed constant of the cost model shows which workloads it moves to other kernels."""
    (found,) = json_lines(TESTS / "chosen_paths.py", "90")
    expected = {
        name: PATHS_ON_AN_H200.get(
            name, "decode" if name.startswith(DECODED) else "sm90 prefill"
        )
        for name, workload in load_workloads("all").items()
        if workload.kind != "write"
    }
    assert found == expected


# ---- the cost model

LLAMA = Layer(
    group_size=4,
    kv_heads=8,
    numbers=256,
    key_bytes=512,
    short_rows=16,
    row_tiles=(16, 32, 64, 128),
    prefill_rows=128,
    has_hopper=True,
    has_append=True,
    causal=True,
    max_visible_keys=None,
    processors=132,
)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the limits of a chip; those of the interpreter are for small batches."""
    monkeypatch.setattr(cost_model, "MAX_SPLIT_TOKENS", 1024)
    monkeypatch.setattr(cost_model, "MIN_SPLIT_KEYS", 512)


def choose(*batch: int, **changes: Any) -> Choice:
    """Return the choice for a batch: requests, tokens, longest request, longest sequence."""
    return choose_path(Layer(**(vars(LLAMA) | changes)), *batch)


@pytest.mark.usefixtures("chip")
def test_requests_that_fit_a_decode_tile_are_decoded() -> None:
    assert choose(64, 256, 4, 4096) == DECODE
    assert choose(64, 320, 5, 4096).path == "append"
    assert choose(64, 320, 5, 4096, has_hopper=False, has_append=False).path == "split"


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize("is_hopper", [True, False])
@pytest.mark.parametrize(("reqs", "keys"), [(1, 131072), (8, 8192), (64, 4096)])
def test_few_new_tokens_are_split_and_many_are_prefilled(
    reqs: int, keys: int, is_hopper: bool
) -> None:
    split = "append" if is_hopper else "split"
    for new, path in ((5, split), (1100, "prefill")):
        choice = choose(
            reqs, reqs * new, new, keys, has_hopper=is_hopper, has_append=is_hopper
        )
        assert choice.path == path


# requests, tokens, longest request and sequence; what differs from LLAMA; microseconds of the
# append kernel and of the prefill kernel (H200, torch 2.11, triton 3.6, cold L2, medians of 11)
MEASURED: list[tuple[tuple[int, int, int, int], dict[str, int], float, float]] = [
    ((48, 288, 6, 6144), {}, 304.2, 315.2),
    ((16, 256, 16, 16384), {}, 271.0, 276.2),
    ((8, 256, 32, 8192), {}, 107.9, 125.7),
    ((20, 160, 8, 4096), {}, 115.2, 147.1),
    ((24, 548, 43, 9493), {}, 192.8, 281.6),
    ((1, 8, 8, 65536), {}, 113.3, 798.6),
    ((3, 192, 64, 12288), {}, 122.5, 167.3),
    ((4, 32, 8, 2048), {}, 41.0, 46.3),
    ((64, 384, 6, 1024), {}, 97.8, 101.3),
    ((7, 168, 24, 5000), {}, 76.2, 88.6),
    ((16, 2048, 128, 4096), {}, 306.1, 238.8),
    ((32, 224, 7, 8192), {"group_size": 7, "kv_heads": 4}, 151.6, 724.0),
    (
        (16, 256, 16, 8192),
        {"group_size": 8, "numbers": 128, "key_bytes": 256},
        104.7,
        122.7,
    ),
    ((24, 192, 8, 8192), {"max_visible_keys": 1024}, 69.9, 68.4),
    ((2, 512, 256, 16384), {}, 247.6, 226.9),
    ((1, 512, 512, 32768), {}, 442.8, 425.4),
    ((64, 316, 64, 8192), {}, 352.7, 363.4),
    ((1, 1024, 1024, 40960), {}, 1056.6, 1020.8),
    ((106, 6244, 1024, 4096), {}, 617.0, 539.6),
    ((12, 576, 48, 3000), {}, 113.1, 108.4),
    ((5, 25, 5, 20000), {"group_size": 8, "kv_heads": 4}, 93.1, 275.0),
    ((33, 297, 9, 3000), {}, 136.5, 129.3),
    (
        (12, 144, 12, 6000),
        {"group_size": 2, "numbers": 512, "key_bytes": 1024},
        184.0,
        174.8,
    ),
    ((128, 640, 5, 2000), {}, 286.9, 293.1),
    ((3, 48, 16, 30000), {"group_size": 16, "kv_heads": 2}, 117.1, 369.8),
    ((10, 200, 20, 7000), {"max_visible_keys": 4096}, 93.0, 79.9),
]


@pytest.mark.usefixtures("chip")
@pytest.mark.parametrize(("batch", "changes", "append", "prefill"), MEASURED)
def test_the_chosen_hopper_kernel_takes_at_most_5_percent_more_than_the_other_one(
    batch: tuple[int, int, int, int],
    changes: dict[str, Any],
    append: float,
    prefill: float,
) -> None:
    """Measured times, of batches to which the rates of the model were fitted."""
    times = {"append": append, "prefill": prefill}
    assert times[choose(*batch, **changes).path] <= 1.05 * min(times.values())


@pytest.mark.usefixtures("chip")
def test_a_prompt_from_its_first_token_on_is_prefilled() -> None:
    assert choose(1, 8192, 8192, 8192) == PREFILL
    assert choose(1, 8192, 8192, 8192, has_hopper=False) == PREFILL


@pytest.mark.usefixtures("chip")
def test_decodes_beside_one_prompt_are_not_split_with_its_tiles() -> None:
    assert choose(129, 128 + 2048, 2048, 4096) == PREFILL


@pytest.mark.usefixtures("chip")
def test_keys_outside_of_a_window_do_not_count() -> None:
    whole, few = (
        Layer(**(vars(LLAMA) | {"max_visible_keys": keys})) for keys in (100_000, 100)
    )
    batch = (9, 9, 8, 9000)
    for estimate in (estimate_append, estimate_prefill):
        # no more keys than the window and the new tokens have
        assert estimate(few, *batch) == estimate(whole, *batch[:3], 108)
        assert estimate(few, *batch) < estimate(whole, *batch)


@pytest.mark.parametrize(
    ("batch", "count"),
    [((4, 9, 3), 3), ((4, 12, 3), 4), ((129, 2176, 2048), 1), ((5, 5, 1), 1)],
)
def test_the_estimate_of_long_requests_fits_the_number_of_tokens(
    batch: tuple[int, int, int], count: int
) -> None:
    assert count_long(*batch) == count


# ---- the kernel


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of the query tiles of append launches, and make every long call one."""
    rows: list[int] = []
    launch = portable.PortablePlan.launch_append

    def note(plan: portable.PortablePlan, call: Any, block_m: int) -> None:
        rows.append(block_m)
        launch(plan, call, block_m)

    monkeypatch.setattr(portable.PortablePlan, "launch_append", note)
    dispatch = "pagetwin.optimized.launch.dispatch.choose_path"
    largest = lambda layer, *batch: Choice("split", layer.row_tiles[-1])  # noqa: E731
    monkeypatch.setattr(dispatch, largest)
    # a call that was repeated would not be planned
    PLANS.clear()
    return rows


BATCHES = {
    "one request": BatchPlan((8,), (170,), group=4),
    "rows that fill no tile": BatchPlan((3, 9, 1), (130, 67, 40), group=5),
    "several query tiles": BatchPlan((20, 7), (150, 70), group=4),
    "new tokens alone": BatchPlan((40,), (40,), group=2),
    "requests of no token": BatchPlan((0, 9, 0, 12), (50, 90, 0, 33), group=4),
    "more requests than a pass": BatchPlan((9,) * 11, (40, 70) * 5 + (9,), group=2),
    "padding": BatchPlan((9, 12), (90, 33), group=4, padding=5, spare_max=7),
}


@pytest.mark.parametrize("name", BATCHES)
def test_split_requests_of_many_rows_are_right(
    name: str, appended: list[int], device: torch.device
) -> None:
    batch = build(BATCHES[name], device)
    expect_equal(batch.arguments(), appended)


def expect_equal(arguments: dict[str, Any], appended: list[int]) -> None:
    """Compare outputs and log-sum-exps of both twins."""
    heads, tokens = arguments["query"].shape[1], arguments["query"].shape[0]
    found = []
    for twin in ("optimized", "reference"):
        lse = arguments["query"].new_zeros(heads, tokens)
        found.append((TWINS[twin].paged_attention(**arguments, lse=lse), lse))
    assert len(appended) == 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


EDGES = [key for edge in range(32, 200, 32) for key in (edge - 1, edge) if key < 190]


@pytest.mark.parametrize("position", EDGES)
def test_no_key_is_lost_at_the_edge_of_a_split(
    position: int, appended: list[int], device: torch.device
) -> None:
    """One key outweighs all others, for the rows of every query tile."""
    batch = build(BatchPlan((12, 9), (200, 195), group=4, kv_heads=1), device)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    expect_equal(batch.arguments(), appended)


def plant(
    rows: Any, keys: Tensor, values: Tensor, query: Tensor, position: int
) -> None:
    """Make one key of each request outweigh all others. The tensors are modified in place."""
    query[..., 0] = 6.0
    for row in rows:
        at = (row[position // keys.shape[1]], position % keys.shape[1])
        keys[at][:, 0] = 9.0
        values[at] += 100.0


def test_an_understated_query_length_writes_nothing_outside_of_its_workspace(
    monkeypatch: pytest.MonkeyPatch, appended: list[int], device: torch.device
) -> None:
    """The workspace has room for the rows of `max_query_len` tokens; others are not stored."""
    lent: list[Tensor] = []

    def find(_: torch.device, counters: int, numbers: int) -> tuple[Tensor, Tensor]:
        memory = torch.full((numbers + 4096,), 7.0, device=device)
        lent.append(memory[numbers:])
        arrivals = torch.zeros(counters, dtype=torch.int32, device=device)
        return arrivals, memory[:numbers]

    monkeypatch.setattr(portable, "find_workspace", find)
    batch = build(BatchPlan((9, 9), (200, 180), group=4), device)
    TWINS["optimized"].raw.paged_attention(**(batch.arguments() | {"max_query_len": 5}))
    assert appended and len(lent) == 1 and bool((lent[0] == 7).all())

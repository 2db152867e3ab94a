"""Verification and append: the kernels of every workload, and the portable append kernel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.optimized.dispatch.dispatch import PIPELINE
from pagetwin.optimized.kernels.portable.host.plans import PortableAppendPlan
from pagetwin.optimized.runtime.family import Task
from pagetwin.tools.bench.workloads import load_workloads
from support.compiler_process import json_lines
from support.forced_choices import one_launch_for_all
from support.planted_keys import plant
from support.twins import TWINS
from torch import Tensor

SCRIPT = Path(__file__).with_name("chosen_paths.py")

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
    "decode-64x4k-fp8": "sm90 code decode",
    "decode-24x12k-fp8": "sm90 code decode",
    "decode-skew-fp8": "sm90 code decode",
    "prefill-1x16k-fp8": "sm90 code prefill",
    "prefill-1x16k-fp8-vs-fa3": "sm90 code prefill",
    "invariant-prefill-1x8k": "sm90 invariant",
    "invariant-decode-64x4k": "sm90 invariant",
}
DECODED = ("decode", "verify", "cross")


@pytest.mark.extended
def test_the_kernels_of_every_workload_are_those_of_the_table() -> None:
    """A changed constant of the cost model shows which workloads it moves to other kernels."""
    (found,) = json_lines(SCRIPT, "90")
    expected = {
        name: PATHS_ON_AN_H200.get(
            name, "decode" if name.startswith(DECODED) else "sm90 prefill"
        )
        for name, workload in load_workloads("all").items()
        if workload.kind != "write"
    }
    assert found == expected


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the rows of the query tiles of append launches, and make every long call one."""
    rows: list[int] = []
    launch = PortableAppendPlan.launch

    def note(plan: PortableAppendPlan, call: Any, task: Task) -> None:
        rows.append(task.division)
        launch(plan, call, task)

    monkeypatch.setattr(PortableAppendPlan, "launch", note)
    # a call that was repeated would not be planned
    PIPELINE.plans.clear()
    with one_launch_for_all():
        yield rows


BATCHES = {
    "one request": BatchPlan((8,), (170,), group=4),
    "rows that fill no tile": BatchPlan((3, 9, 1), (130, 67, 40), group=5),
    "several query tiles": BatchPlan((20, 7), (150, 70), group=4),
    "new tokens alone": BatchPlan((40,), (40,), group=2),
    "requests of no token": BatchPlan((0, 9, 0, 12), (50, 90, 0, 33), group=4),
    "more requests than a pass": BatchPlan((9,) * 11, (40, 70) * 5 + (9,), group=2),
    "padding": BatchPlan((9, 12), (90, 33), group=4, padding=5, spare_max=7),
}


@pytest.mark.sample(2)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("position", EDGES)
def test_no_key_is_lost_at_the_edge_of_a_split(
    position: int, appended: list[int], device: torch.device
) -> None:
    """One key outweighs all others, for the rows of every query tile."""
    batch = build(BatchPlan((12, 9), (200, 195), group=4, kv_heads=1), device)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    expect_equal(batch.arguments(), appended)


@pytest.mark.usefixtures("unchecked_values")
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

    monkeypatch.setattr(
        "pagetwin.optimized.kernels.portable.host.plan.find_workspace", find
    )
    batch = build(BatchPlan((9, 9), (200, 180), group=4), device)
    TWINS["optimized"].raw.paged_attention(**(batch.arguments() | {"max_query_len": 5}))
    assert appended and len(lent) == 1 and bool((lent[0] == 7).all())

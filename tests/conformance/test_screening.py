"""Screening: groups of batches, their parts, and what a run of several hundred batches costs."""

from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.cases.option_pairs import PLAIN
from pagetwin.conformance.cases.signatures import (
    LARGE,
    SMALL,
    SignedBatch,
    draw_batch,
    draw_signature,
)
from pagetwin.conformance.cases.signed_calls import build_signed
from pagetwin.conformance.checks import groups
from pagetwin.conformance.checks.group_verdicts import judge_group
from pagetwin.conformance.checks.groups import COSTS_ON_GPU, Costs, make_group
from pagetwin.conformance.running import screening
from pagetwin.conformance.running.screening import screen
from pagetwin.conformance.running.trial import find_law, make_setting
from pagetwin.contract.operations import load_implementation

CPU = torch.device("cpu")
PAGED = "paged attention is right for every batch of a signature"
OPERATIONS = ("paged_attention", "encoder_attention")


# parts of a group


def lengths_of(seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Return new tokens and keys of all requests of 32 batches, and their query heads."""
    signature = draw_signature(seed, LARGE)
    drawn = [draw_batch(signature, index) for index in range(32)]
    new = np.array([query_len for batch in drawn for query_len in batch.query_lens])
    keys = np.array([key_len for batch in drawn for key_len in batch.key_lens])
    return new, keys, signature.query_heads


@pytest.mark.parametrize("costs", [COSTS_ON_GPU, Costs(1 << 15, 1 << 22), Costs(0, 1)])
def test_each_request_with_queries_is_in_one_part_within_the_limits(
    costs: Costs,
) -> None:
    for seed in range(20):
        new, keys, heads = lengths_of(seed)
        parts = groups.split_requests(new, keys, heads, costs)
        found = np.concatenate(parts)
        assert sorted(found) == np.flatnonzero(new).tolist()
        for part in parts:
            scores = heads * len(part) * int(new[part].max()) * int(keys[part].max())
            assert len(part) == 1 or scores <= costs.scores


def test_parts_on_a_gpu_are_few_and_contain_little_padding() -> None:
    """Groups ended at 4 million scores: 6 batches on average, with 8 times as many scores."""
    parts = scores = padded = 0
    for seed in range(40):
        new, keys, heads = lengths_of(seed)
        found = groups.split_requests(new, keys, heads, COSTS_ON_GPU)
        parts += len(found)
        scores += heads * int((new * keys).sum())
        for part in found:
            padded += heads * len(part) * int(new[part].max()) * int(keys[part].max())
    assert 40 * 32 / parts > 10
    assert padded / scores < 3


@pytest.mark.extended
@pytest.mark.parametrize("operation", OPERATIONS)
def test_verdicts_do_not_depend_on_the_parts(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load_implementation("reference")
    wrong = 0
    for seed in range(40):
        signature = draw_signature(seed, SMALL, operation)
        calls = [build_signed(draw_batch(signature, index), CPU) for index in range(3)]
        results = [signed.call.run(reference) for signed in calls]
        for number, (out, _) in enumerate(results):
            if number and out.numel():
                out[0] = (1.5 * out[0].float()).to(out.dtype)
        verdicts = []
        for costs in (Costs(1 << 40, 1 << 40), Costs(0, 1)):
            monkeypatch.setitem(groups.COSTS, "cpu", costs)
            verdicts.append(judge_group(make_group(calls, CPU), results))
        one, other = ([share <= 1 for share in found] for found in verdicts)
        assert one == other
        wrong += one.count(False)
    assert wrong > 40


def test_calls_without_rows_are_right() -> None:
    """The quantile of no row raised an error."""
    plain = replace(draw_signature(0, SMALL), choice=dict(PLAIN) | {"lse": "given"})
    batch = SignedBatch(plain, (0,), (5,), (-1,), version=draw_batch(plain, 0).version)
    calls = [build_signed(batch, CPU)] * 2
    results = [signed.call.run(load_implementation("reference")) for signed in calls]
    assert judge_group(make_group(calls, CPU), results) == [0.0, 0.0]
    padded = build_signed(replace(batch, padding=2), CPU)
    out, lse = padded.call.run(load_implementation("reference"))
    assert judge_group(make_group([padded], CPU), [(out, lse)]) == [0.0]
    out[1, 0, 0] = 1e-3
    assert judge_group(make_group([padded], CPU), [(out, lse)]) == [float("inf")]


# kernels are waited for once per group


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the waits so far, and a function that makes the wait after some calls fail."""
    found: dict[str, Any] = {"count": 0, "calls": 0, "fails after": None}
    reference = load_candidate("reference").operations["paged_attention"]

    @wraps(reference)
    def attend(*args: Any, **given: Any) -> Any:
        found["calls"] += 1
        return reference(*args, **given)

    def wait(device: torch.device) -> None:
        found["count"] += 1
        last = found["fails after"]
        if last is not None and found["calls"] >= last:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(screening, "wait_for_kernels", wait)
    monkeypatch.setattr(screening, "CALLS_AT_ONCE", 8)
    candidate = Candidate("counted", {"paged_attention": attend}, Support())
    found["setting"] = make_setting(candidate, "cpu")
    return found


@pytest.mark.parametrize(("waits_for_each", "count"), [(False, 3), (True, 20 + 3)])
def test_kernels_are_waited_for_once_per_group_or_also_after_each_call(
    waits: Any, waits_for_each: bool, count: int
) -> None:
    law = find_law(PAGED)
    result = screen(law, waits["setting"], 0, 0, 20, waits_for_each=waits_for_each)
    assert result.status == Status.HELD and result.cases == 20
    assert waits["count"] == count and waits["calls"] == 20


@pytest.mark.parametrize(("waits_for_each", "batch"), [(False, 15), (True, 10)])
def test_a_crash_names_its_batch_only_if_each_call_is_waited_for(
    waits: Any, waits_for_each: bool, batch: int
) -> None:
    waits["fails after"] = 11
    law = find_law(PAGED)
    result = screen(law, waits["setting"], 0, 0, 20, waits_for_each=waits_for_each)
    assert result.status == Status.CRASHED and "illegal memory access" in result.message
    assert result.case == repr(draw_batch(draw_signature(0, SMALL), batch))


def test_an_allocation_that_fails_is_not_a_crash_and_no_wrong_result() -> None:
    """On a GPU, processes that shared it were reported as crashes of the kernel."""
    reference = load_candidate("reference").operations["paged_attention"]
    calls = 0

    @wraps(reference)
    def attend(*args: Any, **given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("tried to allocate 2.64 GiB")
        return reference(*args, **given)

    candidate = Candidate("mine", {"paged_attention": attend}, Support())
    tried: list[str] = []
    setting = make_setting(candidate, "cpu")
    result = screen(
        find_law(PAGED), setting, 3, 0, 8, at=lambda case, held: tried.append(case)
    )
    assert result.status == Status.OUT_OF_MEMORY
    assert result.case == tried[-1] and "2.64 GiB" in result.message
    assert result.cases == 3

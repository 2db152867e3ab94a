"""Screening: when the law alone judges a batch, and what a result says."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.cases.option_pairs import PLAIN
from pagetwin.conformance.cases.rank_signatures import (
    draw_rank_batch,
    draw_rank_signature,
)
from pagetwin.conformance.cases.ranks import GATHER, RING, STEP
from pagetwin.conformance.cases.signatures import (
    SMALL,
    SignedBatch,
    draw_batch,
    draw_signature,
)
from pagetwin.conformance.running import screening
from pagetwin.conformance.running.screening import MARGIN, Tally, describe, screen
from screened_calls import FIRST, LAW, break_alone, failing, setting_of


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Make the law alone break on each batch, and return how it was asked."""
    return break_alone(monkeypatch)


# the verdict on a group


def judged(monkeypatch: pytest.MonkeyPatch, *shares: float, **given: Any) -> Result:
    """Return the result of batches whose errors are such shares of their budgets."""
    found = torch.tensor(shares)
    monkeypatch.setattr(screening, "_shares", lambda setting, ran: found)
    return screen(LAW, setting_of(), 0, 0, len(shares), **given)


@pytest.mark.parametrize("share", [float("nan"), float("inf"), 1.001])
def test_a_batch_past_its_budget_is_judged_by_its_law(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    assert judged(monkeypatch, 0.5, share, 1.0).status == Status.BROKEN
    batch = draw_batch(draw_signature(0, SMALL), 1)
    assert [asked["case"] for asked in alone] == [repr(batch)]


def test_a_batch_at_its_budget_holds(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged(monkeypatch, 1.0, 0.0).status == Status.HELD and not alone


def test_a_law_that_holds_alone_is_right_within_the_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every wrong batch of the group is tried alone, not the first one only."""
    assert MARGIN == 2.0
    found = judged(monkeypatch, 1.5, 2.0)
    assert found.status == Status.HELD and found.details["counts"]["judged again"] == 2
    found = judged(monkeypatch, 1.5, 2.5)
    assert found.status == Status.BROKEN and found.message.startswith("2.5 of the")
    assert found.case == repr(draw_batch(draw_signature(0, SMALL), 1))


def test_an_error_that_does_not_recur_depends_on_earlier_calls() -> None:
    attend = failing([None, ValueError("once"), *[None] * 9])
    found = screen(LAW, setting_of(attend), 0, 0, 3)
    assert found.status == Status.BROKEN
    assert found.message.startswith("inf of the error budget")


def test_results_of_steps_on_ranks_are_merged_and_gathered_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    monkeypatch.setattr(screening, "make_group", lambda calls, device: calls)
    monkeypatch.setattr(
        screening, "shares_of_group", lambda *given: found.append(given)
    )
    batches = [FIRST]
    batches += [
        draw_rank_batch(draw_rank_signature(0, SMALL, operation), 0)
        for operation in (STEP, GATHER, RING)
    ]
    for batch in batches:
        call: Any = SimpleNamespace()
        screening._shares(setting_of(), [(batch, call, call)])
    assert [is_joined for _, _, is_joined in found] == [False, True, False, True]


# what a result says


def test_the_law_alone_gets_the_rest_of_the_time_and_tells_its_cases(
    alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screening, "CALLS_AT_ONCE", 1)
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(screening, "time", clock)
    failures: list[Result] = []

    def at(case: str, held: int) -> None:
        """Do nothing."""

    given = {"at": at, "seconds": 1000.0, "on_failure": failures.append}
    found = judged(monkeypatch, 9.0, **given)
    assert len(alone) == 1 and alone[0]["at"] is at
    assert 900 < alone[0]["seconds"] < 1000
    assert found.cases == 1 and found.seconds > 1000 - alone[0]["seconds"]
    (first,) = failures
    for of_batch in (first, found):
        assert (
            of_batch.case == repr(FIRST)
            and of_batch.cases == 1
            and of_batch.details["own"] == 1
        )
        assert of_batch.details["signature"] and of_batch.details["counts"]["requests"]
        assert "candidate" in of_batch.details["seconds"]


def test_the_first_group_that_fails_is_the_result(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screening, "CALLS_AT_ONCE", 1)
    monkeypatch.setattr(screening, "_shares", lambda setting, ran: torch.tensor([9.0]))
    found = screen(LAW, setting_of(), 0, 0, 3)
    assert found.cases == 1 and len(alone) == 1
    assert found.case == repr(FIRST)


def test_a_signature_is_described_by_its_sizes_and_what_is_not_plain() -> None:
    signature = next(
        drawn
        for drawn in (draw_signature(seed, SMALL) for seed in range(99))
        if drawn.views.given
    )
    choice = dict(PLAIN) | {"out": "made"}
    found = describe(replace(signature, choice=choice))
    assert found["dtype"] == PLAIN["dtype"] and found["out"] == "made"
    assert found["kv_heads"] == str(signature.kv_heads)
    assert "sliding_window" not in found
    for name, form in signature.views.given.items():
        assert found[f"{name} strides"] == form
    ranked = draw_rank_signature(0, SMALL, STEP)
    assert ranked.ranks is not None
    assert describe(ranked).items() >= ranked.ranks.describe().items()


def test_the_contents_of_batches_are_counted() -> None:
    tally = Tally()
    batch = SignedBatch(
        FIRST.signature, (1, 2, 0), (5, 7, 9), (0, -1, 3), version=FIRST.version
    )
    for _ in range(2):
        tally.add(batch)
    assert dict(tally.counts) == {
        "requests": 6,
        "new tokens": 6,
        "keys": 42,
        "needles": 4,
        f"table: {batch.table}": 2,
        f"poison: {batch.poison}": 2,
        f"entries: {batch.entries}": 2,
    }


def test_ranks_without_a_key_are_counted_in_steps_alone() -> None:
    name = "ranks without a key of a request"
    for operation, is_counted in ((STEP, True), (RING, False)):
        signature = draw_rank_signature(0, SMALL, operation)
        assert signature.ranks is not None
        ranks = replace(signature.ranks, world_size=4, interleave_size=1)
        tally = Tally()
        tally.add(
            replace(
                draw_rank_batch(signature, 0),
                signature=replace(signature, ranks=ranks),
                query_lens=(1,),
                key_lens=(3,),
                needles=(-1,),
            )
        )
        assert tally.counts[name] == (1 if is_counted else 0)

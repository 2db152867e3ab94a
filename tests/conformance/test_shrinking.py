"""Smaller cases: which simpler ones are tried, and which one is kept."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.block_histories import BlockAction, BlockHistory
from pagetwin.conformance.cases.option_pairs import OPTIONS, PLAIN, allowed
from pagetwin.conformance.cases.signatures import SMALL, draw_batch, draw_signature
from pagetwin.conformance.cases.steps import Requests, Runs
from pagetwin.conformance.cases.views import Views
from pagetwin.conformance.laws.batch_slices import Cut
from pagetwin.conformance.running.shrinking import shrink, simpler, stays_valid
from pagetwin.contract.specs import KVCacheSpec

PLAN = BatchPlan(
    (3, 1, 9), (20, 4, 9), block_size=3, kv_heads=3, group=4, head_size=24,
    needle="last", padding=2, scale=0.3, seed=77,
)  # fmt: skip


def smallest(case: Any, fails: Callable[[Any], bool], seconds: float = 60.0) -> Any:
    """Return the smallest case, which must fail itself."""
    assert fails(case)
    found = shrink(case, fails, seconds)
    assert fails(found)
    return found


def test_a_plan_keeps_only_what_it_fails_with() -> None:
    plan = smallest(PLAN, lambda plan: any(n > 5 for n in plan.query_lens))
    assert plan.query_lens == plan.kv_lens == (9,) or plan.query_lens == (6,)
    plain = BatchPlan((), ())
    assert (plan.head_size, plan.needle, plan.padding) == (
        plain.head_size,
        plain.needle,
        plain.padding,
    )
    assert (plan.kv_heads, plan.seed, plan.scale) == (1, 0, None)


def test_what_a_plan_fails_with_is_kept() -> None:
    plan = smallest(PLAN, lambda plan: plan.needle == "last" and plan.seed > 0)
    assert (plan.needle, plan.seed) == ("last", 1)
    plan = smallest(PLAN, lambda plan: plan.kv_heads == 3 and len(plan.kv_lens) > 1)
    assert plan.kv_heads == 3 and len(plan.kv_lens) == 2


def test_lengths_become_as_short_as_possible() -> None:
    plan = smallest(PLAN, lambda plan: max(plan.kv_lens, default=0) > 12)
    assert plan.kv_lens == (13,) and plan.query_lens[0] <= 1


def test_simpler_plans_are_valid() -> None:
    plans = list(simpler(PLAN))
    assert len(plans) > 15
    for plan in plans:
        pairs = zip(plan.query_lens, plan.kv_lens, strict=True)
        assert all(0 <= new <= keys for new, keys in pairs)
    assert all(plan != PLAN for plan in plans[:3])


def test_simpler_choices_have_one_option_at_its_first_value_and_are_valid() -> None:
    choice = dict(PLAIN) | {"layout": "NHD", "dtype": "float16", "causal": "no"}
    choice = {name: choice.get(name, PLAIN[name]) for name in OPTIONS}
    found = list(simpler(choice))
    assert found
    for other in found:
        (changed,) = [name for name in choice if choice[name] != other[name]]
        rest = {name: value for name, value in choice.items() if name != changed}
        assert other[changed] == PLAIN[changed]
        assert PLAIN[changed] in allowed(rest, changed)
        assert changed != "operation"


def test_an_option_is_kept_if_its_first_value_is_not_allowed() -> None:
    kept = 0
    for seed in range(60):
        choice = draw_signature(seed, SMALL, "paged_attention").choice
        others = [name for name in choice if choice[name] != PLAIN[name]]
        kept += len(others) - len(list(simpler(choice)))
        for other in simpler(choice):
            (changed,) = [name for name in choice if choice[name] != other[name]]
            rest = {name: value for name, value in choice.items() if name != changed}
            assert PLAIN[changed] in allowed(rest, changed)
    assert kept > 0


def test_parts_of_tuples_and_seeds_become_simpler() -> None:
    case = (PLAN, 17, "word")
    plan, seed, word = smallest(case, lambda case: len(case[0].kv_lens) > 0)
    assert (len(plan.kv_lens), seed, word) == (1, 0, "word")


HISTORY = BlockHistory(
    (BlockAction("start", 0, 9, 5, 2), BlockAction("fork", 3), BlockAction("free", 2)),
    block_size=4,
    seed=7,
)


def test_a_history_keeps_only_the_actions_it_fails_with() -> None:
    other = replace(HISTORY, actions=HISTORY.actions * 3)
    found = smallest(
        [other, HISTORY, other],
        lambda cases: any("free" in repr(case) for case in cases),
    )
    assert found == [BlockHistory((BlockAction("free"),))]


def test_fields_of_a_history_become_their_default_or_smaller() -> None:
    found = smallest(
        HISTORY,
        lambda case: case.seed is not None and any(a.count > 3 for a in case.actions),
    )
    assert found.block_size == 2 and found.seed == 0 and found.num_blocks == 8
    assert found.actions == (BlockAction("start", count=4),)


def test_tuples_of_equal_length_become_shorter_together() -> None:
    requests = Requests(new=Runs((1, 300), (9, 1)), computed=(0,) * 300 + (4,))
    found = smallest(
        requests,
        lambda case: any(
            n > 3 < c for n, c in zip(case.new, case.computed, strict=True)
        ),
    )
    assert found == Requests(new=(4,), computed=(4,))
    assert repr(found.new) == "Runs((4, 1))" and repr(found.computed) == "(4,)"


def test_a_record_that_rejects_a_number_keeps_the_smallest_one_that_it_accepts() -> (
    None
):
    """A block size of 0 ended the search with the error of the record."""
    spec = KVCacheSpec(24, num_kv_heads=5, head_size=64, dtype=torch.float16)
    found = smallest(spec, lambda spec: spec.block_size > 0)
    assert (found.block_size, found.num_kv_heads, found.head_size) == (1, 1, 1)


@pytest.mark.extended
def test_cuts_stay_at_their_tokens_when_a_step_loses_requests_and_tokens() -> None:
    cut = Cut(
        Requests(new=(1,) * 300 + (9, 2), computed=(3,) * 302),
        (0, 200, 304, 311),
        padding=4,
        idle="before",
    )
    for simple in cut.simpler():
        assert simple.cuts[0] == 0 and simple.cuts[-1] == sum(simple.step.new)
        assert simple.slices()
    found = smallest(cut, lambda cut: not cut.is_clean)
    assert found == Cut(Requests(new=(2,), computed=(0,)), (0, 1, 2), flag=True)


def test_only_cases_whose_numbers_belong_together_may_become_invalid() -> None:
    signed = draw_batch(draw_signature(3, SMALL, "paged_attention"), 0)
    for case in (PLAN, (PLAN, 1), dict(PLAIN), Views(), signed):
        assert stays_valid(case)
    for case in (HISTORY, [HISTORY], (HISTORY,), (1, 2), 3):
        assert not stays_valid(case)


def test_numbers_become_smaller_and_keep_their_positions() -> None:
    assert smallest((40, 3), lambda case: case[0] > 6 and case[1] > 1) == (7, 2)
    assert [*simpler((1, 2))] == [(0, 2), (1, 0), (1, 1)]
    assert [*simpler((-1, 2.5, "word", True))] == [
        (-1, 0.0, "word", True),
        (-1, 2.5, "word", False),
    ]
    assert [*simpler((-1, 0.0, False, "word", None))] == []


def test_cases_with_a_method_make_themselves_simpler() -> None:
    views = Views(query="fused per head", out="heads first")
    assert smallest(views, lambda views: views.out is not None) == Views(
        out="heads first"
    )
    batch = draw_batch(draw_signature(3, SMALL, "paged_attention"), 0)
    assert list(simpler(batch)) == list(batch.simpler())
    assert list(simpler(17)) == []


def test_no_case_is_tried_twice_and_none_after_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def fails(plan: BatchPlan) -> bool:
        seen.append(repr(plan))
        return sum(plan.query_lens) > 3

    shrink(PLAN, fails, 60.0)
    assert len(seen) == len(set(seen)) > 10
    seen.clear()
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    shrink(PLAN, fails, 5.0)
    assert len(seen) <= 5
    seen.clear()
    assert shrink(PLAN, fails, -1.0) == PLAN and not seen

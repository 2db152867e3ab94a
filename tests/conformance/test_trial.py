"""Trials of one law: which cases are tried, what counts, and which input is reported."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import (
    Candidate,
    OutsideSupport,
    Support,
    load_candidate,
)
from pagetwin.conformance.candidates.guard.interference import found_interference
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running import trial
from pagetwin.conformance.running.trial import (
    find_law,
    make_case,
    make_setting,
    result_without_cases,
    run_law,
    try_case,
    try_law,
)

REFERENCE = load_candidate("reference")
NEEDED = "compute_slot_mapping_batch"
Body = Callable[[Setting, Any], None]


def law_of(body: Body, cases: Any = (1, 2, 3, 4, 5)) -> Law:
    """Return a law whose body also calls the operation that it needs."""

    def calling(setting: Setting, case: Any) -> None:
        assert getattr(setting.candidate, NEEDED)
        body(setting, case)

    return Law("a law", "area", (NEEDED,), cases, calling)


def setting_of(support: Support | None = None, **given: Any) -> Setting:
    candidate = Candidate("own", REFERENCE.operations, support or Support(), **given)
    return make_setting(candidate, "cpu")


def outcome(body: Body, cases: Any = (1, 2, 3, 4, 5), **given: Any) -> Result:
    """Return the result of a law of the given body."""
    return try_law(law_of(body, cases), setting_of(), 0, 20, **given)


def wrong(what: str = "slots", found: object = 1, right: object = 2) -> Disagreement:
    return Disagreement(what, "as a whole", found, right)


def failing(*cases: Any, error: Callable[[], Exception] = wrong) -> Body:
    """Return a body that fails on some cases."""

    def body(setting: Setting, case: Any) -> None:
        if case in cases:
            raise error()

    return body


def test_a_law_holds_on_all_of_its_cases() -> None:
    seen: list[int] = []
    result = outcome(lambda setting, case: seen.append(case))
    assert (result.status, result.cases, seen) == (Status.HELD, 5, [1, 2, 3, 4, 5])


def test_some_of_the_listed_cases_are_taken_at_equal_steps() -> None:
    seen: list[int] = []
    outcome(lambda setting, case: seen.append(case), range(10), listed=5)
    assert seen == [0, 2, 4, 6, 8]


def test_drawn_cases_are_as_many_as_asked_for_and_depend_on_the_seed() -> None:
    drawn: list[list[int]] = []
    for seed in (0, 0, 1):
        seen: list[int] = []
        law = law_of(
            lambda s, case, seen=seen: seen.append(case), st.integers(0, 10**9)
        )
        assert try_law(law, setting_of(), seed, 12).cases == 12
        drawn.append(seen)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_failure_has_the_case_and_both_values() -> None:
    result = outcome(failing(3, 4))
    assert (result.status, result.cases, result.case) == (Status.BROKEN, 3, "3")
    assert (result.what, result.where) == ("slots", "as a whole")
    assert (result.found, result.right, result.summary[-1]) == ("1", "2", "2")


def test_an_error_has_its_first_line() -> None:
    result = outcome(failing(2, error=lambda: KeyError("lens\nmore")))
    assert result.status == Status.BROKEN and result.message.startswith("KeyError: ")


def test_a_law_that_calls_no_operation_tests_nothing() -> None:
    law = Law("a law", "area", (NEEDED,), (1, 2), lambda setting, case: None)
    result = try_law(law, setting_of(), 0, 5)
    assert (result.status, result.skipped) == (Status.OUTSIDE, 2)
    assert result.reason == "the law called no operation"


def test_cases_outside_are_skipped_and_a_law_outside_is_undeclared() -> None:
    outside = failing(2, 3, error=lambda: OutsideSupport("dtype int8"))
    result = outcome(outside)
    assert (result.status, result.cases, result.skipped) == (Status.HELD, 5, 2)
    result = outcome(outside, (2, 3))
    assert (result.status, result.reason) == (Status.OUTSIDE, "dtype int8")


def test_a_case_outside_is_tried_fitted() -> None:
    seen: list[Any] = []

    def body(setting: Setting, case: BatchPlan) -> None:
        seen.append((case.head_size, setting.is_fitting))
        if case.head_size != 64:
            raise OutsideSupport("head size")

    plan = BatchPlan((1,), (1,), head_size=16)
    setting = setting_of(Support(head_sizes=[64]))
    for run in (
        lambda: try_law(law_of(body, (plan,)), setting, 0, 5),
        lambda: run_law(law_of(body, (plan,)), setting, plan),
    ):
        seen.clear()
        run()
        assert seen == [(16, False), (64, True)]
    seen.clear()
    try_case(law_of(body), setting, repr(plan), is_exact=True)
    assert seen == [(16, False)]


def test_calls_inside_do_not_count_if_those_outside_are_of_interest() -> None:
    setting = setting_of(Support(head_sizes=[64]), goes_outside=True)
    result = try_law(law_of(failing()), setting, 0, 5)
    assert (result.status, result.reason) == (Status.OUTSIDE, trial.IS_INSIDE)
    result = try_law(law_of(failing(1, 2, 3, 4, 5)), setting, 0, 5)
    assert (result.status, result.reason) == (Status.OUTSIDE, trial.IS_INSIDE)


def test_no_case_begins_after_the_time_except_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = outcome(failing(), seconds=0.0)
    assert (result.status, result.cases) == (Status.UNFINISHED, 1)
    assert outcome(failing(1), seconds=0.0).status == Status.BROKEN


def test_a_failed_allocation_ends_the_law() -> None:
    result = outcome(failing(4, error=lambda: MemoryError("full")))
    assert (result.status, result.case, result.cases) == (Status.OUT_OF_MEMORY, "4", 4)
    assert result.message == "MemoryError: full"


def test_what_was_replaced_by_a_guarded_candidate_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find() -> None:
        raise found_interference("it replaced torch.equal", "torch as it was")

    monkeypatch.setattr(trial.GUARD, "expect_unchanged", find)
    law = law_of(failing())
    assert try_law(law, setting_of(), 0, 5).status == Status.HELD
    result = try_law(law, setting_of(is_guarded=True), 0, 5)
    assert result.status == Status.BROKEN and "torch.equal" in result.summary


def test_an_error_with_which_a_guarded_candidate_ends_a_case_breaks_the_law() -> None:
    law = law_of(failing(2, error=lambda: OutsideSupport("blocks")))
    assert try_law(law, setting_of(), 0, 5).status == Status.HELD
    result = try_law(law, setting_of(is_guarded=True), 0, 5)
    assert (result.status, result.case) == (Status.BROKEN, "2")
    assert "it raised OutsideSupport" in result.found


def test_a_failure_that_hypothesis_forgets_breaks_the_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetting(once: Any, *given: Any) -> Any:
        def drawn() -> None:
            with suppress(Exception):
                once(2)

        return drawn

    monkeypatch.setattr(trial, "_drawn", forgetting)
    law = law_of(failing(2), st.integers())
    result = try_law(law, setting_of(), 0, 5)
    assert (result.status, result.case) == (Status.BROKEN, "2")


def test_a_drawn_failure_that_does_not_come_back_says_so() -> None:
    seen: list[int] = []

    def body(setting: Setting, case: int) -> None:
        seen.append(case)
        if len(seen) == 5:
            raise wrong()

    result = outcome(body, st.integers(0, 50))
    assert result.status == Status.BROKEN
    assert "did not break the law" in result.message


def test_a_failure_is_told_before_it_is_made_smaller() -> None:
    told: list[Result] = []
    law = law_of(failing(2))
    result = try_law(law, setting_of(), 0, 5, on_failure=told.append)
    assert told[0].case == result.case == "2"
    assert told[0].status == Status.BROKEN and told[0].what == "slots"


def test_an_operation_that_is_missing_or_not_declared_ends_the_law() -> None:
    law = law_of(failing())
    for support, status in (
        (Support(), Status.MISSING),
        (Support(operations=[NEEDED]), Status.MISSING),
        (Support(operations=["paged_attention"]), Status.OUTSIDE),
    ):
        found = result_without_cases(law, Candidate("own", {}, support))
        assert found is not None and found.status == status and NEEDED in found.reason
    assert result_without_cases(law, setting_of().candidate) is None
    claiming = Law("a law", "area", (NEEDED,), (1,), law.body, "rejects contents")
    own = setting_of(Support(rejects=["shapes"])).candidate
    found = result_without_cases(claiming, own)
    assert found is not None and found.status == Status.OUTSIDE


def test_a_law_is_found_by_its_sentence() -> None:
    assert find_law(ALL_LAWS[-1].name) is ALL_LAWS[-1]
    with pytest.raises(ValueError, match="expected the sentence of a law"):
        find_law("no law")


# smaller inputs


def plans(*lens: int) -> BatchPlan:
    return BatchPlan(lens, lens)


def plan_of(result: Result) -> BatchPlan:
    """Return the plan that a result shows."""
    plan: BatchPlan = make_case(law_of(failing()), result.case)
    return plan


def smallest(body: Body, plan: BatchPlan, support: Support | None = None) -> Result:
    return try_case(law_of(body), setting_of(support), repr(plan))


def failing_if(
    *rules: tuple[Callable[[BatchPlan], bool], Callable[[], Exception]],
) -> Body:
    def body(setting: Setting, case: BatchPlan) -> None:
        for rule, error in rules:
            if rule(case):
                raise error()

    return body


def test_a_batch_is_made_smaller_while_it_fails_alike() -> None:
    body = failing_if((lambda plan: sum(plan.query_lens) > 4, wrong))
    result = smallest(body, plans(7, 3, 9))
    assert plan_of(result).query_lens == plan_of(result).kv_lens == (5,)


def test_a_smaller_case_that_breaks_the_law_for_the_reference_too_is_not_the_reported_one() -> (
    None
):
    """A history without requests was reported, on which the law itself was wrong."""

    def body(setting: Setting, case: Any) -> None:
        (size, length), is_own = case, setting.candidate.name == "own"
        if size < 3 or (is_own and length > 4):
            raise wrong()

    result = outcome(body, cases=[(40, 90)])
    assert result.case == "(3, 5)"


def test_a_smaller_batch_that_fails_otherwise_is_not_the_reported_one() -> None:
    """A batch that broke the law in another way, or raised another error, was reported."""

    def is_long(plan: BatchPlan) -> bool:
        return sum(plan.query_lens) > 4

    def is_short(plan: BatchPlan) -> bool:
        return len(plan.query_lens) == 1

    for first, other in (
        (wrong, lambda: wrong("lse")),
        (lambda: ValueError("rows"), lambda: ValueError("heads")),
        (wrong, lambda: ValueError("rows")),
    ):
        body = failing_if((is_short, other), (is_long, first))
        result = smallest(body, plans(7, 3, 9))
        assert len(plan_of(result).query_lens) == 2, result.case


def test_numbers_of_an_error_may_change_while_a_batch_is_made_smaller() -> None:
    def body(setting: Setting, case: BatchPlan) -> None:
        if sum(case.query_lens) > 4:
            raise ValueError(f"{sum(case.query_lens)} tokens")

    result = smallest(body, plans(7, 3, 9))
    assert plan_of(result).query_lens == (5,)
    assert result.message == "ValueError: 5 tokens"


def test_a_smaller_batch_that_ends_the_process_is_not_reported() -> None:
    body = failing_if(
        (lambda plan: len(plan.query_lens) == 1, lambda: MemoryError("full")),
        (lambda plan: sum(plan.query_lens) > 4, wrong),
    )
    result = smallest(body, plans(7, 3, 9))
    assert result.status == Status.BROKEN and result.case == repr(plans(7, 3, 9))


def test_an_exact_case_is_not_made_smaller() -> None:
    body = failing_if((lambda plan: True, wrong))
    law, setting = law_of(body), setting_of()
    result = try_case(law, setting, repr(plans(3, 4)), is_exact=True)
    assert result.case == repr(plans(3, 4))
    result = try_case(law, setting, repr(plans(3, 4)), seconds=0.0)
    assert result.case == repr(plans(3, 4))


def test_the_smallest_batch_is_inside_of_the_support() -> None:
    body = failing_if((lambda plan: sum(plan.query_lens) > 0, wrong))
    support = Support(head_sizes=[64])
    result = smallest(body, plans(3), support)
    assert plan_of(result).head_size == 64


# inputs that are tried again


def once_failing(errors: Sequence[Exception | None]) -> Body:
    """Return a body that raises one error after another, and then the last one."""
    left = list(errors)

    def body(setting: Setting, case: Any) -> None:
        error = left.pop(0) if len(left) > 1 else left[0]
        if error is not None:
            raise error

    return body


def test_an_input_that_fails_alike_again_is_reported_without_words() -> None:
    result = outcome(once_failing([wrong("slots", 1, 2), wrong("slots", 5, 7)]))
    assert result.status == Status.BROKEN and "again" not in result.details


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (None, "tried again in its process, this input does not fail"),
        (OutsideSupport("dtype"), "this input does not fail"),
        (wrong("lse"), "this input fails otherwise: broken, lse, as a whole"),
        (ValueError("rows"), "fails otherwise: broken, ValueError: rows"),
        (MemoryError("full"), "fails otherwise: out of memory, MemoryError: full"),
    ],
)
def test_an_input_that_does_not_fail_alike_again_says_so(
    second: Exception | None, words: str
) -> None:
    """A kernel that depends on earlier calls was reported with an input that holds."""
    result = outcome(once_failing([wrong(), second]))
    assert result.status == Status.BROKEN and result.what == "slots"
    assert words in result.details["again"] and words in result.summary


def over_ten(setting: Setting, case: int) -> None:
    if case > 10:
        raise wrong(found=case)


def test_drawn_cases_become_smaller_only_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def body(setting: Setting, case: int) -> None:
        seen.append(case)
        over_ten(setting, case)

    law = law_of(body, st.integers(0, 10**6))
    result = try_law(law, setting_of(), 0, 20)
    assert result.case == "11"
    first = next(index for index, case in enumerate(seen) if case > 10)
    assert result.cases == first + 1 < len(seen)
    monkeypatch.setattr(trial, "SECONDS_TO_SHRINK", -1.0)
    failing_case = seen[first]
    seen.clear()
    result = try_law(law, setting_of(), 0, 20)
    assert result.case == str(failing_case)
    assert {case for case in seen if case > 10} == {failing_case}


def test_a_gpu_with_a_number_becomes_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    for device in ("cpu", "cuda", "cuda:1"):
        assert make_setting(REFERENCE, device).device.type == device.partition(":")[0]
    assert [device_chosen.index for device_chosen in chosen] == [1]

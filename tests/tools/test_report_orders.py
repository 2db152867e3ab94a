"""Reports: what counts as a failure, which failures are alike, and which come first."""

from collections.abc import Sequence
from typing import Any

import pytest
from pagetwin.conformance.api.check import report_so_far
from pagetwin.conformance.base.results import (
    AROUND,
    SEVERITIES,
    Result,
    Status,
    severity_of,
    size_of_input,
    unfinished,
)
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.limits import ENDINGS, Endings, TimeLimits


def result(status: Status = Status.BROKEN, law: str = "a law", **given: Any) -> Result:
    return Result(law, "area", status, **given)


def wrong(law: str = "a law", **given: Any) -> Result:
    """Return a result that differs from the right one."""
    values = {
        "case": "1",
        "what": "output",
        "where": "at token 0",
        "found": "1",
        "right": "2",
    }
    return result(Status.BROKEN, law, **values | given)


def report(*results: Result, **given: Any) -> Report:
    return Report("own", given.pop("device", "cpu"), results, **given)


OK = {Status.HELD, Status.OUTSIDE, Status.KNOWN, Status.UNFINISHED}


@pytest.mark.parametrize("status", Status)
def test_what_held_is_undeclared_known_or_not_finished_is_not_a_failure(
    status: Status,
) -> None:
    assert result(status).ok is report(result(status)).ok is (status in OK)


def test_a_report_is_right_if_it_has_laws_and_none_failed() -> None:
    assert not report().ok
    assert report(result(Status.HELD)).ok
    assert not report(result(Status.HELD), wrong()).ok


def test_cases_outside_count_only_if_their_rejection_is_promised() -> None:
    outside = (wrong("outside", cases=2),)
    assert report(result(Status.HELD), outside=outside).ok
    promised = report(result(Status.HELD), outside=outside, is_outside_promised=True)
    assert not promised.ok and len(promised.symptoms()) == 1


def test_outcomes_outside_are_those_of_laws_with_a_case_there() -> None:
    outside = (
        result(Status.HELD, "right", cases=3, skipped=1),
        result(Status.OUTSIDE, "none", cases=3, skipped=3),
        wrong("wrong", cases=1, skipped=1),
        result(Status.HANGS, "hangs", cases=1),
    )
    found = report(outside=outside).outcomes_outside()
    assert [how for how, _ in found] == ["right", "wrong", "hangs"]


SEVERITY = [
    (result(Status.CRASHED, message="code -11"), "ends the process"),
    (result(Status.HANGS), "ends the process"),
    (result(Status.OUT_OF_MEMORY), "ends the process"),
    (wrong(what="memory around key_cache"), "writes outside of its output"),
    (wrong(what="memory of query, which is only read"), "writes outside of its output"),
    (wrong(what="what lies around the output"), "writes outside of its output"),
    (wrong(cause=f"contains the poison of {AROUND}"), "reads memory that it must not read"),
    (wrong(), "wrong result"),
    (wrong(cause="the output of token 0 is not written everywhere"), "wrong result"),
    (wrong(cause="the output of token 0 is NaN even if the caches hold no NaN"), "wrong result"),
    (wrong(where="at token 0, 101 times the row's budget"), "wrong result"),
    (wrong(where="at [0], 1.5e+03 times its budget"), "wrong result"),
    (wrong(where="at token 0, 99 times the row's budget"), "result above its error budget"),
    (result(Status.KNOWN, where="at [0], 2 times its budget"), "result above its error budget"),
    (wrong(message="ValueError: rows"), "error for declared input"),
    (wrong(right="an error"), "invalid input is accepted"),
    (result(Status.MISSING), "operation is missing"),
    (result(Status.UNEXPECTED), "known failure that holds"),
    (result(Status.NOT_TRIED), "not tried"),
]  # fmt: skip


@pytest.mark.parametrize(("failure", "severity"), SEVERITY)
def test_a_failure_has_its_severity(failure: Result, severity: str) -> None:
    assert SEVERITIES[severity_of(failure)] == severity
    assert failure.raises is (severity == "error for declared input")


def test_symptoms_come_in_the_order_of_their_severity() -> None:
    failures = [failure for failure, _ in SEVERITY if not failure.ok]
    found = [symptom.severity for symptom in report(*reversed(failures)).symptoms()]
    assert found == sorted(found) and len(set(found)) == len(SEVERITIES)


def test_of_equal_severities_the_known_cause_comes_first_and_then_most_laws() -> None:
    several = [wrong(name, what="lse") for name in "ab"]
    caused = wrong("c", cause="is not written everywhere")
    order = report(wrong("d", case=""), *several, caused).symptoms()
    assert [symptom.first.law for symptom in order] == ["c", "a", "d"]


def test_numbers_do_not_tell_failures_apart_and_other_words_do() -> None:
    alike = [wrong("a", found="3"), wrong("b", where="at [7]", right="9.5")]
    assert len(report(*alike).symptoms()) == 1
    messages = [
        wrong(name, message=f"ValueError: {n} rows") for n, name in enumerate("ab")
    ]
    assert len(report(*messages).symptoms()) == 1
    others = [
        wrong("a"),
        wrong("b", found="nan"),
        wrong("c", found="0.0"),
        wrong("d", found="inf"),
        wrong("e", what="lse"),
        wrong("f", where="at token 0, 3 times the row's budget"),
        wrong("g", message="ValueError: rows"),
        wrong("h", message="ValueError: heads"),
    ]
    assert len(report(*others).symptoms()) == len(others)
    assert wrong(where="at [0], 3 times its budget").symptom[1].endswith("error budget")


def test_a_symptom_is_shown_by_its_smallest_batch() -> None:
    inputs = [
        "",
        "7",
        "a longer case",
        "BatchPlan((1,), (9,))",
        "BatchPlan((1,), (10,))",
    ]
    results = [wrong(f"law {n}", case=case) for n, case in enumerate(inputs)]
    (symptom,) = report(*results).symptoms()
    order = [wrong_result.case for wrong_result in symptom.results]
    assert order == [*inputs[3:], "7", "a longer case", ""]
    assert [
        wrong_result.case for wrong_result in sorted(results, key=size_of_input)
    ] == order


def test_three_laws_to_look_at_are_one_per_symptom_first() -> None:
    results = [
        *(wrong(f"law {n}", case="1" * (n + 2)) for n in range(4)),
        wrong("other", what="lse"),
    ]
    found = [found_law.law for found_law in report(*results).laws_to_look_at_first()]
    assert found == ["law 0", "other", "law 1"]


def test_a_reproducer_is_for_the_device_and_the_side_of_the_support() -> None:
    own, outside = wrong("inside"), wrong("outside")
    both = report(own, outside=(outside,))
    assert "TRITON_INTERPRET" in both.reproducer(own)
    assert "outside=True" in both.reproducer(outside)
    assert "outside=True" not in both.reproducer(own)
    assert "TRITON_INTERPRET" not in report(own, device="cuda").reproducer(own)


def test_a_law_that_is_not_finished_says_what_held() -> None:
    tried = result(Status.HELD, cases=9, skipped=4, seconds=2.5)
    found = unfinished(tried)
    assert found.status == Status.UNFINISHED and not found.case
    assert found.reason == "5 cases held in 2.5 seconds"
    found = unfinished(tried, "BatchPlan()")
    assert found.case == "BatchPlan()" and found.reason.endswith("had not ended")


def test_junit_has_no_control_characters_and_one_case_per_law() -> None:
    text = report(wrong(message="a\x07b\ud800"), result(Status.HELD)).to_junit()
    assert (
        "a?b" in text and text.count("<testcase") == 2 and text.count("<failure") == 1
    )


def test_the_details_of_a_failure_have_its_input_and_both_values() -> None:
    own = wrong(cause="slot 3", reason="known", message="KeyError: lens")
    page = report(own).describe(own)
    for words in (
        "known",
        "smallest input: `1`",
        "cause: slot 3",
        "worst element: output",
    ):
        assert words in page
    assert "found 1, right is 2" in page and "error: KeyError: lens" in page
    crash = result(Status.CRASHED, case="1")
    assert "input: `1`" in report(crash).describe(crash)
    assert "smallest" not in report(crash).describe(crash)


def test_why_laws_are_undeclared_is_counted() -> None:
    results = [
        result(Status.OUTSIDE, reason="needs a, which is not declared"),
        result(Status.OUTSIDE, reason="needs b, which is not declared"),
        result(Status.OUTSIDE, reason="dtype int8"),
        result(Status.HELD, reason="none"),
    ]
    own = report(*results)
    assert own.why_undeclared() == {
        "operations that are not declared": 2,
        "dtype int8": 1,
    }
    assert not own.unfinished
    assert [left_law.law for left_law in report(result(Status.UNFINISHED)).unfinished]


# laws that end their process, and limits of time


def law(name: str, *needs: str) -> Law:
    return Law(name, "area", needs, (1,), lambda setting, case: None)


def endings(*noted: tuple[Sequence[str], Status, bool]) -> Endings:
    """Return endings of laws: what they need, how they ended, and whether at once."""
    found = Endings()
    for needs, status, at_once in noted:
        own = result(
            status, cases=1, skipped=int(status == Status.UNFINISHED), case="1"
        )
        found.note(law("noted", *needs), own, at_once)
    return found


CRASH = (("attend",), Status.CRASHED, True)
SLOW = (("attend",), Status.UNFINISHED, False)


def test_after_three_laws_that_end_the_process_at_once_the_others_are_not_tried() -> (
    None
):
    assert endings(*[CRASH] * (ENDINGS - 1)).untried(law("next", "attend")) is None
    found = endings(*[CRASH] * ENDINGS).untried(law("next", "attend", "write"))
    assert found is not None and found.status == Status.NOT_TRIED
    assert endings(*[CRASH] * ENDINGS).untried(law("next", "write")) is None


def test_laws_of_an_operation_that_was_judged_are_tried() -> None:
    held = (("attend",), Status.HELD, False)
    assert endings(held, *[CRASH] * 5).untried(law("next", "attend")) is None
    later = (("attend",), Status.CRASHED, False)
    assert endings(*[later] * 5).untried(law("next", "attend")) is None


def test_cases_that_tested_nothing_are_not_judged() -> None:
    found = endings(*[CRASH] * ENDINGS)
    skipped = result(Status.OUTSIDE, cases=2, skipped=2)
    found.note(law("noted", "attend"), skipped, False)
    assert found.untried(law("next", "attend")) is not None


def test_three_laws_that_end_no_case_end_the_others() -> None:
    found = endings(*[SLOW] * ENDINGS).untried(law("next", "attend"))
    assert found is not None and found.status == Status.UNFINISHED
    assert found.reason == "3 laws of attend did not end their first case"


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_limits_are_positive(limit: float) -> None:
    TimeLimits(1, 1, None)
    for given in ((limit, 1, None), (1, limit, None), (1, 1, limit)):
        with pytest.raises(ValueError, match="expected more than 0"):
            TimeLimits(*given)


def test_minutes_limit_all_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    limits = TimeLimits(90, 10, 2)
    assert limits.of_a_law == 90
    limits.begin()
    now[0] += 60
    assert (limits.of_a_law, limits.left) == (60, 60)
    now[0] += 50
    assert (limits.of_a_law, limits.left) == (10, 30)
    now[0] += 50
    assert limits.of_a_law == 0


def test_a_report_so_far_has_the_other_laws_as_not_finished() -> None:
    laws = [law("a"), law("b")]
    found = report_so_far(
        "own", "cpu", laws, {"a": result(Status.HELD, "a")}, {"seed": 1}
    )
    assert [shown.status for shown in found.results] == [Status.HELD, Status.UNFINISHED]
    assert not found.symptoms() and found.settings == {"seed": 1}

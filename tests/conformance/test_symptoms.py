"""The symptoms of a report: how severe they are, and which one is read first."""

from functools import wraps
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.results import SEVERITIES, Result, Status, severity_of
from pagetwin.conformance.base.support import Support
from pagetwin.conformance.candidates.candidate import Candidate
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running import poison
from pagetwin.conformance.running.poison import explain_nan, explain_nans
from pagetwin.conformance.running.trial import find_law, make_setting
from pagetwin.contract.operations import load_implementation

ATTENDS = "every new token attends to its sequence up to itself"
POISON = "the output of token 0 contains the poison of slot 1 of block 2 in key_cache"


def broken(law: str = "a law", case: str = "1", **failure: str) -> Result:
    return Result(law, "area", Status.BROKEN, case=case, **failure)


@pytest.mark.parametrize(
    ("failure", "severity"),
    [
        ({"what": "memory around key cache"}, "writes outside of its output"),
        ({"what": "what lies around the output"}, "writes outside of its output"),
        ({"what": "query, which is only read"}, "writes outside of its output"),
        ({"message": "ValueError: not a power of 2"}, "error for declared input"),
        ({"cause": POISON, "found": "nan"}, "reads memory that it must not read"),
        ({"cause": "the output of token 0 is not written everywhere"}, "wrong result"),
        ({"what": "output", "found": "nan"}, "wrong result"),
    ],
)  # fmt: skip
def test_the_severity_is_that_of_the_failure_and_not_of_the_law(
    failure: dict[str, str], severity: str
) -> None:
    """An error of the interpreter was reported as a write outside of the output."""
    for law in ("attention changes nothing that it reads", ATTENDS):
        assert SEVERITIES[severity_of(broken(law, **failure))] == severity


def test_of_equally_severe_symptoms_the_explained_one_comes_first() -> None:
    """A read past seq_len was the fifth of ten symptoms, after NaN of which nothing was known."""
    unknown = [broken(name, what="output", found="nan", right="1") for name in "abc"]
    left = broken("d", cause="the output of token 3 is not written everywhere")
    report = Report("mine", "cpu", (*unknown, left))
    assert [each.first.law for each in report.symptoms()] == ["d", "a"]
    report = Report("mine", "cpu", (*unknown, left, broken("e", cause=POISON)))
    assert [each.law for each in report.laws_to_look_at_first()] == ["e", "d", "a"]


def test_a_title_has_the_numbers_of_an_error_that_all_its_laws_share() -> None:
    results = [broken(name, message="must be a power of 2") for name in "ab"]
    (symptom,) = Report("mine", "cpu", tuple(results)).symptoms()
    assert symptom.title == "2 laws broken: must be a power of 2"


def test_nan_of_the_kernel_itself_is_not_called_a_read() -> None:
    """A 0 / 0 of the kernel was reported as a read of memory that it must not read."""
    right = load_implementation("reference").paged_attention

    @wraps(right)
    def divides_by_zero(*args: Any, **given: Any) -> Any:
        found = right(*args, **given)
        return found.mul_(0).div_(0) if found.numel() else found

    candidate = Candidate("mine", {"paged_attention": divides_by_zero}, Support())
    setting = make_setting(candidate, "cpu")
    case = "BatchPlan((1, 1), (32, 21), block_size=16)"
    cause = explain_nan(find_law(ATTENDS), setting, case)
    assert cause == "the output of token 0 is NaN even if the caches hold no NaN"
    assert SEVERITIES[severity_of(broken(cause=cause, found="nan"))] == "wrong result"
    (symptom,) = Report("mine", "cpu", (broken(cause=cause, found="nan"),)).symptoms()
    assert symptom.title.endswith("is NaN even if the caches hold no NaN")


def test_nan_that_strides_skip_is_found() -> None:
    """A kernel that ignores the stride of elements reads NaN that no slot holds."""
    right = load_implementation("reference").paged_attention

    @wraps(right)
    def ignores_strides(*, value_cache: Any, **given: Any) -> Any:
        shape = value_cache.shape
        packed = torch.empty(shape, device="meta").stride()
        return right(value_cache=value_cache.as_strided(shape, packed), **given)

    candidate = Candidate("mine", {"paged_attention": ignores_strides}, Support())
    setting = make_setting(candidate, "cpu")
    case = "BatchPlan((1,), (1,), value_layout='every other element')"
    cause = explain_nan(find_law(ATTENDS), setting, case)
    assert cause == (
        "the output of token 0 contains the poison of memory between or around the elements of"
        " the caches"
    )
    severity = SEVERITIES[severity_of(broken(cause=cause, found="nan"))]
    assert severity == "reads memory that it must not read"


def test_the_causes_of_small_inputs_are_searched_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time of the search was over before it came to the law with the smallest input."""
    searched: list[str] = []

    def search(implementation: str, device: str, failures: Any, seconds: float) -> Any:
        searched.extend(each.law for each in failures)
        return {}

    monkeypatch.setattr(poison, "_search", search)
    results = [
        broken("long", "(1, " * 50, found="nan"),
        broken("number", "1", found="nan"),
        broken("batch", "BatchPlan((1,), (1,))", found="nan"),
        broken("not nan", "1", found="2"),
    ]
    assert explain_nans("mine", "cpu", results) == results
    assert searched == ["batch", "number", "long"]

"""Settings of candidates whose batches are screened, and attention that raises errors."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.cases.signatures import SMALL, draw_batch, draw_signature
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running import screening
from pagetwin.conformance.running.trial import find_law, make_setting

LAW = find_law("paged attention is right for every batch of a signature")
RIGHT = load_candidate("reference").operations["paged_attention"]
FIRST = draw_batch(draw_signature(0, SMALL), 0)


def setting_of(
    attention: Callable[..., Any] = RIGHT, support: Support | None = None
) -> Setting:
    """Return the setting of a candidate with one operation, on the CPU."""
    support = Support() if support is None else support
    return make_setting(
        Candidate("own", {"paged_attention": attention}, support), "cpu"
    )


def failing(errors: Iterable[Exception | None]) -> Callable[..., Any]:
    """Return attention whose calls raise these errors, or are right where there is none."""
    left = iter(errors)

    @wraps(RIGHT)
    def attend(*args: Any, **given: Any) -> Any:
        error = next(left)
        if error is not None:
            raise error
        return RIGHT(*args, **given)

    return attend


def break_alone(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Make the law alone break on each batch, and return how it was asked."""
    asked: list[dict[str, Any]] = []

    def try_case(law: Law, setting: Setting, case: str, **given: Any) -> Result:
        asked.append({"case": case, **given})
        found = Result(law.name, law.area, Status.BROKEN, case=case, details={"own": 1})
        given["on_failure"](found)
        return found

    monkeypatch.setattr(screening, "try_case", try_case)
    return asked

"""A reported case that is run again in this process: where it is called, and what it says."""

from types import SimpleNamespace
from typing import Any

import pytest
from pagetwin.conformance.api import check as runner
from pagetwin.conformance.api.check import reproduce
from pagetwin.conformance.checks.expect import Disagreement
from wrong_adapters import WRONG


@pytest.mark.parametrize("outside", [True, False])
def test_a_case_is_reproduced_outside_if_that_is_requested(
    monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    seen: list[Any] = []
    own = SimpleNamespace(outside=lambda: "outside")
    monkeypatch.setattr(runner, "load_candidate", lambda name: own)
    monkeypatch.setattr(runner, "make_setting", lambda candidate, device: candidate)
    monkeypatch.setattr(runner, "make_case", lambda law, case: case)
    monkeypatch.setattr(
        runner, "run_law", lambda law, setting, case: seen.append(setting)
    )
    reproduce("own", WRONG.name, "x", "cpu", outside)
    assert seen == ["outside" if outside else own]


@pytest.mark.parametrize(
    ("found", "where"), [("nan", "at [0]: the cause"), ("1.0", "at [0]")]
)
def test_the_cause_of_nan_is_said_after_its_place(
    monkeypatch: pytest.MonkeyPatch, found: str, where: str
) -> None:
    def break_law(*given: Any) -> None:
        raise Disagreement("output", "at [0]", found, "0")

    monkeypatch.setattr(runner, "load_candidate", lambda name: None)
    monkeypatch.setattr(runner, "make_setting", lambda candidate, device: None)
    monkeypatch.setattr(runner, "make_case", lambda law, case: case)
    monkeypatch.setattr(runner, "run_law", break_law)
    monkeypatch.setattr(runner, "explain_nan", lambda *given: "the cause")
    with pytest.raises(Disagreement) as raised:
        reproduce("own", WRONG.name, "x", "cpu")
    assert raised.value.where == where

"""Wrong calls: what a call has changed before it raised is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.support import Support
from pagetwin.conformance.candidates.calls.wrong_calls import WrongCalls
from pagetwin.conformance.candidates.candidate import Candidate
from pagetwin.conformance.checks.expect import Disagreement

CPU = torch.device("cpu")
KINDS = ("types", "forms", "shapes", "contents")


class Counter:
    """Counts; a count is at least 1."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> None:
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"number = {number}: expected at least 1")
        self.count += number


class EarlyCounter(Counter):
    """Counts calls before they are validated."""

    def add(self, number: int) -> None:
        self._calls = getattr(self, "_calls", 0) + 1
        super().add(number)


class LateCounter(Counter):
    """Rejects nothing."""

    def add(self, number: int) -> None:
        self.count += 1


def fill(out: torch.Tensor, number: int) -> None:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"number = {number}: expected at least 1")
    out.fill_(number)


def fill_around(out: torch.Tensor, number: int) -> None:
    """Change the memory before the view, then validate."""
    torch.empty(0).set_(out.untyped_storage())[0] += 1
    fill(out, number)


def fill_at_once(out: torch.Tensor, number: int) -> None:
    """Change a tensor of another shape or dtype than the valid one, too."""
    out.view(-1)[:1] = 5
    fill(out, number)


def fail(out: torch.Tensor, number: int) -> None:
    raise RuntimeError("out of order")


def tried(contract: Any, found: Any, use: Callable[[Any], None]) -> WrongCalls:
    """Use a contract, and then a candidate with the wrong calls that must raise."""
    noted = WrongCalls(Candidate("", {"made": contract}, Support()), CPU, KINDS)
    use(noted.candidate.operations["made"])
    candidate = Candidate("", {"made": found}, Support())
    calls = WrongCalls(candidate, CPU, KINDS, noted.promised)
    use(calls.candidate.operations["made"])
    return calls


def count(made: Any) -> None:
    counter = made()
    for number in (1, 2, 3):
        counter.add(number)


def fill_a_view(made: Any) -> None:
    made(torch.zeros(6)[2:4], 3)


def test_a_candidate_that_validates_first_is_right() -> None:
    assert ("made.add", "number") in tried(Counter, Counter, count).tried
    assert ("made", "number") in tried(fill, fill, fill_a_view).tried


@pytest.mark.parametrize(
    ("contract", "found", "use", "words"),
    [
        (Counter, EarlyCounter, count, "state after made.add"),
        (Counter, LateCounter, count, "made.add.*returned"),
        (fill, fill_around, fill_a_view, "state after made"),
        (fill, fill_at_once, fill_a_view, "state after made"),
        (fill, fail, fill_a_view, "made.*RuntimeError"),
    ],
)
def test_a_change_before_an_error_is_found(
    contract: Any, found: Any, use: Callable[[Any], None], words: str
) -> None:
    with pytest.raises(Disagreement, match=words):
        tried(contract, found, use)

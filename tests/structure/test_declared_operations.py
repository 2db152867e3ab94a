"""A law calls no operation besides those that it needs, and no operation that is not declared.

One law called paged_attention where its batch had no requests, though it needs encoder_attention
alone. It broke on implementations that have no other operation.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance import Status, check_implementation
from pagetwin.conformance.candidates.candidate import (
    Candidate,
    OutsideSupport,
    Support,
    load_candidate,
)
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.trial import make_setting

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)

RIGHT = load_candidate("reference")
EXAMPLES = 8
TWO_OPERATIONS = """
from pagetwin.conformance import Support
from pagetwin.reference import encoder_attention


def paged_attention(*args, **given):
    raise RuntimeError("called, though it is not declared")


SUPPORT = Support(operations=["encoder_attention"], rejects=[])
"""


class UndeclaredError(BaseException):
    """An operation was used that was not declared. No law handles this error."""


class OnlyDeclared(Candidate):
    """The reference with some of its operations. The use of any other one raises."""

    def __getattr__(self, operation: str) -> Any:
        if operation in RIGHT.operations and operation not in self.operations:
            raise UndeclaredError(operation)
        return super().__getattr__(operation)


def only(*operations: str) -> Candidate:
    """Return the reference with these operations alone."""
    has = {name: RIGHT.operations[name] for name in operations}
    return OnlyDeclared("only", has, Support())


def without_requests(case: Any) -> Any:
    """Return a case whose batches have no requests; the same object if it has no batch."""
    if isinstance(case, BatchPlan):
        return replace(case, query_lens=(), kv_lens=())
    if type(case) is tuple:
        parts = tuple(without_requests(argument) for argument in case)
        is_same = all(one is other for one, other in zip(parts, case, strict=True))
        return case if is_same else parts
    if is_dataclass(case) and not isinstance(case, type):
        given = {field.name: getattr(case, field.name) for field in fields(case)}
        emptied = {name: without_requests(argument) for name, argument in given.items()}
        changed = {
            name: argument
            for name, argument in emptied.items()
            if argument is not given[name]
        }
        return replace(case, **changed) if changed else case
    return case


def cases_of(law: Law) -> Iterator[Any]:
    """Yield some cases of a law, and each once more without requests."""
    cases: list[Any] = []

    def keep(case: Any) -> None:
        cases.append(case)

    if isinstance(law.cases, SearchStrategy):
        settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(given(law.cases)(keep))()
    else:
        cases += law.cases[:: max(1, len(law.cases) // EXAMPLES)]
    for case in cases:
        yield case
        if (empty := without_requests(case)) is not case:
            yield empty


@pytest.mark.sample(6)
@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.name)
def test_a_law_calls_only_the_operations_that_it_needs(law: Law) -> None:
    """A law that needs no operation is about any: it gets each operation alone."""
    sets = [law.needs] if law.needs else [(name,) for name in RIGHT.operations]
    cases = [*cases_of(law)]
    for needs in sets:
        setting = make_setting(only(*needs), "cpu")
        for case in cases:
            with suppress(Exception):  # a case without requests may be invalid
                law.body(setting, case)


@pytest.fixture
def two_operations(tmp_path: Path) -> str:
    """Return the file of an adapter with two operations, of which it declares one."""
    file = tmp_path / "two_operations.py"
    file.write_text(TWO_OPERATIONS, encoding="utf-8")
    return str(file)


@pytest.mark.extended
def test_an_operation_that_is_not_declared_is_never_called(two_operations: str) -> None:
    report = check_implementation(
        two_operations, only="attention", examples=3, isolated=False
    )
    assert report.ok, report.counts()
    held = {result.law for result in report.results if result.status == Status.HELD}
    assert "every token of an encoder attends to its whole input" in held
    needs = {law.name: law.needs for law in ALL_LAWS}
    assert all(set(needs[name]) <= {"encoder_attention"} for name in held)


def test_a_case_that_uses_an_undeclared_operation_is_outside(
    two_operations: str,
) -> None:
    candidate = load_candidate(two_operations)
    with pytest.raises(OutsideSupport, match="needs paged_attention, which is not"):
        _ = candidate.paged_attention
    with pytest.raises(AttributeError, match="has no swap"):
        _ = candidate.swap

"""How a case is run on a twin, and compared with what vLLM returned and what the rules predict."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pagetwin.conformance.checks.canaries import checked_values
from pagetwin.optimized.backends.xformers_split_k import why_no_xformers
from support.twins import TWINS

from .cases import ADAPTERS, ON_DEVICE, Case, attempt, differences, is_error, move
from .deviations import Rule, broken_predictions, rules_that_hold


def run(case: Case, name: str, version: str) -> dict[str, Any]:
    """Return what a twin makes of a case; {"raises": name} if it raises a named error.

    A call that raises leaves its arguments as they were.
    """
    # each run gets its own tensors, since a twin may modify them
    inputs = copied(case.inputs)
    is_moved = case.file in ON_DEVICE and torch.cuda.is_available()
    with torch.device("cuda") if is_moved else nullcontext(), checked_values():
        inputs = move(inputs, torch.device("cuda")) if is_moved else inputs
        run_adapter = ADAPTERS[case.file, version]
        found: dict[str, Any] = attempt(run_adapter, TWINS[name].raw, inputs)
    if is_error(found):
        changed = list(differences(inputs, recorded(case.inputs), None))
        assert not changed, f"{case.file}/{case.name} ({name}): {changed}"
    return found


def compare(case: Case, found: dict[str, Any], version: str) -> Iterator[str]:
    """Yield where a twin's result differs from vLLM's."""
    expected = case.other.get(version, case.expected) if version else case.expected
    tolerance = expected.get("tolerance") or case.expected.get("tolerance")
    fields = {name: v for name, v in expected.items() if name != "tolerance"}
    yield from differences(found, fields, tolerance)


def copied(value: Any) -> Any:
    """Return inputs with tensors of their own."""
    if isinstance(value, dict):
        return {name: copied(element) for name, element in value.items()}
    if isinstance(value, list):
        return [copied(element) for element in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def lacks_a_library(found: dict[str, Any]) -> bool:
    """Return whether a case was not run because xFormers is not installed."""
    return found.get("message") in why_no_xformers()


def check(case: Case, name: str, version: str) -> bool:
    """Return whether a twin deviates from a case; fail unless the rules predict where."""
    found = run(case, name, version)
    if lacks_a_library(found):
        pytest.skip(found["message"])
    inputs = copied(case.inputs)
    rules = rules_that_hold(case.file, inputs, name, version)
    parts = list(compare(case, found, version))
    wrong = list(broken_predictions(rules, parts))
    assert not wrong, f"{case.file}/{case.name} ({name}): {wrong}"
    for rule in rules:
        if rule.value is not None and "raises" not in found:
            check_value(case, found, rule)
    return bool(parts)


def check_value(case: Case, found: dict[str, Any], rule: Rule) -> None:
    """Fail unless our field has the value that the rule calls right."""
    assert rule.value is not None
    right = rule.value(copied(case.inputs))
    place: Any = found
    for part in rule.fields[0].split("."):
        place = place.get(part) if isinstance(place, dict) else None
    wrong = list(differences(place, recorded(right), None))
    assert not wrong, f"{case.file}/{case.name}: {rule.name}: {wrong}"


def recorded(value: Any) -> Any:
    """Return a value in the form of the case files."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "data": value.tolist()}
    if isinstance(value, dict):
        return {name: recorded(element) for name, element in value.items()}
    return (
        [recorded(element) for element in value]
        if isinstance(value, tuple | list)
        else value
    )

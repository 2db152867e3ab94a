"""Laws of torch's defaults: results do not depend on the default device or the default dtype.

An engine sets a default device and a default dtype while it builds a model, and leaves them set. An
operation creates its tensors on the device of its inputs and in the dtype that it needs. A tensor
that is created with the defaults is on another device or has another dtype. So a law of every
operation runs once more under other defaults: the meta device, which holds no numbers, and a 16-bit
dtype.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from ...contract.operations import CONCEPTS
from ..harness.candidate import Candidate, OutsideSupport
from ..harness.fitting import fit_case
from ..harness.law import LAWS, Law, Setting, law

DEFAULTS = ("device", "dtype")
FEW = 3
"""Cases of a law that run again. For layers, which may have several backends, there are four times
as many."""
OPERATIONS = [name for concept in CONCEPTS for name in concept.operations]


@dataclass(frozen=True)
class Default:
    """A default, and an operation that must not depend on it.

    Args:
        name: one of DEFAULTS.
        operation: an operation of the candidate. "BACKENDS" means its layers.
    """

    name: str
    operation: str

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Change the default inside the context."""
        if self.name == "device":
            with torch.device("meta"):
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def function_under(default: Default, function: Callable[..., Any]) -> Any:
    """Return a function that runs under another default."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        with default.changed():
            return function(*given, **named)

    return call


def class_under(default: Default, made: type) -> type:
    """Return a subclass whose methods all run under another default."""
    methods: dict[str, Any] = {}
    for name in dir(made):
        found = inspect.getattr_static(made, name)
        is_ours = not hasattr(object, name) or name == "__init__"
        if inspect.isfunction(found) and is_ours:
            methods[name] = function_under(default, found)
    return type(made.__name__, (made,), methods)


def backend_under(default: Default, backend: Any) -> type:
    """Return a backend whose layers and builders run under another default."""
    impl = class_under(default, backend.get_impl_cls())
    builder = class_under(default, backend.get_builder_cls())
    methods = {
        "get_impl_cls": staticmethod(lambda: impl),
        "get_builder_cls": staticmethod(lambda: builder),
    }
    return type(backend.__name__, (backend,), methods)


def candidate_under(default: Default, candidate: Candidate) -> Candidate:
    """Return a candidate whose operations all run under another default."""
    changed: dict[str, Any] = {}
    for name, found in candidate.operations.items():
        if name == "BACKENDS":
            changed[name] = tuple(backend_under(default, each) for each in found)
        elif inspect.isclass(found):
            changed[name] = class_under(default, found)
        else:
            changed[name] = function_under(default, found)
    return candidate.with_operations(**changed)


def law_about(operation: str, candidate: Candidate) -> Law:
    """Return the first law about an operation that needs only what the candidate provides.

    Raises:
        OutsideSupport: no such law exists.
    """
    for each in LAWS:
        is_about = operation in each.needs and each.claim is None
        if is_about and not candidate.missing(each.needs):
            return each
    raise OutsideSupport(f"there is no {operation}")


def few_cases(about: Law, few: int) -> list[Any]:
    """Return some cases of a law, the same ones each time."""
    if not isinstance(about.cases, SearchStrategy):
        return list(about.cases)[:: max(1, len(about.cases) // few)][:few]
    drawn: list[Any] = []

    @settings(
        max_examples=2 * few,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=about.cases)
    def draw(case: Any) -> None:
        drawn.append(case)

    draw()
    # the first ones are the simplest
    return drawn[-few:]


def expect_no_change(setting: Setting, default: Default) -> None:
    about = law_about(default.operation, setting.candidate)
    under = replace(setting, candidate=candidate_under(default, setting.candidate))
    rejected: list[OutsideSupport] = []
    few = 4 * FEW if default.operation == "BACKENDS" else FEW
    cases = few_cases(about, few)
    for case in cases:
        try:
            about.body(under, case)
        except OutsideSupport:
            try:
                fitted = fit_case(case, setting.candidate.support)
                about.body(under.fitting(), fitted)
            except OutsideSupport as error:
                rejected.append(error)
    if len(rejected) == len(cases):
        raise rejected[0]


@law(cases=[Default("device", name) for name in (*OPERATIONS, "BACKENDS")])
def tensors_are_made_on_the_device_of_the_inputs_whatever_the_default_is(
    setting: Setting, default: Default
) -> None:
    expect_no_change(setting, default)


@law(cases=[Default("dtype", name) for name in (*OPERATIONS, "BACKENDS")])
def tensors_have_the_dtype_they_need_whatever_the_default_is(
    setting: Setting, default: Default
) -> None:
    expect_no_change(setting, default)

"""Laws of what a result depends on: the inputs of its call, and nothing else.

An engine and its user set modes: a default device while a model is built, autocast, a precision of
matrix products, inference mode. A law of every operation runs once as usual, and again under all
modes of `candidates/calls/circumstances.py`. It runs a third time with other calls before each
call. Each call gives the same bits each time, at other addresses.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from ...contract.operations import CONCEPTS
from ..candidates.calls.circumstances import MODES
from ..candidates.calls.recorded_calls import Records
from ..candidates.candidate import OutsideSupport
from ..candidates.fitting import fit_case
from ..candidates.setting import Setting
from ..checks.expect import Disagreement
from .law import LAWS, Law, law

LAWS_PER_OPERATION = 1
FEW = 2
"""Cases of a law that run again. For layers, which may have several backends, there are four times
as many."""
HUGE = ("cache_addresses", "crowds", "large_numbers")
"""Areas whose laws take too much memory or time to be recorded."""
OPERATIONS = [name for concept in CONCEPTS for name in concept.operations]


def laws_about(operation: str, setting: Setting) -> list[Law]:
    """Return the laws about an operation that need only what the candidate provides.

    Raises:
        OutsideSupport: The candidate does not have the operation.
        LookupError: It has, but no law.
    """
    if setting.candidate.missing((operation,)):
        raise OutsideSupport(f"there is no {operation}")
    found = [
        other
        for other in LAWS
        if operation in other.needs
        and other.claim is None
        and other.area not in HUGE
        and not setting.candidate.missing(other.needs)
    ]
    if not found:
        raise LookupError(f"no law calls {operation}: expected one at least")
    return found


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


def run(
    setting: Setting,
    about: Law,
    case: Any,
    modes: Sequence[str] = (),
    disturbs: bool = False,
) -> Records:
    """Run one case of a law, fitted to the candidate's support, and return the calls."""
    records = Records(setting.candidate, setting.device, modes, disturbs)
    under = replace(setting, candidate=records.candidate)
    try:
        about.body(under, case)
    except OutsideSupport:
        records.calls.clear()
        about.body(under.fitting(), fit_case(case, setting.candidate.support))
    return records


def expect_inputs_alone(setting: Setting, about: Law, case: Any) -> Records:
    """Raise a Disagreement if calls give other bits under modes, or after other calls.

    Returns:
        The calls.
    """
    # around the whole law, which writes to tensors that operations return. It is first, because
    # a tensor of inference mode that an operation keeps cannot be written outside of it
    with torch.inference_mode():
        disturbed = run(setting, about, case, disturbs=True)
    plain = run(setting, about, case)
    disturbed.expect_equal(plain)
    try:
        run(setting, about, case, list(MODES)).expect_equal(plain)
    except Exception as together:
        for name in MODES:
            try:
                run(setting, about, case, [name]).expect_equal(plain)
            except Exception as error:
                raise Disagreement(
                    f"{about.name}, under {name}", "as a whole", error, "the same bits"
                ) from error
        raise together
    return plain


@law(cases=[*OPERATIONS, "BACKENDS"])
def a_result_depends_on_the_inputs_of_its_call_alone(
    setting: Setting, operation: str
) -> None:
    rejected: list[OutsideSupport] = []
    called: set[str] = set()
    for about in laws_about(operation, setting):
        for case in few_cases(about, 4 * FEW if operation == "BACKENDS" else FEW):
            try:
                calls = expect_inputs_alone(setting, about, case)
            except OutsideSupport as error:
                rejected.append(error)
                continue
            if calls.has(operation):
                called.add(about.name)
        if len(called) == LAWS_PER_OPERATION:
            return
    if rejected and not called:
        raise rejected[0]
    if not called:
        raise LookupError(f"no law calls {operation} with valid inputs: expected one")

"""Laws of calls that raise: nothing has changed, in tensors or in objects.

The valid calls are those of the laws about an operation. Each is made with one wrong argument after
the other first. `candidates/calls/wrong_calls.py` says which wrong calls must raise.
"""

import inspect
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ...contract.argument_kinds import kind_of
from ..candidates.calls.wrong_calls import WrongCalls
from ..candidates.candidate import OutsideSupport
from ..candidates.fitting import fit_case
from ..candidates.setting import Setting
from ..checks.canaries import checked_values
from ..checks.expect import Disagreement
from .inputs_alone import OPERATIONS, few_cases, laws_about
from .law import Law, law

FEW = 2
"""Cases of a law that are tried at most."""
LAWS_PER_OPERATION = 6
"""Laws that are tried at most, until each argument has had a wrong value."""
RECORDS = "CommonAttentionState"
"""Records graphs. While one is recorded, no contents can be read."""
Argument: TypeAlias = tuple[str, str]
"""The names of a function, or of a method with its class, and of its argument."""


def kinds_promised(setting: Setting, operation: str) -> set[str]:
    """Return the kinds of wrong values that the candidate promises to reject."""
    candidate = setting.candidate
    kinds = {"types", "forms"} if candidate.promises_all else set()
    claimed = {
        kind
        for kind in ("shapes", "contents")
        if candidate.why_unclaimed(f"rejects {kind}") is None
    }
    if operation == RECORDS and setting.device.type == "cuda":
        claimed -= {"contents"}
    return kinds | claimed


def expect_nothing_changed(
    setting: Setting, about: Law, case: Any, kinds: set[str]
) -> WrongCalls:
    """Run a case of a law with wrong calls before each call, and return those that were made."""
    candidate = setting.candidate
    contract = candidate.with_operations(
        **{
            name: operation
            for name, operation in setting.truth.operations.items()
            if name in candidate.operations
        }
    )
    # on the host, as an index that is not validated ends a process on a GPU
    host = torch.device("cpu")
    with checked_values() if "contents" in kinds else nullcontext():
        noted = WrongCalls(contract.on(host), host, kinds)
        # it may count the calls of functions that it gives, of which the copies make more
        with suppress(Disagreement):
            run(replace(setting, device=host), about, case, noted)
        tried = WrongCalls(candidate, setting.device, kinds, noted.promised)
        run(setting, about, case, tried)
    return tried


def run(setting: Setting, about: Law, case: Any, calls: WrongCalls) -> None:
    """Run one case of a law, fitted to the candidate's support."""
    under = replace(setting, candidate=calls.candidate)
    try:
        about.body(under, case)
    except OutsideSupport:
        calls.restart()
        about.body(under.fitting(), fit_case(case, setting.candidate.support))


def try_operation(setting: Setting, operation: str) -> set[Argument]:
    """Try wrong calls of an operation, or of the methods of a class.

    Returns:
        The arguments of which no wrong value had to raise.

    Raises:
        Disagreement: A wrong call did not raise, or changed something.
        OutsideSupport: No law about the operation applies to the candidate.
        LookupError: A law applies, and no wrong call had to raise.
    """
    left = arguments_of(operation, getattr(setting.truth, operation))
    kinds = kinds_promised(setting, operation)
    rejected: list[OutsideSupport] = []
    is_tried = False
    for about in laws_about(operation, setting)[:LAWS_PER_OPERATION]:
        for case in few_cases(about, FEW):
            try:
                calls = expect_nothing_changed(setting, about, case, kinds)
            except OutsideSupport as error:
                rejected.append(error)
                continue
            is_tried |= any(_owner(name) == operation for name, _ in calls.tried)
            left -= {(name, label) for _, name, _, label, _ in calls.promised}
            if is_tried and not left:
                return left
    if not is_tried:
        if rejected:
            raise rejected[0]
        raise LookupError(f"no wrong call of {operation} must raise: expected one")
    return left


def _owner(function: str) -> str:
    return function.partition(".")[0]


@law(cases=OPERATIONS, claim="rejects shapes")
def a_call_that_raises_has_changed_nothing(setting: Setting, operation: str) -> None:
    """Whatever is wrong with one argument: tensors with the memory around them, and objects."""
    try_operation(setting, operation)


def arguments_of(operation: str, found: Any) -> set[Argument]:
    """Return the arguments of a function, or of a class's public methods, that not all values suit.

    Each is the name of the function and that of the argument.
    """
    functions = {operation: found}
    if inspect.isclass(found):
        functions = {
            f"{operation}.{name}": method
            for name, method in inspect.getmembers(found, inspect.isfunction)
            if name == "__init__" or name[0] != "_"
        }
    return {
        (name, parameter.name)
        for name, function in functions.items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self" and not kind_of(parameter.annotation).takes_all
    }

"""Trial of one law on one implementation in this process, with shrinking of a failing case."""

import builtins
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

from ...contract.operations import load_implementation
from ..laws.all_laws import ALL_LAWS
from .candidate import Candidate, OutsideSupport
from .expect import Disagreement
from .fitting import fit_case
from .law import Law, Setting
from .pictures import picture_of
from .report import Result, Status
from .shrinking import shrink

SECONDS_TO_SHRINK = 60.0
"""Time limit of the search for a smaller failing input."""


def run_law(law: Law, setting: Setting, case: Any) -> None:
    """Run a law on a case; if that is outside of the support, on the case fitted to it."""
    try:
        law.body(setting, case)
    except OutsideSupport:
        law.body(setting.fitting(), fit_case(case, setting.candidate.support))


def find_law(name: str) -> Law:
    """Return a law by its sentence.

    Raises:
        ValueError: No law has this sentence.
    """
    for law in ALL_LAWS:
        if law.name == name:
            return law
    raise ValueError(f"law = {name!r}: expected the sentence of a law")


def make_case(law: Law, case: str) -> Any:
    """Return a case from the Python expression that a report shows."""
    names = vars(torch) | vars(builtins) | {"torch": torch, "inf": float("inf")}
    names |= {"nan": float("nan")} | law.body.__globals__
    return eval(case, names)


def make_setting(candidate: Candidate, device: str) -> Setting:
    """Return the setting in which the laws run."""
    return Setting(candidate, load_implementation("reference"), torch.device(device))


def try_law(
    law: Law,
    setting: Setting,
    seed_of_cases: int,
    examples: int,
    at: Callable[[str], None] = lambda case: None,
    listed: int | None = None,
) -> Result:
    """Return the result of one law, tried in this process.

    Args:
        law: The law.
        setting: The candidate, the reference and the device.
        seed_of_cases: Seed of the drawn cases.
        examples: Number of drawn cases.
        at: Called with each case, as Python, before it is tried.
        listed: Optional. The maximum number of cases of a law that lists them, taken at equal
            steps from the list. If None, all of them.
    """

    def go(once: Callable[[Any], None]) -> None:
        if isinstance(law.cases, SearchStrategy):
            _drawn(once, law.cases, seed_of_cases, examples)()
        else:
            step = -(-len(law.cases) // listed) if listed else 1
            for case in law.cases[:: max(1, step)]:
                once(case)

    return _watched(law, setting, go, at)


def try_case(
    law: Law, setting: Setting, case: str, at: Callable[[str], None]
) -> Result:
    """Return the result of one law on one case, given as Python."""
    return _watched(law, setting, lambda once: once(make_case(law, case)), at)


def _watched(
    law: Law,
    setting: Setting,
    go: Callable[[Callable[[Any], None]], None],
    at: Callable[[str], None],
) -> Result:
    """Return the result of a law on the cases that `go` tries one after another."""
    if missing := setting.candidate.missing(law.needs):
        declared = setting.candidate.support.operations
        if declared is not None and not set(missing) & set(declared):
            reason = f"needs {', '.join(missing)}, which is not declared"
            return Result(law.name, law.area, Status.OUTSIDE, reason=reason)
        reason = f"{setting.candidate.name} has no {', '.join(missing)}"
        return Result(law.name, law.area, Status.MISSING, reason=reason)
    if unclaimed := setting.candidate.why_unclaimed(law.claim):
        return Result(law.name, law.area, Status.OUTSIDE, reason=unclaimed)
    begin = time.perf_counter()
    tried, skipped = 0, 0
    outside: set[str] = set()
    failures: dict[str, Exception] = {}
    first_failure = 0.0

    def once(case: Any) -> None:
        nonlocal tried, skipped
        if attempt(case, setting) or setting.candidate.promises_all:
            return
        fitted = fit_case(case, setting.candidate.support)
        # a law may also make its own plan, which `Setting.fit` then fits
        if not attempt(fitted, setting.fitting()) and fitted is case:
            tried, skipped = tried - (not failures), skipped - (not failures)

    def attempt(case: Any, setting: Setting) -> bool:
        """Try a case, and return whether it is inside of the candidate's support."""
        nonlocal tried, skipped, first_failure
        shown = repr(case)
        late = time.perf_counter() - first_failure > SECONDS_TO_SHRINK
        if failures and late and shown not in failures:
            return True  # time limit reached: the smallest failing case so far is kept
        at(shown)
        tried += not failures
        accesses = setting.candidate.accesses
        try:
            law.body(setting, case)
            if setting.candidate.accesses == accesses:
                raise OutsideSupport("the law called no operation")
        except OutsideSupport as error:
            skipped += not failures
            outside.add(str(error))
            return False
        except Exception as error:
            first_failure = first_failure if failures else time.perf_counter()
            # the last failing case is the smallest
            failures.pop(shown, None)
            failures[shown] = error
            raise
        return True

    failed: Exception | None = None
    try:
        go(once)
    except Exception as error:
        failed = error
    result = Result(
        law.name,
        law.area,
        Status.HELD,
        cases=tried,
        skipped=skipped,
        seconds=round(time.perf_counter() - begin, 2),
        reason="; ".join(sorted(outside)[:3]),
    )
    if failed is None:
        all_outside = tried > 0 and tried == skipped
        return replace(result, status=Status.OUTSIDE) if all_outside else result
    result = replace(result, status=Status.BROKEN, reason="")
    if not failures:
        return _with_failure(result, "", failed)
    shown, last = list(failures.items())[-1]
    if not _is_flaky(failed):
        shown, last = _smaller(law, setting, shown, last, at)
    result = replace(
        _with_failure(result, shown, last),
        seconds=round(time.perf_counter() - begin, 2),
    )
    if _is_flaky(failed):
        again = "tried again on the same input, it did not break the law"
        result = replace(result, message=f"{result.message}; {again}".strip("; "))
    return result


def _smaller(
    law: Law,
    setting: Setting,
    shown: str,
    last: Exception,
    at: Callable[[str], None],
) -> tuple[str, Exception]:
    """Return a simpler case that raises the same type of error, and that error."""
    errors = {shown: last}

    def fails(case: Any) -> bool:
        at(repr(case))
        try:
            run_law(law, setting, case)
        except Exception as error:
            errors[repr(case)] = error
            return type(error) is type(last)
        return False

    smallest = repr(shrink(make_case(law, shown), fails, SECONDS_TO_SHRINK / 4))
    return smallest, errors.get(smallest, last)


def _is_flaky(error: Exception) -> bool:
    """Return whether Hypothesis found that a case failed once and then passed."""
    return isinstance(error, HypothesisException) or type(error).__name__.startswith(
        "Flaky"
    )


def _drawn(once: Any, cases: SearchStrategy[Any], seed_of: int, examples: int) -> Any:
    """Return a test that tries drawn cases, and shrinks a failing one."""
    options = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )

    def drawn(case: Any) -> None:
        once(case)

    return options(seed(seed_of)(given(case=cases)(drawn)))


def _with_failure(result: Result, case: str, error: Exception) -> Result:
    """Return a result with the failing case and the details of the failure."""
    if isinstance(error, Disagreement):
        picture = {} if error.failure is None else picture_of(error.failure)
        return replace(
            result,
            case=case,
            details={"picture": picture} if picture else {},
            what=error.what,
            where=error.where,
            found=error.found,
            right=error.right,
        )
    message = f"{type(error).__name__}: {error}".split("\n")[0][:500]
    return replace(result, case=case, message=message)

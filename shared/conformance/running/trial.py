"""Trial of one law on one implementation in this process, with shrinking of a failing case."""

import builtins
import inspect
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

from ...contract.operations import load_implementation
from ..base.results import Result, Status, unfinished, without_numbers
from ..candidates.candidate import Candidate, OutsideSupport, load_candidate
from ..candidates.fatal import Fatal, fatal_status, message_of
from ..candidates.fitting import fit_case
from ..candidates.guard.interference import GUARD, own_endings
from ..candidates.setting import Setting
from ..cases.reuse import Reuse
from ..cases.steps import Runs
from ..checks.expect import Disagreement
from ..checks.pictures import picture_of
from ..laws.all_laws import ALL_LAWS
from ..laws.law import Law
from .again import with_words, words_of
from .shrinking import shrink, stays_valid

SECONDS_TO_SHRINK = 60.0
"""Time limit of the search for a smaller failing input."""
At: TypeAlias = Callable[[str, int], None]
"""Called before a case is tried, with the case as Python and the number of cases held so far."""
OnFailure: TypeAlias = Callable[[Result], None]
"""Called with a failure before its input is made smaller, which may take longer than is left."""
IS_INSIDE = "inside of the declared support"
"""Why a case is not counted if only calls outside of the support are of interest."""


class OutOfTimeError(BaseException):
    """The time limit of a law is over. No handler of ordinary errors catches it."""


def no_one(case: str, held: int) -> None:
    """Do nothing before a case is tried."""


def ignore(failure: Result) -> None:
    """Do nothing before the input of a failure is made smaller."""


def run_law(law: Law, setting: Setting, case: Any) -> None:
    """Run a law on a case; if that is outside of the support, on the case fitted to it."""
    try:
        law.body(setting, case)
    except OutsideSupport:
        if setting.candidate.goes_outside:
            raise
        law.body(setting.fitting(), fit_case(case, setting.candidate.support))
    if setting.device.type == "cuda":
        torch.cuda.synchronize()


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
    names |= {"nan": float("nan"), "Runs": Runs} | inspect.unwrap(law.body).__globals__
    return eval(case, names)


def make_setting(candidate: Candidate, device: str) -> Setting:
    """Return the setting in which the laws run.

    A GPU with a number, such as "cuda:1", becomes the current device of the process, so that
    kernels are launched and awaited there.
    """
    where = torch.device(device)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)
    return Setting(candidate.on(where), load_implementation("reference"), where)


def try_law(
    law: Law,
    setting: Setting,
    seed_of_cases: int,
    examples: int,
    at: At = no_one,
    listed: int | None = None,
    seconds: float = math.inf,
    on_failure: OnFailure = ignore,
    signatures: int | None = None,
) -> Result:
    """Return the result of one law, tried in this process.

    Args:
        law: The law.
        setting: The candidate, the reference and the device.
        seed_of_cases: Seed of the drawn cases.
        examples: Number of drawn cases.
        at: Called before each case.
        listed: Optional. The maximum number of cases of a law that lists them, taken at equal
            steps from the list. If None, all of them.
        seconds: Time limit. No case begins after it, except the first one. The law is then not
            finished, unless a case failed.
        on_failure: Called with each smaller failure.
        signatures: Optional. The number of signatures that drawn cases have, those of all laws
            together. If None, any number.
    """
    reuse = None if signatures is None else Reuse(signatures, seed_of_cases)

    def go(once: Callable[[Any], None]) -> None:
        for case in law.edges:
            once(case)
        if isinstance(law.cases, SearchStrategy):
            with nullcontext() if reuse is None else reuse.begin():
                _drawn(once, law.cases, seed_of_cases, examples)()
        else:
            step = -(-len(law.cases) // listed) if listed else 1
            for case in law.cases[:: max(1, step)]:
                once(case)

    return _watched(law, setting, go, at, seconds=seconds, on_failure=on_failure)


def try_case(
    law: Law,
    setting: Setting,
    case: str,
    at: At = no_one,
    is_exact: bool = False,
    seconds: float = math.inf,
    on_failure: OnFailure = ignore,
) -> Result:
    """Return the result of one law on one case, given as Python.

    Args:
        law: The law.
        setting: The candidate, the reference and the device.
        case: The case.
        at: Called before each case.
        is_exact: Whether the case is neither fitted to the support nor shrunk.
        seconds: Time limit, after which a failing case is not made smaller.
        on_failure: Called with the failure before it is made smaller.
    """

    def go(once: Callable[[Any], None]) -> None:
        once(make_case(law, case))

    return _watched(law, setting, go, at, is_exact, seconds, on_failure)


def result_without_cases(law: Law, candidate: Candidate) -> Result | None:
    """Return the result of a law if the candidate has not all that it needs, else None."""
    if missing := candidate.missing(law.needs):
        declared = candidate.support.operations
        if declared is not None and not set(missing) & set(declared):
            reason = f"needs {', '.join(missing)}, which is not declared"
            return Result(law.name, law.area, Status.OUTSIDE, reason=reason)
        reason = f"{candidate.name} has no {', '.join(missing)}"
        return Result(law.name, law.area, Status.MISSING, reason=reason)
    if unclaimed := candidate.why_unclaimed(law.claim):
        return Result(law.name, law.area, Status.OUTSIDE, reason=unclaimed)
    return None


def _watched(
    law: Law,
    setting: Setting,
    go: Callable[[Callable[[Any], None]], None],
    at: At,
    is_exact: bool = False,
    seconds: float = math.inf,
    on_failure: OnFailure = ignore,
) -> Result:
    """Return the result of a law on the cases that `go` tries one after another."""
    candidate = setting.candidate
    if known := result_without_cases(law, candidate):
        return known
    begin = time.perf_counter()
    end = begin + seconds
    tried, skipped = 0, 0
    outside: set[str] = set()
    failures: dict[str, Exception] = {}
    failed_cases: set[str] = set()
    first_failure = 0.0
    is_fitted = not (candidate.promises_all or candidate.goes_outside or is_exact)

    def once(case: Any) -> None:
        nonlocal tried, skipped
        if tried and not failures and time.perf_counter() > end:
            raise OutOfTimeError
        late = time.perf_counter() > min(end, first_failure + SECONDS_TO_SHRINK)
        if failures and late and repr(case) not in failed_cases:
            return  # time limit reached: the smallest failing case so far is kept
        tried += not failures
        try:
            why = attempt(case, setting)
            if why and is_fitted:
                # a law may also make its own plan, which `Setting.fit` then fits
                why = attempt(fit_case(case, candidate.support), setting.fitting())
        except Exception:
            failed_cases.add(repr(case))
            raise
        if why:
            skipped += not failures
            outside.add(why)

    def attempt(case: Any, setting: Setting) -> str:
        """Try a case, and return why it is outside of the candidate's support, or nothing."""
        nonlocal first_failure
        shown = repr(case)
        at(shown, tried - skipped - 1)
        accesses, calls_outside = candidate.accesses, candidate.calls_outside
        try:
            with own_endings() if candidate.is_guarded else nullcontext():
                law.body(setting, case)
            if setting.device.type == "cuda":
                torch.cuda.synchronize()
            if candidate.accesses == accesses:
                return "the law called no operation"
        except OutsideSupport as error:
            return str(error)
        except Exception as error:
            if status := fatal_status(error, setting.device):
                raise Fatal(status, shown, message_of(error)) from error
            if candidate.goes_outside and candidate.calls_outside == calls_outside:
                return IS_INSIDE
            first_failure = first_failure if failures else time.perf_counter()
            # the last failing case is the smallest
            failures.pop(shown, None)
            failures[shown] = error
            on_failure(with_failure(so_far(), shown, error, has_picture=False))
            raise
        if candidate.goes_outside and candidate.calls_outside == calls_outside:
            return IS_INSIDE
        return ""

    def so_far() -> Result:
        """Return what was tried, as a law that is broken."""
        return Result(
            law.name,
            law.area,
            Status.BROKEN,
            cases=tried,
            skipped=skipped,
            seconds=round(time.perf_counter() - begin, 2),
        )

    failed: BaseException | None = None
    try:
        go(once)
        if candidate.is_guarded:
            GUARD.expect_unchanged()
    except (Exception, Fatal, OutOfTimeError) as error:
        failed = error
    if failed is None and failures:
        # Hypothesis ended without the error that it was given
        failed = list(failures.values())[-1]
    reason = "; ".join(sorted(outside)[:3])
    result = replace(so_far(), status=Status.HELD, reason=reason)
    if failed is None:
        all_outside = tried > 0 and tried == skipped
        return replace(result, status=Status.OUTSIDE) if all_outside else result
    if isinstance(failed, OutOfTimeError):
        return unfinished(result)
    if isinstance(failed, Fatal):
        return replace(
            result,
            status=failed.status,
            case=failed.case,
            message=failed.message,
            reason="",
        )
    assert isinstance(failed, Exception)
    result = replace(result, status=Status.BROKEN, reason="")
    if not failures:
        return with_failure(result, "", failed)
    shown, last = list(failures.items())[-1]
    if not (_is_flaky(failed) or is_exact):
        left = min(SECONDS_TO_SHRINK / 4, end - time.perf_counter())
        shown, last = _smaller(law, setting, shown, last, at, left)
    result = replace(
        with_failure(result, shown, last),
        seconds=round(time.perf_counter() - begin, 2),
    )
    if _is_flaky(failed):
        again = "tried again on the same input, it did not break the law"
        result = replace(result, message=f"{result.message}; {again}".strip("; "))
    elif not is_exact and time.perf_counter() < end:
        result = _tried_again(law, setting, result, at)
    return result


def _tried_again(law: Law, setting: Setting, failure: Result, at: At) -> Result:
    """Return a failure with what its input does when it is tried again in this process."""
    at(failure.case, 0)
    again = Result(law.name, law.area, Status.BROKEN)
    try:
        run_law(law, setting, make_case(law, failure.case))
    except OutsideSupport:
        again = replace(again, status=Status.OUTSIDE)
    except Exception as error:
        again = with_failure(again, failure.case, error, has_picture=False)
        if status := fatal_status(error, setting.device):
            again = replace(again, status=status, message=message_of(error))
    else:
        again = replace(again, status=Status.HELD)
    return with_words(failure, words_of(failure, again, "tried again in its process,"))


def _smaller(
    law: Law,
    setting: Setting,
    shown: str,
    last: Exception,
    at: At,
    seconds: float,
) -> tuple[str, Exception]:
    """Return a simpler case that fails alike, and its error.

    It is inside of the declared support, if the law tries the case as it is.
    """
    errors = {shown: last}
    kind = _kind_of(last)

    def fails(case: Any) -> bool:
        at(repr(case), 0)
        candidate = setting.candidate
        calls_outside = candidate.calls_outside
        try:
            run_law(law, setting, case)
        except Exception as error:
            if status := fatal_status(error, setting.device):
                raise Fatal(status, repr(case), message_of(error)) from error
            errors[repr(case)] = error
            is_like = _kind_of(error) == kind
            if candidate.goes_outside:
                is_like &= candidate.calls_outside > calls_outside
            return is_like and (stays_valid(case) or _is_valid(law, setting, case))
        return False

    try:
        case = shrink(make_case(law, shown), fails, seconds)
        smallest = repr(case)
        inside = fit_case(case, setting.candidate.support)
        if not setting.candidate.goes_outside and inside is not case:
            smallest = repr(inside) if fails(inside) else smallest
    except Fatal:
        return (
            shown,
            last,
        )  # a smaller case ends the process; this one only breaks the law
    return smallest, errors.get(smallest, last)


def _is_valid(law: Law, setting: Setting, case: Any) -> bool:
    """Return whether the reference satisfies a law on a case that may be invalid."""
    reference = load_candidate("reference").on(setting.device)
    try:
        run_law(law, replace(setting, candidate=reference), case)
    except Exception:
        return False
    return True


def _kind_of(error: Exception) -> tuple[type, str]:
    """Return what errors have in common that are alike: the type, and the words."""
    words = error.what if isinstance(error, Disagreement) else message_of(error)
    return type(error), without_numbers(words)


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


def with_failure(
    result: Result, case: str, error: Exception, has_picture: bool = True
) -> Result:
    """Return a result with the failing case and the details of the failure.

    Args:
        result: The result of a law.
        case: The failing case.
        error: What the law raised.
        has_picture: Whether a picture of the call is made.
    """
    if isinstance(error, Disagreement):
        failure = error.failure if has_picture else None
        picture = {} if failure is None else picture_of(failure)
        return replace(
            result,
            case=case,
            details={"picture": picture} if picture else {},
            what=error.what,
            where=error.where,
            found=error.found,
            right=error.right,
        )
    return replace(result, case=case, message=message_of(error))

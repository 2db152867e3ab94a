"""How is an implementation tried against every law?

Each law gets its cases one after another until one breaks it; then Hypothesis looks for a smaller
one. All of this runs in a process of its own: a kernel that crashes takes that process down, which
is reported as a failure of the law at hand, with the input at which it happened, and a new process
goes on with the next. Several processes share the laws out, if asked to.
"""

import builtins
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

from ...contract.operations import load_implementation
from ..laws.all_laws import ALL_LAWS
from .candidate import Candidate, OutsideSupport, load_candidate
from .expect import Disagreement
from .fitting import fit_case
from .law import Law, Setting
from .report import Report, Result, Status
from .shrinking import shrink
from .worker import SECONDS_OF_A_LAW, Job, Worker

SECONDS_TO_SHRINK = 60.0
"""How long a smaller input is looked for."""


def check_implementation(
    implementation: str,
    only: str | None = None,
    seed: int = 0,
    examples: int = 25,
    device: str | None = None,
    known_failures: Mapping[str, str] | None = None,
    isolated: bool = True,
    seconds_of_a_law: float = SECONDS_OF_A_LAW,
    on_result: Callable[[Result], None] = lambda result: None,
    workers: int = 1,
) -> Report:
    """Return how an implementation does on every law.

    Args:
        implementation: "reference", "optimized", the dotted name of a package or module that has
            some of the operations under their names, or the path of a .py file.
        only: words that the sentence or the area of a law must contain; None: all laws.
        seed: what drawn cases are drawn from.
        examples: drawn cases of a law.
        device: where tensors lie; None: CUDA if there is one.
        known_failures: laws that are known to be broken, each with the reason. One that holds
            is a failure.
        isolated: whether laws run in a process of their own; False: in this one, which a
            crash then ends.
        seconds_of_a_law: a law that takes longer counts as crashed, if it is isolated.
        on_result: called with what became of each law, as soon as that is known.
        workers: processes that share the laws out. The report does not depend on them.

    Raises:
        ModuleNotFoundError, ImportError: no such implementation, or it cannot be imported.
        ValueError: it has none of the operations, no law contains the words, a known failure names
            no law, or a number is out of range.
    """
    laws = choose_laws(only)
    known = check_known_failures(known_failures)
    for name, number in (("examples", examples), ("workers", workers)):
        if number < 1:
            raise ValueError(f"{name} = {number}: expected at least 1")
    if workers > 1 and not isolated:
        raise ValueError(
            f"workers = {workers} with isolated = False: expected 1, which is this process"
        )
    device = choose_device(device)
    results: dict[str, Result] = {}
    with _trying(
        implementation, device, isolated, seconds_of_a_law, min(workers, len(laws))
    ) as try_all:
        for law, result in try_all(laws, seed, examples):
            results[law.name] = with_known(result, known.get(law.name))
            on_result(results[law.name])
    options = {"seed": seed, "examples": examples}
    in_order = tuple(results[law.name] for law in laws)
    return Report(implementation, device, in_order, options)


def choose_laws(only: str | None) -> list[Law]:
    """Return the laws whose sentence or area contains some words.

    Raises:
        ValueError: none does.
    """
    words = (only or "").lower()
    chosen = [law for law in ALL_LAWS if words in f"{law.area} {law.name}".lower()]
    if not chosen:
        areas = ", ".join(dict.fromkeys(law.area for law in ALL_LAWS))
        raise ValueError(f"only = {only!r}: no law contains it; areas are {areas}")
    return chosen


def choose_device(device: str | None) -> str:
    """Return where tensors lie: CUDA, if nothing is said and there is one.

    Raises:
        ValueError: no such device here.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r}: expected cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device = {device!r}: no GPU is usable here; expected cpu")
    return device


def check_known_failures(known_failures: Mapping[str, str] | None) -> dict[str, str]:
    """Return what is known to fail, by law.

    Raises:
        ValueError: a name of no law.
    """
    known = dict(known_failures or {})
    if unknown := sorted(set(known) - {law.name for law in ALL_LAWS}):
        raise ValueError(
            f"known_failures names {unknown}: expected sentences of laws, as a report shows them"
        )
    return known


def reproduce(
    implementation: str, law: str, case: str, device: str | None = None
) -> None:
    """Run one law on one case, in this process; a broken law raises.

    Args:
        implementation: as of `check_implementation`.
        law: its sentence.
        case: the case as Python, as a report shows it.
        device: where tensors lie; None: CUDA if there is one.

    Raises:
        Disagreement: the law is broken.
        ValueError: there is no such law.
    """
    found = find_law(law)
    setting = make_setting(load_candidate(implementation), choose_device(device))
    _run(found, setting, make_case(found, case))


def _run(law: Law, setting: Setting, case: Any) -> None:
    """Run a law on a case: as it is, and if that is refused, inside of what is declared."""
    try:
        law.body(setting, case)
    except OutsideSupport:
        law.body(setting.fitting(), fit_case(case, setting.candidate.support))


def find_law(name: str) -> Law:
    """Return a law by its sentence.

    Raises:
        ValueError: there is none.
    """
    for law in ALL_LAWS:
        if law.name == name:
            return law
    raise ValueError(f"law = {name!r}: expected the sentence of a law")


def make_case(law: Law, case: str) -> Any:
    """Return a case from the Python that a report shows."""
    names = vars(torch) | vars(builtins) | {"torch": torch, "inf": float("inf")}
    names |= {"nan": float("nan")} | law.body.__globals__
    return eval(case, names)


def make_setting(candidate: Candidate, device: str) -> Setting:
    """Return what every law is given."""
    return Setting(candidate, load_implementation("reference"), torch.device(device))


def try_law(
    law: Law,
    setting: Setting,
    seed_of_cases: int,
    examples: int,
    at: Callable[[str], None] = lambda case: None,
    listed: int | None = None,
) -> Result:
    """Return what becomes of one law, tried in this process.

    Args:
        law: the law.
        setting: what it is given.
        seed_of_cases: what drawn cases are drawn from.
        examples: drawn cases.
        at: called with each case, as Python, before it is tried.
        listed: Optional. The most cases of a law that lists them, spread evenly over the list. If
            None, all of them.
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
    """Return what becomes of one law on one case, as `try_law` does on drawn ones."""
    return _watched(law, setting, lambda once: once(make_case(law, case)), at)


def _watched(
    law: Law,
    setting: Setting,
    go: Callable[[Callable[[Any], None]], None],
    at: Callable[[str], None],
) -> Result:
    """Return what becomes of a law on the cases that `go` tries one after another."""
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
    tried, refused = 0, 0
    outside: set[str] = set()
    failures: dict[str, Exception] = {}
    first_failure = 0.0

    def once(case: Any) -> None:
        nonlocal tried, refused
        if attempt(case, setting) or setting.candidate.promises_all:
            return
        fitted = fit_case(case, setting.candidate.support)
        # the law may also make a plan of its own, which is fitted then
        if not attempt(fitted, setting.fitting()) and fitted is case:
            tried, refused = tried - (not failures), refused - (not failures)

    def attempt(case: Any, setting: Setting) -> bool:
        """Try a case; tell whether the candidate took it."""
        nonlocal tried, refused, first_failure
        shown = repr(case)
        late = time.perf_counter() - first_failure > SECONDS_TO_SHRINK
        if failures and late and shown not in failures:
            return True  # no longer looked at: what is known to fail is small enough
        at(shown)
        tried += not failures
        asked = setting.candidate.asked
        try:
            law.body(setting, case)
            if setting.candidate.asked == asked:
                raise OutsideSupport("the law had nothing to ask")
        except OutsideSupport as error:
            refused += not failures
            outside.add(str(error))
            return False
        except Exception as error:
            first_failure = first_failure if failures else time.perf_counter()
            # the last one is the smallest
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
        refused=refused,
        seconds=round(time.perf_counter() - begin, 2),
        reason="; ".join(sorted(outside)[:3]),
    )
    if failed is None:
        all_outside = tried > 0 and tried == refused
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
    """Return a simpler case that breaks a law in the same way, and how it does."""
    errors = {shown: last}

    def fails(case: Any) -> bool:
        at(repr(case))
        try:
            _run(law, setting, case)
        except Exception as error:
            errors[repr(case)] = error
            return type(error) is type(last)
        return False

    smallest = repr(shrink(make_case(law, shown), fails, SECONDS_TO_SHRINK / 4))
    return smallest, errors.get(smallest, last)


def _is_flaky(error: Exception) -> bool:
    """Tell whether Hypothesis saw a case fail once and hold then."""
    return isinstance(error, HypothesisException) or type(error).__name__.startswith(
        "Flaky"
    )


def _drawn(once: Any, cases: SearchStrategy[Any], seed_of: int, examples: int) -> Any:
    """Return a test that tries drawn cases, and shrinks the one that fails."""
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
    """Return a result with the case that broke the law and what was wrong."""
    if isinstance(error, Disagreement):
        return replace(
            result,
            case=case,
            what=error.what,
            where=error.where,
            found=error.found,
            right=error.right,
        )
    message = f"{type(error).__name__}: {error}".split("\n")[0][:500]
    return replace(result, case=case, message=message)


def with_known(result: Result, reason: str | None) -> Result:
    """Return a result in the light of what is known to fail."""
    if reason is None:
        return result
    holds = result.status in (Status.HELD, Status.OUTSIDE)
    return replace(
        result, status=Status.UNEXPECTED if holds else Status.KNOWN, reason=reason
    )


@contextmanager
def _trying(
    implementation: str, device: str, isolated: bool, seconds: float, workers: int
) -> Iterator[Callable[[list[Law], int, int], Iterator[tuple[Law, Result]]]]:
    """Yield what tries laws: in processes of their own, or in this one."""
    if not isolated:
        setting = make_setting(load_candidate(implementation), device)
        yield lambda laws, seed, examples: (
            (law, try_law(law, setting, seed, examples)) for law in laws
        )
        return
    with ExitStack() as ended:
        free: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(workers):
            worker = Worker(implementation, device, seconds)
            ended.callback(worker.stop)
            free.put(worker)
        # what cannot be imported is told before anything is tried
        worker.start()
        pool = ThreadPoolExecutor(workers)
        ended.callback(pool.shutdown, cancel_futures=True)

        def try_one(law: Law, job: Job) -> Result:
            worker = free.get()
            try:
                return worker.try_law(job, law.area)
            finally:
                free.put(worker)

        def try_all(
            laws: list[Law], seed: int, examples: int
        ) -> Iterator[tuple[Law, Result]]:
            tried = {
                pool.submit(try_one, law, Job(law.name, seed, examples)): law
                for law in laws
            }
            for each in as_completed(tried):
                yield tried[each], each.result()

        yield try_all

"""How is an implementation tried against every law?

Each law gets its cases one after another until one breaks it; then Hypothesis looks for a smaller
one. All of this runs in a process of its own: a kernel that crashes takes that process down, which
is reported as a failure of the law at hand, and a new process goes on with the next.
"""

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from ..operations import load_implementation
from .all_laws import ALL_LAWS
from .candidate import Candidate, load_candidate
from .expect import Disagreement
from .law import Law, Setting
from .report import Report, Result, Status

SECONDS_OF_A_LAW = 300.0
"""A law that takes longer is stopped, and counts as crashed."""


def check_implementation(
    implementation: str,
    only: str | None = None,
    seed: int = 0,
    examples: int = 25,
    device: str | None = None,
    known_failures: Mapping[str, str] | None = None,
    isolated: bool = True,
) -> Report:
    """Return how an implementation does on every law.

    Args:
        implementation: "reference", "optimized", or the dotted name of a package or module that
            has some of the operations under their names.
        only: words that the sentence or the area of a law must contain; None: all laws.
        seed: what drawn cases are drawn from.
        examples: drawn cases of a law.
        device: where tensors lie; None: CUDA if there is one.
        known_failures: laws that are known to be broken, each with the reason. One that holds
            is a failure.
        isolated: whether laws run in a process of their own; False: in this one, which a
            crash then ends.

    Raises:
        ModuleNotFoundError: no such implementation.
        ValueError: it has none of the operations, no law contains the words, or a known failure
            names no law.
    """
    laws = choose_laws(only)
    known = dict(known_failures or {})
    if unknown := set(known) - {law.name for law in ALL_LAWS}:
        raise ValueError(
            f"known_failures names {sorted(unknown)}: expected names of laws"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    load_candidate(implementation)
    names = [law.name for law in laws]
    run = _in_processes if isolated else _in_this_process
    results = [
        _with_known(result, known.get(result.law))
        for result in run(implementation, names, seed, examples, device)
    ]
    options = {"seed": seed, "examples": examples}
    return Report(implementation, device, tuple(results), options)


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
    """
    (found,) = [each for each in ALL_LAWS if each.name == law]
    names = dict(vars(torch)) | {"torch": torch, "inf": float("inf")}
    names |= found.body.__globals__
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found.body(make_setting(load_candidate(implementation), device), eval(case, names))


def make_setting(candidate: Candidate, device: str) -> Setting:
    """Return what every law is given."""
    return Setting(candidate, load_implementation("reference"), torch.device(device))


def try_law(law: Law, setting: Setting, seed_of_cases: int, examples: int) -> Result:
    """Return what becomes of one law, tried in this process."""
    if missing := setting.candidate.missing(law.needs):
        reason = f"{setting.candidate.name} has no {', '.join(missing)}"
        return Result(law.name, law.area, Status.MISSING, reason=reason)
    begin = time.perf_counter()
    tried: list[Any] = []
    failed: BaseException | None = None

    def once(case: Any) -> None:
        tried.append(case)
        law.body(setting, case)

    try:
        if isinstance(law.cases, SearchStrategy):
            _drawn(once, law.cases, seed_of_cases, examples)()
        else:
            for case in law.cases:
                once(case)
    except Exception as error:
        failed = error
    result = Result(
        law.name,
        law.area,
        Status.HELD if failed is None else Status.BROKEN,
        cases=len(tried),
        seconds=round(time.perf_counter() - begin, 2),
    )
    return result if failed is None else _with_failure(result, tried[-1:], failed)


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


def _with_failure(result: Result, case: list[Any], error: BaseException) -> Result:
    """Return a result with the case that broke the law and what was wrong."""
    shown = repr(case[0]) if case else ""
    if isinstance(error, Disagreement):
        return replace(
            result,
            case=shown,
            what=error.what,
            where=error.where,
            found=error.found,
            right=error.right,
        )
    message = f"{type(error).__name__}: {error}".split("\n")[0][:500]
    return replace(result, case=shown, message=message)


def _with_known(result: Result, reason: str | None) -> Result:
    """Return a result in the light of what is known to fail."""
    if reason is None:
        return result
    holds = result.status == Status.HELD
    return replace(
        result, status=Status.UNEXPECTED if holds else Status.KNOWN, reason=reason
    )


def _in_this_process(
    implementation: str, names: Sequence[str], seed: int, examples: int, device: str
) -> Iterator[Result]:
    setting = make_setting(load_candidate(implementation), device)
    by_name = {law.name: law for law in ALL_LAWS}
    for name in names:
        yield try_law(by_name[name], setting, seed, examples)


def _in_processes(
    implementation: str, names: Sequence[str], seed: int, examples: int, device: str
) -> Iterator[Result]:
    """Yield the results from a process of its own, and from new ones after each that crashed."""
    by_name = {law.name: law for law in ALL_LAWS}
    left = list(names)
    while left:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=_work,
            args=(theirs, implementation, left, seed, examples, device),
            daemon=True,
        )
        process.start()
        theirs.close()
        try:
            while left and ours.poll(SECONDS_OF_A_LAW):
                yield ours.recv()
                left.pop(0)
            ended = f"took more than {SECONDS_OF_A_LAW:.0f} seconds"
        except EOFError:
            process.join()
            ended = f"the process ended with code {process.exitcode}"
        process.kill()
        if left:
            law = by_name[left.pop(0)]
            yield Result(law.name, law.area, Status.CRASHED, message=ended)


def _work(
    results: Connection,
    implementation: str,
    names: Sequence[str],
    seed: int,
    examples: int,
    device: str,
) -> None:
    """Try laws one after another and send what became of each."""
    torch.set_num_threads(1)
    for result in _in_this_process(implementation, names, seed, examples, device):
        results.send(result)
    results.close()

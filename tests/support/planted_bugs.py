"""Search for a planted bug: batches of a law are drawn until one is wrong on the changed twin."""

import multiprocessing
import signal
from pathlib import Path
from typing import Any, NamedTuple

from mutants.graft import graft
from mutants.mutant import Mutant
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.running.screening import screen
from pagetwin.conformance.running.trial import find_law, make_setting


class Hunt(NamedTuple):
    """A search for a mutant.

    Args:
        mutant: the mutant.
        law: the law whose batches are drawn.
        most: batches after which the search ends.
        count: batches per seed.
    """

    mutant: Mutant
    law: str
    most: int
    count: int


class Found(NamedTuple):
    """Result of a search: the batches that were tried, and the wrong one; empty if none is."""

    cases: int
    case: str
    summary: str


def hunt(planted: Hunt, folder: Path) -> Found | None:
    """Search for a mutant in a process of its own.

    Returns:
        None if the mutant reads outside of the memory of its process, which ends it.
    """
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=_screen, args=(planted, found, folder))
    process.start()
    process.join()
    if process.exitcode == -signal.SIGSEGV:
        return None
    assert process.exitcode == 0
    result: Found = found.get()
    return result


def _screen(planted: Hunt, found: Any, folder: Path) -> None:
    changed = load_candidate(graft(planted.mutant.twin, planted.mutant, folder))
    setting, law = make_setting(changed, "cpu"), find_law(planted.law)
    cases, seed = 0, 0
    while cases < planted.most:
        result = screen(law, setting, seed, 0, planted.count)
        cases, seed = cases + result.cases, seed + 1
        if not result.ok:
            found.put(Found(cases, result.case, result.summary))
            return
    found.put(Found(cases, "", ""))

"""Failing inputs that are tried again before they are reported.

A kernel may fail because of the calls before it, or because of timing. Then the input of a report
does not fail when a user tries it. So each failing input is tried once more in its process
(`trial.py`). The first input of each symptom is also tried alone in a fresh process. If it does not
fail, or fails otherwise, the result says so.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from ..base.results import AGAIN, Result, Status, symptoms_of
from .worker import Job, Worker

MOST = 6
"""Symptoms whose input is tried in a fresh process, which takes seconds to start."""


def words_of(first: Result, again: Result, where: str) -> str:
    """Return what happened when an input was tried again; empty if it failed as before.

    Args:
        first: The failure.
        again: The result of the same input.
        where: Where it was tried.
    """
    if again.status in (Status.HELD, Status.OUTSIDE):
        return (
            f"{where} this input does not fail: the result depends on earlier calls or on"
            " timing"
        )
    if again.status == Status.UNFINISHED or again.symptom == first.symptom:
        return ""
    return f"{where} this input fails otherwise: {again.status}, {again.summary}"


def with_words(result: Result, words: str) -> Result:
    """Return a failure with what happened when its input was tried again."""
    if not words:
        return result
    return replace(result, details=result.details | {AGAIN: words})


def try_symptoms_again(
    worker: Worker, results: Sequence[Result], seconds: float
) -> list[Result]:
    """Return results, the first one of each symptom with what its input does in a fresh process.

    Args:
        worker: A worker. Its process is ended before each input.
        results: Results of laws.
        seconds: Time limit. Inputs that are not tried by then are reported as they are.
    """
    firsts = [symptom.first for symptom in symptoms_of(results)]
    wanted = [
        result for result in firsts if result.status == Status.BROKEN and result.case
    ]
    worker.deadline = time.monotonic() + seconds
    words: dict[int, str] = {}
    for result in wanted[:MOST]:
        if time.monotonic() >= worker.deadline:
            break
        worker.stop()
        job = Job(result.law, case=result.case, makes_smaller=False)
        again = worker.try_law(job, result.area)
        words[id(result)] = words_of(result, again, "alone, in a fresh process,")
    worker.stop()
    return [with_words(result, words.get(id(result), "")) for result in results]

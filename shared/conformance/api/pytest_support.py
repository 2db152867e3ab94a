"""Pytest integration: each law becomes one test of a project's own kernels.

Example:

    @parametrize_with_laws("my_kernels", known_failures={"a law": "why it is broken"})
    def test_my_kernels(law):
        law()

The laws run in one worker process, separate from pytest's, so that a crash of a kernel fails only
the test in which it occurs.
"""

import atexit
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from ..base.results import Result, Status
from ..laws.law import Law
from ..reports.report import Report
from ..running.law_names import check_known
from ..running.worker import SECONDS_OF_A_LAW, Job, Worker, signatures_on
from .check import choose_device, choose_laws, with_known

Test = TypeVar("Test", bound=Callable[..., Any])


class LawToTry:
    """One law and an implementation. A call tries the law, and fails the test if it is broken.

    Args:
        law: The law.
        worker: The process in which it is tried.
        seed, examples, listed: As in `parametrize_with_laws`.
        reason: Optional. The reason why the law is known to be broken. If None, it must hold.
    """

    def __init__(
        self,
        law: Law,
        worker: Worker,
        seed: int,
        examples: int,
        reason: str | None,
        listed: int | None = None,
    ) -> None:
        self.law, self.worker = law, worker
        shared = signatures_on(worker.device)
        self.job = Job(law.name, seed, examples, shared, listed=listed)
        self.reason = reason

    def __call__(self) -> Result:
        """Try the law, and return its result.

        A known failure marks the test as an expected failure. If all cases are outside of the
        declared support, the test is skipped.

        Raises:
            AssertionError: The law is broken or not finished, a case crashes, a needed operation
                is missing, or a known failure holds.
        """
        import pytest

        result = self.worker.try_law(self.job, self.law.area)
        result = with_known(result, self.reason)
        if result.status == Status.KNOWN:
            pytest.xfail(result.reason)
        if result.status == Status.OUTSIDE:
            pytest.skip(f"outside of what is declared: {result.reason}")
        # a law that is not finished is not broken, but its test has not passed
        if not result.ok or result.status == Status.UNFINISHED:
            report = Report(
                self.worker.implementation, self.worker.device, (result,), {}
            )
            # the report contains all information; a traceback of this file adds none
            pytest.fail(
                f"{result.law}: {result.status}\n\n{report.describe(result)}",
                pytrace=False,
            )
        if result.skipped:
            print(f"{result.skipped} of {result.cases} skipped: {result.reason}")
        return result

    def __repr__(self) -> str:
        return f"LawToTry({self.law.name!r})"


@cache
def _worker(implementation: str, device: str, seconds_of_a_law: float) -> Worker:
    """Return the worker of an implementation, which all of its tests share."""
    worker = Worker(implementation, device, seconds_of_a_law)
    atexit.register(worker.stop)
    return worker


def parametrize_with_laws(
    implementation: str,
    known_failures: Mapping[str, str] | None = None,
    only: str | None = None,
    examples: int = 25,
    seed: int = 0,
    device: str | None = None,
    seconds_of_a_law: float = SECONDS_OF_A_LAW,
    listed: int | None = None,
) -> Callable[[Test], Test]:
    """Return a decorator that parametrizes a test function, which calls its `law`, with the laws.

    A missing operation fails its laws, unless they are known failures. A law is skipped, with the
    reason, if all of its cases are outside of the support that SUPPORT declares.

    Args:
        implementation: As in `check_implementation`.
        known_failures: Optional. Laws that are known to be broken, each with the reason. The test
            of a known failure that holds fails. If None, all laws must hold.
        only: Optional. Words that the sentence or the area of a law must contain. If None, all
            laws are tried.
        examples: Number of drawn cases per law.
        seed: Seed of the drawn cases.
        device: Optional. The device of the tensors. If None, CUDA if it is available, else the
            CPU.
        seconds_of_a_law: A law that takes longer is not finished, and its test fails.
        listed: Optional. The maximum number of cases of a law that lists them, taken at equal
            steps from the list. If None, all of them, as in the check of a release.

    Raises:
        ValueError: No law contains the words, or a known failure is not the name of a law.
    """
    import pytest

    known = dict(known_failures or {})
    check_known(known)
    laws = choose_laws(only)
    worker = _worker(implementation, choose_device(device), seconds_of_a_law)
    tries = [
        LawToTry(law, worker, seed, examples, known.get(law.name), listed)
        for law in laws
    ]
    names = [law.name for law in laws]

    def decorate(test: Test) -> Test:
        decorated: Test = pytest.mark.parametrize("law", tries, ids=names)(test)
        return decorated

    return decorate

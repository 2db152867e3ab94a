"""How does a project hold its kernels to the laws in its own tests?

Each law becomes a test of its own:

    @parametrize_with_laws("my_kernels", known_failures={"a law": "why it is broken"})
    def test_my_kernels(law):
        law()

The laws run in one process beside pytest's, so that a kernel that crashes fails its test and no
other.
"""

import atexit
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from .law import Law
from .report import Report, Result, Status
from .runner import check_known_failures, choose_device, choose_laws, with_known
from .worker import SECONDS_OF_A_LAW, Job, Worker

Test = TypeVar("Test", bound=Callable[..., Any])


class LawToTry:
    """One law, and the implementation that shall obey it; calling it fails if it does not.

    Args:
        law: the law.
        worker: the process in which it is tried.
        seed, examples, listed: as of `parametrize_with_laws`.
        reason: why it is known to be broken; None: it is not.
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
        self.job = Job(law.name, seed, examples, listed=listed)
        self.reason = reason

    def __call__(self) -> Result:
        """Try the law, and return what became of it.

        A known failure ends the test as one that is expected; so that all cases lie outside of what
        is declared, as skipped.

        Raises:
            AssertionError: the law is broken, crashes or lacks an operation, or is known to be
                broken and holds.
        """
        import pytest

        result = self.worker.try_law(self.job, self.law.area)
        result = with_known(result, self.reason)
        if result.status == Status.KNOWN:
            pytest.xfail(result.reason)
        if result.status == Status.OUTSIDE:
            pytest.skip(f"outside of what is declared: {result.reason}")
        if not result.ok:
            report = Report(
                self.worker.implementation, self.worker.device, (result,), {}
            )
            # the report says all there is to say; the lines of this file do not
            pytest.fail(
                f"{result.law}: {result.status}\n\n{report.describe(result)}",
                pytrace=False,
            )
        if result.refused:
            print(f"{result.refused} of {result.cases} refused: {result.reason}")
        return result

    def __repr__(self) -> str:
        return f"LawToTry({self.law.name!r})"


@cache
def _worker(implementation: str, device: str, seconds_of_a_law: float) -> Worker:
    """Return the process that tries an implementation, one for all tests of it."""
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
    """Return what makes a test function, which takes `law` and calls it, a test of each law.

    An operation that is missing fails its laws, unless they are known failures. Laws all of whose
    cases lie outside of what SUPPORT declares are skipped, with the reason.

    Args:
        implementation: as of `check_implementation`.
        known_failures: laws that are known to be broken, each with the reason. One that holds
            fails.
        only: words that the sentence or the area of a law must contain; None: all laws.
        examples: drawn cases of a law.
        seed: what drawn cases are drawn from.
        device: where tensors lie; None: CUDA if there is one.
        seconds_of_a_law: a law that takes longer fails.
        listed: Optional. The most cases of a law that lists them, spread evenly over the list. If
            None, all of them: what a release is checked with.

    Raises:
        ValueError: no law contains the words, or a known failure names no law.
    """
    import pytest

    known = check_known_failures(known_failures)
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

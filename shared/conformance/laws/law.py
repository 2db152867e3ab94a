"""Law: a property that every implementation must satisfy, with the cases on which it is tried.

A law consists of a sentence, the operations that it needs, its cases and a function. The function
gets the candidate and one case, computes the expected result without the candidate, and raises a
Disagreement if the candidate's result differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from hypothesis.strategies import SearchStrategy

from ..candidates.candidate import CLAIMS
from ..candidates.setting import Setting
from ..checks.canaries import checked_values

Cases = SearchStrategy[Any] | Sequence[Any]
"""The cases of a law: a strategy from which they are drawn, or a list."""
Body = TypeVar("Body", bound=Callable[..., None])


@dataclass(frozen=True)
class Law:
    """One law.

    Args:
        name: Its sentence.
        area: Its subject, which the laws of one file share.
        needs: Operations that the candidate must have.
        cases: The cases on which it is tried, after those of `edges`.
        body: Function of a Setting and a case. It raises if the law is broken.
        edges: Cases that are always tried first, before those that are drawn.
        claim: Optional. One of `candidate.CLAIMS`; the law applies only to candidates that claim
            it. If None, the law applies to every candidate that has the operations.
    """

    name: str
    area: str
    needs: tuple[str, ...]
    cases: Cases
    body: Callable[[Setting, Any], None]
    claim: str | None = None
    edges: tuple[Any, ...] = ()


LAWS: list[Law] = []
"""All laws, in the order in which the files of laws are imported."""


def law(
    *needs: str, cases: Cases, claim: str | None = None, edges: Sequence[Any] = ()
) -> Callable[[Body], Body]:
    """Return a decorator that registers a function as a law. Its name is the law's sentence.

    Args:
        needs: Operations that the candidate must have.
        cases: The cases on which the law is tried. `repr` of a case must be a Python expression
            that creates an equal case.
        claim: Optional. A claim that the candidate must make. If None, no claim is needed. A law of
            "rejects contents" is tried with PAGETWIN_CHECK_VALUES=1.
        edges: Cases that are always tried, before all others. So a fault at an edge that few of
            the drawn cases have is found with any seed.
    """
    if claim is not None and claim not in CLAIMS:
        raise ValueError(f"claim = {claim!r}: expected one of {', '.join(CLAIMS)}")

    def register(body: Body) -> Body:
        area = body.__module__.rpartition(".")[2].removeprefix("laws_of_")
        sentence = body.__name__.replace("_", " ")
        if any(known.name == sentence for known in LAWS):
            raise ValueError(f"law {sentence!r}: expected one of that name")
        tried = _with_checked_values(body) if claim == "rejects contents" else body
        LAWS.append(Law(sentence, area, needs, cases, tried, claim, tuple(edges)))
        return body

    return register


def _with_checked_values(body: Body) -> Callable[[Setting, Any], None]:
    """Return the function of a law with the validation of contents enabled, also on a GPU."""

    @wraps(body)
    def tried(setting: Setting, case: Any) -> None:
        with checked_values():
            body(setting, case)

    return tried

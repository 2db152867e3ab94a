"""What is a law?

A sentence that every implementation has to obey, with the operations it needs and the cases it is
tried on. Its function gets the candidate and one case, computes what is right without the
candidate, and raises a Disagreement where the two part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from hypothesis.strategies import SearchStrategy

from ...contract.operations import Implementation
from .candidate import CLAIMS, Candidate
from .fitting import fit_case

Cases = SearchStrategy[Any] | Sequence[Any]
"""What a law is tried on: drawn ones, or a list that is gone through."""
Body = TypeVar("Body", bound=Callable[..., None])
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Setting:
    """What a law is given beside its case.

    Args:
        candidate: the implementation in question.
        truth: the reference.
        device: where tensors lie.
        is_fitting: whether the case was refused as it was drawn, and is tried again inside of what
            the candidate declares.
    """

    candidate: Candidate
    truth: Implementation
    device: torch.device
    is_fitting: bool = False

    def fit(self, drawn: Drawn) -> Drawn:
        """Return a plan that a law makes from its case; if it is fitting, the nearest declared."""
        if not self.is_fitting:
            return drawn
        fitted: Drawn = fit_case(drawn, self.candidate.support)
        return fitted

    def fitting(self) -> "Setting":
        """Return the setting in which plans are brought inside of what is declared."""
        return replace(self, is_fitting=True)


@dataclass(frozen=True)
class Law:
    """One sentence, and how it is tried.

    Args:
        name: the sentence.
        area: what it is about: the laws of one file.
        needs: operations that the candidate must have.
        cases: what it is tried on.
        body: called with a Setting and a case; raises where the law is broken.
        claim: what the candidate must claim, or the law is not about it: one of
            `candidate.CLAIMS`; None: the law is about everyone who has the operations.
    """

    name: str
    area: str
    needs: tuple[str, ...]
    cases: Cases
    body: Callable[[Setting, Any], None]
    claim: str | None = None


LAWS: list[Law] = []
"""Every law, in the order in which the files of laws are imported."""


def law(*needs: str, cases: Cases, claim: str | None = None) -> Callable[[Body], Body]:
    """Return what makes a function a law; its name, read as a sentence, is the law's.

    Args:
        needs: operations that the candidate must have.
        cases: what the law is tried on; `repr` of a case must be Python that makes it again.
        claim: what the candidate must claim; None: nothing.
    """
    if claim is not None and claim not in CLAIMS:
        raise ValueError(f"claim = {claim!r}: expected one of {', '.join(CLAIMS)}")

    def register(body: Body) -> Body:
        area = body.__module__.rpartition(".")[2].removeprefix("laws_of_")
        sentence = body.__name__.replace("_", " ")
        if any(each.name == sentence for each in LAWS):
            raise ValueError(f"law {sentence!r}: expected one of that name")
        LAWS.append(Law(sentence, area, needs, cases, body, claim))
        return body

    return register

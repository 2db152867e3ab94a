"""What is a law?

A sentence that every implementation has to obey, with the operations it needs and the cases it is
tried on. Its function gets the candidate and one case, computes what is right without the
candidate, and raises a Disagreement where the two part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis.strategies import SearchStrategy

from ..operations import Implementation
from .candidate import Candidate

Cases = SearchStrategy[Any] | Sequence[Any]
"""What a law is tried on: drawn ones, or a list that is gone through."""
Body = TypeVar("Body", bound=Callable[..., None])


@dataclass(frozen=True)
class Setting:
    """What a law is given beside its case.

    Args:
        candidate: the implementation in question.
        truth: the reference.
        device: where tensors lie.
    """

    candidate: Candidate
    truth: Implementation
    device: torch.device


@dataclass(frozen=True)
class Law:
    """One sentence, and how it is tried.

    Args:
        name: the sentence.
        area: what it is about: the laws of one file.
        needs: operations that the candidate must have.
        cases: what it is tried on.
        body: called with a Setting and a case; raises where the law is broken.
    """

    name: str
    area: str
    needs: tuple[str, ...]
    cases: Cases
    body: Callable[[Setting, Any], None]


LAWS: list[Law] = []
"""Every law, in the order in which the files of laws are imported."""


def law(*needs: str, cases: Cases) -> Callable[[Body], Body]:
    """Return what makes a function a law; its name, read as a sentence, is the law's.

    Args:
        needs: operations that the candidate must have.
        cases: what the law is tried on; `repr` of a case must be Python that makes it again.
    """

    def register(body: Body) -> Body:
        area = body.__module__.rpartition(".")[2].removeprefix("laws_of_")
        sentence = body.__name__.replace("_", " ")
        if any(each.name == sentence for each in LAWS):
            raise ValueError(f"law {sentence!r}: expected one of that name")
        LAWS.append(Law(sentence, area, needs, cases, body))
        return body

    return register

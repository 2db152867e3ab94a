"""Corruption: one violated law, the request concerned, and the tensors that show it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Corruption:
    """A law that a step violates.

    Args:
        law: name of the law.
        found: what was found and what was expected, in one sentence without a final period.
        row: Optional. Row of the batch whose request is concerned. If None, no single one is.
        request_id: Optional. Id of the request, if the engine has named it.
        evidence: tensors and numbers from which the law can be checked again, by name.
    """

    law: str
    found: str
    row: int | None = None
    request_id: Hashable | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> str:
        """The request in words; empty if no single one is concerned."""
        if self.request_id is not None:
            return f"request {self.request_id!r}"
        return "" if self.row is None else f"the request in row {self.row}"


class CorruptionFound(RuntimeError):
    """Ends the engine's step when the recorder is told to stop at a violated law.

    Args:
        sentence: what is wrong, in which step and for which request.
        finding: the violated law.
        path: Optional. The stored case. If None, it could not be stored.
    """

    def __init__(self, sentence: str, finding: Corruption, path: Path | None) -> None:
        super().__init__(sentence)
        self.finding = finding
        self.path = path

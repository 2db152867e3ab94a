"""Reproduction of a stored case: the law is checked again, without the engine that violated it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contract.operations import Implementation, load_implementation
from .case import StoredCase, load_case
from .findings import Corruption
from .laws.bookkeeping import check_step
from .laws.cache import write_again
from .laws.row_case import RowCase
from .laws.selection import recheck

OURS = {
    "optimized": "optimized",
    "TRITON": "optimized",
    "CUSTOM": "optimized",
    "PAGETWIN": "optimized",
}
"""The implementation on which a case of attention is run again, by the stored name."""


@dataclass(frozen=True)
class Reproduced:
    """A stored case, checked again.

    Args:
        case: the case.
        still: the law and the sentence that hold now. None if the stored data violate no law.
        candidate: Optional. What the stored implementation computes for these rows now, in words.
            Empty if it is not run.
        candidate_agrees: Optional. Whether that is within the error budget. None if it is not run.
    """

    case: StoredCase
    still: Corruption | None
    candidate: str = ""
    candidate_agrees: bool | None = None


def reproduce_case(path: Path, device: str | None = None) -> Reproduced:
    """Check a stored case again; see `Reproduced`.

    Args:
        path: a file that the recorder wrote.
        device: Optional. Where attention is computed. If None, "cuda" if there is one, else "cpu".

    Raises:
        FileNotFoundError, ValueError: as in `load_case`.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    case = load_case(path)
    evidence = case.finding.evidence
    kind = evidence.get("kind")
    if kind == "attention":
        return _attention(case, device)
    if kind == "write":
        return Reproduced(case, _write(case))
    if kind == "selection" and case.step is not None:
        return Reproduced(case, recheck(evidence, case.step))
    if kind == "watched":
        same = torch.equal(_bytes(evidence["before"]), _bytes(evidence["now"]))
        return Reproduced(case, None if same else case.finding)
    if kind == "ownership":
        shared = all(evidence["block"] in row for row in evidence["rows"])
        return Reproduced(case, case.finding if shared else None)
    if kind == "block table" and case.step is not None:
        found = case.step.blocks_of(int(case.finding.row or 0)).tolist()
        same = found == evidence["given"][: len(found)]
        return Reproduced(case, None if same else case.finding)
    if kind == "groups" or case.step is None:
        # the addresses of a graph and the other group were compared already
        return Reproduced(case, case.finding)
    return Reproduced(case, check_step(case.step))


def _attention(case: StoredCase, device: str) -> Reproduced:
    reference = load_implementation("reference")
    rows = RowCase.of_dict(case.finding.evidence["rows"], device)
    verdict, _ = rows.judge(reference.paged_attention)
    still = None if verdict.ok else case.finding
    if rows.implementation not in OURS:
        return Reproduced(case, still)
    name = OURS[rows.implementation]
    again = _run(load_implementation(name), rows)
    now, _ = RowCase.of_dict(
        {**case.finding.evidence["rows"], "output": again}, device
    ).judge(reference.paged_attention)
    return Reproduced(case, still, f"{name} on {device} now: {now}", now.ok)


def _run(implementation: Implementation, rows: RowCase) -> Tensor:
    out: Tensor = implementation.paged_attention(**rows.arguments())
    return out


def _write(case: StoredCase) -> Corruption | None:
    evidence = case.finding.evidence
    given, found = evidence["given"], evidence["found"]
    run = load_implementation("reference").reshape_and_cache
    # cases of earlier versions have no format
    name = evidence.get("format")
    expected = write_again(given, found, evidence["scales"], name, run)
    same = all(
        torch.equal(_bytes(found[side]), _bytes(expected[side])) for side in found
    )
    return None if same else case.finding


def _bytes(tensor: Any) -> Tensor:
    result: Tensor = tensor.contiguous().view(torch.uint8)
    return result

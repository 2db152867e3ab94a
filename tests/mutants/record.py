"""Record of the last run: what became of each mutant, and of which code that is true.

Two digests decide whether an entry is current. `digest` is that of the change: the definitions that
the mutant changes, before and after. `code` is that of what decides the result: all code that the
law which killed it reaches on the twin that is changed, so the path through the twin, the
reference, generators, oracles and the harness. An equivalent mutant depends on all laws.
"""

import json
from pathlib import Path
from typing import Any

from .judge import Trial
from .mutant import Mutant
from .reach import reach_digest

REPORT = Path(__file__).parents[1] / "records" / "mutants.json"
LONGEST_CASE = 1000
"""Characters of the longest case that is recorded; a law with a longer one is tried as a whole."""


def entries_of(place: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a record by id; none if it does not exist."""
    if not place.exists():
        return {}
    record = json.loads(place.read_text(encoding="utf-8"))
    return {each["id"]: each for each in record["mutants"]}


def is_current(mutant: Mutant, entry: dict[str, Any] | None) -> bool:
    """Return whether an entry is of this mutant as it is today, and of today's code."""
    return (
        entry is not None
        and is_same_change(mutant, entry)
        and entry["code"] == reach_digest(entry["law"] or "", mutant.twin)
    )


def is_same_change(mutant: Mutant, entry: dict[str, Any]) -> bool:
    """Return whether an entry is of the same change, with the same reason if it has one."""
    return bool(
        entry["digest"] == mutant.digest and entry["reason"] == mutant.equivalent
    )


def make_entry(mutant: Mutant, trial: Trial) -> dict[str, Any]:
    """Return the entry of a mutant that was tried."""
    law = trial.broken[0] if trial.broken else None
    case = trial.cases[0] if trial.cases else ""
    return {
        "id": mutant.id,
        "digest": mutant.digest,
        "code": reach_digest(law or "", mutant.twin),
        "bug": mutant.origin,
        "operator": mutant.operator,
        "ended": "killed" if law else "equivalent" if mutant.equivalent else "alive",
        "reason": mutant.equivalent,
        "law": law,
        "case": case if len(case) <= LONGEST_CASE else "",
        "how": trial.how,
        "what": trial.what[:160],
        "seconds": round(trial.seconds, 2),
    }


def unexpected(report: dict[str, Any]) -> list[str]:
    """Return the mutants that did not end as declared, and laws that an unchanged twin broke."""
    return report["laws broken by the unchanged twins"] + [
        each["id"]
        for each in report["mutants"]
        if each["ended"] == "alive" or (each["ended"] == "killed" and each["reason"])
    ]

"""Try mutants on the conformance suite, and record which law finds each one.

    make mutants                                         # those whose entry is out of date
    PYTHONPATH=tests python -m mutants.run --all         # every one
    PYTHONPATH=tests python -m mutants.run slot merge    # those with such words in their names

An entry of the record is out of date when the function that is changed is another one, or when the
laws, their generators or oracles are. Prose does not count.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# before torch and triton: a mutant writes where it likes, and must not do so on a GPU
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# a process is forked for each mutant, and threads do not survive that
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import torch
from pagetwin.conformance.harness.law import Law
from pagetwin.conformance.laws.all_laws import ALL_LAWS

from .digest import suite_digest
from .judge import Trial, judge, laws_near
from .mutant import CATALOGUE, OPERATORS, TWINS, Mutant, load_catalogue

REPORT = Path(__file__).parents[1] / "records" / "mutants.json"
EXAMPLES = 25


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if every mutant ended as declared."""
    parser = argparse.ArgumentParser(description="Try mutants on the conformance suite")
    parser.add_argument("words", nargs="*", help="words of the mutants' names")
    parser.add_argument("--all", action="store_true", help="try every mutant again")
    parser.add_argument("--catalogue", type=Path, help="folder of other mutants")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--report", type=Path, help="where the report goes")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try only those laws on the unchanged twins that killed a mutant",
    )
    given = parser.parse_args(arguments)
    catalogue = load_catalogue(given.catalogue or CATALOGUE)
    chosen = [
        mutant
        for mutant in catalogue
        if not given.words or any(word in mutant.id for word in given.words)
    ]
    place = given.report
    is_full = not (given.words or given.quick or given.catalogue)
    kept: dict[str, dict[str, Any]] = {}
    if is_full:
        place = place or REPORT
        kept = {} if given.all else up_to_date(place)
        # those that took longest in the last run come first, so that none is left alone at the end
        last = seconds_of_last_run(place)
        chosen = sorted(
            (each for each in chosen if each.id not in kept),
            key=lambda each: -last.get(each.id, 0.0),
        )
        if not chosen and len(kept) == len(catalogue):
            print(f"{place} is up to date; --all tries every mutant again")
            return 0
    report = run(chosen, given.workers, given.examples, not given.quick)
    if is_full:
        tried = kept | {each["id"]: each for each in report["mutants"]}
        report["mutants"] = [tried[each.id] for each in catalogue]
        report["operators"] = _meanings(catalogue)
    if place is not None:
        place.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(report)))
    return 0 if not unexpected(report) else 1


def up_to_date(place: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a record that are of today's laws and of today's catalogue, by id."""
    if not place.exists():
        return {}
    record: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    if record.get("suite") != suite_digest():
        return {}
    held = {each["id"]: each for each in record["mutants"]}
    return {
        mutant.id: held[mutant.id]
        for mutant in load_catalogue()
        if is_current(mutant, held.get(mutant.id))
    }


def seconds_of_last_run(place: Path) -> dict[str, float]:
    """Return how long each mutant of a record took, by id."""
    if not place.exists():
        return {}
    record = json.loads(place.read_text(encoding="utf-8"))
    return {each["id"]: each["seconds"] for each in record["mutants"]}


def is_current(mutant: Mutant, entry: dict[str, Any] | None) -> bool:
    """Return whether an entry of the record is of this mutant, as it is today."""
    return (
        entry is not None
        and entry["digest"] == mutant.digest
        and entry["reason"] == mutant.equivalent
    )


def run(
    mutants: Sequence[Mutant], workers: int, examples: int, all_laws_first: bool = True
) -> dict[str, Any]:
    """Return the report on some mutants.

    Args:
        mutants: what to try.
        workers: processes at a time.
        examples: drawn cases of a law.
        all_laws_first: whether every law is tried on the unchanged twins first, and those
            that break are left out; else those that killed are tried afterwards.
    """
    begin = time.monotonic()
    torch.set_num_threads(1)
    for twin in TWINS:  # once, before processes are forked
        importlib.import_module(f"pagetwin.{twin}.backends.backend")
    broken: set[str] = set()
    usual: dict[str, float] = {}

    def try_unchanged(laws: Sequence[Law]) -> None:
        # as many parts as there are workers
        parts = [
            Trial(twin, laws[part::workers])
            for twin in reversed(TWINS)
            for part in range(min(workers, len(laws)))
        ]
        for trial in judge(parts, workers, examples):
            say(f"unchanged {trial.twin}: {_ended(trial)}", trial.seconds)
            broken.update(trial.broken)
            for law, seconds in trial.seconds_of.items():
                usual[law] = max(seconds, usual.get(law, 0.0))

    if all_laws_first:
        try_unchanged(ALL_LAWS)
    asked = [law for law in ALL_LAWS if law.name not in broken]
    waiting = [
        Trial(mutant.twin, laws_near(mutant, asked, usual), mutant)
        for mutant in mutants
    ]
    trials: dict[str, Trial] = {}
    for trial in judge(waiting, workers, examples, usual or None):
        assert trial.mutant is not None
        trials[trial.mutant.id] = trial
        say(f"{trial.mutant.id}: {_ended(trial)}", trial.seconds)
    if not all_laws_first:
        killers = {law for trial in trials.values() for law in trial.broken}
        try_unchanged([law for law in ALL_LAWS if law.name in killers])
    return {
        "examples": examples,
        "suite": suite_digest(),
        "laws": len(ALL_LAWS),
        "seconds": round(time.monotonic() - begin),
        "operators": _meanings(mutants),
        "laws broken by the unchanged twins": sorted(broken),
        "mutants": [_entry(mutant, trials[mutant.id]) for mutant in mutants],
    }


def _meanings(mutants: Sequence[Mutant]) -> dict[str, str]:
    """Return the operators of some mutants, with their meanings."""
    used = {mutant.operator for mutant in mutants}
    return {name: meaning for name, meaning in OPERATORS.items() if name in used}


def _entry(mutant: Mutant, trial: Trial) -> dict[str, Any]:
    ended = "killed" if trial.broken else "equivalent" if mutant.equivalent else "alive"
    return {
        "id": mutant.id,
        "digest": mutant.digest,
        "bug": mutant.origin,
        "operator": mutant.operator,
        "ended": ended,
        "reason": mutant.equivalent,
        "law": trial.broken[0] if trial.broken else None,
        "how": trial.how,
        "what": trial.what[:160],
        "seconds": round(trial.seconds, 2),
    }


def unexpected(report: dict[str, Any]) -> list[str]:
    """Return the mutants that did not end as declared, and laws that judge nobody."""
    return report["laws broken by the unchanged twins"] + [
        each["id"]
        for each in report["mutants"]
        if each["ended"] == "alive" or (each["ended"] == "killed" and each["reason"])
    ]


def summary(report: dict[str, Any]) -> list[str]:
    """Return what a run found, line by line."""
    mutants = report["mutants"]
    counts = Counter(each["ended"] for each in mutants)
    lines = ["", "operator            killed  alive  equivalent"]
    for operator in OPERATORS:
        own = Counter(each["ended"] for each in mutants if each["operator"] == operator)
        if own:
            lines.append(
                f"{operator:<18}{own['killed']:>8}{own['alive']:>7}{own['equivalent']:>12}"
            )
    laws = Counter(each["law"] for each in mutants if each["law"])
    lines += ["", "killed  by the law that"]
    lines += [f"{count:>6}  {law}" for law, count in laws.most_common()]
    for each in mutants:
        if each["ended"] == "killed" and each["reason"]:
            lines.append(f"killed, though declared equivalent: {each['id']}")
        elif each["ended"] == "alive":
            lines.append(f"alive: {each['id']} ({each['bug']})")
    for law in report["laws broken by the unchanged twins"]:
        lines.append(f"broken by an unchanged twin, so left out: {law}")
    taken = sorted(each["seconds"] for each in mutants) or [0.0]
    lines += [
        "",
        f"{len(mutants)} mutants: {counts['killed']} killed, {counts['alive']} alive,"
        f" {counts['equivalent']} equivalent; {report['laws']} laws, {report['seconds']} s,"
        f" median {taken[len(taken) // 2]:.1f} s a mutant",
    ]
    return lines


def _ended(trial: Trial) -> str:
    if not trial.broken:
        return "every law holds"
    return f"{trial.how} by: {'; '.join(trial.broken)} ({trial.what[:100]})"


def say(line: str, seconds: float) -> None:
    print(f"{seconds:6.1f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

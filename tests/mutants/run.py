"""Try mutants on the conformance suite, and record which law finds each one.

    make mutants                                         # those whose entry is out of date
    PYTHONPATH=tests python -m mutants.run --all         # every one, from scratch
    PYTHONPATH=tests python -m mutants.run slot merge    # those with such words in their names

`record.py` says when an entry of the record is out of date. Prose does not count. The case that
killed a mutant in the last run is tried first, on the unchanged twin and then on the mutant.
"""

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .isolation import isolate

if __name__ == "__main__":
    isolate()

import torch
from pagetwin.conformance.laws.all_laws import ALL_LAWS

from .judge import Trial, judge
from .mutant import CATALOGUE, OPERATORS, TWINS, Mutant, load_catalogue
from .nearness import laws_near
from .record import (
    REPORT,
    entries_of,
    is_current,
    is_same_change,
    make_entry,
    unexpected,
)

EXAMPLES = 25
LAWS = {law.name: law for law in ALL_LAWS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if every mutant ended as declared."""
    parser = argparse.ArgumentParser(description="Try mutants on the conformance suite")
    parser.add_argument("words", nargs="*", help="words of the mutants' names")
    parser.add_argument(
        "--all",
        action="store_true",
        help="try every mutant from scratch, and all laws on the unchanged twins",
    )
    parser.add_argument("--catalogue", type=Path, help="folder of other mutants")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--report", type=Path, help="where the report goes")
    given = parser.parse_args(arguments)
    catalogue = load_catalogue(given.catalogue or CATALOGUE)
    chosen = [
        mutant
        for mutant in catalogue
        if not given.words or any(word in mutant.id for word in given.words)
    ]
    place = given.report
    is_full = not (given.words or given.catalogue)
    if is_full:
        place = place or REPORT
    known = entries_of(place if place is not None and place.exists() else REPORT)
    kept: dict[str, dict[str, Any]] = {}
    if is_full and not given.all:
        kept = {
            each.id: known[each.id]
            for each in catalogue
            if is_current(each, known.get(each.id))
        }
        if len(kept) == len(catalogue):
            print(f"{place} is up to date; --all tries every mutant from scratch")
            return 0
    # those that took longest in the last run come first, so that none is left alone at the end
    chosen = sorted(
        (each for each in chosen if each.id not in kept),
        key=lambda each: -known.get(each.id, {}).get("seconds", 0.0),
    )
    print(f"{len(chosen)} of {len(catalogue)} mutants are tried", flush=True)
    report = run(chosen, {} if given.all else known, given, given.all)
    if is_full:
        tried = kept | {each["id"]: each for each in report["mutants"]}
        report["mutants"] = [tried[each.id] for each in catalogue]
        report["operators"] = _meanings(catalogue)
    if place is not None:
        place.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(report)))
    return 0 if not unexpected(report) else 1


def run(
    mutants: Sequence[Mutant],
    known: Mapping[str, dict[str, Any]],
    given: argparse.Namespace,
    all_laws_first: bool = False,
) -> dict[str, Any]:
    """Return the report on some mutants.

    Every case that kills a mutant is tried on the unchanged twin too, which has to be right.

    Args:
        mutants: what to try.
        known: entries of an earlier run, by id: the case that killed a mutant is tried first.
        given: the options `workers`, processes at a time, and `examples`, drawn cases of a law.
        all_laws_first: whether every law is tried on the unchanged twins first, and those
            that break are left out.
    """
    begin = time.monotonic()
    torch.set_num_threads(1)
    for twin in TWINS:  # once, before processes are forked
        importlib.import_module(f"pagetwin.{twin}.backends.backend")
    usual: dict[str, float] = {}
    broken: set[str] = set()
    right: set[Kill] = set()
    if all_laws_first:
        broken = _break_unchanged(given, usual)
    else:
        cases = {_kill(each, known) for each in mutants}
        right = _hold_unchanged({each for each in cases if each.case}, given)
    asked = [law for law in ALL_LAWS if law.name not in broken]
    waiting = []
    for mutant in mutants:
        entry = known.get(mutant.id)
        kill = _kill(mutant, known)
        first = kill.law or mutant.ask_first
        waiting.append(
            Trial(
                mutant.twin,
                laws_near(mutant, asked, usual, first),
                mutant,
                replays=[(LAWS[kill.law], kill.case)] if kill in right else [],
                first=first,
                # all cases were tried when its reason was given
                is_short=bool(
                    entry and mutant.equivalent and is_same_change(mutant, entry)
                ),
            )
        )
    trials: dict[str, Trial] = {}
    for trial in judge(waiting, given.workers, given.examples, usual):
        assert trial.mutant is not None
        trials[trial.mutant.id] = trial
        say(f"{trial.mutant.id}: {_ended(trial)}", trial.seconds)
    entries = [make_entry(each, trials[each.id]) for each in mutants]
    if not all_laws_first:
        by_id = {each["id"]: each for each in entries}
        new = {_kill(each, by_id) for each in mutants} - right
        broken = {each.law for each in new - _hold_unchanged(new, given) if each.law}
    return {
        "examples": given.examples,
        "laws": len(ALL_LAWS),
        "seconds": round(time.monotonic() - begin),
        "operators": _meanings(mutants),
        "laws broken by the unchanged twins": sorted(broken),
        "mutants": entries,
    }


class Kill(NamedTuple):
    """A law and the case on which it found a mutant of a twin; no case: all of them."""

    twin: str
    law: str
    case: str


def _kill(mutant: Mutant, entries: Mapping[str, dict[str, Any]]) -> Kill:
    """Return what killed a mutant in some run; without a law if nothing did."""
    entry = entries.get(mutant.id, {})
    law = entry.get("law") or ""
    return Kill(mutant.twin, *((law, entry["case"]) if law in LAWS else ("", "")))


def _hold_unchanged(kills: set[Kill], given: argparse.Namespace) -> set[Kill]:
    """Return those laws and cases on which the unchanged twin is right."""
    todo = sorted(each for each in kills if each.law)
    trials = [
        Trial(
            twin,
            [LAWS[each.law] for each in part if not each.case],
            replays=[(LAWS[each.law], each.case) for each in part if each.case],
        )
        for twin in reversed(TWINS)
        for start in range(given.workers)
        for part in [
            [each for each in todo if each.twin == twin][start :: given.workers]
        ]
    ]
    wrong: set[Kill] = set()
    for trial in judge(trials, given.workers, given.examples, {}):
        wrong |= {
            each
            for law, case in zip(trial.broken, trial.cases, strict=True)
            for each in todo
            if each[:2] == (trial.twin, law) and each.case in ("", case)
        }
        count = len(trial.laws) + len(trial.replays)
        say(f"unchanged {trial.twin}, {count} cases: {_ended(trial)}", trial.seconds)
    return set(todo) - wrong


def _break_unchanged(given: argparse.Namespace, usual: dict[str, float]) -> set[str]:
    """Return the laws that an unchanged twin breaks, and put into `usual` what each law takes."""
    trials = [
        Trial(twin, ALL_LAWS[part :: given.workers])
        for twin in reversed(TWINS)
        for part in range(given.workers)
    ]
    broken: set[str] = set()
    for trial in judge(trials, given.workers, given.examples):
        say(f"unchanged {trial.twin}: {_ended(trial)}", trial.seconds)
        broken.update(trial.broken)
        for law, seconds in trial.seconds_of.items():
            usual[law] = max(seconds, usual.get(law, 0.0))
    return broken


def _meanings(mutants: Sequence[Mutant]) -> dict[str, str]:
    """Return the operators of some mutants, with their meanings."""
    used = {mutant.operator for mutant in mutants}
    return {name: meaning for name, meaning in OPERATORS.items() if name in used}


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

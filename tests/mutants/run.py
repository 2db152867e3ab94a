"""Try mutants on the conformance suite, and record which law finds each one.

    make mutants                                         # those whose entry is out of date
    PYTHONPATH=tests python -m mutants.run --all         # every one, from scratch
    PYTHONPATH=tests python -m mutants.run slot merge    # those with such words in their ids

`record.py` says when an entry of the record is out of date. The law that killed a mutant in the
last run is tried first. Every law that kills a mutant has to hold on the unchanged twin.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .isolation import isolate

if __name__ == "__main__":
    isolate()

import torch
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law

from .judge import OUTCOME_OF, Trial, judge
from .mutant import CATALOGUE, OPERATORS, TWINS, Mutant, load_catalogue
from .nearness import laws_near
from .record import (
    CATALOGUE_RECORD,
    Entry,
    ends_well,
    is_current,
    make_entry,
    read_record,
    summary,
    write_record,
)

EXAMPLES = 25
LAWS = {law.name: law for law in ALL_LAWS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if every mutant ended as declared."""
    parser = argparse.ArgumentParser(description="Try mutants on the conformance suite")
    parser.add_argument("words", nargs="*", help="words of the mutants' ids")
    parser.add_argument(
        "--all",
        action="store_true",
        help="try mutants from scratch, and all laws on the unchanged twins",
    )
    parser.add_argument("--catalogue", type=Path, help="folder of other mutants")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--record", type=Path, help="where the record goes")
    given = parser.parse_args(arguments)
    catalogue = load_catalogue(given.catalogue or CATALOGUE)
    place = given.record or (None if given.catalogue else CATALOGUE_RECORD)
    known = read_record(place) if place is not None else {}
    hints = {} if given.all else read_record(CATALOGUE_RECORD) | known
    chosen = [
        mutant
        for mutant in catalogue
        if (
            any(word in mutant.id for word in given.words)
            if given.words
            else given.all or not is_current(mutant, known.get(mutant.id))
        )
    ]
    print(f"{len(chosen)} of {len(catalogue)} mutants are tried", flush=True)
    found, broken = run(chosen, hints, given)
    entries = {name: entry for name, entry in found.items() if entry.by not in broken}
    if place is not None:
        void = found.keys() - entries.keys()
        kept = {name: entry for name, entry in known.items() if name not in void}
        write_record(place, catalogue, kept | entries)
    operator_of = {mutant.id: mutant.operator for mutant in chosen}
    print("\n".join(summary(OPERATORS, operator_of, [*found.values()])))
    wrong = [mutant for mutant in chosen if not ends_well(mutant, found[mutant.id])]
    for mutant in wrong:
        if mutant.equivalent:
            print(f"killed, though declared equivalent: {mutant.id}")
    for law in sorted(broken):
        print(f"broken by an unchanged twin, so it kills nothing: {law}")
    return int(bool(wrong or broken))


def run(
    mutants: Sequence[Mutant], known: Mapping[str, Entry], given: argparse.Namespace
) -> tuple[dict[str, Entry], set[str]]:
    """Return the entries of mutants by id, and the laws that an unchanged twin breaks.

    Args:
        mutants: What to try.
        known: Entries of an earlier run, by id: the law that killed a mutant is tried first.
        given: The options `workers`, processes at a time, and `examples`, drawn cases of a law.
            With `all`, every law is tried on the unchanged twins first, and those that break are
            left out. Otherwise the laws that killed a mutant are tried afterwards.
    """
    torch.set_num_threads(1)
    for twin in TWINS:  # once, before processes are forked
        importlib.import_module(f"pagetwin.{twin}.backends.backend")
    usual: dict[str, float] = {}
    broken: set[str] = set()
    if given.all:
        broken = _break_unchanged({twin: ALL_LAWS for twin in TWINS}, given, usual)
    asked = [law for law in ALL_LAWS if law.name not in broken]
    waiting = []
    for mutant in mutants:
        by = known[mutant.id].by if mutant.id in known else ""
        first = by if by in LAWS else mutant.ask_first
        near = laws_near(mutant, asked, usual, first)
        waiting.append(Trial(mutant.twin, near, mutant, first=first))
    found: dict[str, Entry] = {}
    killers: dict[str, set[str]] = {twin: set() for twin in TWINS}
    for trial in judge(waiting, given.workers, given.examples, usual):
        assert trial.mutant is not None
        law = trial.broken[0] if trial.broken else ""
        found[trial.mutant.id] = make_entry(trial.mutant, OUTCOME_OF[trial.how], law)
        killers[trial.twin] |= {law} - {""}
        say(f"{trial.mutant.id}: {_ended(trial)}", trial.seconds)
    if not given.all:
        tried = {twin: [LAWS[name] for name in sorted(killers[twin])] for twin in TWINS}
        broken = _break_unchanged(tried, given, usual)
    return found, broken


def _break_unchanged(
    laws: Mapping[str, Sequence[Law]],
    given: argparse.Namespace,
    usual: dict[str, float],
) -> set[str]:
    """Return the laws that an unchanged twin breaks, and put into `usual` what each law takes.

    Args:
        laws: The laws to try on each twin, by its name.
        given: As for `run`.
        usual: Seconds by law, modified in place.
    """
    parts = [
        Trial(twin, laws[twin][part :: given.workers])
        for twin in reversed(TWINS)
        for part in range(given.workers)
    ]
    broken: set[str] = set()
    for trial in judge(
        [part for part in parts if part.laws], given.workers, given.examples
    ):
        count = len(trial.laws)
        say(f"unchanged {trial.twin}, {count} laws: {_ended(trial)}", trial.seconds)
        broken.update(trial.broken)
        for law, seconds in trial.seconds_of.items():
            usual[law] = max(seconds, usual.get(law, 0.0))
    return broken


def _ended(trial: Trial) -> str:
    if not trial.broken:
        return "every law holds"
    return f"{trial.how} by: {'; '.join(trial.broken)} ({trial.what[:100]})"


def say(line: str, seconds: float) -> None:
    print(f"{seconds:6.1f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

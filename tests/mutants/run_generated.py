"""Try generated mutants on the conformance suite, and record what became of each one.

    make mutants-generated ARGUMENTS="--sample 300 --seed 0"    # what the record lacks of a sample
    make mutants-generated ARGUMENTS="--all --workers 16"       # all of them
    PYTHONPATH=tests python -m mutants.run_generated stream_k   # those with such words in their ids

A larger sample of the same seed contains the smaller one, and an entry of the record is kept while
the function that is changed and the suite are the same. Killed is a mutant that a law notices.
Equivalent is one whose reason stands in generated_equivalent.toml. All others have survived.
"""

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .isolation import isolate

if __name__ == "__main__":
    isolate()

import torch
from pagetwin.conformance.harness.law import Law
from pagetwin.conformance.laws.all_laws import ALL_LAWS

from .digest import suite_digest
from .generate import OPERATORS, Generated, generate, read_reasons, sample
from .judge import Trial, judge
from .nearness import laws_near
from .record import REPORT as CATALOGUE_REPORT
from .record import entries_of
from .run import EXAMPLES, say

REPORT = CATALOGUE_REPORT.with_name("mutants-generated.json")
REASONS = Path(__file__).parent / "generated_equivalent.toml"
SECONDS = 120.0
"""What one mutant may take; the laws that are left then are not tried."""
USUAL = dict.fromkeys((law.name for law in ALL_LAWS), 15.0)
"""What a law takes at most on the unchanged twin; one that takes much longer hangs."""
FEW_KILLERS = 12
"""Laws that killed a mutant of the same file, which are tried before the others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if no mutant survived that is not explained."""
    parser = argparse.ArgumentParser(description="Try generated mutants")
    parser.add_argument("words", nargs="*", help="words of the mutants' ids")
    parser.add_argument("--sample", type=int, default=300, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--all", action="store_true", help="all mutants, not a sample")
    parser.add_argument("--again", action="store_true", help="also those of the record")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="per mutant")
    parser.add_argument("--minutes", type=float, help="start no mutant after them")
    parser.add_argument("--report", type=Path, default=REPORT)
    given = parser.parse_args(arguments)
    mutants = generate(reasons=read_reasons(REASONS))
    chosen = mutants if given.all else sample(mutants, given.sample, given.seed)
    if given.words:
        chosen = [
            each for each in mutants if any(word in each.id for word in given.words)
        ]
    known = entries_of(given.report)
    if not given.again:
        chosen = [each for each in chosen if not is_current(each, known.get(each.id))]

    def save(tries_killers: bool) -> dict[str, Any]:
        record = make_record(mutants, known, tries_killers)
        given.report.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return record

    run(chosen, known, given, lambda: save(False))
    record = save(given.minutes is None)
    print("\n".join(summary(record)))
    is_bad = record["laws broken by the unchanged twin"] or any(
        each["ended"] == "survived" for each in record["mutants"]
    )
    return int(bool(is_bad))


def is_current(mutant: Generated, entry: dict[str, Any] | None) -> bool:
    """Return whether an entry of the record is of this mutant, and of today's laws if it survived.

    A law that killed a mutant still kills it when other laws are added or changed; a law that is
    weakened shows in the catalogue, whose record is of today's laws.
    """
    if entry is None or entry["digest"] != mutant.digest:
        return False
    if entry["ended"] == "killed":
        return not mutant.equivalent
    return bool(mutant.equivalent) or entry["suite"] == suite_digest()


def run(
    mutants: Sequence[Generated],
    known: dict[str, dict[str, Any]],
    given: argparse.Namespace,
    save: Callable[[], Any],
) -> None:
    """Try mutants, put what became of them into `known`, and save it from batch to batch."""
    torch.set_num_threads(1)
    importlib.import_module("pagetwin.optimized.backends.backend")
    begin = time.monotonic()
    limit = (given.minutes or 1e9) * 60
    waiting = list(mutants)
    while waiting and time.monotonic() - begin < limit:
        # what killed before is learnt from batch to batch
        batch, waiting = waiting[: 8 * given.workers], waiting[8 * given.workers :]
        trials = [
            Trial("optimized", _laws(each, known), each, limit=given.seconds)
            for each in batch
        ]
        for trial in judge(trials, given.workers, given.examples, USUAL):
            assert isinstance(trial.mutant, Generated)
            entry = _entry(trial.mutant, trial)
            known[entry["id"]] = entry
            say(f"{entry['id']}: {entry['ended']} by {entry['law']}", trial.seconds)
            if entry["ended"] == "survived":
                print(f"          {entry['change']}", flush=True)
        save()
    print(f"{len(waiting)} mutants are left", flush=True)


def _laws(mutant: Generated, known: dict[str, dict[str, Any]]) -> list[Law]:
    """Return the laws that can notice a mutant; what killed others of its file comes first."""
    module = mutant.file.removesuffix(".py") + "/"
    killers = Counter(
        each["law"]
        for record in (entries_of(CATALOGUE_REPORT), known)
        for each in record.values()
        if each["law"] and each["id"].startswith(module)
    )
    first = [law for law, _ in killers.most_common(FEW_KILLERS)]
    near = laws_near(mutant, ALL_LAWS, {})
    order = {law: place for place, law in enumerate(first)}
    return sorted(near, key=lambda law: order.get(law.name, len(first)))


def _entry(mutant: Generated, trial: Trial) -> dict[str, Any]:
    ended = (
        "killed" if trial.broken else "equivalent" if mutant.equivalent else "survived"
    )
    return {
        "id": mutant.id,
        "change": mutant.change,
        "digest": mutant.digest,
        "suite": suite_digest(),
        "operator": mutant.operator,
        "ended": ended,
        "reason": mutant.equivalent,
        "law": trial.broken[0] if trial.broken else None,
        "how": trial.how or ("cut" if trial.is_cut else ""),
        "what": trial.what[:160],
        "laws": f"{len(trial.seconds_of)} of {len(trial.laws)} on all cases",
        "seconds": round(trial.seconds, 2),
    }


def make_record(
    mutants: Sequence[Generated],
    known: dict[str, dict[str, Any]],
    tries_killers: bool = True,
) -> dict[str, Any]:
    """Return the record of all mutants that were tried and still exist.

    Args:
        mutants: All generated mutants.
        known: Entries by id.
        tries_killers: Whether the laws that killed a mutant are tried on the unchanged twin.
    """
    by_id = {each.id: each for each in mutants}
    held = []
    for name, entry in known.items():
        if name in by_id and entry["digest"] == by_id[name].digest:
            reason = by_id[name].equivalent
            if entry["ended"] != "killed":
                entry |= {
                    "ended": "equivalent" if reason else "survived",
                    "reason": reason,
                }
            held.append(entry)
    killers = {each["law"] for each in held if each["law"]}
    laws = [law for law in ALL_LAWS if tries_killers and law.name in killers]
    broken: set[str] = set()
    for trial in judge([Trial("optimized", laws)], 1, EXAMPLES) if laws else ():
        broken.update(trial.broken)
    return {
        "generated": len(mutants),
        "operators": OPERATORS,
        "laws broken by the unchanged twin": sorted(broken),
        "mutants": sorted(held, key=lambda each: each["id"]),
    }


def summary(record: dict[str, Any]) -> list[str]:
    """Return what the record holds, line by line."""
    mutants = record["mutants"]
    lines = ["", "operator         killed  survived  equivalent"]
    for operator in OPERATORS:
        own = Counter(each["ended"] for each in mutants if each["operator"] == operator)
        if own:
            lines.append(
                f"{operator:<15}{own['killed']:>8}{own['survived']:>10}{own['equivalent']:>12}"
            )
    for each in mutants:
        if each["ended"] == "survived":
            lines.append(f"survived: {each['id']}: {each['change']} ({each['laws']})")
    counts = Counter(each["ended"] for each in mutants)
    lines += [
        "",
        f"{len(mutants)} of {record['generated']} mutants: {counts['killed']} killed,"
        f" {counts['survived']} survived, {counts['equivalent']} equivalent",
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())

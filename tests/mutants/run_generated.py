"""Try generated mutants on the conformance suite, and record what became of each one.

    make mutants-generated ARGUMENTS="--sample 300 --seed 0"    # what the record lacks of a sample
    make mutants-generated ARGUMENTS="--all --workers 16"       # all of them
    PYTHONPATH=tests python -m mutants.run_generated stream_k   # those with such words in their ids

A larger sample of the same seed contains the smaller one. An entry of the record is kept while the
function that is changed is the same. Killed is a mutant that a law notices. Equivalent is one whose
reason is in generated_equivalent.toml. All others are alive, and the next run tries them again.
"""

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from .isolation import isolate

if __name__ == "__main__":
    isolate()

import torch
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law

from .generate import OPERATORS, Generated, generate, read_reasons, sample
from .judge import OUTCOME_OF, Trial, judge
from .nearness import laws_near
from .record import (
    CATALOGUE_RECORD,
    GENERATED_RECORD,
    Entry,
    is_current,
    make_entry,
    read_record,
    summary,
    write_todays,
)
from .run import EXAMPLES, say

REASONS = Path(__file__).parent / "generated_equivalent.toml"
SECONDS = 120.0
"""What one mutant may take; the laws that are left then are not tried."""
USUAL = dict.fromkeys((law.name for law in ALL_LAWS), 15.0)
"""What a law takes at most on the unchanged twin; one that takes much longer hangs."""
FEW_KILLERS = 12
"""Laws that killed a mutant of the same file, which are tried before the others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if no mutant is alive that is not explained."""
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
    parser.add_argument("--record", type=Path, default=GENERATED_RECORD)
    given = parser.parse_args(arguments)
    mutants = generate(reasons=read_reasons(REASONS))
    chosen = mutants if given.all else sample(mutants, given.sample, given.seed)
    if given.words:
        chosen = [
            mutant
            for mutant in mutants
            if any(word in mutant.id for word in given.words)
        ]
    known = read_record(given.record)
    if not given.again:
        chosen = [
            mutant for mutant in chosen if not is_current(mutant, known.get(mutant.id))
        ]
    run(chosen, known, given, lambda: write_todays(given.record, mutants, known))
    broken = _break_unchanged(known) if chosen and given.minutes is None else set()
    held = {name: entry for name, entry in known.items() if entry.by not in broken}
    write_todays(given.record, mutants, held)
    entries = [*read_record(given.record).values()]
    operator_of = {mutant.id: mutant.operator for mutant in mutants}
    print("\n".join(summary(OPERATORS, operator_of, entries)))
    for law in sorted(broken):
        print(f"broken by the unchanged twin, so it kills nothing: {law}")
    return int(bool(broken) or any(entry.how == "alive" for entry in entries))


def run(
    mutants: Sequence[Generated],
    known: dict[str, Entry],
    given: argparse.Namespace,
    save: Callable[[], None],
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
            Trial("optimized", _laws(mutant, known), mutant, limit=given.seconds)
            for mutant in batch
        ]
        for trial in judge(trials, given.workers, given.examples, USUAL):
            assert isinstance(trial.mutant, Generated)
            law = trial.broken[0] if trial.broken else ""
            entry = make_entry(trial.mutant, OUTCOME_OF[trial.how], law)
            known[entry.id] = entry
            say(f"{entry.id}: {entry.how} {law}", trial.seconds)
            if entry.how == "alive":
                count = f"{len(trial.seconds_of)} of {len(trial.laws)} laws hold"
                print(f"          {trial.mutant.change}; {count}", flush=True)
        save()
    print(f"{len(waiting)} mutants are left", flush=True)


def _laws(mutant: Generated, known: dict[str, Entry]) -> list[Law]:
    """Return the laws that can notice a mutant; what killed others of its file comes first."""
    module = mutant.file.removesuffix(".py") + "/"
    killers = Counter(
        entry.by
        for record in (read_record(CATALOGUE_RECORD), known)
        for entry in record.values()
        if entry.by and entry.id.startswith(module)
    )
    first = [law for law, _ in killers.most_common(FEW_KILLERS)]
    near = laws_near(mutant, ALL_LAWS, {})
    order = {law: place for place, law in enumerate(first)}
    return sorted(near, key=lambda law: order.get(law.name, len(first)))


def _break_unchanged(known: dict[str, Entry]) -> set[str]:
    """Return those laws of some entries that the unchanged twin breaks."""
    killers = {entry.by for entry in known.values()}
    laws = [law for law in ALL_LAWS if law.name in killers]
    trials = judge([Trial("optimized", laws)], 1, EXAMPLES) if laws else ()
    return {law for trial in trials for law in trial.broken}


if __name__ == "__main__":
    sys.exit(main())

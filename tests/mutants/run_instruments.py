"""Try mutants of the instruments on the tests, and record which test finds each one.

    make mutants-instruments                                    # those that are out of date
    PYTHONPATH=tests python -m mutants.run_instruments --all    # every one, from scratch
    PYTHONPATH=tests python -m mutants.run_instruments expect   # those with such words in their ids

A mutant is killed if a test fails. The test that killed it in the last run is tried first. Where
that does not find it, all tests of its files are run on the unchanged tree, which notes the
functions that each test calls and how long it takes. Then the tests that call the changed function
are run on the mutant, the shortest first.

A mutant whose tests take too long is tried again when nothing else runs, with four times the time.
It then counts as one that hangs, which is not the same as killed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .isolation import isolate

if __name__ == "__main__":
    isolate()

from .instruments import InstrumentMutant, load_instruments, traced_modules
from .pytest_sessions import Session, preload, run_sessions
from .record import (
    INSTRUMENTS_RECORD,
    Entry,
    is_current,
    make_entry,
    read_record,
    write_record,
)

SECONDS = 40.0
"""Time of a mutant's tests, besides five times what they take on the unchanged tree."""
MOST = 90.0
"""Seconds that the tests of a mutant take together on the unchanged tree, at most."""
PATIENCE = 4.0
"""Factor of the time of a mutant that is tried again alone."""
SECONDS_UNCHANGED = 1800.0
"""Time of the tests on the unchanged tree."""


@dataclass
class Unchanged:
    """What the tests do on the unchanged tree.

    Args:
        seconds: The duration of each test that passes.
        calls: The tests that call each function, by module and function.
        failed: Tests that fail, with a line about each. They find nothing.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, session: Session) -> None:
        """Take over what a session on the unchanged tree has noted."""
        self.failed |= session.failed
        if session.how in ("crashed", "timed out"):
            self.failed[session.running] = session.how
        passed = session.seconds_of.keys() - self.failed.keys()
        self.seconds |= {test: session.seconds_of[test] for test in passed}
        for function, tests in session.calls.items():
            self.calls.setdefault(function, set()).update(tests)

    def tests_of(self, mutant: InstrumentMutant, most: float) -> list[str]:
        """Return the tests that may find a mutant: those that call it first, the shortest first.

        The other tests of its files come after them: what is computed once, such as a list of
        functions, is called by one test alone.

        Args:
            mutant: The mutant.
            most: Seconds that they may take together.
        """
        calling: set[str] = set()
        for (module, function), tests in self.calls.items():
            is_changed = not mutant.functions or function in mutant.functions
            if module == mutant.module and is_changed:
                calling |= tests
        own = [test for test in self.seconds if test.partition("::")[0] in mutant.tests]
        chosen, total = [], 0.0
        for name in sorted(
            own, key=lambda test: (test not in calling, self.seconds[test], test)
        ):
            total += self.seconds[name]
            if chosen and total > most:
                break
            chosen.append(name)
        return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if a test kills every mutant."""
    parser = argparse.ArgumentParser(description="Try mutants of the instruments")
    parser.add_argument("words", nargs="*", help="words of the mutants' ids")
    parser.add_argument("--all", action="store_true", help="try them from scratch")
    parser.add_argument("--workers", type=int, default=2, help="sessions at a time")
    parser.add_argument(
        "--seconds", type=float, default=MOST, help="of a mutant's tests"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=SECONDS,
        help="seconds besides those of the tests",
    )
    parser.add_argument("--catalogue", type=Path, help="folder of other mutants")
    parser.add_argument("--record", type=Path, help="where the record goes")
    given = parser.parse_args(arguments)
    catalogue = load_instruments(*([given.catalogue] if given.catalogue else []))
    place = given.record or (None if given.catalogue else INSTRUMENTS_RECORD)
    known = read_record(place) if place is not None else {}
    chosen = [
        mutant
        for mutant in catalogue
        if (not given.words or any(word in mutant.id for word in given.words))
        and (given.all or not is_current(mutant, known.get(mutant.id)))
    ]
    print(f"{len(chosen)} of {len(catalogue)} mutants are tried", flush=True)
    found = dict(known)
    if chosen:
        preload()
        run = Run(given.workers, given.seconds, given.limit)
        for entry in run.try_mutants(chosen, {} if given.all else known):
            found[entry.id] = entry
            print(f"{entry.id}: {entry.how} {entry.by}", flush=True)
            if place is not None:
                write_record(place, catalogue, found)
    if place is not None:
        write_record(place, catalogue, found)
    tried = [found[mutant.id] for mutant in chosen]
    counts = Counter(entry.how for entry in tried)
    print(", ".join(f"{count} {how}" for how, count in counts.most_common()))
    return 0 if all(entry.is_killed for entry in tried) else 1


@dataclass(frozen=True)
class Run:
    """How mutants are tried.

    Args:
        workers: Sessions at a time.
        most: As in `Unchanged.tests_of`.
        limit: Seconds of a mutant's tests, besides five times what they take on the unchanged tree.
    """

    workers: int
    most: float
    limit: float

    def try_mutants(
        self, mutants: Sequence[InstrumentMutant], known: Mapping[str, Entry]
    ) -> Iterable[Entry]:
        """Yield the entry of each mutant as soon as it is known.

        Args:
            mutants: The mutants.
            known: Entries of an earlier run, by id.
        """
        unchanged = Unchanged()
        killers = {
            mutant.id: known[mutant.id].by for mutant in mutants if mutant.id in known
        }
        killers = {name: test for name, test in killers.items() if test}
        if killers:
            tests = sorted(set(killers.values()))
            parts = [tests[start :: self.workers] for start in range(self.workers)]
            self._try_unchanged(unchanged, [part for part in parts if part], False)
            first = [
                (mutant, [killers[mutant.id]])
                for mutant in mutants
                if killers.get(mutant.id) in unchanged.seconds
            ]
            done = set()
            for entry in self.try_each(first, unchanged):
                if entry.is_killed:
                    done.add(entry.id)
                    yield entry
            mutants = [mutant for mutant in mutants if mutant.id not in done]
        if not mutants:
            return
        unchanged = Unchanged()
        files = sorted({file for mutant in mutants for file in mutant.tests})
        self._try_unchanged(unchanged, [[file] for file in files], True)
        pairs = [(mutant, unchanged.tests_of(mutant, self.most)) for mutant in mutants]
        yield from self.try_each(pairs, unchanged)

    def _try_unchanged(
        self, unchanged: Unchanged, parts: Sequence[Sequence[str]], is_traced: bool
    ) -> None:
        """Run tests on the unchanged tree, and add what they do."""
        modules = traced_modules() if is_traced else []
        sessions = [
            Session(part[0], part, SECONDS_UNCHANGED, None, modules, stops=False)
            for part in parts
        ]
        for session in run_sessions(sessions, self.workers):
            unchanged.add(session)
            count, seconds = len(session.seconds_of), session.seconds
            words = f"{session.name}: {session.how}, {count} tests, {seconds:.0f} s"
            print(f"unchanged, {words}", flush=True)
        for test, line in unchanged.failed.items():
            print(f"fails on the unchanged tree, so finds nothing: {test}: {line}")

    def try_each(
        self,
        pairs: Sequence[tuple[InstrumentMutant, Sequence[str]]],
        unchanged: Unchanged,
    ) -> Iterable[Entry]:
        """Yield the entry of each mutant after some tests. Those that time out are tried again."""
        by_id = {mutant.id: (mutant, tests) for mutant, tests in pairs}
        slow, sessions = [], []
        for mutant, tests in pairs:
            if tests:
                sessions.append(self._session(mutant, tests, unchanged, 1.0))
            else:
                yield make_entry(mutant, "alive")
        for session in run_sessions(sessions, self.workers):
            if session.how == "timed out":
                slow.append(session.name)
                continue
            yield _entry(by_id[session.name][0], session)
        # alone, because other processes may have made it slow
        again = [self._session(*by_id[name], unchanged, PATIENCE) for name in slow]
        for session in run_sessions(again, 1):
            yield _entry(by_id[session.name][0], session)

    def _session(
        self,
        mutant: InstrumentMutant,
        tests: Sequence[str],
        unchanged: Unchanged,
        patience: float,
    ) -> Session:
        usual = sum(unchanged.seconds[test] for test in tests)
        limit = patience * (self.limit + 5 * usual)
        return Session(mutant.id, tests, limit, {mutant.module: mutant.source()})


def _entry(mutant: InstrumentMutant, session: Session) -> Entry:
    """Return the entry of a mutant whose tests have ended."""
    how = {"failed": "killed", "passed": "alive", "timed out": "hangs"}
    test = next(iter(session.failed), "")
    if session.how in ("crashed", "timed out"):
        test = session.running
    return make_entry(mutant, how.get(session.how, "crashes"), test)


if __name__ == "__main__":
    sys.exit(main())

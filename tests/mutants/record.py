"""Records of mutants: how each one ended, one line per mutant, sorted by id.

A line has the id, a digest of the changed function before and after the change, how the mutant
ended, and what found it (a law, a call of a kernel, or a test), with tabs between them. An entry is
out of date if the digest is another one today. Comments, docstrings, formatting and the names of
local variables do not change a digest. Neither does a change of the law or test that found the
mutant: the long tests try a sample of the recorded mutants again, and a run with --all tries every
one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from .digest import MUTANTS

CATALOGUE_RECORD = MUTANTS / "catalogue.txt"
GENERATED_RECORD = MUTANTS / "generated.txt"
HOPPER_RECORD = MUTANTS / "hopper.txt"
INSTRUMENTS_RECORD = MUTANTS / "instruments.txt"
OUTCOMES = ("killed", "crashes", "hangs", "alive", "equivalent")
"""Something found it; its process ended; it does not end, also alone; nothing found it; nothing can
find it, for the reason in the catalogue."""


class Planted(Protocol):
    """What a record needs to know of a mutant."""

    @property
    def id(self) -> str:
        """Where and what goes wrong."""

    @property
    def digest(self) -> str:
        """Digest of the changed functions, before and after the change."""

    @property
    def equivalent(self) -> str:
        """Why no output can show the change; empty if one has to."""


@dataclass(frozen=True)
class Entry:
    """How a mutant ended.

    Args:
        id, digest: As in `Planted`.
        how: One of OUTCOMES.
        by: The law, the call or the test that found it; empty if nothing did.
    """

    id: str
    digest: str
    how: str
    by: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether something found the mutant."""
        return self.how not in ("alive", "equivalent")


def make_entry(mutant: Planted, how: str, by: str = "") -> Entry:
    """Return the entry of a mutant. One that nothing found is equivalent if it has a reason."""
    if how == "alive" and mutant.equivalent:
        how = "equivalent"
    return Entry(mutant.id, mutant.digest, how, by)


def is_current(mutant: Planted, entry: Entry | None) -> bool:
    """Return whether an entry is of this mutant as it is today, and as it has to end."""
    if entry is None or entry.digest != mutant.digest:
        return False
    return ends_well(mutant, entry)


def ends_well(mutant: Planted, entry: Entry) -> bool:
    """Return whether a mutant was found; for one with a reason, whether nothing found it."""
    return entry.how == "equivalent" if mutant.equivalent else entry.is_killed


def read_record(place: Path) -> dict[str, Entry]:
    """Return the entries of a record by id; none if the file does not exist."""
    if not place.exists():
        return {}
    lines = place.read_text(encoding="utf-8").splitlines()
    entries = [Entry(*line.split("\t")) for line in lines]
    return {entry.id: entry for entry in entries}


def write_record(
    place: Path, mutants: Iterable[Planted], entries: Mapping[str, Entry]
) -> None:
    """Write the entries of some mutants, in the order of their ids.

    Args:
        place: The file.
        mutants: The mutants that exist. Entries of others are left out.
        entries: Entries by id.
    """
    names = sorted({mutant.id for mutant in mutants} & entries.keys())
    lines = ["\t".join(astuple(entries[name])).rstrip("\t") + "\n" for name in names]
    place.write_text("".join(lines), encoding="utf-8")


def write_todays(
    place: Path, mutants: Iterable[Planted], entries: Mapping[str, Entry]
) -> None:
    """Write the entries whose mutants exist and change the same functions.

    Whether one that nothing found is equivalent is decided anew, by its reason of today.
    """
    todays = {}
    for mutant in mutants:
        entry = entries.get(mutant.id)
        if entry is not None and entry.digest == mutant.digest:
            is_found = entry.is_killed
            todays[mutant.id] = entry if is_found else make_entry(mutant, "alive")
    write_record(place, mutants, todays)


def summary(
    operators: Mapping[str, str],
    operator_of: Mapping[str, str],
    entries: Sequence[Entry],
) -> list[str]:
    """Return how mutants ended, by operator, line by line.

    Args:
        operators: All operators.
        operator_of: The operator of each mutant, by id.
        entries: What became of the mutants.
    """
    lines = ["", "operator            killed  alive  equivalent"]
    for operator in (*operators, "all"):
        own = [entry for entry in entries if operator in (operator_of[entry.id], "all")]
        if own:
            ends = Counter("killed" if entry.is_killed else entry.how for entry in own)
            lines.append(
                f"{operator:<18}{ends['killed']:>8}{ends['alive']:>7}{ends['equivalent']:>12}"
            )
    return lines + [f"alive: {entry.id}" for entry in entries if entry.how == "alive"]

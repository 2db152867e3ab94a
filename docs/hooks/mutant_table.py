"""Tables of the mutants: which ones are killed, and which law, call or test kills them.

The tables are made from the records beside `tests/mutants/` and from its catalogues.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pagetwin.conformance.laws.all_laws import ALL_LAWS

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from mutants.generate import OPERATORS as CHANGES
from mutants.generate import Generated, generate
from mutants.hopper import folder_of, hopper_mutants
from mutants.mutant import OPERATORS, Mutant, load_catalogue
from mutants.record import (
    CATALOGUE_RECORD,
    GENERATED_RECORD,
    HOPPER_RECORD,
    INSTRUMENTS_RECORD,
    Entry,
    read_record,
)

ENDS = ("killed", "alive", "equivalent")


def mutant_table(part: str) -> str:
    """Return a part of the records.

    Args:
        part: "counts", "operators", "laws", "alive" or "equivalent" of the catalogue; "generated"
            and "hopper" are the tables of `make mutants-generated` and `make mutants-hopper`, and
            "hopper kernels" is that of the latter kernel by kernel; "instruments" is that of
            `make mutants-instruments`.
    """
    parts = {
        "counts": _counts,
        "operators": _operators,
        "laws": _laws,
        "alive": lambda: _named("alive"),
        "equivalent": lambda: _named("equivalent"),
        "generated": lambda: _generated(GENERATED_RECORD, generate()),
        "hopper": lambda: _generated(HOPPER_RECORD, hopper_mutants()),
        "hopper kernels": _kernels,
        "instruments": _instruments,
    }
    if part not in parts:
        raise ValueError(f"part = {part!r}: expected one of {', '.join(parts)}")
    return parts[part]()


def _ends(entries: Sequence[Entry]) -> list[int]:
    """Return how many mutants were killed, are alive, and are equivalent."""
    ends = Counter("killed" if entry.is_killed else entry.how for entry in entries)
    return [ends[end] for end in ENDS]


def _row(title: str, numbers: Sequence[int]) -> str:
    return f"| {title} | {' | '.join(map(str, numbers))} |"


def _todays(mutants: Sequence[Mutant], path: Path) -> dict[str, Entry]:
    """Return the entries of mutants that exist, in the order of the mutants."""
    entries = read_record(path)
    return {mutant.id: entries[mutant.id] for mutant in mutants if mutant.id in entries}


def _instruments() -> str:
    entries = [*read_record(INSTRUMENTS_RECORD).values()]
    files: dict[str, list[Entry]] = {}
    for entry in entries:
        files.setdefault(entry.id.rpartition("/")[0], []).append(entry)
    lines = [
        "| file | mutants | killed | tests that found them |",
        "|---|---:|---:|---:|",
    ]
    for file, own in (*sorted(files.items()), ("all", entries)):
        killed = sum(entry.how == "killed" for entry in own)
        title = f"**{file}**" if file == "all" else f"`{file}.py`"
        lines.append(_row(title, [len(own), killed, len({entry.by for entry in own})]))
    return "\n".join(lines)


def _kernels() -> str:
    mutants = hopper_mutants()
    entries = _todays(mutants, HOPPER_RECORD)
    lines = [
        "| kernels | mutants | tried | killed | alive | equivalent |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for folder in sorted({folder_of(mutant.file) for mutant in mutants}):
        there = [mutant for mutant in mutants if folder_of(mutant.file) == folder]
        own = [entries[mutant.id] for mutant in there if mutant.id in entries]
        lines.append(_row(folder, [len(there), len(own), *_ends(own)]))
    return "\n".join(lines)


def _generated(path: Path, mutants: Sequence[Generated]) -> str:
    entries = _todays(mutants, path)
    lines = ["| change | killed | alive | equivalent |", "|---|---:|---:|---:|"]
    for name, meaning in (*CHANGES.items(), ("all", "")):
        own = [
            entries[mutant.id]
            for mutant in mutants
            if mutant.id in entries and name in (mutant.operator, "all")
        ]
        title = f"{name}: {meaning}" if meaning else f"**{name}**"
        lines.append(_row(title.replace("|", r"\|"), _ends(own)))
    lines += ["", f"These are {len(entries)} of {len(mutants)} mutants."]
    return "\n".join(lines)


def _catalogue() -> tuple[list[Mutant], dict[str, Entry]]:
    mutants = load_catalogue()
    return mutants, _todays(mutants, CATALOGUE_RECORD)


def _counts() -> str:
    mutants, entries = _catalogue()
    packages = Counter(mutant.package for mutant in mutants if mutant.id in entries)
    killed, alive, equivalent = _ends([*entries.values()])
    return (
        f"Of {len(entries)} mutants ({packages['reference']} of the reference and"
        f" {packages['optimized']} of the optimized twin) the suite killed **{killed}**;"
        f" **{alive}** survive; {equivalent} are equivalent. It has {len(ALL_LAWS)} laws."
    )


def _operators() -> str:
    mutants, entries = _catalogue()
    lines = [
        "| change | example | killed | alive | equivalent |",
        "|---|---|---:|---:|---:|",
    ]
    for name, meaning in OPERATORS.items():
        own = [
            mutant
            for mutant in mutants
            if mutant.operator == name and mutant.id in entries
        ]
        instance = next(mutant for mutant in own if not mutant.bug.startswith("cousin"))
        title = f"{name}: {meaning} | {_title(instance)}"
        lines.append(_row(title, _ends([entries[mutant.id] for mutant in own])))
    return "\n".join(lines)


def _laws() -> str:
    _, entries = _catalogue()
    laws = Counter(entry.by for entry in entries.values() if entry.by)
    rows = [_row(law, [count]) for law, count in laws.most_common()]
    return "\n".join(["| law | mutants killed |", "|---|---:|", *rows])


def _named(how: str) -> str:
    mutants, entries = _catalogue()
    lines = []
    for mutant in mutants:
        if mutant.id in entries and entries[mutant.id].how == how:
            reason = f": {mutant.equivalent}" if mutant.equivalent else "."
            place = mutant.id.rpartition("/")[0]
            lines.append(f"- {_title(mutant)}, in `{place}.py`{reason}")
    return "\n".join(lines) or "None."


def _title(mutant: Mutant) -> str:
    words = mutant.id.rpartition("/")[2].replace("-", " ")
    return f"*{words}* ({mutant.origin})"

"""What a tuning run prints, and the file that it writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...contract.tuning_classes import TuningReport
from ..files import write_text

SAME = ("layout", "chip", "versions", "kernels")
"""What two files have in common whose rows belong together."""


def write_tuning(path: Path, report: TuningReport, origin: dict[str, Any]) -> int:
    """Write the file of a report, completely or not at all.

    Rows of other layers that the file has already stay in it, if they were measured on this chip
    with these versions.

    Args:
        origin: Where the times are from: date, driver and commit.

    Returns:
        the number of rows that stayed.
    """
    record = report.record | origin
    kept = [
        row
        for row in _known_rows(path, record)
        if row["key"] not in [new["key"] for new in record["rows"]]
    ]
    record["rows"] = [*record["rows"], *kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")
    return len(kept)


def _known_rows(path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a file that belong with those of a record."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if any(known[name] != record[name] for name in SAME):
            return []
        return [row for row in known["rows"] if "key" in row]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the table of a file's rows."""
    table = Table("choice", "default", "measured", "ratio")
    for row in rows:
        is_changed = row["choice"] != row["default"]
        table.add_row(
            row["name"],
            words_of(row["default"], row["default"]),
            words_of(row["choice"], row["default"]) if is_changed else "the default",
            f"{row['ratio']:.3f}" if is_changed else "1",
        )
    if not console.is_terminal:
        # a file has no width at which a table would have to be wrapped
        width = Console(width=400).measure(table).maximum
        console = Console(width=max(80, width))
    console.print(table)


def words_of(choice: Any, default: Any) -> str:
    """Return a choice in words; of rates those that are not the default."""
    if not isinstance(choice, dict):
        return f"{choice:g}"
    if "block_m" in choice:
        programs = choice["programs"]
        return (
            f"{choice['block_m']} x {choice['block_n']}, {choice['num_warps']} warps,"
            f" {choice['num_stages']} stages"
            + f", {programs} programs"
            * bool(programs)
        )
    changed = [
        f"{name} {value}" for name, value in choice.items() if value != default[name]
    ]
    return "; ".join(changed) or "fitted to an H200"


def lines_of(report: TuningReport) -> Iterator[tuple[str, str]]:
    """Yield what else there is to say, with a colour."""
    rows = report.record["rows"]
    changed = sum(row["choice"] != row["default"] for row in rows)
    skipped = report.skipped
    yield (
        f"{report.tried} candidates timed, {skipped} left out because they do not compile or"
        f" fit the chip; {changed} of {len(rows)} choices are not the default",
        "default",
    )
    for sentence in report.wrong:
        yield f"wrong, and not chosen: {sentence}", "red"

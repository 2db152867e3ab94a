"""Data of the pages: what they show of runs, in docs/data/, and the command that updates it.

    python docs/hooks/page_data.py KIND RECORD... [--commit COMMIT] [--date DATE]

RECORD is what a program has written; `docs/data/README.md` names the kinds and their programs. Of a
record only what a page shows is kept, as one JSON object per line. New lines replace those with the
same key, such as all lines of one adapter, so a file has the newest result of each key. COMMIT and
DATE are needed where the records do not name them.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page_rows
from page_rows import Row, lines_of

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Kind:
    """One file of docs/data/.

    Args:
        take: The function that returns the rows of one record.
        key: The fields of a row that say which earlier rows it replaces.
    """

    take: Callable[[Path], list[Row]]
    key: tuple[str, ...]


NULLABLE = ("published", "aim")
"""Fields of a workload that are left out if they are None."""


def read_rows(name: str, folder: Path = DATA) -> list[Row]:
    """Return the rows of a file of docs/data/, without its suffix; none if it does not exist."""
    path = folder / f"{name}.jsonl"
    if not path.exists():
        return []
    return lines_of(path)


def keep(
    name: str, records: Iterable[Path], folder: Path = DATA, **run: str
) -> list[Row]:
    """Put what a page shows of some records into its file, and return all rows of the file.

    Args:
        name: A key of KINDS.
        records: Files that the program of this kind has written, the oldest first.
        folder: Where the files are.
        run: `commit` and `date` of records that do not name them.
    """
    kind = KINDS[name]

    def key(row: Row) -> tuple[str, ...]:
        found = {field: str(row.get(field)) for field in kind.key}
        if "other" in found:  # two backends, in any order
            pair = sorted((found["backend"], found["other"]))
            found |= zip(("backend", "other"), pair, strict=True)
        return tuple(found.values())

    rows = read_rows(name, folder)
    for record in records:
        new = [row | run for row in kind.take(record)]
        replaced = {key(row) for row in new}
        rows = [row for row in rows if key(row) not in replaced] + new
    rows = [row for row in rows if "run" not in row or _workloads(row, rows)]
    rows.sort(key=key)
    text = "".join(f"{_short(_without_nulls(row))}\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return rows


def _without_nulls(row: Row) -> Row:
    """Return a row without the fields of NULLABLE that are None."""
    return {k: v for k, v in row.items() if v is not None or k not in NULLABLE}


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _entry(result: Row | float | str) -> Row:
    """Return the entry of a record from what `page_rows.bench` has kept of it."""
    if isinstance(result, float):
        return {"status": "timed", "median_us": result}
    if isinstance(result, str):
        status, _, reason = result.partition(": ")
        return {"status": status, "reason": reason}
    return result


def bench_runs(name: str = "bench", folder: Path = DATA) -> list[Row]:
    """Return the runs of a suite as records of the benchmark, the newest first.

    Args:
        name: "bench" or "bench_extended".
        folder: Where the files are.
    """
    rows = read_rows(name, folder)
    runs = [row for row in rows if "run" in row]
    runs.sort(key=lambda row: row["began"], reverse=True)
    return [run["run"] | {"workloads": _workloads(run, rows)} for run in runs]


def _workloads(run: Row, rows: Sequence[Row]) -> list[Row]:
    """Return the workloads of a run that no later run of the device has replaced."""
    place = run["device"], run["began"]
    return [
        dict.fromkeys(NULLABLE)
        | row
        | {"results": {name: _entry(result) for name, result in row["results"].items()}}
        for row in rows
        if "run" not in row and (row["device"], row["began"]) == place
    ]


def entry_lines(record: Row) -> str:
    """Return an object as JSON with one line per entry of its lists and objects."""
    parts = []
    for name, value in record.items():
        lines = _short(value)
        if isinstance(value, list):
            lines = "[\n  " + ",\n  ".join(map(_short, value)) + "\n ]"
        elif isinstance(value, dict):
            entries = (f"{_short(key)}: {_short(value[key])}" for key in value)
            lines = "{\n  " + ",\n  ".join(entries) + "\n }"
        parts.append(f"{_short(name)}: {lines}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


DOCUMENTS = {
    "ladder": page_rows.ladder,
    "parallel_x2": page_rows.parallel,
    "parallel_x4": page_rows.parallel,
}
"""The files of docs/data/ with one run as a whole, and the function that returns what is kept."""
KINDS = {
    "bench": Kind(page_rows.bench, ("device", "name")),
    "bench_extended": Kind(page_rows.bench_extended, ("device", "name")),
    "cache_formats": Kind(lines_of, ("format",)),
    "cpu_versions": Kind(
        page_rows.compared, ("vllm", "model", "dtype", "implementation")
    ),
    "engines": Kind(page_rows.engines, ("way", "dtype", "device", "version")),
    "equality": Kind(
        page_rows.compared, ("model", "dtype", "ngram", "backend", "other")
    ),
    "format_times": Kind(page_rows.format_times, ("device", "name")),
    "latent_paths": Kind(lines_of, ("device",)),
    "planted": Kind(
        page_rows.planted,
        ("vllm", "device", "backend", "kind", "graphs", "clean", "bug"),
    ),
    "ranks": Kind(
        page_rows.compared, ("device", "backend", "way", "graphs", "interleave")
    ),
    "real_weights": Kind(page_rows.real_weights, ("way", "dtype", "device", "version")),
    "serving": Kind(page_rows.serving, ("compared", "model", "mode")),
    "verdicts": Kind(page_rows.verdicts, ("adapter",)),
}
"""The files of docs/data/ with rows of several runs."""


def main() -> None:
    """Update the file of one kind."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=[*KINDS, *DOCUMENTS])
    parser.add_argument("records", type=Path, nargs="+", help="the oldest first")
    parser.add_argument("--commit", help="of records that do not name it")
    parser.add_argument("--date", help="of records that do not name it")
    given = parser.parse_args()
    if given.kind in DOCUMENTS:
        record = json.loads(given.records[-1].read_text(encoding="utf-8"))
        text = entry_lines(DOCUMENTS[given.kind](record))
        (DATA / f"{given.kind}.json").write_text(text, encoding="utf-8")
        return
    words = {"commit": given.commit, "date": given.date}
    run = {name: word for name, word in words.items() if word}
    print(f"{given.kind}: {len(keep(given.kind, given.records, **run))} lines")


if __name__ == "__main__":
    main()

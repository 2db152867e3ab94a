"""Data of the pages: what is kept of a record, what it replaces, and how large the files are."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "hooks"))
page_data: Any = importlib.import_module("page_data")
MOST_BYTES = 215_000
"""Bytes of all files of docs/data/ together."""


def written(path: Path, *lines: dict[str, Any]) -> Path:
    """Write lines as a program does, and return their path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_data_of_all_pages_is_small() -> None:
    files = [path for path in page_data.DATA.iterdir() if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    assert sum(sizes.values()) < MOST_BYTES, sizes


@pytest.mark.parametrize("name", page_data.KINDS)
def test_rows_name_their_keys_and_their_date(name: str) -> None:
    rows = page_data.read_rows(name)
    fields = {field for row in rows for field in row}
    assert set(page_data.KINDS[name].key) <= fields
    assert "began" in fields or "date" in fields


def test_new_rows_replace_those_with_the_same_key_alone(tmp_path: Path) -> None:
    """Tokens of two backends are one comparison, in whichever order they were compared."""
    line = {"event": "compared", "model": "a", "ngram": False, "tokens": 5, "extra": 1}
    old = line | {"backend": "CUSTOM", "other": "FLASH_ATTN"}
    other = old | {"model": "b"}
    new = line | {"backend": "FLASH_ATTN", "other": "CUSTOM", "tokens": 6}
    served = {"event": "served", "model": "a"}
    page_data.keep("equality", [written(tmp_path / "1", other, served, old)], tmp_path)
    kept = page_data.keep(
        "equality", [written(tmp_path / "2", new)], tmp_path, commit="c"
    )
    assert [(row["model"], row["tokens"]) for row in kept] == [("a", 6), ("b", 5)]
    assert kept == page_data.read_rows("equality", tmp_path)
    assert kept[0]["commit"] == "c" and "extra" not in kept[0]


def test_a_load_is_kept_if_two_backends_or_the_recorder_ran_on_it(
    tmp_path: Path,
) -> None:
    def run(backend: str, load: str, number: str, speed: float) -> dict[str, Any]:
        place = {"model": "m", "mode": "eager", "requests": 2, "input": 3, "output": 4}
        times = {
            "output_tokens_per_s": speed,
            "first_token_ms": [1, 2],
            "per_token_ms": [3, 4],
        }
        run = {"event": "load", "load": load, "run": number, "backend": backend}
        return run | place | times

    path = written(
        tmp_path / "1",
        run("CUSTOM", "a", "warm", 1.0),
        run("CUSTOM", "a", "1", 2.0),
        run("CUSTOM", "a", "2", 3.0),
        run("FLASH_ATTN", "a", "1", 4.0),
        run("CUSTOM+record", "a", "1", 5.0),
        run("CUSTOM", "b", "1", 6.0),
    )
    kept = page_data.keep("serving", [path], tmp_path)
    assert [
        (row["compared"], row["backend"], row["output_tokens_per_s"]) for row in kept
    ] == [
        ("backends", "CUSTOM", [2.0, 3.0]),
        ("backends", "FLASH_ATTN", [4.0]),
        ("recorder", "CUSTOM", [2.0, 3.0]),
        ("recorder", "CUSTOM+record", [5.0]),
    ]


def test_an_object_is_written_with_one_entry_per_line() -> None:
    record = {"date": "d", "rows": [{"a": 1}, {"a": 2}], "found": {"x": [1, 2]}}
    text = page_data.entry_lines(record)
    assert json.loads(text) == record
    assert '  {"a":1},\n  {"a":2}\n' in text and '\n  "x": [1,2]\n' in text

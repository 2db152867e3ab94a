"""Mutants of the instruments: the catalogue applies, the record is current, the runner can tell."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from mutants.digest import ROOT
from mutants.instruments import (
    PACKAGES,
    deciding_functions,
    load_instruments,
    tomllib,
)
from mutants.record import INSTRUMENTS_RECORD, is_current, read_record

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[1]
CATALOGUE = load_instruments()
BY_ID = {mutant.id: mutant for mutant in CATALOGUE}
REASONS = FOLDER / "mutants" / "instruments_without.toml"
WITHOUT = {
    function: entry["reason"]
    for entry in tomllib.loads(REASONS.read_text(encoding="utf-8"))["without"]
    for function in entry["functions"]
}
"""Functions without a mutant that decide a verdict, and the reason."""


def test_every_mutant_of_an_instrument_applies_once() -> None:
    failed = {}
    for mutant in CATALOGUE:
        try:
            mutant.source()
        except (ValueError, SyntaxError) as error:
            failed[mutant.id] = str(error)
    assert not failed
    assert len(CATALOGUE) > 200


def test_a_mutant_is_of_an_instrument_and_names_tests_that_exist() -> None:
    for mutant in CATALOGUE:
        assert mutant.file.startswith(PACKAGES), mutant.id
        for file in mutant.tests:
            assert (ROOT / file).is_file(), f"{mutant.id}: {file}"


def test_every_function_that_decides_a_verdict_has_a_mutant_or_a_reason() -> None:
    changed: defaultdict[str, set[str]] = defaultdict(set)
    for mutant in CATALOGUE:
        changed[mutant.file] |= mutant.functions
    without = set()
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            file = path.relative_to(ROOT).as_posix()
            text = path.read_text(encoding="utf-8")
            left = deciding_functions(text) - changed[file]
            without |= {f"{file}: {name}" for name in left}
    assert without == set(WITHOUT)
    assert all(len(reason.split()) > 5 for reason in WITHOUT.values())


def test_what_decides_a_verdict_is_recognized() -> None:
    text = """
def judge():
    raise ValueError("wrong")

def check():
    return Corruption("law", "found")

class Worker:
    def end(self):
        return Status.BROKEN

    def send(self):
        raise

def add(a, b):
    return a + b
"""
    assert deciding_functions(text) == {"judge", "check", "Worker.end"}


# ---- the record


def test_the_record_is_of_todays_instruments_and_every_mutant_is_found() -> None:
    entries = read_record(INSTRUMENTS_RECORD)
    stale = [
        mutant.id
        for mutant in CATALOGUE
        if not is_current(mutant, entries.get(mutant.id))
    ]
    assert not stale, "out of date: run make mutants-instruments"
    assert entries.keys() == BY_ID.keys()


def test_the_record_is_sorted_and_names_tests_that_exist() -> None:
    entries = list(read_record(INSTRUMENTS_RECORD).values())
    assert [entry.id for entry in entries] == sorted(BY_ID)
    for entry in entries:
        assert entry.is_killed, entry.id
        file, _, name = entry.by.partition("::")
        assert file in BY_ID[entry.id].tests, entry.id
        function = name.partition("[")[0].rpartition("::")[2]
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text, entry.id


# ---- the runner


def run_instruments(folder: Path, *options: str) -> tuple[int, dict[str, list[str]]]:
    """Run mutants in a process of their own; return its exit code and the record by id."""
    place = folder / "record.txt"
    command = [sys.executable, "-m", "mutants.run_instruments", *options]
    done = subprocess.run(
        [*command, "--workers", "1", "--record", place],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert place.exists(), done.stdout + done.stderr
    lines = [line.split("\t") for line in place.read_text().splitlines()]
    return done.returncode, {line[0]: line[1:] for line in lines}


def entry(name: str, old: str, new: str) -> str:
    """Return a catalogue's entry of one change of the comparators."""
    return (
        f'[[mutant]]\nid = "{name}"\nold = {json.dumps(old)}\nnew = {json.dumps(new)}\n'
    )


@pytest.mark.long
def test_a_trivial_change_is_killed_and_one_without_effect_stays_alive(
    tmp_path: Path,
) -> None:
    text = "    if isinstance(right, Tensor):\n        _expect_same_tensor(what, found, right)"
    head = 'file = "shared/conformance/checks/expect.py"\n'
    tests = 'tests = ["tests/conformance/test_comparators.py"]\n'
    (tmp_path / "mine.toml").write_text(
        head
        + tests
        + entry("trivial", text, text.replace("isinstance(right, Tensor)", "False"))
        + entry("none", text, text.replace("Tensor)", "Tensor) and True"))
        + entry("endless", text, f"    while what == 'ids':\n        pass\n{text}"),
        encoding="utf-8",
    )
    options = "--catalogue", str(tmp_path), "--limit", "15"
    code, found = run_instruments(tmp_path, *options)
    ended = {name.rpartition("/")[2]: line[1] for name, line in found.items()}
    assert ended == {"trivial": "killed", "none": "alive", "endless": "hangs"}
    assert code == 1


@pytest.mark.long
def test_a_sample_of_mutants_of_instruments_dies(tmp_path: Path) -> None:
    sample = sorted(mutant.id for mutant in CATALOGUE if "/canaries/" in mutant.id)[::4]
    code, found = run_instruments(tmp_path, "--all", *sample)
    assert code == 0 and set(sample) <= found.keys()
    assert {line[1] for line in found.values()} == {"killed"}

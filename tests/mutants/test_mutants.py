"""Planted bugs: the catalogue applies, the runner tells dead from alive, the record is current."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.reference.cache.slot_mapping import compute_slot_mapping_start_idx

from mutants import judge
from mutants.digest import change_digest
from mutants.mutant import OPERATORS, PACKAGES, ROOT, TWINS, load_catalogue
from mutants.record import CATALOGUE_RECORD, Entry, is_current, read_record

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[1]
CATALOGUE = load_catalogue()
LAWS = {law.name: law for law in ALL_LAWS}
SAMPLE = (
    "reference/cache/slot_mapping/window-from-the-query-length",
    "optimized/kernels/kv_cache/slot-zero-is-padding",
    "optimized/batch/step_buffers/stale-slots-after-a-smaller-step",
)
"""A few of the catalogue: two in plain Python and one in a kernel. The record has all of them."""


@pytest.mark.quick
def test_every_mutant_applies_to_todays_sources() -> None:
    failed = {}
    for mutant in CATALOGUE:
        try:
            mutant.source()
        except (ValueError, SyntaxError) as error:
            failed[mutant.id] = str(error)
    assert not failed


@pytest.mark.quick
def test_the_catalogue_covers_all_packages_and_every_operator() -> None:
    assert {mutant.package for mutant in CATALOGUE} == set(PACKAGES)
    assert {mutant.operator for mutant in CATALOGUE} == set(OPERATORS)


@pytest.mark.quick
def test_few_mutants_are_called_equivalent_and_all_say_why() -> None:
    reasons = [mutant.equivalent for mutant in CATALOGUE if mutant.equivalent]
    assert len(reasons) * 20 < len(CATALOGUE)
    assert all(len(reason.split()) > 8 for reason in reasons)


# ---- the runner


def run_mutants(place: Path, *options: str) -> tuple[int, str, dict[str, Entry]]:
    """Run mutants in a process of their own; return its exit code, its output and its record."""
    command = [sys.executable, "-m", "mutants.run", *options]
    done = subprocess.run(
        [*command, "--workers", "1", "--record", place],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert place.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, read_record(place)


def entry(name: str, old: str, new: str) -> str:
    """Return a catalogue's entry of one change of `compute_slot_mapping_start_idx`."""
    file = Path(inspect.getfile(inspect.unwrap(compute_slot_mapping_start_idx)))
    return (
        f'[[mutant]]\nid = "{name}"\nbug = "B001"\noperator = "edge"\n'
        f'file = "{file.resolve().relative_to(ROOT).as_posix()}"\n'
        f"old = {json.dumps(old)}\nnew = {json.dumps(new)}\n"
    )


@pytest.mark.long
def test_a_trivial_bug_is_killed_and_a_change_without_effect_stays_alive(
    tmp_path: Path,
) -> None:
    source = inspect.getsource(inspect.unwrap(compute_slot_mapping_start_idx))
    last = source.rstrip().splitlines()[-1]
    indent, value = last.split("return ")
    text = "".join(
        entry(name, f"{last}\n", f"{indent}return {new}\n")
        for name, new in (("trivial", "10**6"), ("none", f"({value}) + 0"))
    )
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    code, output, record = run_mutants(
        tmp_path / "record.txt", "--catalogue", str(tmp_path), "--examples", "5"
    )
    ended = {entry.id.rpartition("/")[2]: entry for entry in record.values()}
    assert {name: entry.how for name, entry in ended.items()} == {
        "trivial": "killed",
        "none": "alive",
    }
    assert ended["trivial"].by in LAWS and not ended["none"].by
    assert code == 1 and f"alive: {ended['none'].id}" in output
    assert "broken by an unchanged twin" not in output


@pytest.mark.long
def test_a_sample_of_mutants_dies(tmp_path: Path) -> None:
    code, output, record = run_mutants(tmp_path / "record.txt", *SAMPLE)
    assert record.keys() == set(SAMPLE)
    assert {entry.how for entry in record.values()} == {"killed"}
    assert code == 0, output


@pytest.mark.long
@pytest.mark.long
def test_recorded_laws_kill_their_mutants_again(tmp_path: Path) -> None:
    """A law that was weakened since kills no longer, and no digest shows it."""
    known = read_record(CATALOGUE_RECORD)
    by_law = {entry.by: entry.id for entry in known.values() if entry.is_killed}
    chosen = [by_law[law] for law in sorted(by_law)][::4]
    place = tmp_path / "record.txt"
    place.write_text(CATALOGUE_RECORD.read_text(encoding="utf-8"), encoding="utf-8")
    code, output, record = run_mutants(place, *chosen)
    assert code == 0, output
    assert {name: record[name].by for name in chosen} == {
        name: known[name].by for name in chosen
    }


def test_a_law_that_hangs_is_tried_again_alone_before_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under load a law that had nothing to do with a mutant hung, and counted as its killer."""
    runs = []

    def run(
        trials: list[judge.Trial],
        workers: int,
        examples: int,
        usual: Any,
        patience: float,
    ) -> Iterator[judge.Trial]:
        for trial in trials:
            runs.append((trial.twin, workers, patience))
            if trial.twin == "optimized" and patience == 1.0:
                trial.how, trial.broken = "hung", ["a law"]
            yield trial

    monkeypatch.setattr(judge, "_run", run)
    monkeypatch.setattr(judge, "speed_up", lambda: None)
    trials = [judge.Trial(twin, list(LAWS.values())[:1]) for twin in TWINS]
    found = list(judge.judge(trials, 2, 5))
    assert runs == [
        ("reference", 2, 1.0),
        ("optimized", 2, 1.0),
        ("optimized", 1, judge.PATIENCE),
    ]
    assert [trial.twin for trial in found] == ["reference", "optimized"]
    assert not any(trial.how or trial.broken for trial in found)


def test_only_a_run_chooses_the_interpreter_for_its_process() -> None:
    """Their import chose it for the whole process, so kernels beside a GPU were interpreted."""
    names = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    before = {name: value for name, value in os.environ.items() if name not in names}
    code = (
        "import os, mutants.run, mutants.run_generated;"
        f"print([name for name in {names} if name in os.environ])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**before, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# ---- the record of the last run


@pytest.mark.quick
def test_the_record_is_of_todays_mutants() -> None:
    held = read_record(CATALOGUE_RECORD)
    stale = [
        mutant.id for mutant in CATALOGUE if not is_current(mutant, held.get(mutant.id))
    ]
    assert not stale, "out of date: run make mutants"
    assert list(held) == sorted(mutant.id for mutant in CATALOGUE)


def test_the_record_names_laws_that_exist() -> None:
    for entry in read_record(CATALOGUE_RECORD).values():
        assert (entry.by in LAWS) == entry.is_killed, entry


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("return a + 1", "# a comment\n    return (a + 1)", True),
        ("return a + 1", '"""Return the next number."""\n    return a + 1', True),
        ("return a + 1", "return 1 + a", False),
        ("b = a + 1; return b", "c = a + 1; return c", True),
        ("b = c = a + 1; return b", "b = c = a + 1; return c", False),
        ("return [b + 1 for b in a]", "return [c + 1 for c in a]", True),
        ("return [b + 1 for b in a]", "return [b + 1 for c in a]", False),
        ("return map(lambda b: b + 1, a)", "return map(lambda c: c + 1, a)", True),
        ("b = 1; return a.b", "c = 1; return a.c", False),
        ("b = 1; return own(b=b)", "c = 1; return own(c=c)", False),
        ("global b; b = a + 1", "global c; c = a + 1", False),
        ("import b; return b + 1", "import c; return c + 1", False),
        ("class C:\n        b = 1", "class C:\n        c = 1", False),
    ],
)
def test_a_digest_is_of_what_a_function_computes(
    before: str,
    after: str,
    is_same: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = []
    for number, body in enumerate((before, after)):
        path = tmp_path / str(number) / "own.py"
        path.parent.mkdir()
        path.write_text(f"def own(a):\n    {body}\n\nOTHER = {number}\n")
        changed = path.read_text().replace("1", "2", 1)
        monkeypatch.setattr("mutants.digest.ROOT", path.parent)
        digests.append(change_digest(path, changed))
    assert (digests[0] == digests[1]) == is_same

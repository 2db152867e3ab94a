"""Planted bugs: the catalogue applies, the runner tells dead from alive, the record is current."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from law_calls import called_by
from mutants.mutant import OPERATORS, PACKAGES, ROOT, load_catalogue
from mutants.reach import reach_of
from mutants.record import REPORT, is_current, unexpected
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.reference.cache.slot_mapping import compute_slot_mapping_start_idx

FOLDER = Path(__file__).parent
CATALOGUE = load_catalogue()
LAWS = {law.name: law for law in ALL_LAWS}
SAMPLE = (
    "shared/bookkeeping/cache/slot_mapping/window-from-the-query-length",
    "optimized/kernels/kv_cache/slot-zero-is-padding",
    "optimized/batch/step_buffers/stale-slots-behind-a-smaller-step",
)
"""A few of the catalogue: two in plain Python and one in a kernel. The record has all of them."""


def test_every_mutant_applies_to_todays_sources() -> None:
    failed = {}
    for mutant in CATALOGUE:
        try:
            mutant.source()
        except (ValueError, SyntaxError) as error:
            failed[mutant.id] = str(error)
    assert not failed


def test_the_catalogue_covers_all_packages_and_every_operator() -> None:
    assert {mutant.package for mutant in CATALOGUE} == set(PACKAGES)
    assert {mutant.operator for mutant in CATALOGUE} == set(OPERATORS)


def test_few_mutants_are_called_equivalent_and_all_say_why() -> None:
    reasons = [mutant.equivalent for mutant in CATALOGUE if mutant.equivalent]
    assert len(reasons) * 20 < len(CATALOGUE)
    assert all(len(reason.split()) > 8 for reason in reasons)


# ---- the runner


def run_mutants(place: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run mutants in a process of their own, and return its exit code and its report."""
    command = [sys.executable, "-m", "mutants.run", *options]
    done = subprocess.run(
        [*command, "--workers", "1", "--report", place],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert place.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(place.read_text(encoding="utf-8"))


def entry(name: str, old: str, new: str) -> str:
    """Return a catalogue's entry of one change of `compute_slot_mapping_start_idx`."""
    file = Path(inspect.getfile(inspect.unwrap(compute_slot_mapping_start_idx)))
    return (
        f'[[mutant]]\nid = "{name}"\nbug = "B001"\noperator = "edge"\n'
        f'file = "{file.resolve().relative_to(ROOT).as_posix()}"\n'
        f"old = {json.dumps(old)}\nnew = {json.dumps(new)}\n"
    )


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
    code, report = run_mutants(
        tmp_path / "report.json", "--catalogue", str(tmp_path), "--examples", "5"
    )
    ended = {each["id"].rpartition("/")[2]: each["ended"] for each in report["mutants"]}
    assert ended == {"trivial": "killed", "none": "alive"}
    assert code == 1 and unexpected(report) == [report["mutants"][1]["id"]]
    assert not report["laws broken by the unchanged twins"]


def test_a_sample_of_mutants_dies(tmp_path: Path) -> None:
    code, report = run_mutants(tmp_path / "report.json", *SAMPLE)
    assert {each["id"] for each in report["mutants"]} == set(SAMPLE)
    assert {each["ended"] for each in report["mutants"]} == {"killed"}
    assert code == 0 and not report["laws broken by the unchanged twins"]


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


# ---- the code on which an entry of the record depends

CALLED = (
    "a query attends to no key outside of its window or chunk",
    "rows are the result of all operations on them",
    "tensors have the dtype they need whatever the default is",
)
"""Laws on attention and on block tables, and one that runs other laws."""


@pytest.mark.parametrize("twin", ["reference", "optimized"])
@pytest.mark.parametrize("name", CALLED)
def test_a_law_calls_no_function_that_it_does_not_reach(name: str, twin: str) -> None:
    called = called_by(LAWS[name], twin, examples=1)
    assert len(called) > 20
    assert not called - reach_of(LAWS[name], twin)


def test_a_law_does_not_reach_what_it_does_not_use() -> None:
    law = LAWS["slots on the device are those of the host"]
    own = {module for module, _ in reach_of(law, "reference")}
    assert {"reference.cache.slot_mapping", law.body.__module__[9:]} <= own
    assert not {"optimized.cache.slot_mapping", "conformance.oracles.dense"} & own
    others = {name for module, name in reach_of(law, "reference") if "laws" in module}
    assert law.body.__name__ in others and len(others) < 10


# ---- the record of the last run


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """Return what `make mutants` wrote last."""
    found: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8"))
    return found


def test_the_record_is_of_todays_mutants_and_laws(record: dict[str, Any]) -> None:
    held = {each["id"]: each for each in record["mutants"]}
    stale = [each.id for each in CATALOGUE if not is_current(each, held.get(each.id))]
    assert not stale, "out of date: run make mutants"
    assert len(held) == len(CATALOGUE)


def test_the_law_that_killed_a_mutant_reaches_the_changed_file(
    record: dict[str, Any],
) -> None:
    killed_by = {each["id"]: LAWS.get(each["law"]) for each in record["mutants"]}
    for mutant in CATALOGUE:
        if law := killed_by.get(mutant.id):
            reached = {module for module, _ in reach_of(law, mutant.twin)}
            module = f"{mutant.package}.{mutant.module}".removesuffix(".")
            assert module in reached, mutant.id


def test_every_mutant_is_dead_or_equivalent(record: dict[str, Any]) -> None:
    assert not record["laws broken by the unchanged twins"]
    for each in record["mutants"]:
        assert each["ended"] == ("equivalent" if each["reason"] else "killed"), each

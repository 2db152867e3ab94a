"""Is the catalogue of planted bugs sound, and does the conformance suite still find them?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutants.mutant import OPERATORS, PACKAGES, Mutant, load_catalogue

FOLDER = Path(__file__).parent
CATALOGUE = load_catalogue()
SAMPLE = (
    "shared/bookkeeping/cache/block_table/blocks-rounded-down",
    "shared/bookkeeping/cache/slot_mapping/window-from-the-query-length",
    "optimized/cache/slot_mapping/device-positions-from-zero",
    "optimized/cache/block_table_rows/a-reused-row-keeps-its-tail",
    "optimized/cache/cache_ops/slot-zero-is-padding",
    "reference/batch/batch_split/padding-breaks-the-uniform-batch",
    "optimized/batch/metadata/all-groups-have-the-first-table",
    "optimized/batch/step_buffers/stale-slots-behind-a-smaller-step",
    "reference/batch/batch_slices/a-cut-request-forgets-its-first-half",
    "reference/attention/_attend/window-one-too-wide",
    "optimized/kernels/attention_kernel/block-looked-up-once-a-tile",
    "optimized/attention/merge_states/prefix-strides-for-both",
)


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.id)
def test_what_a_mutant_replaces_stands_once_in_its_file(mutant: Mutant) -> None:
    assert mutant.source()


def test_the_catalogue_covers_both_twins_and_every_operator() -> None:
    assert {mutant.package for mutant in CATALOGUE} == set(PACKAGES)
    assert {mutant.operator for mutant in CATALOGUE} == set(OPERATORS)


def test_few_mutants_are_called_equivalent_and_all_say_why() -> None:
    reasons = [mutant.equivalent for mutant in CATALOGUE if mutant.equivalent]
    assert len(reasons) * 20 < len(CATALOGUE)
    assert all(len(reason.split()) > 8 for reason in reasons)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Return what `make mutants` wrote last."""
    found: dict[str, Any] = json.loads((FOLDER / "mutants/report.json").read_text())
    return found


def test_the_report_is_about_this_catalogue(report: dict[str, Any]) -> None:
    tried = {each["id"]: each["digest"] for each in report["mutants"]}
    assert tried == {mutant.id: mutant.digest for mutant in CATALOGUE}, (
        "tests/mutants/report.json is out of date: run make mutants"
    )


def test_every_mutant_is_dead_or_equivalent(report: dict[str, Any]) -> None:
    assert not report["laws broken by the unchanged twins"]
    for each in report["mutants"]:
        assert each["ended"] == ("equivalent" if each["reason"] else "killed"), each


def test_a_sample_of_mutants_dies_at_once(tmp_path: Path) -> None:
    """In a process of its own: what is planted must not reach the other tests."""
    place = tmp_path / "report.json"
    command = [sys.executable, "-m", "mutants.run", *SAMPLE, "--quick"]
    before = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    done = subprocess.run(
        [*command, "--workers", "1", "--report", place],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *before])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(place.read_text(encoding="utf-8"))
    assert {each["id"] for each in found["mutants"]} == set(SAMPLE)
    assert {each["ended"] for each in found["mutants"]} == {"killed"}
    assert not found["laws broken by the unchanged twins"]

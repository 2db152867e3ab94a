"""Is the catalogue of planted bugs sound, and does the conformance suite still find them?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.mutant import OPERATORS, PACKAGES, Mutant, load_catalogue

FOLDER = Path(__file__).parent
CATALOGUE = load_catalogue()
SAMPLE = (
    "reference/block_table/blocks-rounded-down",
    "reference/slot_mapping/window-from-the-query-length",
    "optimized/slot_mapping/device-positions-from-zero",
    "optimized/block_table_rows/a-reused-row-keeps-its-tail",
    "optimized/cache_ops/slot-zero-is-padding",
    "reference/batch_split/padding-breaks-the-uniform-batch",
    "optimized/metadata/all-groups-have-the-first-table",
    "optimized/step_buffers/stale-slots-behind-a-smaller-step",
    "reference/batch_slices/a-cut-request-forgets-its-first-half",
    "reference/_attend/window-one-too-wide",
    "optimized/_attend_kernel/block-looked-up-once-a-tile",
    "optimized/merge_states/prefix-strides-for-both",
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


def test_a_sample_of_mutants_dies_at_once(tmp_path: Path) -> None:
    """In a process of its own: what is planted must not reach the other tests."""
    place = tmp_path / "report.json"
    command = [sys.executable, "-m", "mutants.run", *SAMPLE, "--quick"]
    done = subprocess.run(
        [*command, "--workers", "1", "--report", place],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(place.read_text(encoding="utf-8"))
    assert {each["id"] for each in found["mutants"]} == set(SAMPLE)
    assert {each["ended"] for each in found["mutants"]} == {"killed"}
    assert not found["laws broken by the unchanged twins"]

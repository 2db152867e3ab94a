"""The record of the mutants of the kernels for Hopper, and a sample of them."""

import json
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from mutants import run_hopper
from mutants.generate import generate, read_reasons, sample
from mutants.hopper_calls import CALLS, Call
from mutants.mutant import ROOT
from mutants.run_hopper import (
    REASONS,
    REPORT,
    folder_of,
    hopper_files,
    judge,
    without_layouts,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)
ALL = generate(hopper_files(), read_reasons(REASONS))
MUTANTS = without_layouts(ALL)
BY_ID = {each.id: each for each in MUTANTS}


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """Return what `make mutants-hopper` wrote last."""
    found: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8"))
    return found


def test_every_recorded_mutant_is_dead_or_equivalent_with_a_reason(
    record: dict[str, Any],
) -> None:
    for each in record["mutants"]:
        assert each["ended"] == ("equivalent" if each["reason"] else "killed"), each
        assert each["case"] or len(each["reason"].split()) > 5, each
        assert each["case"] in (None, "a hang", "a crash", *CALLS), each


def test_most_recorded_mutants_are_of_todays_functions(record: dict[str, Any]) -> None:
    entries = record["mutants"]
    stale = [
        each["id"]
        for each in entries
        if each["id"] not in BY_ID or BY_ID[each["id"]].digest != each["digest"]
    ]
    assert len(stale) * 4 < len(entries), "out of date: run make mutants-hopper"


def test_a_reason_is_of_a_recorded_change(record: dict[str, Any]) -> None:
    entries = {each["id"]: each for each in record["mutants"]}
    for name, reason in read_reasons(REASONS).items():
        assert entries[name]["reason"] == reason


def test_a_part_of_the_mutants_of_each_folder_is_recorded(
    record: dict[str, Any],
) -> None:
    tried = Counter(folder_of(each["file"]) for each in record["mutants"])
    assert set(record["folders"]) == {folder_of(each.file) for each in MUTANTS}
    for folder, count in record["folders"].items():
        assert tried[folder] * 25 > count, folder


def test_only_layouts_are_left_as_they_are() -> None:
    left_out = [each for each in ALL if each.id not in BY_ID]
    assert len(MUTANTS) > 3000 and left_out
    for each in left_out:
        text = (ROOT / each.file).read_bytes()[: each.end].decode()
        assert "Layout(" in "".join(text.splitlines(keepends=True)[-5:]), each.id


def _spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("call", "expected"), [(_spin, "a hang"), (partial(time.sleep, 3), None)]
)
def test_a_call_hangs_if_it_takes_too_much_cpu_time(
    call: Any, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = MUTANTS[0]
    calls = {"a call": Call(folder_of(mutant.file), 1, call)}
    monkeypatch.setattr(run_hopper, "CALLS", calls)
    monkeypatch.setattr(run_hopper, "CPU_SECONDS", 1)
    ((_, case, what, _),) = judge([mutant], 1, {})
    assert case == expected, what


@pytest.mark.long
def test_recorded_mutants_are_found_again(record: dict[str, Any]) -> None:
    """A sample of those that were killed, in the order that the record suggests."""
    killed = {each["id"]: each for each in record["mutants"] if each["case"]}
    chosen = sample([BY_ID[name] for name in killed if name in BY_ID], 12, seed=1)
    survivors = [
        mutant.id for mutant, case, _, _ in judge(chosen, 1, killed) if case is None
    ]
    assert not survivors

"""The record of the mutants of the kernels for Hopper, and a sample of them."""

import time
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch

from mutants import run_hopper
from mutants.generate import Generated, generate, read_reasons, sample
from mutants.hopper import REASONS, folder_of, hopper_files, without_layouts
from mutants.hopper_calls import CALLS, Call
from mutants.mutant import ROOT
from mutants.record import HOPPER_RECORD, read_record
from mutants.run_hopper import judge

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
    ),
]
RECORD = read_record(HOPPER_RECORD)


@cache
def all_mutants() -> list[Generated]:
    """Return all mutants. Only tests that are run generate them, which takes seconds."""
    return generate(hopper_files(), read_reasons(REASONS))


@cache
def tried_mutants() -> list[Generated]:
    """Return the mutants that change what a kernel computes."""
    return without_layouts(all_mutants())


@cache
def tried_by_id() -> dict[str, Generated]:
    """Return the mutants that change what a kernel computes, by their id."""
    return {mutant.id: mutant for mutant in tried_mutants()}


def test_every_recorded_mutant_is_dead_or_equivalent_with_a_reason() -> None:
    reasons = read_reasons(REASONS)
    for entry in RECORD.values():
        assert entry.how != "alive", entry
        assert (entry.by in CALLS) == (entry.how == "killed"), entry
        assert (entry.how == "equivalent") == (entry.id in reasons), entry
    assert all(len(reason.split()) > 5 for reason in reasons.values())
    assert reasons.keys() <= RECORD.keys()
    assert list(RECORD) == sorted(RECORD)


def test_most_recorded_mutants_are_of_todays_functions() -> None:
    stale = [
        entry.id
        for entry in RECORD.values()
        if entry.id not in tried_by_id()
        or tried_by_id()[entry.id].digest != entry.digest
    ]
    assert len(stale) * 4 < len(RECORD), "out of date: run make mutants-hopper"


def test_a_part_of_the_mutants_of_each_folder_is_recorded() -> None:
    every = Counter(folder_of(mutant.file) for mutant in tried_mutants())
    tried = Counter(
        folder_of(mutant.file) for mutant in tried_mutants() if mutant.id in RECORD
    )
    for folder, count in every.items():
        assert tried[folder] * 25 > count, folder


def test_only_layouts_are_left_as_they_are() -> None:
    left_out = [mutant for mutant in all_mutants() if mutant.id not in tried_by_id()]
    assert len(tried_mutants()) > 3000 and left_out
    for mutant in left_out:
        text = (ROOT / mutant.file).read_bytes()[: mutant.end].decode()
        assert "Layout(" in "".join(text.splitlines(keepends=True)[-5:]), mutant.id


def _spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("call", "expected"), [(_spin, "hangs"), (partial(time.sleep, 3), "alive")]
)
def test_a_call_hangs_if_it_takes_too_much_cpu_time(
    call: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = tried_mutants()[0]
    calls = {"a call": Call(folder_of(mutant.file), 1, call)}
    monkeypatch.setattr(run_hopper, "CALLS", calls)
    monkeypatch.setattr(run_hopper, "CPU_SECONDS", 1)
    ((entry, what, _),) = judge([mutant], 1, {})
    assert entry.how == expected, what


@pytest.mark.long
def test_recorded_mutants_are_found_again() -> None:
    """A sample of those that were killed, in the order that the record suggests."""
    killed = {entry.id: entry for entry in RECORD.values() if entry.is_killed}
    chosen = sample(
        [tried_by_id()[name] for name in killed if name in tried_by_id()], 4, seed=1
    )
    alive = [
        mutant.id for mutant, _, _ in judge(chosen, 1, killed) if not mutant.is_killed
    ]
    assert not alive

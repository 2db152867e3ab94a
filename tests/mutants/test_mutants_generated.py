"""Generated mutants: the operators, the sample, the reasons of equivalent ones, and the record."""

from functools import cache
from pathlib import Path

import pytest

from mutants.generate import (
    OPERATORS,
    Generated,
    generate,
    mutated_files,
    read_reasons,
    sample,
)
from mutants.mutant import ROOT
from mutants.record import GENERATED_RECORD, ends_well, read_record
from mutants.run_generated import REASONS

RECORD = read_record(GENERATED_RECORD)


@cache
def all_mutants() -> list[Generated]:
    """Return all mutants. Only tests that are run generate them, which takes seconds."""
    return generate(reasons=read_reasons(REASONS))


@cache
def mutants_by_id() -> dict[str, Generated]:
    """Return all mutants by their id."""
    return {mutant.id: mutant for mutant in all_mutants()}


def changes_of(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the changes that the operators make of a function with this body."""
    monkeypatch.setattr("mutants.generate.ROOT", folder)
    file = folder / "optimized" / "kernels" / "own.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def own(a, b, n):\n    {body}\n", encoding="utf-8")
    return {
        f"{m.operator}: {m.change}"
        for m in generate([file.relative_to(folder).as_posix()])
    }


@pytest.mark.parametrize(
    ("body", "change"),
    [
        ("return a < b", "comparison: a < b -> (a <= b)"),
        ("return (a > 0) & (b > n)", "conjunct: (a > 0) & (b > n) -> (b > n)"),
        ("return tl.load(a, mask=b, other=0)", "mask: tl.load(a, mask=b, other=0) -> tl.load(a)"),
        ("return a + 16", "constant: 16 -> 17"),
        ("return combine(a, b, n)", "arguments: combine(a, b, n) -> combine(b, a, n)"),
        ("return a - b", "operands: a - b -> (b - a)"),
        ("return tl.cdiv(a, b)", "arithmetic: tl.cdiv(a, b) -> (a // b)"),
        ("a += b", "statement: a += b -> pass"),
        ("return tl.minimum(a, b)", "minimum: tl.minimum -> tl.maximum"),
        ("return tl.minimum(a, b)", "bound: tl.minimum(a, b) -> a"),
        ("return a.k_block + a.v_block", "counterpart: a.k_block -> a.v_block"),
        ("return a.to(tl.int64) * b", "width: a.to(tl.int64) -> a"),
    ],
)  # fmt: skip
def test_an_operator_makes_its_change(
    body: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert change in changes_of(body, tmp_path, monkeypatch)


def test_prose_annotations_and_errors_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = '"""Return 1 + 2."""\n    c: list[1] = a\n    raise ValueError(f"{a + 1}")'
    assert changes_of(body, tmp_path, monkeypatch) == set()


@pytest.mark.extended
def test_every_generated_mutant_is_python_and_has_an_id_of_its_own() -> None:
    assert len(mutants_by_id()) == len(all_mutants()) > 3000
    assert {mutant.operator for mutant in all_mutants()} == set(OPERATORS)
    for mutant in sample(all_mutants(), 200, seed=1):
        assert mutant.source() != (ROOT / mutant.file).read_text(encoding="utf-8")


def test_kernels_without_an_interpreter_are_left_out() -> None:
    files = mutated_files()
    assert not [file for file in files if "sm90" in file]
    assert {
        "optimized/kernels/portable/decode.py",
        "optimized/batch/metadata.py",
    } <= set(files)


@pytest.mark.extended
def test_a_larger_sample_contains_the_smaller_one() -> None:
    small, large = (sample(all_mutants(), count, seed=3) for count in (20, 40))
    assert small == large[:20]
    assert small != sample(all_mutants(), 20, seed=4)


# ---- the record


def test_every_recorded_mutant_is_dead_or_equivalent_with_a_reason() -> None:
    reasons = read_reasons(REASONS)
    for entry in RECORD.values():
        assert entry.how != "alive", entry
        assert bool(entry.by) == entry.is_killed, entry
        assert (entry.how == "equivalent") == (entry.id in reasons), entry
    assert all(len(reason.split()) > 5 for reason in reasons.values())
    assert list(RECORD) == sorted(RECORD)


@pytest.mark.extended
def test_most_recorded_mutants_are_of_todays_functions() -> None:
    stale = [
        entry.id
        for entry in RECORD.values()
        if entry.id not in mutants_by_id()
        or mutants_by_id()[entry.id].digest != entry.digest
    ]
    assert len(stale) * 4 < len(RECORD), "out of date: run make mutants-generated"


@pytest.mark.extended
def test_a_reason_is_of_a_recorded_change() -> None:
    for name in read_reasons(REASONS):
        # a changed function has other mutants, whose reasons have to be given anew
        mutant, entry = mutants_by_id().get(name), RECORD[name]
        is_todays = mutant is not None and mutant.digest == entry.digest
        assert not is_todays or ends_well(mutant, entry), name

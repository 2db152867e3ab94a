"""Formats of files that hold an implementation: a format is a module and an entry in the list."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pagetwin import reference
from pagetwin.conformance.base.support import Support
from pagetwin.conformance.candidates import file_formats
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.file_formats import FileFormat, find_format
from pagetwin.conformance.candidates.preflight import _check_exists, _line_in


def check(file: str) -> None:
    """Raise if a file does not name an operation."""
    if not hasattr(reference, Path(file).read_text("utf-8")):
        raise ValueError(f"{file}: expected the name of an operation")


def load(file: str) -> ModuleType:
    """Return the operation that a file names as a module."""
    module, name = ModuleType("named"), Path(file).read_text("utf-8")
    setattr(module, name, getattr(reference, name))
    module.SUPPORT = Support(operations=[name])  # type: ignore[attr-defined]
    return module


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register a format whose files name an operation, and return one of them."""
    own = ModuleType("named_operations")
    own.FORMAT = FileFormat(check, load, lambda error: f" ({error})", dict, dict)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "named_operations", own)
    monkeypatch.setitem(file_formats.FORMATS, ".name", "named_operations")
    file = tmp_path / "mine.name"
    file.write_text("compute_slot_mapping_device", "utf-8")
    return file


def test_a_registered_format_is_an_implementation(named: Path) -> None:
    _check_exists(str(named))
    candidate = load_candidate(str(named))
    assert list(candidate.operations) == ["compute_slot_mapping_device"]
    assert _line_in(str(named), ValueError("line 7")) == " (line 7)"


def test_an_invalid_file_is_rejected_by_its_format(named: Path) -> None:
    named.write_text("nothing", "utf-8")
    with pytest.raises(ValueError, match="expected the name of an operation"):
        _check_exists(str(named))


def test_solutions_are_found_by_their_ending(tmp_path: Path) -> None:
    file = tmp_path / "solution.json"
    file.write_text(json.dumps({}), "utf-8")
    found = find_format(str(file))
    assert found is not None
    with pytest.raises(ValueError, match="solution"):
        found.check(str(file))
    assert find_format("mine.py") is find_format("package.module") is None

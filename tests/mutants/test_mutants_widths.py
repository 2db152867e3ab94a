"""Mutants of integers in fewer bits: which expressions are sites, and what is truncated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mutants import widths
from mutants.widths import WIDTHS, Widths, instrument, largest_of, truncated


def instrumented(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function with this body, instrumented, and its sites."""
    monkeypatch.setattr(widths, "ROOT", folder)
    (folder / "own.py").write_text(f"def own(a, b):\n    {body}\n", encoding="utf-8")
    text, sites = instrument("own.py", 0)
    names: dict[str, Any] = {}
    exec(compile(text, "own.py", "exec"), names)
    return names["own"], [site.text for site in sites]


@pytest.fixture(autouse=True)
def no_site_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WIDTHS, "chosen", None)
    monkeypatch.setattr(WIDTHS, "largest", [0] * 100)


@pytest.mark.parametrize(
    ("body", "sites"),
    [
        ("return a + b", {"a", "b", "a + b"}),
        ("c = [a, b * 2]\n    return c", {"a", "b", "b * 2"}),
        ("a += b\n    return a", {"a += b"}),
        ("return max(a, b)", {"a", "b", "max(a, b)"}),
        ("return [c for c in a]", {"c", "[c for c in a]"}),
        ("raise ValueError(a + b)", set()),
    ],
)
def test_what_is_kept_or_passed_on_is_a_site(
    body: str, sites: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = instrumented(body, tmp_path, monkeypatch)
    assert set(found) == sites


def test_only_the_chosen_site_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, sites = instrumented("return a + b", tmp_path, monkeypatch)
    assert own(300, 1000) == 1300
    assert {text: WIDTHS.largest[number] for number, text in enumerate(sites)} == {
        "a": 300, "b": 1000, "a + b": 1300,
    }  # fmt: skip
    monkeypatch.setattr(WIDTHS, "chosen", sites.index("a"))
    assert own(300, 1000) == 1044
    assert own(255, 1000) == 1255


@pytest.mark.parametrize(
    ("value", "largest", "right"),
    [
        (300, 300, 44),
        (-1, -1, -1),
        (True, 0, True),
        (2.5, 0, 2.5),
        ([7, (300, "a")], 300, [7, (44, "a")]),
        ({1: 1000}, 1000, {1: 232}),
    ],
)
def test_large_integers_are_found_and_truncated(
    value: Any, largest: int, right: Any
) -> None:
    assert largest_of(value, 3) == largest
    assert truncated(value, 255, 3) == right


def test_tensors_and_arrays_are_truncated_and_bytes_are_not() -> None:
    tensor = torch.tensor([7, 300, -1], dtype=torch.int32)
    assert largest_of(tensor, 3) == 300
    assert truncated(tensor, 255, 3).tolist() == [7, 44, -1]
    assert truncated(tensor, 255, 3).dtype == torch.int32
    array = np.array([7, 70_000])
    assert truncated(array, 0xFFFF, 3).tolist() == [7, 4464]
    content = torch.full((2,), 200, dtype=torch.uint8)
    assert largest_of(content, 3) == 0 and truncated(content, 255, 3) is content


def test_a_tensor_that_fits_keeps_its_memory() -> None:
    own = Widths([0], chosen=0, bits=8)
    small = torch.tensor([255])
    assert own.keep(0, small) is small
    assert own.keep(0, torch.tensor([256])).tolist() == [0]

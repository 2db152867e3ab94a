"""The how-to page about a mask: its blocks add the mask, and it gives the number of files."""

from pathlib import Path

import pytest
import torch
from support.howto_pages import apply_page, change, run_in

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
    ),
]

TRY = """
from random import Random

import torch
from pagetwin.conformance.cases.option_pairs import draw_choice
from pagetwin.conformance.cases.choice_calls import build_call
from pagetwin.contract.operations import load_implementation

reference = load_implementation("reference")
for name in ("reference", "optimized"):
    wrong = 0
    for seed in range(6):
        limit = ("1", "7", "33")[seed % 3]
        choice = draw_choice(Random(seed), [("prefix_limit", limit)])
        call = build_call(choice, seed, torch.device("cpu"))
        try:
            call.assert_right(*call.run(load_implementation(name)), reference)
        except AssertionError:
            wrong += 1
    print(name, wrong)
"""
"""Draws calls with the new mask and prints how many results of each twin are wrong."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the sources to which the blocks of the page are applied."""
    apply_page("mask.md", tmp_path, "<option>", "prefix_limit", most=6)
    return tmp_path


def run_twins(copy: Path) -> dict[str, int]:
    """Return how many of six calls with the new mask each twin computes wrongly."""
    done = run_in(copy, TRY)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: int(wrong) for name, wrong in lines}


def test_the_page_adds_a_mask_to_both_twins_in_six_files(copy: Path) -> None:
    assert run_twins(copy) == {"reference": 0, "optimized": 0}


def test_the_bugs_that_the_page_plants_are_found(copy: Path) -> None:
    for name, right, wrong in (
        (
            "reference/attention/masks",
            "key_position < prefix",
            "key_position <= prefix",
        ),
        (
            "optimized/kernels/portable/options",
            "end, PREFIX_LIMIT)",
            "end, PREFIX_LIMIT + 1)",
        ),
    ):
        change(copy, f"{name}/prefix_limit.py", right, wrong)
    found = run_twins(copy)
    assert found["reference"] > 0 and found["optimized"] > 0

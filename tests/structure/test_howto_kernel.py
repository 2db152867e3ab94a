"""The how-to page about a kernel: its blocks add a family, which dispatch chooses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.howto_pages import apply_page, change, run_in

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)

TRY = """
import json

from pagetwin.conformance.api.check import (
    choose_laws,
    load_candidate,
    make_setting,
    try_law,
)
from pagetwin.optimized.kernels.rows.family import RowsPlan

launched = []
launch = RowsPlan.launch
RowsPlan.launch = lambda *given: launched.append(1) or launch(*given)
(law,) = choose_laws("every new token attends to its sequence up to itself")
result = try_law(law, make_setting(load_candidate("optimized"), "cpu"), 0, 12)
print(json.dumps({"launches": len(launched), "status": result.status.value}))
"""
"""Judges the twin by a law, and counts the launches of the family."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the sources to which the blocks of the page are applied."""
    apply_page("kernel.md", tmp_path, "<family>", "rows", most=6)
    return tmp_path


def judge(copy: Path) -> dict[str, Any]:
    """Return how the law ended, and how often the family was launched."""
    done = run_in(copy, TRY)
    assert done.stdout.strip(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_dispatch_chooses_the_family_of_the_page_and_a_law_holds(copy: Path) -> None:
    found = judge(copy)
    assert found["status"] == "held" and found["launches"] > 0


@pytest.mark.long
def test_a_mistake_in_the_kernel_of_the_page_breaks_the_law(copy: Path) -> None:
    name = "optimized/kernels/rows/kernel.py"
    change(copy, name, "(end - 1 - token)", "(end - token)")
    found = judge(copy)
    assert found["status"] == "broken" and found["launches"] > 0


@pytest.mark.extended
def test_a_family_without_an_estimate_is_an_error(copy: Path) -> None:
    name = "optimized/kernels/rows/family.py"
    change(copy, name, "    def estimate(", "    def guess(")
    program = """
import torch
from pagetwin.optimized import paged_attention
rows, cache = torch.zeros(3, 2, 16), torch.zeros(4, 16, 1, 16)
table, starts = torch.zeros(1, 2).int(), torch.tensor([0, 3]).int()
paged_attention(rows, cache, cache, table, starts, torch.tensor([9]).int(), 3, 9)
"""
    done = run_in(copy, program)
    words = "TypeError: the kernel family 'rows' has no estimate: expected a method"
    assert done.returncode == 1 and words in done.stderr

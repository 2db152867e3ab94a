"""The how-to page about a kernel: its blocks add a family, which dispatch chooses."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "kernel.md").read_text(encoding="utf-8")
NEW_FILE = re.compile(r"^\| \d+ \| `([\w/<>]+\.py)` \| new", re.MULTILINE)
CHANGED_FILE = re.compile(r"^\| \d+ \| `([\w/.]+)` \| (?!new)", re.MULTILINE)
BLOCK = re.compile(r"^```(text|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
    for folder in ("reference", "optimized", "shared", ".typing"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(PAGE)]
    patch = "".join(text for kind, text in blocks if kind == "diff")
    sources = [text for kind, text in blocks if kind == "text"]
    subprocess.run(
        ["git", "apply", "-"],
        cwd=tmp_path,
        input=patch,
        text=True,
        check=True,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )
    names = NEW_FILE.findall(PAGE)
    init, *files = (name.replace("<family>", "rows") for name in names)
    (tmp_path / init).parent.mkdir()
    (tmp_path / init).write_text("", encoding="utf-8")
    for name, source in zip(files, sources, strict=True):
        (tmp_path / name).write_text(source, encoding="utf-8")
    patched = re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE)
    assert sorted(patched) == sorted(CHANGED_FILE.findall(PAGE))
    assert f"**Files: {1 + len(files) + len(patched)}.**" in PAGE
    assert 1 + len(files) + len(patched) <= 6
    return tmp_path


def run(copy: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the copy in the interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=copy,
        env=os.environ
        | {"PYTHONPATH": str(copy / ".typing"), "TRITON_INTERPRET": "1"}
        | {"TRITON_CACHE_DIR": str(copy / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


def judge(copy: Path) -> dict[str, Any]:
    """Return how the law ended, and how often the family was launched."""
    done = run(copy, TRY)
    assert done.stdout.strip(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def change(copy: Path, name: str, old: str, new: str) -> None:
    """Replace a text of a file."""
    file = copy / name
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")


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
    done = run(copy, program)
    words = "TypeError: the kernel family 'rows' has no estimate: expected a method"
    assert done.returncode == 1 and words in done.stderr

"""The how-to page about a mask: its blocks add the mask, and it gives the number of files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
    ),
]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "mask.md").read_text(encoding="utf-8")
NEW_FILE = re.compile(r"^\| \d+ \| `([\w/]+/)<option>\.py` \| new", re.MULTILINE)
CHANGED_FILE = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \|", re.MULTILINE)
BLOCK = re.compile(r"^```(text|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
    for folder in ("reference", "optimized", "shared", ".typing"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(PAGE)]
    patches = [text for kind, text in blocks if kind == "diff"]
    sources = [text for kind, text in blocks if kind == "text"]
    subprocess.run(
        ["git", "apply", "-"],
        cwd=tmp_path,
        input="".join(patches),
        text=True,
        check=True,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )
    for folder, source in zip(NEW_FILE.findall(PAGE), sources, strict=True):
        (tmp_path / folder / "prefix_limit.py").write_text(source, encoding="utf-8")
    patched = re.findall(r"^\+\+\+ b/(.*)$", "".join(patches), re.MULTILINE)
    assert sorted(patched) == sorted(CHANGED_FILE.findall(PAGE))
    assert f"**Files: {len(blocks)}.**" in PAGE
    assert len(blocks) <= 6
    return tmp_path


def run_twins(copy: Path) -> dict[str, int]:
    """Return how many of six calls with the new mask each twin computes wrongly."""
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        cwd=copy,
        env=os.environ
        | {"PYTHONPATH": str(copy / ".typing"), "TRITON_INTERPRET": "1"}
        | {"TRITON_CACHE_DIR": str(copy / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: int(wrong) for name, wrong in lines}


def test_the_page_adds_a_mask_to_both_twins_in_six_files(copy: Path) -> None:
    assert run_twins(copy) == {"reference": 0, "optimized": 0}


def test_the_bugs_that_the_page_plants_are_found(copy: Path) -> None:
    for path, right, wrong in (
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
        file = copy / path / "prefix_limit.py"
        text = file.read_text(encoding="utf-8")
        assert right in text
        file.write_text(text.replace(right, wrong), encoding="utf-8")
    found = run_twins(copy)
    assert found["reference"] > 0 and found["optimized"] > 0

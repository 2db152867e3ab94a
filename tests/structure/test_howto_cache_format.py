"""The how-to page about a cache format: its blocks add it, and it gives the number of files."""

import json
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
PAGE = (ROOT / "docs" / "howto" / "cache_format.md").read_text(encoding="utf-8")
NEW_FILE = re.compile(r"^\| \d+ \| `([\w/]+/)<format>\.py` \| new", re.MULTILINE)
CHANGED_FILE = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \|", re.MULTILINE)
BLOCK = re.compile(r"^```(text|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_FILES = 9
TRY = """
import json

import torch
from pagetwin.conformance.cases.caches import CacheSizes
from pagetwin.conformance.cases.option_pairs import drawn_choice
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.api.check import load_candidate, make_setting
from pagetwin.conformance.laws import cache_formats as laws
from pagetwin.conformance.laws.cache_write import CacheWrite
from pagetwin.contract.cache_formats import FORMATS

writes = laws.a_cache_of_codes_holds_the_codes_and_scales_of_each_token
attends = laws.attention_over_codes_is_right_under_any_options
laws.CODED = (FORMATS["int8_per_head"],)
sizes = CacheSizes(3, 4, 2, 8, 12, torch.float32)
fixed = {"operation": "paged_attention", "batch": "decode"} | laws.PLAIN
found = {}
for name in ("reference", "optimized"):
    setting = make_setting(load_candidate(name), "cpu")
    found[name] = {"write": 0, "attend": 0}
    for seed in range(4):
        write = CacheWrite((5, -1, 11, 2), 1, sizes, ("packed", "packed"), 1, seed)
        for kind, law, case in (
            ("write", writes, laws.CodedWrite(write, seed)),
            ("attend", attends, (drawn_choice(seed, fixed), seed)),
        ):
            try:
                law(setting, case)
            except Disagreement:
                found[name][kind] += 1
print(json.dumps(found))
"""
"""Tries two laws on four cases each with the new format alone, and counts the cases that break."""


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
    for folder, source in zip(NEW_FILE.findall(PAGE), sources, strict=True):
        (tmp_path / folder / "int8_per_head.py").write_text(source, encoding="utf-8")
    patched = re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE)
    assert sorted(patched) == sorted(CHANGED_FILE.findall(PAGE))
    assert f"**Files: {len(blocks)}.**" in PAGE
    assert len(blocks) <= MOST_FILES
    return tmp_path


def try_laws(copy: Path) -> dict[str, dict[str, int]]:
    """Return how many cases of each law break on each twin."""
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        cwd=copy,
        env=os.environ
        | {"PYTHONPATH": str(copy / ".typing"), "TRITON_INTERPRET": "1"}
        | {"TRITON_CACHE_DIR": str(copy / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_page_adds_a_format_to_both_twins_and_the_laws_hold(copy: Path) -> None:
    right = {"write": 0, "attend": 0}
    assert try_laws(copy) == {"reference": right, "optimized": right}


def test_the_bugs_that_the_page_plants_break_a_law(copy: Path) -> None:
    for path, right, wrong in (
        ("reference/cache/formats", ".round()", ".trunc()"),
        (
            "optimized/kernels/portable/formats",
            "return result * load_scale",
            "return result / load_scale",
        ),
    ):
        file = copy / path / "int8_per_head.py"
        text = file.read_text(encoding="utf-8")
        assert text.count(right) == 1
        file.write_text(text.replace(right, wrong), encoding="utf-8")
    found = try_laws(copy)
    assert found["reference"]["write"] > 0 and found["optimized"]["write"] == 0
    assert found["optimized"]["attend"] > 0

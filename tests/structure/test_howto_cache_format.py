"""The how-to page about a cache format: its blocks add it, and it gives the number of files."""

import json
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
import json

import torch
from pagetwin.conformance.cases.caches import CacheSizes
from pagetwin.conformance.cases.option_pairs import drawn_choice
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.api.check import load_candidate, make_setting
from pagetwin.conformance.checks import coded_caches
from pagetwin.conformance.laws import cache_formats as laws
from pagetwin.conformance.laws import coded_attention
from pagetwin.conformance.laws.cache_write import CacheWrite
from pagetwin.contract.cache_formats import FORMATS

writes = laws.a_cache_of_codes_holds_the_codes_and_scales_of_each_token
attends = coded_attention.attention_over_codes_is_right_under_any_options
coded_caches.CODED = (FORMATS["int8_per_head"],)
sizes = CacheSizes(3, 4, 2, 8, 12, torch.float32)
fixed = {"operation": "paged_attention", "batch": "decode"} | coded_attention.PLAIN
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
    apply_page("cache_format.md", tmp_path, "<format>", "int8_per_head", most=9)
    return tmp_path


def try_laws(copy: Path) -> dict[str, dict[str, int]]:
    """Return how many cases of each law break on each twin."""
    done = run_in(copy, TRY)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_page_adds_a_format_to_both_twins_and_the_laws_hold(copy: Path) -> None:
    right = {"write": 0, "attend": 0}
    assert try_laws(copy) == {"reference": right, "optimized": right}


def test_the_bugs_that_the_page_plants_break_a_law(copy: Path) -> None:
    for name, right, wrong in (
        ("reference/cache/formats", ".round()", ".trunc()"),
        (
            "optimized/kernels/portable/formats",
            "return result * load_scale",
            "return result / load_scale",
        ),
    ):
        change(copy, f"{name}/int8_per_head.py", right, wrong)
    found = try_laws(copy)
    assert found["reference"]["write"] > 0 and found["optimized"]["write"] == 0
    assert found["optimized"]["attend"] > 0

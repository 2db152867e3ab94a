"""The documentation builds, covers every concept, and its code runs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.operations import CONCEPTS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# a block that cannot run says why, in a comment on the line before it
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n)?^```python[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that must run, in order."""
    found = BLOCK.finditer(page.read_text())
    return [block["code"] for block in found if not block["why"]]


WITH_CODE = [page for page in [*PAGES, ROOT / "README.md"] if python_blocks(page)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built site."""
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    pytest.importorskip("material", reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_the_documentation_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file()


@pytest.mark.parametrize("concept", [each.name for each in CONCEPTS])
def test_every_concept_has_its_page(site: Path, concept: str) -> None:
    page = (site / "concepts" / concept / "index.html").read_text()
    for part in ("<svg", "the-worked-example", "both-step-beside-step", "the-contract"):
        assert part in page


@pytest.mark.parametrize("concept", [each.name for each in CONCEPTS])
def test_every_step_of_the_reference_stands_beside_one_of_the_twin(
    site: Path, concept: str
) -> None:
    page = (site / "concepts" / concept / "index.html").read_text()
    assert 'class="nothing"' not in page


def test_a_page_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(http[^"]+)"', page.read_text()
        )
        assert not loaded, page


@pytest.mark.parametrize(
    "page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT))
)
def test_code_in_the_documentation_runs(page: Path) -> None:
    names: dict[str, Any] = {}
    for code in python_blocks(page):
        exec(compile(code, page.name, "exec"), names)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the page's tensors lie on the host"
)
def test_one_word_swaps_the_twins_on_the_start_page() -> None:
    (code,) = python_blocks(ROOT / "docs" / "index.md")
    *before, last = code.strip().splitlines()
    results = []
    for word in ("pagetwin.reference", "pagetwin.optimized"):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec("\n".join(before).replace("pagetwin.reference", word), names)
        results.append(eval(last, names))
    torch.testing.assert_close(*results)

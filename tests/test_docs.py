"""The documentation: it builds, covers every concept, names existing paths, and its code runs."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.operations import CONCEPTS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TOP_FOLDERS = ("reference", "optimized", "shared", "tests", "docs")
README = ROOT / "README.md"
# a block that cannot run says why, in a comment on the line before it
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n)?^```python[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# "shared/contract/shapes.py", "optimized/kernels/", but not "docs.rs/..." or "a/reference/b"
NAMED_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(TOP_FOLDERS)})/[\w./*<>{{}},-]*")
NAMED_MODULE = re.compile(r"(?<![\w./])pagetwin(?:\.[A-Za-z_]\w*)+")
# a dated record keeps the names of its day
DATED = re.compile(r"\d{4}-\d{2}-\d{2}-")


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that must run, in order."""
    found = BLOCK.finditer(page.read_text())
    return [block["code"] for block in found if not block["why"]]


def markdown_files() -> Iterator[Path]:
    """Yield the Markdown files of the repository, without dated records."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in TOP_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.md")):
            if not DATED.match(path.name):
                yield path


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in [*PAGES, README] if python_blocks(page)]
MARKDOWN = list(markdown_files())


@pytest.mark.site
def test_the_documentation_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file()


@pytest.mark.site
@pytest.mark.parametrize("concept", [each.name for each in CONCEPTS])
def test_every_concept_has_its_page(site: Path, concept: str) -> None:
    page = (site / "concepts" / concept / "index.html").read_text()
    for part in ("<svg", "worked-example", "implementation-step-by-step", "contract"):
        assert part in page


@pytest.mark.site
@pytest.mark.parametrize("concept", [each.name for each in CONCEPTS])
def test_every_step_of_the_reference_is_shown_next_to_one_of_the_twin(
    site: Path, concept: str
) -> None:
    page = (site / "concepts" / concept / "index.html").read_text()
    assert 'class="nothing"' not in page


@pytest.mark.site
def test_a_page_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(http[^"]+)"', page.read_text()
        )
        assert not loaded, page


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w/-]+\.md\b", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES
    )


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for named in NAMED_PATH.findall(page.read_text()):
        path = named.rstrip(".,")
        # "<option>" and "{name}" are placeholders
        if re.search(r"[<>{}]", path):
            continue
        if not (any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()):
            missing.append(path)
    assert not missing, f"{name_of(page)} names {sorted(set(missing))}"


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for name in sorted(set(NAMED_MODULE.findall(page.read_text()))):
        # the changelog and the first page of CONTRIBUTING say that this path is gone
        if name.startswith("pagetwin.shared"):
            continue
        if not can_be_resolved(name):
            missing.append(name)
    assert not missing, f"{name_of(page)} names {missing}"


def can_be_resolved(name: str) -> bool:
    """Tell whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_in_the_documentation_runs(page: Path) -> None:
    names: dict[str, Any] = {}
    for code in python_blocks(page):
        exec(compile(code, page.name, "exec"), names)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the page's tensors are on the host"
)
@pytest.mark.parametrize("page", [README, ROOT / "docs" / "index.md"], ids=name_of)
def test_one_word_exchanges_the_twins_in_the_first_example(page: Path) -> None:
    code = python_blocks(page)[0].strip()
    before, call = code[: code.rindex("\npaged_attention(")], "paged_attention("
    last = call + code.rpartition(f"\n{call}")[2]
    results = []
    for word in ("pagetwin.reference", "pagetwin.optimized"):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(before.replace("pagetwin.reference", word), names)
        results.append(eval(last, names))
    torch.testing.assert_close(*results)


@pytest.fixture
def gpu_runs() -> Any:
    """Return the module that shows runs on GPUs."""
    sys.path.insert(0, str(ROOT / "docs" / "hooks"))
    try:
        return importlib.import_module("gpu_runs")
    finally:
        sys.path.pop(0)


def test_links_of_the_latest_gpu_runs_lead_to_pages(gpu_runs: Any) -> None:
    shown = gpu_runs.latest_gpu_runs()
    links = re.findall(r"\]\(([^)#]+)", shown)
    assert shown.startswith("On an") and "Not run on a GPU" in shown and links
    assert all((ROOT / "docs" / link).is_file() for link in links)


def test_a_record_of_a_gpu_run_is_folded_under_its_results(
    gpu_runs: Any, tmp_path: Path
) -> None:
    for name, text in (
        ("2026-01-01-chip", "# Chip\n\nCommit 1234567; torch\n\n## Tests: 3 passed\n"),
        ("2026-01-02-chip-abcdef1-campaign", "# Corpus\n\n5 cases\n"),
        ("2026-01-03-chip-bench", "# Times\n"),
    ):
        (tmp_path / f"{name}.json").write_text("{}")
        (tmp_path / f"{name}.md").write_text(text)
    assert gpu_runs.gpu_records(tmp_path).splitlines() == [
        '??? note "2026-01-02, commit abcdef1: Corpus"',
        "",
        "    **Corpus**",
        "    ",
        "    5 cases",
        "",
        '??? note "2026-01-01, commit 1234567: Tests: 3 passed"',
        "",
        "    **Chip**",
        "    ",
        "    Commit 1234567; torch",
        "    ",
        "    **Tests: 3 passed**",
    ]

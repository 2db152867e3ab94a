"""The documentation: it builds, covers every concept, names existing paths, and its code runs."""

import importlib
import logging
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.operations import CONCEPTS
from support.source_tree import docstrings_of, modules

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (ROOT / "docs").rglob("*.md")
    if path.parent != ROOT / "docs" / "data"
)
TOP_FOLDERS = ("reference", "optimized", "shared", "tests", "docs")
README = ROOT / "README.md"
# a block that cannot run says why, in a comment on the line before it
BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>.+?) -->\n)?"
    r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
# "shared/contract/shapes.py", "optimized/kernels/", but not "docs.rs/...", "a/reference/b" or the
# path of another commit, "abcdef1:docs/..."
NAMED_PATH = re.compile(rf"(?<![\w/.:-])(?:{'|'.join(TOP_FOLDERS)})/[\w./*<>{{}},-]*")
NAMED_MODULE = re.compile(r"(?<![\w./])pagetwin(?:\.[A-Za-z_]\w*)+")


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that must run, in order."""
    found = BLOCK.finditer(page.read_text())
    # code in a folded block is indented
    return [textwrap.dedent(block["code"]) for block in found if not block["why"]]


def markdown_files() -> Iterator[Path]:
    """Yield the Markdown files of the repository."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in TOP_FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in [*PAGES, README] if python_blocks(page)]
MARKDOWN = list(markdown_files())


@pytest.mark.site
def test_the_documentation_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file()


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Return a function that lists what the documentation's parser warns of in a docstring."""
    griffe = pytest.importorskip("griffe", reason="the docs extra is not installed")

    def parse(docstring: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "griffe"):
            # as docs/hooks/griffe_examples.py and the options of mkdocs.yml
            words = re.sub(r"^Example:$", "Examples:", docstring, flags=re.M)
            griffe.Docstring(words).parse(
                "google", warn_unknown_params=False, warn_missing_types=False
            )
        return [record.getMessage() for record in caplog.records]

    return parse


@pytest.mark.extended
def test_every_docstring_is_parsed_without_a_warning(
    warnings_of: Callable[[str], list[str]],
) -> None:
    """A list of arguments over two lines was not; `mkdocs build --strict` failed on it."""
    found = []
    for module in modules():
        for name, words in docstrings_of(module):
            found += [f"{module}.{name}: {warning}" for warning in warnings_of(words)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "arguments", ["one, two,\n        three: numbers.", "as in `row_budgets`."]
)
def test_a_docstring_that_names_arguments_wrongly_gives_a_warning(
    warnings_of: Callable[[str], list[str]], arguments: str
) -> None:
    assert warnings_of(f"Return a number.\n\nArgs:\n    {arguments}\n")


@pytest.mark.site
@pytest.mark.parametrize("concept", [concept.name for concept in CONCEPTS])
def test_every_concept_has_its_page(site: Path, concept: str) -> None:
    page = (site / "concepts" / concept / "index.html").read_text()
    for part in ("<svg", "worked-example", "implementation-step-by-step", "contract"):
        assert part in page


@pytest.mark.site
@pytest.mark.parametrize("concept", [concept.name for concept in CONCEPTS])
def test_every_step_of_the_reference_is_shown_next_to_one_of_the_twin(
    site: Path, concept: str
) -> None:
    page = (site / "concepts" / concept / "index.html").read_text()
    assert 'class="nothing"' not in page


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
    # lines that a page adds in a patch name what is not there yet
    text = re.sub(r"(?m)^\+.*$", "", page.read_text())
    for name in sorted(set(NAMED_MODULE.findall(text))):
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


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_commands_of_an_environment_come_after_its_activation(page: Path) -> None:
    """`.venv/bin/pip` and then a bare `pagetwin` in one block is a command not found."""
    for block in re.findall(
        r"^```(?:bash)?\n(.*?)^```$", page.read_text(), re.M | re.S
    ):
        if ".venv/bin/" in block and "/activate" not in block:
            assert not re.search(r"^(pagetwin|pip|python3?) (?!-m venv)", block, re.M)


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_on_a_page_has_no_words_for_a_formatter(page: Path) -> None:
    assert not any("# fmt:" in code for code in python_blocks(page))


@pytest.mark.sample(6)
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_in_the_documentation_runs(page: Path) -> None:
    names: dict[str, Any] = {}
    for code in python_blocks(page):
        exec(compile(code, page.name, "exec"), names)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the page's tensors are on the host"
)
@pytest.mark.parametrize("page", [README, ROOT / "docs" / "install.md"], ids=name_of)
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


def test_a_summary_of_a_gpu_run_is_folded_under_its_results(
    gpu_runs: Any, tmp_path: Path
) -> None:
    for name, text in (
        ("gpu_tests", "# Chip, 2026\n\nCommit 12345678; torch\n\n## 3 passed\n"),
        ("gpu_campaign", "# Chip, 2027\n\nCommit abcdef12.\n\n## Corpus\n\n5 cases\n"),
        ("bench", "# Times\n"),
    ):
        (tmp_path / f"{name}.md").write_text(text)
    assert gpu_runs.gpu_records(tmp_path).splitlines() == [
        '??? note "Chip, 2027, commit abcdef1: Corpus"',
        "",
        "    **Chip, 2027**",
        "    ",
        "    Commit abcdef12.",
        "    ",
        "    **Corpus**",
        "    ",
        "    5 cases",
        "",
        '??? note "Chip, 2026, commit 1234567: 3 passed"',
        "",
        "    **Chip, 2026**",
        "    ",
        "    Commit 12345678; torch",
        "    ",
        "    **3 passed**",
    ]


def test_the_link_to_the_repository_asks_its_host_for_nothing() -> None:
    """The theme's script asks GitHub for stars if the link is marked so."""
    sys.path.insert(0, str(ROOT / "docs" / "hooks"))
    try:
        pages = importlib.import_module("pages")
    finally:
        sys.path.pop(0)
    material = importlib.import_module("material")
    partial = Path(str(material.__file__)).parent / "templates/partials/source.html"
    text = partial.read_text(encoding="utf-8")
    assert text.count(pages.COUNTED) == 1
    assert "data-md-component" not in pages.on_post_page(text, None)

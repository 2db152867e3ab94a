"""Assembly of a page about a bug, and the index of these pages."""

import ast
import difflib
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pagetwin import reference

from .figure import Scene, figures

sys.path.append(str(Path(__file__).parents[3] / "tests"))

from mutants.graft import grafted
from mutants.mutant import ROOT, Mutant
from mutants.shown_bugs import KINDS, PAGES, PARTS, ShownBug, load_page, load_pages

CONTEXT = 2
"""Unchanged lines of code before and after the changed ones."""

HEAD = re.compile(r'"""$|^\s*(?:def |class |\) -> ).*:$')
"""The last line of a docstring or a signature, before which no line is shown."""
BRANCH = re.compile(r"\s*(?:else|elif|except|finally)\b")
"""A line that continues the statement above it."""

TASK = "**Which line is wrong, or which one is missing?**"

Recording = Mapping[str, Any]


def law_id(sentence: str) -> str:
    """Return the id of a law on the page of the conformance suite."""
    return f"law-{re.sub(r'[^a-z0-9]+', '-', sentence.lower())}"


def bug_index() -> str:
    """Return the pages by kind, one line each."""
    parts = []
    bugs = load_pages()
    for kind, words in KINDS.items():
        lines = [f"## {kind.capitalize()}", words, ""]
        lines += [
            f"- [{bug.title}]({bug.slug}.md): {_threads(bug)}"
            for bug in bugs
            if bug.kind == kind
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def bug_page(slug: str, recordings: Mapping[str, Recording]) -> str:
    """Return the Markdown of a page.

    Args:
        slug: Its name.
        recordings: The recordings of the block map.
    """
    bug = load_page(PAGES / f"{slug}.md")
    report, task, answer, smallest = (bug.parts[heading] for heading in PARTS)
    wrong_figure, right_figure = figures_of(slug)
    wrong_code, right_code = code_of(bug.mutant)
    open_code, _ = code_of(bug.mutant, is_marked=False)
    recorded = bug.recorded()
    return f"""# {bug.title}

*{bug.kind.capitalize()}.* Public thread{"s" * (len(bug.threads) > 1)}: {_threads(bug)}
{{: .summary }}

## {PARTS[0]}

{report}

## {PARTS[1]}

{wrong_figure}

{task}

<div class="open" markdown="1">
{open_code}
</div>

{TASK}

<details class="note" markdown="1">
<summary>{PARTS[2]}</summary>

{answer}

{right_figure}

<div class="pair" markdown="1">
<div markdown="1">
{wrong_code}
</div>
<div markdown="1">
{right_code}
</div>
</div>

{place_of(bug.mutant)}

{_block_map(bug, recordings)}
</details>

## The law that finds it

[*{bug.law.name.capitalize()}*](../conformance.md#{law_id(bug.law.name)}). The code with the bug
breaks it. {smallest}

<details class="note printed" markdown="1">
<summary>{PARTS[3]}, as <code>pagetwin check</code> prints it</summary>

```text
{recorded["printed"]}
```
{_words_of_the_headline(recorded["printed"])}
</details>
"""


@cache
def figures_of(slug: str) -> tuple[str, str]:
    """Return the figures of the wrong and the right code of a page, as HTML."""
    bug = load_page(PAGES / f"{slug}.md")
    with grafted(bug.mutant.package, bug.mutant) as wrong:
        return figures(scene_of(bug), reference, wrong)


def scene_of(bug: ShownBug) -> Scene:
    """Return the function with the calls of a page's figure."""
    module = importlib.import_module(f"bugs.{bug.kind.replace(' ', '_')}")
    scene: Scene = getattr(module, bug.slug.replace("-", "_"))
    return scene


def code_of(mutant: Mutant, is_marked: bool = True) -> tuple[str, str]:
    """Return the wrong and the right lines with their context, as blocks of Markdown.

    Args:
        mutant: The change.
        is_marked: If true, the changed lines are highlighted.
    """
    right = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()
    wrong = mutant.source().splitlines()
    changes = [
        change
        for change in difflib.SequenceMatcher(
            None, right, wrong, autojunk=False
        ).get_opcodes()
        if change[0] != "equal"
    ]
    first, last = changes[0], changes[-1]
    title = "with the bug" if is_marked else f"{name_of(mutant)}, with the bug"
    return (
        _code(title, wrong, first[3], last[4], is_marked),
        _code("right", right, first[1], last[2], is_marked),
    )


def _code(
    title: str, lines: list[str], start: int, end: int, is_marked: bool = True
) -> str:
    """Return changed lines, some lines around them, and the statements that enclose them."""
    if start == end or not any(line.strip() for line in lines[start:end]):
        # a line that is missing leaves no gap
        lines, end = lines[:start] + lines[end:], start
    first, last = start, min(end + CONTEXT, len(lines))
    while start - first < CONTEXT and not HEAD.search(lines[first - 1]):
        first -= 1
    while first < start and not lines[first].strip():
        first += 1
    while last > end and _is_outside(lines[last - 1], lines[first : end + 1]):
        last -= 1
    around = enclosing(lines, first)
    inner = lines[first:last]
    if _open_brackets(inner) > 0:
        inner.append(f"{' ' * (_indent(inner[-1]) + 4)}...")
    shown = textwrap.dedent("\n".join([*around, *inner])).rstrip()
    before = len(around) - first + 1
    marked = " ".join(str(number + before) for number in range(start, end))
    highlight = f' hl_lines="{marked}"' if marked and is_marked else ""
    return f'```python title="{title}"{highlight}\n{shown}\n```'


def _words_of_the_headline(printed: str) -> str:
    """Return what the first line of a report leaves open, or nothing."""
    first = printed.partition("\n")[0]
    if "#" not in first and "a number" not in first:
        return ""
    return (
        "\nThe first line is a headline for all inputs that fail alike, so it has # or the words"
        ' "a number" where they differ.\n'
    )


def _open_brackets(lines: list[str]) -> int:
    """Return how many brackets are opened and not closed, without those in comments."""
    text = "\n".join(line.partition("  #")[0] for line in lines)
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_outside(line: str, others: list[str]) -> bool:
    """Return whether a line is empty or has less indentation than all others."""
    return not line.strip() or _indent(line) < min(
        _indent(other) for other in others if other.strip()
    )


def enclosing(lines: list[str], first: int) -> list[str]:
    """Return the signature and the statements that enclose a line, with dots for what is left out.

    Args:
        lines: A file.
        first: Index of a line in a function.
    """
    found: list[str] = []
    indent = _indent(lines[first])
    gap = False
    for number in range(first - 1, -1, -1):
        line = lines[number]
        is_head = line.strip() and (
            _indent(line) < indent
            or (found and BRANCH.match(found[0]) and _indent(line) == indent)
        )
        if not is_head:
            gap = gap or bool(line.strip())
            continue
        if gap:
            found.insert(0, f"{' ' * (_indent(line) + 4)}...")
        indent, gap = _indent(line), False
        if re.match(r"\s*(?:def |\) ->|\):)", line):
            while not lines[number].lstrip().startswith("def "):
                number -= 1
            name = lines[number].lstrip().removeprefix("def ").partition("(")[0]
            if not lines[number].rstrip().endswith(":"):
                line = f"{' ' * indent}def {name}(...):"
            found.insert(0, line)
            break
        found.insert(0, line)
    return found


def name_of(mutant: Mutant) -> str:
    """Return the name of the function that is changed, after that of its class."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    line = text[: text.index(mutant.old)].count("\n") + 1
    names = [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return ".".join(names)


def place_of(mutant: Mutant) -> str:
    """Return a sentence with the function and the file that are changed."""
    return f"This is `{name_of(mutant)}` in `{mutant.file}`."


def _threads(bug: ShownBug) -> str:
    return ", ".join(f"[{name}]({address})" for name, address in bug.threads)


def _block_map(bug: ShownBug, recordings: Mapping[str, Recording]) -> str:
    """Return a link to the block map at the moment that a page names, or nothing."""
    if "block_map" not in bug.fields:
        return ""
    moment = bug.fields["block_map"]
    for name, recording in recordings.items():
        size, caching = name.split("-")
        for step, state in enumerate(recording["steps"]):
            chosen = MOMENTS[moment](recording, state)
            if chosen:
                place = urlencode(
                    {"size": size, "caching": caching, "step": step} | chosen
                )
                # a link in HTML: the state in the address is not an anchor of the page
                link = f'<a href="../../block_map/#{escape(place)}">block map</a>'
                return f"In the {link}, without the bug: {moment}."
    raise ValueError(f"{bug.slug}: no recording has the moment {moment!r}")


def _block_is_full(recording: Recording, step: Mapping[str, Any]) -> dict[str, str]:
    """Return a decoding request whose new token is the first one of a block."""
    size = recording["blockSize"]
    for request in step["running"]:
        is_decode = request["computed"] >= request["prompt"] and request["new"] == 1
        if is_decode and request["computed"] % size == 0:
            return {"request": request["id"]}
    return {}


def _block_ends(recording: Recording, step: Mapping[str, Any]) -> dict[str, str]:
    """Return a decoding request whose new token is the last one of a block."""
    size = recording["blockSize"]
    for request in step["running"]:
        is_decode = request["computed"] >= request["prompt"] and request["new"] == 1
        if is_decode and (request["computed"] + 1) % size == 0:
            return {"request": request["id"]}
    return {}


def _prefix_is_found(recording: Recording, step: Mapping[str, Any]) -> dict[str, str]:
    """Return a request that begins with blocks from the prefix cache."""
    return next(({"request": r["id"]} for r in step["running"] if r["hit"]), {})


def _block_is_copied(recording: Recording, step: Mapping[str, Any]) -> dict[str, str]:
    """Return the copy of a shared block."""
    return {"block": str(step["copies"][0][1])} if step["copies"] else {}


def _preemption(recording: Recording, step: Mapping[str, Any]) -> dict[str, str]:
    """Return nothing but that a request is preempted."""
    return {"request": step["preempted"][0]} if step["preempted"] else {}


MOMENTS: dict[str, Callable[[Recording, Mapping[str, Any]], dict[str, str]]] = {
    "a request begins a new block": _block_is_full,
    "a request fills its last block": _block_ends,
    "a request begins with blocks from the prefix cache": _prefix_is_found,
    "a shared block is copied before a write": _block_is_copied,
    "a request is preempted": _preemption,
}
"""Moments of the recordings that a page can name, each with a function that finds it in a step."""

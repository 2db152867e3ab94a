"""Pages of source files that the course names, and the links of the course to them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "course.md"
STOP = re.compile(r"^\| (\d+) \| `(.+?)`", re.M)
LINE = re.compile(r'<a data-line="(\d+)" href="([^"]+)"')
LINE_ID = re.compile(r'<span id="__line-\d+-\d+">')
NAME = re.compile(r"(?<![\[\w/])`([\w./]+)`")


def source_pages() -> dict[str, str]:
    """Return the pages of files by their path below the folder of the site: title and code."""
    pages = {}
    for path in sorted(set(_named_files())):
        name = path.relative_to(ROOT).as_posix()
        words = f"`{name}`, with the line that a link of the [course]({_up(name)}course.md) names."
        pages[_page(path)] = "\n".join(
            [
                "---",
                f"title: {path.name}",
                "search:",
                "  exclude: true",
                "hide:",
                "  - navigation",
                "  - toc",
                "---",
                "",
                f"# {path.name}",
                "",
                words,
                "",
                "```python",
                path.read_text(encoding="utf-8").rstrip(),
                "```",
                "",
            ]
        )
    return pages


def linked_course(markdown: str) -> str:
    """Return the course with a link at each file, and at each name that a stop's file defines."""
    parts = re.split(r"(?m)^(?=## )", markdown)
    stops = {number: ROOT / path for number, path in STOP.findall(markdown)}
    linked = []
    for part in parts:
        stop = re.match(r"## Stop (\d+):", part)
        own = stops[stop[1]] if stop else None
        linked.append(NAME.sub(lambda name, own=own: _link(name[1], own), part))
    return "".join(linked)


def with_lines(html: str) -> str:
    """Return the course's HTML with the line of a definition at the end of its link."""
    return LINE.sub(r'<a href="\2#__line-0-\1"', html)


def without_line_ids(html: str) -> str:
    """Return HTML whose lines of code have no ids: on most pages no link leads to a line."""
    return LINE_ID.sub("<span>", html)


def _link(name: str, own: Path | None) -> str:
    """Return a name as code, with a link if it is a file or is defined in the stop's own file."""
    path = _file(name, own)
    if path is not None:
        return f"[`{name}`]({_page(path)})"
    if own is not None:
        line = _lines(own).get(name)
        if line is not None:
            # mkdocs does not know the anchors of lines: `with_lines` adds them
            return f'[`{name}`]({_page(own)}){{: data-line="{line}" }}'
    return f"`{name}`"


def _file(name: str, own: Path | None) -> Path | None:
    """Return the source file of that name, from the root or beside the stop's own file."""
    if not name.endswith(".py"):
        return None
    places = [ROOT / name, *([own.parent / name] if own else [])]
    return next((place.resolve() for place in places if place.is_file()), None)


def _lines(path: Path) -> dict[str, int]:
    """Return the line of each function, class and method of a file."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = inner.lineno
                    found.setdefault(inner.name, inner.lineno)
    return found


def _named_files() -> Iterator[Path]:
    """Yield the files that the course names."""
    text = COURSE.read_text(encoding="utf-8")
    stops = {number: ROOT / path for number, path in STOP.findall(text)}
    for part in re.split(r"(?m)^(?=## )", text):
        stop = re.match(r"## Stop (\d+):", part)
        for name in NAME.findall(part):
            path = _file(name, stops[stop[1]] if stop else None)
            if path is not None:
                yield path


def _page(path: Path) -> str:
    return f"files/{path.relative_to(ROOT).with_suffix('.md').as_posix()}"


def _up(name: str) -> str:
    return "../" * (name.count("/") + 1)

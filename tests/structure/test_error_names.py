"""Error messages: the names of functions, methods and attributes in them exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.source_tree import ROOT

FOLDERS = ("reference", "optimized", "shared")
FOREIGN = {
    "ALL_ATTENTION_FUNCTIONS": "of transformers",
    "GPU": "GPU(s)",
    "cpp_extension": "of torch",
    "kv_cache_layout": "vLLM's setting",
}
NAME = re.compile(r"(?<![\w.\-/])((?:\w+\.)*[a-zA-Z]\w*)(\(?)")


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the text of every error, with a space in the place of each value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in node.exc.args:
                if isinstance(part, ast.JoinedStr):
                    yield "".join(
                        piece.value if isinstance(piece, ast.Constant) else " "
                        for piece in part.values
                    )
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def names_in(message: str) -> Iterator[str]:
    """Yield what looks like a name: with an underscore, or with a parenthesis after it."""
    for name, call in NAME.findall(message):
        last = name.rpartition(".")[2]
        if call or "_" in last.strip("_"):
            yield last


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names of files, names that are defined, read or written, and strings that are names."""
    found = {*FOREIGN}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            found.add(path.stem)
            for node in ast.walk(parsed(path)):
                match node:
                    case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                        found.add(name)
                    case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                        found.add(name)
                    case ast.Attribute(attr=name) | ast.Name(id=name):
                        found.add(name)
                    case ast.alias(name=name):
                        found.add(name.rpartition(".")[2])
                    case ast.Constant(value=str(name)) if name.isidentifier():
                        found.add(name)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_names_in_errors_exist(folder: str, known: set[str]) -> None:
    unknown = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / folder).rglob("*.py")
        for message in messages(parsed(path))
        for name in names_in(message)
        if name not in known
    }
    assert not unknown


def test_a_name_that_does_not_exist_is_found() -> None:
    source = (
        'raise RuntimeError(f"no request {x}: see has_unfinished_requests, or stop()")'
    )
    (message,) = messages(ast.parse(source))
    assert [*names_in(message)] == ["has_unfinished_requests", "stop"]

"""Digests of code: they change with what is computed, not with comments or docstrings."""

import ast
import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).parent


def short_hash(*texts: str) -> str:
    """Return 12 characters that change with any of the texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def statements(text: str) -> list[ast.stmt]:
    """Return the statements of a module without prose."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not _is_prose(each)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree.body


def definitions(text: str) -> list[str]:
    """Return the statements of a module without prose: functions and methods one by one."""
    lines, last = text.split("\n"), 0
    found: list[str] = []
    for statement in ast.parse(text).body:
        decorators = getattr(statement, "decorator_list", [])
        first = min(each.lineno for each in (*decorators, statement))
        # statements of one line are taken together
        if not _is_prose(statement) and first > last:
            last = statement.end_lineno or first
            found += _definitions_in("\n".join(lines[first - 1 : last]))
    return found or [written_out(ast.Pass())]


@cache
def _definitions_in(part: str) -> tuple[str, ...]:
    """Return the same of some whole lines, which most changes of a file leave as they are."""
    found = []
    for statement in statements(part):
        if isinstance(statement, ast.ClassDef):
            own, statement.body = statement.body, []
            found += [f"{statement.name}.{written_out(each)}" for each in own]
        found.append(written_out(statement))
    return tuple(found)


def written_out(node: object) -> str:
    """Return a syntax tree as text that is the same in every version of Python.

    `ast.dump` writes fields that a later version added, although they are empty.
    """
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={written_out(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != []
        ]
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(written_out, node))}]"
    return repr(node)


def _is_prose(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def definitions_of(path: Path) -> tuple[str, ...]:
    """Return the definitions of a file."""
    return tuple(definitions(path.read_text(encoding="utf-8")))


def change_digest(path: Path, changed: str) -> str:
    """Return the digest of a changed file: of the definitions it changes, before and after.

    The path is not part of it, so the records of a file that moves stay valid.

    Args:
        path: the file as it is.
        changed: its changed text.
    """
    before, after = definitions_of(path), definitions(changed)
    kept = set(before) & set(after)
    parts = [each for each in (*before, "->", *after) if each not in kept]
    return short_hash(*parts)

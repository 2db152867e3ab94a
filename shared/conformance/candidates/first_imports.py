"""Imports at the beginning of a file, which are looked for before anything is executed."""

import ast
import importlib.util
import sys
from collections.abc import Iterator


def is_found(name: str) -> bool:
    """Return whether a package can be imported. Nothing is imported."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def first_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the packages that a file imports before anything else is executed, and their lines."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name.partition(".")[0], statement.lineno
        elif isinstance(statement, ast.ImportFrom):
            if not statement.level and statement.module:
                yield statement.module.partition(".")[0], statement.lineno
        elif not isinstance(statement, ast.Expr):
            return

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
    for each in tree.body:
        if isinstance(each, ast.Import):
            for alias in each.names:
                yield alias.name.partition(".")[0], each.lineno
        elif isinstance(each, ast.ImportFrom):
            if not each.level and each.module:
                yield each.module.partition(".")[0], each.lineno
        elif not isinstance(each, ast.Expr):
            return

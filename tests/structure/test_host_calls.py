"""Code of the host calls no function of a kernel's code: Triton changes the arguments of some."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import ROOT, modules, tree_of

pytestmark = pytest.mark.quick

OF_KERNELS = ("jit", "constexpr_function", "aggregate")
"""Decorators of functions and classes of which kernels are made."""


def decorators(node: ast.AST) -> list[str]:
    """Return the last names of a definition's decorators."""
    given = getattr(node, "decorator_list", [])
    plain = [
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for decorator in given
    ]
    return [ast.unparse(decorator).rsplit(".", 1)[-1] for decorator in plain]


def constexpr_functions(tree: ast.Module) -> set[str]:
    """Return the names of a module's functions that Triton evaluates while it compiles."""
    return {
        statement.name
        for statement in tree.body
        if isinstance(statement, ast.FunctionDef)
        and "constexpr_function" in decorators(statement)
    }


def host_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that the host makes."""
    for child in ast.iter_child_nodes(node):
        if any(decorator in OF_KERNELS for decorator in decorators(child)):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from host_calls(child)


def wrong_calls(path: Path, tree: ast.Module, names: set[str]) -> list[str]:
    """Return the calls of named functions by the host, with their lines."""
    return [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for call in host_calls(tree)
        if isinstance(call.func, ast.Name) and call.func.id in names
    ]


def test_the_host_calls_no_function_that_triton_evaluates() -> None:
    """Triton 3.6 gives it a NamedTuple as a tuple: each attention call of Hopper with a group that
    does not divide 64 raised an AttributeError.
    """
    trees = {
        path: tree_of(module)
        for module, path in modules().items()
        if module.startswith("optimized")
    }
    defined = {path: constexpr_functions(tree) for path, tree in trees.items()}
    found = []
    for path, tree in trees.items():
        names = set(defined[path])
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            folder = path.parents[node.level - 1]
            source = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            given = {name.name: name.asname or name.name for name in node.names}
            names |= {given[one] for one in defined.get(source, set()) & set(given)}
        found += wrong_calls(path, tree, names)
    assert sum(map(len, defined.values())) > 20 and found == []

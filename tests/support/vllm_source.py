"""Source code of a wheel: its classes with their bases, its functions, and its names."""

import ast
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.vllm_conditions import NotFollowed
from support.wheel_interfaces import parse


class Capability(NamedTuple):
    """A compute capability."""

    major: int
    minor: int


class Class(NamedTuple):
    """A class and its bases in the order in which a method is looked up."""

    nodes: tuple[tuple[ast.ClassDef, str], ...]


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those in an `if` or a `try`."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            waiting[:0] = node.body


class Source:
    """Classes and functions of a wheel, and what their methods return.

    Args:
        wheel: a wheel of vLLM.
        facts: values of names with a dot, such as `envs.VLLM_BATCH_INVARIANT`.
    """

    def __init__(self, wheel: zipfile.ZipFile, facts: dict[str, Any]) -> None:
        self.wheel, self.facts = wheel, facts
        self._trees: dict[str, ast.Module] = {}

    def find(self, module: str, name: str) -> tuple[Any, str] | None:
        """Return the class, the function or the value of a name, and its module."""
        if module not in self._trees:
            try:
                self._trees[module] = parse(self.wheel, module)
            except KeyError:
                return None  # of another package
        for node in statements(self._trees[module]):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return node, module
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return node.value, module
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.find(node.module, alias.name)
        return None

    def class_of(self, module: str, name: str) -> Class:
        """Return a class with all its bases in vLLM."""
        found = self.find(module, name)
        if found is None or not isinstance(found[0], ast.ClassDef):
            return Class(())
        nodes = [found]
        for base in found[0].bases:
            inherited = self.class_of(found[1], ast.unparse(base).split("[")[0])
            nodes += [node for node in inherited.nodes if node not in nodes]
        return Class(tuple(nodes))

    def member(self, owner: Class, name: str, start: int = 0) -> tuple[Any, str, int]:
        """Return a method or the value of an attribute, its module, and its class's number."""
        for number, (node, module) in enumerate(owner.nodes[start:], start):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == name:
                    return statement, module, number
                if isinstance(statement, ast.AnnAssign):
                    if ast.unparse(statement.target) == name and statement.value:
                        return statement.value, module, number
                elif isinstance(statement, ast.Assign) and name in map(
                    ast.unparse, statement.targets
                ):
                    return statement.value, module, number
        raise NotFollowed

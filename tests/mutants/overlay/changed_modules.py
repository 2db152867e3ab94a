"""Imports of changed modules: a module of the package is compiled from other text than its file's.

The environment variable PAGETWIN_OVERLAY names a JSON file:

- "changed": By the name of a module, the path of its changed text.
- "traced": Optional. Modules whose functions note their first call in each test.
- "calls": Optional. The file in which a function is noted: test, module and function, by tabs.

This file imports nothing but the standard library, because every process of a test runs it.
"""

import ast
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

VARIABLE = "PAGETWIN_OVERLAY"
TEST = "PYTEST_CURRENT_TEST"
"""Environment variable in which pytest names the test; the processes of the test inherit it."""
NOTE = "_note_first_call_of"
"""Name of the function that a traced module calls."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Changed(SourceFileLoader):
    """Loads a module from its changed text, or with functions that note their calls."""

    def __init__(self, name: str, path: str, text: str | None, calls: str) -> None:
        super().__init__(name, path)
        self.text, self.calls = text, calls

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module; positions are those of the text."""
        text: str | bytes = self.get_data(self.path) if self.text is None else self.text
        tree = ast.parse(text, self.path)
        if self.text is None:
            _Noting(fullname).visit(tree)
            ast.fix_missing_locations(tree)
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        if self.text is None:
            module.__dict__[NOTE] = _Calls(self.calls).note
        super().exec_module(module)


class _Noting(ast.NodeTransformer):
    """Puts a call of NOTE at the start of each function."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.path: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.path.append(node.name)
        self.generic_visit(node)
        self.path.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit(node)

    def _visit(self, node: Function) -> ast.AST:
        name = ".".join([*self.path, node.name])
        if len(self.path) > 1 or (self.path and self.path[0][:1].islower()):
            return node  # inside of a function
        call = ast.parse(f"{NOTE}({self.module!r}, {name!r})").body[0]
        start = 1 if ast.get_docstring(node) is not None else 0
        ast.copy_location(call, node.body[0])
        node.body.insert(start, call)
        return node


class _Calls:
    """Notes the first call of each function in each test."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: set[tuple[str, str, str]] = set()

    def note(self, module: str, function: str) -> None:
        test = os.environ.get(TEST, "")
        key = (test, module, function)
        if key in self.seen:
            return
        self.seen.add(key)
        line = "\t".join(key) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)


class Finder:
    """Finds the modules that are changed or traced where the other finders find them."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.changed: dict[str, str] = request["changed"]
        self.traced: set[str] = set(request.get("traced", ()))
        self.calls: str = request.get("calls", "")

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module that is changed or traced."""
        if name not in self.changed and name not in self.traced:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, Finder):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is None:
                continue
            assert spec.origin is not None
            text = None
            if name in self.changed:
                text = Path(self.changed[name]).read_text(encoding="utf-8")
            spec.loader = Changed(name, spec.origin, text, self.calls)
            return spec
        return None


def install() -> None:
    """Change the imports of this process as PAGETWIN_OVERLAY says."""
    request = Path(os.environ[VARIABLE]).read_text(encoding="utf-8")
    finder = Finder(json.loads(request))
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]

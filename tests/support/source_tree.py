"""The sources of pagetwin as data: modules, imports, and the functions that a function calls."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TWINS = ("reference", "optimized")
FOLDERS = {
    **{twin: ROOT / twin for twin in TWINS},
    **{
        path.parent.name: path.parent
        for path in (ROOT / "shared").glob("*/__init__.py")
        if path.parent.name != "package"
    },
}
"""The folder of each package: that of `pagetwin.engine` is FOLDERS["engine"]. The package
`pagetwin`, which imports nothing before it is asked to, is `shared/package`."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module: "reference.cache.slot_mapping" and so on."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def docstrings_of(module: str) -> list[tuple[str, str]]:
    """Return the name and the docstring of a module ("") and of each class and function in it."""
    found = []
    waiting: list[ast.AST] = [tree_of(module)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            words = ast.get_docstring(node) or ""
            found.append((getattr(node, "name", ""), words))
        # expressions, which are most nodes, contain none
        waiting += [
            child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
        ]
    return found


def absolute(module: str, node: ast.ImportFrom) -> str | None:
    """Return the module that a `from` statement names, without "pagetwin."; None if outside."""
    if not node.level:
        name = node.module or ""
        return name.removeprefix("pagetwin.") if name.startswith("pagetwin.") else None
    parts = module.split(".")
    if modules()[module].name != "__init__.py":
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of pagetwin that a module names in import statements, anywhere in it.

    A package that calls `import_option_files` or `import_format_files` imports all files of its
    folder.
    """
    found = set()
    source = modules()[module].read_text(encoding="utf-8")
    if re.search(r"import_(option|format)_files\(__name__", source):
        found |= {inner for inner in modules() if inner.rpartition(".")[0] == module}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            target = absolute(module, node)
            for alias in node.names if target is not None else ():
                inner = f"{target}.{alias.name}"
                found.add(inner if inner in modules() else target)
        elif isinstance(node, ast.Import):
            names = (alias.name.removeprefix("pagetwin.") for alias in node.names)
            found.update(name for name in names if name in modules())
    return frozenset(
        target for target in found if target in modules() and target != module
    )


def cycles() -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for target in sorted(imports(module)):
            if target not in order:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], order[target])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in modules():
        if module not in order:
            visit(module)
    return sorted(found)


@dataclass(frozen=True)
class Definition:
    """A function or class at the top of a module."""

    module: str
    name: str


@cache
def definitions(module: str) -> dict[str, FunctionNode | ast.ClassDef]:
    return {
        node.name: node
        for node in tree_of(module).body
        if isinstance(node, FunctionNode | ast.ClassDef)
    }


@cache
def imported_names(module: str) -> dict[str, tuple[str, str]]:
    """Return module and name of each name that is imported from pagetwin."""
    return {
        alias.asname or alias.name: (target, alias.name)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom)
        and (target := absolute(module, node)) is not None
        for alias in node.names
    }


def resolve(module: str, name: str) -> Definition | None:
    """Return where a name of a module is defined; None if outside pagetwin or not a function."""
    seen: set[tuple[str, str]] = set()
    # a package imports its own modules: their names lead back to it
    while module in modules() and (module, name) not in seen:
        if name in definitions(module):
            return Definition(module, name)
        seen.add((module, name))
        if name not in imported_names(module):
            return None
        module, name = imported_names(module)[name]
    return None


@cache
def values(module: str) -> dict[str, ast.expr]:
    """Return what the names at the top of a module are set to."""
    found = {}
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                target.id: node.value
                for target in targets
                if isinstance(target, ast.Name)
            }
    return found


def value_of(module: str, name: str) -> tuple[str, ast.expr] | None:
    """Return where a name of a module is set, and to what; None if outside pagetwin."""
    seen: set[tuple[str, str]] = set()
    while module in modules() and (module, name) not in seen:
        if name in values(module):
            return module, values(module)[name]
        seen.add((module, name))
        if name not in imported_names(module):
            return None
        module, name = imported_names(module)[name]
    return None


def uses(module: str, node: ast.AST) -> Iterator[tuple[int, Definition]]:
    """Return line and definition of each function or class that a node names.

    A name of a table stands for what the table names.
    """
    names = imported_names(module)
    for part in ast.walk(node):
        named = None
        if isinstance(part, ast.Name):
            named = module, part.id
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            target, inner = names.get(part.value.id, ("", ""))
            if f"{target}.{inner}" in modules():
                named = f"{target}.{inner}", part.attr
        if named is None:
            continue
        found, table = resolve(*named), value_of(*named)
        if found is not None:
            yield part.lineno, found
        elif table is not None and table[1] is not node:
            for _, inside in uses(*table):
                yield part.lineno, inside


@cache
def step_lines(module: str) -> tuple[tuple[int, str], ...]:
    """Return line and words of each `# step:` comment of a module."""
    text = modules()[module].read_text(encoding="utf-8")
    return tuple(
        (number, line.split("# step:")[1].strip())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip().startswith("# step:")
    )


def steps_of(
    operation: Definition, operations: frozenset[str], method: str | None = None
) -> list[str]:
    """Return the steps of an operation in the order of its code, later repeats dropped.

    Calls are followed into functions of the same twin and of the reference, unless they are
    operations themselves; calls of a method into private methods of its class.

    Args:
        operation: the function or class.
        operations: names of all public operations.
        method: one method of the class.
    """
    twin = operation.module.split(".")[0]
    seen: set[tuple[str, int]] = set()

    def walk(module: str, node: ast.AST, owner: ast.ClassDef | None) -> Iterator[str]:
        assert isinstance(node, FunctionNode | ast.ClassDef)
        if (module, node.lineno) in seen:
            return
        seen.add((module, node.lineno))
        end = node.end_lineno or node.lineno
        events: list[tuple[int, str | tuple[str, ast.AST, ast.ClassDef | None]]] = [
            line for line in step_lines(module) if node.lineno <= line[0] <= end
        ]
        for line, used in uses(module, node):
            package = used.module.split(".")[0]
            if package in (twin, "reference") and used.name not in operations:
                events.append(
                    (line, (used.module, definitions(used.module)[used.name], None))
                )
        if owner is not None:
            private = {
                method_node.name: method_node
                for method_node in owner.body
                if isinstance(method_node, FunctionNode)
                and method_node.name.startswith("_")
            }
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and part.attr in private:
                    events.append((part.lineno, (module, private[part.attr], owner)))
        for _, event in sorted(events, key=lambda event: event[0]):
            if isinstance(event, str):
                yield event
            else:
                yield from walk(*event)

    node = definitions(operation.module)[operation.name]
    if method is None:
        return list(dict.fromkeys(walk(operation.module, node, None)))
    assert isinstance(node, ast.ClassDef)
    for statement in node.body:
        if isinstance(statement, FunctionNode) and statement.name == method:
            return list(dict.fromkeys(walk(operation.module, statement, node)))
    return []


def body_of(node: FunctionNode) -> str:
    """Return a function's code without its docstring, comments and formatting."""
    copy = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(copy, FunctionNode)
    if ast.get_docstring(copy) is not None:
        copy.body = copy.body[1:]
    return ast.unparse(copy)

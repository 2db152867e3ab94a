"""Digests of code: they change with what is computed, not with prose or names of variables."""

import ast
import hashlib
import itertools
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).parent
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def short_hash(*texts: str) -> str:
    """Return 12 characters that change with any of the texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def statements(text: str) -> list[ast.stmt]:
    """Return the statements of a module without prose."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not _is_prose(statement)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree.body


def definitions(text: str) -> list[str]:
    """Return the statements of a module without prose: functions and methods one by one."""
    lines, last = text.split("\n"), 0
    found: list[str] = []
    for statement in ast.parse(text).body:
        decorators = getattr(statement, "decorator_list", [])
        first = min(decorator.lineno for decorator in (*decorators, statement))
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
            for member in own:
                number_variables(member)
                found.append(f"{statement.name}.{written_out(member)}")
        number_variables(statement)
        found.append(written_out(statement))
    return tuple(found)


def number_variables(statement: ast.stmt) -> None:
    """Replace the names of local variables by numbers, so that another name is the same code.

    Local are the variables that a function sets, those of comprehensions, and the arguments of
    lambdas. A variable of a function keeps its name if an argument, an import, a nested definition
    or an attribute of a nested class has it too.

    Args:
        statement: modified in place.
    """
    nodes, count = list(ast.walk(statement)), itertools.count()
    # inner scopes first: their variables hide those of outer ones
    for scope in reversed(nodes):
        local: set[str] = set()
        if isinstance(scope, COMPREHENSIONS):
            targets = [generator.target for generator in scope.generators]
            local = {name for target in targets for name in _stored_in(target)}
        elif isinstance(scope, ast.Lambda):
            local = {argument.arg for argument in scope.args.args}
        elif scope is statement and isinstance(scope, ast.FunctionDef):
            local = _stored_in(scope) - {name for node in nodes for name in _kept(node)}
        numbers: dict[str, str] = defaultdict(lambda: f"variable {next(count)}")
        for node in ast.walk(scope) if local else ():
            if isinstance(node, ast.Name) and node.id in local:
                node.id = numbers[node.id]
            elif isinstance(node, ast.arg) and node.arg in local:
                node.arg = numbers[node.arg]


def _stored_in(node: ast.AST) -> set[str]:
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _kept(node: ast.AST) -> set[str]:
    """Return names that a node of a function defines otherwise than by setting a variable."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return set(node.names)
    if isinstance(node, (ast.Name, ast.Constant, ast.Attribute, ast.keyword)):
        return set()
    texts = {value for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return texts | (_stored_in(node) if isinstance(node, ast.ClassDef) else set())


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
    parts = [member for member in (*before, "->", *after) if member not in kept]
    return short_hash(*parts)

"""Code that a law can run: every definition that it reaches by name, and a digest of them.

A definition is a statement at the top of a module: a function, a class or an assignment. It reaches
the definitions that its text names, in its own module or imported from another one. An operation
is reached by its name, as an attribute or a string, in the reference and in the twin that is tried.
All other statements of a module run when the module is imported, so they are reached by whatever
imports it. Annotations reach nothing. Gluon kernels are left out, since they have no interpreter.
`tests/test_mutants.py` compares the result with the functions that laws call.
"""

import ast
from collections.abc import Iterator
from functools import cache

from pagetwin.conformance.harness.law import Law
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.contract.operations import CONCEPTS
from source_tree import imported_names, imports, modules

from .digest import MUTANTS, definitions_of, short_hash, statements, written_out

Place = tuple[str, str]
"""A module and the name of a definition in it; an empty name: its other statements."""

HARNESS = "conformance.harness"
TRIED_WITH = (
    (f"{HARNESS}.trial", "try_law"),
    (f"{HARNESS}.trial", "try_case"),
    (f"{HARNESS}.trial", "make_setting"),
    (f"{HARNESS}.candidate", "load_candidate"),
    (f"{HARNESS}.interpreter", "speed_up"),
)
"""What every mutant is tried with."""
ALL = "LAWS"
"""The list of all laws. A law whose file imports it may run any other law."""
NOT_FOLLOWED = (
    "conformance.laws.all_laws",
    "conformance.flashinfer_bench.adapter",
    f"{HARNESS}.shrinking",
    f"{HARNESS}.pictures",
)
"""Modules that decide about no mutant: imports of all laws, solutions, parts of a report."""
WITH_TABLES = (
    f"{HARNESS}.candidate",
    f"{HARNESS}.fitting",
    f"{HARNESS}.report",
    f"{HARNESS}.support",
    "conformance.generators.option_pairs",
)
"""Modules that hold names of operations and do not call them."""
HOME = {
    name: f"{'bookkeeping' if each.is_single else '{twin}'}.{each.module}"
    for each in CONCEPTS
    for name in (each.operations or ("backends", "BACKENDS"))
}
"""The module of each operation; "{twin}" is the name of the twin."""


@cache
def reach_digest(law: str, twin: str) -> str:
    """Return the digest of the code that a law reaches on a twin, and of `graft.py`.

    Args:
        law: The law's sentence; empty: all laws.
        twin: "reference" or "optimized".

    Returns:
        12 characters; empty if no law has this sentence.
    """
    laws = [each for each in ALL_LAWS if law in ("", each.name)]
    places = {place for each in laws for place in reach_of(each, twin)}
    hashes = sorted({_hash_of(place) for place in places})
    graft = definitions_of(MUTANTS / "graft.py")
    return short_hash(*graft, *hashes) if laws else ""


def reach_of(law: Law, twin: str) -> frozenset[Place]:
    """Return the definitions that a law reaches on a twin."""
    return _closure(_place_of(law), twin)


def _place_of(law: Law) -> Place:
    return law.body.__module__.removeprefix("pagetwin."), law.body.__name__


@cache
def _closure(law: Place, twin: str) -> frozenset[Place]:
    found: set[Place] = set()
    waiting = [law, *TRIED_WITH]
    # the file of each concept is imported when the operations are looked for
    for home in HOME.values():
        waiting += [(home.format(twin=side), "") for side in ("reference", twin)]
    if ALL in imported_names(law[0]):
        waiting += map(_place_of, ALL_LAWS)
    while waiting:
        place = waiting.pop()
        if place not in found and not _is_gluon(place):
            found.add(place)
            waiting += _reached(place, twin)
    return frozenset(found)


@cache
def _reached(place: Place, twin: str) -> frozenset[Place]:
    """Return the definitions that one definition names."""
    module, name = place
    own = definitions(module)
    bare: set[str] = set()
    words = {
        each
        for statement in own.get(name, [])
        for each in _words(statement, bare, is_base=False)
    }
    found = {(each, "") for each in (module, *imports(module))}
    for word in words:
        if word in own:
            found.add((module, word))
        if word in HOME and module.startswith("conf") and module not in WITH_TABLES:
            for side in ("reference", twin):
                found |= _resolve(HOME[word].format(twin=side), word)
        target, original = imported_names(module).get(word, ("", ""))
        inner = f"{target}.{original}"
        if inner in modules():
            # a module that is passed on may be asked for any of its definitions
            for each in definitions(inner) if word in bare else words:
                found |= _resolve(inner, each)
        elif target in modules():
            found |= _resolve(target, original)
    if "import_option_files" in words:
        for inner in imports(module):
            if inner.rpartition(".")[0] == module:
                found |= {(inner, each) for each in definitions(inner)}
    return frozenset(each for each in found if each[0] not in NOT_FOLLOWED)


def _resolve(module: str, name: str) -> set[Place]:
    """Return where a name of a module is defined; empty if the module does not have it."""
    if name in definitions(module):
        return {(module, name)}
    target, original = imported_names(module).get(name, ("", ""))
    return _resolve(target, original) if target in modules() else set()


@cache
def definitions(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of a module by the name that they define; "" for the others."""
    found: dict[str, list[ast.stmt]] = {"": []}
    for statement in statements(modules()[module].read_text(encoding="utf-8")):
        for name in _names_of(statement):
            found.setdefault(name, []).append(statement)
    return found


def _names_of(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines; [""] if it does something else."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Pass)):
        return []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    else:
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else []
    parts = [part for target in targets for part in ast.walk(target)]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    kinds = (ast.Name, ast.Tuple, ast.expr_context)
    is_plain = bool(names) and all(isinstance(part, kinds) for part in parts)
    return names if is_plain else [""]


def _words(node: ast.AST, bare: set[str], is_base: bool) -> Iterator[str]:
    """Yield the names, attributes and strings of a statement, without its annotations.

    Args:
        node: The statement, or a part of it.
        bare: Set that receives the names that are more than the base of an attribute.
        is_base: Whether the node is the base of an attribute.
    """
    if isinstance(node, ast.Name):
        yield node.id
        if not is_base:
            bare.add(node.id)
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _words(each, bare, isinstance(node, ast.Attribute))


@cache
def _is_gluon(place: Place) -> bool:
    return any(
        ast.unparse(decorator).startswith("gluon.jit")
        for each in definitions(place[0]).get(place[1], [])
        for decorator in getattr(each, "decorator_list", [])
    )


@cache
def _hash_of(place: Place) -> str:
    found = definitions(place[0]).get(place[1], [])
    return short_hash(*place, *map(written_out, found)) if found else ""

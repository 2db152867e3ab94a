"""Side-by-side view of the two files of a concept, step by step.

Each public operation of the reference is divided at its `# step:` comments. The optimized twin may
have the same steps in a private function, often a kernel. So for each operation all functions of
the optimized file that it calls are searched, in file order. Signatures and docstrings are omitted
here: they are the same, and the contract shows them.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from pagetwin.contract.operations import CONCEPTS, Concept

ROOT = Path(__file__).parents[2]
CONCEPT_FILES = {
    ROOT / concept.path(twin)
    for concept in CONCEPTS
    for twin in ("reference", "optimized")
}
STEP = re.compile(r"\s*# step: (?P<words>.*)")


@dataclass(frozen=True)
class Chunk:
    """Code up to the next step. `step` is empty for the code before the first step."""

    step: str
    code: str


@dataclass(frozen=True)
class Function:
    """One function or method of a file, divided at its steps."""

    name: str
    owner: str
    chunks: tuple[Chunk, ...]
    uses: frozenset[str]
    path: Path

    @property
    def title(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @property
    def body(self) -> str:
        """The whole body, including its step comments."""
        parts = []
        for chunk in self.chunks:
            parts += [f"# step: {chunk.step}"] * bool(chunk.step) + [chunk.code]
        return "\n".join(parts)


def functions_of(path: Path) -> list[Function]:
    """Return the functions and methods of a file, in file order; [] if the file does not exist.

    Functions of private files in the same folder follow, if they or their imports contain steps.
    """
    if not path.exists():
        return []
    files = [path]
    for file in files:
        files += [
            imported for imported in _private_imports(file) if imported not in files
        ]
    taken = [file for file in files if file == path or _takes_steps(file)]
    return [function for file in taken for function in _functions_in(file)]


def _private_imports(path: Path) -> list[Path]:
    """Return the files without operations that a file of a twin imports from its own package.

    Kernels for one chip are left out: the pages show the portable ones.
    """
    return [
        imported
        for imported in _imports(path)
        if imported not in CONCEPT_FILES
        and imported.name != "__init__.py"
        and "sm90" not in imported.parts
    ]


@cache
def _imports(path: Path) -> list[Path]:
    """Return the files of the twins that a file imports from its own package."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = path.parents[node.level - 1]
        for name in (
            node.module,
            *(f"{node.module or ''}.{x.name}" for x in node.names),
        ):
            parts = (name or "").strip(".").split(".")
            file = folder.joinpath(*parts).with_suffix(".py")
            package = folder.joinpath(*parts, "__init__.py")
            for imported in (file, package):
                inside = imported.relative_to(ROOT).parts[0] in (
                    "reference",
                    "optimized",
                )
                if imported.is_file() and inside:
                    found.append(imported)
    return list(dict.fromkeys(found))


@cache
def _takes_steps(path: Path) -> bool:
    own = any(STEP.match(line) for line in path.read_text().splitlines())
    return own or any(_takes_steps(imported) for imported in _private_imports(path))


@cache
def _functions_in(path: Path) -> list[Function]:
    source = path.read_text()
    lines = source.splitlines()
    found = []
    for owner, node in _definitions(ast.parse(source)):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if not body:
            continue
        first = node.body[0].end_lineno + 1 if body is not node.body else body[0].lineno
        # comments before the first statement belong to it
        while body is node.body and lines[first - 2].lstrip().startswith("#"):
            first -= 1
        chunks = tuple(_cut(lines[first - 1 : node.end_lineno]))
        uses = _names_in(node) | {owner}
        found.append(Function(node.name, owner, chunks, frozenset(uses), path))
    return found


def _names_in(node: ast.AST) -> set[str]:
    """Return the names in some code, and those after the dot of another one."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
    }


@cache
def _values_in(path: Path) -> dict[str, frozenset[str]]:
    """Return the names that lead on from each value, class and import at the top of a file.

    A table of kernels leads to what its entries name, a class to its methods.
    """
    found: dict[str, frozenset[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = frozenset(_names_in(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = frozenset(_names_in(node.value))
            found |= {
                target.id: names for target in targets if isinstance(target, ast.Name)
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {x.asname: frozenset([x.name]) for x in node.names if x.asname}
    return found


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield node.name, method


def _cut(lines: list[str]) -> Iterator[Chunk]:
    margin = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
    step, held = "", []
    for line in lines:
        found = STEP.match(line)
        if found is None:
            held.append(line[margin:])
            continue
        yield from _chunk(step, held)
        step, held = found["words"], []
    yield from _chunk(step, held)


def _chunk(step: str, lines: list[str]) -> Iterator[Chunk]:
    code = textwrap.dedent("\n".join(lines)).strip("\n")
    if step or code.strip():
        yield Chunk(step, code)


def re_exported(path: Path) -> set[str]:
    """Return the names that a file of the optimized twin takes from the reference."""
    return {
        name.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("reference.")
        for name in node.names
    }


def side_by_side(concept: Concept) -> str:
    """Return both files of a concept as Markdown, step by step.

    What has one body for both twins is shown in one column.

    Args:
        concept: The concept. If it has no operations, methods named `forward` are shown.
    """
    functions = functions_of(ROOT / concept.path("reference"))
    if concept.is_single:
        return _one_column(functions)
    parts = [_two_columns(concept)]
    names = re_exported(ROOT / concept.path("optimized"))
    if shared := [
        function for function in functions if {function.name, function.owner} & names
    ]:
        parts += ["### One body for both twins", _one_column(shared)]
    return "\n\n".join(parts)


def _one_column(functions: list[Function]) -> str:
    """Return functions as Markdown, one after another."""
    blocks = []
    for function in functions:
        if function.name[0] != "_" or function.name == "__init__":
            blocks += [f"### `{function.title}`", _code(function.body, "")]
    return "\n\n".join(blocks)


def _two_columns(concept: Concept) -> str:
    operations = concept.operations
    left = functions_of(ROOT / concept.path("reference"))
    right = functions_of(ROOT / concept.path("optimized"))
    shown: set[str] = set()
    parts = []
    names = {function.name for function in left} | {function.owner for function in left}
    names -= re_exported(ROOT / concept.path("optimized"))
    for operation in operations or ("forward",):
        if operation not in names:
            continue
        if methods := [method for method in left if method.owner == operation]:
            parts += _class(
                methods, [method for method in right if method.owner == operation]
            )
            continue
        ours, theirs = _reached(left, operation), _reached(right, operation)
        own = [function for function in ours if function.name == operation]
        # other operations have their own section on the page
        others = {function.name for function in theirs} & set(operations) - {operation}
        ours, theirs = (
            [function for function in side if function.name not in others]
            for side in (ours, theirs)
        )
        # steps taken from another operation are shown if the optimized steps are its own
        if _steps(own) or not _steps(theirs):
            ours = own
        shown |= {function.title for function in theirs}
        parts += _operation(ours, theirs, operation)
    rest = [
        function
        for function in right
        if function.title not in shown and not function.owner
    ]
    if rest:
        blocks = "\n\n".join(_code(function.body, function.title) for function in rest)
        parts.append(_details(f"The rest of {concept.path('optimized')}", blocks))
    return "\n\n".join(parts)


def _class(left: list[Function], right: list[Function]) -> Iterator[str]:
    """Return the methods of a class in pairs of the same name. Private ones come last, folded."""
    for ours in left:
        theirs = [method for method in right if method.name == ours.name]
        if ours.name[0] != "_" or ours.name == "__init__":
            yield from _operation([ours], theirs, ours.name)
    private = [
        _code(method.body, f"{side}: {method.title}")
        for side, methods in (("reference", left), ("optimized", right))
        for method in methods
        if method.name[0] == "_" and method.name != "__init__"
    ]
    if private:
        yield _details(f"Private methods of {left[0].owner}", "\n\n".join(private))


def _reached(functions: list[Function], operation: str) -> list[Function]:
    """Return the function of that name and those that it leads to, in the order of the files.

    It leads to what it calls, and through classes and tables to what these name. Methods are left
    out that have no steps.
    """
    leads: dict[str, set[str]] = {}
    for path in {function.path for function in functions}:
        for name, names in _values_in(path).items():
            leads.setdefault(name, set()).update(names)
    for function in functions:
        if not function.owner or function.name == operation:
            leads.setdefault(function.name, set()).update(function.uses)
    names = [operation]
    for name in names:  # grows
        names += sorted((leads.get(name, set()) & leads.keys()) - {*names})
    return [
        function
        for function in functions
        if (
            function.name in names
            and (not function.owner or function.name == operation)
        )
        or (function.owner in names and _steps([function]))
    ]


def _steps(functions: list[Function]) -> list[str]:
    """Return the steps of some functions, each once, in file order."""
    steps = [
        chunk.step for function in functions for chunk in function.chunks if chunk.step
    ]
    return list(dict.fromkeys(steps))


def _operation(
    ours: list[Function], theirs: list[Function], operation: str
) -> Iterator[str]:
    steps = _steps(ours)
    yield f"### `{operation}`"
    yield '<div class="twin heads"><div>reference</div><div>optimized</div></div>'
    if not steps:
        yield _row("", _whole(ours, operation), _whole(theirs, operation))
        return
    loops = _loop(ours, steps), _loop(theirs, steps)
    if all(loops):
        yield _row("", *(_code(loop, "") for loop in loops))
    for step in steps:
        yield _row(step, _at(ours, operation, step), _at(theirs, operation, step))
    start = _before(ours, operation, steps), _before(theirs, operation, steps)
    if any(start):
        yield _details("Arguments, validation and launch", _row("", *start))


def _loop(functions: list[Function], steps: list[str]) -> str:
    """Return the loop that the first step is in; empty if there is none."""
    for function in functions:
        before = [chunk.code for chunk in function.chunks if not chunk.step]
        if before and any(chunk.step in steps for chunk in function.chunks):
            last = before[0].splitlines()[-1]
            return textwrap.dedent(last) if last.lstrip().startswith("for ") else ""
    return ""


def _whole(functions: list[Function], operation: str) -> str:
    """Return the operation's body, and the folded bodies of the functions it calls."""
    blocks = [
        _code(function.body, "") for function in functions if function.name == operation
    ]
    blocks += [
        _details(function.title, _code(function.body, ""))
        for function in functions
        if function.name != operation
    ]
    return "\n\n".join(blocks)


def _before(functions: list[Function], operation: str, steps: list[str]) -> str:
    """Return the code before the first step. Code of called functions is folded."""
    same = [function for function in functions if function.name == operation]
    blocks, folded = [], []
    for function in functions:
        before = "\n".join(chunk.code for chunk in function.chunks if not chunk.step)
        if not before:
            continue
        if function in same:
            blocks.append(_code(before, function.title if len(same) > 1 else ""))
            continue
        stepped = any(chunk.step in steps for chunk in function.chunks)
        what = f"{function.title}, up to its first step" if stepped else function.title
        folded.append(_details(what, _code(before, "")))
    return "\n\n".join(blocks + folded)


def _at(functions: list[Function], operation: str, step: str) -> str:
    """Return the code of one step, and folded the functions that it calls.

    Code of another function gets that function's name.
    """
    same = [function for function in functions if function.name == operation]
    parts = []
    for function in functions:
        for chunk in function.chunks:
            if chunk.step == step:
                parts.append(
                    _code(chunk.code, "" if same == [function] else function.title)
                )
                # a step of one statement is what the called function does
                is_open = _count_lines(chunk.code) <= 2
                parts += [
                    _details(_named(called), _code(called.body, ""), is_open)
                    for called in _called(chunk, function)
                ]
    return "\n\n".join(parts)


def _called(chunk: Chunk, function: Function) -> list[Function]:
    """Return the functions without steps that a chunk calls, of its file and of its imports."""
    names = re.findall(r"\b(\w+)\(", chunk.code)
    near = {
        called.name: called
        for path in (*_imports(function.path), function.path)
        for called in _functions_in(path)
        if not called.owner and called.name != function.name and not _steps([called])
    }
    return [near[name] for name in dict.fromkeys(names) if name in near]


def _named(function: Function) -> str:
    return f"{function.name} ({function.path.relative_to(ROOT)})"


def _count_lines(code: str) -> int:
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#")
        for line in code.splitlines()
    )


def _row(step: str, left: str, right: str) -> str:
    words = f'<p class="step">{escape(step)}</p>\n\n' if step else ""
    nothing = '<p class="nothing">not a separate step here</p>' if step else ""
    return (
        f'{words}<div class="twin" markdown>\n'
        f'<div class="reference" markdown>\n\n{left or nothing}\n\n</div>\n'
        f'<div class="optimized" markdown>\n\n{right or nothing}\n\n</div>\n</div>'
    )


def _code(code: str, title: str) -> str:
    named = f' title="{title}"' if title else ""
    return f"```python{named}\n{code}\n```"


def _details(title: str, markdown: str, is_open: bool = False) -> str:
    return (
        f'<details markdown class="note"{" open" * is_open}><summary>{escape(title)}</summary>\n\n'
        f"{markdown}\n\n</details>"
    )

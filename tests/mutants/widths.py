"""Mutants that keep one integer in 8 or 16 bits, at every expression of the twins.

Each expression whose value is kept or passed on is wrapped in a call of `Widths.keep`. A site is
one such expression. Integers are recognized at run time, so one import serves all mutants:

- While no site is chosen, the largest integer of each site is noted. A site at which no law has an
  integer past 255 has a mutant that survives, without a trial.
- One site is then chosen, and `integer & 0xFF` or `integer & 0xFFFF` is kept there. Numbers that
  fit, negative ones and truth values stay as they are, so that only large numbers find a mutant.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl

from .graft import NAME, graft
from .mutant import ROOT

BITS = (8, 16)
"""Widths in which an integer is kept."""
WIDE = (torch.int16, torch.int32, torch.int64)
HELPER = "_keep"
"""Name of `Widths.keep` in an instrumented file."""
LEFT_OUT = ("cast", "isinstance", "len", "static_assert", "range", "super", "zip")
"""Functions whose arguments are not kept."""
DEPTH = 3
"""Levels of lists, tuples and dictionaries in which integers are looked for."""


@dataclass(frozen=True)
class Site:
    """An expression that is wrapped.

    Args:
        number: Its number among all sites.
        file: Its file, from the root of the repository.
        function: The function or method that contains it.
        line: Its line.
        text: The expression.
        is_kernel: Whether the function is a Triton kernel.
    """

    number: int
    file: str
    function: str
    line: int
    text: str
    is_kernel: bool

    @property
    def id(self) -> str:
        """File, function and expression."""
        return f"{self.file}:{self.line} {self.function}: {self.text}"


@dataclass
class Widths:
    """What instrumented files do with integers.

    Args:
        largest: The largest integer of each site since the last `reset`.
        chosen: The site whose integers are truncated. If None, none are.
        bits: The width in which it keeps them.
    """

    largest: list[int] = field(default_factory=list)
    chosen: int | None = None
    bits: int = 8

    def reset(self, sites: int) -> None:
        """Forget the integers of all sites."""
        self.largest = [0] * sites

    def keep(self, site: int, value: Any, is_scalar: bool = False) -> Any:
        """Return the value of a site; if that is the chosen one, truncated.

        Args:
            site: The number of the site.
            value: The value of the expression.
            is_scalar: Whether only numbers are of interest, not tensors.
        """
        if self.chosen is None:
            found = largest_of(value, DEPTH)
            if found > self.largest[site]:
                self.largest[site] = found
            return value
        if site != self.chosen or (
            is_scalar and not isinstance(value, (int, tl.tensor))
        ):
            return value
        if largest_of(value, DEPTH) < 1 << self.bits:
            return value
        return truncated(value, (1 << self.bits) - 1, DEPTH)


WIDTHS = Widths()


def _is_integer(value: Any) -> bool:
    """Return whether a tensor of the interpreter has integers wider than a byte."""
    return bool(value.dtype.is_int()) and value.dtype.primitive_bitwidth > 8


def largest_of(value: Any, depth: int) -> int:
    """Return the largest integer in a value, 0 if there is none."""
    if isinstance(value, (bool, str, bytes, float)) or value is None:
        return 0
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, torch.Tensor):
        if value.dtype in WIDE and value.numel() and value.device.type == "cpu":
            return int(value.max())
        return 0
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iu" and value.itemsize > 1 and value.size:
            return int(value.max())
        return 0
    if isinstance(value, tl.tensor):
        if _is_integer(value) and value.handle is not None:
            return int(np.max(value.handle.data, initial=0))
        return 0
    if isinstance(value, range):
        return max(value, default=0)
    if depth:
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if type(value) in (list, tuple, set, frozenset):
            return max((largest_of(part, depth - 1) for part in value), default=0)
    return 0


def truncated(value: Any, mask: int, depth: int) -> Any:
    """Return a value whose integers have the bits of a mask; negative ones are unchanged."""
    if isinstance(value, (bool, str, bytes, float)) or value is None:
        return value
    if isinstance(value, (int, np.integer)):
        return type(value)(value & mask) if value > 0 else value
    if isinstance(value, torch.Tensor):
        if value.dtype in WIDE:
            return torch.where(value > 0, value & mask, value)
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iu" and value.itemsize > 1:
            return np.where(value > 0, value & mask, value).astype(value.dtype)
        return value
    if isinstance(value, tl.tensor):
        return value & mask if _is_integer(value) else value
    if isinstance(value, range):
        return [number & mask for number in value]
    if depth and isinstance(value, dict):
        return {
            truncated(key, mask, depth - 1): truncated(inner, mask, depth - 1)
            for key, inner in value.items()
        }
    if depth and type(value) in (list, tuple, set, frozenset):
        return type(value)(truncated(part, mask, depth - 1) for part in value)
    return value


class _Instrument(ast.NodeTransformer):
    """Wraps the expressions of one file."""

    def __init__(self, file: str, first: int) -> None:
        self.file, self.first = file, first
        self.sites: list[Site] = []
        self.names: list[str] = []
        self.is_kernel = False

    def wrap(self, node: ast.expr) -> ast.expr:
        """Return the wrapped expression; displays are wrapped element by element."""
        if isinstance(node, (ast.Constant, ast.Lambda, ast.JoinedStr, ast.Starred)):
            return node
        if isinstance(node, (ast.Compare, ast.GeneratorExp, ast.Slice)):
            return node
        if isinstance(node, (ast.Tuple, ast.List)):
            node.elts = [self.wrap(element) for element in node.elts]
            return node
        if not self.names:
            return node
        if _is_wrapped(node):
            return node
        call = ast.Call(
            ast.Name(HELPER, ast.Load()),
            [ast.Constant(self._site(node)), node],
            [],
        )
        return ast.copy_location(call, node)

    def _site(self, node: ast.AST) -> int:
        site = Site(
            self.first + len(self.sites),
            self.file,
            ".".join(self.names),
            getattr(node, "lineno", 0),
            " ".join(_plain(node).split()),
            self.is_kernel,
        )
        self.sites.append(site)
        return site.number

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Change the body alone, not the decorators and defaults."""
        was_kernel = self.is_kernel
        self.is_kernel |= any(
            "jit" in ast.unparse(decorator) for decorator in node.decorator_list
        )
        self.names.append(node.name)
        node.body = [
            statement for old in node.body for statement in _listed(self.visit(old))
        ]
        self.names.pop()
        self.is_kernel = was_kernel
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Change the methods alone."""
        self.names.append(node.name)
        node.body = [
            self.visit(statement)
            if isinstance(statement, ast.FunctionDef)
            else statement
            for statement in node.body
        ]
        self.names.pop()
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Leave errors as they are."""
        return node

    visit_Assert = visit_JoinedStr = visit_Raise  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Wrap the value, and the indices of the targets."""
        self.generic_visit(node)
        if not isinstance(node.value, ast.Name):
            node.value = self.wrap(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Wrap the value, not the annotation."""
        if node.value is not None:
            value = self.visit(node.value)
            is_constexpr = "constexpr" in ast.unparse(node.annotation)
            node.value = value if is_constexpr else self.wrap(value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Wrap the new value of the target."""
        shown = ast.parse(ast.unparse(node)).body[0]
        shown.lineno = node.lineno
        self.generic_visit(node)
        if isinstance(node.target, ast.Subscript) or not self.names:
            return node
        text = ast.unparse(node.target)
        number = self._site(shown)
        after = ast.parse(f"{text} = {HELPER}({number}, {text}, True)").body[0]
        return [node, ast.copy_location(after, node)]

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """Wrap what is returned."""
        self.generic_visit(node)
        if node.value is not None and not isinstance(node.value, ast.Name):
            node.value = self.wrap(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Wrap the arguments."""
        name = _last_name(node.func)
        self.generic_visit(node)
        if name in LEFT_OUT or name.startswith("check") or name[:1] == "_" == name[1:2]:
            return node
        node.args = [self.wrap(argument) for argument in node.args]
        for keyword in node.keywords:
            if keyword.arg is not None:
                keyword.value = self.wrap(keyword.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Wrap operands that are names, attributes, items or calls."""
        self.generic_visit(node)
        if not isinstance(node.op, (ast.Mod, ast.BitOr)) or self.is_kernel:
            node.left = self._operand(node.left)
            node.right = self._operand(node.right)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Wrap both sides."""
        self.generic_visit(node)
        if all(
            isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq))
            for op in node.ops
        ):
            node.left = self._operand(node.left)
            node.comparators = [
                self._operand(comparator) for comparator in node.comparators
            ]
        return node

    def _operand(self, node: ast.expr) -> ast.expr:
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
            return self.wrap(node)
        return node

    def _comprehension(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.elt = self.wrap(node.elt)
        return node  # type: ignore[no-any-return]

    visit_ListComp = visit_GeneratorExp = visit_SetComp = _comprehension

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        """Wrap the keys and the values."""
        self.generic_visit(node)
        node.key, node.value = self.wrap(node.key), self.wrap(node.value)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Wrap the values."""
        self.generic_visit(node)
        node.values = [self.wrap(value) for value in node.values]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Wrap an index."""
        self.generic_visit(node)
        if isinstance(node.slice, ast.Slice):
            for side in ("lower", "upper"):
                bound = getattr(node.slice, side)
                if bound is not None:
                    setattr(node.slice, side, self.wrap(bound))
        elif isinstance(node.slice, ast.Tuple):
            node.slice.elts = [
                element if isinstance(element, ast.Slice) else self.wrap(element)
                for element in node.slice.elts
            ]
        else:
            node.slice = self.wrap(node.slice)
        return node


def _listed(found: Any) -> list[ast.stmt]:
    return found if isinstance(found, list) else [found]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_wrapped(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) == HELPER


class _Unwrap(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.args[1] if _is_wrapped(node) else node


def _plain(node: ast.AST) -> str:
    """Return an expression without wrappers."""
    return ast.unparse(_Unwrap().visit(ast.parse(ast.unparse(node))))


def instrument(file: str, first: int) -> tuple[str, list[Site]]:
    """Return the instrumented text of a file, and its sites.

    Args:
        file: The file, from the root of the repository.
        first: The number of its first site.
    """
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    maker = _Instrument(file, first)
    tree.body = [
        statement for old in tree.body for statement in _listed(maker.visit(old))
    ]
    # after the docstring and the future's features
    line = next(
        line
        for line, statement in enumerate(tree.body)
        if not (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
        )
        and getattr(statement, "module", "") != "__future__"
    )
    helper = ast.parse(
        f"from mutants.widths import WIDTHS as _widths\n{HELPER} = _widths.keep"
    )
    tree.body[line:line] = helper.body
    return ast.unparse(ast.fix_missing_locations(tree)), maker.sites


class _Instrumented:
    """Finds the modules of a grafted twin, instrumented."""

    def __init__(self, folder: Path, packages: Sequence[str]) -> None:
        self.folder = folder
        self.packages = tuple(f"{NAME}.{package}." for package in packages)
        self.sites: list[Site] = []

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: Any = None,
    ) -> ModuleSpec | None:
        if not name.startswith(self.packages):
            return None
        found = PathFinder.find_spec(name, path)
        if found is None or found.origin is None:
            return found
        origin = Path(found.origin)
        if origin.name == "__init__.py" or "sm90" in origin.parts:
            return found
        file = origin.resolve().relative_to(ROOT).as_posix()
        text, sites = instrument(file, len(self.sites))
        self.sites += sites
        WIDTHS.largest += [0] * len(sites)
        place = self.folder / f"{name}.py"
        place.write_text(text, encoding="utf-8")
        return spec_from_file_location(name, place)


def graft_instrumented(twin: str, folder: Path) -> tuple[str, list[Site]]:
    """Import a twin with all integers watched, and return its dotted name and its sites.

    Args:
        twin: "reference" or "optimized".
        folder: An empty one, for the instrumented files; it has to stay.
    """
    finder = _Instrumented(folder, (twin,))
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    name = graft(twin, None, folder)
    for module in _modules(twin):
        import_module(f"{NAME}.{module}")
    return name, finder.sites


def _modules(twin: str) -> Iterator[str]:
    """Yield the modules of a twin, so that all have sites."""
    folder = ROOT / twin
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if "sm90" not in parts and parts[-1] != "__init__":
            yield ".".join((twin, *parts))

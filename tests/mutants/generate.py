"""Generated mutants: every change of a kernel or a metadata builder that an operator can make.

The operators work on the syntax tree of each function and change one expression or statement of the
text. The files are those with a Triton kernel, all of `optimized/kernels/`, the metadata builders
in `optimized/batch/`, and the launches of cache operations. The Hopper kernels (`kernels/sm90/`)
are left out: the laws do not run them without a GPU, so run_hopper.py tries their mutants in
another way.

The id of a mutant is file/function/operator/number, where the number counts the changes of that
operator in that function, in the order of the text.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutant import ROOT, Mutant, tomllib

Node = ast.AST
Edit = tuple[Node, str]
"""A node of a function, and the text that replaces it."""

OPERATORS = {
    "comparison": "< and <=, > and >=, == and != in each other's place",
    "conjunct": "one side of `a & b`, `a and b`, `a | b` or `a or b` is left out",
    "mask": "a load or store has no mask",
    "constant": "a number is larger or smaller by one",
    "arguments": "two neighbouring arguments change places",
    "operands": "the operands of a subtraction or division change places",
    "arithmetic": "+ and -, floor and ceiling in each other's place",
    "statement": "a statement is left out",
    "minimum": "minimum and maximum in each other's place",
    "bound": "one side of a minimum or maximum is left out",
    "counterpart": "key and value, begin and end, first and last in each other's place",
    "width": "an index is not converted to 64 bits",
}
"""What a generated change does, by the name of the operator."""

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}
EXTREMES = {"minimum": "maximum", "min": "max", "amin": "amax", "argmin": "argmax"}
EXTREMES |= {other: one for one, other in EXTREMES.items()}
COUNTERPARTS = {
    "k": "v", "key": "value", "begin": "end", "first": "last", "start": "end",
    "token": "head", "block": "slot", "query": "seq", "computed": "scheduled",
}  # fmt: skip
COUNTERPARTS |= {other: one for one, other in COUNTERPARTS.items()}
LEFT_OUT = {
    "has_native_fp8": "the compute capability of a GPU",
    "has_fp8_encoding": "the compute capability of a GPU",
    "quantise": "an instruction of a GPU",
    "_quantise_plain": "an instruction of a GPU",
    "encode_native": "an instruction of a GPU",
    "are_plain": "what decides about that instruction",
    "divide": "runs before that instruction alone; tests/kernels/test_fp8.py has its quotients",
    **dict.fromkeys(
        (
            "exchange_kernel",
            "next_call",
            "find_memory",
            "send",
            "receive",
            "_send_rows",
            "_receive_row",
        ),
        "memory of several GPUs; tests/parallel/test_exchange.py runs it",
    ),
    "find_workspace": "streams and captures of a GPU",
    "_PinnedBuffer.wait": "events of a GPU",
    "_PinnedBuffer.send": "events of a GPU",
}
"""Functions without mutants: what they read or run exists on a GPU alone."""
WITHOUT_KERNELS = (
    "optimized/kernels/",
    "optimized/batch/",
    "optimized/cache/cache_ops.py",
)
"""Files, and folders of files, that are changed although they have no kernel."""
BARRIERS = ("debug_barrier", "static_assert", "device_assert", "assume", "multiple_of")
"""Calls without an effect in the interpreter; no mutant leaves them out."""


@dataclass(frozen=True)
class Generated(Mutant):
    """A mutant that an operator made.

    Args:
        begin, end: The bytes of the file that are replaced. `old` is their text.
    """

    begin: int = 0
    end: int = 0

    def source(self) -> str:
        """Return the changed file.

        Raises:
            SyntaxError: The new file is not Python.
        """
        text = (ROOT / self.file).read_bytes()
        changed = (text[: self.begin] + self.new.encode() + text[self.end :]).decode()
        ast.parse(changed)
        return changed

    @property
    def change(self) -> str:
        """The change in one line."""
        return " ".join(f"{self.old} -> {self.new}".split())


def mutated_files() -> list[str]:
    """Return the files that the operators change, without the Hopper kernels."""
    folder = ROOT / "optimized"
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if {"sm90", "host"} & {*path.parts} or path.name == "__init__.py":
            continue
        if name.startswith(WITHOUT_KERNELS) or "@triton.jit" in path.read_text(
            encoding="utf-8"
        ):
            found.append(name)
    return found


def read_reasons(path: Path) -> dict[str, str]:
    """Return why mutants are equivalent, by id, from a TOML file."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))["equivalent"]
    return {
        name: " ".join(entry["reason"].split())
        for entry in found
        for name in entry["mutants"]
    }


def generate(
    files: Sequence[str] | None = None, reasons: dict[str, str] | None = None
) -> list[Generated]:
    """Return all generated mutants, in the order of the text.

    Args:
        files: Optional. The files to change. If None, all of `mutated_files`.
        reasons: Optional. By id, why a mutant is equivalent. If None, none is.
    """
    found = []
    for file in mutated_files() if files is None else files:
        text = (ROOT / file).read_bytes()
        for function, node in _functions(ast.parse(text)):
            if function in LEFT_OUT:
                continue
            is_kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
            found += list(_of_function(file, text, function, node, is_kernel))
    own = reasons or {}
    return [_with_reason(mutant, own.get(mutant.id, "")) for mutant in found]


def sample(mutants: Sequence[Generated], count: int, seed: int) -> list[Generated]:
    """Return some mutants; a larger count of the same seed adds to a smaller one."""

    def rank(mutant: Generated) -> str:
        return hashlib.sha256(f"{seed} {mutant.id}".encode()).hexdigest()

    return sorted(mutants, key=rank)[:count]


def _with_reason(mutant: Generated, reason: str) -> Generated:
    return Generated(**{**vars(mutant), "equivalent": reason}) if reason else mutant


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a file with their names; methods as "Class.method"."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member


def _of_function(
    file: str, text: bytes, function: str, node: ast.FunctionDef, is_kernel: bool
) -> Iterator[Generated]:
    """Yield the mutants of one function."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    # neither prose nor annotations nor error messages
    body = [statement for statement in node.body if not _is_prose(statement)]
    nodes = [node for statement in body for node in _walk(statement)]
    names = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
    numbers = dict.fromkeys(OPERATORS, 0)
    seen: set[tuple[int, int, str]] = set()
    for operator, edits_of in EDITS.items():
        for changed in nodes:
            for target, new in edits_of(changed, names, nodes, is_kernel):
                begin, end = _span(target, starts)
                if (begin, end, new) in seen:
                    continue
                seen.add((begin, end, new))
                numbers[operator] += 1
                yield Generated(
                    id=f"{file.removesuffix('.py')}/{function}/{operator}/{numbers[operator]}",
                    bug="",
                    thread="generated",
                    operator=operator,
                    file=file,
                    old=text[begin:end].decode(),
                    new=new,
                    equivalent="",
                    begin=begin,
                    end=end,
                )


def _span(node: Node, starts: list[int]) -> tuple[int, int]:
    """Return the first byte of a node in the file, and the one after its last."""
    begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
    return begin, end


def _is_prose(node: Node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _walk(node: Node) -> Iterator[Node]:
    """Yield the nodes of a statement in the order of the text, without annotations and errors."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _walk(part)


# ---- the operators: each yields the edits of one node

Edits = Callable[[Node, set[str], list[Node], bool], Iterator[Edit]]


def _written(node: Node) -> str:
    """Return an expression as text that can be part of any expression."""
    text = ast.unparse(node)
    is_simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Constant))
    return text if is_simple or isinstance(node, ast.Subscript) else f"({text})"


def _last_name(node: Node) -> str:
    """Return the name of a called function without its module."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _comparison(node: Node, *_: object) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARISONS.get(type(node.ops[0]))
        if other is not None:
            right = ast.unparse(node.comparators[0])
            yield node, f"({ast.unparse(node.left)} {other} {right})"


def _conjunct(node: Node, *_: object) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield node, _written(node.left)
        yield node, _written(node.right)
    if isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            rest = [v for number, v in enumerate(node.values) if number != left_out]
            kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            yield node, f"({ast.unparse(kept)})"


def _mask(node: Node, *_: object) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and _last_name(node.func) in ("load", "store"):
        rest = [
            keyword for keyword in node.keywords if keyword.arg not in ("mask", "other")
        ]
        if len(rest) < len(node.keywords):
            yield node, ast.unparse(ast.Call(node.func, node.args, rest))


def _constant(
    node: Node, names: set[str], nodes: list[Node], _: bool
) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return
    if any(isinstance(other, ast.Call) and _is_axis(other, node) for other in nodes):
        return
    yield node, repr(node.value + 1)  # type: ignore[operator]
    if node.value:
        yield node, repr(node.value - 1)  # type: ignore[operator]


def _is_axis(call: ast.Call, constant: ast.Constant) -> bool:
    """Return whether a number is the axis of a reduction, where another one is rejected."""
    name = _last_name(call.func)
    axes = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    return name in ("sum", "max", "min", "cumsum", "program_id", "num_programs") and (
        any(axis is constant for axis in (*axes, *call.args))
    )


def _arguments(node: Node, *_: object) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name = _last_name(node.func)
    if name.startswith("check") or name in EXTREMES:
        return  # what is rejected has laws of its own; the order of a minimum means nothing
    for left, right in zip(node.args, node.args[1:], strict=False):
        is_same_kind = _kind(left) == _kind(right) != "tuple"
        if is_same_kind and ast.dump(left) != ast.dump(right):
            other = {id(left): right, id(right): left}
            args = [other.get(id(argument), argument) for argument in node.args]
            yield node, ast.unparse(ast.Call(node.func, args, node.keywords))


KINDS = {
    "matrix": ("acc", "result", "results", "split_acc", "qk", "p", "k", "v", "q"),
    "row of numbers": ("l_i", "m_i", "lse", "split_l", "split_m", "alpha", "weight"),
    "flag": ("is", "has", "counts", "masked", "require", "treat"),
    "tuple": (
        "call", "config", "plan", "tile", "visible", "keys", "kv", "segment", "batch",
        "strides", "masks", "scores", "tensors", "terms", "rows", "table",
    ),
}  # fmt: skip
"""Kinds of arguments, with names that tell them. All other names are indices or counts."""


def _kind(node: Node) -> str:
    """Return what the name of an argument tells of its type; other expressions have their own."""
    if isinstance(node, (ast.BinOp, ast.Constant)):
        return "index"
    name = _last_name(node)
    if not name:
        return type(node).__name__
    found = [
        kind
        for kind, names in KINDS.items()
        if name in names or name.partition("_")[0] in (names if kind == "flag" else ())
    ]
    return found[0] if found else "constant" if name.isupper() else "index"


def _operands(node: Node, *_: object) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp):
        signs = {ast.Sub: "-", ast.FloorDiv: "//", ast.Mod: "%", ast.Div: "/"}
        sign = signs.get(type(node.op))
        if sign is not None:
            yield node, f"({_written(node.right)} {sign} {_written(node.left)})"


def _arithmetic(node: Node, *_: object) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp):
        left, right = _written(node.left), _written(node.right)
        if isinstance(node.op, ast.Add):
            yield node, f"({left} - {right})"
        if isinstance(node.op, ast.Sub):
            yield node, f"({left} + {right})"
        if isinstance(node.op, ast.FloorDiv):
            yield node, f"(({left} + {right} - 1) // {right})"
        if isinstance(node.op, ast.Mult):
            yield node, left
            yield node, right
    if isinstance(node, ast.Call) and _last_name(node.func) == "cdiv":
        left, right = (_written(argument) for argument in node.args[:2])
        yield node, f"({left} // {right})"


def _statement(
    node: Node, names: set[str], nodes: list[Node], is_kernel: bool
) -> Iterator[Edit]:
    if isinstance(node, ast.AugAssign):
        yield node, "pass"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _last_name(node.value.func)
        # a check has laws of its own, on calls that are rejected; on a CPU nothing has to wait
        if name not in (*BARRIERS, "wait") and not name.startswith("check"):
            yield node, "pass"
    if isinstance(node, ast.Assign):
        before = names | {
            other.id
            for other in nodes
            if isinstance(other, ast.Name)
            and isinstance(other.ctx, ast.Store)
            and other.lineno < node.lineno
        }
        stored = {
            part.id
            for target in node.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name)
        }
        is_item = any(isinstance(target, ast.Subscript) for target in node.targets)
        if stored <= before or is_item:
            yield node, "pass"


def _minimum(node: Node, *_: object) -> Iterator[Edit]:
    if isinstance(node, ast.Call):
        name = _last_name(node.func)
        if name in EXTREMES:
            text = ast.unparse(node.func)
            yield node.func, text[: len(text) - len(name)] + EXTREMES[name]


def _bound(node: Node, *_: object) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and _last_name(node.func) in (
        "minimum",
        "maximum",
        "min",
        "max",
    ):
        is_reduction = _last_name(node.func) in ("min", "max") and (
            isinstance(node.func, ast.Attribute)
        )
        if len(node.args) == 2 and not is_reduction:
            for argument in node.args:
                yield node, _written(argument)


def _counterpart(
    node: Node, names: set[str], nodes: list[Node], _: bool
) -> Iterator[Edit]:
    if not isinstance(getattr(node, "ctx", None), ast.Load):
        return
    name = _last_name(node)
    known = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    known |= {node.id for node in nodes if isinstance(node, ast.Name)} | names
    parts = name.split("_")
    for place, part in enumerate(parts):
        if part in COUNTERPARTS:
            other = "_".join([*parts[:place], COUNTERPARTS[part], *parts[place + 1 :]])
            # only a name that this function uses exists for certain
            if other in known:
                text = ast.unparse(node)
                yield node, text[: len(text) - len(name)] + other


def _width(node: Node, *_: object) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    if "int64" not in " ".join(ast.unparse(argument) for argument in node.args):
        return
    if isinstance(node.func, ast.Attribute):
        if node.func.attr == "to":
            yield node, _written(node.func.value)
        if node.func.attr == "cast":
            yield node, _written(node.args[0])


EDITS: dict[str, Edits] = {
    "comparison": _comparison,
    "conjunct": _conjunct,
    "mask": _mask,
    "constant": _constant,
    "arguments": _arguments,
    "operands": _operands,
    "arithmetic": _arithmetic,
    "statement": _statement,
    "minimum": _minimum,
    "bound": _bound,
    "counterpart": _counterpart,
    "width": _width,
}

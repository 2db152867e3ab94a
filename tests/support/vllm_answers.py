"""What vLLM's own attention backends say of a layer, read from their source by `ast`.

A backend decides in `validate_configuration` and in the class methods that it calls. They are
followed statically, on CUDA and compute capability 9.0, with the arguments of one layer. What the
source does not decide, such as which libraries are installed, is left as a short expression.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

from support.vllm_conditions import (
    OPPOSITES,
    Condition,
    NotFollowed,
    condition,
    either,
    joined,
    negated,
)
from support.vllm_source import Capability, Class, Source

BASE = "vllm.v1.attention.backend"
CAPABILITY = (9, 0)
# answers of `current_platform` on an H100 or H200
PLATFORM = {"is_cuda": True, "is_xpu": False, "is_rocm": False, "is_cpu": False}
# functions of many cases, which are named in a condition and not followed
OPAQUE = {
    "get_current_vllm_config",
    "get_current_vllm_config_or_none",
    "get_flash_attn_version",
    "has_nvidia_artifactory",
    "is_fa_version_supported",
}
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Mod: operator.mod,
}


def ask(source: Source, owner: Class, name: str, **given: Any) -> Any:
    """Return the value of an attribute, or what a method returns for arguments by name.

    A reason counts as False, and no reason as True.
    """
    node, module, number = source.member(owner, name)
    frame = Frame(source, module, owner, number)
    if isinstance(node, ast.FunctionDef):
        return frame.call(node, [], given)
    return frame.value(node)


class Frame:
    """One call of a function.

    Args:
        source: where names are found.
        module: of the function.
        owner: its class, with the number of the base that has it. Optional. If None, it has none.
    """

    def __init__(
        self, source: Source, module: str, owner: Class | None = None, number: int = 0
    ) -> None:
        self.source, self.module, self.owner = source, module, owner
        self.number, self.names, self.is_reason = number, dict[str, Any](), False

    def call(
        self, node: ast.FunctionDef, given: list[Any], named: dict[str, Any]
    ) -> Any:
        """Return what a function returns."""
        self.bind(node, given, named)
        return self.run(node.body)

    def bind(
        self, node: ast.FunctionDef, given: list[Any], named: dict[str, Any]
    ) -> None:
        """Give the parameters their values."""
        self.is_reason = node.name == "supports_combination"
        plain = [argument.arg for argument in node.args.args]
        if plain[:1] == ["cls"] and self.owner is not None:
            plain = plain[1:]
            self.names["cls"] = self.owner
        defaults = node.args.defaults
        for name, default in zip(
            plain[len(plain) - len(defaults) :], defaults, strict=True
        ):
            self.names[name] = self.value(default)
        for argument, default in zip(
            node.args.kwonlyargs, node.args.kw_defaults, strict=True
        ):
            if default is not None:
                self.names[argument.arg] = self.value(default)
        self.names |= dict(zip(plain, given, strict=False)) | named

    def run(self, body: list[ast.stmt]) -> Any:
        """Return what the statements return, or None."""
        for number, statement in enumerate(body):
            rest = body[number + 1 :]
            if isinstance(statement, ast.Return):
                value = None if statement.value is None else self.value(statement.value)
                return self._no_reason(value) if self.is_reason else value
            if isinstance(statement, ast.If):
                test = self.value(statement.test)
                if not isinstance(test, Condition):
                    return self.run(
                        [*(statement.body if test else statement.orelse), *rest]
                    )
                before = dict(self.names)
                first = self.run([*statement.body, *rest])
                self.names = before
                return either(test, first, self.run([*statement.orelse, *rest]))
            if isinstance(statement, ast.Try):
                return self.run([*statement.body, *rest])
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value:
                target = (
                    statement.target
                    if isinstance(statement, ast.AnnAssign)
                    else statement.targets[0]
                )
                self.names[ast.unparse(target)] = self.value(statement.value)
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    found = self.source.find(statement.module or "", alias.name)
                    if found is not None:
                        self.names[alias.asname or alias.name] = found
            elif not isinstance(statement, ast.Expr):
                raise NotFollowed
        return self.is_reason or None

    def _no_reason(self, value: Any) -> Any:
        """Return whether a value gives no reason: None, or what a base class answered."""
        if isinstance(value, Condition):
            text = f"({value.text})" if " " in value.text else value.text
            return Condition(f"{text} is None", f"{text} is not None")
        return value is None

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, or a condition."""
        text = ast.unparse(node)
        if text in self.source.facts:
            return self.source.facts[text]
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return text
        if isinstance(node, (ast.List, ast.Tuple)):
            return tuple(self.value(element) for element in node.elts)
        if isinstance(node, ast.BoolOp):
            return self._bool(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negated(self.value(node.operand))
        if isinstance(node, ast.IfExp) and not isinstance(
            test := self.value(node.test), Condition
        ):
            return self.value(node.body if test else node.orelse)
        if isinstance(node, ast.NamedExpr):
            self.names[node.target.id] = self.value(node.value)
            return self.names[node.target.id]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compare(node.left, node.ops[0], node.comparators[0])
        if isinstance(node, ast.BinOp) and type(node.op) in COMPARISONS:
            return self._compare(node.left, node.op, node.right)
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            try:
                return self._call(node)
            except NotFollowed:
                return condition(self._short(node))
        return condition(text)

    def _bool(self, node: ast.BoolOp) -> Any:
        word = "and" if isinstance(node.op, ast.And) else "or"
        values = []
        for operand in node.values:
            values.append(self.value(operand))
            is_decided = not isinstance(values[-1], Condition)
            if is_decided and bool(values[-1]) == (word == "or"):
                break  # the operands after it are not evaluated
        return joined(values, word)

    def _compare(self, left: ast.expr, op: Any, right: ast.expr) -> Any:
        values = [self.value(left), self.value(right)]
        if any(isinstance(value, Condition) for value in values):
            shown = [
                value.text if isinstance(value, Condition) else repr(value)
                for value in values
            ]
            sign = ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))[2:-2]
            other = OPPOSITES[sign]
            return Condition(
                f"{shown[0]} {sign} {shown[1]}", f"{shown[0]} {other} {shown[1]}"
            )
        return COMPARISONS[type(op)](*values)

    def _name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        found = self.source.find(self.module, name)
        if found is None:
            return condition(name)
        if isinstance(found[0], ast.ClassDef):
            return self.source.class_of(found[1], name)
        if isinstance(found[0], ast.FunctionDef):
            return found
        return Frame(self.source, found[1]).value(found[0])

    def _attribute(self, node: ast.Attribute) -> Any:
        if ast.unparse(node).startswith("torch."):
            return ast.unparse(node)
        of = self.value(node.value)
        if isinstance(of, Class):
            return ask(self.source, of, node.attr)
        if isinstance(of, Capability):
            return getattr(of, node.attr)
        return condition(ast.unparse(node))

    def _call(self, node: ast.Call) -> Any:
        given = [self.value(argument) for argument in node.args]
        named = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        function = node.func
        if isinstance(function, ast.Attribute):
            of = ast.unparse(function.value)
            if of == "current_platform":
                return self._platform(function.attr, given)
            if of == "super()" and self.owner is not None:
                start = self.number + 1
                return self._method(self.owner, function.attr, start, given, named)
            owner = self.value(function.value)
            if isinstance(owner, Class):
                return self._method(owner, function.attr, 0, given, named)
            if isinstance(owner, str) and function.attr == "startswith":
                return owner.startswith(*given)
            raise NotFollowed
        name = ast.unparse(function)
        if name == "DeviceCapability":
            return Capability(*given)
        if name == "MultipleOf":
            return f"multiples of {given[0]}"
        if name == "any" and isinstance(node.args[0], ast.GeneratorExp):
            return self._any(node.args[0])
        found = self._name(name)
        if (
            name in OPAQUE
            or not isinstance(found, tuple)
            or isinstance(found, Condition)
        ):
            raise NotFollowed
        return Frame(self.source, found[1]).call(found[0], given, named)

    def _method(
        self,
        owner: Class,
        name: str,
        start: int,
        given: list[Any],
        named: dict[str, Any],
    ) -> Any:
        node, module, number = self.source.member(owner, name, start)
        # a reason is not passed on, since it counts as False
        if not isinstance(node, ast.FunctionDef) or name == "supports_combination":
            raise NotFollowed
        return Frame(self.source, module, owner, number).call(node, given, named)

    def _any(self, node: ast.GeneratorExp) -> Any:
        loop = node.generators[0]
        values = []
        for element in self.value(loop.iter):
            self.names[ast.unparse(loop.target)] = element
            values.append(self.value(node.elt))
        return joined(values, "or")

    def _platform(self, name: str, given: list[Any]) -> bool:
        if name == "is_device_capability_family":
            return bool(given[0] // 10 == CAPABILITY[0])
        if name == "is_device_capability":
            return bool(given[0] == 10 * CAPABILITY[0] + CAPABILITY[1])
        if name not in PLATFORM:
            raise NotFollowed
        return PLATFORM[name]

    def _short(self, node: ast.Call) -> str:
        """Return a call with its arguments if they are constants."""
        words = [*node.args, *(word.value for word in node.keywords)]
        constant = all(isinstance(word, ast.Constant) for word in words)
        return ast.unparse(node) if constant else f"{ast.unparse(node.func)}(...)"

"""Types of arguments: the annotations of a signature decide what a function takes.

`typed` wraps a function or the methods of a class. NumPy's numbers become Python's own, and an
argument of another type raises an error that names it. Arguments whose types alone show that they
are right cost one look-up of the tuple of their types, about 0.4 us for 13 arguments.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .argument_kinds import INT32, ArgumentKind, kind_of, sequence_of
from .argument_tensors import explain_tensors, reject_gradients

_ABSENT: Any = getattr(dataclasses, "_HAS_DEFAULT_FACTORY", None)
"""The default of a dataclass's argument that a factory makes."""

_Target = TypeVar("_Target")


class ArgumentTypes:
    """The types of a function's arguments, and the source text that looks at them.

    Args:
        signature: the function's, with annotations. An argument without one may be anything.
        has_axes: whether the number of a tensor's axes is looked at.
        is_repeated: whether the function itself finds out that a call is like an earlier one. Then
            only the types of numbers are looked at before the call, and all arguments after an
            error. The function validates what is not like an earlier call (`typed`).

    Example:
        >>> def double(block_size: int) -> int: ...
        >>> ArgumentTypes(inspect.signature(double)).convert(np.int64(16))
        (16,)
    """

    def __init__(
        self,
        signature: inspect.Signature,
        has_axes: bool = True,
        is_repeated: bool = False,
    ) -> None:
        parameters = signature.parameters.values()
        kinds = {
            parameter.name: (
                sequence_of if parameter.kind is parameter.VAR_POSITIONAL else kind_of
            )(parameter.annotation)
            for parameter in parameters
        }
        self.has_axes = has_axes
        self.is_repeated = is_repeated
        self.by_factory = {
            parameter.name for parameter in parameters if _has_factory(parameter)
        }
        self.by_type = {
            name: kind
            for name, kind in kinds.items()
            if kind.is_shown_by_type and name not in self.by_factory
        }
        self.deep = {
            name: kind
            for name, kind in kinds.items()
            if name not in self.by_type and not kind.takes_all
        }
        self.right: set[tuple[type, ...]] = set()
        """Tuples of types with which nothing has to be converted."""

    def convert(self, *values: Any) -> tuple[Any, ...]:
        """Return the arguments whose type alone is looked at, NumPy's numbers as Python's.

        Raises:
            TypeError: an argument has another type.
            ValueError: an integer has too many bits, or a tensor another number of axes.
        """
        found = tuple(
            kind.convert(name, value)
            for (name, kind), value in zip(self.by_type.items(), values, strict=True)
        )
        for (name, kind), value in zip(self.by_type.items(), found, strict=True):
            if self.has_axes and value is not None and kind.axes:
                _check_axes(name, value, kind.axes)
        if all(one is other for one, other in zip(found, values, strict=True)):
            self.right.add(tuple(map(type, values)))
        return found

    def explain(self, error: Exception, **arguments: Any) -> None:
        """Raise one sentence about the argument that may have caused an error.

        Args:
            error: what the call raised.
            arguments: those whose type alone is looked at, by name.
        """
        if self.is_repeated:
            try:
                self.convert(*arguments.values())
                reject_gradients(**arguments)
            except (TypeError, ValueError, NotImplementedError) as found:
                raise found from None
        explain_tensors(error, **arguments)

    def source(self, indent: str = "    ") -> str:
        """Return statements that convert the arguments; the names they use are in `names`."""
        lines = []
        names = [*self.by_type]
        if names:
            types = "".join(f"{name}.__class__, " for name in names)
            numbers = [test for name in names for test in self._tests(name)]
            tests = [f"({types}) not in _right"] if not self.is_repeated else []
            if numbers:
                tests.append(f"not ({' and '.join(numbers)})")
            test = " or ".join(tests)
            given = "".join(f"{name}, " for name in names)
            lines += [f"if {test}:", f"    {given}= _convert({given})"]
        if graded := [self._gradient_test(name) for name in self._with_gradients()]:
            lines += [
                f"if _is_grad_enabled() and ({' or '.join(graded)}):",
                f"    _reject_gradients({', '.join(f'{name}={name}' for name in names)})",
            ]
        for name in self.deep:
            guard = f"if {name} is not _absent: " if name in self.by_factory else ""
            lines.append(f"{guard}{name} = _{name}_of({name!r}, {name})")
        return "".join(f"{indent}{line}\n" for line in lines)

    def call(self, function: str, given: str) -> str:
        """Return statements that return a function's result, and explain its error.

        Args:
            function: its name.
            given: its arguments.
        """
        tensors = ", ".join(f"{name}={name}" for name in self.by_type)
        return f"""\
    try:
        return {function}({given})
    except Exception as error:
        _explain(error, {tensors})
        raise
"""

    @property
    def names(self) -> dict[str, Any]:
        """What the source refers to, by name."""
        deep = {f"_{name}_of": kind.convert for name, kind in self.deep.items()}
        own = {"_right": self.right, "_convert": self.convert, "_absent": _ABSENT}
        own |= {"Tensor": Tensor}
        gradients = {
            "_is_grad_enabled": torch.is_grad_enabled,
            "_reject_gradients": reject_gradients,
            "_explain": self.explain,
        }
        return own | deep | gradients

    def _with_gradients(self) -> Iterator[str]:
        """Yield the names of the arguments that may require a gradient."""
        for name, kind in self.by_type.items():
            if self.has_axes and not self.is_repeated and kind.has_gradient:
                yield name

    def _gradient_test(self, name: str) -> str:
        given = f"{name} is not None and " if self.by_type[name].is_optional else ""
        return f"{given}{name}.requires_grad"

    def _tests(self, name: str) -> Iterator[str]:
        """Yield what has to be true of an argument besides its type."""
        kind = self.by_type[name]
        tests = []
        if self.is_repeated:
            found = [f"{name}.__class__ is {known}" for known in self._numbers_of(kind)]
            tests += [" or ".join(found)] if found else []
        elif kind.has_range:
            tests.append(f"{-INT32 - 1} <= {name} <= {INT32}")
        if self.has_axes and not self.is_repeated and kind.axes:
            counts = sorted({len(axis.split()) for axis in kind.axes})
            tests.append(" or ".join(f"{name}.ndim == {count}" for count in counts))
        for test in tests:
            absent = f"{name} is None or " if kind.is_optional else ""
            yield f"({absent}{test})"

    @staticmethod
    def _numbers_of(kind: ArgumentKind) -> list[str]:
        """Return the types that an argument has in most calls, if it may be a number."""
        if kind.has_range:
            return ["int"]
        if "a float" not in kind.words:
            return []
        return ["float", "Tensor"] if "Tensor" in kind.words else ["float"]


def _check_axes(name: str, tensor: Tensor, axes: tuple[str, ...]) -> None:
    """Raise an error for a tensor with another number of axes than its annotation says."""
    if tensor.ndim not in {len(axis.split()) for axis in axes}:
        shapes = dict.fromkeys(
            f"[{', '.join('...' if axis == '_' else axis for axis in names.split())}]"
            for names in axes
        )
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}: expected {' or '.join(shapes)}"
        )


def _has_factory(parameter: inspect.Parameter) -> bool:
    return parameter.default is _ABSENT


def typed(target: _Target) -> _Target:
    """Return a function that looks at the types of its arguments first; a class with such methods.

    Args:
        target: a function with annotations, or a class. Of a class, `__init__` and the public
            methods are wrapped, in place; the fields of a dataclass are arguments of `__init__`.

    Raises:
        TypeError: in a call, an argument has another type than its annotation.
        NotImplementedError: in a call in grad mode, a tensor requires a gradient.
        ValueError: in a call, an integer does not fit in 32 bits, or one of a sequence in 64, or
            a tensor has another number of axes.

    Example:
        >>> @typed
        ... def double(block_size: int) -> int:
        ...     return 2 * block_size
        >>> double(np.int64(16))
        32
        >>> double(16.0)
        Traceback (most recent call last):
        TypeError: block_size = 16.0: expected an int
    """
    if not isinstance(target, type):
        wrapped: _Target = _wrap(target)
        return wrapped
    for name, method in vars(target).copy().items():
        if isinstance(method, FunctionType) and (name == "__init__" or name[0] != "_"):
            # of a dataclass, an operation validates the tensors
            wrapped_method = _wrap(
                method, has_axes=not dataclasses.is_dataclass(target)
            )
            setattr(target, name, wrapped_method)
    return target


def _wrap(function: Any, has_axes: bool = True) -> Any:
    """Return a function that converts its arguments, in source text of its own.

    Packing arguments as a tuple and a dictionary and binding them costs several microseconds.
    """
    signature = inspect.signature(function)
    types = ArgumentTypes(signature, has_axes)
    head = _head(signature)
    given = ", ".join(
        f"{'*' * (parameter.kind is parameter.VAR_POSITIONAL)}{name}"
        f"{f'={name}' * (parameter.kind is parameter.KEYWORD_ONLY)}"
        for name, parameter in signature.parameters.items()
    )
    source = f"""
def {function.__name__}({head}):
    if is_compiling():
        return _function({given})
{types.source()}{types.call("_function", given)}"""
    names = {"_function": function, "is_compiling": is_compiling} | types.names
    exec(source, names)
    wrapped: Any = functools.wraps(function)(names[function.__name__])
    defaults = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is not parameter.empty
    ]
    wrapped.__defaults__ = tuple(
        parameter.default
        for parameter in defaults
        if parameter.kind is not parameter.KEYWORD_ONLY
    )
    wrapped.__kwdefaults__ = {
        parameter.name: parameter.default
        for parameter in defaults
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return wrapped


def _head(signature: inspect.Signature) -> str:
    """Return the parameters as source text, without annotations and defaults."""
    parts: list[str] = []
    is_named = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            name, is_named = f"*{name}", True
        elif parameter.kind is parameter.KEYWORD_ONLY and not is_named:
            parts, is_named = [*parts, "*"], True
        parts.append(name)
    return ", ".join(parts)

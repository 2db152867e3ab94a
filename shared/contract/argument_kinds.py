"""Kinds of arguments: what an annotation takes, and how a value becomes Python's own.

An annotation is a class, a union, a sequence, a mapping or a jaxtyping array, as in the signatures
of the operations. A kind converts NumPy's numbers and arrays of integers, and raises a TypeError
for other types. Lengths, signs and the elements of tensors are for the operation's own validation.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin

import numpy as np
import torch
from jaxtyping import AbstractArray
from torch import Tensor

from .integers import LARGEST, WideInt, as_int

INT32 = 2**31 - 1
"""The largest size or number of things that an operation takes: kernels count in 32 bits."""

Convert: TypeAlias = Callable[[str, Any], Any]
"""Returns a value as Python's own, given the name of the argument and the value."""


@dataclass(frozen=True, kw_only=True)
class ArgumentKind:
    """What one argument may be.

    Args:
        words: what it is, as the end of "expected ...".
        takes: whether a value is of this kind as a whole; its elements are not looked at.
        convert: returns the value as Python's own, or raises TypeError or ValueError.
        is_shown_by_type: whether a value's exact type decides, but for the range of an integer.
        has_range: whether it is an integer of 32 bits.
        is_optional: whether it may be None.
        takes_all: whether there is nothing to look at.
        axes: the names of a tensor's axes, one text per alternative. Empty if there may be any
            number of axes, or if it is not a tensor alone.
        has_gradient: whether it is a tensor of floating-point numbers.
    """

    words: str
    takes: Callable[[Any], bool]
    convert: Convert
    is_shown_by_type: bool = True
    has_range: bool = False
    is_optional: bool = False
    takes_all: bool = False
    axes: tuple[str, ...] = ()
    has_gradient: bool = False


def kind_of(annotation: Any) -> ArgumentKind:
    """Return the kind of an annotation.

    Args:
        annotation: of a parameter.
    """
    if annotation is WideInt:
        return _WIDE
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _union([kind_of(argument) for argument in arguments])
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return sequence_of(arguments[0])
    if origin is tuple:
        return _tuple([kind_of(argument) for argument in arguments])
    if origin is type:
        # classes of other engines need not derive from those of this package
        return _plain("a class", inspect.isclass)
    if origin is Mapping or origin is dict:
        return _mapping(*(kind_of(argument) for argument in arguments))
    if origin in (Sequence, list):
        return sequence_of(arguments[0])
    if origin in (Set, Collection):
        words = "a set" if origin is Set else "a collection"
        return _collection(origin, words, kind_of(arguments[0]))
    if not inspect.isclass(annotation) or annotation in (
        object,
        inspect.Parameter.empty,
    ):
        return _ANY if origin is not Callable else _CALLABLE
    return _class_kind(annotation)


def sequence_of(annotation: Any) -> ArgumentKind:
    """Return the kind of a sequence whose elements have an annotation."""
    element = kind_of(annotation)
    if element.words == _INT:
        return _ints()
    if element.words == _INTS:
        return _rows_of_ints(element)
    return _collection(Sequence, "a sequence", element)


_INT, _INTS = "an int", "a sequence of ints"


def _class_kind(annotation: type) -> ArgumentKind:
    if annotation is bool:
        return ArgumentKind(words="a bool", takes=_is_bool, convert=_bool)
    if annotation is int:
        convert = _int
        return ArgumentKind(words=_INT, takes=_is_int, convert=convert, has_range=True)
    if annotation is float:
        return ArgumentKind(words="a float", takes=_is_real, convert=_float)
    if annotation is torch.device:
        takes = _instance(torch.device)
        return _plain("a torch.device", takes)
    if issubclass(annotation, AbstractArray) or annotation is Tensor:
        names = getattr(annotation, "dim_str", "...")
        is_any = "." in names or "*" in names
        kind = _plain("a torch.Tensor", _instance(Tensor))
        is_float = any("float" in dtype for dtype in getattr(annotation, "dtypes", ()))
        axes = () if is_any else (names,)
        return replace(kind, axes=axes, has_gradient=is_float)
    if annotation is NoneType:
        return ArgumentKind(
            words="None", takes=_is_none, convert=_same, is_optional=True
        )
    if annotation.__module__ == "typing" or annotation.__name__ == "Hashable":
        return _ANY
    words = "a class" if annotation is type else f"{_article(annotation.__name__)}"
    if inspect.isabstract(annotation):
        # as for classes: what has the methods may come from another engine
        # they are looked for in each value: one class may have them in some objects alone
        kind = _plain(words, _implementation(annotation))
        return replace(kind, is_shown_by_type=False)
    return _plain(words, _instance(annotation))


def _plain(words: str, takes: Callable[[Any], bool]) -> ArgumentKind:
    """Return a kind whose values are taken as they are."""

    def convert(name: str, value: Any) -> Any:
        if not takes(value):
            raise _wrong(name, value, words)
        return value

    return ArgumentKind(words=words, takes=takes, convert=convert)


def _union(members: list[ArgumentKind]) -> ArgumentKind:
    """Return the kind of a union: the first member that takes a value converts it."""
    if any(member.takes_all for member in members):
        return _ANY
    words = {member.words: member for member in members}
    if {"a torch.device", "a str"} <= {*words}:
        members = [
            _DEVICE,
            *(member for member in members if member.words not in _DEVICE_WORDS),
        ]
        words = {member.words: member for member in members}
    # a number that is an integer stays one
    members = sorted(members, key=lambda member: member.words == "a float")
    said = " or ".join(words)
    tensors = [member for member in members if member.words != "None"]
    has_axes = all(tensor.axes for tensor in tensors)

    def takes(value: Any) -> bool:
        return any(member.takes(value) for member in members)

    def convert(name: str, value: Any) -> Any:
        for member in members:
            if member.takes(value):
                return member.convert(name, value)
        raise _wrong(name, value, said)

    return ArgumentKind(
        words=said,
        takes=takes,
        convert=convert,
        is_shown_by_type=all(member.is_shown_by_type for member in members),
        has_range=any(member.has_range for member in members),
        is_optional=any(member.is_optional for member in members),
        axes=tuple(axes for tensor in tensors for axes in tensor.axes)
        if has_axes
        else (),
        has_gradient=all(tensor.has_gradient for tensor in tensors),
    )


def _ints() -> ArgumentKind:
    """Return the kind of a sequence of integers, of which a NumPy array becomes a list."""

    def convert(name: str, value: Any) -> Any:
        found = _elements(name, value, _INTS)
        if {*map(type, found)} <= {int} and (
            not found or (min(found) >= -LARGEST - 1 and max(found) <= LARGEST)
        ):
            return found
        return [
            as_int(f"{name}[{index}]", element, -LARGEST - 1)
            for index, element in enumerate(found)
        ]

    return ArgumentKind(
        words=_INTS, takes=_is_sequence, convert=convert, is_shown_by_type=False
    )


def _rows_of_ints(row: ArgumentKind) -> ArgumentKind:
    """Return the kind of a sequence of sequences of integers, such as rows of block ids.

    The range of integers in lists is for the operation's validation: rows are long, and arrays
    are compared faster.
    """
    said = "a sequence of sequences of ints"

    def convert(name: str, value: Any) -> Any:
        found = _elements(name, value, said)
        is_plain = {*map(type, found)} <= {list, tuple}
        # in C: one pass over all rows
        if is_plain and {*map(type, chain.from_iterable(found))} <= {int}:
            return found
        return [
            row.convert(f"{name}[{index}]", ints) for index, ints in enumerate(found)
        ]

    return ArgumentKind(
        words=said, takes=_is_sequence, convert=convert, is_shown_by_type=False
    )


def _collection(abstract: Any, words: str, element: ArgumentKind) -> ArgumentKind:
    """Return the kind of a sequence or set whose elements are of one kind."""
    said = f"{words} of {_plural(element.words)}" if element.words else words

    def takes(value: Any) -> bool:
        if abstract is Sequence:
            return _is_sequence(value)
        return isinstance(value, abstract) and not isinstance(value, (str, bytes))

    def convert(name: str, value: Any) -> Any:
        if abstract is not Sequence:
            if not takes(value):
                raise _wrong(name, value, said)
            for element_value in () if element.takes_all else value:
                element.convert(f"{name}: element", element_value)
            return value
        found = _elements(name, value, said)
        if element.takes_all:
            return found
        changed = [
            element.convert(f"{name}[{index}]", element_value)
            for index, element_value in enumerate(found)
        ]
        is_same = all(one is other for one, other in zip(changed, found, strict=True))
        return found if is_same else changed

    return ArgumentKind(
        words=said, takes=takes, convert=convert, is_shown_by_type=False
    )


def _mapping(key: ArgumentKind, element: ArgumentKind) -> ArgumentKind:
    def convert(name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "a mapping, such as a dict")
        changed = {
            key.convert(f"{name}: key", key_value): element.convert(
                f"{name}[{key_value!r}]", inner
            )
            for key_value, inner in value.items()
        }
        pairs = zip(changed.items(), value.items(), strict=True)
        is_same = all(one[0] is other[0] and one[1] is other[1] for one, other in pairs)
        return value if is_same else changed

    return ArgumentKind(
        words="a mapping",
        takes=_instance(Mapping),
        convert=convert,
        is_shown_by_type=False,
    )


def _tuple(elements: list[ArgumentKind]) -> ArgumentKind:
    """Return the kind of a tuple of a fixed length; another sequence of that length is taken."""
    said = f"a tuple of {len(elements)} elements"

    def convert(name: str, value: Any) -> Any:
        if not _is_sequence(value) or len(value) != len(elements):
            raise _wrong(name, value, said)
        changed = tuple(
            kind.convert(f"{name}[{index}]", element)
            for index, (kind, element) in enumerate(zip(elements, value, strict=True))
        )
        is_same = all(one is other for one, other in zip(changed, value, strict=True))
        return value if is_same else changed

    return ArgumentKind(
        words=said, takes=_is_sequence, convert=convert, is_shown_by_type=False
    )


def _elements(name: str, value: Any, words: str) -> Any:
    """Return a list or tuple as it is, and another sequence or array as a list."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, np.ndarray) and value.ndim:
        return value.tolist() if value.dtype.kind in "biuf" else list(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    raise _wrong(name, value, words)


def _int(name: str, value: Any) -> int:
    return as_int(name, value, -INT32 - 1, INT32)


def _float(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if not _is_real(value):
        raise _wrong(name, value, "a float")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} = {_shown(value)}: expected a number that a float has"
        ) from None


def _bool(name: str, value: Any) -> bool:
    if not _is_bool(value):
        raise _wrong(name, value, "a bool")
    return bool(value)


def _device(name: str, value: Any) -> Any:
    try:
        torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(
            f"{name} = {_shown(value)}: expected a torch.device or its name, such as 'cuda:0'"
        ) from None
    return value


def _same(name: str, value: Any) -> Any:
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_none(value: Any) -> bool:
    return value is None


def _is_sequence(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    return is_array or (
        isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    )


def _instance(annotation: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, annotation)


def _implementation(annotation: type) -> Callable[[Any], bool]:
    names: Collection[str] = getattr(annotation, "__abstractmethods__", ())

    def has_methods(value: Any) -> bool:
        return isinstance(value, annotation) or all(
            callable(getattr(value, name, None)) for name in names
        )

    return has_methods


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _plural(words: str) -> str:
    """Return "ints" for "an int"."""
    first, _, rest = words.partition(" ")
    return f"{rest}s" if first in ("a", "an") and " " not in rest else "values"


def _shown(value: Any) -> str:
    """Return the start of a value's text in one line."""
    return f"{' '.join(repr(value).split()):.60}"


def _wrong(name: str, value: Any, words: str) -> TypeError:
    hint = ""
    if isinstance(value, Tensor):
        hint = (
            "; call .tolist() first" if "sequence" in words else "; call .item() first"
        )
    return TypeError(f"{name} = {_shown(value)}: expected {words}{hint}")


_ANY = ArgumentKind(
    words="",
    takes=lambda value: True,
    convert=_same,
    takes_all=True,
    is_shown_by_type=False,
)
_CALLABLE = _plain("a function", callable)
_DEVICE_WORDS = ("a torch.device", "a str")
_DEVICE = ArgumentKind(
    words="a torch.device or its name",
    takes=_instance((torch.device, str)),
    convert=_device,
    is_shown_by_type=False,
)
_WIDE = ArgumentKind(
    words="an int of 64 bits",
    takes=_is_int,
    convert=lambda name, value: as_int(name, value, -LARGEST - 1),
    is_shown_by_type=False,
)

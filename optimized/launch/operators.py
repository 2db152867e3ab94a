"""Operators of torch for the public operations, for `torch.compile` and `torch.export`.

A compiler records a public operation as one operator of `torch.ops.pagetwin` and does not trace its
body. `operator` registers a function under its own name, with arguments from its signature. Tensors
that it writes are declared. A result has the axes of the return annotation, whose sizes are those
of the arguments (`shared/contract/shapes.py` names the axes). So a compiler knows its shape without
running the function.

Three rules of torch shape the operators. An operator takes tensors and numbers, so each field of
`AttentionOptions` is an argument of its own. An operator returns none of its arguments: if the
caller gives an output, the overload `out` is called, which returns nothing. An argument has one
type: what may be a number or a tensor becomes two arguments, `causal` and `causal_tensor`.

A call that is not traced runs the function directly, without torch's dispatcher.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from jaxtyping import AbstractArray
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as count_modes
from torch.compiler import is_compiling

from ...contract.attention_options import (
    OPTION_NAMES,
    AttentionOptions,
    pack_options,
)

NAMESPACE = __name__.partition(".")[0]
"""Namespace of the operators; a copy of the package under another name has its own."""

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

# torch's modes that record calls, or run them with tensors without contents; other modes, such as
# those that count or observe calls, receive the torch calls inside an operation
TRACING_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)

_OPTIONS = "options"
"""The argument that is an AttentionOptions."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def operator(
    changed: Sequence[str] = (),
    out: Sequence[str] = (),
    like: Sequence[str] = (),
    sizes: Mapping[str, str] | None = None,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Register a public operation, which may then be called in compiled code.

    Args:
        changed: the arguments that are always written.
        out: the arguments that are written if they are given; the first one is then returned.
        like: Optional. For each result, the argument whose dtype it has. If empty, each result has
            the dtype of the first tensor. A given argument `dtype` has priority.
        sizes: Optional. Axis of a result -> the argument that is its size, for axes that no tensor
            has.

    Returns:
        a decorator. The decorated function runs as before unless it is traced.
    """

    def register(function: Any) -> Any:
        name, signature = function.__name__, inspect.signature(function)
        flat = tuple(_flatten(signature))
        lowered = tuple(_lower(flat, out))
        names = [each.name for each in lowered]
        unions = [each.name for each in flat if f"{each.name}_tensor" in names]
        takes_options = _OPTIONS in signature.parameters
        results = _Results(signature, like, sizes or {})

        def given(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
            found = dict(zip(names, args, strict=False)) | named
            for each in unions:
                tensor = found.pop(f"{each}_tensor", None)
                if tensor is not None:
                    found[each] = tensor
            return pack_options(**found) if takes_options else found

        def run(*args: Any, **named: Any) -> Any:
            return function(**given(args, named))

        def run_out(*args: Any, **named: Any) -> None:
            function(**given(args, named))

        def fake(*args: Any, **named: Any) -> Any:
            return results.empty(given(args, named))

        returned = _plain(signature.return_annotation)
        _define(name, lowered, returned, changed, run, fake)
        if out:
            with_out = (*lowered, *_buffers(out))
            _define(f"{name}.out", with_out, None, [*changed, *out], run_out, _nothing)
        trace = _tracer(name, signature, out, unions, results)
        return _fork(function, ", ".join(signature.parameters), trace)

    return register


def _buffers(out: Sequence[str]) -> list[inspect.Parameter]:
    """Return the outputs of the overload `out`; the first one is required."""
    return [
        inspect.Parameter(
            each,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Tensor if each == out[0] else Tensor | None,
            default=inspect.Parameter.empty if each == out[0] else None,
        )
        for each in out
    ]


def _tracer(
    name: str,
    signature: inspect.Signature,
    out: Sequence[str],
    unions: Sequence[str],
    results: "_Results",
) -> Callable[..., Any]:
    """Return a function that records a call as one operator, and returns its results.

    Args:
        out, unions: the arguments that are written if they are given, and those that may be a
            number or a tensor.
    """
    packet = getattr(getattr(torch.ops, NAMESPACE), name)

    def trace(*args: Any) -> Any:
        named = dict(zip(signature.parameters, args, strict=True))
        if _OPTIONS in named:
            options = named.pop(_OPTIONS)
            named |= {each: getattr(options, each) for each in OPTION_NAMES}
        buffers = {each: named.pop(each) for each in out}
        is_given = any(each is not None for each in buffers.values())
        if is_given and buffers[out[0]] is None:
            buffers[out[0]] = results.empty(named)
        for each in unions:
            if isinstance(named[each], Tensor):
                named[f"{each}_tensor"] = named.pop(each)
        if not is_given:
            return packet.default(**named)
        packet.out(**named, **buffers)
        return buffers[out[0]]

    return trace


def _fork(function: Any, arguments: str, trace: Callable[..., Any]) -> Any:
    """Return a function that runs another, or `trace` while calls are recorded.

    Its source is generated with the function's own arguments, as dataclasses generate theirs:
    packing and unpacking them as a tuple and a dictionary costs several times the check.
    """
    # nearly always both are false, because no mode is active
    source = f"""
def {function.__name__}({arguments}):
    if is_compiling() or count_modes() and _is_recorded():
        return trace({arguments})
    return function({arguments})
"""
    names: dict[str, Any] = {
        "function": function,
        "trace": trace,
        "is_compiling": is_compiling,
        "count_modes": count_modes,
        "_is_recorded": _is_recorded,
    }
    exec(source, names)
    forked: Any = functools.wraps(function)(names[function.__name__])
    forked.__defaults__ = function.__defaults__
    return forked


def _is_recorded() -> bool:
    """Return whether one of the active modes is a tracing mode."""
    return any(map(torch._C._get_dispatch_mode, TRACING_MODES))


class _Results:
    """Makes an operation's results, without contents, from the names of the axes."""

    def __init__(
        self,
        signature: inspect.Signature,
        like: Sequence[str],
        sizes: Mapping[str, str],
    ) -> None:
        self.sizes = sizes
        self.axes = {
            name: each.annotation.dim_str.split()
            for name, each in signature.parameters.items()
            if _is_array(each.annotation)
        }
        returned = signature.return_annotation
        self.is_many = get_origin(returned) is tuple
        arrays = [
            each
            for each in (get_args(returned) if self.is_many else [returned])
            if _is_array(each)
        ]
        like = like or [next(iter(self.axes), "")] * len(arrays)
        self.results = [
            (each.dim_str.split(), name, _only_dtype(each))
            for each, name in zip(arrays, like, strict=True)
        ]

    def empty(self, given: Mapping[str, Any]) -> Any:
        """Return what an operation returns, given its arguments."""
        if not self.results:
            return None
        sizes = {axis: given[name] for axis, name in self.sizes.items()}
        for name, axes in self.axes.items():
            shape = given[name].shape
            if len(axes) != len(shape):
                raise ValueError(
                    f"{name} has shape {list(shape)}: expected [{', '.join(axes)}]"
                )
            for axis, size in zip(axes, shape, strict=True):
                sizes.setdefault(axis, size)
        made = []
        for axes, name, only in self.results:
            dtype = only or given.get("dtype") or given[name].dtype
            shape = [sizes[axis] for axis in axes]
            made.append(given[name].new_empty(shape, dtype=dtype))
        return tuple(made) if self.is_many else made[0]


def _define(
    name: str,
    parameters: Sequence[inspect.Parameter],
    returned: Any,
    changed: Sequence[str],
    run: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Add one overload of an operator, for tensors of any device."""

    def prototype() -> None: ...

    signature = inspect.Signature(parameters, return_annotation=returned)
    prototype.__signature__ = signature  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(prototype, op_name=name, mutates_args=changed)
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


def _flatten(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    """Yield a signature's parameters, with one for each option in place of `options`."""
    for each in signature.parameters.values():
        if each.name != _OPTIONS:
            yield each
            continue
        for field in fields(AttentionOptions):
            yield each.replace(
                name=field.name, annotation=field.type, default=field.default
            )


def _lower(
    parameters: Sequence[inspect.Parameter], left_out: Sequence[str]
) -> Iterator[inspect.Parameter]:
    """Yield parameters as an operator has them."""
    for each in parameters:
        if each.name in left_out:
            continue
        kinds = _kinds(each.annotation)
        optional = NoneType in kinds
        kinds = [kind for kind in kinds if kind is not NoneType]
        numbers = [kind for kind in kinds if kind is not Tensor]
        if Tensor in kinds and numbers:
            (number,) = numbers
            annotation = number | None if optional else number
            yield each.replace(annotation=annotation)
            tensor = each.replace(name=f"{each.name}_tensor", default=None)
            yield tensor.replace(annotation=Tensor | None)
        else:
            (kind,) = kinds
            yield each.replace(annotation=kind | None if optional else kind)


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that an argument may have, arrays as Tensor."""
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    return [_plain(each) for each in members]


def _plain(annotation: Any) -> Any:
    """Return an annotation with Tensor for every array."""
    if _is_array(annotation):
        return Tensor
    if origin := get_origin(annotation):
        return origin[tuple(map(_plain, get_args(annotation)))]
    return annotation


def _is_array(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, AbstractArray)


def _only_dtype(annotation: Any) -> torch.dtype | None:
    """Return the dtype of such arrays, or None if they may have several."""
    dtypes = annotation.dtypes
    return getattr(torch, dtypes[0]) if len(dtypes) == 1 else None


def _nothing(*args: Any, **named: Any) -> None:
    """Return None, the result of an operator that only writes."""

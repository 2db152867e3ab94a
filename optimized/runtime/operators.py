"""Operators of torch for the public operations, for `torch.compile` and `torch.export`.

A compiler records a public operation as one operator of `torch.ops.pagetwin` and does not trace its
body. `operator` registers a function under its own name, with arguments and results from its
signature (operator_signature.py), so a compiler knows a result's shape without running the
function. Tensors that are written are declared. An operator returns none of its arguments: if the
caller gives an output, the overload `out` is called, which returns nothing.

A call that is not traced runs the function directly, without torch's dispatcher.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as count_modes
from torch.compiler import is_compiling

from ...contract.argument_types import ArgumentTypes
from ...contract.attention_options import OPTION_NAMES, pack_options
from .operator_signature import (
    OPTIONS,
    Results,
    flatten_options,
    lower_parameters,
    output_parameters,
    with_plain_tensors,
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

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def operator(
    changed: Sequence[str] = (),
    out: Sequence[str] = (),
    like: Sequence[str] = (),
    sizes: Mapping[str, str] | None = None,
    is_repeated: bool = False,
    takes_records: bool = False,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Register a public operation, which may then be called in compiled code.

    Args:
        changed: the arguments that are always written.
        out: the arguments that are written if they are given; the first one is then returned.
        like: Optional. For each result, the argument whose dtype it has. If empty, each result has
            the dtype of the first tensor. A given argument `dtype` has priority.
        sizes: Optional. Axis of a result -> the argument that is its size, for axes that no tensor
            has.
        is_repeated: whether the function compares its tensors with those of earlier calls, and
            validates their types, axes and gradients if they differ.
        takes_records: whether keys and values may be records of latents (`find_record_heads`).

    Returns:
        a decorator. The decorated function runs as before unless it is traced.
    """

    def register(function: Any) -> Any:
        name, signature = function.__name__, inspect.signature(function)
        flat = tuple(flatten_options(signature))
        lowered = tuple(lower_parameters(flat, out))
        names = [parameter.name for parameter in lowered]
        unions = [
            parameter.name for parameter in flat if f"{parameter.name}_tensor" in names
        ]
        takes_options = OPTIONS in signature.parameters
        results = Results(signature, like, sizes or {}, takes_records)

        def given(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
            found = dict(zip(names, args, strict=False)) | named
            for name in unions:
                tensor = found.pop(f"{name}_tensor", None)
                if tensor is not None:
                    found[name] = tensor
            return pack_options(**found) if takes_options else found

        def run(*args: Any, **named: Any) -> Any:
            return function(**given(args, named))

        def run_out(*args: Any, **named: Any) -> None:
            function(**given(args, named))

        def fake(*args: Any, **named: Any) -> Any:
            return results.empty(given(args, named))

        returned = with_plain_tensors(signature.return_annotation)
        _define(name, lowered, returned, changed, run, fake)
        if out:
            with_out = (*lowered, *output_parameters(out))
            _define(f"{name}.out", with_out, None, [*changed, *out], run_out, _nothing)
        trace = _tracer(name, signature, out, unions, results)
        return _fork(function, signature, trace, is_repeated)

    return register


def _tracer(
    name: str,
    signature: inspect.Signature,
    out: Sequence[str],
    unions: Sequence[str],
    results: Results,
) -> Callable[..., Any]:
    """Return a function that records a call as one operator, and returns its results.

    Args:
        out, unions: the arguments that are written if they are given, and those that may be a
            number or a tensor.
    """
    packet = getattr(getattr(torch.ops, NAMESPACE), name)

    def trace(*args: Any) -> Any:
        named = dict(zip(signature.parameters, args, strict=True))
        if OPTIONS in named:
            options = named.pop(OPTIONS)
            named |= {option: getattr(options, option) for option in OPTION_NAMES}
        buffers = {name: named.pop(name) for name in out}
        is_given = any(buffer is not None for buffer in buffers.values())
        if is_given and buffers[out[0]] is None:
            buffers[out[0]] = results.empty(named)
        for name in unions:
            if isinstance(named[name], Tensor):
                named[f"{name}_tensor"] = named.pop(name)
        if not is_given:
            return packet.default(**named)
        packet.out(**named, **buffers)
        return buffers[out[0]]

    return trace


def _fork(
    function: Any,
    signature: inspect.Signature,
    trace: Callable[..., Any],
    is_repeated: bool,
) -> Any:
    """Return a function that runs another, or `trace` while calls are recorded.

    The types of the arguments are validated before the function runs, or by the function if it is
    repeated.

    Its source is generated with the function's own arguments, as dataclasses generate theirs:
    packing and unpacking them as a tuple and a dictionary costs several times the check.
    """
    arguments = ", ".join(signature.parameters)
    types = ArgumentTypes(signature, is_repeated=is_repeated)
    # nearly always both are false, because no mode is active
    source = f"""
def {function.__name__}({arguments}):
    if is_compiling() or count_modes() and _is_recorded():
        return trace({arguments})
{types.source()}{types.call("function", arguments)}"""
    names: dict[str, Any] = {
        "function": function,
        "trace": trace,
        "is_compiling": is_compiling,
        "count_modes": count_modes,
        "_is_recorded": _is_recorded,
    } | types.names
    exec(source, names)
    forked: Any = functools.wraps(function)(names[function.__name__])
    forked.__defaults__ = function.__defaults__
    # the contract is written once, beside the algorithm
    forked.__doc__ = (
        f"{inspect.cleandoc(function.__doc__ or '')}\n\nArguments, results, errors and an example:"
        f" help(pagetwin.reference.{function.__name__})."
    )
    return forked


def _is_recorded() -> bool:
    """Return whether one of the active modes is a tracing mode."""
    return any(map(torch._C._get_dispatch_mode, TRACING_MODES))


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


def _nothing(*args: Any, **named: Any) -> None:
    """Return None, the result of an operator that only writes."""

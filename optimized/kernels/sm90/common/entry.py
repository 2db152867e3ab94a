"""Kernels whose parameters are the fields of a NamedTuple.

The NamedTuple of a kernel's arguments is the only definition of their order. The host gives them by
name for each launch, and the kernel's body gets one. Between them are the parameters of the kernel,
one per field, because triton 3.6 and 3.7 specialize the numbers in a tuple even if
`do_not_specialize` names it. `make_kernel` writes them.
"""

import inspect
import linecache
from collections.abc import Callable, Mapping
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeAlias

from triton.experimental import gluon

from ....runtime.launcher import Launcher

# what the fields of a NamedTuple of arguments are, in this order
TensorMap: TypeAlias = Annotated[Any, "tensor map"]
"""A tensor map; on the host the tensor that it describes."""
Pointer: TypeAlias = Annotated[Any, "pointer"]
"""A pointer; on the host a tensor or None."""
Option: TypeAlias = Annotated[Any, "option"]
"""A pointer or a number in float32; on the host a tensor, a number or None."""
Number: TypeAlias = Annotated[Any, "number"]
"""A number that changes from call to call. The kernel is not specialized on it."""


class Ends(NamedTuple):
    """Where the fields of each kind end in a NamedTuple of arguments; the rest are numbers."""

    maps: int
    pointers: int
    options: int


@cache
def find_ends(kernel_arguments: Any) -> Ends:
    """Return the ends of the kinds of fields of a NamedTuple of arguments."""
    kinds = list(inspect.get_annotations(kernel_arguments).values())
    ends, end = [], 0
    for kind in (TensorMap, Pointer, Option):
        end += kinds.count(kind)
        ends.append(end)
    maps, pointers, options = ends
    in_order = [TensorMap] * maps + [Pointer] * (pointers - maps)
    in_order += [Option] * (options - pointers) + [Number] * (len(kinds) - options)
    assert kinds == in_order, kernel_arguments
    return Ends(maps, pointers, options)


@cache
def find_order(kernel_arguments: Any) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return what puts arguments by name into the order of a NamedTuple.

    It takes a fourth of the time of a NamedTuple with its fields as keywords.
    """
    return itemgetter(*kernel_arguments._fields)


def make_kernel(
    name: str,
    body: Any,
    arguments: Any,
    jit: Callable[..., Any] = gluon.jit,
    is_aligned: bool = False,
) -> Any:
    """Return the kernel that calls `body` with a NamedTuple of its own parameters.

    Args:
        name: name of the kernel.
        body: jit function of the NamedTuple and of what no launch changes, in the module of the
            kernel.
        arguments: the NamedTuple, a class of that module.
        jit: decorator of the kernel.
        is_aligned: whether the kernel is specialized on the alignment of its pointers.
    """
    fields, ends = arguments._fields, find_ends(arguments)
    changing, others = ", ".join(fields), body.arg_names[1:]
    constants = {other for other in others if other in body.fn.__annotations__}
    # as the module of the kernel writes it
    mark = ": gl.constexpr" if jit is gluon.jit else ": tl.constexpr"
    parameters = [other + mark * (other in constants) for other in others]
    source = (
        f"def {name}({', '.join((changing, *parameters))}):\n"
        f"    {body.fn.__name__}({arguments.__name__}({changing}), {', '.join(others)})\n"
    )
    namespace = body.fn.__globals__
    file = f"<{name} in {namespace['__name__']}>"
    # triton reads the source of a function from its file, and finds it here
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    exec(compile(source, file, "exec"), namespace)
    kernel = namespace[name]
    kernel.__doc__ = body.fn.__doc__
    pointers = [] if is_aligned else fields[ends.maps : ends.options]
    return jit(
        kernel,
        do_not_specialize=list(fields[ends.options :]),
        do_not_specialize_on_alignment=list(pointers),
    )


def launch_by_pointers(
    launcher: Launcher,
    grid: tuple[int, int, int],
    arguments: Any,
    given: Mapping[str, Any],
) -> None:
    """Launch a kernel without tensor maps.

    Args:
        launcher: of the kernel.
        grid: programs along each axis.
        arguments: NamedTuple of the kernel's arguments.
        given: the arguments by name, and others.
    """
    _, pointers, options = find_ends(arguments)
    ordered = find_order(arguments)(given)
    tensors = ordered[:pointers]
    launcher(
        grid,
        [0 if tensor is None else tensor.data_ptr() for tensor in tensors],
        ordered[pointers:options],
        ordered[options:],
        tensors,
    )

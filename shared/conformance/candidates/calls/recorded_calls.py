"""Recorded calls: what each operation of a candidate returned and wrote, and under which modes.

A law that runs twice makes the same calls twice. If results depend on inputs alone, both records
are equal, bit by bit.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checks.canaries import memory_of
from ...checks.expect import expect_same
from ..candidate import Candidate
from .circumstances import entered

OUTPUTS = ("out", "lse", "output", "output_lse")
"""Arguments whose content before a call is not an input."""
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class Records:
    """The calls of a candidate's operations while a law runs.

    Args:
        candidate: The candidate.
        device: Device of the inputs.
        modes: Names of the modes that are entered around each call.
        disturbs: Whether functions are called more than once: with other contents of their
            outputs, with other numbers at the same addresses, and then as the law calls them.
    """

    def __init__(
        self,
        candidate: Candidate,
        device: torch.device,
        modes: Sequence[str] = (),
        disturbs: bool = False,
    ) -> None:
        self.device, self.modes, self.disturbs = device, modes, disturbs
        self.calls: list[tuple[str, list[tuple[str, Any]]]] = []
        self.kept: list[Any] = []
        changed: dict[str, Any] = {}
        for name, found in candidate.operations.items():
            if name == "BACKENDS":
                changed[name] = tuple(self._backend(backend) for backend in found)
            elif inspect.isclass(found):
                changed[name] = self._class(name, found)
            else:
                changed[name] = self._function(name, found, disturbs)
        self.candidate = candidate.with_operations(**changed)

    def has(self, operation: str) -> bool:
        """Return whether an operation was called, or a method of it, and returned."""
        return any(
            name.partition(".")[0] == operation and results[0][0] != "error"
            for name, results in self.calls
        )

    def expect_equal(self, right: "Records") -> None:
        """Raise a Disagreement if a call gave other bits than the same call of another record."""
        for found, expected in zip(self.calls, right.calls, strict=False):
            expect_same("operation", found[0], expected[0])
            for (path, one), (_, other) in zip(found[1], expected[1], strict=False):
                expect_same(f"{path} of {found[0]}", one, other)
            expect_same(
                f"results of {found[0]}",
                [path for path, _ in found[1]],
                [path for path, _ in expected[1]],
            )
        expect_same("number of calls", len(self.calls), len(right.calls))

    def _function(
        self, name: str, function: Callable[..., Any], disturbs: bool
    ) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if disturbs:
                named = _named(function, args, given)
                self._with_other_outputs(name, function, args, given, named)
                self._with_other_numbers(function, args, given)
            # so that the same tensors of another run have other addresses
            self.kept.append((args, given))
            try:
                with entered(self.modes, self.device):
                    result = function(*args, **given)
            except Exception as error:
                self.calls.append((name, [("error", repr(error))]))
                raise
            leaves = [("result", type(result).__name__), *leaves_of(result, "result")]
            leaves += leaves_of(args, "argument")
            self.calls.append((name, [*leaves, *leaves_of(given, "argument")]))
            return result

        return call

    def _class(self, name: str, made: type) -> type:
        methods: dict[str, Any] = {}
        for method in dir(made):
            found = inspect.getattr_static(made, method)
            is_ours = not hasattr(object, method) or method == "__init__"
            if inspect.isfunction(found) and is_ours:
                methods[method] = self._function(f"{name}.{method}", found, False)
        return type(made.__name__, (made,), methods)

    def _backend(self, backend: Any) -> type:
        impl = self._class("BACKENDS", backend.get_impl_cls())
        builder = self._class("BACKENDS", backend.get_builder_cls())
        methods = {
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: builder),
        }
        return type(backend.__name__, (backend,), methods)

    def _with_other_outputs(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        given: dict[str, Any],
        named: Mapping[str, Any],
    ) -> None:
        """Call a function with two contents of its outputs, and compare what it wrote."""
        outputs = [
            (output_name, named[output_name])
            for output_name in OUTPUTS
            if isinstance(named.get(output_name), Tensor)
        ]
        if not outputs:
            return
        written = []
        for content in (7.0, -3.0):
            with restored((args, given)):
                for _, tensor in outputs:
                    tensor.fill_(content)
                try:
                    function(*args, **given)
                except Exception:
                    return
                written.append([tensor.cpu().double() for _, tensor in outputs])
        for (output, _), one, other in zip(outputs, *written, strict=True):
            is_kept = (one == 7) & (other == -3)
            expect_same(
                f"{output} of {name}, which held other numbers before",
                *(result.masked_fill(is_kept, 0.0) for result in (one, other)),
            )

    def _with_other_numbers(
        self, function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]
    ) -> None:
        """Call a function with numbers of the other sign at the same addresses."""
        numbers = {
            tensor.untyped_storage().data_ptr(): tensor
            for tensor in tensors_in((args, given))
            if tensor.is_floating_point() and tensor.dim() > 1
        }
        if not numbers:
            return
        with restored((args, given)):
            for tensor in numbers.values():
                _negate(tensor)
            try:
                function(*args, **given)
            except Exception:
                return


def _negate(tensor: Tensor) -> None:
    """Change the sign of all numbers of an allocation of which a tensor is a view."""
    size = tensor.dtype.itemsize
    signs = memory_of(tensor)[size - 1 :: size]
    signs ^= 128


class restored:
    """A context that ends with the contents that tensors had at its start.

    Args:
        value: What holds the tensors.
    """

    def __init__(self, value: object) -> None:
        found = {
            tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in(value)
        }
        self._memories = [memory_of(tensor) for tensor in found.values()]

    def __enter__(self) -> None:
        self._before = [memory.clone() for memory in self._memories]

    def __exit__(self, *error: object) -> None:
        for memory, before in zip(self._memories, self._before, strict=True):
            memory.copy_(before)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    for _, leaf in _walk(value, ""):
        if isinstance(leaf, Tensor):
            yield leaf


def leaves_of(value: object, path: str) -> list[tuple[str, Any]]:
    """Return copies of the tensors and numbers in nested containers and dataclasses."""
    leaves: list[tuple[str, Any]] = []
    for where, leaf in _walk(value, path):
        if isinstance(leaf, Tensor):
            leaves.append((where, leaf.detach().cpu().clone()))
        elif isinstance(leaf, np.ndarray):
            leaves.append((where, torch.from_numpy(leaf.copy())))
        else:
            leaves.append((where, repr(leaf)))
    return leaves


def _walk(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of every leaf. Other objects have none."""
    if isinstance(value, (Tensor, np.ndarray, *PLAIN)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), f"{path}.{field.name}")


def _named(
    function: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of a call by name; those given by name if it has other arguments."""
    try:
        return inspect.signature(function).bind(*args, **given).arguments
    except TypeError:
        return given

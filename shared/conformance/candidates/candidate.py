"""Candidate: the implementation under test, with the support that it declares.

A candidate is a package with the same files as the twins, or one module that defines some of their
functions under the same names, such as an adapter around another kernel. Operations that it does
not have are reported as missing. A module may declare in SUPPORT what its kernel supports. It is
called only inside of that, unless calls outside of it are requested.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import (
    DEFAULT_OPTIONS,
    OPTION_NAMES,
    AttentionOptions,
    unpack_options,
)
from ...contract.operations import (
    CONCEPTS,
    find_backends,
    find_operations,
    load_implementation,
)
from ...engine.triton_versions import repair_loaded_interpreter
from ..base.support import OutsideSupport as OutsideSupport
from ..base.support import Support as Support
from ..base.support import bounds_of, converted
from .fatal import fatal_status
from .file_formats import find_format
from .guard.interference import GUARD, TWINS, guard_operations

BATCH_INVARIANT = "batch_invariant"
"""Name of the option that requests batch-invariant results."""
NO_LIMITS = Support()
CLAIMS = ("rejects shapes", "rejects contents", BATCH_INVARIANT)
"""Properties that a law may require and that a correct implementation may lack."""


class Candidate:
    """The operations that an implementation has, as attributes.

    Args:
        name: Its dotted name.
        operations: Functions and classes by the name of the operation. Access to another
            operation raises OutsideSupport if the support does not declare it.
        support: The declared support. A call that is outside of it raises OutsideSupport, and the
            implementation is not called. An error of any other call is a failure.
        goes_outside: Whether calls outside of the support are made too. Their errors are converted
            to OutsideSupport.
        device: Optional. The device of the tensors. On CUDA each call is synchronized, so that an
            error of a kernel is raised by the call that launched it.
        is_guarded: Whether the functions of the suite are compared with those from before the
            candidate was imported.
    """

    def __init__(
        self,
        name: str,
        operations: dict[str, Any],
        support: Support,
        goes_outside: bool = False,
        device: torch.device | None = None,
        is_guarded: bool = False,
    ) -> None:
        self.name = name
        self.operations = operations
        self.support = support
        self.goes_outside = goes_outside
        self.device = device
        self.is_guarded = is_guarded
        self._accesses = [0]
        self._calls = [0]
        self._calls_outside = [0]
        self._made: dict[str, tuple[Any, Any]] = {}
        """The operation and the function that calls it, by name."""

    def __getattr__(self, operation: str) -> Any:
        operations: dict[str, Any] = self.__dict__["operations"]
        if operation not in operations:
            if is_undeclared(operation, self.__dict__["support"]):
                raise OutsideSupport(f"needs {operation}, which is not declared")
            raise AttributeError(f"{self.name} has no {operation}")
        self._accesses[0] += 1
        found = operations[operation]
        if inspect.isclass(found) or not callable(found):
            return found
        if not self.promises_all:
            return self._awaited(self._declared(operation, found))
        self._calls[0] += 1
        # made once, because it takes longer than the rest of an access
        function, call = self._made.get(operation, (None, None))
        if function is not found:
            call = self._awaited(with_keywords(operation, found))
            self._made[operation] = found, call
        return call

    def _awaited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that, on a GPU, returns when its kernels have ended."""
        if self.device is not None and self.device.type == "cuda":
            return _synchronized(function)
        return function

    @property
    def accesses(self) -> int:
        """The number of accesses to operations of the candidate.

        A case that does not increase this number did not test the candidate.
        """
        return self._accesses[0]

    @property
    def calls(self) -> int:
        """The number of calls that reached an operation of the candidate."""
        return self._calls[0]

    @property
    def calls_outside(self) -> int:
        """The number of calls that were made outside of the declared support."""
        return self._calls_outside[0]

    def with_operations(self, **operations: Any) -> "Candidate":
        """Return the candidate with some operations replaced. Both share the counts of calls."""
        return self._with(operations=self.operations | operations)

    def on(self, device: torch.device) -> "Candidate":
        """Return the candidate with the device of its tensors."""
        return self._with(device=device)

    def without_waiting(self) -> "Candidate":
        """Return the candidate whose calls return before their kernels have ended."""
        return self._with(device=None)

    def outside(self) -> "Candidate":
        """Return the candidate with calls outside of its declared support."""
        return self._with(goes_outside=True)

    def with_support(self, support: Support) -> "Candidate":
        """Return the candidate with another declared support."""
        return self._with(support=support)

    def _with(self, **changes: Any) -> "Candidate":
        found = object.__new__(type(self))
        found.__dict__ |= self.__dict__ | changes | {"_made": {}}
        return found

    def _declared(
        self, operation: str, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return an operation that raises OutsideSupport outside of the declared support."""
        taken = inspect.signature(function).parameters
        takes_any = any(
            parameter.kind == parameter.VAR_KEYWORD for parameter in taken.values()
        )

        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            try:
                arguments = _signature(operation).bind(*args, **given).arguments
            except TypeError:
                self._calls[0] += 1
                return function(*args, **given)
            why = why_outside(operation, arguments, self.support)
            if why and not self.goes_outside:
                raise OutsideSupport(why)
            if "options" in given and _wants_keywords(operation, function):
                given |= unpack_options(given.pop("options"))
            lacking = [name for name in given if name not in taken and not takes_any]
            for name in lacking:
                # an option that is off may be unknown to the function
                if _is_plain(operation, name, given[name]):
                    del given[name]
            if why and any(name in given for name in lacking):
                raise OutsideSupport(why)
            self._convert(given)
            self._calls[0] += 1
            self._calls_outside[0] += why is not None
            try:
                return function(*args, **given)
            except Exception as error:
                # outside of the declared support any error is allowed: it is not a wrong result
                if why is None or fatal_status(error, self.device):
                    raise
                raise OutsideSupport(why) from error

        return call

    def _convert(self, given: dict[str, Any]) -> None:
        """Convert tensors to the dtypes that the support declares; `given` is modified."""
        options = given.get("options", DEFAULT_OPTIONS)
        for name, dtypes in self.support.tensor_dtypes.items():
            is_option = name in OPTION_NAMES and name not in given
            tensor = getattr(options, name) if is_option else given.get(name)
            exact = converted(tensor, dtypes) if isinstance(tensor, Tensor) else None
            if exact is None:
                continue
            if is_option:
                given["options"] = options = replace(options, **{name: exact})
            else:
                given[name] = exact

    @property
    def promises_all(self) -> bool:
        """Whether the candidate declares no limits: it must support all that the twins do."""
        return self.support == NO_LIMITS

    def why_unclaimed(self, claim: str | None) -> str | None:
        """Return why a law with this claim does not apply, or None if it applies."""
        if claim is None:
            return None
        if claim == BATCH_INVARIANT:
            return None if self.batch_invariant() else "no batch invariance is claimed"
        what, rejected = claim.removeprefix("rejects "), self.support.rejects
        if rejected is None or what in rejected:
            return None
        return f"it declares that it does not check {what}"

    def batch_invariant(self) -> "Candidate | None":
        """Return the candidate with batch-invariant attention, or None if it has none."""
        claim = self.support.batch_invariant
        operation = self.operations.get("paged_attention")
        if operation is None:
            return None
        if callable(claim):
            operation = claim
        elif not claim:
            operation = self._as_invariant(operation)
        if operation is None:
            return None
        return self.with_operations(paged_attention=operation)

    def _as_invariant(self, operation: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return an operation with `batch_invariant` set, or None if it lacks that option."""
        declared = self.support.options
        if _takes(operation, BATCH_INVARIANT):
            return partial(operation, **{BATCH_INVARIANT: True})
        if not _takes(operation, "options") or not (
            declared is None or BATCH_INVARIANT in declared
        ):
            return None

        @wraps(operation)
        def invariant(
            *args: Any, options: AttentionOptions = DEFAULT_OPTIONS, **given: Any
        ) -> Any:
            return operation(
                *args, options=replace(options, batch_invariant=True), **given
            )

        return invariant

    def missing(self, needs: Collection[str]) -> list[str]:
        """Return the needed operations that the candidate does not have."""
        return [name for name in needs if name not in self.operations]

    def __repr__(self) -> str:
        return f"Candidate({self.name!r})"


def load_candidate(name: str) -> Candidate:
    """Return an implementation by its dotted name, with the operations that it has.

    Args:
        name: "reference", "optimized", a package with files named after the concepts, a module
            that defines operations itself, the path of a .py file, or that of a file
            in one of the formats of file_formats.py. Modules of the current folder are found.

    Raises:
        FileNotFoundError, ModuleNotFoundError: The module or file does not exist.
        ValueError: It has none of the operations, or its SUPPORT is not a `Support`.
    """
    given = name
    if given not in TWINS:
        GUARD.start()
    name, top = _import(name)
    # its kernels may run in the interpreter; this package's own are repaired when they are launched
    repair_loaded_interpreter()
    operations = find_operations(top)
    if backends := find_backends(top):
        operations["BACKENDS"] = backends
    if not operations:
        raise ValueError(
            f"{name} has none of the operations: expected functions with names such as"
            " paged_attention, reshape_and_cache or compute_slot_mapping_device"
        )
    support = getattr(top, "SUPPORT", Support())
    if not isinstance(support, Support):
        raise ValueError(
            f"{name}.SUPPORT is {support!r}: expected a pagetwin.conformance.Support"
        )
    declared = {
        name: operation
        for name, operation in operations.items()
        if not is_undeclared(name, support)
    }
    if GUARD.guards(given):
        return Candidate(name, guard_operations(declared), support, is_guarded=True)
    return Candidate(name, declared, support)


def is_undeclared(name: str, support: Support) -> bool:
    """Return whether a name is that of an operation that the declared support leaves out."""
    declared = support.operations
    return declared is not None and name not in declared and name in _all_operations()


@cache
def _all_operations() -> frozenset[str]:
    names = {name for concept in CONCEPTS for name in concept.operations}
    return frozenset(names | {"BACKENDS"})


def _import(name: str) -> tuple[str, ModuleType]:
    """Return a module and its dotted name."""
    folder = Path.cwd()
    if (own := find_format(name)) is not None:
        return name, own.load(name)
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise ModuleNotFoundError(
                f"implementation = {name!r}: the file does not exist"
            )
        folder, name = file.parent, file.stem
    elif name in ("reference", "optimized"):
        name = f"pagetwin.{name}"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return name, importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(
            f"implementation = {name!r}: module {error.name} was not found; expected"
            " reference, optimized, a module or package that can be imported, or a .py file",
            name=error.name,
        ) from None


@cache
def _signature(operation: str) -> inspect.Signature:
    return inspect.signature(getattr(load_implementation("reference"), operation))


def arguments_with_default() -> set[str]:
    """Return the names of all arguments of operations that may be left out."""
    reference = load_implementation("reference")
    names = [name for concept in CONCEPTS for name in concept.operations]
    found = [_signature(name) for name in names if callable(getattr(reference, name))]
    parameters = [parameter for one in found for parameter in one.parameters.values()]
    return {
        parameter.name
        for parameter in parameters
        if parameter.default is not parameter.empty
    }


def _takes(operation: Callable[..., Any], argument: str) -> bool:
    """Tell whether an operation has an argument of that name."""
    try:
        return argument in inspect.signature(operation).parameters
    except ValueError:  # builtin functions may have no signature
        return False


def with_keywords(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes `options` where the operation does.

    Args:
        operation: Its name.
        function: The candidate's. If it has no parameter `options`, the result passes the options
            that are not at their default as keyword arguments.
    """
    if not _wants_keywords(operation, function):
        return function

    @wraps(function)
    def call(
        *args: Any, options: AttentionOptions = DEFAULT_OPTIONS, **given: Any
    ) -> Any:
        return function(*args, **given, **unpack_options(options))

    return call


def _wants_keywords(operation: str, function: Callable[..., Any]) -> bool:
    """Return whether a function takes the operation's options as keyword arguments."""
    return "options" in _signature(operation).parameters and not _takes(
        function, "options"
    )


def _is_plain(operation: str, name: str, value: object) -> bool:
    """Tell whether a value of an argument does the same as leaving the argument out."""
    if name == "causal":
        return value is None or value is (operation != "encoder_attention")
    if name in OPTION_NAMES:
        return value is getattr(DEFAULT_OPTIONS, name)
    return value is _signature(operation).parameters[name].default


def _synchronized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns when the kernels that it launched have ended."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        found = function(*args, **given)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return found

    return call


def why_outside(
    operation: str, arguments: Mapping[str, Any], support: Support
) -> str | None:
    """Return the first reason why a call is outside of the declared support, or None.

    Args:
        operation: The name of the operation.
        arguments: The arguments of the call, by name.
        support: The declared support.
    """
    given = {
        name: arguments[name]
        for name, parameter in _signature(operation).parameters.items()
        if parameter.default is not parameter.empty
        and name in arguments
        and name != "options"
    }
    given |= unpack_options(arguments.get("options", DEFAULT_OPTIONS))
    options = {
        name: value
        for name, value in given.items()
        if not _is_plain(operation, name, value)
    }
    tensors = {
        name: argument
        for name, argument in arguments.items()
        if isinstance(argument, Tensor)
    }
    if {"q_nope", "q_pe", "kv_cache"} <= tensors.keys():
        # latents: one KV head, which keys and values share
        nope, rope = tensors["q_nope"], tensors["q_pe"]
        shape = (*nope.shape[:-1], nope.shape[-1] + rope.shape[-1])
        tensors["query"] = torch.empty(shape, dtype=nope.dtype, device="meta")
        tensors["key_cache"] = tensors["kv_cache"].unsqueeze(-2)
    first = tensors.get("query", tensors.get("key", tensors.get("prefix_output")))
    key = tensors.get("key_cache", first)
    if first is None or key is None or first.dim() < 2 or key.dim() < 2:
        return None
    values = tensors.get("value_cache", tensors.get("value"))
    if values is not None and values.shape[-1] != key.shape[-1]:
        options["value_head_size"] = values.shape[-1]
    return support.why_not(tensors, options, **_lengths(arguments, support))


def _lengths(arguments: Mapping[str, Any], support: Support) -> dict[str, list[int]]:
    """Return the declared lengths of a call, each with a bound that exceeds all that are taken."""
    found: dict[str, list[int]] = {"query_lens": [], "seq_lens": []}
    for name, taken, bound in (
        ("query_lens", support.query_lens, arguments.get("max_query_len", 0)),
        ("seq_lens", support.seq_lens, arguments.get("max_seq_len", 0)),
    ):
        if taken is None:
            continue
        counts = arguments.get("query_start_loc" if name == "query_lens" else name)
        lens: list[int] = []
        if isinstance(counts, Tensor) and counts.dim() == 1 and not counts.is_meta:
            counts = counts.diff() if name == "query_lens" else counts
            lens = [int(count) for count in counts.tolist()]
        found[name] = lens + [bound] * (bound > bounds_of(taken)[1])
    return found

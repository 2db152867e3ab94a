"""Candidate: the implementation under test, with the support that it declares.

A candidate is a package with the same files as the twins, or one module that defines some of their
functions under the same names, such as an adapter around another kernel. Operations that it does
not have are reported as missing. A module may declare in SUPPORT what its kernel supports. Outside
of that it may raise an error, but must not return a wrong result.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from ...contract.attention_options import (
    DEFAULT_OPTIONS,
    OPTION_NAMES,
    AttentionOptions,
    unpack_options,
)
from ...contract.operations import find_backends, find_operations, load_implementation

BATCH_INVARIANT = "batch_invariant"
"""Name of the option that requests batch-invariant results."""
CLAIMS = ("rejects shapes", "rejects contents", BATCH_INVARIANT)
"""Properties that a law may require and that a correct implementation may lack."""


class OutsideSupport(NotImplementedError):
    """The candidate raised for a call that is outside of its declared support."""


@dataclass(frozen=True)
class Support:
    """The calls that an adapter's kernel supports. A field that is not set imposes no limit.

    Args:
        operations: Optional. The operations that are supported. Laws that need other operations
            are skipped. If None, all operations are expected.
        dtypes: Optional. Names of the element types of queries, such as "bfloat16".
        cache_dtypes: Optional. Names of the element types of caches.
        block_sizes: Optional. Supported numbers of slots per block.
        head_sizes: Optional. Supported numbers of elements per head.
        max_query_len: Optional. The maximum number of new tokens per request.
        options: Optional. Names of the supported fields of `AttentionOptions` and of the supported
            arguments among `scale`, `out` and `lse`. "value_head_size" means that values may have
            another head size than keys. A function with a parameter `options` gets an
            `AttentionOptions`. Any other function gets the options that are not at their default
            as keyword arguments.
        rejects: Optional. The kinds of invalid input that are validated. "shapes" means everything
            that shapes, dtypes, devices and numbers show. "contents" means the elements of
            tensors, if PAGETWIN_CHECK_VALUES=1. A call with invalid input must raise, or return
            the result of the call that was meant. If None, both kinds are validated. If empty,
            nothing is validated, and the laws about invalid input are skipped.
        batch_invariant: Whether the result of a token is bitwise equal whatever else is in the
            batch, in however many steps its prompt is computed, and whichever blocks hold its
            keys. A function is called instead of `paged_attention`, with the same arguments, to
            get such results. If False, results are batch-invariant only if the operation takes
            the option `batch_invariant`, which is then set.
    """

    operations: Collection[str] | None = None
    dtypes: Collection[str] | None = None
    cache_dtypes: Collection[str] | None = None
    block_sizes: Collection[int] | None = None
    head_sizes: Collection[int] | None = None
    max_query_len: int | None = None
    options: Collection[str] | None = None
    rejects: Collection[str] | None = None
    batch_invariant: bool | Callable[..., Any] = False

    def why_not(
        self,
        dtype: str,
        cache_dtype: str,
        block_size: int | None,
        head_size: int,
        max_query_len: int,
        options: Collection[str],
    ) -> str | None:
        """Return the first reason why a call is not supported, or None if it is supported.

        Args:
            dtype, cache_dtype: Names of element types.
            block_size: Optional. Slots per block. If None, the keys are not in blocks.
            head_size: Elements per head.
            max_query_len: New tokens of the longest request.
            options: Names of the options that the call sets.
        """
        for name, value, taken in (
            ("dtype", dtype, self.dtypes),
            ("cache dtype", cache_dtype, self.cache_dtypes),
            ("block size", block_size, self.block_sizes),
            ("head size", head_size, self.head_sizes),
        ):
            if value is not None and taken is not None and value not in taken:
                return f"{name} {value}"
        if self.max_query_len is not None and max_query_len > self.max_query_len:
            return f"{max_query_len} new tokens of a request"
        if self.options is not None:
            for option in options:
                if option not in self.options:
                    return f"option {option}"
        return None


class Candidate:
    """The operations that an implementation has, as attributes.

    Args:
        name: Its dotted name.
        operations: Functions and classes by the name of the operation.
        support: The declared support. An error of a call that is outside of it is converted to
            OutsideSupport. An error of any other call is a failure.

    """

    def __init__(self, name: str, operations: dict[str, Any], support: Support) -> None:
        self.name = name
        self.operations = operations
        self.support = support
        self._accesses = [0]

    def __getattr__(self, operation: str) -> Any:
        operations: dict[str, Any] = self.__dict__["operations"]
        if operation not in operations:
            raise AttributeError(f"{self.name} has no {operation}")
        self._accesses[0] += 1
        found = operations[operation]
        if inspect.isclass(found) or not callable(found):
            return found
        if self.support == Support():
            return with_keywords(operation, found)
        return _declared(operation, found, self.support)

    @property
    def accesses(self) -> int:
        """The number of accesses to operations of the candidate.

        A case that does not increase this number did not test the candidate.
        """
        return self._accesses[0]

    def with_operations(self, **operations: Any) -> "Candidate":
        """Return the candidate with some operations replaced. Both share one access count."""
        found = Candidate(self.name, self.operations | operations, self.support)
        found._accesses = self._accesses
        return found

    @property
    def promises_all(self) -> bool:
        """Whether the candidate declares no limits: it must support all that the twins do."""
        return self.support == Support()

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
            that defines operations itself, or the path of a .py file. Modules of the current
            folder are found.

    Raises:
        ModuleNotFoundError: The module or file does not exist.
        ValueError: It has none of the operations, or its SUPPORT is not a `Support`.
    """
    name, top = _import(name)
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
    return Candidate(name, operations, support)


def _import(name: str) -> tuple[str, ModuleType]:
    """Return a module and its dotted name."""
    folder = Path.cwd()
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


def _declared(
    operation: str, function: Callable[..., Any], support: Support
) -> Callable[..., Any]:
    """Return an operation that raises OutsideSupport for errors outside of the support."""
    taken = inspect.signature(function).parameters
    takes_any = any(each.kind == each.VAR_KEYWORD for each in taken.values())

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        try:
            arguments = _signature(operation).bind(*args, **given).arguments
        except TypeError:
            return function(*args, **given)
        why = why_outside(operation, arguments, support)
        if "options" in given and _wants_keywords(operation, function):
            given |= unpack_options(given.pop("options"))
        lacking = [name for name in given if name not in taken and not takes_any]
        for name in lacking:
            # an option that is off may be unknown to the function
            if _is_plain(operation, name, given[name]):
                del given[name]
        if why and any(name in given for name in lacking):
            raise OutsideSupport(why)
        try:
            return function(*args, **given)
        except Exception as error:
            # outside of the declared support any error is allowed: it is not a wrong result
            if why is None:
                raise
            raise OutsideSupport(why) from error

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
    options = [
        name
        for name, each in _signature(operation).parameters.items()
        if each.default is not each.empty
        and name in arguments
        and name != "options"
        and not _is_plain(operation, name, arguments[name])
    ]
    given = unpack_options(arguments.get("options", DEFAULT_OPTIONS))
    options += [
        name for name, value in given.items() if not _is_plain(operation, name, value)
    ]
    first = arguments.get("query", arguments.get("key"))
    cache = arguments.get("key_cache")
    key = first if cache is None else cache
    if not isinstance(first, Tensor) or not isinstance(key, Tensor):
        return None
    values = arguments.get("value_cache", arguments.get("value"))
    if isinstance(values, Tensor) and values.shape[-1] != key.shape[-1]:
        options.append("value_head_size")
    return support.why_not(
        dtype=_name(first),
        cache_dtype=_name(key),
        block_size=None if cache is None else cache.shape[1],
        head_size=first.shape[-1],
        max_query_len=int(arguments.get("max_query_len", 0)),
        options=options,
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

"""What is put to the test?

A package with the same files as the twins, or one module with some of their functions under their
names: an adapter around somebody's kernel. What is missing is reported as missing. A module may
declare in SUPPORT what its kernel takes; outside of that it may refuse, but never be wrong.
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
"""Name of the argument that asks an operation for the same bits in any company."""
CLAIMS = ("refuses shapes", "refuses contents", BATCH_INVARIANT)
"""What a law may ask for that not every right implementation has."""


class OutsideSupport(NotImplementedError):
    """A call that lies outside of what the candidate declares, and that it refused."""


@dataclass(frozen=True)
class Support:
    """What an adapter's kernel takes; what is not named is not limited.

    Args:
        operations: which operations it is about; laws that need others are left out.
        dtypes: names of element types of queries, such as "bfloat16".
        cache_dtypes: of caches.
        block_sizes: slots in a block.
        head_sizes: elements of a head.
        max_query_len: new tokens of a request.
        options: names of the fields of `AttentionOptions` that it obeys, and of the arguments
            `scale`, `out` and `lse`; and "value_head_size" where values may have another size
            than keys. A function with a parameter `options` gets an `AttentionOptions`; any other
            gets the options that are not at their default as keyword arguments.
        refuses: which input that makes no sense it refuses: "shapes" is what can be told from
            shapes, dtypes, devices and numbers, "contents" what stands in tensors, where
            PAGETWIN_CHECK_VALUES=1 asks for it. Such a call must raise, or give the answer of the
            call that was meant. None: both; an empty list: it checks nothing, and the laws about
            refusals are left out.
        batch_invariant: whether a token's result has the same bits whatever else is in the batch,
            in how many steps its prompt is computed, and where its pages lie. Or what has to be
            called for that, with the arguments of `paged_attention`. False: only if the operation
            takes the option `batch_invariant`, which is then set.
    """

    operations: Collection[str] | None = None
    dtypes: Collection[str] | None = None
    cache_dtypes: Collection[str] | None = None
    block_sizes: Collection[int] | None = None
    head_sizes: Collection[int] | None = None
    max_query_len: int | None = None
    options: Collection[str] | None = None
    refuses: Collection[str] | None = None
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
        """Return the first reason why a call lies outside, or None: it is declared.

        Args:
            dtype, cache_dtype: names of element types.
            block_size: slots in a block; None: the keys are not in blocks.
            head_size: elements of a head.
            max_query_len: new tokens of the longest request.
            options: names of the options that the call gives.
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
    """The operations of an implementation, as attributes, as far as it has them.

    Args:
        name: its dotted name.
        operations: functions and classes by the name of the operation.
        support: what it declares. An error of a call that lies outside is a refusal, and becomes
            OutsideSupport; of one that does not it is an error.

    """

    def __init__(self, name: str, operations: dict[str, Any], support: Support) -> None:
        self.name = name
        self.operations = operations
        self.support = support
        self._asked = [0]

    def __getattr__(self, operation: str) -> Any:
        operations: dict[str, Any] = self.__dict__["operations"]
        if operation not in operations:
            raise AttributeError(f"{self.name} has no {operation}")
        self._asked[0] += 1
        found = operations[operation]
        if inspect.isclass(found) or not callable(found):
            return found
        if self.support == Support():
            return with_keywords(operation, found)
        return _declared(operation, found, self.support)

    @property
    def asked(self) -> int:
        """How often somebody took one of its operations.

        A case after which this is what it was before says nothing about the candidate.
        """
        return self._asked[0]

    def with_operations(self, **operations: Any) -> "Candidate":
        """Return the candidate with some operations exchanged; one count for both."""
        found = Candidate(self.name, self.operations | operations, self.support)
        found._asked = self._asked
        return found

    @property
    def promises_all(self) -> bool:
        """Whether it declares nothing, and so promises all that the twins do."""
        return self.support == Support()

    def why_unclaimed(self, claim: str | None) -> str | None:
        """Return why a law that asks for a claim is not about it; None: it claims that."""
        if claim is None:
            return None
        if claim == BATCH_INVARIANT:
            return None if self.batch_invariant() else "no batch invariance is claimed"
        what, refuses = claim.removeprefix("refuses "), self.support.refuses
        if refuses is None or what in refuses:
            return None
        return f"it declares that it does not check {what}"

    def batch_invariant(self) -> "Candidate | None":
        """Return the candidate as it gives the same bits in any company; None: it never does."""
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
        """Return an operation with the option `batch_invariant` set; None: it has none."""
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
        """Return which of some operations it has not."""
        return [name for name in needs if name not in self.operations]

    def __repr__(self) -> str:
        return f"Candidate({self.name!r})"


def load_candidate(name: str) -> Candidate:
    """Return an implementation by its dotted name, with what it has of the operations.

    Args:
        name: "reference", "optimized", a package with files named after the concepts, a module
            that defines operations itself, or the path of a .py file. Modules of the current
            folder are found.

    Raises:
        ModuleNotFoundError: there is no such module or file.
        ValueError: it has none of the operations, or a SUPPORT that is none.
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
                f"implementation = {name!r}: there is no such file"
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
            f"implementation = {name!r}: there is no module {error.name} here; expected"
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
    except ValueError:  # made in another language, it tells nobody
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
    """Return an operation whose refusals are told apart: inside and outside of the declared."""
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
            # an option that is off need not be known
            if _is_plain(operation, name, given[name]):
                del given[name]
        if why and any(name in given for name in lacking):
            raise OutsideSupport(why)
        try:
            return function(*args, **given)
        except Exception as error:
            # outside of what is declared any error is a refusal: it is no wrong answer
            if why is None:
                raise
            raise OutsideSupport(why) from error

    return call


def why_outside(
    operation: str, arguments: Mapping[str, Any], support: Support
) -> str | None:
    """Return the first reason why a call lies outside of what is declared, or None.

    Args:
        operation: its name.
        arguments: what the call gives, by name.
        support: what is declared.
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

"""What is put to the test?

A package with the same files as the twins, or one module with some of their functions under their
names: an adapter around somebody's kernel. What is missing is reported as missing. A module may
declare in SUPPORT what its kernel takes; outside of that it may refuse, but never be wrong.
"""

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..operations import CONCEPTS


@dataclass(frozen=True)
class Support:
    """What an adapter's kernel takes; what is not named is not limited.

    Args:
        dtypes: names of element types of queries, such as "bfloat16".
        cache_dtypes: of caches.
        block_sizes: slots in a block.
        head_sizes: elements of a head.
        max_query_len: new tokens of a request.
        options: names of the arguments of `paged_attention` and `encoder_attention` that it
            obeys, beyond those that every call gives.
    """

    dtypes: Collection[str] | None = None
    cache_dtypes: Collection[str] | None = None
    block_sizes: Collection[int] | None = None
    head_sizes: Collection[int] | None = None
    max_query_len: int | None = None
    options: Collection[str] | None = None

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
        support: what it declares.
    """

    def __init__(
        self, name: str, operations: dict[str, Callable[..., Any]], support: Support
    ) -> None:
        self.name = name
        self.operations = operations
        self.support = support

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        operations: dict[str, Callable[..., Any]] = self.__dict__["operations"]
        if operation not in operations:
            raise AttributeError(f"{self.name} has no {operation}")
        return operations[operation]

    def missing(self, needs: Collection[str]) -> list[str]:
        """Return which of some operations it has not."""
        return [name for name in needs if name not in self.operations]

    def __repr__(self) -> str:
        return f"Candidate({self.name!r})"


def load_candidate(name: str) -> Candidate:
    """Return an implementation by its dotted name, with what it has of the operations.

    Args:
        name: "reference", "optimized", a package with files named after the concepts, or a
            module that defines operations itself.

    Raises:
        ModuleNotFoundError: there is no such module.
        ValueError: it has none of the operations.
    """
    name = f"pagetwin.{name}" if name in ("reference", "optimized") else name
    top = importlib.import_module(name)
    operations: dict[str, Callable[..., Any]] = {}
    for concept in CONCEPTS:
        places = [top]
        if hasattr(top, "__path__"):
            places += _submodule(f"{name}.{concept.name}")
        for operation in concept.operations:
            for place in places:
                if callable(getattr(place, operation, None)):
                    operations[operation] = getattr(place, operation)
    if not operations:
        known = ", ".join(each for concept in CONCEPTS for each in concept.operations)
        raise ValueError(
            f"{name} has none of the operations: expected functions named after some of {known}"
        )
    return Candidate(name, operations, getattr(top, "SUPPORT", Support()))


def _submodule(name: str) -> list[ModuleType]:
    """Return a file of a package; nothing if there is none, an error if it cannot be imported."""
    try:
        return [importlib.import_module(name)]
    except ModuleNotFoundError as error:
        if error.name == name:
            return []
        raise

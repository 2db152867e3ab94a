"""Integers that a caller gives: NumPy's become Python's, and what is not an integer is rejected."""

from collections.abc import Sequence, Set
from contextlib import suppress
from numbers import Integral
from typing import Annotated, Any, TypeAlias

import numpy as np
from torch import Tensor

LARGEST = 2**63 - 1
"""The largest number that any argument takes."""

WideInt: TypeAlias = Annotated[int, "64 bits"]
"""An argument that counts nothing in memory, such as a name or a limit."""


def as_int(name: str, value: Any, smallest: int = 0, largest: int = LARGEST) -> int:
    """Return an integer as an `int`.

    Args:
        name: name of the argument.
        value: the integer. NumPy's are taken; bools, floats and tensors are not.
        smallest, largest: its range.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.

    Example:
        >>> as_int("block_size", np.int64(16), smallest=1)
        16
    """
    if type(value) is int and smallest <= value <= largest:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} = {value!r:.60}: expected an int{_hint(value)}")
    number = int(value)
    if number < smallest:
        raise ValueError(f"{name} = {number}: expected at least {smallest}")
    if number > largest:
        raise ValueError(f"{name} = {number}: expected at most {largest}")
    return number


def as_ints(
    name: str, values: Any, smallest: int = 0, largest: int = LARGEST
) -> list[int]:
    """Return integers in a new list.

    Args:
        name: name of the argument.
        values: a list, a tuple, another sequence or a one-dimensional array of integers.
        smallest, largest: their range.

    Raises:
        TypeError: it is not a sequence, or an element is not an integer.
        ValueError: an element is out of range.

    Example:
        >>> as_ints("tokens", np.array([7, 8]))
        [7, 8]
    """
    found = as_list(name, values, "ints")
    # in C: most sequences hold nothing but ints in the range
    if set(map(type, found)) <= {int} and (
        not found or (min(found) >= smallest and max(found) <= largest)
    ):
        return found
    return [
        as_int(f"{name}[{index}]", value, smallest, largest)
        for index, value in enumerate(found)
    ]


def as_array(name: str, values: Any) -> np.ndarray:
    """Return integers of 64 bits in an array; an array of them is returned as it is.

    Args:
        name: name of the argument.
        values: a list, a tuple, another sequence or a one-dimensional array of integers.

    Raises:
        TypeError: it is not a sequence, or an element is not an integer.
        ValueError: an element does not fit in 64 bits.
    """
    with suppress(ValueError):  # lists of different lengths
        found = np.asarray(values)
        is_whole = found.dtype.kind in "iu" and found.dtype != np.uint64
        if found.ndim == 1 and (is_whole or not len(found)):
            return found.astype(np.int64, copy=False)
    return np.array(as_ints(name, values, smallest=-LARGEST - 1), dtype=np.int64)


def as_int_set(name: str, values: Any) -> frozenset[int]:
    """Return integers from 0, in any order.

    Args:
        name: name of the argument.
        values: a set, a list, another collection or an array of integers.

    Raises:
        TypeError: it is not a collection, or an element is not an integer.
        ValueError: an element is negative.
    """
    if isinstance(values, Set):
        values = list(values)
    elif not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, str):
        raise TypeError(
            f"{name} = {values!r:.60}: expected a collection of ints, such as [5]{_hint(values)}"
        )
    return frozenset(as_ints(name, values))


def as_list(name: str, values: Any, what: str) -> list[Any]:
    """Return the elements of a sequence or of an array in a new list.

    Args:
        name: name of the argument.
        values: the sequence.
        what: its elements in words.

    Raises:
        TypeError: it is not a sequence.
    """
    if isinstance(values, np.ndarray) and values.ndim:
        return list(values.tolist() if values.dtype.kind in "iu" else values)
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        return list(values)
    raise TypeError(
        f"{name} = {values!r:.60}: expected a sequence of {what}{_hint(values)}"
    )


def _hint(value: Any) -> str:
    return "; call .tolist() first" if isinstance(value, Tensor) else ""

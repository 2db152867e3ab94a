"""Bounded caches of launch plans and repeated calls, keyed by call signature."""

from typing import Any, Generic, TypeVar

from .attention_call import Signature

_Value = TypeVar("_Value")


class SignatureCache(Generic[_Value]):
    """A cache in two generations, so that a hit costs one dictionary access.

    A new value enters the young generation. When that is full, it becomes the old one, and the
    values of the previous old generation are dropped. A value that is used again in the old
    generation returns to the young one. So the `capacity // 2` values that were used last are
    always kept, and never more than `capacity`.

    Several threads may use a cache. Each step is one operation on a dictionary, which is atomic.
    A value that two threads make at once, or that is lost between two steps, is only made again.

    Args:
        capacity: maximum number of values, at least 2.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._young: dict[Signature, _Value] = {}
        self._old: dict[Signature, _Value] = {}

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._young) + len(self._old)

    def get(self, signature: Signature) -> _Value | None:
        """Return the value of a signature, or None."""
        value = self._young.get(signature)
        if value is None:
            value = self._old.pop(signature, None)
            if value is not None:
                self.put(signature, value)
        return value

    def put(self, signature: Signature, value: _Value) -> None:
        """Add a value. This may drop those that were not used for longest."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[signature] = value

    def clear(self) -> None:
        """Drop all values."""
        self._young, self._old = {}, {}


MAX_REPEATS = 128
"""Repeated calls that are kept, at most: a few KiB each. One serves all layers of a kind in all
steps with the same sizes."""


class PlanCache(SignatureCache[_Value]):
    """A cache of launch plans, with the repeated calls that were recorded from them.

    Attributes:
        repeats: repeated calls by signature, see repeat/calls.py.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._capacity = capacity
        self.repeats: SignatureCache[Any] = SignatureCache(min(capacity, MAX_REPEATS))

    def clear(self) -> None:
        """Drop all plans and repeated calls."""
        super().clear()
        self.repeats.clear()

    def renewed(self) -> "PlanCache[_Value]":
        """Return an empty cache of the same capacity."""
        return PlanCache(self._capacity)

"""Bounded cache of launch plans, keyed by call signature."""

from typing import Generic, TypeVar

from .attention_call import Signature

_Plan = TypeVar("_Plan")


class PlanCache(Generic[_Plan]):
    """A cache in two generations, so that a hit costs one dictionary access.

    A new plan enters the young generation. When that is full, it becomes the old one, and the
    plans of the previous old generation are dropped. A plan that is used again in the old
    generation returns to the young one. So the `capacity // 2` plans that were used last are
    always kept, and never more than `capacity`.

    Several threads may use a cache. Each step is one operation on a dictionary, which is atomic.
    A plan that two threads make at once, or that is lost between two steps, is only made again.

    Args:
        capacity: maximum number of plans, at least 2.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._young: dict[Signature, _Plan] = {}
        self._old: dict[Signature, _Plan] = {}

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._young) + len(self._old)

    def get(self, signature: Signature) -> _Plan | None:
        """Return the plan of a signature, or None."""
        plan = self._young.get(signature)
        if plan is None:
            plan = self._old.pop(signature, None)
            if plan is not None:
                self.put(signature, plan)
        return plan

    def put(self, signature: Signature, plan: _Plan) -> None:
        """Add a plan. This may drop those that were not used for longest."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[signature] = plan

    def clear(self) -> None:
        """Drop all plans."""
        self._young, self._old = {}, {}

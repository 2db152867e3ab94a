"""What is made once while the families of a call are planned, although several of them need it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from .attention_call import AttentionCall

_Value = TypeVar("_Value")


class _Planning(threading.local):
    """What has been made while this thread plans a call; None while it does not."""

    made: dict[tuple[Any, int], tuple[AttentionCall, Any]] | None = None


_PLANNING = _Planning()


@contextmanager
def planning() -> Iterator[None]:
    """Make once, within this context, what functions of `once_per_planning` return."""
    before, _PLANNING.made = _PLANNING.made, {}
    try:
        yield
    finally:
        _PLANNING.made = before


def once_per_planning(
    make: Callable[[AttentionCall], _Value],
) -> Callable[[AttentionCall], _Value]:
    """Return a function that returns the same for the same call within one planning."""

    @wraps(make)
    def made_once(call: AttentionCall) -> _Value:
        made = _PLANNING.made
        if made is None:
            return make(call)
        known = made.get((make, id(call)))
        if known is None:
            # the call is kept, so that no other one gets its id
            known = made[make, id(call)] = (call, make(call))
        value: _Value = known[1]
        return value

    return made_once

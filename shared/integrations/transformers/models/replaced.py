"""Attributes of a model that several callers replace at the same time.

A model's attention is chosen by its configuration, which several models and several threads may
share. Each caller enters its value and takes it away again, in any order. The attribute has the
value that was entered last, and its original value when no value is entered.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ....validation.library_models import check_no_other_thread

ABSENT = object()
"""Stands for an attribute that the object itself does not have."""


@dataclass(frozen=True)
class Replacement:
    """A value for an attribute of an object.

    Args:
        owner: the object.
        attribute: name of the attribute.
        value: what it is set to.
        kind: names the value in messages. Two threads may enter values of the same kind.
    """

    owner: Any
    attribute: str
    value: Any
    kind: str


@dataclass
class _Entered:
    """The values that are entered for one attribute.

    Args:
        original: the value before the first of them.
        by_caller: the replacement and the thread of each caller, in order of entry.
    """

    original: Any
    by_caller: dict[object, tuple[Replacement, int]] = field(default_factory=dict)


LOCK = threading.RLock()
"""Held while attributes are replaced and restored."""

_ENTERED: dict[tuple[int, str], _Entered] = {}
# an owner is kept alive by its replacements, so its id is not given to another object


@contextmanager
def replaced(choose: Callable[[], Sequence[Replacement]]) -> Iterator[None]:
    """Set attributes inside of the block.

    Args:
        choose: returns the attributes and values. No other thread replaces any in the meantime.

    Raises:
        RuntimeError: another thread has entered a value of another kind for one of them.
    """
    caller = object()
    with LOCK:
        replacements = choose()
        check_free(replacements)
        for replacement in replacements:
            key = (id(replacement.owner), replacement.attribute)
            if key not in _ENTERED:
                _ENTERED[key] = _Entered(
                    replacement.owner.__dict__.get(replacement.attribute, ABSENT)
                )
            _ENTERED[key].by_caller[caller] = (replacement, threading.get_ident())
            setattr(replacement.owner, replacement.attribute, replacement.value)
    try:
        yield
    finally:
        with LOCK:
            for replacement in replacements:
                _leave(replacement, caller)


def check_free(replacements: Sequence[Replacement]) -> None:
    """Raise RuntimeError if another thread has entered a value of another kind."""
    for replacement in replacements:
        entered = _ENTERED.get((id(replacement.owner), replacement.attribute))
        for other, thread in entered.by_caller.values() if entered else ():
            if thread != threading.get_ident():
                check_no_other_thread(
                    type(replacement.owner).__name__, replacement.kind, other.kind
                )


def restore_in_copy(copied: Any, owner: Any) -> None:
    """Give a copy of an object the attributes that it has when no value is entered."""
    for (owner_id, attribute), entered in _ENTERED.items():
        if owner_id == id(owner):
            _restore(copied, attribute, entered.original)


def _leave(replacement: Replacement, caller: object) -> None:
    owner, attribute = replacement.owner, replacement.attribute
    key = (id(owner), attribute)
    entered = _ENTERED[key]
    del entered.by_caller[caller]
    if entered.by_caller:
        last, _ = list(entered.by_caller.values())[-1]
        setattr(owner, attribute, last.value)
        return
    del _ENTERED[key]
    _restore(owner, attribute, entered.original)


def _restore(owner: Any, attribute: str, original: Any) -> None:
    if original is ABSENT:
        owner.__dict__.pop(attribute, None)
    else:
        setattr(owner, attribute, original)

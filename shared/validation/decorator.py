"""A decorator that validates an operation's arguments before its body runs."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def validated(
    check: Callable[..., object],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that calls `check` with an operation's arguments, contents included.

    Args:
        check: Raises if the arguments are invalid. It gets those that it has parameters for, and
            `contents=True` if it has such a parameter.
    """
    names = signature(check).parameters

    def decorate(operation: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(operation)

        @wraps(operation)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = parameters.bind(*args, **kwargs)
            given.apply_defaults()
            every = given.arguments | {"contents": True}
            check(**{name: each for name, each in every.items() if name in names})
            return operation(*args, **kwargs)

        return checked

    return decorate

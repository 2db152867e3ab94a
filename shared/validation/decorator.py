"""A decorator that validates an operation's arguments before its body runs.

The body runs under torch's default modes, so that its result depends on the arguments alone.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from ..contract.argument_types import typed
from ..contract.default_modes import default_modes

P = ParamSpec("P")
R = TypeVar("R")


def validated(
    check: Callable[..., object],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that calls `check` with an operation's arguments, contents included.

    The types of the arguments are validated first, by the operation's annotations.

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
            check(
                **{name: argument for name, argument in every.items() if name in names}
            )
            with default_modes():
                return operation(*args, **kwargs)

        return typed(checked)

    return decorate

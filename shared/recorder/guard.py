"""Guard: an error of the recorder is logged once, and never reaches the engine."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .findings import CorruptionFound
from .reports import LOGGER

Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Switch the recorder off after an error of its own; only `CorruptionFound` leaves it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return None
        try:
            with self._lock:
                self._depth += 1
                try:
                    return method(self, *args, **kwargs)
                finally:
                    self._depth -= 1
        except CorruptionFound:
            raise
        except Exception as error:
            self.is_on = self.wants_layers = False
            LOGGER.exception(
                "flight recorder: it failed in step %d and is off from now on (%s: %s); the"
                " engine is not affected",
                self.step,
                type(error).__name__,
                error,
            )
        return None

    return call  # type: ignore[return-value]

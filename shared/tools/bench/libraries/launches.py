"""Launches of attention: which of our kernel families computed a call.

A call is watched once, before it is timed, and with a plan cache of its own. So the plans of the
timed calls are not affected.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


class _Watched:
    """The plan of one kernel family that notes its launches.

    Args:
        family: The family.
        plan: The plan.
        found: Names of families that were launched, modified in place.
    """

    def __init__(self, family: Any, plan: Any, found: list[str]) -> None:
        self._family, self._plan, self._found = family, plan, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def launch(self, call: Any, task: Any) -> None:
        """Launch, and note the name of the family if it had something to compute."""
        self._plan.launch(call, task)
        is_idle = self._family.role.name == "DECODE" and self._has_no_request(call)
        if not is_idle and self._family.name not in self._found:
            self._found.append(self._family.name)

    def _has_no_request(self, call: Any) -> bool:
        """Return whether a decode launch computes no request: all of them are long."""
        lens = call.query_start_loc.diff()
        shortest = int(lens[lens > 0].min()) if bool((lens > 0).any()) else 0
        group_size = call.query.shape[1] // call.value.shape[-2]
        return bool(shortest * group_size > self._plan.short_rows)


@contextmanager
def watch_launches(twin: Any) -> Iterator[list[str]]:
    """Watch attention calls of a twin; the list holds the names of the families at the end.

    Args:
        twin: The implementation. If it has no kernel families, nothing is found.
    """
    found: list[str] = []
    package = twin.paged_attention.__module__.rsplit(".", 2)[0]
    try:
        families: Any = importlib.import_module(f"{package}.dispatch.families")
        attention: Any = importlib.import_module(f"{package}.dispatch.dispatch")
        cascade: Any = importlib.import_module(f"{package}.dispatch.cascade")
    except ImportError:
        yield found
        return

    def watched(family: Any) -> Any:
        make_plan: Callable[[Any], Any] = family.plan
        return family._replace(
            plan=lambda call: _Watched(family, make_plan(call), found)
        )

    launch_cascade = cascade.PIPELINE.launch

    def launch_watched(*arguments: Any) -> None:
        launch_cascade(*arguments)
        found.append("portable rest")

    known = tuple(map(watched, families.FAMILIES))
    with ExitStack() as stack:
        stack.enter_context(patch.object(families, "FAMILIES", known))
        stack.enter_context(patch.object(cascade.PIPELINE, "launch", launch_watched))
        for pipeline in (attention.PIPELINE, cascade.PIPELINE):
            plans = type(pipeline.plans)(2)
            stack.enter_context(patch.object(pipeline, "plans", plans))
        yield found

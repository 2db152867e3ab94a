"""Launches of attention: which of our kernel families computed a call.

The names come from the launch plan of the call. A call is watched once, before it is timed, and
with a plan cache of its own. So the plans of the timed calls are not affected.
"""

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Watched:
    """The plan of one kernel family that notes its launches.

    Args:
        plan: The plan.
        short_rows: The most rows per request that a decode launch computes.
        group_size: Query heads per KV head.
        found: Launches so far, modified in place.
    """

    def __init__(
        self, plan: Any, short_rows: int, group_size: int, found: list[str]
    ) -> None:
        self._plan, self._found = plan, found
        self._short_rows, self._group_size = short_rows, group_size

    def __getattr__(self, name: str) -> Any:
        given = getattr(self._plan, name)
        if not name.startswith("launch") or not callable(given):
            return given

        def launch(call: Any, *rest: Any) -> None:
            given(call, *rest)
            # the decode launch of a batch without short requests computes none
            lens = call.query_start_loc.diff()
            shortest = int(lens[lens > 0].min()) if bool((lens > 0).any()) else 0
            is_idle = shortest * self._group_size > self._short_rows
            if name == "launch_decode" and is_idle:
                return
            family = family_name(self._module_of(name, call))
            words = f"{family} {name[6:].lstrip('_')}".strip()
            if words not in self._found:
                self._found.append(words)

        return launch

    def _module_of(self, name: str, call: Any) -> str:
        """Return the module that a launch belongs to, that of the plan or of the kernel."""
        if name == "launch_decode":
            # a Hopper kernel may take the place of the portable one
            return str(self._plan.plan_decode(call).launcher.module)
        return type(self._plan).__module__


def family_name(module: str) -> str:
    """Return the name of the kernel family that a module belongs to.

    Args:
        module: that of a plan or of a kernel.

    Example:
        The plan of `optimized/kernels/sm90/latent/family.py` is of the family "sm90.latent". Those
        of `optimized/launch/portable.py` and the kernels of `optimized/kernels/` are "portable".
    """
    parts = module.split(".")
    if "kernels" in parts:
        return ".".join(parts[parts.index("kernels") + 1 : -1]) or "portable"
    return parts[-1]


@contextmanager
def watch_launches(twin: Any) -> Iterator[list[str]]:
    """Watch attention calls of a twin; the list holds the names of the launches at the end.

    Args:
        twin: The implementation. If it has no launch plans, nothing is found.
    """
    found: list[str] = []
    package = twin.paged_attention.__module__.rsplit(".", 2)[0]
    try:
        dispatch: Any = importlib.import_module(f"{package}.launch.dispatch")
        cascade: Any = importlib.import_module(f"{package}.launch.cascade")
    except ImportError:
        yield found
        return
    plans, make_plan = dispatch.PLANS, dispatch.make_plan

    def make_watched(call: Any) -> Any:
        plan = make_plan(call)

        def watched(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple(watched(each) for each in part)
            if any(name.startswith("launch") for name in dir(part)):
                return _Watched(part, plan.short_rows, plan.group_size, found)
            return part

        parts = {
            each.name: watched(getattr(plan, each.name))
            for each in dataclasses.fields(plan)
        }
        return dataclasses.replace(plan, **parts)

    cascades, launch_cascade = cascade.PLANS, cascade.launch_cascade

    def launch_watched(plan: Any, call: Any, *rest: Any) -> None:
        launch_cascade(plan, call, *rest)
        has_hopper = plan.hopper is not None and plan.hopper.takes(call)
        found.append("sm90 prefix" if has_hopper else "portable prefix")
        found.append("portable rest")

    dispatch.PLANS, dispatch.make_plan = type(plans)(2), make_watched
    cascade.PLANS, cascade.launch_cascade = type(cascades)(2), launch_watched
    try:
        yield found
    finally:
        dispatch.PLANS, dispatch.make_plan = plans, make_plan
        cascade.PLANS, cascade.launch_cascade = cascades, launch_cascade

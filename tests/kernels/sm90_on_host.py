"""The tile scheduler of the Hopper kernels as functions of Python, on integers."""

import inspect
from types import SimpleNamespace
from typing import Any

from pagetwin.optimized.kernels.sm90.common import scheduler, tile_range


class Int32(int):
    """An integer whose division rounds toward zero, as a kernel's does."""

    def __add__(self, other: int) -> "Int32":
        return Int32(int(self) + int(other))

    def __sub__(self, other: int) -> "Int32":
        return Int32(int(self) - int(other))

    def __mul__(self, other: int) -> "Int32":
        return Int32(int(self) * int(other))

    def __floordiv__(self, other: int) -> "Int32":
        quotient = abs(self) // abs(other)
        return Int32(quotient if (self < 0) == (other < 0) else -quotient)


def run_on_host(
    *mutations: tuple[str, str], more: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """Return the scheduler's functions of positions and tiles as functions of Python.

    Args:
        mutations: text of the source, each found once, and what replaces it.
        more: further functions that rely on these.
    """
    functions = (
        tile_range.first_visible_key,
        tile_range.first_kv_tile,
        tile_range.find_tiles,
        scheduler.locate_work,
        *more,
    )
    source = "\n".join(
        inspect.getsource(function.fn).replace("@gluon.jit\n", "")
        for function in functions
    )
    for old, new in mutations:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    limits = {
        "minimum": lambda a, b: Int32(min(a, b)),
        "maximum": lambda a, b: Int32(max(a, b)),
    }
    names = {
        # triton 3.6 passes a NamedTuple to a constexpr function as a tuple: call what it wraps
        **{
            name: getattr(member, "fn", member)
            for module in (tile_range, scheduler)
            for name, member in vars(module).items()
        },
        "gl": SimpleNamespace(constexpr=None, **limits),
    }
    exec(source, names)
    return names

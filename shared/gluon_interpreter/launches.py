"""Launches of Gluon kernels, interpreted in several orders of their roles, and the faults found.

Example:
    >>> from pagetwin.gluon_interpreter import Launch, interpret_launches
    >>> def launches():
    ...     yield Launch(copy_kernel, (4,), (source, target, 256), {"num_warps": 4})
    >>> [outcome.fault for outcome in interpret_launches(launches)]
    [None]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from .kernels import InterpretedLaunches, interpret_gluon
from .places import UNKNOWN, Place, place_of
from .values import InterpreterError

SETTINGS = ((0.5, 0.05), (0.9, 0.3), (0.0, 0.3), (1.0, 0.3))
"""Lateness of copies and rate of pauses; the seeds of a run take them in turn."""


class Launch(NamedTuple):
    """One launch: what one would write as `kernel[grid](*arguments, **options)`.

    Args:
        kernel: a function of `gluon.jit`.
        grid: programs along each axis, or a number, or a function of the arguments by name.
        arguments: CPU tensors, tensor descriptors of them, numbers, or NamedTuples of those.
        options: constants by name, and `num_warps`.
    """

    kernel: Any
    grid: Any
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class KernelFault:
    """What a kernel did wrong.

    Args:
        kind: "race", "deadlock", "missing fence", "missing wait", "uninitialized read", "out of
            bounds", "overflow", "wrong use", "wrong result", or the name of a Python error.
        message: what happened, and what was expected.
        place: the line of the kernel.
        role: the number of the role; 0 is the one of the launch's warps.
        others: further lines, and what is at each.
        program: indices of the program in the grid.
        seed: of the order that shows it.
        order: the last operations of the program before it, as role and line.
    """

    kind: str
    message: str
    place: Place
    role: int
    others: tuple[tuple[str, Place], ...]
    program: tuple[int, ...]
    seed: int
    order: tuple[tuple[int, Place], ...]

    def turns(self, most: int = 6) -> str:
        """Return the lines of the last turns of roles, such as "role 0: 12, 14; role 1: 30"."""
        found = []
        for role, steps in groupby(self.order, key=lambda step: step[0]):
            lines = [key for key, _ in groupby(place.line for _, place in steps)]
            shown = ["..."] * (len(lines) > most) + [
                str(line) for line in lines[-most:]
            ]
            found.append(f"role {role}: {', '.join(shown)}")
        return "; ".join(found[-most:])


class KernelOutcome(NamedTuple):
    """How a launch ended.

    Args:
        kernel: the name of its kernel.
        orders: orders without a fault.
        fault: Optional. The first fault. If None, there was none.
    """

    kernel: str
    orders: int
    fault: KernelFault | None


def interpret_launches(
    launches: Callable[[], Iterable[Any]], seeds: int = 8
) -> list[KernelOutcome]:
    """Return how each launch ends in several orders of its programs, roles and copies.

    Args:
        launches: yields a `Launch`, or a tuple of its fields, per kernel. It is called once per
            order, so that tensors are new. What it does after a `yield`, such as a comparison of
            results, is done after that launch: an AssertionError is a fault of the launch.
        seeds: the number of orders.

    Raises:
        ValueError: what is yielded is not a launch of a Gluon kernel on CPU tensors, or nothing is.
        NotImplementedError: a kernel has an operation that the interpreter does not know.
    """
    outcomes: list[KernelOutcome] = []
    for seed in range(seeds):
        lateness, pause_rate = SETTINGS[seed % len(SETTINGS)]
        with interpret_gluon(seed, lateness, pause_rate) as interpreted:
            made, index = iter(launches()), -1
            while True:
                try:
                    given = next(made)
                except StopIteration:
                    break
                except AssertionError as error:
                    if index < 0:
                        raise
                    _note(outcomes, index, _fault(error, interpreted, seed, True))
                    break
                index += 1
                launch = check_launch(given)
                if index == len(outcomes):
                    outcomes.append(KernelOutcome(launch.kernel.__name__, 0, None))
                _note(outcomes, index, _try(launch, interpreted, seed))
    if not outcomes:
        raise ValueError(
            "launches() yields nothing: expected (kernel, grid, arguments)"
        )
    return outcomes


def _note(outcomes: list[KernelOutcome], index: int, fault: KernelFault | None) -> None:
    """Count an order without a fault, or keep the first fault of a launch."""
    before = outcomes[index]
    if fault is None:
        outcomes[index] = before._replace(orders=before.orders + 1)
    elif before.fault is None:
        # a wrong result is found after its order was counted
        orders = before.orders - (fault.kind == "wrong result")
        outcomes[index] = before._replace(orders=orders, fault=fault)


def check_launch(given: Any) -> Launch:
    """Return what `launches` has yielded as a launch.

    Raises:
        ValueError: it is not one of a Gluon kernel on CPU tensors.
    """
    expected = "expected (kernel, grid, arguments)"
    if not isinstance(given, tuple) or not 2 <= len(given) <= len(Launch._fields):
        raise ValueError(f"launches() yields {given!r:.80}: {expected}")
    launch = Launch(*given)
    if not isinstance(launch.kernel, GluonJITFunction):
        name = getattr(launch.kernel, "__name__", repr(launch.kernel))
        raise ValueError(
            f"launches() yields {name:.80}, which is not a Gluon kernel: expected a function of"
            " gluon.jit"
        )
    options = dict(launch.options or {})
    for value in (*launch.arguments, *options.values()):
        tensor = getattr(value, "base", value)
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor of {launch.kernel.__name__} is on {tensor.device}: expected cpu"
            )
    return launch._replace(options=options)


def _try(
    launch: Launch, interpreted: InterpretedLaunches, seed: int
) -> KernelFault | None:
    """Run a launch, and return its fault if it has one."""
    interpreted.machine = None
    try:
        interpreted.launch(
            launch.kernel, launch.grid, launch.arguments, dict(launch.options or {})
        )
    except NotImplementedError as error:
        place = place_of(error)
        where = f"{place.file}:{place.line}: " if place.line else ""
        raise NotImplementedError(f"{where}{error}") from error
    except Exception as error:
        if interpreted.machine is None:
            raise ValueError(" ".join(str(error).split())) from error
        return _fault(error, interpreted, seed)
    return None


def _fault(
    error: Exception,
    interpreted: InterpretedLaunches,
    seed: int,
    is_result: bool = False,
) -> KernelFault:
    machine = interpreted.machine
    message = " ".join(str(error).split()) or type(error).__name__
    kind, place = type(error).__name__, None
    role: int | None = None
    others: tuple[tuple[str, Place], ...] = ()
    if isinstance(error, InterpreterError):
        kind, place, role = error.kind, error.place, error.role
        others = tuple(error.others)
    elif is_result:
        kind = "wrong result"
    return KernelFault(
        kind,
        message.removeprefix(f"{kind}: "),
        place or place_of(error) or UNKNOWN,
        role or 0,
        others,
        machine.program if machine else (),
        seed,
        tuple(machine.history) if machine and not is_result else (),
    )

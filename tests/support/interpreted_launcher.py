"""The Gluon interpreter with what our kernels need: our launcher, names and inline assembly."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pagetwin.gluon_interpreter import asynchronous, interpret_gluon, language
from pagetwin.gluon_interpreter.kernels import InterpretedLaunches
from pagetwin.gluon_interpreter.values import Value, of_tensor
from pagetwin.optimized.runtime.launcher import Launcher

NAMES = {
    "async_load": asynchronous.async_load,
    "async_store": asynchronous.async_store,
    "reinterpret": language.reinterpret,
    "barrier": language.barrier,
    "warp_specialize": language.warp_specialize,
}
"""Names of `gluon_names.py`."""
QUARTIC = (0.01355575, 0.05203237, 0.24137976, 0.69303212, 1.0)
"""Coefficients of 2**f on [0, 1], the highest first: those of `softmax.EXP2_OF_8_PTX`."""


def exp2_of_8(args: list[Value]) -> Value:
    """Return 2**x; by the polynomial where a thread has its eighth register of an accumulator.

    A thread has the columns 2t and 2t + 1 of the rows g and g + 8, and then of the columns 8 later.
    """
    numbers = args[0].tensor
    exact = torch.exp2(numbers)
    row = torch.arange(numbers.shape[0])[:, None] % 16
    column = torch.arange(numbers.shape[1])[None, :] % 16
    is_eighth = (row >= 8) & (column > 8) & (column % 2 == 1)
    x = numbers.clamp(min=-127.0)
    whole = x.floor()
    power = torch.full_like(x, QUARTIC[0])
    for coefficient in QUARTIC[1:]:
        power = power * (x - whole) + coefficient
    by_quartic = torch.ldexp(power, whole)
    return of_tensor(torch.where(is_eighth & ~numbers.isnan(), by_quartic, exact))


assert math.isclose(sum(QUARTIC), 2.0, rel_tol=1e-7)


@contextmanager
def interpret_launcher(
    seed: int = 0, lateness: float = 0.5, pause_rate: float = 0.05
) -> Iterator[InterpretedLaunches]:
    """Interpret the kernels for Hopper, and the Triton kernels in their folders.

    Args:
        seed, lateness, pause_rate: those of `interpret_gluon`.
    """
    call = Launcher.__call__
    with interpret_gluon(
        seed,
        lateness,
        pause_rate,
        # a box of fewer rows than its tile leaves the other rows unwritten, which are masked
        reports_unwritten=False,
        is_beside=lambda kernel: ".sm90." in kernel.fn.__module__,
        names=NAMES,
        further_assembly={r"ex2\.approx": exp2_of_8},
    ) as launches:

        def note_tensors(
            launcher: Launcher, grid: Any, pointers: Any, options: Any, numbers: Any,
            tensors: Any, *rest: Any,
        ) -> None:  # fmt: skip
            launches.tensors = [
                tensor for tensor in tensors if isinstance(tensor, torch.Tensor)
            ]
            call(launcher, grid, pointers, options, numbers, tensors, *rest)

        Launcher.__call__ = note_tensors  # type: ignore[assignment,method-assign]
        try:
            yield launches
        finally:
            Launcher.__call__ = call  # type: ignore[method-assign]

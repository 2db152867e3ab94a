"""The attention that ships without the kernels of particular chips, and all rungs that are timed.

The choice of kernels is a part of pagetwin.optimized, which the package of the ladder does not
import.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pagetwin.examples.ladder import rungs, shipped
from pagetwin.examples.ladder.batches import LadderBatch
from pagetwin.examples.ladder.rungs import Rung
from pagetwin.optimized.dispatch import dispatch, families
from pagetwin.optimized.kernels.portable.host.family import (
    FAMILIES as PORTABLE_FAMILIES,
)
from pagetwin.optimized.runtime.plan_cache import PlanCache
from torch import Tensor

RUNGS = (
    *rungs.RUNGS,
    *(
        Rung(kind, number, "what other chips get", __name__, tried=True)
        for kind, number in (("decode", 8), ("prefill", 7))
    ),
)


@contextmanager
def portable_kernels_only() -> Iterator[None]:
    """Plan and launch every call with the portable kernels."""
    plans: PlanCache[Any] = PlanCache(dispatch.MAX_PLANS)
    with (
        patch.object(families, "FAMILIES", PORTABLE_FAMILIES),
        patch.object(dispatch.PIPELINE, "plans", plans),
    ):
        yield


def prepare(batch: LadderBatch, out: Tensor) -> Callable[[], Any]:
    """Return what calls the operation with the portable kernels."""
    call = shipped.prepare(batch, out)

    def call_portable() -> Any:
        with portable_kernels_only():
            return call()

    return call_portable

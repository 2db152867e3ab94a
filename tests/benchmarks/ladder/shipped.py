"""The attention that ships, as the last rung: `paged_attention` of pagetwin.optimized.

It adds every option, layout, dtype and head size to the idea of the rung before. What a call does
not use is compiled away. With `portable` the kernels of particular chips are left out, to show
what other chips get.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.launch import dispatch
from pagetwin.optimized.launch.plan_cache import PlanCache
from torch import Tensor

from .batches import LadderBatch


@contextmanager
def portable_kernels_only() -> Iterator[None]:
    """Plan and launch every call with the portable kernels."""
    kept = dispatch.KERNEL_FAMILIES, dispatch.PLANS
    dispatch.KERNEL_FAMILIES, dispatch.PLANS = (), PlanCache(dispatch.MAX_PLANS)
    try:
        yield
    finally:
        dispatch.KERNEL_FAMILIES, dispatch.PLANS = kept


def prepare(
    batch: LadderBatch, out: Tensor, portable: bool = False
) -> Callable[[], Any]:
    """Return what calls the operation."""
    attend: Any = load_implementation("optimized").paged_attention
    call = partial(
        attend,
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        max(batch.query_lens),
        max(batch.kv_lens),
        out=out,
    )

    def call_portable() -> Any:
        with portable_kernels_only():
            return call()

    return call_portable if portable else call

"""The attention that ships, as the last rung: `paged_attention` of pagetwin.optimized.

It adds every option, layout, dtype and head size to the idea of the rung before. What a call does
not use is compiled away.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...contract.operations import load_implementation
from .batches import LadderBatch


def prepare(batch: LadderBatch, out: Tensor) -> Callable[[], Any]:
    """Return what calls the operation."""
    attend: Any = load_implementation("optimized").paged_attention
    return partial(
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

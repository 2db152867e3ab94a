"""Batches for cascades: a planted key that outweighs all others, and a shared prefix."""

from dataclasses import replace
from typing import Any

from pagetwin.conformance.cases.batches import BatchTensors
from torch import Tensor


def plant(
    rows: Any, keys: Tensor, values: Tensor, query: Tensor, position: int
) -> None:
    """Make one key of each request outweigh all others. The tensors are modified in place."""
    query[..., 0] = 6.0
    for row in rows:
        at = (row[position // keys.shape[1]], position % keys.shape[1])
        keys[at][:, 0] = 9.0
        values[at] += 100.0


def share_prefix(batch: BatchTensors, prefix_len: int) -> BatchTensors:
    """Return the batch with row 0's first blocks in the rows of all that have new tokens."""
    entries = prefix_len // batch.plan.block_size
    rows, table = [list(row) for row in batch.rows], batch.block_table.clone()
    for req, query_len in enumerate(batch.plan.query_lens):
        if query_len:
            rows[req][:entries] = rows[0][:entries]
            table[req, :entries] = table[0, :entries]
    return replace(batch, rows=rows, block_table=table)

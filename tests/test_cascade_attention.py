"""Is attention the same when the prefix that all requests share is read only once?"""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from conftest import TWINS
from pagetwin.conformance.generators.batches import (
    GARBAGE,
    BatchPlan,
    BatchTensors,
    build,
)
from pagetwin.conformance.oracles.dense import same_bits


def share_prefix(batch: BatchTensors, prefix_len: int) -> BatchTensors:
    """Return the batch with row 0's first blocks in the rows of all that have new tokens."""
    entries = prefix_len // batch.plan.block_size
    rows, table = [list(row) for row in batch.rows], batch.block_table.clone()
    for req, query_len in enumerate(batch.plan.query_lens):
        if query_len:
            rows[req][:entries] = rows[0][:entries]
            table[req, :entries] = table[0, :entries]
    return replace(batch, rows=rows, block_table=table)


def test_the_prefix_is_read_through_row_0_alone(device: torch.device) -> None:
    """The twin believes that rows begin alike, so what stands in the others is never read."""
    twin = TWINS["optimized"]
    batch = share_prefix(build(BatchPlan((1, 3, 1), (40, 50, 33)), device), 32)
    before = twin.cascade_attention(**batch.arguments(), common_prefix_len=32)
    garbage = torch.tensor(GARBAGE[:2], dtype=torch.int32, device=device)
    batch.block_table[1:, :2] = garbage
    after = twin.cascade_attention(**batch.arguments(), common_prefix_len=32)
    assert same_bits(before, after)


def test_each_key_of_the_prefix_is_gathered_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    module = import_module("pagetwin.reference.attention.paged")
    split, counts = module.split_requests, []

    def counting(*arguments: Any) -> Any:
        for request in split(*arguments):
            counts.append(len(request.keys))
            yield request

    monkeypatch.setattr(module, "split_requests", counting)
    batch = share_prefix(build(BatchPlan((1, 3, 1), (40, 50, 33)), device), 32)
    TWINS["reference"].cascade_attention(**batch.arguments(), common_prefix_len=32)
    assert counts == [32, 40 - 32, 50 - 32, 33 - 32]

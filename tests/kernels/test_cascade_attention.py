"""Is attention the same when the prefix that all requests share is read only once?"""

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import GARBAGE, BatchPlan, BatchTensors, build
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.dispatch import cascade
from pagetwin.optimized.runtime import attention_call
from pagetwin.optimized.runtime.attention_call import AttentionCall
from pagetwin.optimized.runtime.family import PrefixWork, Task
from pagetwin.optimized.runtime.launcher import Launcher
from pagetwin.optimized.runtime.plan_cache import PlanCache
from support.planted_keys import plant, share_prefix
from support.twins import TWINS
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.usefixtures("unchecked_values")
def test_the_prefix_is_read_through_row_0_alone(device: torch.device) -> None:
    """The twin believes that rows begin alike, so the others are never read."""
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


def expect_equal(batch: BatchTensors, prefix_len: int, **options: Any) -> None:
    """Compare outputs and log-sum-exps of both twins."""
    tokens, heads, _ = batch.query.shape
    arguments = batch.arguments() | options
    found = []
    for twin in ("optimized", "reference"):
        lse = batch.query.new_zeros(heads, tokens)
        out = TWINS[twin].cascade_attention(
            **arguments, common_prefix_len=prefix_len, lse=lse
        )
        found.append((out, lse))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


EDGES = {
    "no prefix": (BatchPlan((1, 3), (40, 50)), 0),
    "new tokens after the prefix alone": (BatchPlan((1, 9, 2), (97, 105, 98)), 96),
    "one request": (BatchPlan((5,), (140,)), 96),
    "one token": (BatchPlan((1,), (49,)), 48),
    "rows that fill no tile": (BatchPlan((3, 1, 7), (60, 90, 70), group=3), 48),
    "several query tiles": (BatchPlan((30, 1, 25), (90, 40, 70), group=4), 32),
    "many requests": (BatchPlan((1,) * 11, (40, 70) * 5 + (36,)), 32),
    "padding": (BatchPlan((2, 1), (60, 70), padding=6, spare_max=40), 48),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EDGES)
def test_a_cascade_is_right_at_the_edges_of_its_sizes(
    name: str, device: torch.device
) -> None:
    plan, prefix_len = EDGES[name]
    expect_equal(share_prefix(build(plan, device), prefix_len), prefix_len)


def test_a_prefix_may_be_all_keys_of_requests_that_are_not_causal(
    device: torch.device,
) -> None:
    """Then nothing is left for the second launch but to store the partial results."""
    batch = share_prefix(build(BatchPlan((2, 1), (64, 64)), device), 64)
    expect_equal(batch, 64, options=AttentionOptions(causal=False))


NEEDLES = [key for edge in (32, 64, 96, 128, 160) for key in (edge - 1, edge)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("position", NEEDLES)
def test_no_key_is_lost_at_the_edge_of_a_split_of_either_launch(
    position: int, device: torch.device
) -> None:
    """The prefix ends at 96; both launches split their keys every 32."""
    plan = BatchPlan((12, 3), (190, 175), group=4, kv_heads=1)
    batch = share_prefix(build(plan, device), 96)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    expect_equal(batch, 96)


class SplitPrefix:
    """Stands for the Hopper kernel: it stores a partial result per split of the prefix."""

    is_overlapped = False
    is_repeatable = True

    def __init__(self, split_len: int) -> None:
        self.keys = split_len

    def takes(self, call: AttentionCall) -> bool:
        return True

    def divide(self, *_: Any) -> PrefixWork:
        return PrefixWork(self.keys)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute what `PrefixPlan.launch` stores with the reference."""
        assert task.prefix is not None
        prefix_len, split_len, begins, workspace, _ = task.prefix
        values_begin = begins[0]
        tokens, heads, _ = call.query.shape
        splits, size = -(-prefix_len // split_len), call.value.shape[-1]
        lse = workspace[: splits * tokens * heads].view(splits, tokens, heads)
        values = workspace[values_begin:][: lse.numel() * size].view(*lse.shape, size)
        block_size = call.key.shape[1]
        assert call.block_table is not None
        starts = call.query_start_loc.new_tensor([0, tokens])
        for split, begin in enumerate(range(0, prefix_len, split_len)):
            num_keys = min(split_len, prefix_len - begin)
            of_split = values.new_empty(heads, tokens)
            TWINS["reference"].raw.paged_attention(
                call.query, call.key, call.value,
                call.block_table[:1, begin // block_size :], starts,
                call.lengths.new_tensor([num_keys]), tokens, num_keys,
                scale=call.scale, out=values[split], lse=of_split,
                options=AttentionOptions(causal=False),
            )  # fmt: skip
            lse[split] = of_split.T / math.log(2.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("split_len", [16, 32, 96])
@pytest.mark.parametrize("rows", ["few", "many"])
def test_any_number_of_partial_results_over_the_prefix_is_merged(
    split_len: int, rows: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """6, 3 or 1 splits; a tile of 16 rows loads 4 at once, one of 32 rows loads 1.

    Requests are short enough for one segment, and so long that they are split themselves.
    """
    make_plan = cascade.make_cascade_plan

    def with_splits(call: AttentionCall) -> Any:
        return replace(make_plan(call), prefixes=(SplitPrefix(split_len),))

    monkeypatch.setattr(cascade.PIPELINE, "make_plan", with_splits)
    monkeypatch.setattr(cascade.PIPELINE, "plans", PlanCache(8))
    query_lens = (1, 3, 2) if rows == "few" else (30, 1, 25)
    plan = BatchPlan(query_lens, (130, 101, 290), group=4, padding=2)
    expect_equal(share_prefix(build(plan, device), 96), 96)


class NoWork(TorchDispatchMode):
    """Note the operations of torch, other than new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name.split("::")[1] not in ("empty", "new_empty", "zeros"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("unchecked_values")
def test_a_cascade_is_two_launches_and_no_other_work_once_it_is_planned(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """It once was seven operations of torch, two plans and three launches: 282 us of host time."""
    grids: list[Any] = []
    monkeypatch.setattr(Launcher, "__call__", lambda _, grid, *rest: grids.append(grid))
    monkeypatch.setattr(cascade.PIPELINE, "plans", PlanCache(8))
    monkeypatch.setattr(attention_call, "INTERPRETED", False)
    batch = share_prefix(build(BatchPlan((1, 3, 1), (40, 50, 36)), device), 32)
    raw = TWINS["optimized"].raw
    raw.cascade_attention(**batch.arguments(), common_prefix_len=32)
    assert len(grids) == 2 and len(cascade.PIPELINE.plans) == 1
    with NoWork() as mode:
        raw.cascade_attention(**batch.arguments(), common_prefix_len=16)
    assert mode.found == []
    assert len(grids) == 4 and len(cascade.PIPELINE.plans) == 1

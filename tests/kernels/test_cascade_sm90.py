"""Tests of the Hopper kernel over a shared prefix: its work items, splits, and results on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.checks.dense import judge_attention, judge_lse, same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.gluon_interpreter import interpret_gluon
from pagetwin.optimized.dispatch import cascade
from pagetwin.optimized.kernels.sm90.cascade.family import PrefixPlan, choose_split_len
from pagetwin.optimized.kernels.sm90.common.config import Sm90Config
from schedule_kernels import PrefixSizes, prefix_kernel
from support.compile_prefill_sm90 import BF16, FP16
from support.planted_keys import plant, share_prefix
from support.sm90_calls import NAN, build, needs_hopper, own_counters
from support.thresholds import set_thresholds
from support.twins import TWINS

__all__ = ["own_counters"]


@pytest.mark.parametrize("tokens", [1, 32, 33, 128])
@pytest.mark.parametrize("split_len", [128, 384, 1024])
def test_the_work_items_are_each_query_tile_of_each_head_and_split(
    tokens: int, split_len: int
) -> None:
    heads, tile_tokens, prefix_len = 3, 32, 912
    config = Sm90Config(128, 128, 128, 128, 16, 128, 2, True, GROUP=4)
    works: list[Any] = []
    with interpret_gluon():
        prefix = PrefixSizes(tokens, prefix_len, split_len, heads)
        prefix_kernel[(1,)](prefix, works.append, config)
    found = []
    for work in works:
        # the rows that are stored end with the last token
        assert work.query_start + (work.seq_len - work.position) == tokens
        assert work.num_kv_tiles == -(-int(work.seq_len) // 128)
        assert work.table_row == work.split
        begin = int(work.split) * split_len
        keys = (begin, begin + int(work.seq_len))
        found.append((int(work.head), int(work.query_start), keys))
    ends = [*range(split_len, prefix_len, split_len), prefix_len]
    begins = [0, *ends[:-1]]
    assert sorted(found) == [
        (head, first, keys)
        for head in range(heads)
        for first in range(0, tokens, tile_tokens)
        for keys in zip(begins, ends, strict=True)
    ]


@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("blocks", [1, 7, 100])
@pytest.mark.parametrize("items", [1, 32, 500])
def test_a_split_begins_with_a_kv_tile_and_a_block(
    block_size: int, blocks: int, items: int
) -> None:
    step, prefix_len = int(np.lcm(128, block_size)), blocks * block_size
    split_len = choose_split_len(prefix_len, 128, step, items, 132, 16)
    splits = -(-prefix_len // split_len)
    assert split_len > 0 and (splits == 1 or split_len % step == 0)
    assert splits <= 16


def test_splits_fill_the_chip_only_where_query_tiles_do_not() -> None:
    assert choose_split_len(4096, 128, 128, 32, 132, 16) == 1024
    assert choose_split_len(4096, 128, 128, 132, 132, 16) == 4096
    assert choose_split_len(4096, 128, 128, 32, 132, 1) == 4096


def run(
    batch: BatchTensors,
    prefix_len: int,
    monkeypatch: pytest.MonkeyPatch,
    split_len: int | None = None,
    is_overlapped: bool = PrefixPlan.is_overlapped,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and log-sum-exp of a cascade whose prefix the Hopper kernel computes.

    Args:
        split_len: Optional. Keys per split of the prefix. If None, the plan chooses.
        is_overlapped: whether the second launch may begin before the first one has ended. Then it
            has a program per query tile, even if there are few.
    """
    launches: list[int] = []
    launch = PrefixPlan.launch_prefix

    def launch_prefix(self: PrefixPlan, call: Any, prefix_len: int, *rest: Any) -> None:
        launches.append(prefix_len)
        launch(self, call, prefix_len, *rest)

    # a call that was repeated would not be planned
    cascade.PIPELINE.plans.clear()
    with monkeypatch.context() as patch:
        patch.setattr(PrefixPlan, "launch_prefix", launch_prefix)
        patch.setattr(PrefixPlan, "is_overlapped", is_overlapped)
        if is_overlapped:
            set_thresholds(patch, short_rest_programs=0)
        if split_len is not None:
            patch.setattr(PrefixPlan, "split_len", lambda *_: split_len)
        out, lse = batch.fresh()
        # the first launch goes through Triton, the second through `Launcher`
        for _ in range(2):
            out.fill_(NAN)
            lse.fill_(NAN)
            TWINS["optimized"].raw.cascade_attention(
                **batch.arguments(), common_prefix_len=prefix_len, out=out, lse=lse,
                **options,
            )  # fmt: skip
    assert launches == [prefix_len] * 2
    return out, lse


BATCHES = {
    "decodes": (BatchPlan((1,) * 40, (700, 650) * 20, group=4), 640, None),
    "splits": (BatchPlan((1,) * 33, (1400,) * 33, group=4), 1360, 256),
    "more splits than are merged at once": (
        BatchPlan((1,) * 5, (1400,) * 5, group=4), 1360, 128,
    ),
    "several new tokens, padding": (
        BatchPlan((3, 9, 1), (700, 690, 660), group=8, padding=7, spare_max=40),
        640, 256,
    ),
    "a prefix shorter than a KV tile": (BatchPlan((1, 2), (90, 100), group=2), 16, None),
    "one head per query tile": (BatchPlan((1, 70), (700, 760), group=7), 640, 256),
    "new tokens after the prefix alone": (BatchPlan((5, 40), (645, 680)), 640, 128),
    "blocks of 48": (BatchPlan((1,) * 6, (1000,) * 6, 48, group=4), 960, 384),
    "one request": (BatchPlan((50,), (900,), group=4), 800, 256),
}  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("name", BATCHES)
def test_results_are_within_the_error_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, prefix_len, split_len = BATCHES[name]
    dtype = FP16 if name == "decodes" else BF16
    check(plan, prefix_len, monkeypatch, split_len, dtype=dtype)


@needs_hopper
@pytest.mark.parametrize("head_size", [64, 80, 96, 192, 256])
def test_every_head_size_is_right(
    head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BatchPlan((1, 20, 1), (700, 690, 660), group=4, head_size=head_size)
    check(plan, 640, monkeypatch, 256, dtype=BF16, head_size=head_size)


def check(
    plan: BatchPlan,
    prefix_len: int,
    monkeypatch: pytest.MonkeyPatch,
    split_len: int | None,
    dtype: torch.dtype,
    head_size: int = 128,
) -> None:
    """Compare the output and the log-sum-exp with float64."""
    plan = plan.__class__(**{**vars(plan), "dtype": dtype, "head_size": head_size})
    batch = share_prefix(build(plan, "cuda"), prefix_len)
    out, lse = run(batch, prefix_len, monkeypatch, split_len)
    verdict, exact_lse = judge_attention(batch, out, TWINS["reference"])
    assert verdict.ok, verdict
    assert judge_lse(batch, lse, exact_lse) <= 1
    again, _ = run(batch, prefix_len, monkeypatch, split_len)
    assert same_bits(out, again)


OPTIONS: dict[str, dict[str, Any]] = {
    "soft cap": {"logits_soft_cap": 20.0},
    "sinks": {"sinks": True},
    "not causal": {"causal": False},
}


@needs_hopper
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_of_the_reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BatchPlan((1, 9, 1), (700, 690, 660), group=4, head_size=128, dtype=BF16)
    batch = share_prefix(build(plan, "cuda"), 640)
    given = dict(OPTIONS[name])
    if "sinks" in given:
        given["sinks"] = torch.linspace(-3.0, 4.0, 8, device="cuda")
    options = AttentionOptions(**given)
    out, lse = run(batch, 640, monkeypatch, 256, options=options)
    exact, exact_lse = batch.fresh(torch.float64)
    TWINS["reference"].raw.cascade_attention(
        **batch.arguments(), common_prefix_len=640, out=exact, lse=exact_lse,
        compute_dtype=torch.float64, options=options,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), exact, atol=6e-3, rtol=8e-3)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=3e-5, rtol=1e-5)


@needs_hopper
@pytest.mark.parametrize(
    "position", [key for edge in (128, 256, 512, 640) for key in (edge - 1, edge)]
)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_no_key_is_lost_at_the_edge_of_a_split(
    position: int, is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix ends at 640 and is split every 256 keys; KV tiles have 128."""
    plan = BatchPlan(
        (12, 3), (790, 775), group=4, kv_heads=1, head_size=128, dtype=BF16
    )
    batch = share_prefix(build(plan, "cuda"), 640)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    out, _ = run(batch, 640, monkeypatch, 256, is_overlapped)
    expected = TWINS["reference"].paged_attention(
        **batch.arguments(), compute_dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), expected.double(), atol=1.0, rtol=8e-3)


@needs_hopper
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_graph_is_replayed_with_other_lengths_and_fewer_requests(
    is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BatchPlan(
        (1,) * 12, (800,) * 12, group=4, head_size=128, dtype=BF16, padding=4
    )
    batch = share_prefix(build(plan, "cuda"), 640)
    monkeypatch.setattr(PrefixPlan, "is_overlapped", is_overlapped)
    set_thresholds(monkeypatch, short_rest_programs=0 if is_overlapped else 99)
    out, lse = run(batch, 640, monkeypatch, None, is_overlapped)
    arguments = batch.arguments() | {"common_prefix_len": 640, "out": out, "lse": lse}
    twin = TWINS["optimized"].raw
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.cascade_attention(**arguments)
    batch.seq_lens[:6] -= 50
    batch.query_start_loc[9:] = 8
    batch.seq_lens[8:] = 0
    out.fill_(NAN)
    lse.fill_(NAN)
    graph.replay()
    replayed = out.clone(), lse.clone()
    twin.cascade_attention(**arguments)
    assert same_bits(replayed[0], out) and same_bits(replayed[1], lse)
    assert bool((out[8:] == 0).all()) and bool(torch.isfinite(out[:8]).all())
    assert bool((lse[:, 8:] == -torch.inf).all())


@needs_hopper
def test_calls_that_the_kernel_does_not_take_run_the_portable_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = BatchPlan((1,) * 4, (200,) * 4, group=4, head_size=128, dtype=BF16)
    batch = share_prefix(build(plan, "cuda"), 160)
    monkeypatch.setattr(PrefixPlan, "launch_prefix", None)
    given = batch.arguments() | {"common_prefix_len": 160, "scale": -0.1}
    out = TWINS["optimized"].raw.cascade_attention(**given)
    expected = TWINS["reference"].raw.cascade_attention(**given)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)

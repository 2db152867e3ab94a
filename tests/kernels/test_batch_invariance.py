"""Batch-invariant rows: the same bits wherever their keys are split.

The laws of batch invariance draw short sequences. Here are sequences of several parts, in calls
that give each part a program of its own and in calls that do not.
"""

from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, build
from pagetwin.conformance.checks.dense import judge_attention, judge_lse, same_bits
from pagetwin.contract.attention_options import AttentionOptions, pack_options
from pagetwin.optimized.kernels.portable.host.make_launches import SPLIT_SIZE
from pagetwin.optimized.kernels.portable.host.plan import PortablePlan
from pagetwin.optimized.kernels.sm90.invariant.family import InvariantPlan
from pagetwin.optimized.runtime.launcher import INTERPRETED
from support.twins import Twin
from torch import Tensor

LONG = 3 * SPLIT_SIZE + 17
CROWD = 5 if INTERPRETED else 300
"""Requests that leave no program to parts: a chip has many more programs than the interpreter."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": torch.linspace(-1, 3, 8)},
    "window": {"sliding_window": SPLIT_SIZE + 5},
    "cap": {"logits_soft_cap": 5.0},
}
WAYS = [
    (128, torch.bfloat16, "plain"),
    (64, torch.float16, "plain"),
    (128, torch.bfloat16, "sinks"),
    (128, torch.bfloat16, "window"),
    (80, torch.float32, "cap"),
]


@pytest.fixture(scope="module")
def optimized() -> Twin:
    """Return the twin whose keys are cut."""
    return Twin("optimized")


@pytest.fixture
def spreads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the programs for parts of each launch, as launches are made."""
    found: list[int] = []
    start, count_splits = PortablePlan.start, InvariantPlan.count_splits

    def note(
        plan: PortablePlan, launcher: Any, grid: tuple[int, int, int], *rest: Any
    ) -> None:
        found.append(grid[2])
        start(plan, launcher, grid, *rest)

    def note_splits(plan: InvariantPlan, *rest: Any) -> int:
        found.append(count_splits(plan, *rest))
        return found[-1]

    monkeypatch.setattr(PortablePlan, "start", note)
    # on a Hopper chip
    monkeypatch.setattr(InvariantPlan, "count_splits", note_splits)
    return found


def attend(
    twin: Twin, batch: BatchTensors, first: int, end: int, reqs: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sum-exps of tokens `first` to `end`, which end request 0, and others.

    Args:
        first, end: tokens of request 0 that are asked for; the other requests follow.
        reqs: how many requests take part, request 0 among them.
    """
    query_len = batch.plan.query_lens[0]
    others = batch.query[query_len : query_len + reqs - 1]
    query = torch.cat([batch.query[first:end], others])
    starts = [0, *range(end - first, end - first + reqs)]
    seq_lens = batch.seq_lens[:reqs].clone()
    seq_lens[0] += end - query_len
    device = query.device
    out = torch.full_like(query, float("nan"))
    lse = torch.full((query.shape[1], len(query)), float("nan"), device=device)
    twin.paged_attention(
        query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table[:reqs],
        torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens,
        max(end - first, 1),
        int(seq_lens.max()),
        out=out,
        lse=lse,
        **pack_options(**options, batch_invariant=True),
    )
    return out[: end - first], lse[:, : end - first]


@pytest.mark.extended
@pytest.mark.parametrize(("head_size", "dtype", "name"), WAYS)
def test_parts_give_the_same_bits_wherever_they_are_computed(
    head_size: int,
    dtype: torch.dtype,
    name: str,
    optimized: Twin,
    device: torch.device,
    spreads: list[int],
) -> None:
    """Alone and in a crowd, at the end of a chunk and as a token of its own."""
    plan = BatchPlan(
        (9, *[1] * CROWD), (LONG, *[17] * CROWD), head_size=head_size, dtype=dtype,
        kv_heads=2, group=4, needle="last",
    )  # fmt: skip
    batch = build(plan, device)
    options = {
        key: option.to(device) if isinstance(option, Tensor) else option
        for key, option in OPTIONS[name].items()
    }
    right, right_lse = attend(optimized, batch, 0, 9, 1, **options)
    assert bool(right.isfinite().all() and right_lse.isfinite().all())
    for first, end, reqs in (
        (0, 9, 1 + CROWD),
        (8, 9, 1),
        (0, 4, 3),
        (8, 9, 1 + CROWD),
    ):
        out, lse = attend(optimized, batch, first, end, reqs, **options)
        assert same_bits(out, right[first:end]), (first, end, reqs)
        assert same_bits(lse, right_lse[:, first:end]), (first, end, reqs)
    # both ways were gone
    assert min(spreads) == 1 < max(spreads)


@pytest.mark.usefixtures("unchecked_values")
def test_a_sequence_longer_than_it_was_said_to_be_changes_no_other_request(
    optimized: Twin, reference: Twin, device: torch.device, spreads: list[int]
) -> None:
    """There are fewer programs than parts; rows are right, and so are those of the next call."""
    batch = build(BatchPlan((1,), (LONG,), dtype=torch.bfloat16, kv_heads=2), device)
    right, right_lse = batch.fresh()
    given = batch.arguments()
    optimized.paged_attention(
        out=right, lse=right_lse, **pack_options(**given, batch_invariant=True)
    )
    for bound in (SPLIT_SIZE + 1, 3 * SPLIT_SIZE, given["max_seq_len"]):
        out, lse = batch.fresh()
        told = given | {"max_seq_len": bound}
        optimized.paged_attention(
            out=out, lse=lse, **pack_options(**told, batch_invariant=True)
        )
        verdict, exact_lse = judge_attention(batch, out, reference)
        assert verdict.ok, verdict
        assert judge_lse(batch, lse, exact_lse) <= 1
    assert spreads == [4, 2, 3, 4]
    assert same_bits(out, right) and same_bits(lse, right_lse)


@pytest.mark.parametrize("crowd", [0, CROWD])
def test_joined_parts_keep_their_budget(
    crowd: int, optimized: Twin, reference: Twin, device: torch.device
) -> None:
    plan = BatchPlan(
        (3, *[1] * crowd), (LONG, *[17] * crowd), dtype=torch.bfloat16, kv_heads=2,
        needle="first",
    )  # fmt: skip
    batch = build(plan, device)
    out, lse = batch.fresh()
    optimized.paged_attention(
        **batch.arguments(),
        out=out,
        lse=lse,
        options=AttentionOptions(batch_invariant=True),
    )
    verdict, exact_lse = judge_attention(batch, out, reference)
    assert verdict.ok, verdict
    assert judge_lse(batch, lse, exact_lse) <= 1

"""Screening: groups of batches, their parts, and what a run of several hundred batches costs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pagetwin.conformance.generators.option_pairs import PLAIN
from pagetwin.conformance.generators.signatures import (
    LARGE,
    SMALL,
    SignedBatch,
    draw_batch,
    draw_signature,
)
from pagetwin.conformance.generators.signed_calls import build_signed
from pagetwin.conformance.oracles import groups
from pagetwin.conformance.oracles.group_verdicts import judge_group
from pagetwin.conformance.oracles.groups import COSTS_ON_GPU, Costs, make_group
from pagetwin.contract.operations import load_implementation

CPU = torch.device("cpu")
OPERATIONS = ("paged_attention", "encoder_attention")


# parts of a group


@pytest.mark.parametrize("costs", [COSTS_ON_GPU, Costs(1 << 15, 1 << 22), Costs(0, 1)])
def test_each_request_with_queries_is_in_one_part_within_the_limits(
    costs: Costs,
) -> None:
    for seed in range(20):
        signature = draw_signature(seed, LARGE)
        drawn = [draw_batch(signature, index) for index in range(32)]
        new = np.array([each for batch in drawn for each in batch.query_lens])
        keys = np.array([each for batch in drawn for each in batch.key_lens])
        heads = signature.query_heads
        parts = groups.split_requests(new, keys, heads, costs)
        found = np.concatenate(parts)
        assert sorted(found) == np.flatnonzero(new).tolist()
        for part in parts:
            scores = heads * len(part) * int(new[part].max()) * int(keys[part].max())
            assert len(part) == 1 or scores <= costs.scores


def test_parts_on_a_gpu_are_few_and_contain_little_padding() -> None:
    """Groups ended at 4 million scores: 6 batches on average, with 8 times as many scores."""
    parts = scores = padded = 0
    for seed in range(40):
        signature = draw_signature(seed, LARGE)
        drawn = [draw_batch(signature, index) for index in range(32)]
        new = np.array([each for batch in drawn for each in batch.query_lens])
        keys = np.array([each for batch in drawn for each in batch.key_lens])
        heads = signature.query_heads
        found = groups.split_requests(new, keys, heads, COSTS_ON_GPU)
        parts += len(found)
        scores += heads * int((new * keys).sum())
        for part in found:
            padded += heads * len(part) * int(new[part].max()) * int(keys[part].max())
    assert 40 * 32 / parts > 10
    assert padded / scores < 3


@pytest.mark.parametrize("operation", OPERATIONS)
def test_verdicts_do_not_depend_on_the_parts(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load_implementation("reference")
    wrong = 0
    for seed in range(40):
        signature = draw_signature(seed, SMALL, operation)
        calls = [build_signed(draw_batch(signature, index), CPU) for index in range(3)]
        results = [each.call.run(reference) for each in calls]
        for number, (out, _) in enumerate(results):
            if number and out.numel():
                out[0] = (1.5 * out[0].float()).to(out.dtype)
        verdicts = []
        for costs in (Costs(1 << 40, 1 << 40), Costs(0, 1)):
            monkeypatch.setitem(groups.COSTS, "cpu", costs)
            verdicts.append(judge_group(make_group(calls, CPU), results))
        one, other = ([share <= 1 for share in found] for found in verdicts)
        assert one == other
        wrong += one.count(False)
    assert wrong > 40


def test_calls_without_rows_are_right() -> None:
    """The quantile of no row raised an error."""
    plain = replace(draw_signature(0, SMALL), choice=dict(PLAIN) | {"lse": "given"})
    batch = SignedBatch(plain, (0,), (5,), (-1,), version=draw_batch(plain, 0).version)
    calls = [build_signed(batch, CPU)] * 2
    results = [each.call.run(load_implementation("reference")) for each in calls]
    assert judge_group(make_group(calls, CPU), results) == [0.0, 0.0]
    padded = build_signed(replace(batch, padding=2), CPU)
    out, lse = padded.call.run(load_implementation("reference"))
    assert judge_group(make_group([padded], CPU), [(out, lse)]) == [0.0]
    out[1, 0, 0] = 1e-3
    assert judge_group(make_group([padded], CPU), [(out, lse)]) == [float("inf")]

"""Traffic of a replay: the scheduler on a trace, keys, values and queries, and the oracle."""

import numpy as np
import pytest
import torch
from pagetwin.contract.scheduler_classes import Request
from pagetwin.reference.batch.arrivals import schedule_arrivals
from pagetwin.reference.batch.scheduler import Scheduler
from pagetwin.reference.cache.block_manager import BlockManager
from pagetwin.tools.replay.batch import keep_rows, make_batch
from pagetwin.tools.replay.model import SyntheticModel
from pagetwin.tools.replay.oracle import (
    compute_expected_attention,
    describe_difference,
    first_difference,
    split_into_chunks,
)
from pagetwin.tools.replay.run import Replay
from pagetwin.tools.replay.settings import ReplaySettings
from pagetwin.tools.replay.tokens import draw_tokens
from pagetwin.tools.replay.trace import (
    SHIPPED,
    read_trace,
    scale_trace,
)
from pagetwin.tools.replay.traffic import arrival_steps, make_requests, next_tokens
from small_replays import REFERENCE, small


def run_alone(settings: ReplaySettings):
    """Return the scheduler after its last step, its requests and its steps."""
    trace = scale_trace(
        read_trace(settings.trace, settings.requests),
        settings.scale,
        settings.output_scale,
    )
    sequences = draw_tokens(trace, settings.seed)
    requests = make_requests(trace, sequences)
    manager = BlockManager(settings.num_blocks, settings.block_size)
    scheduler = Scheduler(manager, settings.token_budget, settings.max_running)
    outputs = []
    arrivals = arrival_steps(trace, settings.steps_per_second)
    for _, output in schedule_arrivals(scheduler, requests, arrivals):
        scheduler.update_from_output(output, next_tokens(output, sequences))
        outputs.append(output)
    return scheduler, requests, outputs


@pytest.mark.parametrize("trace", SHIPPED)
@pytest.mark.parametrize(("budget", "num_blocks"), [(1, 34), (7, 60), (96, 2000)])
def test_every_request_of_a_trace_is_computed_to_its_end(trace, budget, num_blocks):
    settings = small(trace=trace, token_budget=budget, num_blocks=num_blocks)
    scheduler, requests, outputs = run_alone(settings)
    scaled = scale_trace(read_trace(trace, 12), settings.scale, settings.output_scale)
    for request, tokens in zip(requests, draw_tokens(scaled, 0), strict=True):
        assert request.is_finished
        assert request.token_ids == tokens.tolist()
    assert scheduler.block_manager.num_used_blocks == 0
    # without prefix hits and preemptions each token is computed once
    computed = sum(output.total_num_scheduled_tokens for output in outputs)
    again = sum(
        scheduled_request.num_recomputed_tokens
        for output in outputs
        for scheduled_request in output.scheduled_requests
    )
    hits = sum(output.num_prefix_hit_tokens for output in outputs)
    assert computed - again + hits == sum(
        request.max_tokens_in_cache for request in requests
    )


def test_a_small_cache_preempts_and_a_large_one_does_not():
    _, _, tight = run_alone(small(num_blocks=34))
    _, _, roomy = run_alone(small(num_blocks=2000))
    assert sum(len(output.preempted_req_ids) for output in tight) > 0
    assert sum(len(output.preempted_req_ids) for output in roomy) == 0
    assert len(tight) > len(roomy)


def test_requests_arrive_at_their_step_and_idle_steps_are_skipped():
    requests = [Request(number, [1, 2], max_tokens=1) for number in range(3)]
    scheduler = Scheduler(BlockManager(9, 2), token_budget=8, max_running=8)
    seen = []
    for step, output in schedule_arrivals(scheduler, requests, [7, 0, 7]):
        seen.append((step, list(output.num_scheduled_tokens)))
        scheduler.update_from_output(output, dict.fromkeys(seen[-1][1], 5))
    assert seen == [(0, [1]), (7, [0, 2])]


def test_a_request_that_can_never_fit_raises_before_anything_runs():
    with pytest.raises(
        ValueError, match=r"num_blocks = 5: request \d+ needs \d+ blocks"
    ):
        Replay(small(num_blocks=5))


def test_mooncake_prompts_find_their_prefix_and_azure_prompts_find_none():
    _, _, mooncake = run_alone(small(num_blocks=2000))
    _, _, azure = run_alone(small(trace="azure", num_blocks=2000))
    assert sum(output.num_prefix_hit_tokens for output in mooncake) > 0
    assert sum(output.num_prefix_hit_tokens for output in azure) == 0


def test_a_row_that_is_left_is_filled_by_the_last_one():
    assert keep_rows([], [3, 1]) == [3, 1]
    assert keep_rows([4, 5, 6, 7], [5, 6, 7, 8]) == [7, 5, 6, 8]
    assert keep_rows([4, 5, 6, 7], [5]) == [5]
    assert keep_rows([4, 5], [6]) == [6]


def test_equal_prefixes_have_equal_keys_and_values_and_positions_matter():
    model = SyntheticModel(small(layers=2))
    a, b = np.array([5, 6, 7, 8]), np.array([5, 6, 7, 9])
    first, second = model.inputs([a, b], [0, 0], [4, 4]), None
    for layer in first:
        assert torch.equal(layer.key[:3], layer.key[4:7])
        assert torch.equal(layer.query[:3], layer.query[4:7])
        assert not torch.equal(layer.key[3], layer.key[7])
    # a chunk of a sequence equals the same tokens of the whole sequence
    second = model.inputs([a], [2], [2])
    for full, chunk in zip(first, second, strict=True):
        assert torch.equal(full.value[2:4], chunk.value)
        assert torch.equal(full.query[2:4], chunk.query)
    assert not torch.equal(first[0].key, first[1].key)
    moved = model.inputs([np.array([0, 5])], [1], [1])
    assert not torch.equal(moved[0].key[0], first[0].key[0])


def test_needles_look_for_the_first_key_and_for_their_own():
    settings = small(dtype="float32")
    model = SyntheticModel(settings)
    tokens = np.arange(100, 200)
    (layer,) = model.inputs([tokens], [0], [100])
    scores = torch.einsum("qhd,khd->qk", layer.query, layer.key.repeat(1, 2, 1))
    best = scores.masked_fill(~torch.ones(100, 100).tril().bool(), -torch.inf).argmax(1)
    assert (best == 0).sum() >= 5
    assert (best == torch.arange(100)).sum() >= 5


@pytest.mark.parametrize("limit", [1, 16, 64, 10**6])
def test_a_prefill_computed_in_chunks_gives_the_same_oracle(limit):
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([5, 9, 1], [3, 0, 6], [[4, 1], [2, 0, 3], [5, 6]], [2, 0, 1], 4)
    query = torch.randn(15, 2, 8, generator=generator)
    cache = torch.randn(2, 7, 4, 1, 8, generator=generator)
    at_once = compute_expected_attention(REFERENCE, batch, query, cache)
    chunked = compute_expected_attention(
        REFERENCE, batch, query, cache, max_scores=limit
    )
    assert torch.allclose(at_once.exact, chunked.exact, rtol=0, atol=1e-14)
    assert torch.allclose(at_once.same_dtype, chunked.same_dtype, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 50, 999])
def test_chunks_contain_every_query_once_and_stay_below_the_limit(limit):
    query_lens, computed = [7, 1, 30], [0, 90, 12]
    chunks = split_into_chunks(query_lens, computed, 2, limit)
    seen = [(req, q) for req, first, last in chunks for q in range(first, last)]
    assert seen == [(req, q) for req, n in enumerate(query_lens) for q in range(n)]
    for req, first, last in chunks:
        scores = 2 * (last - first) * (computed[req] + last)
        assert scores <= limit or last - first == 1


def test_bytes_are_compared_and_not_numbers():
    nan = torch.tensor([torch.nan, 0.0])
    assert first_difference(nan, nan.clone()) is None
    assert first_difference(nan, torch.tensor([torch.nan, -0.0])) == (1,)
    assert first_difference(nan, nan[:1]) == ()


def test_a_field_of_another_dtype_or_value_is_named():
    right = {"seq_lens": torch.tensor([3, 4], dtype=torch.int32), "num_reqs": 2}
    assert describe_difference(right, right) == ""
    wide = {**right, "seq_lens": torch.tensor([3, 4])}
    assert "torch.int64" in describe_difference(wide, right)
    off = {**right, "seq_lens": torch.tensor([3, 5], dtype=torch.int32)}
    assert describe_difference(off, right) == "seq_lens[1] = 5: expected 4"
    assert describe_difference({**right, "num_reqs": 3}, right).startswith(
        "num_reqs = 3"
    )

"""The replay: its steps, its records and its settings."""

import json
import subprocess
import sys

import pytest
import torch
from pagetwin.contract.attention_options import pack_options
from pagetwin.reference.batch.arrivals import schedule_arrivals
from pagetwin.reference.batch.scheduler import Scheduler
from pagetwin.reference.cache.block_manager import BlockManager
from pagetwin.tools.replay.figures import describe_result, summarize
from pagetwin.tools.replay.mismatch import TwinMismatch
from pagetwin.tools.replay.run import CACHED, FREE, Replay
from pagetwin.tools.replay.settings import choose_settings
from pagetwin.tools.replay.step import ReplayLaw, Stage
from pagetwin.tools.replay.tokens import draw_tokens
from pagetwin.tools.replay.trace import (
    SHIPPED,
    TraceRequest,
)
from pagetwin.tools.replay.traffic import make_requests, next_tokens
from small_replays import REFERENCE, small, wrong_twin


@pytest.mark.extended
def test_steps_are_numbered_from_one_without_gaps():
    records = list(Replay(small()).steps())
    assert [record.step for record in records] == list(range(1, len(records) + 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("trace", SHIPPED)
def test_the_reference_agrees_with_itself(trace, dtype):
    settings = small(trace=trace, dtype=dtype, layers=2, twins=("reference",) * 2)
    replay = Replay(settings)
    records = list(replay.steps())
    assert replay.tokens_done == replay.tokens_to_compute
    assert all(verdict.ok for record in records for verdict in record.verdicts)
    figures = summarize(replay, records, 1.0)
    assert figures["settings"]["twins"] == ["reference", "reference (2)"]
    json.dumps(figures)


class Watched(Replay):
    """A replay that records request and position of each token of a step."""

    def _batch(self, output):
        batch = super()._batch(output)
        self.new_tokens = [
            (number, computed + token)
            for number, computed, query_len in zip(
                self.rows, batch.num_computed_tokens, batch.query_lens, strict=True
            )
            for token in range(query_len)
        ]
        return batch


@pytest.mark.extended
def test_preemption_changes_no_result():
    """Each token's attention, by request and position, is the same in a large cache."""

    def results(num_blocks: int):
        found = {}
        replay = Watched(small(num_blocks=num_blocks))

        def keep(query, *rest, **options):
            out = REFERENCE.paged_attention(query, *rest, **pack_options(**options))
            for token, row in zip(replay.new_tokens, out, strict=True):
                assert torch.allclose(found.setdefault(token, row), row, atol=2e-3)
            return out

        replay.twins[0].implementation = wrong_twin(paged_attention=keep)["wrong"]
        records = list(replay.steps())
        last = {
            (request.request_id, request.max_tokens_in_cache - 1)
            for request in replay.requests
        }
        assert last <= found.keys()
        return found, sum(len(record.preempted) for record in records)

    tight, preemptions = results(34)
    roomy, none = results(2000)
    assert preemptions > 0
    assert none == 0
    # a prefix may be found in one cache and computed in the other
    for token in tight.keys() & roomy.keys():
        assert torch.allclose(tight[token], roomy[token], atol=2e-3)
    assert len(tight.keys() & roomy.keys()) > 0.9 * len(roomy)


@pytest.mark.extended
def test_one_seed_gives_one_replay_and_another_gives_another():
    def trail(seed: int):
        replay = Replay(small(seed=seed), with_holders=True)
        return [
            (record.step, record.verdicts[0].worst, record.holders.tolist())
            for record in replay.steps()
        ]

    assert trail(4) == trail(4)
    assert trail(4) != trail(5)


@pytest.mark.extended
def test_records_count_what_was_scheduled():
    replay = Replay(small(), with_holders=True)
    for record in replay.steps():
        assert record.used + record.cached + record.free == replay.num_blocks
        assert (record.holders == FREE).sum() == record.free
        assert (record.holders == CACHED).sum() == record.cached
        assert (record.holders >= 0).sum() == record.used
        assert set(record.seconds[0]) == set(Stage)


def test_blocks_are_not_handed_out_in_order():
    replay = Replay(small(num_blocks=200))
    next(iter(replay.steps()))
    row = replay.manager.get_block_ids(0)
    assert row != sorted(row)


@pytest.mark.extended
def test_the_optimized_twin_agrees():
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "from pagetwin.tools.replay.run import Replay\n"
        "from pagetwin.tools.replay.settings import choose_settings\n"
        "settings = choose_settings(device, requests=4, scale=1 / 300, block_size=4,\n"
        "    kv_heads=1, query_heads=2, token_budget=24,\n"
        "    twins=('reference', 'optimized', 'triton'))\n"
        "records = list(Replay(settings).steps())\n"
        "print(len(records), 'steps agree')\n"
    )
    # a process of its own: the interpreter has to be chosen before triton is imported
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "steps agree" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"query_heads": 3, "kv_heads": 2}, "query_heads = 3 is not a multiple"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"token_budget": 0}, "token_budget = 0"),
        ({"steps_per_second": 0}, "steps_per_second = 0"),
        ({"twins": ()}, "twins"),
        ({"ranks": 0}, "ranks = 0: expected at least 1"),
        ({"ranks": 4}, "query_heads = 2 is not a multiple of ranks = 4"),
        ({"ranks": 2, "block_size": 5}, "block_size = 5 is not a multiple of ranks"),
        ({"ranks": 2, "splits": 3}, "splits = 3: expected 0 or a multiple of ranks"),
        ({"splits": 2}, "splits = 2 with ranks = 1"),
    ],
)
def test_settings_out_of_range_raise(given, words):
    with pytest.raises(ValueError, match=words):
        small(**given)


def test_what_was_not_given_comes_from_the_device():
    settings = choose_settings("cpu", block_size=4, scale=None)
    assert settings.block_size == 4
    assert settings.scale == 1 / 64
    with pytest.raises(ValueError, match="device = 'tpu'"):
        choose_settings("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            choose_settings("cuda")


@pytest.mark.extended
def test_attention_is_computed_in_a_sample_of_steps():
    calls = []

    def attend(*args, **given):
        calls.append(args)
        return REFERENCE.paged_attention(*args, **given)

    twin = wrong_twin(paged_attention=attend)
    replay = Replay(small(twins=("wrong",), attention_every=3), twin)
    records = list(replay.steps())
    sampled = [record.step for record in records if record.has_attention]
    assert sampled == list(range(1, len(records) + 1, 3))
    assert len(calls) == len(sampled)
    said = describe_result(summarize(replay, records, 1.0))
    assert "Attention was computed in one step of 3: --all computes it in each." in said
    whole = Replay(small())
    assert "--all" not in describe_result(summarize(whole, list(whole.steps()), 1.0))


def test_steps_without_attention_compare_what_was_written():
    steps = []

    def write_all_but_the_last_token(key, value, *rest, **given):
        steps.append(len(key))
        kept = slice(None, -1 if len(steps) == 2 else None)
        REFERENCE.reshape_and_cache(key, value, *rest[:2], rest[2][kept], **given)

    twin = wrong_twin(reshape_and_cache=write_all_but_the_last_token)
    settings = small(twins=("wrong",), attention_every=1000)
    with pytest.raises(TwinMismatch) as raised:
        list(Replay(settings, twin).steps())
    assert raised.value.violation.law == ReplayLaw.WRITTEN.value
    assert raised.value.stored.step == 2


def test_an_interpreted_replay_samples_attention_by_default():
    assert choose_settings("cpu").attention_every == 6
    assert choose_settings("cpu", attention_every=1).attention_every == 1
    assert choose_settings("cpu", twins=("reference",)).attention_every == 1
    assert choose_settings("cpu", twins=("a.package",)).attention_every == 1


def test_an_unknown_twin_raises():
    with pytest.raises(ValueError, match="twin = 'unknown' cannot be loaded"):
        Replay(small(twins=("unknown",)))


def test_a_trace_of_one_token_runs():
    entry = TraceRequest(0, 0.0, 1, 1)
    (sequence,) = draw_tokens([entry], 0)
    (request,) = make_requests([entry], [sequence])
    scheduler = Scheduler(BlockManager(1, 1), 1, 1)
    for _, output in schedule_arrivals(scheduler, [request], [0]):
        scheduler.update_from_output(output, next_tokens(output, [sequence]))
    assert request.token_ids == sequence.tolist()

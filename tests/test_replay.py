"""The replay: traces, the traffic made of them, and the detection of a wrong twin."""

import importlib
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from pagetwin.bookkeeping.batch.arrivals import schedule_arrivals
from pagetwin.bookkeeping.batch.scheduler import Scheduler
from pagetwin.bookkeeping.cache.block_manager import BlockManager
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.operations import Implementation, load_implementation
from pagetwin.contract.scheduler_classes import Request
from pagetwin.tools.replay.batch import keep_rows, make_batch
from pagetwin.tools.replay.figures import summarize
from pagetwin.tools.replay.mismatch import TwinMismatch, load_step, save_step
from pagetwin.tools.replay.model import SyntheticModel
from pagetwin.tools.replay.oracle import (
    compute_expected_attention,
    describe_difference,
    first_difference,
    split_into_chunks,
)
from pagetwin.tools.replay.reproduce import reproduce
from pagetwin.tools.replay.run import CACHED, FREE, Replay
from pagetwin.tools.replay.settings import ReplaySettings, choose_settings
from pagetwin.tools.replay.step import ReplayLaw, Stage
from pagetwin.tools.replay.tokens import draw_tokens
from pagetwin.tools.replay.trace import (
    SHIPPED,
    TraceError,
    TraceLengths,
    TraceRequest,
    read_trace,
    scale_trace,
)
from pagetwin.tools.replay.traffic import arrival_steps, make_requests, next_tokens

REFERENCE = load_implementation("reference")


def small(**given: object) -> ReplaySettings:
    """Return settings of a replay that takes less than a second."""
    defaults = {
        "requests": 12,
        "twins": ("reference",),
        "head_size": 8,
        "query_heads": 2,
        "kv_heads": 1,
    }
    return choose_settings("cpu", **{**defaults, **given})


def wrong_twin(**operations: object) -> dict[str, Implementation]:
    """Return the reference under the name "wrong", with some operations replaced."""
    module = ModuleType("wrong")
    vars(module).update(REFERENCE.operations | operations)
    return {"wrong": Implementation("wrong", module)}


def drop_the_first_key(query, key_cache, *rest, **options):
    """Attend with the first key of each sequence replaced by zeros."""
    block_table = rest[1]
    key_cache = key_cache.clone()
    key_cache[block_table[:, 0].long(), 0] = 0
    return REFERENCE.paged_attention(query, key_cache, *rest, **pack_options(**options))


def shift_a_slot(key, value, key_cache, value_cache, slot_mapping):
    """Write the last token one slot too far."""
    slot_mapping = slot_mapping.clone()
    slot_mapping[-1] = (slot_mapping[-1] + 1) % key_cache[..., 0, 0].numel()
    if slot_mapping[-1] in slot_mapping[:-1]:
        slot_mapping[-1] = -1
    REFERENCE.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


# --- the trace


@pytest.mark.parametrize(("name", "count"), [("azure", 1000), ("mooncake", 300)])
def test_a_shipped_trace_is_read_completely(name, count):
    trace = read_trace(name)
    assert len(trace) == count
    assert [request.number for request in trace] == list(range(count))
    assert all(a.arrival <= b.arrival for a, b in pairwise(trace))
    assert trace[0].arrival == 0
    assert min(request.prompt_len for request in trace) >= 1


def test_the_shipped_traces_lie_in_the_package():
    package = Path(importlib.import_module("pagetwin.tools.replay").__file__).parent
    for name in SHIPPED.values():
        assert (package / "traces" / name).is_file()


def test_a_csv_keeps_all_seven_digits_of_a_second():
    assert read_trace("azure")[1].arrival == pytest.approx(4.3145790, abs=1e-6)


GOOD_LINE = '{"timestamp":0,"input_length":5,"output_length":2,"hash_ids":[3]}'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", "", ["t.jsonl", "holds no requests"]),
        ("t.csv", "", ["t.csv", "holds no requests"]),
        ("t.jsonl", f"{GOOD_LINE}\n{GOOD_LINE}\n{{oops\n", ["line 3", "not JSON"]),
        ("t.jsonl", f"{GOOD_LINE}\n[1]\n", ["line 2", "JSON object"]),
        (
            "t.jsonl",
            GOOD_LINE.replace("5", "-5"),
            ["line 1", "input_length = -5", "at least 1"],
        ),
        ("t.jsonl", GOOD_LINE.replace("5", '"x"'), ["line 1", "input_length = 'x'"]),
        ("t.jsonl", GOOD_LINE.replace("5", "true"), ["line 1", "input_length = True"]),
        ("t.jsonl", GOOD_LINE.replace("[3]", "7"), ["line 1", "hash_ids = 7"]),
        ("t.jsonl", GOOD_LINE.replace("[3]", "[-3]"), ["line 1", "hash_ids[0] = -3"]),
        (
            "t.jsonl",
            GOOD_LINE.replace("5", "600"),
            ["line 1", "1 entries", "input_length = 600", "2 entries"],
        ),
        (
            "t.jsonl",
            GOOD_LINE.replace('"output_length":2,', ""),
            ["line 1", "output_length", "missing"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n",
            ["line 1", "GeneratedTokens", "missing"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,3,2\n"
            "2023-11-16 18:15:47.1,-3,2\n",
            ["line 3", "ContextTokens = '-3'"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,3\n",
            ["line 2", "GeneratedTokens = None"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,2\n",
            ["line 2", "TIMESTAMP = 'yesterday'"],
        ),
        ("t.txt", GOOD_LINE, ["'.txt'", ".csv", ".jsonl"]),
    ],
)
def test_a_malformed_trace_raises_with_the_line_and_the_value(
    tmp_path, name, text, words
):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as raised:
        read_trace(str(path))
    for word in words:
        assert word in str(raised.value)


def test_a_missing_trace_raises_with_the_names_of_the_shipped_ones():
    with pytest.raises(FileNotFoundError, match="azure or mooncake"):
        read_trace("nowhere.csv")


def test_a_binary_trace_raises(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(str(path))


@pytest.mark.parametrize("scale", [1, 1 / 3, 1 / 64, 1 / 360, 1 / 5000])
@pytest.mark.parametrize("name", SHIPPED)
def test_scaled_lengths_are_at_least_one_and_prefixes_stay_shared(name, scale):
    trace = scale_trace(read_trace(name, 60), scale)
    tokens = draw_tokens(trace, seed=1)
    for request, sequence in zip(trace, tokens, strict=True):
        assert request.prompt_len >= 1
        assert request.output_len >= 1
        assert len(sequence) == request.prompt_len + request.output_len
    if name == "mooncake":
        block = trace[0].tokens_per_hash
        for a in range(20):
            common = 0
            for x, y in zip(trace[a].hash_ids, trace[a + 1].hash_ids, strict=False):
                if x != y:
                    break
                common += 1
            lengths = (trace[a].prompt_len, trace[a + 1].prompt_len)
            same = min(common * block, *lengths)
            assert same > 0
            assert np.array_equal(tokens[a][:same], tokens[a + 1][:same])


@pytest.mark.parametrize("scale", [0, -1, 1.5])
def test_a_scale_out_of_range_raises(scale):
    with pytest.raises(ValueError, match=r"^scale = "):
        scale_trace(read_trace("azure", 1), scale)
    with pytest.raises(ValueError, match=r"^output_scale = "):
        scale_trace(read_trace("azure", 1), 1, scale)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_scaled_request_decodes_if_it_decodes_in_the_trace(name):
    """With one factor for all lengths, 18 of 40 requests of Azure's trace had no decode left."""
    settings = small(trace=name, requests=40)
    trace = read_trace(name, 40)
    scaled = scale_trace(trace, settings.scale, settings.output_scale)
    for before, after in zip(trace, scaled, strict=True):
        assert (before.output_len > 1) == (after.output_len > 1)
    assert (
        TraceLengths.of(scaled).decode_tokens
        > TraceLengths.of(trace).decode_tokens / 40
    )
    assert scale_trace(trace, 1) == trace


def test_steps_are_numbered_from_one_without_gaps():
    records = list(Replay(small()).steps())
    assert [record.step for record in records] == list(range(1, len(records) + 1))


# --- the scheduler on a trace


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
    computed = sum(each.total_num_scheduled_tokens for each in outputs)
    again = sum(
        each.num_recomputed_tokens
        for output in outputs
        for each in output.scheduled_requests
    )
    hits = sum(each.num_prefix_hit_tokens for each in outputs)
    assert computed - again + hits == sum(each.max_tokens_in_cache for each in requests)


def test_a_small_cache_preempts_and_a_large_one_does_not():
    _, _, tight = run_alone(small(num_blocks=34))
    _, _, roomy = run_alone(small(num_blocks=2000))
    assert sum(len(each.preempted_req_ids) for each in tight) > 0
    assert sum(len(each.preempted_req_ids) for each in roomy) == 0
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
    assert sum(each.num_prefix_hit_tokens for each in mooncake) > 0
    assert sum(each.num_prefix_hit_tokens for each in azure) == 0


def test_a_row_that_is_left_is_filled_by_the_last_one():
    assert keep_rows([], [3, 1]) == [3, 1]
    assert keep_rows([4, 5, 6, 7], [5, 6, 7, 8]) == [7, 5, 6, 8]
    assert keep_rows([4, 5, 6, 7], [5]) == [5]
    assert keep_rows([4, 5], [6]) == [6]


# --- keys, values and queries


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


# --- the oracle


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


# --- the replay


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
            (each.request_id, each.max_tokens_in_cache - 1) for each in replay.requests
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


def test_one_seed_gives_one_replay_and_another_gives_another():
    def trail(seed: int):
        replay = Replay(small(seed=seed), with_holders=True)
        return [
            (record.step, record.verdicts[0].worst, record.holders.tolist())
            for record in replay.steps()
        ]

    assert trail(4) == trail(4)
    assert trail(4) != trail(5)


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


WRONG = {
    "attention drops the first key": (
        {"paged_attention": drop_the_first_key},
        ReplayLaw.ATTENTION,
    ),
    "attention leaves its output as it was": (
        {"paged_attention": lambda *tensors, **options: options["out"]},
        ReplayLaw.ATTENTION,
    ),
    "the write shifts a slot": ({"reshape_and_cache": shift_a_slot}, ReplayLaw.WRITTEN),
    "the device's slots start at zero": (
        {
            "compute_slot_mapping_device": lambda starts, computed, *rest: (
                REFERENCE.compute_slot_mapping_device(starts, 0 * computed, *rest)
            )
        },
        ReplayLaw.METADATA,
    ),
    "the batch is not reordered": (
        {
            "reorder_batch_to_split_decodes_and_prefills": lambda counts: list(
                range(len(counts))
            )
        },
        ReplayLaw.METADATA,
    ),
    "the boundary counts a decode as prefill": (
        {"split_decodes_and_prefills": lambda common: (0, 1, 0, 1)},
        ReplayLaw.METADATA,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_twin_is_caught_stored_and_caught_again(name, tmp_path):
    operations, law = WRONG[name]
    implementations = wrong_twin(**operations)
    replay = Replay(
        small(twins=("reference", "wrong")), implementations, folder=tmp_path
    )
    with pytest.raises(TwinMismatch) as caught:
        list(replay.steps())
    assert caught.value.violation.law == law.value
    assert caught.value.violation.twin == 1
    assert "wrong" in str(caught.value)
    assert "expected" in str(caught.value)
    (path,) = tmp_path.iterdir()
    assert path == caught.value.path
    torch.load(path, weights_only=True)
    stored, before = load_step(path)
    assert stored.twins == ("reference", "wrong")
    assert before.found == caught.value.violation.found
    still = reproduce(path, implementations)
    assert still is not None
    assert still.violation.found == caught.value.violation.found
    # the same step on a correct twin
    assert reproduce(path, wrong_twin()) is None


def test_a_write_to_a_slot_of_another_block_is_caught(tmp_path):
    def write_twice(key, value, key_cache, value_cache, slot_mapping):
        REFERENCE.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        free = set(range(key_cache.shape[0])) - set((slot_mapping // 8).tolist())
        key_cache[max(free), 0] = 1.0

    implementations = wrong_twin(reshape_and_cache=write_twice)
    for check_every, place in ((1, "first"), (10**6, "last")):
        settings = small(twins=("wrong",), check_every=check_every)
        with pytest.raises(TwinMismatch) as caught:
            list(Replay(settings, implementations, folder=tmp_path).steps())
        assert caught.value.violation.law in (
            ReplayLaw.REST.value,
            ReplayLaw.ATTENTION.value,
        )
        assert (caught.value.stored.step == 1) == (place == "first")
        hint = "check_every = 1 finds the step" in str(caught.value)
        assert hint == (
            place == "last" and caught.value.violation.law == ReplayLaw.REST.value
        )


def test_a_twin_that_raises_violates_a_law(tmp_path):
    def fail(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    implementations = wrong_twin(paged_attention=fail)
    with pytest.raises(TwinMismatch, match="illegal memory access") as caught:
        list(Replay(small(twins=("wrong",)), implementations, tmp_path).steps())
    assert caught.value.violation.law == ReplayLaw.RUNS.value


def test_an_unsupported_input_is_not_a_mismatch():
    def unsupported(*_, **__):
        raise NotImplementedError("head_size = 8 is less than this kernel takes (16)")

    implementations = wrong_twin(paged_attention=unsupported)
    with pytest.raises(NotImplementedError):
        list(Replay(small(twins=("wrong",)), implementations).steps())


def test_the_cache_of_a_stored_step_is_nan_in_unused_blocks(tmp_path):
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    with pytest.raises(TwinMismatch) as caught:
        list(Replay(small(twins=("wrong",)), implementations, tmp_path).steps())
    stored, _ = load_step(caught.value.path)
    cache = stored.cache("cpu")
    batch = stored.batch
    slots = REFERENCE.compute_slot_mapping_batch(
        batch.query_lens, batch.num_computed_tokens, batch.block_rows, batch.block_size
    )
    assert cache.flatten(1, 2)[:, slots].isnan().all(), "not written yet"
    unused = sorted(set(range(stored.num_blocks)) - set(batch.used_blocks()))
    assert cache[:, unused].isnan().all()


def test_a_file_that_is_not_a_stored_step_raises(tmp_path):
    path = tmp_path / "step.pt"
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        reproduce(path)
    for content in (b"", b"nonsense", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a stored step"):
            reproduce(path)
    torch.save({"format": "pagetwin step 2"}, path)
    with pytest.raises(ValueError, match="missing or damaged entry"):
        reproduce(path)
    torch.save([1], path)
    with pytest.raises(ValueError, match="not a stored step"):
        reproduce(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "7"),
        ("twins", []),
        ("query", torch.zeros(2)),
        ("query_lens", None),
        ("scheduled_tokens", [1, 2]),
        ("block_rows", [[0.5]]),
        ("block_ids", torch.tensor([10**6])),
        ("blocks", torch.zeros(2, 1, 1, 1, 1)),
        ("twin", 9),
        ("output", "none"),
    ],
)
def test_a_stored_step_with_a_wrong_entry_names_it(tmp_path, name, value):
    """Such a file once ended in a traceback, with the exit code of a step that is still wrong."""
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    with pytest.raises(TwinMismatch) as caught:
        settings = small(twins=("wrong",))
        list(Replay(settings, implementations, folder=tmp_path).steps())
    content = torch.load(caught.value.path, weights_only=True)
    assert load_step(caught.value.path)[0].step == caught.value.stored.step
    torch.save(content | {name: value}, tmp_path / "wrong.pt")
    with pytest.raises(ValueError, match=rf"missing or damaged entry \({name}\)"):
        load_step(tmp_path / "wrong.pt")


def test_a_mismatch_is_reported_also_if_it_cannot_be_stored(tmp_path):
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    replay = Replay(small(twins=("wrong",)), implementations, tmp_path / "missing")
    with pytest.raises(TwinMismatch, match="error budget") as caught:
        list(replay.steps())
    assert caught.value.path is None and caught.value.why_not_stored


def test_a_step_that_cannot_be_stored_leaves_no_half_a_file(tmp_path, monkeypatch):
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    with pytest.raises(TwinMismatch) as caught:
        list(Replay(small(twins=("wrong",)), implementations).steps())
    assert caught.value.path is None

    def fail(content, path):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        save_step(tmp_path / "s.pt", caught.value.stored, caught.value.violation)
    assert list(tmp_path.iterdir()) == []


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


# --- settings


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
        with pytest.raises(ValueError, match="torch sees no GPU"):
            choose_settings("cuda")


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

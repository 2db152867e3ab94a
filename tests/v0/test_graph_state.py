"""Does a captured step see the batch it is given, all of it, and nothing of older ones?

On the host the reference runs the whole flow, and the twin everything but the recording, which it
rejects there. With a GPU the twin records and replays real graphs.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from captured_steps import (
    GARBAGE,
    LONGEST,
    CapturedLayer,
    decodes,
    int32,
    make_state,
    poison,
)
from pagetwin.conformance.cases.batches import NAN, BatchPlan, BatchTensors
from pagetwin.conformance.checks.dense import judge_attention, same_bits
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.contract.v0.sequence_classes import SequenceAttentionMetadata
from pagetwin.engine.selector import load_backend
from support.twins import TWINS, Twin
from torch import Tensor

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


BATCHES = ([9, 3], [24, 1, 24, 17, 5], [1], [24], [7, 8, 4, 5])
"""Smaller than the captured sizes, as large, longer, on both sides of block edges."""
SIZES = (5, 2)


def expected_cache(
    layer: CapturedLayer, batch: SequenceAttentionMetadata, key: Tensor, value: Tensor
) -> Tensor:
    cache = layer.cache.clone()
    if not layer.crossed:
        flat = cache.view(2, -1, layer.kv_heads, layer.head_size)
        for request, slot in enumerate(batch.slot_mapping.tolist()):
            flat[0, slot], flat[1, slot] = key[request], value[request]
    return cache


def run_batches(
    layer: CapturedLayer,
    reference: Twin,
    run: Callable[..., Tensor],
    poison_all: Callable[[], None],
) -> None:
    """Run every batch through `run(metadata, *inputs)` and assert what it must have done."""
    for seq_lens in BATCHES:
        batch = layer.batch(seq_lens)
        query, key, value = layer.inputs(len(seq_lens))
        expected = expected_cache(layer, batch, key, value)
        poison_all()
        out = run(batch, query, key, value)
        assert out.shape == query.shape
        assert same_bits(layer.cache, expected)
        layer.judge(batch, query, out, reference)


@pytest.mark.parametrize("crossed", [False, True])
def test_a_layer_replays_batches_of_other_sizes_and_lengths(
    reference: Twin, crossed: bool
) -> None:
    """Whatever older batches left in the buffers."""
    layer = CapturedLayer(reference, torch.device("cpu"), crossed=crossed)
    replay_batches(layer, make_state(reference, encoder=crossed), reference)


def replay_batches(layer: CapturedLayer, state: Any, reference: Twin) -> None:
    """Capture a step of each size, and replay every batch over poisoned buffers."""
    layer.cache.zero_()
    with state.graph_capture(max(SIZES)):
        captured = state.graph_capture_get_metadata_for_batch(max(SIZES))
        for size in SIZES:
            state.capture(layer.step, size, *layer.inputs(size))
    assert state.captured_batch_sizes == sorted(SIZES)
    assert bool((layer.cache == 0).all()), "a capture stores nothing"
    whole = state.get_graph_input_buffers(captured)
    run_batches(layer, reference, state.replay, lambda: poison(whole))


@pytest.mark.extended
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("size", [5, 7])
def test_padding_rows_do_no_harm_to_a_layer(
    twin: Twin, reference: Twin, device: torch.device, crossed: bool, size: int
) -> None:
    """The step as it would be recorded, run without a graph on both twins."""
    layer = CapturedLayer(twin, device, crossed=crossed)
    state = make_state(twin, encoder=crossed, device=device)
    with state.graph_capture(size):
        captured = state.graph_capture_get_metadata_for_batch(size)
    buffers = state.get_graph_input_buffers(captured)

    def run(batch: SequenceAttentionMetadata, *inputs: Tensor) -> Tensor:
        live = batch.num_decode_tokens
        state.prepare_graph_input_buffers(buffers, batch)
        padded = [
            torch.cat([rows, torch.full_like(rows[:1], NAN).repeat(size - live, 1, 1)])
            for rows in inputs
        ]
        return layer.step(captured, *padded)[:live]

    run_batches(layer, reference, run, lambda: poison(buffers))


def test_a_step_must_have_a_row_for_each_request(reference: Twin) -> None:
    state = make_state(reference.raw)
    rows = torch.ones(2, 3)
    bad = (
        (lambda metadata: [1], (), TypeError, "function returned list"),
        (lambda metadata: rows[:1], (), ValueError, r"shape \[1, 3\]: expected \[2,"),
        (
            lambda metadata, x: x,
            (rows[:1],),
            ValueError,
            r"inputs\[0\] has shape \[1, 3\]",
        ),
    )
    with state.graph_capture(2):
        for function, inputs, error, words in bad:
            with pytest.raises(error, match=words):
                state.capture(function, 2, *inputs)
        assert state.captured_batch_sizes == []
        state.capture(lambda metadata, x: x, 2, rows)
    batch = decodes([5, 9], [[3, 4], [7, 8]], [16, 33])
    for inputs, error, words in (
        ((), ValueError, "0 inputs were given: expected 1"),
        ((rows[:1],), ValueError, r"inputs\[0\] has shape \[1, 3\]: expected \[2, 3\]"),
        ((rows[:, :1],), ValueError, r"expected \[2, 3\]"),
        ((rows.int(),), TypeError, r"inputs\[0\] is torch.int32"),
    ):
        with pytest.raises(error, match=words):
            state.replay(batch, *inputs)
    with pytest.raises(ValueError, match=r"captured batch sizes \[2\]"):
        state.replay(decodes([1] * 3, [[1]] * 3, [1] * 3), torch.ones(3, 3))


def test_the_twin_rejects_to_record_without_graphs() -> None:
    state = make_state(TWINS["optimized"])
    with (
        pytest.raises(NotImplementedError, match="device = cpu: expected cuda"),
        state.graph_capture(2),
    ):
        state.capture(lambda metadata: metadata.seq_lens_tensor, 2)
    assert state.captured_batch_sizes == []


# ---- real graphs


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def with_mark(test: Any) -> Any:
    for mark in needs_cuda:
        test = mark(test)
    return test


@with_mark
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("crossed", [False, True])
def test_a_graph_replays_batches_of_other_sizes_and_lengths(
    reference: Twin, cuda: torch.device, dtype: torch.dtype, crossed: bool
) -> None:
    """Right by the float64 reference, whatever older batches left in the buffers."""
    layer = CapturedLayer(TWINS["optimized"], cuda, dtype, crossed=crossed)
    state = make_state(TWINS["optimized"], encoder=crossed, device=cuda)
    replay_batches(layer, state, reference)


@with_mark
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_graph_does_bit_for_bit_what_its_launches_do(
    cuda: torch.device, dtype: torch.dtype
) -> None:
    """Against the same step, refilled in the same way, launched without a graph."""
    twin = TWINS["optimized"]
    layer = CapturedLayer(twin, cuda, dtype)
    state = make_state(twin, device=cuda)
    eager = make_state(twin, device=cuda)
    with state.graph_capture(5):
        state.capture(layer.step, 5, *layer.inputs(5))
    with eager.graph_capture(5):
        captured = eager.graph_capture_get_metadata_for_batch(5)
    buffers = eager.get_graph_input_buffers(captured)
    for seq_lens in BATCHES:
        batch = layer.batch(seq_lens)
        inputs = layer.inputs(len(seq_lens))
        before = layer.cache.clone()
        replayed = state.replay(batch, *inputs).clone()
        cache = layer.cache.clone()
        layer.cache.copy_(before)
        poison(buffers)
        eager.prepare_graph_input_buffers(buffers, batch)
        padded = [
            torch.cat([rows, rows.new_zeros(5 - len(rows), *rows.shape[1:])])
            for rows in inputs
        ]
        launched = layer.step(captured, *padded)[: len(seq_lens)]
        assert same_bits(replayed, launched)
        assert same_bits(cache, layer.cache)


@with_mark
def test_long_rows_are_split_in_a_graph_too(
    reference: Twin, cuda: torch.device
) -> None:
    """Captured for 2,048 tokens, a row's keys are cut into parts; a short row leaves some empty."""
    twin = TWINS["optimized"]
    layer = CapturedLayer(twin, cuda, torch.float16, max_blocks=512, num_blocks=2048)
    state = twin.CommonAttentionState(512, 2048, cuda)
    with state.graph_capture(3):
        state.capture(layer.step, 3, *layer.inputs(3))
    for seq_lens in ([2048, 1, 300], [257], [5, 1023]):
        batch = layer.batch(seq_lens)
        inputs = layer.inputs(len(seq_lens))
        out = state.replay(batch, *inputs)
        layer.judge(batch, inputs[0], out, reference)


MIXTURES = (
    ((1, 5), (1, 18), (3, 4)),
    ((7, 7), (1, 24), (1, 1), (2, 9)),
    ((12, 20),),
    ((1, 9), (1, 2), (1, 3), (1, 24)),
)
"""New tokens and keys of each request: at most four requests and twelve tokens."""


@pytest.mark.parametrize(
    "recorded", [False, pytest.param(True, marks=needs_cuda)], ids=["run", "recorded"]
)
def test_the_triton_backend_takes_any_mixture_in_the_memory_of_one_step(
    reference: Twin, device: torch.device, recorded: bool
) -> None:
    """Its builder says ALWAYS: a step captured for 4 requests and 12 tokens runs all of these."""
    layer = CapturedLayer(TWINS["optimized"], device, torch.float16)
    backend = load_backend("TRITON")
    spec = KVCacheSpec(4, layer.kv_heads, layer.head_size, layer.dtype)
    builder = backend.get_builder_cls()(spec, ["layer 0"], device)
    heads = layer.kv_heads * layer.group
    impl = backend.get_impl_cls()(heads, 16, 0.25, layer.kv_heads)
    # a step of requests without tokens, which stores nothing
    common = replace(
        TWINS["optimized"].build_common_attn_metadata(
            [0] * 4, [0] * 4, [[0] * 6] * 4, 4, device
        ),
        num_actual_tokens=12,
        max_query_len=12,
        max_seq_len=LONGEST,
        slot_mapping=torch.full((12,), -1, dtype=torch.int64, device=device),
    )
    metadata = builder.build_for_cudagraph_capture(common)
    query = torch.zeros(12, heads, 16, dtype=layer.dtype, device=device)
    key, value = torch.zeros(
        2, 12, layer.kv_heads, 16, dtype=layer.dtype, device=device
    )
    output = torch.zeros_like(query)

    def step() -> None:
        impl.forward(object(), query, key, value, layer.cache, metadata, output)

    run = step
    if recorded:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for mixture in MIXTURES:
        news, lens = zip(*mixture, strict=True)
        whole = layer.batch(list(lens))
        rows = whole.block_tables
        tokens, reqs = sum(news), len(news)
        starts = [0, *accumulate(news)] + [tokens] * (4 - reqs)
        slots = TWINS["reference"].compute_slot_mapping_batch(
            news, [a - b for a, b in zip(lens, news, strict=True)], rows.tolist(), 4
        )
        for new, seq_len, row in zip(news, lens, rows.tolist(), strict=True):
            for position in range(seq_len - new, seq_len):
                layer.cache[:, row[position // 4], position % 4] = NAN
        common.query_start_loc.copy_(int32(starts))
        common.seq_lens.copy_(int32([*lens] + [0] * (4 - reqs)))
        common.block_table_tensor.fill_(GARBAGE)
        common.block_table_tensor[:reqs, : rows.shape[1]] = rows
        common.slot_mapping.fill_(-1)
        common.slot_mapping[:tokens] = slots.to(device)
        query.copy_(layer.random(12, heads, 16))
        key.copy_(layer.random(12, layer.kv_heads, 16))
        value.copy_(layer.random(12, layer.kv_heads, 16))
        query[tokens:] = key[tokens:] = value[tokens:] = NAN
        output.fill_(NAN)
        run()
        batch = BatchTensors(
            plan=BatchPlan(news, lens, 4, dtype=layer.dtype),
            query=query[:tokens],
            key_cache=layer.cache[0],
            value_cache=layer.cache[1],
            block_table=rows,
            query_start_loc=int32(starts[: reqs + 1], device),
            seq_lens=int32(lens, device),
            max_query_len=max(news),
            max_seq_len=max(lens),
            rows=rows.tolist(),
        )
        verdict, _ = judge_attention(batch, output[:tokens], reference)
        assert verdict.ok, (mixture, verdict)


@with_mark
def test_checks_that_read_tensors_cannot_be_recorded(
    cuda: torch.device, checked_values: None
) -> None:
    state = make_state(TWINS["optimized"], device=cuda)
    with (
        pytest.raises(ValueError, match="PAGETWIN_CHECK_VALUES = 1"),
        state.graph_capture(1),
    ):
        state.capture(lambda metadata: metadata.seq_lens_tensor, 1)


@with_mark
def test_an_exception_while_recording_leaves_the_device_usable(
    cuda: torch.device,
) -> None:
    state = make_state(TWINS["optimized"], device=cuda)
    calls = []

    def step(metadata: SequenceAttentionMetadata) -> Tensor:
        calls.append(metadata)
        if len(calls) == 2:
            raise KeyError("model")
        return metadata.seq_lens_tensor * 10

    with pytest.raises(KeyError, match="model"), state.graph_capture(2):
        state.capture(step, 2)
    assert not state.is_graph_capturing and state.captured_batch_sizes == []
    with state.graph_capture(2):
        state.capture(step, 2)
    batch = decodes([7], [[3]], [5], device=cuda)
    assert state.replay(batch).tolist() == [70]

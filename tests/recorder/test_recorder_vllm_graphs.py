"""The recorder and CUDA graphs of vLLM: classes with its interface, and simulated graphs."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_workers as vllm_classes
from pagetwin.recorder import Recorder, record_backend
from pagetwin.recorder.graphs import GraphSamples
from pagetwin.recorder.wrappers import vllm as recorder_vllm
from pagetwin.recorder.wrappers.vllm import VllmReader
from pagetwin.recorder.wrappers.vllm_schedule import WorkerSteps
from recorded_graph import captured_recorder
from simulated_graph import SimulatedGraph
from torch import Tensor

TABLE = [[7, 2], [5, 1]]


class Engine:
    """One layer whose decodes of two requests are captured, with vLLM's order of calls.

    Args:
        recorder: the recorder.
        graph: what the steps are captured in.
        reader: how vLLM's classes are read.
    """

    def __init__(
        self, recorder: Recorder, graph: SimulatedGraph, reader: VllmReader
    ) -> None:
        self.recorder, self.graph = recorder, graph
        self.shift = 0
        """How far a write goes past its slot."""
        engine = self

        class GraphImpl(vllm_classes.Impl):
            def do_kv_cache_update(
                self, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any
            ) -> None:
                write = super().do_kv_cache_update

                def shifted(slots: Tensor) -> None:
                    write(layer, key, value, kv_cache, slots + engine.shift)

                engine.graph.call(shifted, (slots,), {})

            def forward(self, *args: Any) -> Any:
                return engine.graph.call(super().forward, args, {})

        class GraphBackend(vllm_classes.Backend):
            get_impl_cls = staticmethod(lambda: GraphImpl)

        recorded = record_backend(GraphBackend, recorder, reader)
        spec = vllm_classes.FullAttentionSpec()
        self.layer = SimpleNamespace(layer_name="a")
        self.builder = recorded.get_builder_cls()(spec, ["a"], None, "cpu")
        self.impl = recorded.get_impl_cls()()
        self.common = vllm_classes.REFERENCE.build_common_attn_metadata(
            [1, 1], [17, 4], TABLE, vllm_classes.BLOCK
        )
        self.kv_cache = torch.zeros(12, 2, vllm_classes.BLOCK, 2, 8)
        self.query, self.output = torch.zeros(2, 2, 4, 8)
        self.key, self.value = torch.zeros(2, 2, 2, 8)

    def forward(self, metadata: Any) -> None:
        """Run the layer."""
        new, cache = (self.key, self.value), self.kv_cache
        self.impl.do_kv_cache_update(self.layer, *new, cache, self.common.slot_mapping)
        self.impl.forward(self.layer, self.query, *new, cache, metadata, self.output)

    def capture(self) -> None:
        """Capture the step, after a warm-up that has metadata of its own."""
        self.forward(self.builder.build_for_cudagraph_capture(self.common))
        metadata = self.builder.build_for_cudagraph_capture(self.common)
        with self.graph:
            self.forward(metadata)

    def replay(self) -> None:
        """Run the step with other numbers."""
        for tensor in (self.query, self.key, self.value):
            tensor.normal_()
        self.builder.build(0, self.common)
        self.graph.replay()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Return a function that makes an engine whose dummy runs are not steps."""
    steps = WorkerSteps()
    steps.is_watched = True

    def make(reads_graphs: bool = True) -> Engine:
        recorder, graph = captured_recorder(tmp_path, monkeypatch, rows=3)
        reader = VllmReader(steps, reads_graphs=reads_graphs)
        made = Engine(recorder, graph, reader)
        made.capture()
        steps._running = 1
        return made

    return make


@pytest.mark.parametrize("reads_graphs", [False, True])
def test_replays_are_sampled_if_captures_are_read(
    reads_graphs: bool, engine: Callable[..., Engine]
) -> None:
    """A capture is not a step, so its metadata were not read: no replay of vLLM was sampled."""
    served = engine(reads_graphs)
    for _ in range(2):
        served.replay()
    served.recorder.finish()
    checked = served.recorder.checked
    assert served.recorder.is_on and served.recorder.findings == []
    assert (checked["steps"], checked["rows"]) == (2, 4 if reads_graphs else 0)
    assert checked["writes"] == checked["rows"]


def test_a_wrong_write_of_a_replay_is_found(engine: Callable[..., Engine]) -> None:
    served = engine()
    served.replay()
    served.shift = 1
    served.replay()
    served.recorder.finish()
    assert served.recorder.is_on
    assert served.recorder.findings[0].law == "cache write"


def test_a_batch_without_requests_while_serving_leaves_a_captured_graph_alone(
    engine: Callable[..., Engine],
) -> None:
    """vLLM builds the metadata of a capture for it. The graph's buffers were given back then,
    although the graph goes on to write to them."""
    served = engine()
    samples, kept = served.recorder._graphs, served.builder._graphs
    graph = samples._graphs[2]
    for _ in range(3):
        served.builder.build_for_cudagraph_capture(served.common)
    served.replay()
    served.recorder.finish()
    assert served.recorder.checked["rows"] == 2 and served.recorder.findings == []
    assert len(kept) == 2  # of the graph, and of the one that may be captured
    # a graph that takes its place may be one of two that are replayed
    served.capture()
    assert samples._graphs[2] is not graph
    assert any(kept_graph is graph for kept_graph in kept.values()) and len(kept) == 2


def test_each_group_of_layers_has_its_own_buffers_in_a_graph() -> None:
    samples = GraphSamples(2)
    steps = [
        vllm_classes.READER.step(
            SimpleNamespace(
                kv_cache_spec=vllm_classes.FullAttentionSpec(), recorded_layers=[name]
            ),
            vllm_classes.REFERENCE.build_common_attn_metadata(
                [1, 1], [17, 4], TABLE, vllm_classes.BLOCK
            ),
        )
        for name in "ab"
    ]
    for name, step in zip("ab", steps, strict=True):
        assert step is not None
        samples.prepare(step, name)
    samples._captured(2)
    for group, step, is_right in zip(
        "abab", [*steps, *steps[::-1]], [1, 1, 0, 0], strict=True
    ):
        assert step is not None
        assert (samples.check_buffers(step, group) is None) == bool(is_right)


def test_numbers_per_head_that_are_on_the_host_are_copied_once() -> None:
    """A capture must not copy from the host. Numbers on the device may change in place."""
    impl, query = SimpleNamespace(alibi_slopes=[0.5, 0.25], sinks=None), torch.zeros(1)
    first = recorder_vllm._per_head(impl, "alibi_slopes", query)
    assert first is recorder_vllm._per_head(impl, "alibi_slopes", query)
    assert first is not None and first.tolist() == [0.5, 0.25]
    assert recorder_vllm._per_head(impl, "sinks", query) is None
    impl.sinks = torch.ones(2, dtype=torch.bfloat16)
    assert recorder_vllm._per_head(impl, "sinks", query).tolist() == [1, 1]
    impl.sinks.fill_(2)
    assert recorder_vllm._per_head(impl, "sinks", query).tolist() == [2, 2]

"""The recorder on classes with vLLM's interface: both cache shapes, any backend of the registry."""

import gc
import sys
import types
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.cache_formats import split_layer_cache
from pagetwin.recorder import Recorder, RecorderSettings, record_backend
from pagetwin.recorder.reproduce import reproduce_case
from pagetwin.recorder.wrappers import vllm as recorder_vllm
from pagetwin.recorder.wrappers import vllm_schedule
from pagetwin.recorder.wrappers.vllm import VllmReader
from pagetwin.recorder.wrappers.vllm_schedule import WorkerSteps
from torch import Tensor
from vllm_workers import (
    BLOCK,
    BLOCKS,
    HEADS,
    KV_HEADS,
    READER,
    REFERENCE,
    SIZE,
    Backend,
    FullAttentionSpec,
    Impl,
    LatentBackend,
    registry,
    resolve,
    scheduler_output,
)

__all__ = ["registry"]  # a fixture

FP8 = torch.float8_e4m3fn


class Fp8Impl(Impl):
    """Attention as FlashAttention-3 computes it on FP8 queries, of one request.

    The weights are rounded to FP8 at 256 times their size, and their sum is not rounded.
    """

    vllm_flash_attn_version = 3
    queries = FP8
    drops_key_scale = False

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, *unused
    ):
        common, tokens = attn_metadata.common, attn_metadata.num_actual_tokens
        keys = int(common.seq_lens[0])
        k, v = (
            cache[common.block_table_tensor[0].long()].flatten(0, 1)[:keys].float()
            for cache in split_layer_cache(kv_cache, SIZE, "fp8")
        )
        k_scale = 1.0 if self.drops_key_scale else layer._k_scale
        k, v = (states.repeat_interleave(HEADS // KV_HEADS, 1) for states in (k, v))
        q = query[:tokens].float() * layer._q_scale
        scores = torch.einsum("qhd,khd->hqk", q, k * k_scale) * self.scale
        hidden = torch.arange(keys) > torch.arange(keys - tokens, keys)[:, None]
        scores.masked_fill_(hidden, -torch.inf)
        weights = 256 * (scores - scores.amax(2, keepdim=True)).exp()
        result = torch.einsum("hqk,khd->qhd", weights.to(FP8).float(), v)
        sums = weights.sum(2).T[:, :, None]
        output[:tokens] = result / sums * layer._v_scale
        return output


class Fp8Backend(Backend):
    """A backend that reads an FP8 cache with FP8 queries."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Fp8Impl


def run(recorded: Any, shape: str, steps: int = 12, **given: Any) -> None:
    """Run one request of 20 tokens and then decodes of it, with padded rows."""
    kind = given.get("kv_cache_dtype", "auto")
    dtype = torch.uint8 if kind == "fp8" else torch.float32
    sizes = (
        (BLOCKS, 2, BLOCK, KV_HEADS, SIZE)
        if shape == "halves"
        else (BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
    )
    kv_cache = torch.zeros(sizes, dtype=dtype)
    layer = types.SimpleNamespace(
        layer_name="model.layers.0.attn",
        _k_scale=torch.tensor(0.05),
        _v_scale=torch.tensor(0.05),
        _q_scale=torch.tensor(0.02),
    )
    builder = recorded.get_builder_cls()(
        FullAttentionSpec(), [layer.layer_name], None, torch.device("cpu")
    )
    impl = recorded.get_impl_cls()(**given)
    torch.manual_seed(0)
    computed = 0
    for step in range(steps):
        new = 20 if not step else 1
        common = REFERENCE.build_common_attn_metadata(
            [new], [computed], [[7, 2, 5]], BLOCK
        )
        # vLLM's tensors may be longer than the step
        longer = torch.cat([common.slot_mapping, torch.tensor([3, 4])])
        common = common.replace(slot_mapping=longer)
        metadata = builder.build(
            common_prefix_len=0, common_attn_metadata=common, fast_build=False
        )
        query = torch.randn(new + 2, HEADS, SIZE)
        key, value = torch.randn(2, new + 2, KV_HEADS, SIZE)
        output = torch.empty(new + 2, HEADS, SIZE)
        if hasattr(impl, "queries"):
            query, output = (query / layer._q_scale).to(FP8), output.bfloat16()
        impl.do_kv_cache_update(
            layer, key, value, kv_cache, longer[: common.num_actual_tokens]
        )
        impl.forward(layer, query, key, value, kv_cache, metadata, output)
        computed += new


def recorder(folder: Path) -> Recorder:
    return Recorder(RecorderSettings(folder, sample_every=1))


@pytest.mark.parametrize("shape", ["halves", "packed"])
@pytest.mark.parametrize("given", [{}, {"window": 6}, {"kv_cache_dtype": "fp8"}])
def test_a_clean_backend_raises_nothing(
    tmp_path: Path, shape: str, given: dict[str, Any]
) -> None:
    checks = recorder(tmp_path)
    run(record_backend(Backend, checks, READER), shape, **given)
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert checks.checked["steps"] == 12
    assert checks.checked["rows"] == checks.checked["writes"] == 4 + 11


def test_a_window_that_is_one_key_too_wide_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Impl, "extra_keys", 1)
    checks = recorder(tmp_path)
    run(record_backend(Backend, checks, READER), "halves", window=6)
    assert [finding.law for finding in checks.findings] == ["attention"]


def test_a_scale_that_the_write_drops_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Impl.do_kv_cache_update

    def drop(self: Impl, layer: Any, *rest: Tensor) -> None:
        one = types.SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
        update(self, one, *rest)

    monkeypatch.setattr(Impl, "do_kv_cache_update", drop)
    checks = recorder(tmp_path)
    run(record_backend(Backend, checks, READER), "packed", kv_cache_dtype="fp8")
    assert [finding.law for finding in checks.findings] == ["cache write"]


def test_attention_of_fp8_queries_stays_within_a_budget_of_fp8_weights(
    tmp_path: Path,
) -> None:
    checks = recorder(tmp_path)
    run(record_backend(Fp8Backend, checks, READER), "halves", kv_cache_dtype="fp8")
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert checks.checked["rows"] == checks.checked["writes"] == 4 + 11


def test_fp8_keys_that_are_read_without_their_scale_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fp8Impl, "drops_key_scale", True)
    checks = recorder(tmp_path)
    run(record_backend(Fp8Backend, checks, READER), "halves", kv_cache_dtype="fp8")
    assert [finding.law for finding in checks.findings] == ["attention"]
    [path] = tmp_path.glob("*.pt")
    again = reproduce_case(path)
    assert again.still is not None and again.still.law == "attention"


def test_other_kernels_of_fp8_queries_have_their_writes_compared_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may lose weights that are small beside the largest one."""
    monkeypatch.delattr(Fp8Impl, "vllm_flash_attn_version")
    monkeypatch.setattr(Fp8Impl, "drops_key_scale", True)
    checks = recorder(tmp_path)
    run(record_backend(Fp8Backend, checks, READER), "halves", kv_cache_dtype="fp8")
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert (checks.checked["rows"], checks.checked["writes"]) == (0, 4 + 11)
    assert checks.checked["blocks"] > 0


def test_the_metadata_of_a_capture_are_not_a_step(tmp_path: Path) -> None:
    checks = recorder(tmp_path)
    recorded = record_backend(Backend, checks, READER)
    builder = recorded.get_builder_cls()(FullAttentionSpec(), ["a"], None, "cpu")
    common = REFERENCE.build_common_attn_metadata([1], [5], [[7, 2]], BLOCK)
    builder.build_for_cudagraph_capture(common)
    assert checks.step == 0 and checks.is_on
    builder.build(0, common)
    assert checks.step == 1


def test_the_registry_resolves_recorded_backends_if_the_environment_says_so(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = registry.AttentionBackendEnum.FAKE
    recorder_vllm.record_vllm_backends()
    assert resolve(member.get_path()) is Backend
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    for _ in range(2):
        recorder_vllm.record_vllm_backends()
    recorded = resolve(member.get_path())
    assert issubclass(recorded, Backend) and recorded.get_name() == "FAKE"
    assert resolve(member.get_path()) is recorded
    wrapper = sys.modules[vllm_schedule.WORKER].WorkerWrapperBase
    worker = wrapper(FullAttentionSpec(), has_drafts=True)
    worker.run = lambda output: run(recorded, "halves")
    worker.execute_model(scheduler_output())
    assert recorded.recorder.checked["steps"] == 12
    assert recorded.recorder.findings == []


def test_caches_of_an_unknown_format_are_not_compared_and_their_steps_are(
    registry: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CPU_ATTN stores keys in the order of its matrix instructions: each was called corrupt."""

    def reordered(self: Impl, layer: Any, key: Tensor, *rest: Any) -> None:
        update(self, layer, key.flip(-1), *rest)

    update = Impl.do_kv_cache_update
    monkeypatch.setattr(Impl, "do_kv_cache_update", reordered)
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    monkeypatch.setenv("PAGETWIN_RECORD_EVERY", "1")
    recorder_vllm.record_vllm_backends()
    recorded = resolve(registry.AttentionBackendEnum.FAKE.get_path())
    assert recorded.get_impl_cls() is Impl
    wrapper = sys.modules[vllm_schedule.WORKER].WorkerWrapperBase
    worker = wrapper(FullAttentionSpec(), has_drafts=True)
    worker.run = lambda output: run(recorded, "halves")
    worker.execute_model(scheduler_output())
    recorded.recorder.finish()
    checked = recorded.recorder.checked
    assert (checked["steps"], checked["rows"], checked["writes"]) == (12, 0, 0)
    assert recorded.recorder.findings == []
    assert "the format of FAKE's cache is not known" in caplog.text


def test_quantised_caches_of_an_unknown_dtype_are_not_compared(tmp_path: Path) -> None:
    """Their bytes were read as keys."""
    checks = recorder(tmp_path)
    recorded = record_backend(Backend, checks, READER)
    run(recorded, "halves", kv_cache_dtype="int8_per_token_head")
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert (checks.checked["steps"], checks.checked["writes"]) == (12, 0)


def test_latent_backends_of_another_interface_are_left_as_they_are(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    recorder_vllm.record_vllm_backends()
    member = registry.AttentionBackendEnum.LATENT
    assert resolve(member.get_path()) is LatentBackend


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_ubatching": True}, "steps may be divided into microbatches"),
        ({"decode_context_parallel_size": 2}, "ranks share the keys"),
        ({"use_ubatching": False, "decode_context_parallel_size": 1}, ""),
    ],
)
def test_steps_that_ranks_or_microbatches_share_are_left_alone(
    settings: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each microbatch has a builder of its own, so two of a step were groups that differ."""
    checks = Recorder(RecorderSettings(tmp_path, sample_every=1))
    recorded = record_backend(Backend, checks, READER)
    builder_class = recorded.get_builder_cls()
    config = SimpleNamespace(parallel_config=SimpleNamespace(**settings))
    builder_class.vllm_config = config
    builder = builder_class(FullAttentionSpec(), ["a"], config, "cpu")
    builder.build(0, REFERENCE.build_common_attn_metadata([1], [5], [[7]], BLOCK))
    assert (checks.step, checks.is_attached) == ((0, False) if reason else (1, True))
    assert bool(reason) == ("the layers of a are not checked" in caplog.text)
    assert reason in caplog.text and checks.is_on


def test_vllm_finds_a_recorded_class_by_its_own_name(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module was "abc", so on CUDA no engine started with PAGETWIN_RECORD set."""
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    recorder_vllm.record_vllm_backends()
    recorded = resolve(registry.AttentionBackendEnum.FAKE.get_path())
    assert resolve(f"{recorded.__module__}.{recorded.__qualname__}") is recorded


def test_a_path_that_gives_two_backends_gives_two_recorded_classes(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of the first model, with or without latent attention, was that of all models."""
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    module = types.ModuleType("plugin_of_two")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    member = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(member, f"{module.__name__}.Backend")
    recorder_vllm.record_vllm_backends()
    given = []
    for model in (Backend, LatentBackend, Backend):
        # pagetwin's plugin gives the class for the model that is being built
        module.Backend = model
        given.append(resolve(member.get_path()))
    assert issubclass(given[0], Backend) and given[0] is not Backend
    assert given[1] is LatentBackend
    assert given[2] is given[0]


@pytest.fixture
def watched(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Recorder, Any, Any]:
    """Return a recorder, a builder and a worker, as vLLM has them in a step."""
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    monkeypatch.setenv("PAGETWIN_RECORD_EVERY", "1")
    recorder_vllm.record_vllm_backends()
    recorded = resolve(registry.AttentionBackendEnum.FAKE.get_path())
    builder = recorded.get_builder_cls()(FullAttentionSpec(), ["a"], None, "cpu")
    worker = sys.modules[vllm_schedule.WORKER].WorkerWrapperBase(FullAttentionSpec())
    return recorded.recorder, builder, worker


def step(watched: Any, rows: list[list[int]], computed: list[int], output: Any) -> None:
    """Run a step of one new token per request, whose block-table rows are given."""
    _, builder, worker = watched
    common = REFERENCE.build_common_attn_metadata(
        [1] * len(rows), computed, rows, BLOCK
    )
    worker.run = lambda output: builder.build(0, common)
    worker.execute_model(output)


def test_metadata_of_a_dummy_run_are_not_a_step(watched: Any) -> None:
    """A dummy run has the slot -1 for every token, which is wrong in a step."""
    checks, builder, _ = watched
    common = REFERENCE.build_common_attn_metadata([1], [5], [[7]], BLOCK)
    builder.build(0, common.replace(slot_mapping=torch.tensor([-1])))
    checks.finish()
    assert checks.step == 0 and checks.findings == []


def test_rows_are_compared_with_what_the_scheduler_of_vllm_gave(watched: Any) -> None:
    checks = watched[0]
    given = {"a": (5, [7]), "b": (15, [3])}
    step(watched, [[7], [3]], [5, 15], scheduler_output(given, None, {"a": 1, "b": 1}))
    grown = {"b": (16, [9]), "a": (6, None)}
    step(
        watched, [[3, 9], [7]], [16, 6], scheduler_output(None, grown, {"b": 1, "a": 1})
    )
    # a leaves, and b is preempted and gets other blocks
    again = {"b": (16, [2, 4])}
    ended = scheduler_output(None, again, {"b": 1}, resumed=["b"], freed=["a"])
    step(watched, [[2, 4]], [16], ended)
    assert checks.findings == [] and checks.step == 3
    kept = {"b": (17, None)}
    step(watched, [[3, 4]], [17], scheduler_output(None, kept, {"b": 1}))
    checks.finish()
    assert [(finding.law, finding.request_id) for finding in checks.findings] == [
        ("block table", "b")
    ]


def test_a_block_that_the_scheduler_of_vllm_gave_twice_is_found(watched: Any) -> None:
    given = {"a": (5, [7]), "b": (15, [7])}
    output = scheduler_output(given, None, {"a": 1, "b": 1})
    step(watched, [[7], [7]], [5, 15], output)
    assert "block ownership" in [finding.law for finding in watched[0].findings]


def test_rows_of_smaller_blocks_than_those_of_the_scheduler_are_not_compared(
    watched: Any,
) -> None:
    """vLLM divides the scheduler's blocks if a kernel does not take their size."""
    checks, builder, worker = watched
    other = type(worker)(FullAttentionSpec(block_size=2 * BLOCK))
    output = scheduler_output({"a": (17, [3])}, None, {"a": 1})
    step((checks, builder, other), [[6, 7]], [17], output)
    checks.finish()
    assert checks.findings == [] and checks.step == 1


def test_two_recorded_backends_of_one_worker_are_told_the_same_rows(
    watched: Any, registry: Any
) -> None:
    """The second one was told each new block twice."""
    checks, _, worker = watched
    member = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(member, f"{__name__}.Backend")
    recorder_vllm.record_vllm_backends()
    other = resolve(member.get_path())
    builder = other.get_builder_cls()(FullAttentionSpec(), ["b"], None, "cpu")
    both = (
        checks,
        SimpleNamespace(build=lambda *args: _build(watched[1], builder, *args)),
        worker,
    )
    step(both, [[7]], [15], scheduler_output({"a": (15, [7])}, None, {"a": 1}))
    step(both, [[7, 9]], [16], scheduler_output(None, {"a": (16, [9])}, {"a": 1}))
    step(both, [[7, 9]], [17], scheduler_output(None, {"a": (17, None)}, {"a": 1}))
    for own_recorder in (checks, other.recorder):
        own_recorder.finish()
        assert own_recorder.step == 3 and own_recorder.findings == []


def test_backends_that_vllm_only_considers_are_not_told_its_schedule(
    watched: Any, registry: Any
) -> None:
    """vLLM resolves several backends to choose one; each of them kept a ledger in every step."""
    member = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(member, f"{__name__}.Backend")
    recorder_vllm.record_vllm_backends()
    considered = resolve(member.get_path()).recorder
    told: list[Any] = []
    considered.schedule = lambda *args: told.append(args)
    step(watched, [[7]], [15], scheduler_output({"a": (15, [7])}, None, {"a": 1}))
    assert told == [] and watched[0].step == 1
    assert not considered.is_attached and watched[0].is_attached


def _build(one: Any, two: Any, *args: Any) -> None:
    one.build(*args)
    two.build(*args)


def test_the_rows_of_two_engines_in_one_process_are_not_mixed(watched: Any) -> None:
    """Two engines may give the same name to two requests."""
    checks, builder, worker = watched
    output = scheduler_output({"a": (5, [7])}, None, {"a": 1})
    step(watched, [[7]], [5], output)
    other = type(worker)(FullAttentionSpec())
    step((checks, builder, other), [[3]], [5], output)
    checks.finish()
    assert checks.findings == []


def test_steps_of_two_engines_in_one_process_are_not_one_step(watched: Any) -> None:
    """The layers of a second engine were taken for another group of the first one's layers."""
    checks, builder, worker = watched
    other = type(worker)(FullAttentionSpec())
    second = type(builder)(FullAttentionSpec(), ["a"], None, "cpu")
    for done in (5, 6):
        output = scheduler_output({"a": (done, [7])}, None, {"a": 1})
        step(watched, [[7]], [done], output)
        output = scheduler_output({"a": (30, [3, 4])}, None, {"a": 1})
        step((checks, second, other), [[3, 4]], [30], output)
    checks.finish()
    assert checks.is_on and checks.findings == [] and checks.step == 4


@pytest.mark.extended
def test_buffers_of_a_graph_live_as_long_as_its_builder(tmp_path: Path) -> None:
    """A graph of another engine, or of the same size, freed buffers that a replay writes to."""
    checks = recorder(tmp_path)
    reader = VllmReader(WorkerSteps(), reads_graphs=True)
    recorded = record_backend(Backend, checks, reader)
    common = REFERENCE.build_common_attn_metadata([1], [5], [[7, 2]], BLOCK)
    builders = [
        recorded.get_builder_cls()(FullAttentionSpec(), ["a"], None, "cpu")
        for _ in range(2)
    ]
    buffers: list[Any] = []
    for builder in builders:
        builder.build_for_cudagraph_capture(common)
        graph = checks._graphs._captured(1)  # as if it was captured
        assert graph is not None
        buffers += [weakref.ref(graph.rows), weakref.ref(graph.replays)]
        del graph
    checks.engine_ended()
    assert all(buffer() is not None for buffer in buffers)
    del builder, builders
    gc.collect()
    assert all(buffer() is None for buffer in buffers)


@pytest.mark.extended
def test_rows_of_an_engine_are_compared_again_after_the_one_before_it_was_closed(
    watched: Any,
) -> None:
    """The worker of a closed engine was kept, with its caches, and counted as a second one."""
    checks, builder, worker = watched
    closed, other = (type(worker)(FullAttentionSpec()) for _ in range(2))
    output = scheduler_output({"a": (5, [7])}, None, {"a": 1})
    step((checks, builder, closed), [[7]], [5], output)
    gone = weakref.ref(closed)
    del closed
    gc.collect()
    assert gone() is None
    watched = (checks, builder, other)
    # the request of the same name has another block
    step(watched, [[3]], [5], scheduler_output({"a": (5, [3])}, None, {"a": 1}))
    checks.finish()
    assert checks.findings == []
    step(watched, [[4]], [6], scheduler_output(None, {"a": (6, None)}, {"a": 1}))
    checks.finish()
    assert [finding.law for finding in checks.findings] == ["block table"]

"""The recorder on latent attention (MLA) with vLLM's interface, and on the plugin's own classes."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import Recorder, RecorderSettings, record_backend
from pagetwin.recorder.findings import CorruptionFound
from pagetwin.recorder.reproduce import reproduce_case
from pagetwin.recorder.wrappers import vllm as recorder_vllm
from pagetwin.recorder.wrappers import vllm_schedule
from pagetwin.recorder.wrappers.backend import StepGroups
from pagetwin.recorder.wrappers.vllm_latent import (
    LatentReader,
    recorded_latent_impl,
    why_left_alone,
)
from pagetwin.recorder.wrappers.vllm_schedule import WorkerSteps, comparable_groups
from simulated_graph import GraphOperations, SimulatedGraph
from support.fake_vllm import VERSIONS, fake_vllm
from support.twins import WITHOUT_GPU
from support.vllm_steps import vllm_config
from torch import Tensor
from vllm_workers import Worker, registry, resolve, scheduler_output

__all__ = ["registry"]  # a fixture

REFERENCE = load_implementation("reference")
FP8 = torch.float8_e4m3fn
RANK, ROPE, HEADS, SCALE, K_SCALE = 16, 8, 4, 0.2, 0.05
BLOCK, BLOCKS = 16, 12
DECODE_TOKENS = 2
"""Most new tokens of a request that is a decode."""
ROWS = [[7, 2], [3, 9], [5, 1]]
LAYERS = [f"model.layers.{index}.attn" for index in range(2)]


@dataclass
class MLAAttentionSpec:
    """Has the name and the fields of vLLM's class."""

    block_size: int = BLOCK
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    compress_ratio: int = 1


class SlidingWindowMLASpec(MLAAttentionSpec):
    """Has the name of vLLM's class."""


def latent_metadata(common: Any) -> Any:
    """Return a step as vLLM's builder does; its decodes come first."""
    starts = common.query_start_loc[: common.num_reqs + 1]
    lens = starts.diff()
    decodes = int((lens <= DECODE_TOKENS).cumprod(0).sum())
    return SimpleNamespace(
        query_start_loc=starts,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        num_decodes=decodes,
        num_decode_tokens=int(starts[decodes]),
        decode=SimpleNamespace(
            block_table=common.block_table_tensor[:decodes],
            seq_lens=common.seq_lens[:decodes],
            max_query_len=DECODE_TOKENS,
        ),
    )


class Builder:
    """A builder with vLLM's signature, and as in vLLM without its layers' names."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device):
        self.kv_cache_spec, self.vllm_config = kv_cache_spec, vllm_config

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build=False
    ):
        return latent_metadata(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


class Impl:
    """An implementation with vLLM's methods, computed by the reference."""

    run: Any = REFERENCE
    scale = SCALE
    drops_rope = drops_scale = is_stale = False
    shift = extra_keys = 0

    def __init__(self, kv_cache_dtype: str) -> None:
        self.kv_cache_dtype = kv_cache_dtype
        self._last_table: Any = None

    def do_kv_cache_update(
        self,
        kv_c_normed,
        k_pe,
        kv_cache,
        slot_mapping,
        kv_cache_dtype,
        k_scale,
        skip_scale=False,
    ) -> None:
        fp8 = kv_cache_dtype.startswith("fp8")
        scale = 1.0 if self.drops_scale else k_scale
        self.run.concat_and_cache_mla(
            kv_c_normed,
            k_pe[:, 0] * (not self.drops_rope),
            kv_cache.view(FP8) if fp8 else kv_cache,
            torch.where(slot_mapping < 0, slot_mapping, slot_mapping + self.shift),
            scale if fp8 else None,
        )

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        key, decode = kv_c_and_k_pe_cache[:, :, None], attn_metadata.decode
        options = AttentionOptions()
        if self.kv_cache_dtype == "fp8":
            options = AttentionOptions(k_scale=layer._k_scale, v_scale=layer._k_scale)
        table = decode.block_table
        if self.is_stale and self._last_table is not None:
            table = self._last_table[: len(table)]
        self._last_table = decode.block_table.clone()
        out = torch.empty(*query.shape[:2], RANK)
        self.run.paged_attention(
            query.float() * (layer._q_scale if query.dtype == FP8 else 1),
            key,
            key[..., :RANK],
            table,
            attn_metadata.query_start_loc[: len(table) + 1],
            decode.seq_lens + self.extra_keys,
            decode.max_query_len,
            int(attn_metadata.max_seq_len) + 1,
            self.scale,
            out,
            options=options,
        )
        return out, None


class Backend:
    """A backend of latent attention with vLLM's methods."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return False


class OwnBackend(Backend):
    """A backend of the plugin's name, whose kernels do not round keys."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


class OtherImpl(Impl):
    """An implementation whose decodes have other arguments."""

    def forward_mqa(self, q, kv_cache, lens):  # type: ignore[override]
        return q


class OtherBackend(Backend):
    """A backend of another interface."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return OtherImpl


def recorded_backend(backend: Any, checks: Recorder) -> Any:
    return record_backend(
        backend,
        checks,
        LatentReader(WorkerSteps(), reads_graphs=True),
        recorded_latent_impl,
    )


def recorder(folder: Path, **given: Any) -> Recorder:
    return Recorder(RecorderSettings(folder, sample_every=1, **given), fp8_steps=1)


class Engine:
    """An engine of layers with latent attention, whose requests grow step by step.

    Args:
        recorded: a recorded backend.
        form: what the queries of decodes are: "tensor", "parts" or "fp8".
        kv_cache_dtype: vLLM's name of the cache's dtype.
        spec: describes the cache.
        parallel: settings of vLLM's `ParallelConfig`.
        known: whether the builder can look up the layers.
    """

    def __init__(
        self,
        recorded: Any,
        form: str = "tensor",
        kv_cache_dtype: str = "auto",
        spec: Any = None,
        known: bool = True,
        **parallel: Any,
    ) -> None:
        self.form, self.kv_cache_dtype = form, kv_cache_dtype
        self.random = torch.Generator().manual_seed(0)
        self.layers = [
            SimpleNamespace(
                layer_name=name,
                impl=recorded.get_impl_cls()(kv_cache_dtype),
                _k_scale=torch.tensor(K_SCALE),
                _q_scale=torch.tensor(0.02),
            )
            for name in LAYERS
        ]
        dtype = torch.uint8 if "fp8" in kv_cache_dtype else torch.float32
        shape = (BLOCKS, BLOCK, RANK + ROPE)
        self.caches = [torch.zeros(shape, dtype=dtype) for _ in LAYERS]
        layers = {layer.layer_name: layer for layer in self.layers} if known else {}
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            parallel_config=SimpleNamespace(**parallel),
        )
        self.builder = recorded.get_builder_cls()(
            spec or MLAAttentionSpec(), LAYERS, config, torch.device("cpu")
        )
        self.computed = [0, 0, 0]
        self.rows = ROWS

    def step(self, *new: int) -> list[Tensor]:
        """Run a step; return the rows of the decodes of each layer.

        Args:
            new: new tokens of the first requests. 0 for those that are not in the step.
        """
        used = [req for req, count in enumerate(new) if count]
        common = REFERENCE.build_common_attn_metadata(
            [new[req] for req in used],
            [self.computed[req] for req in used],
            [self.rows[req] for req in used],
            BLOCK,
        )
        # vLLM's tensors may be longer than the step
        slots = torch.cat([common.slot_mapping, torch.tensor([-1, -1])])
        metadata = self.builder.build(
            common_prefix_len=0, common_attn_metadata=common.replace(slot_mapping=slots)
        )
        for req in used:
            self.computed[req] += new[req]
        return [
            self.forward(index, metadata, slots) for index in range(len(self.layers))
        ]

    def forward(self, index: int, metadata: Any, slots: Tensor) -> Any:
        """Write the latents of a layer, and attend to them; return the rows of the decodes."""
        layer, cache = self.layers[index], self.caches[index]
        latents = torch.randn(len(slots), RANK + ROPE, generator=self.random)
        layer.impl.do_kv_cache_update(
            latents[:, :RANK],
            latents[:, None, RANK:],
            cache,
            slots,
            self.kv_cache_dtype,
            layer._k_scale,
        )
        tokens = metadata.num_decode_tokens
        if not tokens or self.kv_cache_dtype == "fp8_ds_mla":
            return None
        query = torch.randn(tokens, HEADS, RANK + ROPE, generator=self.random)
        q: Any = query
        if self.form == "parts":
            q = (query[..., :RANK], query[..., RANK:])
        if self.form == "fp8":
            q = (query / layer._q_scale).to(FP8)
        view = cache.view(FP8) if cache.dtype == torch.uint8 else cache
        return layer.impl.forward_mqa(q, view, metadata, layer)[0]

    def serve(self) -> None:
        """Run two prefills, decodes, decodes with a prefill, and decodes of all three."""
        self.step(18, 5)
        self.step(1, 2)
        self.step(2, 1, 9)
        for _ in range(5):
            self.step(1, 1, 1)


WRITES = 2 * 4 + 3 + 4 + 5 * 3
"""Cache writes that eight sampled steps compare: at most four per step, and of two layers in the
first one, where the recorder does not know how many there are."""
DECODES = 3 + 3 + 5 * 3
"""Rows of decodes among the tokens of these steps."""


def plant(monkeypatch: pytest.MonkeyPatch, **bug: Any) -> None:
    """Let each layer have a bug from now on."""
    for name, value in bug.items():
        monkeypatch.setattr(Impl, name, value)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("form", ["tensor", "parts"])
def test_clean_steps_raise_nothing_and_writes_and_decodes_are_compared(
    tmp_path: Path, form: str, known: bool
) -> None:
    checks = recorder(tmp_path)
    Engine(recorded_backend(Backend, checks), form, known=known).serve()
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert checks.checked["steps"] == 8
    assert checks.checked["writes"] == WRITES
    assert checks.checked["rows"] == DECODES
    assert checks.checked["blocks"] > 0


def test_the_layers_have_vllms_names_and_otherwise_numbers(tmp_path: Path) -> None:
    checks = recorder(tmp_path)
    Engine(recorded_backend(Backend, checks)).serve()
    assert checks._samples.layers == LAYERS
    checks = recorder(tmp_path)
    engine = Engine(recorded_backend(Backend, checks), known=False)
    engine.serve()
    names = [layer.impl.recorded_name for layer in engine.layers]
    assert checks._samples.layers == names and len(set(names)) == 2
    assert all(name.startswith("latent layer ") for name in names)


@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        (
            {"drops_rope": True},
            r"the rope key at position \d+ \(slot \d+\), head 0, element 0 is -?0 in the",
        ),
        (
            {"shift": 1},
            r"the latent at position \d+ \(slot \d+\), head 0, element 0 is",
        ),
    ],
    ids=str,
)
def test_a_wrong_write_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Any, sentence: str
) -> None:
    checks = recorder(tmp_path, action="stop")
    engine = Engine(recorded_backend(Backend, checks))
    engine.step(18, 5)
    plant(monkeypatch, **bug)
    with pytest.raises(CorruptionFound, match=rf"cache write: {LAYERS[0]}: {sentence}"):
        engine.step(1, 1)
    [path] = tmp_path.glob("*.pt")
    again = reproduce_case(path)
    assert again.still is not None and again.still.law == "cache write"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "bug", [{"extra_keys": -1}, {"extra_keys": 1}, {"is_stale": True}], ids=str
)
@pytest.mark.parametrize("form", ["tensor", "parts"])
def test_wrong_attention_of_decodes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Any, form: str
) -> None:
    checks = recorder(tmp_path, action="stop")
    engine = Engine(recorded_backend(OwnBackend, checks), form)
    engine.step(18, 5)
    engine.step(1, 1)
    # the requests change their rows
    engine.rows = [ROWS[1], ROWS[0], ROWS[2]]
    engine.computed = [5, 18, 0]
    plant(monkeypatch, **bug)
    with pytest.raises(
        CorruptionFound, match=r"attention: model\.layers\.\d\.attn: attention of"
    ):
        engine.step(1, 1, 9)
    [path] = tmp_path.glob("*.pt")
    again = reproduce_case(path)
    assert again.still is not None and again.still.law == "attention"
    # the kernels are right on the stored rows
    assert again.candidate_agrees


def test_rows_of_decodes_alone_are_recomputed_in_a_step_with_prefills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest sequence is that of the prefill, whose rows `forward_mqa` does not have."""
    checks = recorder(tmp_path, action="stop")
    engine = Engine(recorded_backend(Backend, checks))
    engine.step(5, 3)
    before = checks.checked["rows"]
    engine.step(1, 1, 20)
    assert checks.checked["rows"] - before == 2
    plant(monkeypatch, extra_keys=-1)
    engine.computed[2] = 0
    with pytest.raises(CorruptionFound, match=r"attention of position [46] "):
        engine.step(1, 1, 20)


def test_an_fp8_cache_is_compared_and_its_attention_only_if_keys_are_not_rounded(
    tmp_path: Path,
) -> None:
    for backend, rows in ((Backend, 0), (OwnBackend, DECODES)):
        checks = recorder(tmp_path)
        Engine(recorded_backend(backend, checks), "parts", "fp8").serve()
        checks.finish()
        assert checks.is_on and checks.findings == []
        assert (checks.checked["writes"], checks.checked["rows"]) == (WRITES, rows)


def test_decodes_of_fp8_queries_are_not_recomputed_and_their_blocks_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, extra_keys=-1)
    checks = recorder(tmp_path)
    engine = Engine(recorded_backend(Backend, checks), "fp8", "fp8")
    engine.serve()
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert (checks.checked["writes"], checks.checked["rows"]) == (WRITES, 0)
    assert checks.checked["blocks"] > 0
    for cache in engine.caches:
        cache[ROWS[0][0]] += 1
    engine.step(1, 1, 1)
    engine.step(1, 1, 1)
    checks.finish()
    assert [finding.law for finding in checks.findings] == ["unchanged blocks"]


def test_a_scale_that_the_write_drops_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, drops_scale=True)
    checks = recorder(tmp_path)
    Engine(recorded_backend(Backend, checks), "tensor", "fp8").step(18, 5)
    [finding] = checks.findings
    assert finding.law == "cache write" and "the latent at position" in finding.found
    [path] = tmp_path.glob("*.pt")
    assert reproduce_case(path).still is not None


def test_caches_of_another_format_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8_ds_mla stores a latent in FP8 with four scales and a rope key in bfloat16."""
    plant(monkeypatch, drops_scale=True)
    checks = recorder(tmp_path)
    Engine(recorded_backend(Backend, checks), "tensor", "fp8_ds_mla").serve()
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert (checks.checked["steps"], checks.checked["writes"]) == (8, 0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"decode_context_parallel_size": 2}, "ranks share the keys"),
        ({"prefill_context_parallel_size": 2}, "ranks share the tokens"),
        ({"use_ubatching": True}, "microbatches"),
        ({"spec": SlidingWindowMLASpec()}, "described by SlidingWindowMLASpec"),
        ({"spec": MLAAttentionSpec(compress_ratio=4)}, "compress_ratio = 4"),
    ],
    ids=str,
)
def test_steps_of_which_layers_have_a_part_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: Any, reason: str
) -> None:
    checks = recorder(tmp_path)
    Engine(recorded_backend(Backend, checks), **given).serve()
    checks.finish()
    assert checks.is_on and not checks.is_attached
    assert set(checks.checked.values()) == {0}
    [line] = [message for message in caplog.messages if "are not checked" in message]
    assert reason in line and LAYERS[0] in line


def test_other_interfaces_are_left_alone(
    registry: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    member = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(member, f"{__name__}.OtherBackend")
    recorder_vllm.record_vllm_backends()
    assert resolve(member.get_path()) is OtherBackend
    reason = "its forward_mqa has other arguments"
    assert f"CUSTOM is not recorded: {reason}" in caplog.messages[-1]


@pytest.fixture
def served(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, Engine]:
    """Return a recorded class, a worker and an engine, as vLLM has them."""
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    monkeypatch.setenv("PAGETWIN_RECORD_EVERY", "1")
    member = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(member, f"{__name__}.OwnBackend")
    recorder_vllm.record_vllm_backends()
    recorded = resolve(member.get_path())
    worker = sys.modules[vllm_schedule.WORKER].WorkerWrapperBase(MLAAttentionSpec())
    return recorded, worker, Engine(recorded)


def run(worker: Any, engine: Engine, output: Any, *new: int) -> None:
    worker.run = lambda output: engine.step(*new)
    worker.execute_model(output)


def test_the_registry_resolves_recorded_backends_and_rows_are_the_schedulers(
    served: Any,
) -> None:
    recorded, worker, engine = served
    checks = recorded.recorder
    given = {"a": (0, ROWS[0]), "b": (0, ROWS[1])}
    run(worker, engine, scheduler_output(given, None, {"a": 18, "b": 5}), 18, 5)
    kept = {"a": (18, None), "b": (5, None)}
    both = {"a": 1, "b": 1}
    run(worker, engine, scheduler_output(None, kept, both), 1, 1)
    assert checks.is_on and checks.findings == [] and checks.step == 2
    assert checks.checked["writes"] == 2 * 4 + 2 and checks.checked["rows"] == 2
    # another block in the row of "a", as after a preemption
    engine.rows = [[7, 8], ROWS[1]]
    kept = {"a": (19, None), "b": (6, None)}
    run(worker, engine, scheduler_output(None, kept, both), 1, 1)
    checks.finish()
    finding = checks.findings[0]
    assert (finding.law, finding.request_id) == ("block table", "a")
    assert "entry 1 of its block-table row is block 8: expected 2" in finding.found


def test_the_calls_of_a_dummy_run_are_not_compared(served: Any) -> None:
    """A rank without requests writes to no slot, and has the metadata of no step."""
    recorded, worker, engine = served
    given = {"a": (0, ROWS[0]), "b": (0, ROWS[1])}
    run(worker, engine, scheduler_output(given, None, {"a": 18, "b": 5}), 18, 5)
    before = dict(recorded.recorder.checked)
    common = REFERENCE.build_common_attn_metadata([1, 1], [18, 5], ROWS[:2], BLOCK)
    engine.builder.build(0, common.replace(slot_mapping=torch.tensor([-1, -1])))
    slots = torch.full((25,), -1)
    for index in range(2):
        engine.forward(index, SimpleNamespace(num_decode_tokens=0), slots)
    assert recorded.recorder.checked == before
    recorded.recorder.finish()
    assert recorded.recorder.is_on and recorded.recorder.findings == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(MLAAttentionSpec(), [BLOCK]), (SlidingWindowMLASpec(), [])],
    ids=str,
)
def test_rows_of_latents_are_compared_with_the_schedulers(
    spec: Any, expected: list[int]
) -> None:
    groups = comparable_groups(Worker(spec))
    assert [group.block_size for group in groups] == expected


def test_layers_that_are_left_alone_have_no_group(tmp_path: Path) -> None:
    """Their writes were compared with the slots of the only group that was read."""
    groups = StepGroups()
    only = groups.add(["a"])
    groups.leave_out(["b"])
    assert groups.of_layer("latent layer 7") == only
    assert groups.of_layer("b") is None and groups.find(object(), "b") is None
    checks = recorder(tmp_path)
    recorded = recorded_backend(Backend, checks)
    engine = Engine(recorded)
    config = SimpleNamespace()
    recorded.get_builder_cls()(SlidingWindowMLASpec(), LAYERS[1:], config, "cpu")
    engine.layers[1].impl.shift = 1
    engine.serve()
    checks.finish()
    assert checks.is_on and checks.findings == [] and checks.checked["writes"] > 0


def test_arguments_that_a_later_version_adds_reach_the_implementation(
    tmp_path: Path,
) -> None:
    given: list[Any] = []

    class LaterImpl(Impl):
        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer, more=None):  # type: ignore[override]
            given.append(more)
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)

    class LaterBackend(Backend):
        get_impl_cls = staticmethod(lambda: LaterImpl)

    engine = Engine(recorded_backend(LaterBackend, recorder(tmp_path)))
    impl = engine.layers[0].impl
    plain = impl.forward_mqa
    impl.forward_mqa = lambda *args: plain(*args, more="new")
    engine.serve()
    assert set(given) == {None, "new"}


def test_an_error_of_the_recorder_does_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("tell_write", "tell_decodes", "why_left_alone", "step"):
        checks = recorder(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(LatentReader, name, lambda *given: given[99])
            engine = Engine(recorded_backend(Backend, checks))
            engine.step(18, 5)
            out = engine.step(1, 1)
        assert out[0].isfinite().all()
        assert not checks.is_on and "it failed in step" in caplog.text
        caplog.clear()


class LatentGraph(GraphOperations):
    """An implementation whose writes of latents are one call each in a graph too."""

    def concat_and_cache_mla(self, *args: Any, **kwargs: Any) -> None:
        """Write each new token's latent and rope key to its slot."""
        self._graph.call(self._run.concat_and_cache_mla, args, kwargs)


def test_a_graph_copies_rows_of_both_parts_of_a_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode is captured and replayed; from the fifth replay on it reads one key too few."""
    graph = SimulatedGraph()
    capturing = property(lambda self: graph.is_capturing)
    monkeypatch.setattr(Recorder, "is_capturing", capturing)
    monkeypatch.setattr(Impl, "run", LatentGraph(REFERENCE, graph))
    checks = Recorder(RecorderSettings(tmp_path, sample_every=1, rows=2), "CUSTOM")
    engine = Engine(recorded_backend(Backend, checks), "parts")
    engine.step(18, 5)
    common = REFERENCE.build_common_attn_metadata([1, 1], [18, 5], ROWS[:2], BLOCK)
    # as vLLM, which captures for the longest sequence
    common = common.replace(max_seq_len=2 * BLOCK - 1)
    metadata = engine.builder.build_for_cudagraph_capture(common)
    layer, cache = engine.layers[0], engine.caches[0]
    query, latents = torch.zeros(2, HEADS, RANK + ROPE), torch.zeros(2, RANK + ROPE)
    slots = common.slot_mapping.clone()
    metadata.decode.seq_lens = read = common.seq_lens.clone()
    with graph:
        layer.impl.do_kv_cache_update(
            latents[:, :RANK],
            latents[:, None, RANK:],
            cache,
            slots,
            "auto",
            layer._k_scale,
        )
        parts = (query[..., :RANK], query[..., RANK:])
        layer.impl.forward_mqa(parts, cache, metadata, layer)
    rows = checks.checked["rows"]
    for number in range(8):
        engine.builder.build(0, common)
        query.copy_(torch.randn(query.shape, generator=engine.random))
        latents.copy_(torch.randn(latents.shape, generator=engine.random))
        slots.copy_(common.slot_mapping)
        read.copy_(common.seq_lens - int(number >= 4))
        graph.replay()
        checks.finish()
        assert checks.checked["rows"] - rows == 2 * (number + 1)
        assert [finding.law for finding in checks.findings] == ["attention"] * (
            number >= 4
        )
        engine.computed = [length + 1 for length in engine.computed]
        after = REFERENCE.build_common_attn_metadata(
            [1, 1], engine.computed[:2], ROWS[:2], BLOCK
        )
        common.seq_lens.copy_(after.seq_lens)
        common.slot_mapping.copy_(after.slot_mapping)
    assert checks.is_on and len(checks.findings) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_classes_of_each_version_have_the_arguments_that_are_wrapped(
    version: str,
) -> None:
    with fake_vllm(version, use_mla=True):
        from pagetwin.integrations.vllm.latent import PagetwinLatentBackend

        common = sys.modules["vllm.model_executor.layers.attention.mla_attention"]
        vllms = SimpleNamespace(get_impl_cls=lambda: common.MLACommonImpl)
        assert why_left_alone(vllms) == ""
        assert why_left_alone(PagetwinLatentBackend) == ""


@pytest.mark.sample(2)
@WITHOUT_GPU
@pytest.mark.parametrize("bug", [None, "rope", "keys"])
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_the_plugins_own_classes_are_recorded(
    version: str, bug: str | None, tmp_path: Path
) -> None:
    """Builder, implementation and backend of the plugin, in the oldest and the newest vLLM."""
    with fake_vllm(version, use_mla=True):
        from pagetwin.integrations.vllm.latent import PagetwinLatentBackend

        module: Any = sys.modules["vllm.model_executor.layers.attention.mla_attention"]
        # the stand-in's methods raise
        module.MLACommonMetadataBuilder.build = lambda self, prefix, common, fast: (
            latent_metadata(common)
        )
        checks = recorder(tmp_path)
        checks.implementation = "CUSTOM"
        recorded = recorded_backend(PagetwinLatentBackend, checks)
        sizes = dict(q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=24)
        sizes |= dict(qk_rope_head_dim=ROPE, qk_head_dim=32, v_head_dim=24)
        impl = recorded.get_impl_cls()(
            HEADS, RANK + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None,
            kv_b_proj=None, **sizes,
        )  # fmt: skip
        impl.scale = SCALE
        engine = Engine(recorded_backend(Backend, recorder(tmp_path)), "parts")
        layer = engine.layers[0]
        engine.layers, layer.impl = [layer], impl
        engine.builder = recorded.get_builder_cls()(
            MLAAttentionSpec(),
            LAYERS[:1],
            vllm_config({LAYERS[0]: layer}),
            torch.device("cpu"),
        )
        impl.bounds = None
        assert impl.recorded_name == LAYERS[0]
        if bug == "rope":
            write = impl.run.concat_and_cache_mla
            impl.run = replace_operation(
                impl.run,
                concat_and_cache_mla=lambda kv_c, rope, *rest: write(
                    kv_c, rope.roll(1, -1), *rest
                ),
            )
        if bug == "keys":
            attend = impl.run.paged_attention
            impl.run = replace_operation(
                impl.run,
                paged_attention=lambda *given, options: attend(
                    *given[:5], given[5] - 1, *given[6:], options=options
                ),
            )
        for new in ((18, 5), (1, 2), (2, 1, 9), (1, 1, 1)):
            engine.step(*new)
        checks.finish()
        laws = {None: [], "rope": ["cache write"], "keys": ["attention"]}
        assert checks.is_on
        assert [finding.law for finding in checks.findings] == laws[bug]
        assert checks.checked["writes"] == 4 + 3 + 4 + 3
        assert checks.checked["rows"] == 3 + 3 + 3


def replace_operation(run: Any, **operations: Any) -> Any:
    """Return an implementation with another operation."""
    others = {name: getattr(run, name) for name in run.operations}
    return SimpleNamespace(
        name=run.name, operations=run.operations, **others | operations
    )

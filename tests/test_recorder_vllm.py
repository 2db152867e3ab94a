"""The recorder on classes with vLLM's interface: both cache shapes, any backend of the registry."""

import enum
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import Recorder, RecorderSettings, record_backend
from pagetwin.recorder.wrappers import vllm as recorder_vllm
from pagetwin.recorder.wrappers.vllm import VLLM_READER, split_cache
from torch import Tensor

REFERENCE = load_implementation("reference")
HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 8, 16, 12


@dataclass
class FullAttentionSpec:
    """Has the name of vLLM's class."""

    block_size: int = BLOCK
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass
class Metadata:
    """What a backend's builder returns."""

    common: Any
    num_actual_tokens: int
    causal: bool = True


class Builder:
    """A builder with vLLM's signature."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, config: Any, device: Any):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build=False
    ):
        return Metadata(common_attn_metadata, common_attn_metadata.num_actual_tokens)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        return self.build(0, common_attn_metadata)


class Impl:
    """An implementation with vLLM's attributes, whose attention is the reference's."""

    attn_type = "decoder"
    head_size, scale, num_kv_heads = SIZE, SIZE**-0.5, KV_HEADS
    alibi_slopes = sinks = kv_sharing_target_layer_name = None
    logits_soft_cap = 0
    extra_keys = 0

    def __init__(self, window: int | None = None, kv_cache_dtype: str = "auto") -> None:
        self.sliding_window = (-1, -1) if window is None else (window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        caches = split_cache(kv_cache, SIZE, self.kv_cache_dtype)
        REFERENCE.reshape_and_cache(
            key, value, *caches, slot_mapping, **self.scales(layer)
        )

    def scales(self, layer: Any) -> dict[str, Any]:
        fp8 = self.kv_cache_dtype == "fp8"
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if fp8 else {}

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        if attn_metadata is None:
            return output.fill_(0)
        common, tokens = attn_metadata.common, attn_metadata.num_actual_tokens
        left = self.sliding_window[0]
        options = AttentionOptions(
            sliding_window=None if left < 0 else left + 1 + self.extra_keys,
            **self.scales(layer),
        )
        REFERENCE.paged_attention(
            query[:tokens],
            *split_cache(kv_cache, SIZE, self.kv_cache_dtype),
            common.block_table_tensor,
            common.query_start_loc,
            common.seq_lens,
            common.max_query_len,
            common.max_seq_len,
            self.scale,
            output[:tokens],
            options=options,
        )
        return output


class Backend:
    """A backend with vLLM's methods."""

    @staticmethod
    def get_name() -> str:
        return "FAKE"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def is_mla(cls) -> bool:
        return False


class LatentBackend(Backend):
    """A backend of latent attention."""

    @classmethod
    def is_mla(cls) -> bool:
        return True


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
    run(record_backend(Backend, checks, VLLM_READER), shape, **given)
    checks.finish()
    assert checks.is_on and checks.findings == []
    assert checks.checked["steps"] == 12
    assert checks.checked["rows"] == checks.checked["writes"] == 4 + 11


def test_a_window_that_is_one_key_too_wide_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Impl, "extra_keys", 1)
    checks = recorder(tmp_path)
    run(record_backend(Backend, checks, VLLM_READER), "halves", window=6)
    assert [each.law for each in checks.findings] == ["attention"]


def test_a_scale_that_the_write_drops_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Impl.do_kv_cache_update

    def drop(self: Impl, layer: Any, *rest: Tensor) -> None:
        one = types.SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
        update(self, one, *rest)

    monkeypatch.setattr(Impl, "do_kv_cache_update", drop)
    checks = recorder(tmp_path)
    run(record_backend(Backend, checks, VLLM_READER), "packed", kv_cache_dtype="fp8")
    assert [each.law for each in checks.findings] == ["cache write"]


def test_the_metadata_of_a_capture_are_not_a_step(tmp_path: Path) -> None:
    checks = recorder(tmp_path)
    recorded = record_backend(Backend, checks, VLLM_READER)
    builder = recorded.get_builder_cls()(FullAttentionSpec(), ["a"], None, "cpu")
    common = REFERENCE.build_common_attn_metadata([1], [5], [[7, 2]], BLOCK)
    builder.build_for_cudagraph_capture(common)
    assert checks.step == 0 and checks.is_on
    builder.build(0, common)
    assert checks.step == 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a module with the names of vLLM's registry."""
    module = types.ModuleType(recorder_vllm.REGISTRY)
    paths: dict[str, str] = {}

    class AttentionBackendEnum(enum.Enum):
        FAKE = f"{__name__}.Backend"
        LATENT = f"{__name__}.LatentBackend"
        CUSTOM = ""

        def get_path(self) -> str:
            path = paths.get(self.name, self.value)
            if not path:
                raise ValueError("must be registered before use")
            return path

    module.AttentionBackendEnum = AttentionBackendEnum
    module.register_backend = lambda member, path: paths.__setitem__(member.name, path)
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, recorder_vllm.REGISTRY, module)
    monkeypatch.setattr(recorder_vllm, "_PATHS", {})
    monkeypatch.setattr(recorder_vllm, "_RECORDED", {})
    return module


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


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
    run(recorded, "halves")
    assert recorded.recorder.checked["steps"] == 12
    assert recorded.recorder.findings == []


def test_latent_backends_are_left_as_they_are(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    recorder_vllm.record_vllm_backends()
    member = registry.AttentionBackendEnum.LATENT
    assert resolve(member.get_path()) is LatentBackend


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

"""A worker of vLLM as the recorder wraps it, with generated classes."""

import abc
import enum
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import split_layer_cache
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder.wrappers import vllm as recorder_vllm
from pagetwin.recorder.wrappers import vllm_schedule
from pagetwin.recorder.wrappers.vllm import VllmReader
from pagetwin.recorder.wrappers.vllm_schedule import WorkerSteps

LAYERS = ["a", "b", "model.layers.0.attn"]
"""The layers of each group of a worker."""


class Worker:
    """Has the attributes of vLLM's worker wrapper that are read; a step is a function."""

    def __init__(self, *specs: Any, has_drafts: bool = False) -> None:
        groups = [
            SimpleNamespace(kv_cache_spec=spec, layer_names=LAYERS) for spec in specs
        ]
        caches = SimpleNamespace(kv_cache_groups=groups)
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(kv_cache_config=caches),
            vllm_config=SimpleNamespace(
                speculative_config=object() if has_drafts else None,
                scheduler_config=SimpleNamespace(async_scheduling=True),
            ),
        )
        self.run = lambda output: None

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.run(scheduler_output)


def scheduler_output(
    new: dict[str, tuple[int, list[int]]] | None = None,
    cached: dict[str, tuple[int, list[int] | None]] | None = None,
    scheduled: dict[str, int] | None = None,
    resumed: Any = (),
    freed: Any = (),
) -> Any:
    """Return an object with the fields of vLLM's `SchedulerOutput`.

    Args:
        new, cached: computed tokens and new blocks of each request.
        scheduled: new tokens of each request.
        resumed, freed: names of requests.
    """
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=done, block_ids=(ids,))
            for name, (done, ids) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[done for done, _ in cached.values()],
            new_block_ids=[
                None if ids is None else (ids,) for _, ids in cached.values()
            ],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled or {},
        finished_req_ids=set(freed),
        preempted_req_ids=None,
    )


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
    worker = types.ModuleType(vllm_schedule.WORKER)
    worker.WorkerWrapperBase = type("WorkerWrapperBase", (Worker,), {})
    monkeypatch.setitem(sys.modules, vllm_schedule.WORKER, worker)
    monkeypatch.setattr(recorder_vllm, "STEPS", WorkerSteps())
    for name in (
        *("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"),
        "vllm.v1.worker",
    ):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, recorder_vllm.REGISTRY, module)
    monkeypatch.setattr(recorder_vllm, "_PATHS", {})
    monkeypatch.setattr(recorder_vllm, "_RECORDED", {})
    return module


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


REFERENCE = load_implementation("reference")


HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 8, 16, 12


READER = VllmReader(WorkerSteps())


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
        caches = split_layer_cache(kv_cache, SIZE, self.kv_cache_dtype)
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
            *split_layer_cache(kv_cache, SIZE, self.kv_cache_dtype),
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


class Backend(metaclass=abc.ABCMeta):  # noqa: B024
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
    """A backend of latent attention, whose layers have no `forward_mqa`."""

    @classmethod
    def is_mla(cls) -> bool:
        return True

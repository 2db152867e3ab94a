"""The start of the vLLM plugin: imports, registration, capabilities, settings, warm-up."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_vllm import VERSIONS, fake_vllm
from support.vllm_steps import EngineSteps, vllm_config

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
HOPPER = SimpleNamespace(major=9, minor=0)


@pytest.fixture(params=[OLDEST, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """The oldest and the newest interface."""
    with fake_vllm(request.param):
        yield request.param


def test_importing_the_plugin_imports_neither_vllm_nor_triton() -> None:
    program = (
        "import sys, logging; before = dict(logging.root.manager.loggerDict)\n"
        "import pagetwin.integrations.vllm\n"
        "print(sorted({'vllm', 'triton', 'transformers'} & set(sys.modules)))\n"
        "print(logging.getLogger('pagetwin').level, logging.root.handlers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[]", "0 []"]


def test_registration_may_happen_in_every_process_and_twice(version: str) -> None:
    from pagetwin.integrations.vllm import plugin
    from vllm.v1.attention.backends import registry

    plugin.register()
    plugin.register()
    member = registry.AttentionBackendEnum["CUSTOM"]
    path = registry.registered[member]
    module, _, name = path.rpartition(".")
    backend = getattr(sys.modules[module], name)
    assert backend.__name__ == "PagetwinBackend"
    # vLLM looks the name of a backend up among its own
    assert registry.AttentionBackendEnum[backend.get_name()] is member
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        plugin.Other  # noqa: B018


@pytest.mark.parametrize("folder", ["", "/tmp/cases"])
def test_registration_records_the_backends_if_the_environment_names_a_folder(
    version: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetwin.integrations.vllm import plugin
    from pagetwin.recorder.wrappers import vllm as wrapper

    calls: list[str] = []
    monkeypatch.setenv("PAGETWIN_RECORD", folder)
    monkeypatch.setattr(wrapper, "record_vllm_backends", lambda: calls.append("call"))
    plugin.register()
    assert calls == (["call"] if folder else [])


@pytest.mark.parametrize("configured", [False, True])
def test_messages_appear_in_the_log_of_vllm_unless_the_user_configured_them(
    version: str, configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM configures its own loggers alone, so no message of level INFO was seen."""
    from pagetwin.integrations.vllm import plugin

    ours, theirs = logging.getLogger("pagetwin"), logging.getLogger("vllm")
    handler, own = logging.NullHandler(), logging.NullHandler()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(ours, "handlers", [own] if configured else [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(theirs, "propagate", False)
    monkeypatch.setattr(theirs, "level", logging.INFO)
    for _ in range(2):
        plugin.register()
    assert ours.handlers == ([own] if configured else [handler])
    assert ours.level == (logging.NOTSET if configured else logging.INFO)
    assert ours.propagate == configured


@pytest.mark.sample(3)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_with_latent_attention_gets_the_backend_for_it(version: str) -> None:
    for use_mla, name in ((False, "PagetwinBackend"), (True, "PagetwinLatentBackend")):
        with fake_vllm(version, use_mla):
            from pagetwin.integrations.vllm.plugin import choose_backend

            assert choose_backend().__name__ == name
            assert choose_backend().get_name() == "CUSTOM"


def why_not(backend: Any, **changes: Any) -> str | None:
    """Return what `supports_combination` says of a common layer with changes."""
    layer: dict[str, Any] = dict(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=True,
        use_sparse=False,
        use_mm_prefix=False,
        device_capability=HOPPER,
    )
    return backend.supports_combination(*(layer | changes).values())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 1280}, "head_size = 1280: expected 1 to 1024"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype = float16: expected auto"),
        (
            {"kv_cache_dtype": "ultraquant_4bit"},
            "kv_cache_dtype = ultraquant_4bit: expected auto, ",
        ),
        (
            {"device_capability": SimpleNamespace(major=7, minor=5)},
            "compute capability 7.5: expected 8.0 or newer",
        ),
        ({"use_sparse": True}, "use_sparse: expected dense attention"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_be_served_is_rejected_with_the_reason(
    version: str, changes: Any, reason: str
) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    assert reason in (why_not(choose_backend(), **changes) or "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_common_layers_are_not_rejected(version: str, dtype: torch.dtype) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    backend = choose_backend()
    assert dtype in backend.supported_dtypes
    for head_size in (64, 96, 128, 192, 256):
        for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
            assert name in backend.supported_kv_cache_dtypes
            given = {"head_size": head_size, "dtype": dtype, "kv_cache_dtype": name}
            assert why_not(backend, **given) is None
    kinds = ("decoder", "encoder", "encoder_only", "encoder_decoder")
    assert all(map(backend.supports_attn_type, kinds))
    assert not backend.supports_attn_type("other")
    assert backend.supports_sink() and backend.supports_sliding_window()
    assert backend.supports_mm_prefix() and backend.supports_rswa()
    assert why_not(backend, use_mm_prefix=True, kv_cache_dtype="fp8") is None
    assert backend.supports_non_causal() and backend.supports_batch_invariance()
    assert backend.supports_compute_capability(HOPPER)
    assert not backend.supports_compute_capability(SimpleNamespace(major=7, minor=5))


@pytest.mark.parametrize("use_mla", [False, True], ids=["paged", "latent"])
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_prefill_context_parallelism_is_rejected(version: str, use_mla: bool) -> None:
    with fake_vllm(version, use_mla):
        from pagetwin.integrations.vllm.plugin import choose_backend

        impl = choose_backend().get_impl_cls()
        on_two_ranks = type("OnTwoRanks", (impl,), {"pcp_world_size": 2})
        with pytest.raises(NotImplementedError, match="pcp_world_size = 2: expected 1"):
            on_two_ranks(4, 32, 1.0, 1, None, None, "auto", None, "decoder", None)


def test_only_the_optimized_twin_is_captured(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetwin.integrations.vllm.builder import PagetwinMetadataBuilder as Builder

    assert Builder.get_cudagraph_support(None, None).name == "UNIFORM_BATCH"
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")
    assert Builder.get_cudagraph_support(None, None).name == "NEVER"


def test_a_setting_that_cannot_be_read_is_an_error(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetwin.integrations.vllm.settings import read_settings

    monkeypatch.setenv("PAGETWIN_VLLM_WARM_UP", "yes")
    with pytest.raises(ValueError, match="PAGETWIN_VLLM_WARM_UP = 'yes': expected 0"):
        read_settings()
    monkeypatch.setenv("PAGETWIN_VLLM_WARM_UP", "0")
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "no.such.package")
    with pytest.raises(
        ValueError, match=r"^PAGETWIN_VLLM_IMPLEMENTATION: .*no\.such\.package.*cannot"
    ):
        EngineSteps(version)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the host")
def test_batch_invariance_reaches_the_kernels(version: str) -> None:
    import vllm.envs

    vllm.envs.VLLM_BATCH_INVARIANT = True
    steps = EngineSteps(version)
    assert steps.step((20, 3, 1)) <= 1
    assert all(option.batch_invariant for option in steps.impl._options.values())
    assert not steps.impl.takes_cascade


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs with which the optimized twin is warmed up; nothing is compiled."""
    import pagetwin.optimized

    specs: list[Any] = []

    def warm_up(spec: Any) -> tuple[str, ...]:
        specs.append(spec)
        return ("kernel",)

    monkeypatch.setattr(pagetwin.optimized, "warm_up", warm_up)
    return specs


def start(steps: EngineSteps, drafts: int = 0) -> None:
    """Run what vLLM does at its start: a dummy run without, and one with a cache."""
    config = vllm_config({"layer": steps.layer}, drafts)
    type(steps.builder)(None, ["layer"], config, torch.device("cpu"))
    query = steps._rows(steps.heads, 2)
    for cache in (torch.empty(0), steps.cache):
        steps.impl.forward(
            steps.layer, query, None, None, cache, None, torch.empty_like(query)
        )


def test_kernels_are_compiled_in_the_first_run_that_has_a_cache(
    version: str, warmed: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    steps = EngineSteps(version, sliding_window=9)
    with caplog.at_level(logging.INFO):
        start(steps)
    (spec,) = warmed
    assert spec.key_cache.data_ptr() == steps.cache.data_ptr()
    bounds = (spec.max_num_reqs, spec.max_query_len, spec.max_seq_len)
    assert bounds == (4, 48, 96)
    assert spec.num_query_heads == 4 and spec.scale == steps.impl.scale
    assert [option.sliding_window for option in spec.options] == [9]
    assert "warm-up: 1 kernels of layers with 4 query heads" in caplog.text


def test_the_kernels_of_cascades_are_compiled_where_vllm_may_ask_for_them(
    version: str, warmed: list[Any]
) -> None:
    """To 0.31, with prefix caching. The first shared prefix compiled them in a request."""
    for window, is_on in ((None, False), (None, True), (9, True)):
        steps = EngineSteps(version, sliding_window=window, head_size=48)
        steps.config.model_config.disable_cascade_attn = not is_on
        steps.config.cache_config = SimpleNamespace(enable_prefix_caching=True)
        type(steps.builder)(None, ["layer"], steps.config, torch.device("cpu"))
        query = steps._rows(steps.heads, 2)
        out = torch.empty_like(query)
        steps.impl.forward(steps.layer, query, None, None, steps.cache, None, out)
    found = [spec.cascades for spec in warmed]
    assert found == ([False, True, False] if version == OLDEST else [False, False])


def test_layers_of_one_kind_are_warmed_up_once(version: str, warmed: list[Any]) -> None:
    for window in (9, 9, 5):
        start(EngineSteps(version, sliding_window=window))
    assert [spec.options[0].sliding_window for spec in warmed] == [9, 5]


def test_layers_that_differ_in_options_are_warmed_up_together(
    version: str, warmed: list[Any]
) -> None:
    """Each warm-up compiles in threads; one of all kinds leaves fewer of them idle."""
    of_windows = [EngineSteps(version, sliding_window=window) for window in (9, 9, 5)]
    other = EngineSteps(version, sliding_window=7, head_size=64)
    steps = dict(enumerate([*of_windows, other]))
    layers = {str(name): step.layer for name, step in steps.items()}
    config = vllm_config(layers | {"mlp": object()})
    type(other.builder)(None, list(layers), config, torch.device("cpu"))
    for step in steps.values():
        query = step._rows(step.heads, 2)
        out = torch.empty_like(query)
        step.impl.forward(step.layer, query, None, None, step.cache, None, out)
    found = [[of.sliding_window for of in spec.options] for spec in warmed]
    assert found == [[9, 5], [7]]
    assert all(step.impl.engine_layers == () for step in steps.values())


def test_a_layer_is_warmed_up_in_the_format_of_its_cache(
    version: str, warmed: list[Any]
) -> None:
    """FP8 with one scale and with a scale per token and head have the same dtype."""
    names = (
        *("fp8", "fp8_per_token_head", "int4_per_token_head"),
        *("int4_per_token_head_vllm", "nvfp4"),
    )
    layers = [EngineSteps(version, kv_cache_dtype=name, head_size=48) for name in names]
    for steps in layers:
        start(steps)
        assert steps.step((3, 1, 1)) <= 1
    assert [spec.kv_cache_dtype for spec in warmed] == [None, *names[1:]]
    shapes = [tuple(spec.options[0].k_scale.shape) for spec in warmed]
    slots = [tuple(spec.key_cache.shape[:3]) for spec in warmed[1:]]
    assert shapes == [(), *slots[:-1], (*slots[-1], 3)]
    assert warmed[-1].options[0].k_global_scale == 0.5


def test_encoders_and_engines_that_opt_out_are_not_warmed_up(
    version: str, warmed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(EngineSteps(version, attn_type="encoder_only"))
    monkeypatch.setenv("PAGETWIN_VLLM_WARM_UP", "0")
    start(EngineSteps(version))
    monkeypatch.setenv("PAGETWIN_VLLM_WARM_UP", "1")
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")
    start(EngineSteps(version))
    assert warmed == []


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the host")
@pytest.mark.parametrize("name", ["auto", "int4_per_token_head", "nvfp4"])
def test_a_real_warm_up_launches_and_changes_no_slot(version: str, name: str) -> None:
    steps = EngineSteps(version, head_size=16, kv_cache_dtype=name)
    assert steps.step((20, 3, 1)) <= 1
    before = steps.cache.clone()
    start(steps)
    assert torch.equal(steps.cache.nan_to_num(7), before.nan_to_num(7))
    assert steps.step((1, 1, 1)) <= 1

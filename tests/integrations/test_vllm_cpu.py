"""The vLLM plugin on vLLM's platform for CPUs, which ignores the choice of a backend by itself."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.optimized.runtime import chip
from support.fake_vllm import VERSIONS, fake_vllm

PLAIN_PATH = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


class CpuPlatform:
    """Has the methods of vLLM's class that the plugin uses."""

    def is_cpu(self) -> bool:
        return True

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> str:
        return PLAIN_PATH


class Selection(SimpleNamespace):
    """What vLLM knows of a layer when it chooses its backend."""

    def _asdict(self) -> dict[str, Any]:
        return dict(vars(self))


def selection(**changes: Any) -> Selection:
    """Return a common layer with changes."""
    given: dict[str, Any] = dict(
        head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=16
    )
    return Selection(**(given | changes))


def validate(cls: Any, device_capability: Any, **given: Any) -> list[str]:
    """As vLLM's `validate_configuration`, of which the stand-in has the signature alone."""
    rest = dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix"), False)
    reasons = [
        cls.supports_combination(**(rest | given), device_capability=device_capability)
    ]
    if not cls.supports_compute_capability(device_capability):
        reasons.append("compute capability not supported")
    return [reason for reason in reasons if reason is not None]


@pytest.fixture(params=[VERSIONS[0], VERSIONS[-1]])
def platform(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[CpuPlatform]]:
    """The platform of an engine whose plugins are loaded."""
    with fake_vllm(request.param):
        from pagetwin.integrations.vllm import backend, plugin

        monkeypatch.setattr(
            backend.PagetwinBackend, "validate_configuration", classmethod(validate)
        )
        mine = type("CpuPlatform", (CpuPlatform,), {})
        platforms: ModuleType = sys.modules["vllm.platforms"]
        monkeypatch.setattr(platforms, "current_platform", mine())
        plugin.register()
        plugin.register()
        yield mine


def choose(platform: type[CpuPlatform], name: str | None, **changes: Any) -> str:
    """Return the path of the backend that an engine gets."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    selected = None if name is None else AttentionBackendEnum[name]
    return platform.get_attn_backend_cls(selected, selection(**changes), num_heads=4)


def test_the_chosen_backend_is_taken(platform: type[CpuPlatform]) -> None:
    """vLLM's platform served the model with CPU_ATTN, and said so at level INFO alone."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = choose(platform, "CUSTOM")
    assert path == "pagetwin.integrations.vllm.plugin.Backend"
    if hasattr(AttentionBackendEnum, "register"):
        path = choose(platform, "PAGETWIN")
        assert path == "pagetwin.integrations.vllm.plugin.NamedBackend"


def test_another_packages_backend_is_left_to_the_platform(
    platform: type[CpuPlatform],
) -> None:
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum["CUSTOM"], "other.package.Backend")
    assert choose(platform, "CUSTOM") == PLAIN_PATH


@pytest.mark.parametrize("name", [None, "FLASH_ATTN"])
def test_other_choices_are_those_of_vllm(
    platform: type[CpuPlatform], name: str | None
) -> None:
    assert choose(platform, name) == PLAIN_PATH


def test_a_layer_that_cannot_be_served_is_rejected_with_the_reason(
    platform: type[CpuPlatform],
) -> None:
    with pytest.raises(ValueError, match="head_size = 1280: expected 1 to 1024"):
        choose(platform, "CUSTOM", head_size=1280)


def test_kernels_without_a_gpu_are_rejected_with_what_helps(
    platform: type[CpuPlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chip, "INTERPRETED", False)
    chip.why_no_device.cache_clear()
    expected = (
        "device = cpu: expected cuda.*TRITON_INTERPRET=1"
        ".*PAGETWIN_VLLM_IMPLEMENTATION=reference"
    )
    with pytest.raises(ValueError, match=expected):
        choose(platform, "CUSTOM")
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")
    assert choose(platform, "CUSTOM").endswith(".Backend")
    chip.why_no_device.cache_clear()


def test_a_platform_with_a_gpu_is_left_alone() -> None:
    class Cuda(CpuPlatform):
        def is_cpu(self) -> bool:
            return False

    with fake_vllm(VERSIONS[-1]):
        from pagetwin.integrations.vllm import plugin

        plain = Cuda.get_attn_backend_cls.__func__
        sys.modules["vllm.platforms"].current_platform = Cuda()  # type: ignore[attr-defined]
        plugin.register()
        assert Cuda.get_attn_backend_cls.__func__ is plain

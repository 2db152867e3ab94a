"""Backends: which one is selected, why one cannot run, and what each one declares."""

import importlib
import platform
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.cache_formats import TENSOR_SCALE_DTYPES
from pagetwin.contract.kinds import AttentionType
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.metadata_classes import PagedAttentionMetadata
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.engine.capabilities import (
    Capabilities,
    MultipleOf,
    select_common_block_size,
)
from pagetwin.engine.placeholder_backend import PlaceholderAttentionBackend
from pagetwin.engine.selector import (
    backend_names,
    backends_that_can_run,
    choose_backend_name,
    get_attn_backend,
    load_backend,
)
from pagetwin.reference import use_cascade_attention

pytestmark = pytest.mark.quick

SPEC = KVCacheSpec(16, 2, 64, torch.float16)
VARIABLE = "PAGETWIN_ATTENTION_BACKEND"
REFERENCE = load_backend("REFERENCE")


def test_the_argument_beats_the_environment_and_that_the_configuration(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert get_attn_backend(None, SPEC, device, "REFERENCE").name == "REFERENCE"
    monkeypatch.setenv(VARIABLE, "TRITON")
    assert get_attn_backend(None, SPEC, device, "REFERENCE").name == "TRITON"
    assert get_attn_backend("REFERENCE", SPEC, device).name == "REFERENCE"


def test_a_later_choice_counts(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """vLLM remembers its answer for these arguments, whatever is asked for afterwards."""
    for name in ("TRITON", "REFERENCE", "TRITON"):
        monkeypatch.setenv(VARIABLE, name)
        assert get_attn_backend(None, SPEC, device).name == name


def test_no_backend_replaces_the_one_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose_backend_name() is None
    with pytest.raises(ValueError, match="backend = None") as caught:
        get_attn_backend(None, SPEC, device)
    able = ", ".join(backends_that_can_run(SPEC, device))
    assert str(caught.value).endswith(f"What can run here: {able}")
    assert "REFERENCE" in able


def test_an_unknown_name_is_rejected_with_its_origin(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv(VARIABLE, "FLASH")
    words = re.escape(f"{VARIABLE} = 'FLASH': expected one of REFERENCE, TRITON, XFO")
    with pytest.raises(ValueError, match=words):
        get_attn_backend(None, SPEC, device, "REFERENCE")
    with pytest.raises(ValueError, match=r"^backend = 'triton'"):
        get_attn_backend("triton", SPEC, device)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match="configured backend = 'FLASH'"):
        get_attn_backend(None, SPEC, device, "FLASH")


def test_a_model_without_attention_gets_a_placeholder(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv(VARIABLE, "no such backend")
    backend = get_attn_backend(None, SPEC, device, is_attention_free=True)
    assert backend is PlaceholderAttentionBackend
    assert backend.get_name() == "NO_ATTENTION"
    assert not backend.validate_configuration(SPEC, device)
    for ask in ("get_impl_cls", "get_metadata_cls", "get_builder_cls"):
        with pytest.raises(NotImplementedError, match="the model is attention-free"):
            getattr(backend, ask)()
    with pytest.raises(NotImplementedError, match="NO_ATTENTION has no cache"):
        backend.get_kv_cache_shape(1, 16, 1, 64)


# ---- what a backend can do


sizes = st.lists(
    st.one_of(st.integers(1, 64), st.builds(MultipleOf, st.integers(1, 64))), max_size=3
)


@given(supported=sizes, block_size=st.integers(1, 300))
def test_a_block_is_taken_if_it_can_be_cut_into_blocks_of_the_kernel(
    supported: list[int | MultipleOf], block_size: int
) -> None:
    class Backend(REFERENCE):
        supported_kernel_block_sizes = tuple(supported)

    bases = [size if isinstance(size, int) else size.base for size in supported]
    cuts = [base for base in bases if block_size in range(base, 301, base)]
    assert Backend.supports_block_size(block_size) == (bool(cuts) or not bases)
    assert Backend.supports_block_size(None)
    preferred = Backend.get_preferred_block_size(block_size)
    assert preferred == (block_size if cuts or not bases else min(bases))
    assert Backend.supports_block_size(preferred)


@given(lists=st.lists(sizes, min_size=1, max_size=3), block_size=st.integers(1, 130))
def test_backends_that_share_blocks_read_the_largest_part_they_all_read(
    lists: list[list[int | MultipleOf]], block_size: int
) -> None:
    backends = [
        type(
            "Backend",
            (REFERENCE,),
            {"supported_kernel_block_sizes": tuple(own_sizes)},
        )
        for own_sizes in lists
    ]

    def is_read_by_all(size: int) -> bool:
        return all(
            not own_sizes
            or size in own_sizes
            or any(isinstance(x, MultipleOf) and size % x.base == 0 for x in own_sizes)
            for own_sizes in lists
        )

    parts = [n for n in range(1, block_size + 1) if block_size % n == 0]
    able = [size for size in parts if is_read_by_all(size)]
    if able:
        assert select_common_block_size(block_size, backends) == max(able)
    else:
        with pytest.raises(ValueError, match=f"block_size = {block_size}: expected a"):
            select_common_block_size(block_size, backends)


@pytest.mark.parametrize("name", backend_names())
def test_what_a_backend_says_it_takes_is_what_it_accepts(name: str) -> None:
    backend = load_backend(name)
    for block_size in (1, 8, 16, 24, 32):
        spec = KVCacheSpec(block_size, 2, 64, torch.float16)
        rejected = [
            reason
            for reason in backend.validate_configuration(spec, "cuda")
            if "block_size" in reason
        ]
        assert backend.supports_block_size(block_size) == (not rejected)
    for head_size in (20, 32, 64, 257, 1025):
        spec = KVCacheSpec(16, 2, head_size, torch.float16)
        rejected = [
            reason
            for reason in backend.validate_configuration(spec, "cuda")
            if "head_size" in reason
        ]
        assert backend.supports_head_size(head_size) == (not rejected)
    for dtype in (torch.float16, torch.float32, torch.float64, torch.uint8):
        spec = KVCacheSpec(16, 2, 64, dtype)
        rejected = [
            reason
            for reason in backend.validate_configuration(spec, "cuda")
            if "dtype" in reason
        ]
        assert backend.supports_dtype(dtype) == (not rejected)
        cache_dtype = str(dtype).removeprefix("torch.")
        assert backend.supports_kv_cache_dtype(cache_dtype) == (not rejected)
    assert backend.supports_kv_cache_dtype("auto")
    assert backend.supports_kv_cache_dtype(None)
    for quantised in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert backend.supports_kv_cache_dtype(quantised)
    assert not backend.supports_kv_cache_dtype("int4")
    for kind in AttentionType:
        assert backend.supports_attn_type(kind)
    assert not backend.supports_attn_type("sideways")
    assert not Capabilities.supports_kv_cache_dtype("fp8")
    assert not Capabilities.supports_attn_type(AttentionType.ENCODER_ONLY)


@pytest.mark.parametrize("name", backend_names())
def test_an_option_is_supported_if_layers_have_an_argument_of_that_name(
    name: str,
) -> None:
    backend = load_backend(name)
    for option, query_of_interface in (
        ("sliding_window", backend.supports_sliding_window),
        ("sinks", backend.supports_sink),
    ):
        assert query_of_interface() == backend.supports_option(option)
    assert backend.supports_option("num_kv_heads")
    assert not backend.supports_option("no_such_option")


def test_a_layer_of_its_own_memory_is_in_the_order_of_the_layout() -> None:
    order = REFERENCE.get_kv_cache_stride_order
    assert order(KVCacheLayout.NHD) == (0, 1, 2, 3, 4)
    assert order(KVCacheLayout.HND) == (0, 1, 3, 2, 4)
    assert order(KVCacheLayout.LHBNC) == (0, 3, 1, 2, 4)
    for layout in KVCacheLayout:
        if not layout.is_layer_compact:
            with pytest.raises(ValueError, match=f"layout = {layout.name}"):
                order(layout)


def test_a_block_size_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="base = 0: expected at least 1"):
        MultipleOf(0)
    with pytest.raises(ValueError, match="block_size = 0: expected at least 1"):
        load_backend("XFORMERS").supports_block_size(0)


def test_a_backend_that_can_run_is_returned(
    device: torch.device, xformers: None
) -> None:
    for name in ("REFERENCE", "TRITON", "XFORMERS"):
        assert get_attn_backend(name, SPEC, device) is load_backend(name)
        assert load_backend(name).get_name() == name


@pytest.mark.parametrize(
    ("name", "spec", "why", "able"),
    [
        ("XFORMERS", KVCacheSpec(24, 2, 64, torch.float16), "block_size = 24", True),
        ("XFORMERS", KVCacheSpec(16, 2, 20, torch.float16), "head_size = 20", True),
        ("XFORMERS", KVCacheSpec(16, 2, 64, torch.float32), "torch.float32", True),
        ("TRITON", KVCacheSpec(16, 2, 1025, torch.float16), "head_size = 1025", False),
        ("TRITON", KVCacheSpec(16, 2, 64, torch.float64), "torch.float64", False),
    ],
)
def test_a_backend_that_cannot_run_says_why_and_what_can(
    name: str, spec: KVCacheSpec, why: str, able: bool, device: torch.device
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        get_attn_backend(name, spec, device)
    message = str(caught.value)
    assert message.startswith(f"backend {name} cannot run here: ")
    assert message.endswith(f"What can: REFERENCE{', TRITON' if able else ''}")


def test_an_unknown_backend_is_rejected(device: torch.device) -> None:
    words = "backend = 'FLASH': expected one of REFERENCE, TRITON, XFORMERS"
    with pytest.raises(ValueError, match=words):
        get_attn_backend("FLASH", SPEC, device)


def test_xformers_is_never_replaced_silently(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not installed, the error says what to install."""
    from pagetwin.optimized.backends import xformers_split_k as _xformers

    monkeypatch.setitem(sys.modules, "xformers", None)
    _xformers.why_no_xformers.cache_clear()
    try:
        with pytest.raises(ValueError, match="xFormers is not installed") as caught:
            get_attn_backend("XFORMERS", SPEC, device)
        message = str(caught.value)
        assert "expected xformers 0.0.35" in message
        assert "pip install 'pagetwin[xformers]' installs it" in message
        assert message.endswith("What can: REFERENCE, TRITON")
    finally:
        monkeypatch.undo()
        _xformers.why_no_xformers.cache_clear()


def test_xformers_on_another_machine_is_not_said_to_be_installable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pip's marker leaves it out there, so the extra would install nothing."""
    from pagetwin.optimized.backends.xformers_split_k import what_fits

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "(here: Linux on aarch64)" in what_fits()
    assert "pip install" not in what_fits()


def test_xformers_beside_triton_3_9_is_rejected_with_the_reason(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operator failed at the first launch, since triton 3.9 has no block pointers."""
    from pagetwin.optimized.backends import xformers_split_k as _xformers

    monkeypatch.setattr(_xformers, "find_spec", lambda name: "found")
    monkeypatch.setattr("triton.__version__", "3.9.0")
    _xformers.why_no_xformers.cache_clear()
    try:
        with pytest.raises(ValueError, match="block pointers"):
            get_attn_backend("XFORMERS", SPEC, device)
    finally:
        monkeypatch.undo()
        _xformers.why_no_xformers.cache_clear()


@pytest.mark.parametrize("name", ["REFERENCE", "TRITON", "XFORMERS"])
def test_a_layer_whose_heads_do_not_divide_is_rejected(name: str) -> None:
    words = "num_heads = 6 is not a multiple of num_kv_heads = 4"
    with pytest.raises(ValueError, match=words):
        load_backend(name).get_impl_cls()(6, 64, 1.0, 4)


def test_a_layer_of_an_unsupported_head_size_is_rejected() -> None:
    words = "head_size = 20: expected a multiple of 8 from 32 to 256; the TRITON"
    with pytest.raises(ValueError, match=words):
        load_backend("XFORMERS").get_impl_cls()(4, 20, 1.0, 4)


@pytest.mark.parametrize("name", backend_names())
def test_a_backend_takes_quantised_caches_and_says_once_what_it_does_not_take(
    name: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    if name == "XFORMERS":
        request.getfixturevalue("xformers")
    backend = load_backend(name)
    for dtype in TENSOR_SCALE_DTYPES:
        spec = KVCacheSpec(16, 2, 64, dtype)
        assert not backend.validate_configuration(spec, device)
    wrong = KVCacheSpec(16, 2, 64, torch.int8)
    (reason,) = backend.validate_configuration(wrong, device)
    assert reason.startswith("dtype = torch.int8: expected one of torch.float16")
    assert str(TENSOR_SCALE_DTYPES[0]) in reason


@pytest.mark.parametrize("name", backend_names())
def test_a_backend_names_its_own_classes(name: str) -> None:
    backend = load_backend(name)
    assert backend.get_name() == backend.name == name
    assert issubclass(backend.get_metadata_cls(), PagedAttentionMetadata)
    assert backend.get_kv_cache_shape(10, 16, 8, 64) == (2, 10, 16, 8, 64)
    for cls in (backend.get_impl_cls(), backend.get_builder_cls()):
        assert cls.__module__ == backend.__module__


@pytest.mark.parametrize("name", backend_names())
def test_a_backend_is_found_by_its_full_name(name: str) -> None:
    backend = load_backend(name)
    module, cls_name = backend.full_cls_name()
    assert getattr(importlib.import_module(module), cls_name) is backend


@pytest.mark.parametrize("name", backend_names())
def test_no_backend_reads_a_shared_prefix_once(name: str) -> None:
    """An engine that asks a builder calls it with these names, with and without ranks."""
    backend = load_backend(name)
    builder = backend.get_builder_cls()(SPEC, ["layer"], "cpu")
    given: dict[str, Any] = {
        "common_prefix_len": 4096,
        "query_lens": [1] * 64,
        "num_query_heads": 8,
        "num_kv_heads": 8,
        "use_alibi": False,
        "use_sliding_window": False,
        "use_local_attention": False,
        "num_sms": 132,
    }
    assert use_cascade_attention(**given)
    assert builder.use_cascade_attention(**given) is False
    assert builder.use_cascade_attention(**given, dcp_world_size=2) is False
    assert backend.use_cascade_attention(**given) is False

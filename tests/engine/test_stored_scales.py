"""Layers whose caches store the scales of their codes: specs, views, layers and errors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagetwin.contract.cache_formats import FORMATS, split_page
from pagetwin.contract.layer_pages import layer_format, split_half
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.operations import load_implementation
from pagetwin.contract.specs import (
    CacheConfig,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from pagetwin.engine.backend_groups import init_attn_backend
from pagetwin.engine.backend_interface import AttentionBackend
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend
from torch import Tensor

REFERENCE: Any = load_implementation("reference")
STORED = [name for name, form in FORMATS.items() if form.is_measured]
BLOCKS, SLOTS, HEADS, SIZE = 6, 16, 2, 32


def spec_of(name: str, **given: Any) -> KVCacheSpec:
    dtype = FORMATS[name].dtype
    assert dtype is not None
    return KVCacheSpec(SLOTS, HEADS, SIZE, dtype, kv_cache_dtype=name, **given)


# --- specs


@pytest.mark.parametrize("name", STORED)
def test_a_page_has_the_bytes_of_its_codes_and_scales(name: str) -> None:
    form, spec = FORMATS[name], spec_of(name)
    codes = form.elements(SIZE)
    scales = 2 if "nvfp4" in name else 4
    assert spec.stored_head_size == codes + scales
    assert spec.has_plain_cells
    bytes_of_page = form.page_bytes(SLOTS, HEADS, SIZE, SIZE, torch.float16)
    assert spec.page_size_bytes == bytes_of_page == SLOTS * HEADS * 2 * (codes + scales)
    other, half = spec_of(name, head_size_v=16), 1 if "nvfp4" in name else 4
    assert other.state_content_size_bytes == codes + scales + codes // 2 + half


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: replace(spec_of("int8_per_token_head"), kv_cache_dtype="fp8"),
            "kv_cache_dtype = 'fp8': expected None, or a format whose scales are stored in the"
            " page: int8_per_token_head, ",
        ),
        (
            lambda: replace(spec_of("int8_per_token_head"), dtype=torch.uint8),
            "dtype = torch.uint8 with kv_cache_dtype = 'int8_per_token_head': expected torch.int8",
        ),
        (
            lambda: replace(spec_of("int4_per_token_head"), head_size=20),
            "head_size = 20 with kv_cache_dtype = int4_per_token_head: expected a multiple of 8",
        ),
        (
            lambda: replace(spec_of("nvfp4"), head_size=24),
            "head_size = 24 with kv_cache_dtype = nvfp4: expected a multiple of 16, the channels",
        ),
        (
            lambda: MLAAttentionSpec(
                SLOTS, 1, 64, torch.int8, kv_cache_dtype="int8_per_token_head"
            ),
            "kv_cache_dtype = 'int8_per_token_head' of a latent: expected None",
        ),
    ],
)
def test_a_page_that_does_not_fit_is_rejected(
    make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(ValueError) as raised:
        make()
    assert str(raised.value).startswith(words)


# --- views


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=str)
@pytest.mark.parametrize("name", STORED)
def test_one_allocation_for_all_layers_has_vllms_pages(
    name: str, layout: KVCacheLayout
) -> None:
    """The bytes of a slot and head are key codes, key scales, value codes, value scales."""
    spec, form = spec_of(name), FORMATS[name]
    raw = torch.randint(0, 127, (3 * BLOCKS * spec.page_size_bytes,), dtype=torch.int8)
    caches = REFERENCE.reshape_layered_kv_cache(raw, spec, 3, layout)
    shape = [3, 2, BLOCKS, SLOTS, HEADS, spec.stored_head_size]
    assert list(caches.shape) == shape and caches.dtype == form.dtype
    for cache in caches:
        key, _value = cache.view(torch.uint8)
        # the value of a slot and head is stored after its key
        pages = key.as_strided(
            (*key.shape[:3], 2 * shape[-1]), key.stride(), key.storage_offset()
        )
        parts = split_page(pages, SIZE, SIZE, form)
        found = [
            part
            for half in (cache[0], cache[1])
            for part in split_half(half, SIZE, SIZE, form)
        ]
        key_codes, value_codes, k_scale, v_scale = parts
        expected = [key_codes, k_scale, value_codes, v_scale]
        for own, other in zip(found, expected, strict=True):
            assert own.data_ptr() == other.data_ptr() and own.stride() == other.stride()


def test_a_cache_with_gaps_between_its_bytes_is_rejected() -> None:
    form = FORMATS["int8_per_token_head"]
    wide = torch.zeros(4, 16, 2, 39, dtype=torch.int8)
    for half in (wide[..., :36], torch.zeros(4, 16, 2, 72, dtype=torch.int8)[..., ::2]):
        with pytest.raises(ValueError, match="expected scales at multiples of 4 bytes"):
            split_half(half, 32, 32, form)


# --- layers


def make_layers(name: str, backend: str, **given: Any) -> dict[str, Attention]:
    layers: dict[str, Attention] = {}
    for index in range(2):
        Attention(
            4, SIZE, SIZE**-0.5, HEADS, cache_config=CacheConfig(cache_dtype=name),
            prefix=f"layers.{index}.attn", attn_backend=load_backend(backend),
            static_forward_context=layers, **given,
        )  # fmt: skip
    return layers


def run(layers: dict[str, Attention], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the outputs of a prompt, and of decodes beside another prompt."""
    specs = REFERENCE.get_kv_cache_spec(layers, SLOTS, dtype)
    spec = next(iter(specs.values()))
    groups = [KVCacheGroupSpec(specs, spec)]
    tensors = [KVCacheTensor(BLOCKS * spec.page_size_bytes, [name]) for name in specs]
    backends, (group,) = init_attn_backend(groups, layers, "cpu")
    REFERENCE.init_kv_cache(layers, KVCacheConfig(BLOCKS, tensors, groups), backends)
    random, found = torch.Generator().manual_seed(2), []
    for new, computed, rows in (
        ([20], [0], [[3, 1]]),
        ([1, 5], [20, 0], [[3, 1], [5]]),
        ([1, 1], [21, 5], [[3, 1], [5]]),
    ):
        common = REFERENCE.build_common_attn_metadata(new, computed, rows, SLOTS)
        metadata = group.metadata_builder.build(0, common)
        tokens = torch.randn(sum(new), 4 + 2 * HEADS, SIZE, generator=random).to(dtype)
        parts = tokens.split([4, HEADS, HEADS], 1)
        for layer in layers.values():
            found.append(layer(*(part.flatten(1) for part in parts), metadata))
    return torch.cat(found)


@pytest.mark.parametrize("backend", ["REFERENCE", "TRITON"])
@pytest.mark.parametrize("name", STORED)
def test_the_layers_of_a_model_run_in_each_format(name: str, backend: str) -> None:
    """They took FP8 with one scale alone."""
    plain = run(make_layers("auto", "REFERENCE"))
    coded = run(make_layers(name, backend))
    off = float((coded - plain).norm() / plain.norm())
    most = {"int8": 0.01, "fp8_": 0.05, "int4": 0.15, "nvfp": 0.15}
    assert 1e-4 < off < most[name[:4]]
    torch.testing.assert_close(
        coded, run(make_layers(name, "REFERENCE")), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, FullAttentionSpec),
        ({"per_layer_sliding_window": 7}, SlidingWindowSpec),
        ({"attn_type": "encoder_decoder"}, CrossAttentionSpec),
    ],
)
def test_a_layer_asks_for_pages_of_its_format(given: Any, kind: type) -> None:
    layer = make_layers("int4_per_token_head", "REFERENCE", **given)["layers.0.attn"]
    spec = layer.get_kv_cache_spec(SLOTS, torch.bfloat16)
    assert type(spec) is kind and spec.dtype == torch.uint8
    assert spec.kv_cache_dtype == "int4_per_token_head" and spec.head_size == SIZE


def test_a_layer_that_shares_a_cache_needs_its_format() -> None:
    layers = make_layers("int8_per_token_head", "REFERENCE")
    with pytest.raises(ValueError, match="kv_cache_dtype = fp8 and shares the cache"):
        Attention(
            4, SIZE, 1.0, HEADS, cache_config=CacheConfig(cache_dtype="fp8"), prefix="other",
            attn_backend="REFERENCE", kv_sharing_target_layer_name="layers.0.attn",
            static_forward_context=layers,
        )  # fmt: skip


def test_scales_that_a_write_measures_are_not_measured_by_the_layer() -> None:
    config = CacheConfig(cache_dtype="int8_per_token_head", calculate_kv_scales=True)
    layer = Attention(
        4, SIZE, 1.0, HEADS, cache_config=config, attn_backend="REFERENCE"
    )
    assert not layer.calculate_kv_scales


def nvfp4_layer(**config: Any) -> Attention:
    return Attention(
        4, SIZE, SIZE**-0.5, HEADS, prefix="layers.0.attn", attn_backend="REFERENCE",
        cache_config=CacheConfig(cache_dtype="nvfp4", **config),
    )  # fmt: skip


def test_a_layer_multiplies_block_scales_by_its_own_scales() -> None:
    """Numbers too large for block scales alone are stored, by measured and by known scales."""
    errors, largest = {}, 3e4
    for kind in ("known", "measured", "neither"):
        layer = nvfp4_layer(calculate_kv_scales=kind == "measured")
        assert layer.calculate_kv_scales == (kind == "measured")
        if kind == "known":
            layer.load_kv_scales(largest / 2688, largest / 2688)
        spec = layer.get_kv_cache_spec(SLOTS, torch.float32)
        assert spec is not None and spec.kv_cache_dtype == "nvfp4"
        caches = torch.zeros(2, BLOCKS, SLOTS, HEADS, spec.stored_head_size).to(
            spec.dtype
        )
        layer.kv_cache = caches
        common = REFERENCE.build_common_attn_metadata([1], [0], [[3]], SLOTS)
        builder = layer.attn_backend.get_builder_cls()(spec, ["layers.0.attn"], "cpu")
        random = torch.Generator().manual_seed(6)
        query, value = (
            torch.randn(1, heads * SIZE, generator=random) for heads in (4, 2)
        )
        value *= largest / value.abs().max()
        out = layer(query, value, value, builder.build(0, common))
        told = value.view(HEADS, SIZE).repeat_interleave(4 // HEADS, 0).flatten()
        errors[kind] = float((out[0] - told).norm() / told.norm())
    assert errors["known"] < 0.15 and errors["measured"] < 0.15 < errors["neither"]


def test_block_scales_need_one_number_for_all_heads() -> None:
    layer = nvfp4_layer()
    with pytest.raises(
        ValueError, match=r"k_scale has shape \[2\]: expected \[\] or \[1\]"
    ):
        layer.load_kv_scales(torch.ones(HEADS), 1.0)
    width = SIZE // 2 + SIZE // 16
    caches = torch.zeros(2, BLOCKS, SLOTS, HEADS, width, dtype=torch.uint8)
    layer._v_scale_float = None
    words = (
        "layer has no number _v_scale_float: expected one for all heads, as .*'nvfp4'"
    )
    with pytest.raises(ValueError, match=words):
        layer.impl.layer_cache(layer, *caches, torch.float32)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("int4_per_token_head", {"head_size": 36}, "head_size = 36 .* a multiple of 8"),
        ("int8_per_token_head", {"head_size": 30}, "head_size = 30 .* a multiple of 4"),
        (
            "int4_per_token_head",
            {"head_size_v": 31},
            "head_size_v = 31 with kv_cache_dtype = 'int4_per_token_head': expected a multiple",
        ),
        (
            "nvfp4",
            {"head_size": 24},
            "head_size = 24 .* a multiple of 16, the channels",
        ),
        (
            "nvfp4_4over6",
            {"head_size_v": 24},
            "head_size_v = 24 .* a multiple of 16, the channels of a scale",
        ),
        ("nvfp4", {"use_mla": True}, "and use_mla: expected auto or an FP8"),
        (
            "int8_per_token_head",
            {"use_mla": True},
            "and use_mla: expected auto or an FP8",
        ),
        ("int5_per_token_head", {}, "expected auto, fp8, fp8_inc, fp8_e4m3, "),
    ],
)
def test_a_layer_that_no_page_holds_is_rejected(
    name: str, given: dict[str, Any], words: str
) -> None:
    config = CacheConfig(cache_dtype=name)
    sizes = {"head_size": SIZE} | given
    with pytest.raises(ValueError, match=words):
        Attention(
            4,
            scale=1.0,
            num_kv_heads=HEADS,
            cache_config=config,
            attn_backend="REFERENCE",
            **sizes,
        )


def test_an_encoder_that_stores_nothing_may_have_any_head_size() -> None:
    config = CacheConfig(cache_dtype="int4_per_token_head")
    Attention(
        4,
        33,
        1.0,
        HEADS,
        cache_config=config,
        attn_backend="REFERENCE",
        attn_type="encoder_only",
    )


def test_a_cache_of_another_width_is_rejected() -> None:
    layer = make_layers("int8_per_token_head", "REFERENCE")["layers.0.attn"]
    caches = torch.zeros(2, BLOCKS, SLOTS, HEADS, SIZE, dtype=torch.int8)
    words = "kv_cache has 32 elements per head .*: expected 36, the bytes of 32 codes and their"
    with pytest.raises(ValueError, match=words):
        layer.impl.layer_cache(layer, *caches, torch.float32)
    with pytest.raises(TypeError, match=r"kv_cache is torch\.uint8 and"):
        layer.impl.layer_cache(layer, *caches.view(torch.uint8), torch.float32)


class OtherBackend(load_backend("REFERENCE")):  # type: ignore[misc]
    """A backend whose layers store no scales, as one that was written before them."""

    stores_scales = False


def test_a_backend_says_whether_its_layers_store_scales() -> None:
    own: type[AttentionBackend] = load_backend("REFERENCE")
    for name in STORED:
        assert own.supports_kv_cache_dtype(name)
        assert own.validate_configuration(spec_of(name), "cpu") == []
        assert not OtherBackend.supports_kv_cache_dtype(name)
        (reason,) = OtherBackend.validate_configuration(spec_of(name), "cpu")
        assert reason.startswith(f"kv_cache_dtype = {name!r}: expected None")
    assert OtherBackend.supports_kv_cache_dtype("fp8")


def test_a_format_that_layers_take_has_a_name_or_an_alias() -> None:
    assert layer_format("fp8") is layer_format("fp8_inc") is FORMATS["fp8_e4m3"]
    with pytest.raises(
        ValueError, match="kv_cache_dtype = 'float16': expected auto, fp8,"
    ):
        layer_format("float16")

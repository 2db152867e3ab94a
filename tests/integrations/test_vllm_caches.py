"""Quantised caches in the vLLM plugin: scales that are measured, in vLLM's pages."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.layer_pages import (
    head_slots,
    split_scaled_cache,
    state_bytes,
    why_no_page,
)
from pagetwin.contract.layouts import (
    KVCacheLayout,
    compute_kv_cache_shape_bytes,
    compute_layout_strides,
)
from pagetwin.contract.nvfp4_pages import split_nvfp4_page
from pagetwin.contract.operations import load_implementation
from pagetwin.contract.specs import KVCacheSpec
from support.fake_vllm import VERSIONS, fake_vllm, recorded
from support.vllm_steps import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    STORAGE,
    EngineSteps,
    attention_spec,
    make_cache,
)
from torch import Tensor

pytestmark = pytest.mark.quick


OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
MIXED = [(20, 3, 1), (1, 1, 17), (1, 4, 1)]
SCALED = [name for name, form in FORMATS.items() if form.is_measured]
BLOCK_SCALES = [name for name in SCALED if FORMATS[name].channels_per_scale]
VLLM_RULE = "int4_per_token_head_vllm"
"""The format that vLLM writes for its own name, of which the plugin writes ours."""
ALL_NAMES = (
    "auto, float16, bfloat16, fp8, fp8_inc, fp8_e4m3, fp8_e5m2, int8_per_token_head,"
    " fp8_per_token_head, int4_per_token_head, int4_per_token_head_vllm, nvfp4, nvfp4_4over6"
)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.fixture(params=[OLDEST, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """The oldest and the newest interface: both forms of a cache."""
    with fake_vllm(request.param):
        yield request.param


# --- names and sizes


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cache_dtype_that_the_plugin_takes_is_one_of_vllms_or_one_that_it_adds(
    version: str,
) -> None:
    with fake_vllm(version):
        from pagetwin.integrations.vllm import plugin
        from vllm.config import cache as settings

        plugin.register()
        plugin.register()  # vLLM calls it several times
        names = set(plugin.choose_backend().supported_kv_cache_dtypes)
        unknown = names - set(settings.KV_CACHE_DTYPES)
        takes_names = version == NEWEST
        newer = set(recorded(NEWEST)["cache_dtypes"]) - set(
            recorded(version)["cache_dtypes"]
        )
        assert unknown - newer == (set() if takes_names else {VLLM_RULE})
        assert set(SCALED) < names
        if takes_names:
            handler = settings.handlers[VLLM_RULE]
            assert handler.torch_dtype() == torch.uint8
            assert handler.quant_mode().name == "INT4_PER_TOKEN_HEAD"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cache_has_the_bytes_that_vllm_reserves_for_it(version: str) -> None:
    """vLLM up to 0.27 adds the bytes of scales per state itself; later the backend says so."""
    with fake_vllm(version):
        from pagetwin.integrations.vllm.plugin import choose_backend

        backend = choose_backend()
        for name in (*SCALED, "auto", "fp8"):
            dtype = STORAGE.get(name, torch.uint8) or torch.float16
            cache = make_cache(version, backend, 2, 32, dtype, name)
            found = cache.numel() * dtype.itemsize // (NUM_BLOCKS * BLOCK_SIZE * 2)
            codes = (
                64
                * dtype.itemsize
                // FORMATS.get(name, FORMATS["auto"]).codes_per_element
            )
            scales = 4 if name in BLOCK_SCALES else 8 * (name in SCALED)
            assert found == codes + scales, name


def test_the_description_of_a_cache_gets_its_bytes_once(version: str) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    if version == OLDEST:  # vLLM does not call it
        return
    backend = choose_backend()
    plain = attention_spec(2, 64, torch.bfloat16)
    assert backend.customize_spec(plain) is plain
    spec = attention_spec(2, 64, torch.uint8, "int4_per_token_head")
    made = backend.customize_spec(spec)
    assert made.state_content_bytes == 32 + 4 + 32 + 4
    assert backend.customize_spec(made) is made
    made = backend.customize_spec(attention_spec(2, 64, torch.uint8, "nvfp4"))
    # as vLLM's FLASHINFER does
    assert (made.num_head_slots, made.state_content_bytes) == (4, 32 + 4)
    assert backend.customize_spec(made) is made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kv_cache_dtype": "int4_per_token_head", "head_size": 100},
            "head_size = 100 with kv_cache_dtype = int4_per_token_head: expected a multiple of 8",
        ),
        (
            {"kv_cache_dtype": "int8_per_token_head", "head_size": 66},
            "head_size = 66 with kv_cache_dtype = int8_per_token_head: expected a multiple of 4",
        ),
        (
            {"kv_cache_dtype": "nvfp4", "head_size": 24},
            "head_size = 24 with kv_cache_dtype = nvfp4: expected a multiple of 16, the channels of"
            " a scale",
        ),
        (
            {"kv_cache_dtype": "octave_k3v4"},
            f"kv_cache_dtype = octave_k3v4: expected {ALL_NAMES}",
        ),
        *(
            (
                {"kv_cache_dtype": name},
                f"kv_cache_dtype = {name}: expected {ALL_NAMES}, as sparse layers alone read its"
                " records",
            )
            for name in ("fp8_ds_mla", "nvfp4_ds_mla")
        ),
        ({"kv_cache_dtype": "nvfp4", "head_size": 80}, None),
        ({"kv_cache_dtype": "nvfp4_4over6", "head_size": 16}, None),
        ({"kv_cache_dtype": "fp8_inc"}, None),
        ({"kv_cache_dtype": "int4_per_token_head", "head_size": 72}, None),
        ({"kv_cache_dtype": "fp8_per_token_head", "dtype": torch.float32}, None),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_served_is_rejected_in_one_sentence(
    version: str, changes: dict[str, Any], words: str | None
) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    layer = dict(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False,
        has_sink=True, use_sparse=False, use_mm_prefix=True, device_capability=None,
    )  # fmt: skip
    found = choose_backend().supports_combination(*(layer | changes).values())
    if words is None:
        assert found is None
    else:
        assert found is not None and found.startswith(words)


def test_latent_attention_rejects_scales_that_are_measured() -> None:
    with fake_vllm(NEWEST, use_mla=True):
        from pagetwin.integrations.vllm.plugin import choose_backend

        known = choose_backend().supported_kv_cache_dtypes
        assert not set(SCALED) & set(known)


def test_every_name_of_the_newest_release_is_served_or_named_in_the_docs() -> None:
    """Formats of other packages' kernels, and records of sparse layers, are left out."""
    others = ("turboquant", "octave", "ultraquant")
    with fake_vllm(NEWEST):
        from pagetwin.integrations.vllm.plugin import choose_backend

        left = set(recorded(NEWEST)["cache_dtypes"]) - set(
            choose_backend().supported_kv_cache_dtypes
        )
    assert {name for name in left if not name.startswith(others)} == {
        "fp8_ds_mla",
        "nvfp4_ds_mla",
    }


# --- steps


@pytest.mark.sample(6)
@pytest.mark.parametrize("implementation", ["reference", "optimized"])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("version", VERSIONS)
def test_steps_are_exact_over_the_codes_in_the_pages_of_each_version(
    version: str, name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unwritten slots hold scales that are NaN."""
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", implementation)
    with fake_vllm(version):
        steps = EngineSteps(version, kv_cache_dtype=name)
        scales = split_scaled_cache(steps.cache, steps.head_size, FORMATS[name])[2:]
        for scale in scales:
            scale.fill_(torch.nan)
        assert max(steps.step(lens) for lens in MIXED) <= 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int4_per_token_head", "sinks": SINKS},
        {"kv_cache_dtype": "int4_per_token_head", "sliding_window": 5, "head_size": 72},
        {"kv_cache_dtype": "int8_per_token_head", "logits_soft_cap": 2.0},
        {
            "kv_cache_dtype": "fp8_per_token_head",
            "alibi_slopes": [0.5, 0.25, 0.125, 0.06],
        },
        {
            "kv_cache_dtype": "int8_per_token_head",
            "dtype": torch.bfloat16,
            "sinks": SINKS,
        },
        {"kv_cache_dtype": "nvfp4", "sinks": SINKS, "sliding_window": 5},
        {"kv_cache_dtype": "nvfp4_4over6", "dtype": torch.bfloat16, "head_size": 80},
    ],
    ids=str,
)
def test_every_option_of_a_layer_is_exact_over_codes(
    version: str, options: dict[str, Any]
) -> None:
    """vLLM's FLASH_ATTN rejects a 4-bit cache, with sinks or without; FLASHINFER sinks on some."""
    steps = EngineSteps(version, **options)
    assert max(steps.step(lens) for lens in MIXED) <= 1


@pytest.mark.parametrize("name", ["fp8", *SCALED])
def test_tokens_of_an_image_attend_to_each_other_over_codes(name: str) -> None:
    """vLLM's FLASH_ATTN rejects an FP8 cache with image spans on Hopper chips."""
    with fake_vllm(NEWEST):
        steps = EngineSteps(
            NEWEST, model={"is_mm_prefix_lm": True}, kv_cache_dtype=name
        )
        steps.of_step = {"mm_req_doc_ranges": {0: [(5, 12)]}}
        ranges = torch.full((24, 2), -1, dtype=torch.int32)
        ranges[5:13] = torch.tensor([5, 12], dtype=torch.int32)
        query_lens = (20, 3, 1)
        assert steps.step(query_lens, query_ranges=ranges) <= 1
        steps.of_step = {}
        assert steps.step((1, 1, 1)) <= 1


@pytest.mark.parametrize("name", SCALED)
def test_an_output_can_be_quantised_over_codes(name: str) -> None:
    with fake_vllm(NEWEST):
        steps = EngineSteps(NEWEST, kv_cache_dtype=name)
        assert steps.step((20, 3, 1), output_scale=torch.tensor(0.02)) <= 1


def test_a_layer_that_shares_a_cache_reads_the_codes_of_its_owner(version: str) -> None:
    given = {"kv_cache_dtype": "int4_per_token_head"}
    first = EngineSteps(version, **given)
    second = EngineSteps(version, source=first, **given)
    for lens in MIXED:
        assert first.step(lens) <= 1
        assert second.step(lens) <= 1


def test_fp8_inc_is_fp8_e4m3(version: str) -> None:
    """vLLM allocates it in the dtype of its codes."""
    for lens in MIXED:
        steps = EngineSteps(version, kv_cache_dtype="fp8_inc")
        other = EngineSteps(version, kv_cache_dtype="fp8_e4m3")
        assert steps.step(lens) <= 1 and other.step(lens) <= 1
        assert torch.equal(steps.cache.view(torch.uint8), other.cache)


def test_new_scales_of_a_layer_multiply_block_scales(version: str) -> None:
    """vLLM may load the weights of a running engine again."""
    steps = EngineSteps(version, num_reqs=1, kv_cache_dtype="nvfp4")
    assert steps.step((20,)) <= 1
    steps.layer._k_scale_float = 0.125
    assert steps.step((1,)) > 1  # the keys of before are read with another number
    steps.layer._k_scale_float = None
    words = "layer has no number _k_scale_float: expected one for all heads"
    with pytest.raises(ValueError, match=words):
        steps.step((1,))


def test_vllms_rule_of_int4_is_chosen_by_its_name(version: str) -> None:
    """Rows of one sign: vLLM's levels need not include 0, and lose the offset."""
    found = {}
    for name in ("int4_per_token_head", VLLM_RULE):
        steps = EngineSteps(version, num_reqs=1, kv_cache_dtype=name)
        key = torch.zeros(1, 2, 32)
        key[..., :2] = torch.tensor([3.0, 0.01])
        slots = torch.tensor([5])
        steps.impl.do_kv_cache_update(steps.layer, key, key, steps.cache, slots)
        form = FORMATS[name]
        codes, _, scales, _ = split_scaled_cache(steps.cache, 32, form)
        blocks = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 6]).int()
        gathered, _ = steps.impl.run.gather_cache(
            codes, codes, *blocks, 6, scales, scales, dtype=torch.float32
        )
        found[name] = round(float(gathered[5, 0, 0]), 2)
    assert found == {"int4_per_token_head": 3.01, VLLM_RULE: 0.02}


def test_another_cache_gives_other_scales(version: str) -> None:
    """vLLM binds a cache for profiling first, and another one afterwards."""
    steps = EngineSteps(version, kv_cache_dtype="int8_per_token_head")
    assert steps.step((20, 3, 1)) <= 1
    old, steps.cache = steps.cache, steps.cache.clone()
    old.fill_(0)
    assert steps.step((1, 1, 17)) <= 1


# --- pages


def test_pages_of_other_shapes_are_rejected() -> None:
    form = FORMATS["int8_per_token_head"]
    for shape in ((4, 2, 16, 2, 32), (4, 2, 16, 40), (4, 3, 16)):
        with pytest.raises(ValueError, match=r"kv_cache has shape .*: expected"):
            split_scaled_cache(torch.zeros(shape, dtype=torch.int8), 32, form)
    with pytest.raises(ValueError, match="head_size = 30 with kv_cache_dtype = int8"):
        page = torch.zeros(4, 2, 16, 2, 34, dtype=torch.int8)
        split_scaled_cache(page, 30, form)
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        state_bytes(FORMATS[VLLM_RULE], 36, 36)


@pytest.mark.parametrize("implementation", ["reference", "optimized"])
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_a_cache_of_block_scales_is_used_in_every_layout(
    layout: KVCacheLayout, implementation: str
) -> None:
    """Heads outside of the blocks have their own codes and scales together."""
    blocks, slots, heads, size = 5, 16, 3, 64
    random = torch.Generator().manual_seed(1)
    key, value, query = torch.randn(3, 20, heads, size, generator=random)
    content = {"num_head_slots": 2 * heads, "state_content_bytes": 36}
    spec = KVCacheSpec(slots, heads, size, torch.uint8, **content)
    shape = compute_kv_cache_shape_bytes(spec, blocks)
    strides = compute_layout_strides(spec, blocks, 2, layout)
    raw = torch.full((2 * blocks * spec.page_size_bytes,), 170, dtype=torch.uint8)
    factors = {"k_global_scale": 0.5, "v_global_scale": 2.0}

    def results(twin: Any, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return what the slots hold after a write, and attention over them."""
        scales = dict(zip(("k_scale", "v_scale"), parts[2:], strict=True)) | factors
        twin.reshape_and_cache(key, value, *parts[:2], torch.arange(20) + 16, **scales)
        table, lens = torch.tensor([[1, 2]]).int(), torch.tensor([20]).int()
        out = twin.paged_attention(
            query[-1:], *parts[:2], table, torch.tensor([0, 1]).int(), lens, 1, 20,
            options=AttentionOptions(**scales),
        )  # fmt: skip
        return [*(part.contiguous().view(torch.uint8) for part in parts), out]

    reference = load_implementation("reference")
    for index in range(2):
        layer = raw.as_strided(shape, strides[1:], index * strides[0])
        parts = split_scaled_cache(layer, size, FORMATS["nvfp4"])
        assert {part.untyped_storage().data_ptr() for part in parts} == {raw.data_ptr()}
        apart = [part.contiguous().clone() for part in parts]
        told = results(reference, apart)
        found = results(load_implementation(implementation), parts)
        for one, other in zip(found[:4], told[:4], strict=True):
            assert torch.equal(one, other)
        torch.testing.assert_close(found[4], told[4], atol=1e-5, rtol=1e-5)
    # a byte of each code and scale has changed, unless it was that before
    changed, stored = int((raw != 170).sum()), 2 * 20 * heads * 2 * 36
    assert 0.98 * stored < changed <= stored


def test_a_page_of_head_slots_in_turn_is_a_view() -> None:
    """As the pages of MiniMax-M3: 128 slots of a head's keys, and then of its values."""
    heads, slots, size = 2, 128, 128
    page = torch.zeros(3, 2 * heads * slots * 72, dtype=torch.uint8)
    parts = split_nvfp4_page(page, slots, heads, size, alternates=True)
    starts = [part[1, 5, 1].storage_offset() for part in parts]
    head, codes = page.stride(0) + 2 * slots * 72, slots * 64
    assert starts == [
        head + 5 * 64,
        head + slots * 72 + 5 * 64,
        head + codes + 5 * 8,
        head + slots * 72 + codes + 5 * 8,
    ]
    assert [part.stride(1) for part in parts] == [64, 64, 8, 8]
    with pytest.raises(
        ValueError, match="value_head_size = 64 in head slots: expected head_size"
    ):
        split_nvfp4_page(page, slots, heads, size, 64, alternates=True)


@pytest.mark.parametrize(
    ("shape", "width", "words"),
    [
        ((4, 3, 16, 36), 36, r"kv_cache has shape \[4, 3, 16, 36\]: expected \["),
        ((4, 2, 16, 2, 35), 35, r"kv_cache has shape .*block_size, kv_heads, 36\]"),
        ((4, 2, 16, 50), 50, "kv_cache has shape .* codes and block scales of 64"),
        ((4, 2, 16, 72), 36, "expected blocks, or head slots, without gaps"),
        ((4, 2, 16, 2, 40), 36, "expected blocks, or head slots, without gaps"),
    ],
)
def test_a_cache_without_pages_of_block_scales_is_rejected(
    shape: tuple[int, ...], width: int, words: str
) -> None:
    cache = torch.zeros(shape, dtype=torch.uint8)[..., :width]
    with pytest.raises(ValueError, match=words):
        split_scaled_cache(cache, 64, FORMATS["nvfp4"])


def test_values_may_have_another_size_than_keys() -> None:
    form = FORMATS["int4_per_token_head"]
    page = torch.zeros(4, 2, 16, state_bytes(form, 64, 48), dtype=torch.uint8)
    key, value, k_scale, v_scale = split_scaled_cache(page, 64, form)
    assert key.shape == (4, 16, 2, 32) and value.shape == (4, 16, 2, 24)
    assert k_scale.shape == v_scale.shape == (4, 16, 2)
    assert value.data_ptr() - key.data_ptr() == 36
    assert not why_no_page(form, 48)
    form = FORMATS["nvfp4"]
    assert head_slots(form, 2, 64, 48) == (2, 36 + 27)
    page = torch.zeros(4, 2, 16, 63, dtype=torch.uint8)
    key, value, k_scale, v_scale = split_scaled_cache(page, 64, form)
    assert key.shape == (4, 16, 2, 32) and value.shape == (4, 16, 2, 24)
    assert k_scale.shape == (4, 16, 2, 4) and v_scale.shape == (4, 16, 2, 3)


def test_the_record_has_the_cache_dtypes_of_a_release() -> None:
    assert "nvfp4_4over6" in recorded(NEWEST)["cache_dtypes"]
    assert len(recorded(NEWEST)["cache_dtypes"]) == 22
    assert "vllm" not in sys.modules

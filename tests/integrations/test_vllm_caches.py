"""Quantised caches in the vLLM plugin: scales per token and head in vLLM's pages."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.layer_pages import split_scaled_cache, state_bytes, why_no_page
from support.fake_vllm import VERSIONS, fake_vllm, recorded
from support.vllm_steps import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    STORAGE,
    EngineSteps,
    attention_spec,
    make_cache,
)

pytestmark = pytest.mark.quick

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
MIXED = [(20, 3, 1), (1, 1, 17), (1, 4, 1)]
SCALED = [name for name, form in FORMATS.items() if form.has_token_scales]
VLLM_RULE = "int4_per_token_head_vllm"
"""The format that vLLM writes for its own name, of which the plugin writes ours."""
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
        assert unknown == (set() if takes_names else {VLLM_RULE})
        assert set(SCALED) < names
        if takes_names:
            handler = settings.handlers[VLLM_RULE]
            assert handler.torch_dtype() == torch.uint8
            assert handler.quant_mode().name == "INT4_PER_TOKEN_HEAD"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cache_has_the_bytes_that_vllm_reserves_for_it(version: str) -> None:
    """vLLM up to 0.27 adds 8 bytes of scales per state itself; later the backend says so."""
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
            assert found == codes + 8 * (name in SCALED), name


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
            {"kv_cache_dtype": "nvfp4"},
            "kv_cache_dtype = nvfp4: expected auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2,"
            " int8_per_token_head, fp8_per_token_head, int4_per_token_head,"
            " int4_per_token_head_vllm",
        ),
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


def test_latent_attention_rejects_a_scale_per_token_and_head() -> None:
    with fake_vllm(NEWEST, use_mla=True):
        from pagetwin.integrations.vllm.plugin import choose_backend

        known = choose_backend().supported_kv_cache_dtypes
        assert not set(SCALED) & set(known)


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
    ],
    ids=str,
)
def test_every_option_of_a_layer_is_exact_over_codes(
    version: str, options: dict[str, Any]
) -> None:
    """vLLM's FLASH_ATTN rejects a 4-bit cache, with sinks or without."""
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


def test_values_may_have_another_size_than_keys() -> None:
    form = FORMATS["int4_per_token_head"]
    page = torch.zeros(4, 2, 16, state_bytes(form, 64, 48), dtype=torch.uint8)
    key, value, k_scale, v_scale = split_scaled_cache(page, 64, form)
    assert key.shape == (4, 16, 2, 32) and value.shape == (4, 16, 2, 24)
    assert k_scale.shape == v_scale.shape == (4, 16, 2)
    assert value.data_ptr() - key.data_ptr() == 36
    assert not why_no_page(form, 48)


def test_the_record_has_the_cache_dtypes_of_a_release() -> None:
    assert "nvfp4_4over6" in recorded(NEWEST)["cache_dtypes"]
    assert len(recorded(NEWEST)["cache_dtypes"]) == 22
    assert "vllm" not in sys.modules

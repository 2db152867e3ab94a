"""Models of transformers with keys and values in every cache format."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from library_models import (
    CROWDED,
    ENCODER_PROMPTS,
    NEW,
    PROMPTS,
    TWINS,
    on_device,
    tiny,
)
from pagetwin.conformance.oracles.brute_force import quantise_by_hand
from pagetwin.conformance.oracles.cache_formats import decode_by_hand, encode_by_hand
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.layer_pages import is_layer_format
from pagetwin.contract.operations import load_implementation
from pagetwin.integrations.transformers import (
    PagedBatch,
    PagedCache,
    Statistics,
    generate,
    use_attention,
)
from pagetwin.integrations.transformers.pages import Pages
from pagetwin.recorder import RecordedOperations, Recorder, RecorderSettings

pytestmark = pytest.mark.long

CODED = [
    name
    for name, form in FORMATS.items()
    if is_layer_format(form) and form.is_quantised
]
SCALED = [name for name in CODED if FORMATS[name].is_measured]
REFERENCE: Any = load_implementation("reference")


def numbers_of(name: str, states: Tensor) -> Tensor:
    """Return the numbers that keys or values stand for after they were codes of a format."""
    form = FORMATS[name]
    if form.is_measured:
        factor = 1.0 if form.has_global_scale else None
        found = decode_by_hand(form, *encode_by_hand(form, states, factor), factor)
    else:
        assert form.dtype is not None
        found = quantise_by_hand(states.cpu(), 1.0, form.dtype)
    return found.to(states)


def step_logits(batch: PagedBatch, model: Any) -> Tensor:
    """Return the logits of a prompt in two chunks, and of decodes beside another prompt."""
    first, second = PROMPTS[1][:11], PROMPTS[3]
    rows = [[5, 2, 9, 0], [7, 1, 3, 4]]
    steps = [
        ([7], [0], rows[:1], first[:7]),
        ([4], [7], rows[:1], first[7:]),
        ([1, 12], [11, 0], rows, [9, *second]),
        ([1, 1], [12, 12], rows, [3, 4]),
    ]
    found = []
    with torch.no_grad(), use_attention(model, batch.name):
        for *requests, tokens in steps:
            batch.begin_step(*requests)
            found.append(model(**batch.model_inputs(tokens)).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("implementation", TWINS)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt_oss"])
def test_logits_are_those_over_the_numbers_that_codes_stand_for(
    model: str, name: str, implementation: str
) -> None:
    """It is compared with a cache that is not quantised, and is given these numbers."""

    def write(key: Tensor, value: Tensor, *rest: Any) -> None:
        REFERENCE.reshape_and_cache(
            numbers_of(name, key), numbers_of(name, value), *rest
        )

    own, device = tiny(model), tiny(model).device
    plain = PagedBatch("reference", 10, 4, device)
    operations = {
        operation: getattr(plain.run, operation) for operation in plain.run.operations
    }
    plain.run = SimpleNamespace(
        name="reference", **operations | {"reshape_and_cache": write}
    )
    coded = PagedBatch(implementation, 10, 4, device, cache_format=name)
    told, found = step_logits(plain, own), step_logits(coded, own)
    torch.testing.assert_close(found, told, atol=2e-4, rtol=2e-4)


def test_logits_are_nearer_to_those_of_auto_the_finer_the_steps_of_a_format() -> None:
    """Measured as the norm of the difference, relative to that of the logits."""
    own = tiny("llama")
    told = step_logits(PagedBatch("reference", 10, 4, own.device), own)
    off = {}
    for name in CODED:
        batch = PagedBatch("reference", 10, 4, own.device, cache_format=name)
        off[name] = float((step_logits(batch, own) - told).norm() / told.norm())
    by_error = sorted(off, key=lambda name: off[name])
    assert by_error[0] == "int8_per_token_head"
    assert off["fp8_per_token_head"] < off["fp8_e5m2"]
    assert off["int8_per_token_head"] < off["int4_per_token_head"] / 8
    assert max(off.values()) < 0.5


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_requests_that_wait_and_are_preempted_give_the_same_tokens(
    model: str, name: str
) -> None:
    """Blocks with codes and scales are shared, copied, poisoned and computed again."""
    statistics = Statistics()
    given = {"max_new_tokens": NEW, "cache_format": name}
    told = generate(tiny(model), PROMPTS, "reference", **given)
    crowded = generate(
        tiny(model), PROMPTS, "reference", statistics=statistics, **given, **CROWDED
    )
    assert crowded == told
    assert statistics.preemptions and statistics.shared_blocks
    assert generate(tiny(model), PROMPTS, "optimized", **given) == told


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("model", ["bart", "t5"])
def test_an_encoders_keys_are_codes_too(model: str, name: str) -> None:
    given = {"max_new_tokens": 3, "block_size": 4, "cache_format": name}
    told = generate(tiny(model), ENCODER_PROMPTS, "reference", **given)
    found = generate(tiny(model), ENCODER_PROMPTS, "optimized", num_blocks=16, **given)
    assert found == told


@pytest.mark.sample(3)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", CODED)
def test_the_librarys_generate_runs_over_a_cache_of_codes(
    name: str, beams: int
) -> None:
    """Beams share blocks, and a block with its scales is copied when a beam writes to it."""
    prompt = PROMPTS[3]
    found = []
    for implementation in TWINS:
        cache = PagedCache(24 * beams, 4, implementation, cache_format=name)
        with use_attention(tiny("llama"), implementation):
            run = tiny("llama").generate(
                on_device([prompt]),
                attention_mask=torch.ones_like(on_device([prompt])),
                past_key_values=cache,
                max_new_tokens=NEW,
                num_beams=beams,
                do_sample=False,
                pad_token_id=0,
            )
        found.append(run[0, len(prompt) :].tolist())
        keys = cache.layers[0].keys
        assert keys is not None and keys.dtype == torch.float32
        assert keys.shape[-1] == tiny("llama").config.head_dim
    assert found[0] == found[1]
    if beams == 1:
        own = generate(
            tiny("llama"), [prompt], "reference", NEW, cache_format=name, block_size=8
        )
        assert found[0] == own[0]


@pytest.mark.parametrize("name", CODED)
def test_a_copy_of_a_cache_of_codes_is_independent(name: str) -> None:
    model, ids = tiny("llama"), on_device([PROMPTS[3]])
    cache = PagedCache(24, 4, "reference", cache_format=name)
    with torch.no_grad(), use_attention(model, "reference"):
        model(ids, past_key_values=cache, use_cache=True)
        own = copy.deepcopy(cache)
        told = model(ids[:, :2], past_key_values=cache, use_cache=True).logits
        cache.reset()
        found = model(ids[:, :2], past_key_values=own, use_cache=True).logits
    assert torch.equal(found, told)


@pytest.mark.parametrize("name", ["auto", *CODED])
def test_a_poisoned_block_reads_as_nan_and_a_copied_one_as_its_source(
    name: str,
) -> None:
    form = FORMATS[name]
    random = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 4, 2, 16, generator=random)
    pages = Pages.like(key, value, 3, 4, form)

    def read(block: int) -> Tensor:
        table = torch.tensor([[block]], dtype=torch.int32)
        starts = torch.tensor([0, 4], dtype=torch.int32)
        dtype = {"dtype": torch.float32} if form.is_quantised else {}
        both = REFERENCE.gather_cache(
            pages.key_cache,
            pages.value_cache,
            table,
            starts,
            4,
            **pages.scales,
            **dtype,
        )
        return torch.cat(both)

    assert bool(read(0).isnan().all())
    slots = torch.arange(4, 8)
    REFERENCE.reshape_and_cache(
        key, value, pages.key_cache, pages.value_cache, slots, **pages.of_write
    )
    before = read(1)
    assert not bool(before.isnan().any())
    pages.copy_blocks([(1, 2)])
    pages.poison([1])
    assert torch.equal(read(2), before) and bool(read(1).isnan().all())


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", [None, "write", "read"])
@pytest.mark.parametrize("name", SCALED)
def test_the_recorder_compares_codes_and_scales_of_a_run(
    name: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault measures scales of other keys, or reads the values with the scales of the keys."""

    def write(key: Tensor, value: Tensor, *rest: Any, **named: Any) -> None:
        REFERENCE.reshape_and_cache(key * 1.01, value, *rest, **named)

    def attend(*given: Any, options: AttentionOptions, **named: Any) -> Tensor:
        wrong = replace(options, v_scale=options.k_scale)
        out: Tensor = REFERENCE.paged_attention(*given, options=wrong, **named)
        return out

    planted = {
        "write": {"reshape_and_cache": write},
        "read": {"paged_attention": attend},
    }
    operations = {
        operation: getattr(REFERENCE, operation) for operation in REFERENCE.operations
    }
    run = SimpleNamespace(name="reference", **operations | planted.get(fault or "", {}))
    batch = PagedBatch("reference", 10, 4, tiny("llama").device, cache_format=name)
    checks = Recorder(RecorderSettings(tmp_path, sample_every=1))
    batch.run = RecordedOperations(run, checks)  # type: ignore[arg-type]
    step_logits(batch, tiny("llama"))
    checks.finish()
    laws = {None: [], "write": ["cache write"], "read": ["attention"]}
    assert checks.is_on and checks.checked["writes"] == checks.checked["rows"] >= 10
    assert [finding.law for finding in checks.findings] == laws[fault]


def test_a_run_with_a_recorder_has_its_codes_compared(tmp_path: Path) -> None:
    checks = Recorder(RecorderSettings(tmp_path, sample_every=1))
    given = {"cache_format": "int4_per_token_head", **CROWDED}
    generate(tiny("llama"), PROMPTS, "reference", NEW, recorder=checks, **given)
    assert checks.is_on and checks.findings == []
    assert checks.checked["writes"] > 20 and checks.checked["blocks"] > 0


# --- errors


def test_a_format_that_heads_do_not_fill_is_rejected_with_those_that_fit() -> None:
    keys = torch.zeros(3, 2, 9)
    words = (
        r"cache_format = 'int4_per_token_head' and heads of 9 elements in Layer: expected a"
        r" multiple of 2, or one of auto, fp8_e4m3, fp8_e5m2, int8_per_token_head,"
        r" fp8_per_token_head, fp8, fp8_inc$"
    )
    with pytest.raises(ValueError, match=words):
        Pages.like(keys, keys, 4, 4, FORMATS["int4_per_token_head"], "Layer")
    for name in ("int8_per_token_head", "fp8_per_token_head", "fp8_e5m2"):
        assert Pages.like(keys, keys, 4, 4, FORMATS[name]).head_sizes == (9, 9)


@pytest.mark.parametrize("name", ["int4", "nvfp5", "", "float16"])
def test_an_unknown_format_is_rejected_before_a_model_runs(name: str) -> None:
    words = f"cache_format = '{name}': expected one of auto, fp8_e4m3, .*int4_per_token_head"
    with pytest.raises(ValueError, match=words):
        generate(None, [[1]], "reference", cache_format=name)
    with pytest.raises(ValueError, match=words):
        PagedBatch("reference", 4, 4, "cpu", cache_format=name)
    with pytest.raises(ValueError, match=words):
        PagedCache(4, cache_format=name)


def test_a_format_that_is_not_text_is_rejected() -> None:
    given: Any = torch.int8
    with pytest.raises(
        TypeError, match=r"cache_format = torch\.int8 is dtype: expected"
    ):
        PagedBatch("reference", 4, 4, "cpu", cache_format=given)


def test_the_alias_of_fp8_is_a_name() -> None:
    assert (
        PagedBatch("reference", 4, 4, "cpu", cache_format="fp8").form.name == "fp8_e4m3"
    )

"""Encoder-decoders of transformers on both twins, and runs without pages on padded batches."""

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers
from library_models import (
    DECODED,
    ENCODER_PROMPTS,
    NEW_TOKENS,
    PROMPTS,
    TWINS,
    assert_rows,
    attention_names,
    calls_of,
    draw,
    is_dispatched,
    logits_of,
    on_device,
    skip_unless_dispatched,
    tiny,
)
from pagetwin.integrations.transformers import (
    PagedCache,
    Statistics,
    count_calls,
    generate,
    register,
)
from support.tiny_models import ENCODER_DECODER
from transformers.modeling_outputs import BaseModelOutput

WAVES = {"max_new_tokens": DECODED, "block_size": 4}


def encoder_prompts(name: str) -> Sequence[Any]:
    """Return the encoder's inputs: tokens of four lengths, or two audio inputs of one length."""
    if name != "whisper":
        return ENCODER_PROMPTS
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(8, 40, generator=generator) for _ in range(2)]


def encoder_inputs(name: str, prompt: Any) -> dict[str, Tensor]:
    """Return one prompt as keyword arguments of the library."""
    if name == "whisper":
        return {"input_features": prompt[None].to(tiny(name).device)}
    return {"input_ids": on_device([prompt])}


def start_of(name: str) -> int:
    """Return the first token of a decoder; the library falls back to bos_token_id."""
    config = tiny(name).config
    start = getattr(config, "decoder_start_token_id", None)
    return config.bos_token_id if start is None else start


@functools.cache
def library_decodes(name: str) -> list[tuple[list[int], Tensor]]:
    """Return the tokens and logits of the library's eager attention, prompt by prompt."""
    model, answers = tiny(name), []
    for prompt in encoder_prompts(name):
        ids = on_device([[start_of(name)]])
        logits: list[Tensor] = []
        told: dict[str, Any] = encoder_inputs(name, prompt)
        for _ in range(DECODED):
            with torch.no_grad():
                out = model(**told, decoder_input_ids=ids, use_cache=True)
            logits.append(out.logits[:, -1])
            ids = logits[-1].argmax(1, keepdim=True)
            told = {
                "encoder_outputs": BaseModelOutput(out.encoder_last_hidden_state),
                "past_key_values": out.past_key_values,
            }
        tokens = torch.cat(logits).argmax(1).tolist()
        answers.append((tokens, torch.cat(logits)))
    return answers


def test_a_model_that_a_version_does_not_dispatch_raises() -> None:
    """T5 accepted the name and silently used its own attention."""
    if is_dispatched("t5"):
        assert generate(tiny("t5"), [[5]], "reference", max_new_tokens=1)
        return
    with pytest.raises(NotImplementedError, match="0 of 6 attention layers ran"):
        generate(tiny("t5"), [[5]], "reference")


@pytest.mark.sample(2)
@pytest.mark.parametrize("implementation", TWINS)
@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_cross_attention_reads_the_encoder_s_keys_from_pages_in_every_step(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of all lengths in one padded batch; the padding does not change the result."""
    skip_unless_dispatched(name)
    module = import_module(f"pagetwin.{implementation}.cache.cache_ops")
    write, written = module.reshape_and_cache, []

    def counting(key: Tensor, *args: Any) -> None:
        written.append(len(key))
        write(key, *args)

    monkeypatch.setattr(module, "reshape_and_cache", counting)
    prompts, statistics = encoder_prompts(name), Statistics(keep_logits=True)
    num_blocks = 5 if name == "whisper" else 8
    answers = generate(
        tiny(name),
        prompts,
        implementation,
        **WAVES,
        num_blocks=num_blocks,
        statistics=statistics,
    )
    told = library_decodes(name)
    assert answers == [answer for answer, _ in told]
    # every layer ran on the twin, once per step
    waves = 2
    encoder, decoder = attention_names(name)
    assert statistics.encoder_runs == waves
    assert statistics.steps == waves * DECODED
    assert len(encoder) == 2
    assert len(decoder) == 4
    assert statistics.calls == {
        **dict.fromkeys(encoder, waves),
        **dict.fromkeys(decoder, waves * DECODED),
    }
    # each layer wrote each token of the encoder once, and no padding
    lengths = [20 if name == "whisper" else len(prompt) for prompt in prompts]
    assert sum(written) == 2 * (sum(lengths) + len(prompts) * DECODED)
    # the logits are within the error budget
    start = [start_of(name)]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = on_device([[*start, *answer[:-1]]])
        truth, same = logits_of(
            name, **encoder_inputs(name, prompt), decoder_input_ids=ids
        )
        runs = [same[0], told[number][1]]
        assert_rows(statistics.logits[number], truth[0], runs, (name, number))


def test_a_finished_request_leaves_its_wave() -> None:
    told = [answer for answer, _ in library_decodes("bart")]
    end = told[1][1]
    until = [
        answer[: answer.index(end) + 1] if end in answer else answer for answer in told
    ]
    assert until != told
    statistics = Statistics()
    answers = generate(
        tiny("bart"),
        ENCODER_PROMPTS,
        "reference",
        max_new_tokens=DECODED,
        block_size=4,
        eos_token_id=end,
        statistics=statistics,
    )
    assert answers == until
    assert statistics.encoder_runs == 1


@pytest.mark.parametrize(
    ("limit", "waves"), [({"max_running": 1}, 4), ({"max_batch_tokens": 26}, 2)]
)
def test_waves_are_as_large_as_the_limits_allow(
    limit: dict[str, int], waves: int
) -> None:
    statistics = Statistics()
    answers = generate(
        tiny("bart"),
        ENCODER_PROMPTS,
        "reference",
        **WAVES,
        **limit,
        statistics=statistics,
    )
    assert answers == [answer for answer, _ in library_decodes("bart")]
    assert statistics.encoder_runs == waves


@pytest.mark.sample(2)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bart", "t5", "llama", "gpt_oss"])
def test_the_library_s_own_generate_takes_a_paged_cache(name: str, beams: int) -> None:
    if name == "t5":
        skip_unless_dispatched(name)
    model, prompt = (
        tiny(name),
        on_device([ENCODER_PROMPTS[1], ENCODER_PROMPTS[1][::-1]]),
    )
    options = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": NEW_TOKENS,
        "num_beams": beams,
        "do_sample": False,
    }
    told = model.generate(prompt, **options)
    caches = [PagedCache(24 * beams, 4, "reference") for _ in range(2)]
    cache = caches[0]
    if model.config.is_encoder_decoder:
        cache = transformers.EncoderDecoderCache(*caches)
    model.set_attn_implementation(register("reference"))
    try:
        with count_calls(model) as calls:
            answers = model.generate(prompt, past_key_values=cache, **options)
    finally:
        model.set_attn_implementation("eager")
    assert answers.tolist() == told.tolist()
    assert sum(calls.values()) >= 2 * NEW_TOKENS


@pytest.mark.sample(2)
@pytest.mark.parametrize("implementation", TWINS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_padding_on_either_side_changes_nothing(
    name: str, side: str, implementation: str
) -> None:
    prompts = [PROMPTS[3], PROMPTS[0]]
    longest = max(map(len, prompts))
    padded, shown, places = [], [], []
    for prompt in prompts:
        rest = longest - len(prompt)
        before, after = (rest, 0) if side == "left" else (0, rest)
        padded.append([*[0] * before, *prompt, *[0] * after])
        shown.append([*[0] * before, *[1] * len(prompt), *[0] * after])
        places.append([*[0] * before, *range(len(prompt)), *[0] * after])
    model = tiny(name)
    inputs = {
        "input_ids": on_device(padded),
        "attention_mask": on_device(shown),
        "position_ids": on_device(places),
    }
    truth, same = logits_of(name, **inputs)
    model.set_attn_implementation(register(implementation))
    try:
        with torch.no_grad(), count_calls(model) as calls:
            found = model(**inputs).logits
    finally:
        model.set_attn_implementation("eager")
    assert calls == calls_of(name, 1)
    is_token = inputs["attention_mask"].bool()
    alone = torch.cat(
        [logits_of(name, input_ids=on_device([prompt]))[1][0] for prompt in prompts]
    )
    runs = [same[is_token], alone]
    assert_rows(found[is_token], truth[is_token], runs, (name, side))


@pytest.mark.sample(1)
@pytest.mark.parametrize("implementation", TWINS)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_whole_encoder_decoder_runs_without_any_cache(
    name: str, implementation: str
) -> None:
    skip_unless_dispatched(name)
    model = tiny(name)
    inputs = {
        "input_ids": on_device([ENCODER_PROMPTS[3], [*ENCODER_PROMPTS[0], 0, 0, 0, 0]]),
        "attention_mask": on_device([[1] * 9, [1] * 5 + [0] * 4]),
        "decoder_input_ids": on_device([draw(6, seed=9), draw(6, seed=10)]),
    }
    truth, same = logits_of(name, **inputs)
    model.set_attn_implementation(register(implementation))
    try:
        with torch.no_grad(), count_calls(model) as calls:
            found = model(**inputs, use_cache=False).logits
    finally:
        model.set_attn_implementation("eager")
    encoder, decoder = attention_names(name)
    assert calls == dict.fromkeys([*encoder, *decoder], 1)
    assert_rows(found.flatten(0, 1), truth.flatten(0, 1), [same.flatten(0, 1)], name)

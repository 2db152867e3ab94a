"""How `generate` of the transformers integration chooses tokens, and streams them."""

from collections.abc import Sequence
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
    library_tokens,
    tiny,
    usual_token,
    with_ends,
)
from pagetwin.integrations.transformers import Statistics, generate
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

pytestmark = pytest.mark.long

SAMPLE = {"do_sample": True, "temperature": 3.0, "top_k": 0}


# --- sampling


CONFIGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with a penalty": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "temperature": SAMPLE,
    "top-k": {**SAMPLE, "top_k": 7},
    "top-p and min-p": {**SAMPLE, "top_p": 0.8, "min_p": 0.01},
    "typical": {**SAMPLE, "typical_p": 0.7},
    "cutoffs": {**SAMPLE, "epsilon_cutoff": 3e-3, "eta_cutoff": 3e-3},
    "penalties": {**SAMPLE, "repetition_penalty": 1.5, "no_repeat_ngram_size": 1},
    "of the input": {
        **SAMPLE,
        "encoder_repetition_penalty": 3.0,
        "encoder_no_repeat_ngram_size": 1,
    },
    "forced": {**SAMPLE, "forced_bos_token_id": 7, "forced_eos_token_id": 9},
    "suppressed": {
        **SAMPLE,
        "suppress_tokens": list(range(20, 70)),
        "begin_suppress_tokens": list(range(10)),
        "bad_words_ids": [[11], [12, 13]],
    },
    "biased": {**SAMPLE, "sequence_bias": {(17,): 9.0, (3, 4): -5.0}},
    "shortest": {"min_new_tokens": NEW - 1, "eos_token_id": list(range(3, 50))},
    "shortest in all": {"min_length": 9, "eos_token_id": list(range(3, 50))},
    "decay": {
        **SAMPLE,
        "exponential_decay_length_penalty": (2, 3.0),
        "eos_token_id": [5, 50],
    },
    "watermark": {**SAMPLE, "watermarking_config": WatermarkingConfig(bias=2.5)},
    "normalized": {**SAMPLE, "renormalize_logits": True, "remove_invalid_values": True},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("name", "prompts", "crowded"),
    [
        ("llama", PROMPTS, CROWDED),
        ("bart", ENCODER_PROMPTS, {"block_size": 4, "num_blocks": 8}),
    ],
)
def test_tokens_are_chosen_as_in_the_library(
    name: str,
    prompts: Sequence[Sequence[int]],
    crowded: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """With the seed of a prompt, whatever else is in the steps, and after preemptions."""
    model = tiny(name)
    told = library_tokens(model, prompts, seed=11, **settings)
    found = generate(
        model,
        prompts,
        "reference",
        generation_config=GenerationConfig(**settings, max_new_tokens=NEW),
        seed=11,
        **crowded,
    )
    assert found == told
    plain = library_tokens(model, prompts)
    # the settings matter, so equal tokens show that they are passed on
    assert not settings or told != plain


def test_the_model_s_own_settings_complete_those_of_the_call() -> None:
    model = with_ends("llama", None)
    model.generation_config.update(do_sample=True, temperature=4.0, max_new_tokens=5)
    told = library_tokens(
        model, PROMPTS, seed=3, max_new_tokens=5, do_sample=True, top_k=9
    )
    found = generate(
        model, PROMPTS, "reference", generation_config=GenerationConfig(top_k=9), seed=3
    )
    assert found == told
    # without settings in the call, the most likely token is chosen
    greedy = generate(model, PROMPTS, "reference", max_new_tokens=5)
    assert greedy == library_tokens(model, PROMPTS, max_new_tokens=5)
    assert model.generation_config.max_length in (None, 20)


def test_a_seed_makes_sampling_reproducible_in_any_batch() -> None:
    model, config = tiny("llama"), GenerationConfig(**SAMPLE, max_new_tokens=NEW)

    def run(prompts: Any, seed: Any, **options: Any) -> list[list[int]]:
        return generate(
            model, prompts, "reference", generation_config=config, seed=seed, **options
        )

    told = run(PROMPTS, 4)
    assert run(PROMPTS, 4, max_running=1, block_size=4) == told
    assert run(PROMPTS, [4, 5, 6, 7, 8], **CROWDED) == told
    turned = run(PROMPTS[::-1], torch.tensor([8, 7, 6, 5, 4]))
    assert turned[::-1] == told
    # equal prompts have different seeds
    same = run([PROMPTS[0]] * 3, 4)
    assert len(set(map(tuple, same))) > 1
    # without a seed, the seeds are torch's
    torch.manual_seed(1)
    first = run(PROMPTS, None)
    assert run(PROMPTS, None) != first
    torch.manual_seed(1)
    assert run(PROMPTS, None) == first


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_beams": 2},
            "asks for beam_search: expected greedy decoding or sampling",
        ),
        ({"prompt_lookup_num_tokens": 2}, "asks for assisted_generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "asks for contrastive_search"),
        (
            {"do_sample": True, "num_return_sequences": 2},
            "num_return_sequences = 2 is not supported: expected None or 1",
        ),
        ({"guidance_scale": 1.5}, r"guidance_scale = 1\.5 is not supported"),
        ({"stop_strings": ["."]}, "stop_strings"),
        ({"max_time": 1.0}, "max_time"),
        ({"token_healing": True}, "token_healing"),
        ({"max_length": 20}, "max_length = 20 counts .* expected max_new_tokens"),
    ],
)
def test_settings_that_are_not_supported_raise(
    settings: dict[str, Any], words: str
) -> None:
    config = GenerationConfig(**settings)
    with pytest.raises(NotImplementedError, match=words):
        generate(tiny("llama"), [[5]], "reference", generation_config=config)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"generation_config": {"top_k": 3}}, TypeError, "is dict: expected a Generat"),
        ({"seed": [1, 2]}, ValueError, "seed has 2 entries: expected 1"),
        ({"seed": -1}, ValueError, r"seed\[0\] = -1: expected 0 <= seed"),
        ({"streamer": 5}, TypeError, "streamer = 5 is int: expected a streamer"),
        ({"streamer": [None, None]}, ValueError, "2 streamers: expected 1, one per pr"),
        ({"streamer": [5]}, TypeError, r"streamer\[0\] = 5 is int.*put and end"),
    ],
)
def test_other_arguments_than_expected_raise(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        generate(tiny("llama"), [[5]], "reference", **options)


# --- streaming


class Recorded(BaseStreamer):
    """A streamer that keeps what it gets; None is its end."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.got: list[Any] = []
        self.fails_after = fails_after

    def put(self, value: Tensor) -> None:
        if len(self.got) == self.fails_after:
            raise ZeroDivisionError
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append(None)


@pytest.mark.parametrize(
    ("name", "prompts", "crowded"),
    [
        ("llama", PROMPTS, CROWDED),
        ("bart", ENCODER_PROMPTS, {"block_size": 4, "num_blocks": 8}),
    ],
)
def test_a_streamer_gets_what_it_gets_from_the_library(
    name: str, prompts: Sequence[Sequence[int]], crowded: dict[str, Any]
) -> None:
    """Each token once, also if a request is preempted and computed again."""
    model = with_ends(name, usual_token(name, prompts))
    statistics = Statistics()
    streamers = [Recorded() for _ in prompts]
    streamers[1] = None
    generate(
        model,
        prompts,
        "reference",
        NEW,
        streamer=streamers,
        statistics=statistics,
        **crowded,
    )
    assert name == "bart" or statistics.preemptions > 0
    for prompt, streamer in zip(prompts, streamers, strict=True):
        if streamer is not None:
            told = Recorded()
            library_tokens(model, [prompt], streamer=told)
            assert streamer.got == told.got
    alone = Recorded()
    generate(model, prompts[:1], "reference", NEW, streamer=alone)
    assert alone.got == streamers[0].got


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_every_stream_ends_when_the_call_raises(name: str) -> None:
    """A reader in another thread would wait for ever."""
    streamers = [Recorded(), Recorded(fails_after=2)]
    with pytest.raises(ZeroDivisionError):
        generate(tiny(name), [[5, 6], [7]], "reference", NEW, streamer=streamers)
    assert [streamer.got.count(None) for streamer in streamers] == [1, 1]
    for options in ({"max_new_tokens": 0}, {"eos_token_id": "5"}, {"seed": "5"}):
        early = Recorded()
        with pytest.raises((TypeError, ValueError)):
            generate(tiny(name), [[5]], "reference", **options, streamer=early)
        assert early.got == [None]

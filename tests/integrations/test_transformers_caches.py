"""Caches of transformers: static ones, and PagedCache with padding, beams and assistants."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers
from library_models import (
    NEW,
    PROMPTS,
    TWINS,
    VERSION,
    draw,
    library_tokens,
    on_device,
    skip_unless_dispatched,
    tiny,
)
from pagetwin.integrations.transformers import PagedCache, generate, use_attention
from support.tiny_models import VOCABULARY, WINDOW

pytestmark = pytest.mark.long

# --- caches of the library


PADDED = [PROMPTS[3], PROMPTS[0]]
STATIC = ("llama", "mistral", "qwen3", "gemma2", "gpt_oss", "llama4")


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Return two prompts in one batch, and its mask."""
    longest = max(map(len, PADDED))
    ids, shown = [], []
    for prompt in PADDED:
        rest = longest - len(prompt)
        before, after = (rest, 0) if side == "left" else (0, rest)
        ids.append([*[0] * before, *prompt, *[0] * after])
        shown.append([*[0] * before, *[1] * len(prompt), *[0] * after])
    return on_device(ids), on_device(shown)


def generated(name: str, implementation: str | None, **options: Any) -> list[list[int]]:
    """Return the tokens of the library's generate, with its own attention or a twin."""
    model = tiny(name)
    settings = {"max_new_tokens": WINDOW + 2, "do_sample": False, "pad_token_id": 0}
    if implementation is None:
        told: list[list[int]] = model.generate(**settings, **options).tolist()
        return told
    with use_attention(model, implementation):
        found: list[list[int]] = model.generate(**settings, **options).tolist()
    return found


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "reference") for name in STATIC), ("gemma2", "optimized")],
)
def test_a_static_cache_gives_the_tokens_of_the_library(
    name: str, implementation: str
) -> None:
    """Its keys have columns for tokens that do not exist yet; they were taken for padding."""
    ids, mask = padded("left")
    given = {"inputs": ids, "attention_mask": mask}
    told = generated(name, None, **given)
    given |= {"cache_implementation": "static"}
    if name == "llama4" and VERSION < (5, 24):
        try:
            generated(name, None, **given)
        except TypeError as error:
            pytest.skip(f"the library's own model has no static cache: {error}")
    assert generated(name, implementation, **given) == told


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_static_cache_of_an_encoder_decoder_gives_the_tokens_of_the_library(
    name: str,
) -> None:
    """T5's bias has a column for each slot of the static cache."""
    skip_unless_dispatched(name)
    ids, mask = padded("right")
    given = {"inputs": ids, "attention_mask": mask}
    told = generated(name, None, **given)
    static = {"cache_implementation": "static"}
    assert generated(name, "reference", **static, **given) == told


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that compiles the forward of a tiny model, as the library does on a GPU."""

    def compile_model(name: str) -> Any:
        model = tiny(name)
        forward = torch.compile(model.forward, backend="eager")
        monkeypatch.setattr(model, "forward", forward)
        return model

    torch.compiler.reset()
    yield compile_model
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "reference"), ("llama", "optimized"), ("bart", "reference")],
)
def test_a_compiled_model_gives_the_tokens_of_the_library(
    name: str, implementation: str, compiled: Callable[[str], Any]
) -> None:
    """The library compiles for a static cache on a GPU: 'dict' object has no attribute 'node'."""
    ids, mask = padded("right" if name == "bart" else "left")
    given = {"inputs": ids, "attention_mask": mask}
    told = generated(name, None, **given)
    compiled(name)
    static = {"cache_implementation": "static"}
    assert generated(name, implementation, **static, **given) == told
    caches: list[Any] = [PagedCache(24, 4, implementation) for _ in range(2)]
    cache = transformers.EncoderDecoderCache(*caches) if name == "bart" else caches[0]
    assert generated(name, implementation, past_key_values=cache, **given) == told


def test_a_mask_that_a_compiled_model_got_is_read_again_after_a_write(
    compiled: Callable[[str], Any],
) -> None:
    """Its padding is remembered with the mask."""
    ids, tokens = padded("left")
    fewer = tokens.clone()
    fewer[0, 0] = 0
    mask = torch.empty(2, 1, *2 * ids.shape[1:], dtype=torch.bool, device=ids.device)
    with torch.no_grad():
        told = [
            tiny("llama")(ids, attention_mask=attended).logits[:, -1]
            for attended in (tokens, fewer)
        ]
        model = compiled("llama")
        with use_attention(model, "reference"):
            for attended, expected in zip((tokens, fewer), told, strict=True):
                mask.copy_(attended[:, None, None, :]).tril_()
                found = model(ids, attention_mask=mask).logits[:, -1]
                torch.testing.assert_close(found, expected)
    assert not torch.allclose(*told)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_compiled_model_runs_in_steps(
    name: str, compiled: Callable[[str], Any]
) -> None:
    """The compiler asks the mask of a step what it knows; that raised."""
    told = library_tokens(tiny(name), PADDED)
    assert generate(compiled(name), PADDED, "reference", NEW) == told


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "llama4"])
def test_a_paged_cache_takes_prompts_that_are_padded_on_the_left(
    name: str, beams: int
) -> None:
    ids, mask = padded("left")
    given = {"inputs": ids, "attention_mask": mask, "num_beams": beams}
    told = generated(name, None, **given)
    cache = PagedCache(24 * beams, 4, "reference")
    assert generated(name, "reference", past_key_values=cache, **given) == told
    # the padding has no slots
    stored = cache.rows.contents.metadata.seq_lens_cpu
    assert stored.max() - stored.min() == len(PADDED[0]) - len(PADDED[1])


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_paged_caches_take_encoder_inputs_that_are_padded(name: str) -> None:
    """The mask of the library says so; PagedCache had to be told the lengths."""
    skip_unless_dispatched(name)
    ids, mask = padded("right")
    given = {"inputs": ids, "attention_mask": mask}
    told = generated(name, None, **given)
    caches = [PagedCache(24, 4, "reference") for _ in range(2)]
    cache = transformers.EncoderDecoderCache(*caches)
    assert generated(name, "reference", past_key_values=cache, **given) == told
    lengths = caches[1].rows.contents.metadata.seq_lens_cpu
    assert lengths.tolist() == [len(prompt) for prompt in PADDED]


@pytest.mark.parametrize("implementation", TWINS)
def test_assisted_decoding_crops_a_paged_cache(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An assistant with other weights proposes tokens that are mostly wrong."""
    cropped: list[int] = []
    crop = PagedCache.crop

    def counting(self: PagedCache, tokens_to_remove: int) -> None:
        cropped.append(tokens_to_remove)
        crop(self, tokens_to_remove)

    monkeypatch.setattr(PagedCache, "crop", counting)
    ids = on_device([PROMPTS[3]])
    given = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    told = generated("llama", None, **given)
    cache = PagedCache(24, 4, implementation)
    assistant = copy.deepcopy(tiny("llama"))
    weight = assistant.lm_head.weight
    with torch.no_grad():
        weight += on_device(draw(*weight.shape, seed=8)) / VOCABULARY - 0.5
    given |= {"past_key_values": cache, "assistant_model": assistant}
    assert generated("llama", implementation, **given) == told
    assert any(count != 0 for count in cropped)


def test_prompt_lookup_crops_a_paged_cache_with_windows() -> None:
    repeated = [*PROMPTS[0], *PROMPTS[0], *PROMPTS[0]]
    ids = on_device([repeated])
    given = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    told = generated("gemma2", None, **given)
    cache = PagedCache(24, 4, "reference")
    given |= {"past_key_values": cache, "prompt_lookup_num_tokens": 3}
    assert generated("gemma2", "reference", **given) == told


# --- models with two kinds of layers


def last_logits(
    name: str, side: str, chunk: int, make_cache: Callable[[Any], Any]
) -> Tensor:
    """Return the logits of the tokens of a padded batch that runs in chunks."""
    model, (ids, mask) = tiny(name), padded(side)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache, logits = make_cache(model.config), []
    for start in range(0, ids.shape[1], chunk):
        part = slice(start, start + chunk)
        with torch.no_grad():
            run = model(
                ids[:, part],
                attention_mask=mask[:, : part.stop],
                position_ids=places[:, part],
                past_key_values=cache,
                use_cache=True,
            )
        logits.append(run.logits)
    return torch.cat(logits, 1)[mask.bool()]


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=30),
    "paged": lambda config: PagedCache(24, 4, "reference"),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("chunk", [12, 5])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "llama4"])
def test_layers_of_two_kinds_with_padding_and_chunks_are_exact(
    name: str, side: str, chunk: int, cache: str
) -> None:
    """Each layer reads its own mask: a mask that was read for one kind is not used for another."""
    told = last_logits(name, side, chunk, CACHES["dynamic"])
    with use_attention(tiny(name), "reference"):
        found = last_logits(name, side, chunk, CACHES[cache])
    torch.testing.assert_close(found, told, atol=2e-4, rtol=2e-4)

"""Attention of transformers models that several callers replace, in threads and in blocks."""

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
import transformers
from library_models import PROMPTS, tiny
from pagetwin.integrations.transformers import (
    generate,
    use_attention,
)

pytestmark = pytest.mark.extended

OURS = "pagetwin_reference"

# --- attention that several callers replace


def shared() -> tuple[Any, Any]:
    """Return two models made from one configuration."""
    one = copy.deepcopy(tiny("llama"))
    other = transformers.LlamaForCausalLM(one.config).eval().to(one.device)
    other.load_state_dict(one.state_dict())
    other.generation_config.eos_token_id = None
    assert one.config is other.config
    return one, other


def run_in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returned or raised, in a thread of its own."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [
        threading.Thread(target=run, args=(index,)) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_models_of_one_configuration_generate_in_several_threads() -> None:
    """One raised a shape error, and both stayed on the twin."""
    models = [*shared(), tiny("llama")]
    told = generate(models[0], PROMPTS, "reference", max_new_tokens=4)

    def repeat(model: Any) -> list[Any]:
        return [
            generate(model, PROMPTS, "reference", max_new_tokens=4) for _ in range(6)
        ]

    found = run_in_threads(
        *(lambda model=own_model: repeat(model) for own_model in models)
    )
    assert found == [[told] * 6] * 3
    assert {model.config._attn_implementation for model in models} == {"eager"}


@pytest.mark.parametrize("name", ["llama", "bloom", "mpt", "falcon"])
def test_one_model_generates_in_several_threads(name: str) -> None:
    model = copy.deepcopy(tiny(name))
    told = generate(model, PROMPTS, "reference", max_new_tokens=3)
    calls = [
        lambda: [
            generate(model, PROMPTS, "reference", max_new_tokens=3) for _ in range(4)
        ]
    ]
    assert run_in_threads(*calls * 2) == [[told] * 4] * 2
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_another_twin_in_another_thread_raises_at_the_start(name: str) -> None:
    model = copy.deepcopy(tiny(name))
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with use_attention(model, "reference"):
            entered.set()
            leave.wait(20)

    def enter() -> None:
        entered.wait(20)
        try:
            with use_attention(model, "pagetwin.reference"):
                raise AssertionError("not reached")
        finally:
            leave.set()

    found = run_in_threads(hold, enter)
    assert found[0] is None
    assert isinstance(found[1], RuntimeError)
    assert "runs on 'pagetwin_reference' in another thread" in str(found[1])
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_blocks_that_end_in_another_order_restore_the_attention() -> None:
    """Two generators over models of one configuration, closed in the order they were opened."""

    def steps(model: Any, name: str) -> Iterator[str]:
        with use_attention(model, name):
            yield model.config._attn_implementation

    one, other = shared()
    first, second = steps(one, "reference"), steps(other, "pagetwin.reference")
    assert next(first) == OURS
    assert next(second) == "pagetwin_pagetwin.reference"
    first.close()
    assert one.config._attn_implementation == "pagetwin_pagetwin.reference"
    del second
    gc.collect()
    assert one.config._attn_implementation == "eager"


def test_the_attention_of_every_part_of_a_model_is_restored() -> None:
    """Only the name of the whole model was kept; its parts then all had that one."""
    config = transformers.Gemma3Config(
        text_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 96,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    parts = (config, config.text_config, config.vision_config)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    before = [part._attn_implementation for part in parts]
    with contextlib.suppress(ZeroDivisionError), use_attention(model, "reference"):
        assert config.text_config._attn_implementation == OURS
        raise ZeroDivisionError
    assert [part._attn_implementation for part in parts] == before
    assert "sdpa" in before and "eager" in before


def test_a_model_that_does_not_take_the_attention_keeps_its_own() -> None:
    neo = transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=96,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
        )
    )
    before = neo.config._attn_implementation
    with (
        pytest.raises(NotImplementedError, match="does not let its attention"),
        use_attention(neo, "reference"),
    ):
        raise AssertionError("not reached")
    assert neo.config._attn_implementation == before

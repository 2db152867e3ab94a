"""Calls and models of transformers that the integration rejects."""

import copy
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from library_models import PROMPTS, on_device, tiny
from pagetwin.integrations.transformers import (
    PagedBatch,
    PagedCache,
    generate,
    register,
    register_all,
)
from support.tiny_models import VOCABULARY


def test_a_layer_that_computes_its_own_attention_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two layers does not use the twin; the model would run without any other sign."""
    layer = tiny("llama").model.layers[1].self_attn
    monkeypatch.setattr(
        layer, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(NotImplementedError, match="1 of 2 attention layers ran"):
        generate(tiny("llama"), PROMPTS, "reference")


def test_a_model_with_its_own_attention_raises() -> None:
    gpt_neo = transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
        )
    )
    with pytest.raises(NotImplementedError, match="does not let its attention be repl"):
        generate(gpt_neo.eval(), [[5, 6]], "reference")
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2
        )
    )
    with pytest.raises(NotImplementedError, match="keeps a state of the past"):
        generate(mamba.eval(), [[5, 6]], "reference")


def test_falcon_with_alibi_raises() -> None:
    """The library rounds its bias to bfloat16, so no slopes give the same logits."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    falcon = transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=VOCABULARY, alibi=True, **sizes)
    )
    with pytest.raises(NotImplementedError, match="rounds the bias of each key to bf"):
        generate(falcon.eval(), [[5, 6]], "reference")


def test_merged_attention_of_decoder_and_encoder_raises() -> None:
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.T5Gemma2Config(
        encoder={
            "text_config": text,
            "vision_config": vision,
            "mm_tokens_per_image": 1,
        },
        decoder=text,
        vocab_size=VOCABULARY,
    )
    model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    with pytest.raises(NotImplementedError, match="one softmax over the keys"):
        generate(model, [[5, 6]], "reference")


def test_the_model_s_attention_is_restored_after_an_error() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        generate(model, [[]], "reference")
    assert model.config._attn_implementation == "eager"
    generate(model, [[5]], "reference", max_new_tokens=1)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("prompts", "options", "error", "words"),
    [
        ([[5], []], {}, ValueError, r"prompts\[1\] is empty: expected at least one"),
        ([["five"]], {}, TypeError, r"prompts\[0\]\[0\] = 'five' is str.*tokenizer"),
        ([], {}, ValueError, r"prompts = \[\] is empty: expected a list of .*\[\[5, 6"),
        (None, {}, TypeError, r"prompts = None is NoneType: expected .*\[\[5, 6, 7\]"),
        (
            [5, 6],
            {},
            TypeError,
            r"prompts\[0\] = 5 is int: .*\[\[5, 6, 7\], \[8, 9\]\]",
        ),
        (
            "five",
            {},
            TypeError,
            r"prompts = 'five' is str: .*\[\[5, 6.*run the tokenizer",
        ),
        (["five"], {}, TypeError, r"prompts\[0\] = 'five' is str: .*run the tokenizer"),
        ({"input_ids": [[5]]}, {}, TypeError, r"is dict: .* give its input_ids"),
        ({5, 6}, {}, TypeError, r"prompts = \{5, 6\} is set: expected a list of"),
        (
            torch.zeros(2, 3),
            {},
            TypeError,
            r"prompts is Tensor of torch\.float32, shape \[2, 3\]: .* are integers",
        ),
        (
            [torch.zeros(3)],
            {},
            TypeError,
            r"prompts\[0\] is Tensor of torch\.float32, shape \[3\]: .* are integers",
        ),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            {},
            TypeError,
            r"prompts is Tensor of torch\.int64, .*\[\[5, 6.*\.tolist\(\)",
        ),
        ([[5.0]], {}, TypeError, r"prompts\[0\]\[0\] = 5\.0 is float: expected an int"),
        ([[5, 96]], {}, ValueError, r"prompts\[0\]\[1\] = 96 .* 0 <= token < 96"),
        (
            [[5] * 9],
            {"num_blocks": 2, "block_size": 4, "max_new_tokens": 1},
            ValueError,
            r"prompts\[0\] has 9 tokens .* \(8\)",
        ),
        ([[5]], {"implementation": "fast"}, ValueError, "implementation = 'fast'"),
        ([[5]], {"max_new_tokens": 0}, ValueError, "max_new_tokens = 0"),
        ([[5]], {"block_size": 0}, ValueError, "block_size = 0"),
        ([[5]], {"arrival_steps": [0, 1]}, ValueError, "has 2 entries: expected 1"),
        ([[5]], {"arrival_steps": [-1]}, ValueError, r"arrival_steps\[0\] = -1"),
        ([[5]], {"decoder_prompt": [1]}, ValueError, "the model is decoder-only"),
    ],
)
def test_bad_input_raises(
    prompts: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        generate(tiny("llama"), prompts, **{"implementation": "reference", **options})


@pytest.mark.parametrize(
    ("name", "prompts", "options", "words"),
    [
        ("bart", [[5]], {"arrival_steps": [0]}, "the model is an encoder-decoder"),
        ("bart", [[5] * 9], {"num_blocks": 2, "block_size": 4}, "3 blocks for its enc"),
        ("bart", [[5]], {"decoder_prompt": [96]}, r"decoder_prompt\[0\] = 96"),
        ("bart", [[5]], {"decoder_prompt": []}, "at least one token"),
        ("whisper", [], {}, r"is empty: expected a list of tensors \[bands, frames\]"),
        ("whisper", [torch.zeros(8)], {}, r"prompts\[0\] has shape \[8\]"),
        (
            "whisper",
            [torch.zeros(8, 40), [5]],
            {},
            r"prompts\[1\] = \[5\] is list: .*ten",
        ),
        ("whisper", torch.zeros(1, 8), {}, r"prompts\[0\] has shape \[8\]"),
    ],
)
def test_bad_input_of_an_encoder_raises(
    name: str, prompts: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        generate(tiny(name), prompts, "reference", **options)


@pytest.fixture
def model() -> Any:
    """Return a copy of a model that runs on the reference."""
    model = copy.deepcopy(tiny("llama"))
    model.set_attn_implementation(register("reference"))
    return model


def test_unsupported_calls_raise(model: Any) -> None:
    ids = on_device([[5, 6, 7]])
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"):
        model(ids)
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"expected torch\.bool"):
            model(ids, attention_mask=torch.zeros(1, 1, 3, 3, device=ids.device))
        with pytest.raises(ValueError, match=r"expected \[1, 1, 3, 3\]"):
            wide = torch.ones(1, 1, 3, 4, dtype=torch.bool, device=ids.device)
            model(ids, attention_mask=wide)
        # two sequences packed into one row; the library detects them by their positions
        with pytest.raises(NotImplementedError, match="other masks are not supported"):
            model(ids, position_ids=on_device([[0, 1, 0]]), use_cache=False)
        model.config.attention_dropout = 0.5
        for layer in model.train().model.layers:
            layer.self_attn.attention_dropout = 0.5
        with pytest.raises(NotImplementedError, match=r"dropout = 0\.5"):
            model(ids)


def test_pages_and_model_must_use_the_same_implementation(model: Any) -> None:
    batch = PagedBatch("pagetwin.reference", 4, block_size=4, device=model.device)
    with pytest.raises(ValueError, match="expected begin_step"):
        batch.model_inputs([5])
    batch.begin_step([2], [0], [[1]])
    with pytest.raises(ValueError, match="expected the 2 of the step"):
        batch.model_inputs([5])
    with torch.no_grad(), pytest.raises(ValueError, match="the same implementation"):
        model(**batch.model_inputs([5, 6]))


def test_keys_in_pages_are_read_only_by_a_twin(model: Any) -> None:
    ids = on_device([[5, 6, 7]])
    with torch.no_grad(), pytest.raises(TypeError, match="are stored in pages"):
        tiny("llama")(ids, past_key_values=PagedCache(4, 4, "reference"))
    with torch.no_grad(), pytest.raises(ValueError, match="the same implementation"):
        model(ids, past_key_values=PagedCache(4, 4, "pagetwin.reference"))
    cache = PagedCache(1, 2, "reference")
    with torch.no_grad(), pytest.raises(RuntimeError, match="needs 2 new blocks"):
        model(ids, past_key_values=cache)
    cache = PagedCache(9, 4, "reference")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="2 requests: expected 1"):
            model(ids.expand(2, 3), past_key_values=cache)
        cache.reset()
        model(ids.expand(2, 3), past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys.shape == (2, 2, 3, 16)
    assert repr(keys) == "KeysInPages()"


def test_both_twins_are_registered_under_their_names() -> None:
    names = register_all()
    assert names == ("pagetwin_reference", "pagetwin_optimized")
    assert set(names) <= set(transformers.AttentionInterface().valid_keys())


def test_without_the_library_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import pagetwin.integrations\n"
        "try:\n    import pagetwin.integrations.transformers\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'pagetwin[transformers]'" in done.stdout


def test_the_old_import_path_names_the_new_one() -> None:
    with pytest.raises(ImportError, match=r"pagetwin\.integrations\.transformers"):
        import_module("pagetwin.shared.integrations.transformers")

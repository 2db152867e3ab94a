"""Models of transformers whose positions are not those of their own sequence."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers
from library_models import PROMPTS, VERSION, library_tokens, on_device, tiny
from pagetwin.integrations.transformers import (
    PagedBatch,
    Statistics,
    generate,
    register,
    use_attention,
)
from support.tiny_models import SIZES, VOCABULARY

pytestmark = pytest.mark.extended

BART_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BERT_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "is_decoder": True,
    "pad_token_id": 1,
}

IGNORES = [
    "Bart",
    "MBart",
    "Pegasus",
    "Blenderbot",
    "BlenderbotSmall",
    "PLBart",
    "Marian",
]
COUNTS = ["Roberta", "Camembert", "XLMRoberta", "XLMRobertaXL", "Data2VecText"]


@functools.cache
def small(architecture: str) -> Any:
    """Return a model with random weights that are large enough to matter."""
    model_class = getattr(transformers, architecture)
    is_bart = any(architecture.startswith(name) for name in IGNORES)
    sizes = BART_SIZES if is_bart else BERT_SIZES
    model = model_class(model_class.config_class(**sizes)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * (1.0 if "embed" in name else 0.3))
    model.generation_config.eos_token_id = None
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


INEXACT = [
    *((f"{name}ForCausalLM", "takes no position_ids") for name in IGNORES),
    *((f"{name}ForCausalLM", r"from pad_token_id \+ 1") for name in COUNTS),
]


@pytest.mark.parametrize(("architecture", "words"), INEXACT)
def test_a_model_with_other_positions_raises_in_its_first_step(
    architecture: str, words: str
) -> None:
    """It gave other tokens, silently; in `generate` and in steps of a PagedBatch."""
    model = small(architecture)
    with pytest.raises(NotImplementedError, match=words):
        generate(model, [[5, 6], [7]], "reference", max_new_tokens=2)
    assert model.config._attn_implementation in ("eager", "sdpa")
    batch = PagedBatch("reference", 4, 4, model.device)
    batch.begin_step([2], [0], [[1]])
    with (
        torch.no_grad(),
        use_attention(model, "reference"),
        pytest.raises(NotImplementedError, match=words),
    ):
        model(**batch.model_inputs([5, 6]))
    assert not batch.pages


@pytest.mark.parametrize("architecture", ["BertLMHeadModel", "BertGenerationDecoder"])
def test_models_of_the_same_kind_with_plain_positions_run(architecture: str) -> None:
    model = small(architecture)
    prompts = [[5, 6, 7], [8] * 9, [9]]
    told = library_tokens(model, prompts, max_new_tokens=3)
    found = generate(model, prompts, "reference", max_new_tokens=3, max_batch_tokens=4)
    assert found == told


def test_an_encoder_and_a_decoder_with_own_configurations_raise() -> None:
    encoder = transformers.BertConfig(**{**BERT_SIZES, "is_decoder": False})
    decoder = transformers.BertConfig(**BERT_SIZES, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder
    )
    model = transformers.EncoderDecoderModel(config).eval()
    with pytest.raises(NotImplementedError, match="joins an encoder and a decoder"):
        generate(model, [[5]], "reference")


# --- rotary positions that depend on the longest sequence


def rotary(kind: str) -> Any:
    """Return a Llama whose frequencies change after 16 tokens."""
    ropes: dict[str, dict[str, Any]] = {
        "dynamic": {"factor": 4.0},
        "longrope": {
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 16,
            "factor": 8.0,
        },
    }
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ropes[kind]}
    length = 16 if kind == "dynamic" else 128
    config = transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": length, "rope_parameters": rope}
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    model.generation_config.eos_token_id = None
    return model.to(tiny("llama").device)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_other_requests_raise_when_they_would(
    kind: str,
) -> None:
    """A request of more than 16 tokens changed the frequencies of all others in its step."""
    model, prompts = rotary(kind), [[5] * 14, [7, 8, 9]]
    told = library_tokens(model, prompts, max_new_tokens=3)
    found = generate(model, prompts, "reference", max_new_tokens=3, max_batch_tokens=6)
    assert found == told
    with pytest.raises(NotImplementedError, match=f"{kind!r}, and a sequence of 17"):
        generate(model, [[7, 8, 9], [5] * 14], "reference", max_new_tokens=4)
    batch = PagedBatch("reference", 6, 4, model.device)
    with torch.no_grad(), use_attention(model, "reference"):
        batch.begin_step([17], [0], [range(5)])
        with pytest.raises(NotImplementedError, match="expected at most 16"):
            model(**batch.model_inputs([5] * 17))


# --- a temperature that depends on the row


def library_logits(model: Any) -> list[Tensor]:
    """Return the logits of the library's generate, prompt by prompt."""
    logits = []
    for prompt in PROMPTS:
        run = model.generate(
            on_device([prompt]),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits.append(torch.cat(run.logits))
    return logits


@pytest.mark.parametrize("floor_scale", [6, 9])
@pytest.mark.parametrize("chunk", [3, 16])
def test_llama_4_scales_queries_by_their_position(floor_scale: int, chunk: int) -> None:
    """The layers without RoPE scaled them by their index in the row of the step."""
    model = copy.deepcopy(tiny("llama4"))
    for layer in model.model.layers:
        layer.self_attn.floor_scale = floor_scale
        layer.self_attn.attn_scale = -5.0
    told, statistics = library_logits(model), Statistics(keep_logits=True)
    generate(
        model,
        PROMPTS,
        "reference",
        max_new_tokens=4,
        max_batch_tokens=chunk,
        statistics=statistics,
    )
    for found, right in zip(statistics.logits, told, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    unscaled = library_logits(tiny("llama4"))
    assert (told[1][0] - unscaled[1][0]).abs().max() > 1e-2


def test_llama_4_raises_for_a_step_whose_rows_are_scaled() -> None:
    model = copy.deepcopy(tiny("llama4"))
    for layer in model.model.layers:
        layer.self_attn.floor_scale = 4
    batch = PagedBatch("reference", 4, 4, model.device)
    with torch.no_grad(), use_attention(model, "reference"):
        batch.begin_step([4], [0], [[1]])
        with pytest.raises(NotImplementedError, match="fewer than 4 tokens per step"):
            model(**batch.model_inputs([5] * 4))
        batch.begin_step([3], [0], [[1]])
        model(**batch.model_inputs([5] * 3))
    for layer in model.model.layers:
        layer.self_attn.floor_scale = 1
    with pytest.raises(NotImplementedError, match="from row 0 of a step on"):
        generate(model, [[5]], "reference")


# --- tables of positions


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("BertLMHeadModel", {"max_position_embeddings": 20}),
        ("GPT2LMHeadModel", {"n_positions": 20}),
        ("OPTForCausalLM", {"max_position_embeddings": 20}),
        ("CTRLLMHeadModel", {"n_positions": 20}),
        ("CodeGenForCausalLM", {"n_positions": 20}),
        ("BioGptForCausalLM", {"max_position_embeddings": 20}),
    ],
)
def test_a_prompt_longer_than_the_table_of_positions_raises_at_the_start(
    architecture: str, changes: dict[str, int]
) -> None:
    """It raised after some steps: index out of range in self."""
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_embd": 32, "n_layer": 2}
    common |= {"num_hidden_layers": 2, "n_head": 2, "num_attention_heads": 2}
    common |= {"ffn_dim": 48, "dff": 48, "intermediate_size": 48, "rotary_dim": 8}
    common |= {"word_embed_proj_dim": 32, "is_decoder": True}
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**common, **changes})
    model = model_class(config).eval()
    if VERSION < (5, 24) and architecture == "CodeGenForCausalLM":
        model.set_attn_implementation(register("reference"))
        if model.config._attn_implementation == "eager":
            pytest.skip("CodeGen of this version computes its own attention")
    with pytest.raises(ValueError, match=r"prompts\[1\] has 21 positions, .* has 20"):
        generate(model, [[5], [5] * 18], "reference", max_new_tokens=4, eos_token_id=[])
    longest = generate(
        model, [[5] * 17], "reference", max_new_tokens=4, eos_token_id=[]
    )
    assert len(longest[0]) == 4


@pytest.mark.parametrize(
    ("prompts", "count", "words"),
    [
        ([[5], [5] * 65], 1, r"prompts\[1\] has 65 positions"),
        ([[5]], 65, "decoder_prompt with max_new_tokens has 65 positions"),
    ],
)
def test_an_encoder_decoder_raises_for_too_long_inputs_at_the_start(
    prompts: list[list[int]], count: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        generate(tiny("bart"), prompts, "reference", max_new_tokens=count)

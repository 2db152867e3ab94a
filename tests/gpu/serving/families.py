"""Small models of real architectures with seeded weights, their prompts, and their greedy tokens.

Every program of the table of engines builds them again from the same seeds, so nothing is
downloaded or carried. The weights are those of `seeded`: attention is sharp, so that a wrong key
changes the tokens, and the logits of each model have the standard deviation `SPREAD`, so that
margins of different models can be compared.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import real_weights
import torch
import transformers
from models import SAMPLE_RATE, write_processor
from torch import Tensor

VOCABULARY = 512
NEW_TOKENS = 32
SPREAD = 4.0
"""Standard deviation of the logits over the vocabulary."""
LENGTHS = (5, 23, 1, 12, 40, 60, 33, 28)
"""Tokens of the prompts. The last of all begins with the tokens of the second one."""
AUDIO_SECONDS = 2
TONES = 8
FIRST = 3
"""Special tokens have the ids below, and no prompt has them."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LONGEST = 128
"""Tokens of a request with its answer, at most."""
WINDOW = 16
ALTERNATING = ["sliding_attention", "full_attention"]
HEADS = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {name: SIZES[name] for name in SIZES if name.endswith(("_id", "vocab_size"))}
TWO_STACKS = {
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    # all layers are dense, so that rounding chooses no experts
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SIZES),
    "Qwen3": ("Qwen3", SIZES),
    "Mistral": ("Mistral", SIZES | {"sliding_window": WINDOW}),
    "Gemma 2": (
        "Gemma2",
        SIZES
        | {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            # SGLang reads this name, and transformers reads `hidden_activation`
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "Gemma 3": (
        "Gemma3",
        SIZES
        | {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
        },
    ),
    "Phi-3": ("Phi3", SIZES),
    # every token uses all experts, so that rounding chooses no others
    "gpt-oss": (
        "GptOss",
        SIZES
        | {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
        },
    ),
    "Falcon": (
        "Falcon",
        TOKENS
        | HEADS
        | {
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "tie_word_embeddings": False,
        },
    ),
    "MPT": (
        "Mpt",
        TOKENS | {"d_model": 256, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    ),
    "DeepSeek V2": ("DeepseekV2", SIZES | LATENT | {"topk_method": "greedy"}),
    "DeepSeek V3": ("DeepseekV3", SIZES | LATENT),
    "Whisper": (
        "Whisper",
        TOKENS
        | TWO_STACKS
        | {
            "num_mel_bins": 16,
            "max_source_positions": 50 * AUDIO_SECONDS,
            "max_target_positions": 256,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "BART": ("Bart", TOKENS | TWO_STACKS | {"max_position_embeddings": 256}),
    "T5": (
        "T5",
        TOKENS
        | {
            "d_model": 256,
            "d_kv": 64,
            "d_ff": 512,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 1,
            "tie_word_embeddings": False,
        },
    ),
}
"""The architecture and the configuration of each family."""

ENCODER_DECODER = ("Whisper", "BART", "T5")
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
CLASSES = dict.fromkeys(("Whisper", "Bart", "T5"), "ForConditionalGeneration")
LAST_NORMS = {
    "Falcon": "transformer.ln_f",
    "MPT": "transformer.norm_f",
    "Whisper": "model.decoder.layer_norm",
    "BART": "model.decoder.layers.1.final_layer_norm",
    "T5": "decoder.final_layer_norm",
}
"""The norm before the language head. The others call it `model.norm`."""


def use_real(folder: Path) -> None:
    """Let the trained model of `real_weights.py` be a family, with its own prompts."""
    global LENGTHS, LONGEST
    FAMILIES[real_weights.FAMILY] = ("Llama", {"folder": folder.resolve()})
    LENGTHS = tuple(map(len, real_weights.tokens(folder, "prompts")))
    LONGEST = 512


def real_text() -> list[int]:
    """Return the token ids of the page of text of the trained model."""
    folder = FAMILIES[real_weights.FAMILY][1]["folder"]
    ids: list[int] = real_weights.tokens(folder, "text")
    return ids


def build(family: str) -> Any:
    """Return the model of a family in float32 on the CPU, in evaluation mode, with eager attention.

    Args:
        family: a key of FAMILIES.
    """
    name, sizes = FAMILIES[family]
    if family == real_weights.FAMILY:
        return real_weights.load(sizes["folder"])
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(
        **sizes, attn_implementation="eager", dtype="float32"
    )
    kind = getattr(transformers, name + CLASSES.get(name, "ForCausalLM"))
    model = kind(config).eval()
    if hasattr(model, "set_experts_implementation") and family == "gpt-oss":
        model.set_experts_implementation("eager")
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    seed_weights(model)
    norm = model.get_submodule(LAST_NORMS.get(family, "model.norm"))
    spread = logits(model, family, [[] for _ in LENGTHS])[:, -1].std(-1).mean().item()
    with torch.no_grad():
        adds_one = float(family.startswith("Gemma"))
        norm.weight.copy_((norm.weight + adds_one) * (SPREAD / spread) - adds_one)
    return model


def seed_weights(model: Any) -> None:
    """Give each parameter values that follow from its name alone; norms keep theirs.

    Projections of queries and keys are larger than usual, so that attention is sharp. An embedding
    that is the language head too is small. Otherwise the most likely token is the last one.
    """
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or _is_norm(name):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn * _deviation(model.config, name, parameter, tied))


def _is_norm(name: str) -> bool:
    return any(part in name for part in ("norm", "ln_", "layernorm"))


def _deviation(config: Any, name: str, parameter: Tensor, tied: bool) -> float:
    """Return the standard deviation of a parameter's values."""

    def has(*parts: str) -> bool:
        return any(part in name for part in parts)

    if has("embed", "wte", "shared") and "positions" not in name:
        enlarged = config.hidden_size**0.5 if "gemma" in config.model_type else 1.0
        return (0.1 if tied else 1.0) / enlarged
    if has("positions", "sinks", "relative_attention_bias"):
        return 1.0
    if name.endswith("bias"):
        return 0.1
    # experts of gpt-oss are [experts, inputs, outputs]
    inputs = parameter.shape[-2] if "experts" in name else parameter[0].numel()
    deviation = float(inputs) ** -0.5
    if "conv" in name:
        return 4.0 * deviation
    if has("encoder_attn.q", "encoder_attn.k"):
        return 3.0 * deviation
    if has("Attention.q."):  # T5 does not scale its scores
        return 1.6 * deviation * float(config.d_kv) ** -0.5
    if has("q_proj", "k_proj", "qkv", "query_key_value", "q_b_proj", "Attention.k."):
        return 1.6 * deviation
    if (config.is_encoder_decoder or tied) and has("attn.out", "SelfAttention.o"):
        return 2.0 * deviation
    return deviation


def prompts(family: str) -> list[list[int]]:
    """Return the prompts of a family: tokens of the decoder, or of the encoder of BART and T5."""
    if family == real_weights.FAMILY:
        rows = real_weights.tokens(FAMILIES[family][1]["folder"], "prompts")
        return rows[: len(LENGTHS)]
    drawn = random.Random(f"prompts of {family}")
    rows = [[drawn.randrange(FIRST + 1, VOCABULARY) for _ in range(n)] for n in LENGTHS]
    rows[-1][: LENGTHS[1]] = rows[1][: len(rows[-1])]
    return rows


def audio(family: str) -> list[Any]:
    """Return a sequence of tones per prompt, [samples] float32."""
    drawn = random.Random(f"tones of {family}")
    length = AUDIO_SECONDS * SAMPLE_RATE // TONES
    time = np.arange(length) / SAMPLE_RATE
    return [
        np.concatenate(
            [np.sin(2 * np.pi * drawn.uniform(100, 4000) * time) for _ in range(TONES)]
        ).astype(np.float32)
        for _ in LENGTHS
    ]


def features(family: str) -> Tensor:
    """Return the spectrogram of each piece of noise, [prompts, bands, frames]."""
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=FAMILIES[family][1]["num_mel_bins"], chunk_length=AUDIO_SECONDS
    )
    found = extractor(audio(family), sampling_rate=SAMPLE_RATE, return_tensors="pt")
    made: Tensor = found.input_features
    return made


def inputs(
    family: str, answers: Sequence[Sequence[int]], device: Any
) -> dict[str, Any]:
    """Return the arguments of the model for all prompts in one batch, padded.

    Args:
        family: a key of FAMILIES.
        answers: Tokens after each prompt, all of one length.
        device: of the tensors.
    """
    rows, start = prompts(family), FAMILIES[family][1].get("decoder_start_token_id")
    made: dict[str, Any]
    if family not in ENCODER_DECODER:
        rows = [[*row, *answer] for row, answer in zip(rows, answers, strict=True)]
        ids, mask = padded(rows, left=True)
        made = {"input_ids": ids, "attention_mask": mask}
    else:
        answered = torch.tensor([[start, *answer] for answer in answers])
        if family == "Whisper":
            made = {"input_features": features(family)}
        else:
            ids, mask = padded(rows, left=False)
            made = {"input_ids": ids, "attention_mask": mask}
        made["decoder_input_ids"] = answered
    return {name: tensor.to(device) for name, tensor in made.items()}


def padded(rows: Sequence[Sequence[int]], left: bool) -> tuple[Tensor, Tensor]:
    """Return rows of one length with padding on one side, and the mask of their tokens."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[number, place] = torch.tensor(row)
        mask[number, place] = 1
    return ids, mask


@torch.no_grad()
def logits(model: Any, family: str, answers: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits that follow each token of the answers, and the prompts.

    Args:
        model: of transformers.
        family: a key of FAMILIES.
        answers: Tokens after each prompt, all of one length.

    Returns:
        [prompts, answers + 1, vocabulary] float32.
    """
    given = inputs(family, answers, model.device)
    if "input_features" in given:
        given["input_features"] = given["input_features"].to(model.dtype)
    elif family not in ENCODER_DECODER and takes_positions(model):
        positions = given["attention_mask"].cumsum(1) - 1
        given["position_ids"] = positions.clamp(min=0)
    kept = len(answers[0]) + 1
    return model(**given).logits[:, -kept:].float()


def takes_positions(model: Any) -> bool:
    """Return whether a model has the argument `position_ids`."""
    code = getattr(model.forward, "__wrapped__", model.forward).__code__
    return "position_ids" in code.co_varnames


@torch.no_grad()
def library_tokens(model: Any, family: str) -> list[list[int]]:
    """Return the greedy tokens of the library's own generate, all prompts in one batch."""
    given = inputs(family, [[] for _ in LENGTHS], model.device)
    if "input_features" in given:
        given["input_features"] = given["input_features"].to(model.dtype)
    generate: Callable[..., Any] = transformers.GenerationMixin.generate
    found = generate(
        model, **given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    tokens: list[list[int]] = found[:, -NEW_TOKENS:].tolist()
    return tokens


def write(family: str, folder: Path, dtype: str) -> Path:
    """Write the model of a family, and what its processor reads; return its folder."""
    if family == real_weights.FAMILY:
        return Path(FAMILIES[family][1]["folder"])
    path = folder / family.replace(" ", "-")
    if not (path / "config.json").exists():
        build(family).to(getattr(torch, dtype)).save_pretrained(path)
        if family == "Whisper":
            write_processor(path, FAMILIES[family][1])
    return path

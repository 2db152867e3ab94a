"""Models of the serving runs: configurations without weights, and their prompts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The shapes of Llama 3 8B, with 8 of its 32 layers."""

SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SMALLEST: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small enough for a CPU."""

WINDOW = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 33,
}

GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}
"""Head size 256, soft cap, and windows in every other layer."""

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
    },
}
"""Sinks, and windows in every other layer; experts that are not quantised."""

DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Latent attention; both layers are dense."""

DEEPSEEK_V32 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "q_lora_rank": 512,
    "rope_interleave": True,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 256,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
"""Sparse latent attention: each token attends to 256 keys, which the indexer of its layer selects.
The sizes of the indexer are those that vLLM's kernels take."""

WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 1280,
    "encoder_layers": 8,
    "decoder_layers": 8,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "vocab_size": 51866,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "torch_dtype": "bfloat16",
}
"""The shapes of Whisper large, with 8 of its 32 layers: cross-attention to 1,500 positions."""

SHORT_AUDIO = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "num_mel_bins": 16,
    "max_source_positions": 100,
    "max_target_positions": 128,
    "vocab_size": 512,
}
"""Two seconds of audio, for a CPU."""

GEMMA_8 = {
    **GEMMA,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
"""The shapes of Gemma 2 9B, with 8 of its 42 layers."""

GPT_OSS_8 = {
    **GPT_OSS,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
}
"""The shapes of gpt-oss 20B, with 8 of its 24 layers, in bfloat16."""

DEEPSEEK_8 = {
    **DEEPSEEK,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 8,
    "vocab_size": 102400,
}
"""The shapes of DeepSeek V2 Lite, with 8 of its 27 layers, all of them dense."""

DRAFTS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
"""Speculative decoding: drafts are the tokens that followed the last ones earlier in the prompt."""

MODELS: dict[str, dict[str, Any]] = {
    "llama-8": LLAMA,
    # so few words that the prompt has nearly every one, and each step has drafts
    "llama-8-drafts": {
        **LLAMA,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": {**LLAMA, "num_hidden_layers": 32},
    "tiny": {**LLAMA, **SMALL},
    "deep": {**LLAMA, **SMALL, "num_hidden_layers": 32},
    "one-kv-head": {**LLAMA, **SMALL, "num_key_value_heads": 1, "head_dim": 64},
    "small": {**LLAMA, **SMALLEST},
    "small-one-kv-head": {**LLAMA, **SMALLEST, "num_key_value_heads": 1},
    "windowed": {**LLAMA, **SMALLEST, **WINDOW},
    "small-groups": {
        **LLAMA,
        **SMALLEST,
        **GEMMA,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 33,
    },
    "gemma": {**LLAMA, **SMALL, **GEMMA},
    "gpt-oss": {**LLAMA, **SMALL, **GPT_OSS},
    "deepseek": {**LLAMA, **SMALL, **DEEPSEEK},
    "sparse-deepseek": {**LLAMA, **SMALL, **DEEPSEEK_V32},
    "whisper": WHISPER,
    "small-whisper": {**WHISPER, **SHORT_AUDIO},
    "small-gemma": {**LLAMA, **SMALLEST, **GEMMA},
    "small-gpt-oss": {**LLAMA, **SMALLEST, **GPT_OSS, "intermediate_size": 256},
    "gemma-8": {**LLAMA, **GEMMA_8},
    "gpt-oss-8": {**LLAMA, **GPT_OSS_8},
    "deepseek-8": {**LLAMA, **DEEPSEEK_8},
}
"""The configuration of each model, by the name that the command line takes."""


SAMPLE_RATE = 16_000


def has_audio(name: str) -> bool:
    """Return whether a model attends to audio."""
    return bool(MODELS[name]["model_type"] == "whisper")


def write_model(folder: Path, name: str) -> Path:
    """Write the configuration of a model, and what its processor reads; return its folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    if has_audio(name):
        write_processor(path, MODELS[name])
    return path


def write_processor(path: Path, config: dict[str, Any]) -> None:
    """Write a tokenizer of numbered words, and the settings of the spectrogram."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    words = ["<|endoftext|>", "<|pad|>", "<|end|>", "<|startoftranscript|>"]
    words += [f"w{number}" for number in range(len(words), config["vocab_size"])]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = WhisperTokenizer(vocab=vocab, merges=[])
    features = WhisperFeatureExtractor(
        feature_size=config["num_mel_bins"],
        # two frames of 10 ms per position
        chunk_length=config["max_source_positions"] // 50,
    )
    WhisperProcessor(features, tokenizer).save_pretrained(path)


def draw_prompt(name: str, draw: random.Random, length: int) -> Any:
    """Return a prompt of random tokens for vLLM, with noise for a model that attends to audio.

    Args:
        name: of the model.
        draw: source of random numbers.
        length: tokens. The prompt repeats a part of itself, for drafts from its n-grams.
    """
    config = MODELS[name]
    part = [draw.randrange(config["vocab_size"]) for _ in range(-(-length // 2))]
    tokens = {"prompt_token_ids": (part + part)[:length]}
    if not has_audio(name):
        return tokens
    samples = config["max_source_positions"] // 50 * SAMPLE_RATE
    noise = np.random.default_rng(draw.randrange(2**32)).standard_normal(samples)
    audio = (noise.astype(np.float32), SAMPLE_RATE)
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": audio}},
        "decoder_prompt": tokens,
    }


def engine_options(name: str, longest: int, tokens: int) -> dict[str, Any]:
    """Return the arguments of `LLM` that depend on the model.

    Args:
        name: of the model.
        longest: tokens of the longest request, if the model takes as many.
        tokens: new tokens of a step; for a model that attends to audio, 16 pieces of audio.
    """
    if not has_audio(name):
        return {
            "max_model_len": longest,
            "max_num_batched_tokens": tokens,
            "skip_tokenizer_init": True,
        }
    config = MODELS[name]
    return {
        "max_model_len": min(longest, config["max_target_positions"]),
        "max_num_batched_tokens": 16 * config["max_source_positions"],
    }

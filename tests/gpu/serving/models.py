"""Models of the serving runs: configurations without weights, and seeded weights."""

import json
import zlib
from pathlib import Path
from typing import Any

import torch

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
        "factor": 4.0,
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

MODELS: dict[str, dict[str, Any]] = {
    "llama-8": LLAMA,
    "tiny": {**LLAMA, **SMALL},
    "small": {**LLAMA, **SMALLEST},
    "windowed": {**LLAMA, **SMALLEST, **WINDOW},
    "gemma": {**LLAMA, **SMALL, **GEMMA},
    "gpt-oss": {**LLAMA, **SMALL, **GPT_OSS},
    "deepseek": {**LLAMA, **SMALL, **DEEPSEEK},
}
"""The configuration of each model, by the name that the command line takes."""


def write_model(folder: Path, name: str) -> Path:
    """Write the configuration of a model; return its folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    return path


def seed_weights(model: torch.nn.Module) -> None:
    """Give each parameter values that follow from its name alone.

    Every process then has the same model. Projections of queries and keys are larger, so that a
    wrong key changes the output.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.is_floating_point():
                continue
            if param.dim() < 2 and "sinks" not in name:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = 1.0 if "embed" in name else param.shape[-1] ** -0.5
            if any(part in name for part in ("qkv", "q_proj", "kv_a_proj", "sinks")):
                std *= 2.0
            generator = torch.Generator(device=param.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            param.normal_(0.0, std, generator=generator)

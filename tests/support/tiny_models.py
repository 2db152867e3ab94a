"""Small models of transformers with random weights; nothing is downloaded.

The weights have a large standard deviation. With the library's default of 0.02 all logits are
nearly equal, and a model that attends to the wrong keys would give the same tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 96

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
WINDOW = 8
ONE_KV_HEAD = {**SIZES, "num_key_value_heads": 1}


def llama() -> Any:
    """Two query heads share a key/value head."""
    return transformers.LlamaConfig(**SIZES)


def mistral() -> Any:
    """Every layer has a sliding window; all query heads share one key/value head."""
    return transformers.MistralConfig(**ONE_KV_HEAD, sliding_window=WINDOW)


def qwen3() -> Any:
    """Queries and keys are normalized; one layer of two has a window."""
    return transformers.Qwen3Config(
        **ONE_KV_HEAD,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    )


def gemma2() -> Any:
    """Scores are capped; windows alternate with full layers."""
    return transformers.Gemma2Config(
        **ONE_KV_HEAD,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    )


def gpt_oss() -> Any:
    """Every head has a sink; windows alternate with full layers."""
    return transformers.GptOssConfig(
        **ONE_KV_HEAD, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1
    )


def llama4() -> Any:
    """Chunked attention; every second layer attends to the whole sequence."""
    return transformers.Llama4TextConfig(
        **ONE_KV_HEAD,
        intermediate_size_mlp=48,
        attention_chunk_size=WINDOW,
        num_local_experts=2,
        num_experts_per_tok=1,
        no_rope_layers=[1, 0],
    )


def stablelm() -> Any:
    """The decoder layer passes no further keywords to its attention; rotary on half a head."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return transformers.StableLmConfig(
        **sizes, rope_parameters=rope, use_parallel_residual=True
    )


def nemotron() -> Any:
    """The decoder layer passes no further keywords to its attention."""
    return transformers.NemotronConfig(**SIZES)


def falcon() -> Any:
    """Own attention code; four query heads share two key/value heads; rotary positions."""
    return transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        attn_implementation="eager",
    )


def falcon_7b() -> Any:
    """Own attention code; all query heads share one key/value head; rotary positions."""
    return transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        multi_query=True,
        attn_implementation="eager",
    )


def bloom() -> Any:
    """Own attention code; ALiBi with six heads, so the slopes are of two series."""
    return transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6
    )


def mpt() -> Any:
    """Own attention code; ALiBi with six heads; queries, keys and values are clipped."""
    return transformers.MptConfig(
        vocab_size=VOCABULARY,
        d_model=48,
        n_layers=2,
        n_heads=6,
        max_seq_len=64,
        attn_config={"clip_qkv": 1.5},
    )


def bart() -> Any:
    """Learned positions, an encoder and a decoder."""
    return transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        dropout=0.0,
        attn_implementation="eager",
    )


def t5() -> Any:
    """A bias by distance instead of positions; scores are not scaled."""
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
        attn_implementation="eager",
    )


def t5gemma() -> Any:
    """Windows that alternate with full layers, in the encoder too; scores are capped."""
    module = {
        **ONE_KV_HEAD,
        "num_hidden_layers": 2,
        "sliding_window": 2,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
    }
    del module["attn_implementation"]
    return transformers.T5GemmaConfig(
        encoder=module,
        decoder=module,
        vocab_size=VOCABULARY,
        decoder_start_token_id=1,
        attn_implementation="eager",
    )


def whisper() -> Any:
    """Audio input: 20 positions of the encoder, without padding."""
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.0,
        attn_implementation="eager",
    )


SPREADS = (
    ("relative_attention_bias", 1.0),
    ("embed_tokens", 1.0),
    ("shared", 1.0),
    ("q_proj", 0.4),
    ("k_proj", 0.4),
    ("SelfAttention.q", 0.25),
    ("SelfAttention.k", 0.25),
    ("EncDecAttention.q", 0.25),
    ("EncDecAttention.k", 0.25),
    ("sinks", 1.0),
    ("experts", 0.1),
    ("query_key_value", 0.4),
    ("self_attention.dense", 1.0),
    ("Wqkv", 0.4),
    ("word_embeddings", 1.0),
    ("wte", 1.0),
)

DECODER_ONLY: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (llama, "LlamaForCausalLM"),
    "mistral": (mistral, "MistralForCausalLM"),
    "qwen3": (qwen3, "Qwen3ForCausalLM"),
    "gemma2": (gemma2, "Gemma2ForCausalLM"),
    "gpt_oss": (gpt_oss, "GptOssForCausalLM"),
    "llama4": (llama4, "Llama4ForCausalLM"),
    "stablelm": (stablelm, "StableLmForCausalLM"),
    "nemotron": (nemotron, "NemotronForCausalLM"),
    "falcon": (falcon, "FalconForCausalLM"),
    "falcon_7b": (falcon_7b, "FalconForCausalLM"),
    "bloom": (bloom, "BloomForCausalLM"),
    "mpt": (mpt, "MptForCausalLM"),
}
ENCODER_DECODER: dict[str, tuple[Callable[[], Any], str]] = {
    "bart": (bart, "BartForConditionalGeneration"),
    "t5": (t5, "T5ForConditionalGeneration"),
    "t5gemma": (t5gemma, "T5GemmaForConditionalGeneration"),
    "whisper": (whisper, "WhisperForConditionalGeneration"),
}


def make_model(name: str) -> Any:
    """Return a model of that name in float32, in evaluation mode.

    Args:
        name: a key of DECODER_ONLY or ENCODER_DECODER.
    """
    make_config, architecture = {**DECODER_ONLY, **ENCODER_DECODER}[name]
    generator = torch.Generator().manual_seed(20)
    model = getattr(transformers, architecture)(make_config()).eval()
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the other one has no float64
    # with a head that is tied to the embedding, the most likely token is the input token
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * _spread(parameter_name))
            elif name == "nemotron":
                # its norms multiply by 1 + weight; with the weights 1 of a new model, scores are
                # four times as large, and so are their rounding errors
                parameter.zero_()
    model.generation_config.eos_token_id = None
    return model


def _spread(parameter_name: str) -> float:
    """Return the standard deviation of a weight: sharp attention, a strong last token."""
    for name, spread in SPREADS:
        if name in parameter_name:
            return spread
    return 0.2

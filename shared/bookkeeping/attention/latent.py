"""The widths of a model's latent attention."""

from typing import Any

from ...contract.latent_classes import MLADims as MLADims
from ...validation.latent import check_mla_config


def get_mla_dims(hf_text_config: Any) -> MLADims:
    """Return the widths of a model's latent attention.

    Args:
        hf_text_config: text configuration of a Hugging Face model. `q_lora_rank` may be missing
            or None.

    Raises:
        ValueError: a width is missing or below 1.

    Source:
        vLLM's function of that name; DeepSeek-V2, 2024.

    Example:
        >>> from types import SimpleNamespace
        >>> get_mla_dims(SimpleNamespace(
        ...     kv_lora_rank=512,
        ...     qk_nope_head_dim=128,
        ...     qk_rope_head_dim=64,
        ...     v_head_dim=128,
        ... )).cached_width
        576
    """
    check_mla_config(hf_text_config)
    return MLADims(
        q_lora_rank=getattr(hf_text_config, "q_lora_rank", None),
        kv_lora_rank=hf_text_config.kv_lora_rank,
        qk_nope_head_dim=hf_text_config.qk_nope_head_dim,
        qk_rope_head_dim=hf_text_config.qk_rope_head_dim,
        v_head_dim=hf_text_config.v_head_dim,
    )

"""How does a layer attend whose cache holds one short vector a token instead of all heads?

Reading five numbers has no faster form: the two files are alike so far.
"""

from typing import Any

from ..shared.latent_classes import MLADims as MLADims
from ..shared.refusals.latent import check_mla_config


def get_mla_dims(hf_text_config: Any) -> MLADims:
    """Return the widths of a model's latent attention."""
    check_mla_config(hf_text_config)
    return MLADims(
        q_lora_rank=getattr(hf_text_config, "q_lora_rank", None),
        kv_lora_rank=hf_text_config.kv_lora_rank,
        qk_nope_head_dim=hf_text_config.qk_nope_head_dim,
        qk_rope_head_dim=hf_text_config.qk_rope_head_dim,
        v_head_dim=hf_text_config.v_head_dim,
    )

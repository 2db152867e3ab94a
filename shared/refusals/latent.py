"""Which configurations have no latent attention?"""

from typing import Any


def check_mla_config(hf_text_config: Any) -> None:
    """Refuse the configuration of a model without latent attention."""
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if getattr(hf_text_config, name, None) is None:
            raise ValueError(
                f"hf_text_config has no {name}: expected the configuration of a model"
                " with multi-head latent attention"
            )

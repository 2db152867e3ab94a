"""What layers of dense and of sparse latent attention (MLA) have in common: options and writes."""

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionType

from ...contract.latent_formats import LATENT_FORMATS
from .caches import FP8_NAMES

RECORD_NAMES = ("fp8_ds_mla", "nvfp4_ds_mla")
"""vLLM's names of caches of records, which sparse layers read. They are names of formats too."""


def record_bytes(kv_cache_dtype: str) -> int | None:
    """Return the bytes of a token by vLLM's name of a cache; None if it has elements."""
    if kv_cache_dtype not in RECORD_NAMES:
        return None
    return LATENT_FORMATS[kv_cache_dtype].record_bytes


def reject_layer(
    what: str,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    attn_type: str,
) -> None:
    """Raise NotImplementedError for an option or kind of attention that latent layers do not have.

    Args:
        what: the layer, and why it has no options.
        alibi_slopes, sliding_window, logits_soft_cap, attn_type: as in vLLM.
    """
    options = {
        "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
    }
    for name, given in options.items():
        if given:
            raise NotImplementedError(f"{name} = {given}: expected None for {what}")
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(
            f"attn_type = {attn_type}: expected decoder for latent attention"
        )


class WritesLatents:
    """Writes the latents and rope keys of a step.

    Attributes:
        run: the implementation that writes.
    """

    run: Any

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the step's latents and rope keys; tokens with slot -1 are not stored.

        Args:
            kv_c_normed: [tokens, kv_lora_rank].
            k_pe: [tokens, 1, qk_rope_head_dim], already rotated.
            kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], or bytes per record
                in the last axis. Modified in place.
            slot_mapping: slots of the first tokens.
            kv_cache_dtype: vLLM's name of the cache's dtype.
            k_scale: scale of an FP8 cache. Records store their own.
            skip_scale: whether the scale is 1. Not used, since the result is the same.
        """
        if not kv_cache.numel():
            return
        fp8 = FP8_NAMES.get(kv_cache_dtype)
        cache = kv_cache if fp8 is None else kv_cache.view(fp8)
        scale = None if fp8 is None else k_scale
        slots = slot_mapping.flatten()
        rope = k_pe.reshape(k_pe.shape[0], k_pe.shape[-1])
        self.run.concat_and_cache_mla(kv_c_normed, rope, cache, slots, scale)

"""Step metadata of latent attention (MLA) for vLLM: vLLM's own, for decodes of any lengths.

vLLM computes requests with few new tokens as decodes: these attend to the latents themselves, while
prefills expand the latents of the whole sequence to keys and values.
"""

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadataBuilder,
    QueryLenSupport,
)

from .builder import CapturesUniformBatches, give_bounds
from .caches import FP8_NAMES
from .settings import read_settings
from .warm_up import StepBounds

DECODE_THRESHOLD = 128
"""New tokens of a request up to which it is computed as a decode on Hopper chips.

On an H200 a decode took 0.24 to 0.66 of the time of a prefill with 64 new tokens, 0.44 to 0.93
with 128, 0.62 to 1.15 with 192 and 0.78 to 1.52 with 256 (`tests/gpu/latent_paths.py`, 2026-11-26:
16 and 128 heads, one and four requests of 1,024 to 32,768 keys)."""
LATENT_WIDTH = 576
"""Elements of a latent and its rope key that the kernel of Hopper chips takes."""


class PagetwinLatentBuilder(CapturesUniformBatches, MLACommonMetadataBuilder):
    """vLLM's metadata builder for latent attention, whose decodes may have any lengths."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        # vLLM's constructor adds the tokens of speculative decoding
        self.reorder_batch_threshold = _choose_threshold(
            kv_cache_spec, vllm_config, torch.device(device)
        )
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            # each new token has its own number of latents on a rank
            supports_dcp_with_varlen=True,
        )
        give_bounds(vllm_config, layer_names, self.reorder_batch_threshold)
        ranks = getattr(self, "dcp_world_size", 1)
        self.supports_draft_decode_metadata_update = ranks == 1
        self.draft_len = StepBounds.of(vllm_config).decode_query_len

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        """Return vLLM's metadata of a step, with the upper bound of its decodes' new tokens."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.num_decodes:
            starts = common_attn_metadata.query_start_loc_cpu
            lens = starts[: metadata.num_decodes + 1].diff()
            # On the device, drafts may be divided among the requests otherwise, and requests of a
            # captured graph may have no tokens.
            longest = max(int(lens.max()), self.draft_len)
            metadata.decode.max_query_len = max(
                1, min(longest, int(common_attn_metadata.max_query_len))
            )
        return metadata


def _choose_threshold(
    kv_cache_spec: Any, vllm_config: Any, device: torch.device
) -> int:
    """Return the most new tokens of a request that is computed as a decode; 1 for decodes alone.

    Only the Hopper kernel of latent decodes is fast for many rows. It takes no FP8 caches. Ranks
    that share latents compute a decode of several tokens as several requests.
    """
    if (
        device.type != "cuda"
        or torch.cuda.get_device_capability(device)[0] != 9
        or kv_cache_spec.head_size != LATENT_WIDTH
        or read_settings().implementation != "optimized"
        or vllm_config.cache_config.cache_dtype in FP8_NAMES
        or vllm_config.parallel_config.decode_context_parallel_size > 1
    ):
        return 1
    return DECODE_THRESHOLD

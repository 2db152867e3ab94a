"""Step metadata of latent attention (MLA) for vLLM: vLLM's own, for decodes of any lengths."""

from typing import Any, ClassVar

from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadataBuilder,
    QueryLenSupport,
)

from .builder import CapturesUniformBatches, give_bounds


class PagetwinLatentBuilder(CapturesUniformBatches, MLACommonMetadataBuilder):
    """vLLM's metadata builder for latent attention, whose decodes may have any lengths."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            # each new token has its own number of latents on a rank
            supports_dcp_with_varlen=True,
        )
        give_bounds(vllm_config, layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        """Return vLLM's metadata of a step, with the upper bound of its decodes' new tokens."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.decode is not None:
            threshold = self.reorder_batch_threshold or 1
            metadata.decode.max_query_len = min(metadata.max_query_len, threshold)
        return metadata

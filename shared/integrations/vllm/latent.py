"""Latent attention (MLA) inside vLLM: cache write and decodes on a twin, prefills in vLLM.

vLLM projects the queries of decodes into the latent space and expands the results. In between,
latent attention is paged attention with one head whose values are a part of its keys, which is what
`latent_decode_attention` computes too. Prefills run in the prefill backend that vLLM chooses.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from .backend import CACHE_DTYPES, Reasons
from .builder import captures_uniform_batches, give_bounds, load_plugin_implementation
from .caches import FP8_NAMES
from .settings import read_settings
from .shared_layers import check_ranks
from .versions import BACKEND_NAME
from .warm_up import StepBounds, can_compile, warm_up_layer


class PagetwinLatentBuilder(MLACommonMetadataBuilder):
    """vLLM's metadata builder for latent attention, whose decodes may have any lengths."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        give_bounds(vllm_config, layer_names)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Return the batches that can be captured."""
        return captures_uniform_batches(cls._cudagraph_support)

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


class PagetwinLatentImpl(MLACommonImpl):
    """Runs one layer of latent attention.

    Args:
        num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
            logits_soft_cap, attn_type, kv_sharing_target_layer_name: as in vLLM.
        mla_args: the sizes of latent attention, as in vLLM.

    Attributes:
        bounds: as in `PagetwinImpl`.

    Raises:
        NotImplementedError: an option or kind of attention that vLLM's prefills do not have, or
            context parallelism.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        check_ranks(self, "dcp_world_size", "pcp_world_size")
        options = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        for name, given in options.items():
            if given:
                raise NotImplementedError(
                    f"{name} = {given}: expected None for latent attention, whose prefills"
                    " run without options"
                )
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"attn_type = {attn_type}: expected decoder for latent attention"
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.rank = int(mla_args["kv_lora_rank"])
        self.run = load_plugin_implementation()
        # the kernels dequantise the cache and take queries of the model's dtype
        self.supports_quant_query_input = False
        self.bounds: StepBounds | None = None
        self._warms_up = read_settings().warms_up
        self._options: AttentionOptions | None = None
        self._attend = self.run.paged_attention

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
            kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], modified in place.
            slot_mapping: slots of the first tokens.
            kv_cache_dtype: vLLM's name of the cache's dtype.
            k_scale: scale of an FP8 cache.
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

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return each decode's average latent, [tokens, num_heads, kv_lora_rank], and None.

        Args:
            q: [tokens, num_heads, latent width], or its latent and its rope part.
            kv_c_and_k_pe_cache: [num_blocks, block_size, latent width]; FP8 elements already have
                their dtype.
            attn_metadata: the step, whose decodes come first.
            layer: vLLM's layer, which has the scale of an FP8 cache.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        key = kv_c_and_k_pe_cache[:, :, None]
        value = key[..., : self.rank]
        options = self._options_of(layer)
        if self.bounds is not None:
            self._warm_up(key, value, query, options)
        out = query.new_empty(*query.shape[:2], self.rank)
        self._attend(
            query, key, value, decode.block_table,
            attn_metadata.query_start_loc[: decode.seq_lens.shape[0] + 1],
            decode.seq_lens, decode.max_query_len, max(1, int(attn_metadata.max_seq_len)),
            self.scale, out, options=options,
        )  # fmt: skip
        return out, None

    def _options_of(self, layer: Any) -> AttentionOptions:
        """Return the options of the layer's calls, which are the same in every step."""
        scale = layer._k_scale if self.kv_cache_dtype in FP8_NAMES else None
        if self._options is None or self._options.k_scale is not scale:
            options = DEFAULT_OPTIONS
            if scale is not None:
                options = replace(options, k_scale=scale, v_scale=scale)
            self._options = options
        return self._options

    def _warm_up(
        self, key: Tensor, value: Tensor, query: Tensor, options: AttentionOptions
    ) -> None:
        """Compile the kernels of decodes, if no graph is being captured."""
        bounds = self.bounds
        assert bounds is not None
        if self._warms_up and not can_compile(key):
            return
        self.bounds = None
        if self._warms_up:
            longest = min(bounds.decode_query_len, bounds.max_seq_len)
            bounds = replace(bounds, max_query_len=longest)
            warm_up_layer(
                self.run.name, (key, value), query.shape[1], query.dtype, options, bounds
            )  # fmt: skip


class PagetwinLatentBackend(Reasons, MLACommonBackend):
    """Latent attention on a twin, in vLLM's terms. vLLM gives the shape of the cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        *CACHE_DTYPES,
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_name() -> str:
        """Return the name, which vLLM looks up among its own."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that runs a layer."""
        return PagetwinLatentImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that builds the metadata of a step."""
        return PagetwinLatentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes: multiples of 16."""
        return [MultipleOf(16)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return False: prefills run in vLLM's own kernels."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether the chip is an Ampere GPU or newer."""
        return bool(capability.major >= 8)

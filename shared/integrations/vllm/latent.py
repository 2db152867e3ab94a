"""Latent attention (MLA) inside vLLM: cache write and decodes on a twin, prefills in vLLM.

vLLM projects the queries of decodes into the latent space and expands the results. In between,
latent attention is paged attention with one head whose values are a part of its keys, which is what
`latent_decode_attention` computes too. Prefills run in the prefill backend that vLLM chooses.

With decode context parallelism vLLM gathers the queries of all ranks before, and combines the
results of the ranks by their log-sum-exp afterwards. In between, a rank attends to its own latents.
Prefills gather the latents of all ranks, in vLLM.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
)
from vllm.v1.attention.backend import MultipleOf

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from .backend import Reasons
from .builder import load_plugin_implementation
from .caches import FP8_NAMES, MODEL_DTYPES
from .latent_builder import PagetwinLatentBuilder
from .latent_layers import WritesLatents, reject_layer
from .settings import read_settings
from .shared_layers import check_ranks
from .versions import BACKEND_NAME, OWN_NAME
from .warm_up import StepBounds, can_compile, warm_up_layers


class PagetwinLatentImpl(WritesLatents, MLACommonImpl):
    """Runs one layer of latent attention.

    Args:
        num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window: as in vLLM.
        kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name: as in vLLM.
        mla_args: the sizes of latent attention, as in vLLM.

    Attributes:
        bounds, engine_layers: as in `PagetwinImpl`.

    Raises:
        NotImplementedError: an option or kind of attention that vLLM's prefills do not have,
            prefill context parallelism, or decode context parallelism with an implementation
            without `dcp_attention`.
    """

    supports_dcp: bool = True
    # vLLM's base class of latent attention says True
    supports_pcp: bool = False
    can_return_lse_for_decode: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

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
        check_ranks(self, "pcp_world_size")
        # vLLM's constructor may overwrite them
        self._of_rank = (
            getattr(self, "dcp_world_size", 1),
            getattr(self, "dcp_rank", 0),
        )
        what = "latent attention, whose prefills run without options"
        reject_layer(what, alibi_slopes, sliding_window, logits_soft_cap, attn_type)
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
        if self._of_rank[0] > 1 and "dcp_attention" not in self.run.operations:
            raise NotImplementedError(
                f"implementation {self.run.name} with decode_context_parallel_size ="
                f" {self._of_rank[0]}: expected 1, since it has no dcp_attention"
            )
        self._config: Any = get_current_vllm_config_or_none()
        # the kernels dequantise the cache and take queries of the model's dtype
        self.supports_quant_query_input = False
        self.bounds: StepBounds | None = None
        self.engine_layers: tuple[Any, ...] = ()
        self._warms_up = read_settings().warms_up
        self._options: tuple[AttentionOptions, AttentionOptions] | None = None

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return each decode's average latent, [tokens, num_heads, kv_lora_rank], and None.

        If ranks share the latents, the average is that of this rank's latents, and the second
        result is its log-sum-exp, [tokens, num_heads] float32. Of a token without a latent on this
        rank they are 0 and -inf.

        Args:
            q: [tokens, num_heads, latent width], or its latent and its rope part. If ranks share
                the latents, the heads are those of all ranks.
            kv_c_and_k_pe_cache: [num_blocks, block_size, latent width]; FP8 elements already have
                their dtype.
            attn_metadata: the step, whose decodes come first.
            layer: vLLM's layer, which has the scale of an FP8 cache.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        key = kv_c_and_k_pe_cache[:, :, None]
        value = key[..., : self.rank]
        ranks, rank = self._of_rank
        options, unmasked = self._options_of(layer)
        if self.bounds is not None:
            self._warm_up(key, value, query, options if ranks == 1 else unmasked)
        out = query.new_empty(*query.shape[:2], self.rank)
        tensors = (
            query, key, value, decode.block_table,
            attn_metadata.query_start_loc[: decode.seq_lens.shape[0] + 1],
        )  # fmt: skip
        longest, most = decode.max_query_len, max(1, int(attn_metadata.max_seq_len))
        if ranks == 1:
            self.run.paged_attention(
                *tensors, decode.seq_lens, longest, most, self.scale, out, options=options
            )  # fmt: skip
            return out, None
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        if longest == 1:
            # the lengths are those of the rank, and may be 0
            self.run.paged_attention(
                *tensors, decode.seq_lens, longest, most, self.scale, out, lse.T,
                options=unmasked,
            )  # fmt: skip
        else:
            interleave_size = self._config.parallel_config.cp_kv_cache_interleave_size
            self.run.dcp_attention(
                *tensors, decode.dcp_tot_seq_lens, longest, most * ranks, ranks, rank,
                int(interleave_size), self.scale, out, lse.T, options=options,
            )  # fmt: skip
        return out, lse

    def _options_of(self, layer: Any) -> tuple[AttentionOptions, AttentionOptions]:
        """Return the options of the layer's calls in every step, and those without a mask."""
        scale = layer._k_scale if self.kv_cache_dtype in FP8_NAMES else None
        if self._options is None or self._options[0].k_scale is not scale:
            options = DEFAULT_OPTIONS
            if scale is not None:
                options = replace(options, k_scale=scale, v_scale=scale)
            self._options = (options, replace(options, causal=False))
        return self._options

    def _warm_up(
        self, key: Tensor, value: Tensor, query: Tensor, options: AttentionOptions
    ) -> None:
        """Compile the kernels of decodes, if no graph is being captured."""
        bounds = self.bounds
        assert bounds is not None
        if self._warms_up and not can_compile(key):
            return
        self.bounds, self.engine_layers = None, ()
        if self._warms_up:
            shares = self._of_rank[0] > 1
            reqs, longest = bounds.max_num_reqs, bounds.decode_query_len
            if shares:
                # each new token is a request
                reqs, longest = reqs * longest, 1
            longest = min(longest, bounds.max_seq_len)
            bounds = replace(bounds, max_num_reqs=reqs, max_query_len=longest)
            warm_up_layers(
                self.run.name, (key, value), query.shape[1], query.dtype, [options], bounds,
                lse=shares, scale=self.scale,
            )  # fmt: skip


class PagetwinLatentBackend(Reasons, MLACommonBackend):
    """Latent attention on a twin, in vLLM's terms. vLLM gives the shape of the cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        *MODEL_DTYPES,
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
        """Return whether the chip is an Ampere GPU or newer, or a CPU."""
        return capability is None or bool(capability.major >= 8)


class NamedLatentBackend(PagetwinLatentBackend):
    """The same, under the plugin's own name."""

    @staticmethod
    def get_name() -> str:
        """Return the name, which vLLM looks up among the registered ones."""
        return OWN_NAME

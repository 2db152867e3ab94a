"""Sparse latent attention (MLA) inside vLLM: cache write and attention on a twin, indexer in vLLM.

The indexer of a layer, or of an earlier layer, writes the positions that each token selects to a
buffer. A layer looks up their slots and attends to them: a row of slots per token, whether it is
one of a prompt, a decode or a draft. No prefill expands latents.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.latent_formats import LATENT_FORMATS
from .builder import load_plugin_implementation
from .caches import FP8_NAMES, MODEL_DTYPES
from .latent import PagetwinLatentBackend
from .latent_layers import RECORD_NAMES, WritesLatents, record_bytes, reject_layer
from .settings import read_settings
from .shared_layers import check_ranks
from .sparse_builder import PagetwinSparseBuilder, PagetwinSparseMetadata
from .sparse_warm_up import warm_up_sparse
from .versions import OWN_NAME, VllmInterface, installed_interface
from .warm_up import StepBounds, can_compile

NEEDED = ("sparse_attention", "convert_req_index_to_global_index")
"""The operations of an implementation that runs sparse layers."""


def choose_base(interface: VllmInterface) -> Any:
    """Return vLLM's base class of a layer of sparse latent attention."""
    if interface.has_sparse_class:
        from vllm.v1.attention.backend import SparseMLAAttentionImpl

        return SparseMLAAttentionImpl
    from vllm.v1.attention.backend import MLAAttentionImpl

    return MLAAttentionImpl


_Base: Any = choose_base(installed_interface())


class PagetwinSparseImpl(WritesLatents, _Base):
    """Runs one layer of sparse latent attention.

    Args:
        num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window: as in vLLM.
        kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name: as in vLLM.
        indexer: Optional. vLLM's indexer of the layer, which has the buffer of selected positions.
            If None, the layer uses those of an earlier layer.
        topk_indices_buffer: Optional. That buffer, [max tokens, selected] int32, if the layer has
            no indexer.
        mla_args: the sizes of latent attention, and further arguments of some releases.

    Attributes:
        bounds, engine_layers: as in `PagetwinImpl`.

    Raises:
        NotImplementedError: an option or kind of attention that sparse layers do not have, ranks
            that share tokens or latents, a cache of the host (HiSparse), or an implementation
            without sparse attention.
        ValueError: neither an indexer nor a buffer is given.
    """

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    supports_pcp: bool = False
    supports_dcp: bool = False
    can_return_lse_for_decode: bool = False

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
        indexer: Any = None,
        topk_indices_buffer: Tensor | None = None,
        **mla_args: Any,
    ) -> None:
        check_ranks(self, "pcp_world_size", "dcp_world_size")
        what = "sparse latent attention, since a slot tells no position"
        reject_layer(what, alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        self.run = load_plugin_implementation()
        missing = [name for name in NEEDED if name not in self.run.operations]
        if missing:
            raise NotImplementedError(
                f"implementation {self.run.name} has no {missing[0]}: expected one with"
                f" {' and '.join(NEEDED)}"
            )
        config: Any = get_current_vllm_config_or_none()
        attention = getattr(config, "attention_config", None)
        if getattr(attention, "hisparse_config", None) is not None:
            raise NotImplementedError(
                "hisparse_config is given: expected None, since this backend reads caches on the"
                " device alone"
            )
        if indexer is None and topk_indices_buffer is None:
            raise ValueError(
                "indexer = None and topk_indices_buffer = None: expected one of them, which has"
                " the positions that tokens select"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.kv_lora_rank = int(mla_args["kv_lora_rank"])
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_b_proj"):
            setattr(self, name, mla_args[name])
        self.indexer, self._buffer = indexer, topk_indices_buffer
        # the kernels dequantise the cache and take queries of the model's dtype
        self.supports_quant_query_input = False
        self.bounds: StepBounds | None = None
        self.engine_layers: tuple[Any, ...] = ()
        self._warms_up = read_settings().warms_up
        self._options: AttentionOptions | None = None

    @property
    def topk_indices_buffer(self) -> Tensor:
        """[max tokens, selected] int32 positions that tokens select; -1 selects nothing.

        vLLM may give an indexer another buffer after the layer was made.
        """
        source = self._buffer
        if self.indexer is not None:
            source = self.indexer.topk_indices_buffer
        assert source is not None
        return source

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: Tensor) -> None:
        self.indexer, self._buffer = None, buffer

    def record_logical_topk_ready(self) -> None:
        """Do nothing: a layer looks up slots on the stream on which the indexer has run."""

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: PagetwinSparseMetadata,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """Return each token's average latent, [tokens, num_heads, kv_lora_rank], and None.

        Args:
            q: [tokens, num_heads, latent width], or its latent and its rope part.
            kv_c_and_k_pe_cache: [num_blocks, block_size, latent width], or bytes per record in the
                last axis; FP8 elements already have their dtype.
            attn_metadata: the step.
            layer: vLLM's layer, which has the scale of an FP8 cache.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens = query.shape[0]
        key = kv_c_and_k_pe_cache[:, :, None]
        is_record = self.kv_cache_dtype in RECORD_NAMES
        value = key if is_record else key[..., : self.kv_lora_rank]
        options = self._options_of(layer)
        if self.bounds is not None:
            self._warm_up(key, value, query, options)
        slots = self.find_slots(tokens, attn_metadata)
        out = query.new_empty(tokens, query.shape[1], self.kv_lora_rank)
        self.run.sparse_attention(
            query, key, value, slots, self.scale, out, options=options
        )
        return out, None

    def find_slots(
        self, num_tokens: int, attn_metadata: PagetwinSparseMetadata
    ) -> Tensor:
        """Return the slots of the positions that the first tokens select: [tokens, selected] int32.

        Args:
            num_tokens: how many tokens.
            attn_metadata: the step.
        """
        slots: Tensor
        slots, _ = self.run.convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:num_tokens], attn_metadata.block_table,
            self.topk_indices_buffer[:num_tokens], attn_metadata.block_size,
        )  # fmt: skip
        return slots

    def _options_of(self, layer: Any) -> AttentionOptions:
        """Return the options of the layer's calls in every step."""
        scale = layer._k_scale if self.kv_cache_dtype in FP8_NAMES else None
        if self._options is None or self._options.k_scale is not scale:
            self._options = DEFAULT_OPTIONS
            if scale is not None:
                self._options = replace(DEFAULT_OPTIONS, k_scale=scale, v_scale=scale)
        return self._options

    def _warm_up(
        self, key: Tensor, value: Tensor, query: Tensor, options: AttentionOptions
    ) -> None:
        """Compile the kernels of the layer, if it is on a GPU and no graph is being captured."""
        bounds = self.bounds
        assert bounds is not None
        if self._warms_up and not can_compile(key):
            return
        self.bounds, self.engine_layers = None, ()
        if self._warms_up and key.is_cuda:
            warm_up_sparse(
                self.run, (key, value), query[:1], self.topk_indices_buffer.shape,
                self.scale, options, bounds,
            )  # fmt: skip


class PagetwinSparseBackend(PagetwinLatentBackend):
    """Sparse latent attention on a twin, in vLLM's terms."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        *MODEL_DTYPES,
        "fp8",
        "fp8_e4m3",
        *RECORD_NAMES,
    ]

    @classmethod
    def is_sparse(cls) -> bool:
        """Return True."""
        return True

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that runs a layer."""
        return PagetwinSparseImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that builds the metadata of a step."""
        return PagetwinSparseBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache. vLLM asks up to 0.28."""
        return num_blocks, block_size, record_bytes(cache_dtype_str) or head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return True: `supports_combination` gives the reason if a size does not fit."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why a layer cannot be served, or None. vLLM adds it to its own words."""
        reasons = []
        if not use_sparse:
            reasons.append(
                "use_sparse = False: expected sparse layers alone in a model with index_topk in its"
                " configuration"
            )
        if kv_cache_dtype in RECORD_NAMES:
            width = LATENT_FORMATS[kv_cache_dtype].width
            if head_size != width:
                reasons.append(
                    f"head_size = {head_size}: expected {width}, the elements of a record of"
                    f" {kv_cache_dtype}"
                )
        others = super().supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
            use_mm_prefix, device_capability,
        )  # fmt: skip
        return "; ".join(filter(None, [*reasons, others])) or None


class NamedSparseBackend(PagetwinSparseBackend):
    """The same, under the plugin's own name."""

    @staticmethod
    def get_name() -> str:
        """Return the name, which vLLM looks up among the registered ones."""
        return OWN_NAME

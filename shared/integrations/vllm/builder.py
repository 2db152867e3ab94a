"""Step metadata for vLLM: what the layers of one cache group read in one step.

The tensors are views of vLLM's persistent buffers, cut to the requests of the step. So a captured
CUDA graph reads the values of each replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from ...contract.operations import Implementation
from ...validation.integrations import load_for
from .context_parallel import SharedBatch
from .ranges import StepRanges, clamp_of
from .settings import IMPLEMENTATION_VARIABLE, read_settings
from .warm_up import StepBounds


@dataclass
class PagetwinMetadata:
    """One step of the layers that share a block table.

    Not frozen, since vLLM replaces `slot_mapping` in cross-attention.

    Args:
        num_actual_tokens: rows of the step, padding of a captured graph included.
        max_query_len, max_seq_len: upper bounds of the requests' new tokens and keys.
        query_start_loc: [reqs + 1] int32 first row of each request.
        seq_lens: [reqs] int32 keys of each request, its new tokens included. In cross-attention:
            of its encoder.
        block_table: [reqs, max_blocks] int32.
        slot_mapping: [tokens] int64 slot of each new token; -1 if it is not stored.
        causal: whether tokens attend only to earlier ones; [reqs] bool sets it per request.
        common_prefix_len: keys that all requests share and that are read once; 0 if there is no
            cascade in this step.
        query_ranges: [rows, 2] int32 range of each new token that no mask hides, by the window of
            the layers that it is for; None is for layers that do not limit their images. Empty if
            no new token has a range.
        mm_prefix_range: Optional. vLLM's ranges of images. A model sets it to None for layers that
            are causal in images too. If None, ranges of images do not count.
        rswa_window: Optional. The window of the layers beside the range of a prompt. If None, they
            have their own.
        shared_batch: Optional. The part of this rank, if ranks share the keys. The first layer of
            the step sets it. If None, no layer has.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    common_prefix_len: int = 0
    query_ranges: dict[int | None, Tensor] = field(default_factory=dict)
    mm_prefix_range: Any = None
    rswa_window: int | None = None
    shared_batch: SharedBatch | None = None

    def ranges_of(self, layer: Any) -> Tensor | None:
        """Return the ranges for one of vLLM's layers; None if it has none in this step."""
        if self.rswa_window is None and self.mm_prefix_range is None:
            return None
        return self.query_ranges.get(
            clamp_of(layer) if self.rswa_window is None else None
        )


class CapturesUniformBatches:
    """The batches of a metadata builder that vLLM may capture in a CUDA graph.

    Attributes:
        supports_draft_decode_metadata_update: whether the metadata of a step of drafts hold for the
            next one. Those of ranks that share keys, and ranges of prompts, are computed per step.
    """

    # A graph of a mixed batch would freeze the kernels that its dummy batch chose by
    # max_query_len, so it is not ALWAYS. A graph of uniform batches has one query length.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update: bool = False

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Do nothing: the metadata are views of buffers that vLLM has advanced already.

        vLLM calls it between the steps of a draft model, and may capture all of them in one graph.
        What the host knows of such steps are upper bounds.
        """

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Return NEVER if the implementation may read tensors on the host.

        A step of requests with the same number of new tokens may be the last tokens of images, if
        their first ones are cached. With one token each it is a step of decodes to attention.
        """
        if read_settings().implementation != "optimized":
            return AttentionCGSupport.NEVER
        model = getattr(vllm_config, "model_config", None)
        if getattr(model, "is_mm_prefix_lm", False):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support


class PagetwinMetadataBuilder(CapturesUniformBatches, AttentionMetadataBuilder):
    """Turns vLLM's description of a step into `PagetwinMetadata`. The device is not waited for.

    Args:
        kv_cache_spec, layer_names, vllm_config, device: as in vLLM.
    """

    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.run = load_plugin_implementation()
        impls = give_bounds(vllm_config, layer_names)
        layers = [
            layer
            for layer in (
                vllm_config.compilation_config.static_forward_context.get(name)
                for name in layer_names
            )
            if hasattr(layer, "impl")
        ]
        self.ranges = StepRanges(self.run, vllm_config, layers, device)
        for impl in impls:
            impl.ranges = self.ranges
        self.supports_draft_decode_metadata_update = (
            self.ranges.rswa_window is None
            and all(impl.shared is None for impl in impls)
        )
        # vLLM does not tell whether a layer has what a cascade does not take
        self.takes_cascade = not self.ranges and all(
            impl.takes_cascade for impl in impls
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> PagetwinMetadata:
        """Return the metadata of a step.

        Args:
            common_prefix_len: keys that all requests share, in whole blocks, if the step is to be
                a cascade; otherwise 0.
            common_attn_metadata: vLLM's description of the step.
            fast_build: not used, since there is one way.
        """
        common = common_attn_metadata
        reqs = common.num_reqs
        ranges = self.ranges.of_step(common) if self.ranges else {}
        return PagetwinMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=int(common.max_query_len),
            # 0 if no request of the step has an encoder
            max_seq_len=max(1, int(common.max_seq_len)),
            query_start_loc=common.query_start_loc[: reqs + 1],
            seq_lens=common.seq_lens[:reqs],
            block_table=common.block_table_tensor[:reqs],
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            common_prefix_len=int(common_prefix_len),
            query_ranges=ranges,
            mm_prefix_range=common.mm_req_doc_ranges if ranges else None,
            rswa_window=self.ranges.rswa_window,
        )

    def update_block_table(
        self, metadata: PagetwinMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> PagetwinMetadata:
        """Return the metadata of another cache group in the same step."""
        rows = metadata.seq_lens.shape[0]
        return replace(
            metadata,
            block_table=blk_table[:rows],
            slot_mapping=slot_mapping,
            shared_batch=None,
        )

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Sequence[int],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int = 1,
    ) -> bool:
        """Return whether the step is to be a cascade. vLLM asks up to 0.31."""
        return self.takes_cascade and bool(
            self.run.use_cascade_attention(
                common_prefix_len,
                [int(length) for length in query_lens],
                num_query_heads,
                num_kv_heads,
                use_alibi,
                use_sliding_window,
                use_local_attention,
                num_sms,
                dcp_world_size,
            )
        )


def load_plugin_implementation() -> Implementation:
    """Return the implementation that the settings name.

    Raises:
        ValueError: it cannot be loaded.
    """
    return load_for(IMPLEMENTATION_VARIABLE, read_settings().implementation)


def give_bounds(
    vllm_config: Any, layer_names: list[str], decode_query_len: int | None = None
) -> list[Any]:
    """Give the engine's bounds to the layers of those names; return their implementations.

    A layer compiles its kernels in the first run that has its cache, which is allocated later. It
    gets the layers of all groups, since it compiles the kernels of some of them at the same time.

    Args:
        decode_query_len: Optional. New tokens of a request that the layers compute as a decode.
            If None, one, and one per speculative token.
    """
    context = vllm_config.compilation_config.static_forward_context
    layers = [context[name] for name in layer_names if name in context]
    impls = [layer.impl for layer in layers if hasattr(layer.impl, "bounds")]
    bounds = StepBounds.of(vllm_config)
    if decode_query_len is not None:
        longest = max(decode_query_len, bounds.decode_query_len)
        bounds = replace(bounds, decode_query_len=longest)
    for impl in impls:
        impl.bounds, impl.engine_layers = bounds, tuple(context.values())
    return impls

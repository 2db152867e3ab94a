"""What does every attention backend have in common?

An engine asks a backend for four things: the shape of its cache, a builder that turns a step into
metadata, an implementation that runs a layer, and the reasons why it cannot run here. The names
and signatures are those of vLLM's V1 backends.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..contract.checks import check_encoder_starts
from ..contract.graph_classes import AttentionCGSupport
from ..contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ..contract.specs import KVCacheSpec
from ..validation import check_not_negative, check_positive
from .attention_impl import AttentionImpl as AttentionImpl
from .capabilities import Capabilities


class AttentionMetadataBuilder(ABC):
    """Turns one step into the metadata of a backend.

    Args:
        kv_cache_spec: the cache of the layers it builds for; None: they keep none, as in a model
            without decoder, so that all requests are prefills in any order.
        layer_names: those layers.
        device: where the cache lies.

    Attributes:
        cudagraph_support: which batches its layers can capture.
        reorder_batch_threshold: the most new tokens of a request that counts as a decode; None:
            the backend does not mind the order of its requests.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layer_names: list[str],
        device: torch.device | str,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.device = torch.device(device)

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedAttentionMetadata:
        """Return the backend's metadata of a step whose decodes come first.

        Args:
            common_prefix_len: tokens that all sequences share; 0, as no backend here reads a
                shared prefix once for the batch.
            common_attn_metadata: the step.
            fast_build: prefer a quick build over a fast step.

        Raises:
            ValueError: the decodes do not come first, or the step says only half of what its
                encoders compute.
        """

    def init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
        num_speculative_tokens: int | None = None,
        decode_context_parallel_size: int = 1,
    ) -> None:
        """Set `reorder_batch_threshold` from what the backend and the engine can do.

        Args:
            reorder_batch_threshold: what the backend takes at least.
            supports_spec_as_decode: whether its decodes take the drafts of a request, so that
                they verify in one step; then a decode has 1 + num_speculative_tokens.
            supports_dcp_with_varlen: whether its decodes take several tokens where each rank
                holds a part of the keys; if not, a decode has one token there.
            num_speculative_tokens: drafts a step; None: the engine makes none.
            decode_context_parallel_size: ranks that share a sequence's keys.

        Raises:
            ValueError: a number below 1; of drafts, below 0.

        Source:
            vLLM's `_init_reorder_batch_threshold`, which reads the engine's configuration.

        Example:
            Threshold 1, four drafts that the backend takes as decodes: 1 + 4 = 5.
        """
        check_positive(decode_context_parallel_size=decode_context_parallel_size)
        if reorder_batch_threshold is not None:
            check_positive(reorder_batch_threshold=reorder_batch_threshold)
        threshold = reorder_batch_threshold
        if num_speculative_tokens is not None:
            check_not_negative(num_speculative_tokens=num_speculative_tokens)
            if supports_spec_as_decode and threshold is not None:
                threshold = max(threshold, 1 + num_speculative_tokens)
        if decode_context_parallel_size > 1 and not supports_dcp_with_varlen:
            threshold = 1
        self.reorder_batch_threshold = threshold

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PagedAttentionMetadata:
        """Return the metadata to capture a step with; as `build`, unless a backend differs.

        Args:
            common_attn_metadata: a step of the captured size, in memory that does not move.
        """
        return self.build(
            common_prefix_len=0, common_attn_metadata=common_attn_metadata
        )

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> PagedAttentionMetadata:
        """Return the metadata of a drafting step, built quickly.

        Args:
            common_attn_metadata: the step.
            draft_index: which draft of the step it is, from 0; for backends that build the first
                in another way.
        """
        check_not_negative(draft_index=draft_index)
        return self.build(
            common_prefix_len=0,
            common_attn_metadata=common_attn_metadata,
            fast_build=True,
        )


class AttentionBackend(Capabilities, ABC):
    """A family of classes that belong together, and what they can do."""

    name: ClassVar[str]
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        return list(cls.supported_dtypes)

    @staticmethod
    @abstractmethod
    def get_supported_head_sizes() -> list[int]:
        """Return the head sizes it takes; an empty list: any."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class that runs a layer."""

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[PagedAttentionMetadata]:
        """Return the class of its metadata."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds its metadata."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""

    @classmethod
    @abstractmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return every reason why it cannot run such a cache there; an empty list: it can."""

    @classmethod
    def why_not(cls, spec: KVCacheSpec) -> list[str]:
        """Return the reasons that follow from the dtype and the head size alone."""
        reasons = []
        taken = (*cls.supported_dtypes, *cls.supported_kv_cache_dtypes)
        if spec.dtype not in taken:
            names = ", ".join(map(str, taken))
            reasons.append(f"dtype = {spec.dtype}: expected one of {names}")
        sizes = cls.get_supported_head_sizes()
        if sizes and spec.head_size not in sizes:
            reasons.append(
                f"head_size = {spec.head_size}: expected one of"
                f" {', '.join(map(str, sizes))}"
            )
        return reasons


def metadata_fields(
    common: CommonAttentionMetadata,
    boundary: tuple[int, int, int, int],
    query_ranges: Tensor | None,
) -> dict[str, Any]:
    """Return the fields of PagedAttentionMetadata.

    Args:
        common: the step.
        boundary: what split_decodes_and_prefills says of it.
        query_ranges: [tokens, 2] what fill_mm_prefix_query_ranges says of it; None: no token
            stands in an image.

    Raises:
        ValueError: slots of an encoder's tokens without their starts.
    """
    check_encoder_starts(common)
    num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = boundary
    longest, lens = common.max_encoder_seq_len, common.encoder_seq_lens_cpu
    if longest is None and lens is not None:
        longest = int(lens.max()) if lens.numel() else 0
    return {
        "num_actual_tokens": common.num_actual_tokens,
        "max_query_len": common.max_query_len,
        "query_start_loc": common.query_start_loc,
        "max_seq_len": common.max_seq_len,
        "seq_lens": common.seq_lens,
        "block_table": common.block_table_tensor,
        "slot_mapping": common.slot_mapping,
        "num_decodes": num_decodes,
        "num_decode_tokens": num_decode_tokens,
        "num_prefills": num_prefills,
        "num_prefill_tokens": num_prefill_tokens,
        "query_start_loc_cpu": common.query_start_loc_cpu,
        "seq_lens_cpu": common.seq_lens_cpu,
        "causal": common.causal,
        "tree_mask": common.tree_mask,
        "query_ranges": query_ranges,
        "encoder_seq_lens": common.encoder_seq_lens,
        "encoder_seq_lens_cpu": lens,
        "max_encoder_seq_len": longest,
        "encoder_query_start_loc": common.encoder_query_start_loc,
        "encoder_query_start_loc_cpu": common.encoder_query_start_loc_cpu,
        "cross_block_table": common.cross_block_table_tensor,
        "cross_slot_mapping": common.cross_slot_mapping,
    }

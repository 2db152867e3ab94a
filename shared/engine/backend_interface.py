"""The interface of an attention backend: cache shape, metadata builder, layer, capabilities.

A backend provides four things: the shape of its cache, a builder that turns a step into metadata,
an implementation that runs a layer, and the reasons why it cannot run a given cache on a given
device. The names and signatures are those of vLLM's V1 backends.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..contract.checks import check_encoder_starts
from ..contract.graph_support import AttentionCGSupport
from ..contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ..contract.specs import KVCacheSpec
from ..validation import check_not_negative, check_positive
from .attention_impl import AttentionImpl as AttentionImpl
from .capabilities import Capabilities


class AttentionMetadataBuilder(ABC):
    """Turns one step into the metadata of a backend.

    Args:
        kv_cache_spec: Optional. Cache of the layers. If None, the layers have no cache, as in a
            model without a decoder: all requests are prefills, in any order.
        layer_names: names of the layers that share this metadata.
        device: device of the cache.

    Attributes:
        cudagraph_support: the batches that its layers can capture.
        reorder_batch_threshold: Optional. Maximum number of new tokens of a request that counts
            as a decode. If None, requests may be in any order.
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
            common_prefix_len: length of the prefix that all sequences share. It is not read,
                since no backend here uses cascade attention.
            common_attn_metadata: the step.
            fast_build: whether a short build time is preferred over a short step time.

        Raises:
            ValueError: the decodes do not come first, or only one of the slots and the starts of
                the encoders' tokens is given.
        """

    def init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
        num_speculative_tokens: int | None = None,
        decode_context_parallel_size: int = 1,
    ) -> None:
        """Set `reorder_batch_threshold` from the capabilities of the backend and the engine.

        Args:
            reorder_batch_threshold: Optional. The backend's threshold without speculative
                decoding. If None, requests may be in any order.
            supports_spec_as_decode: whether its decode path verifies the draft tokens of a
                request. A decode then has up to 1 + num_speculative_tokens new tokens.
            supports_dcp_with_varlen: whether its decode path supports several new tokens per
                request under decode context parallelism. If not, a decode has one new token
                there.
            num_speculative_tokens: Optional. Draft tokens per step. If None, the engine does not
                use speculative decoding.
            decode_context_parallel_size: number of ranks among which a sequence's keys are
                divided.

        Raises:
            ValueError: the number of draft tokens is below 0, or another number is below 1.

        Source:
            vLLM's `_init_reorder_batch_threshold`, which reads the engine's configuration.

        Example:
            Threshold 1, four draft tokens, supports_spec_as_decode: 1 + 4 = 5.
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
        """Return the metadata to capture a step with; by default that of `build`.

        Args:
            common_attn_metadata: a step of the captured size, whose buffers keep their addresses.
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
            draft_index: index of the draft within the step, from 0, for backends that build the
                first one in another way.
        """
        check_not_negative(draft_index=draft_index)
        return self.build(
            common_prefix_len=0,
            common_attn_metadata=common_attn_metadata,
            fast_build=True,
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
        """Return whether its layers read a shared prefix once: False unless it is overridden.

        The builders here ignore `common_prefix_len`. A builder whose layers call
        `cascade_attention` returns the operation `use_cascade_attention` of these arguments.
        """
        return False


class AttentionBackend(Capabilities, ABC):
    """An attention backend: its implementation, metadata and builder classes, and capabilities.

    A subclass gives its name, its three classes, the shape of its cache, and what it supports
    (`Capabilities`). If it does not run on every device, it extends `validate_configuration`.

    Args:
        name: name by which users request it.
        impl_cls: class that runs a layer.
        metadata_cls: class of its metadata.
        builder_cls: class that builds its metadata.
    """

    name: ClassVar[str]
    impl_cls: ClassVar[type[AttentionImpl]]
    metadata_cls: ClassVar[type[PagedAttentionMetadata]]
    builder_cls: ClassVar[type[AttentionMetadataBuilder]]
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return the class's module and its name in that module, which identify a backend."""
        return cls.__module__, cls.__qualname__

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """Return False: the layers of no backend here read a shared prefix once.

        The arguments are those of its builder's method, which engines call.
        """
        return False

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        return list(cls.supported_dtypes)

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Return the class that runs a layer."""
        return cls.impl_cls

    @classmethod
    def get_metadata_cls(cls) -> type[PagedAttentionMetadata]:
        """Return the class of its metadata."""
        return cls.metadata_cls

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        """Return the class that builds its metadata."""
        return cls.builder_cls

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""

    @classmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return every reason why it cannot run such a cache there.

        The list is empty if it can.
        """
        return cls.why_not(spec)

    @classmethod
    def why_not(cls, spec: KVCacheSpec) -> list[str]:
        """Return the reasons that follow from the dtype and the sizes alone."""
        reasons = []
        taken = (*cls.supported_dtypes, *cls.supported_kv_cache_dtypes)
        if spec.kv_cache_dtype is not None:
            if not cls.stores_scales:
                reasons.append(
                    f"kv_cache_dtype = {spec.kv_cache_dtype!r}: expected None, since its layers"
                    " store no scales"
                )
        elif spec.dtype not in taken:
            names = ", ".join(map(str, taken))
            reasons.append(f"dtype = {spec.dtype}: expected one of {names}")
        if not spec.has_plain_cells or spec.page_size_bytes > spec.real_page_size_bytes:
            reasons.append(
                f"a page of {spec.page_size_bytes} bytes: expected a key and a value of"
                " head_size elements per slot and head, without padding"
            )
        sizes = cls.get_supported_head_sizes()
        if sizes and spec.head_size not in sizes:
            reasons.append(f"head_size = {spec.head_size}: expected {_as_text(sizes)}")
        if not cls.supports_block_size(spec.block_size):
            taken_sizes = " or ".join(map(str, cls.get_supported_kernel_block_sizes()))
            reasons.append(f"block_size = {spec.block_size}: expected {taken_sizes}")
        return reasons


def _as_text(sizes: Sequence[int]) -> str:
    """Return sizes in words; many consecutive ones by the first and the last.

    Example:
        [1, 2, 3, 4]: "1 to 4". [32, 64, 96]: "one of 32, 64, 96".
    """
    if len(sizes) > 2 and list(sizes) == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]}"
    return f"one of {', '.join(map(str, sizes))}"


def metadata_fields(
    common: CommonAttentionMetadata,
    boundary: tuple[int, int, int, int],
    query_ranges: Tensor | None,
) -> dict[str, Any]:
    """Return the fields of PagedAttentionMetadata.

    Args:
        common: the step.
        boundary: result of `split_decodes_and_prefills` for the step.
        query_ranges: Optional. [tokens, 2] result of `fill_mm_prefix_query_ranges` for the step.
            If None, no token belongs to an image.

    Raises:
        ValueError: slots of an encoder's tokens are given without their starts.
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

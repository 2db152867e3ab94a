"""How does an engine run all of this as one object?

Two backends stand here. TRITON runs everything in this package's own kernels. XFORMERS runs its
decodes in xFormers' paged split-K operator and its prefills in Triton, as vLLM's V1 backend of that
name did. Which part runs where is fixed when the layer is made and can be read from the layer.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..shared.backend_interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    metadata_fields,
)
from ..shared.capabilities import MultipleOf
from ..shared.graph_classes import AttentionCGSupport
from ..shared.kinds import CACHE_DTYPES
from ..shared.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ..shared.shapes import Key, KVCache, Output, Query, Value
from ..shared.specs import KVCacheSpec
from ._launch import INTERPRETED
from ._tuning import MAX_HEAD_SIZE, max_head_size
from ._xformers import (
    HEAD_SIZES_OF_SPLIT_K,
    build_decode_bias,
    split_k_attention,
    why_no_xformers,
)
from .batch_split import split_decodes_and_prefills
from .cache_ops import reshape_and_cache
from .kv_cache import get_kv_cache_shape, split_kv_cache
from .paged_attention import paged_attention


class TritonAttentionMetadata(PagedAttentionMetadata):
    """One step's batch; the kernels need nothing beyond what all backends need."""


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of the pure Triton backend."""

    # its launches depend on shapes and maxima alone
    cudagraph_support = AttentionCGSupport.ALWAYS
    reorder_batch_threshold: int = 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """Return the metadata of a step whose decodes come first."""
        boundary = split_decodes_and_prefills(
            common_attn_metadata, self.reorder_batch_threshold
        )
        return TritonAttentionMetadata(
            **metadata_fields(common_attn_metadata, boundary)
        )


class TritonAttentionImpl(AttentionImpl):
    """Runs a layer in this package's own kernels."""

    def forward(
        self,
        layer: object,
        query: Query,
        key: Key,
        value: Value,
        kv_cache: KVCache,
        attn_metadata: PagedAttentionMetadata | None,
        output: Output | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Output:
        """Write the step's keys and values, attend, and return `output`.

        Decodes and prefills go out in one call, whose kernels tell them apart by themselves.
        """
        output = self.check_forward(output, output_scale, output_block_scale)
        if attn_metadata is None:
            return output
        # step: write the new keys and values
        key_cache, value_cache = split_kv_cache(kv_cache)
        if self.kv_sharing_target_layer_name is None:
            slot_mapping = attn_metadata.slot_mapping
            reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        # step: attend for the decodes, then for the prefills
        rows = slice(0, attn_metadata.num_actual_tokens)
        _attend(self, query[rows], kv_cache, attn_metadata, output[rows])
        return output


class TritonAttentionBackend(AttentionBackend):
    """Pure Triton: any block size, head sizes to 1,024, float16, bfloat16 and float32."""

    name = "TRITON"
    supported_dtypes = CACHE_DTYPES

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return every head size it takes."""
        return list(range(1, MAX_HEAD_SIZE + 1))

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the class that runs a layer."""
        return TritonAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[TritonAttentionMetadata]:
        """Return the class of its metadata."""
        return TritonAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Return the class that builds its metadata."""
        return TritonAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""
        return get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return every reason why it cannot run such a cache there."""
        reasons = []
        if spec.dtype not in cls.supported_dtypes:
            names = ", ".join(str(dtype) for dtype in cls.supported_dtypes)
            reasons.append(f"dtype = {spec.dtype}: expected one of {names}")
        reasons += _why_no_device(device)
        largest = MAX_HEAD_SIZE
        if not reasons:
            largest = max_head_size(spec.dtype, torch.device(device))
        if spec.head_size > largest:
            reasons.append(f"head_size = {spec.head_size}: expected at most {largest}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class XFormersAttentionMetadata(PagedAttentionMetadata):
    """One step's batch, and xFormers' mask of its decodes.

    Args:
        attn_bias: xFormers' PagedBlockDiagonalCausalWithOffsetPaddedKeysMask of the decodes;
            None if there are none.
    """

    attn_bias: Any = None

    def _part(self, first: int, last: int) -> "XFormersAttentionMetadata":
        part = super()._part(first, last)
        assert isinstance(part, XFormersAttentionMetadata)
        # the mask is that of the decodes, which come first
        return (
            part if first == 0 and self.num_decodes else replace(part, attn_bias=None)
        )


class XFormersAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of the xFormers backend, the decodes' mask included."""

    reorder_batch_threshold: int = 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> XFormersAttentionMetadata:
        """Return the metadata of a step whose decodes come first.

        A request without new tokens is padding; xFormers knows none, so the mask leaves it out.
        """
        boundary = split_decodes_and_prefills(
            common_attn_metadata, self.reorder_batch_threshold
        )
        metadata = XFormersAttentionMetadata(
            **metadata_fields(common_attn_metadata, boundary)
        )
        decodes = metadata.decode_metadata
        if decodes is None or not decodes.num_actual_tokens:
            return metadata
        block_table, seq_lens = decodes.block_table, decodes.seq_lens_cpu
        if decodes.num_actual_tokens < metadata.num_decodes:
            kept = decodes.query_start_loc_cpu.diff().nonzero().flatten()
            block_table = block_table[kept.to(block_table.device)]
            seq_lens = seq_lens[kept]
        bias = build_decode_bias(
            seq_lens.tolist(), block_table, self.kv_cache_spec.block_size
        )
        return replace(metadata, attn_bias=bias)


class XFormersAttentionImpl(AttentionImpl):
    """Runs a layer's decodes in xFormers' split-K operator and its prefills in Triton.

    `decode_op` says which operator runs the decodes: "xformers" where it can, and "triton" where
    the operator lacks what the layer asks for: a head size that is no power of two (its kernel
    compiles for 32, 64, 128 and 256 alone), a sliding window, a soft cap, ALiBi or sinks.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
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
            sinks,
        )
        XFormersAttentionBackend.validate_head_size(head_size)
        asks_for_more = (
            alibi_slopes is not None
            or sliding_window is not None
            or bool(logits_soft_cap)
            or sinks is not None
        )
        can = head_size in HEAD_SIZES_OF_SPLIT_K and not asks_for_more
        self.decode_op = "xformers" if can else "triton"

    def forward(
        self,
        layer: object,
        query: Query,
        key: Key,
        value: Value,
        kv_cache: KVCache,
        attn_metadata: PagedAttentionMetadata | None,
        output: Output | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Output:
        """Write the step's keys and values, attend, and return `output`."""
        output = self.check_forward(output, output_scale, output_block_scale)
        if attn_metadata is None:
            return output
        # step: write the new keys and values
        key_cache, value_cache = split_kv_cache(kv_cache)
        if self.kv_sharing_target_layer_name is None:
            slot_mapping = attn_metadata.slot_mapping
            reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        # step: attend for the decodes, then for the prefills
        boundary = attn_metadata.num_decode_tokens
        decodes, prefills = (
            attn_metadata.decode_metadata,
            attn_metadata.prefill_metadata,
        )
        if boundary and decodes is not None:
            if self.decode_op == "xformers":
                bias = getattr(attn_metadata, "attn_bias", None)
                output[:boundary] = split_k_attention(
                    query[:boundary], key_cache, value_cache, bias, self.scale
                )
            else:
                _attend(self, query[:boundary], kv_cache, decodes, output[:boundary])
        if prefills is not None:
            rows = slice(boundary, attn_metadata.num_actual_tokens)
            _attend(self, query[rows], kv_cache, prefills, output[rows])
        return output


class XFormersAttentionBackend(AttentionBackend):
    """xFormers' paged split-K for decodes, Triton for prefills."""

    name = "XFORMERS"
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kernel_block_sizes = (MultipleOf(16),)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return the head sizes it takes: multiples of 8 from 32 to 256."""
        return list(range(32, 257, 8))

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Refuse a head size it does not take.

        Raises:
            ValueError: the size is none of get_supported_head_sizes().
        """
        if head_size not in cls.get_supported_head_sizes():
            raise ValueError(
                f"head_size = {head_size}: expected a multiple of 8 from 32 to 256; the"
                f" TRITON backend takes any to {MAX_HEAD_SIZE}"
            )

    @staticmethod
    def get_impl_cls() -> type[XFormersAttentionImpl]:
        """Return the class that runs a layer."""
        return XFormersAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[XFormersAttentionMetadata]:
        """Return the class of its metadata."""
        return XFormersAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[XFormersAttentionMetadataBuilder]:
        """Return the class that builds its metadata."""
        return XFormersAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache.

        Raises:
            ValueError: a block size that is no multiple of 16, the keys its kernel reads at once.
        """
        if block_size < 16 or block_size % 16:
            raise ValueError(f"block_size = {block_size}: expected a multiple of 16")
        return get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return every reason why it cannot run such a cache there."""
        reasons = cls.why_not(spec)
        if spec.block_size % 16:
            reasons.append(f"block_size = {spec.block_size}: expected a multiple of 16")
        return reasons + _why_no_device(device) + why_no_xformers()


BACKENDS = (TritonAttentionBackend, XFormersAttentionBackend)


def _attend(
    impl: AttentionImpl,
    query: Tensor,
    kv_cache: Tensor,
    metadata: PagedAttentionMetadata,
    out: Tensor,
) -> None:
    key_cache, value_cache = split_kv_cache(kv_cache)
    paged_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.max_query_len,
        metadata.max_seq_len,
        out=out,
        **impl.options(query.device),
    )


@cache
def _why_no_device(device: torch.device | str) -> list[str]:
    """Return why kernels cannot run on that device."""
    device = torch.device(device)
    if INTERPRETED:
        return []
    if device.type != "cuda":
        return [
            f"device = {device}: expected cuda, or Triton's interpreter"
            " (TRITON_INTERPRET=1 before triton is imported)"
        ]
    if torch.cuda.get_device_capability(device) < (8, 0):
        return [f"device = {device}: expected compute capability 8.0 or newer"]
    return []

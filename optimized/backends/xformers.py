"""XFORMERS: the backend that runs decodes in xFormers' paged split-K operator.

Prefills run in Triton, as in vLLM's V1 backend of that name. The options of a layer determine which
operator runs its decodes, and the options of a step may move its decodes to Triton. Attributes of
the layer and of the metadata give the reason.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from ...contract.kinds import AttentionType
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...contract.shapes import Key, KVCache, Output, Query, Value
from ...contract.specs import CrossAttentionSpec, KVCacheSpec
from ...engine.backend_interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from ...engine.capabilities import MultipleOf
from ...validation.batch import check_sequences_fit
from ..attention.encoder import encoder_attention
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from ..cache.kv_cache import get_kv_cache_shape, split_kv_cache
from ..kernels.portable.host.tuning import MAX_HEAD_SIZE
from ..runtime.chip import why_no_device
from .triton import step_fields
from .xformers_split_k import (
    build_decode_bias,
    split_k_attention,
    why_no_mask,
    why_no_split_k,
    why_no_xformers,
)


@dataclass(frozen=True, kw_only=True)
class XFormersAttentionMetadata(PagedAttentionMetadata):
    """One step's batch, and xFormers' masks of its decodes.

    Args:
        attn_bias: Optional. xFormers' PagedBlockDiagonalCausalWithOffsetPaddedKeysMask of the
            decodes' own keys. If None, the step has no decodes, or they run in Triton.
        attn_bias_reason: why they run in Triton; empty if xFormers supports the step.
        cross_attn_bias, cross_attn_bias_reason: the same for the encoders' keys.
    """

    attn_bias: Any = None
    attn_bias_reason: str = ""
    cross_attn_bias: Any = None
    cross_attn_bias_reason: str = ""

    def _part(self, first: int, last: int) -> "XFormersAttentionMetadata":
        part = super()._part(first, last)
        assert isinstance(part, XFormersAttentionMetadata)
        # the masks are those of the decodes, which come first
        if first == 0 and self.num_decodes:
            return part
        return replace(part, attn_bias=None, cross_attn_bias=None)


class XFormersAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of the xFormers backend, the decodes' masks included."""

    reorder_batch_threshold: int = 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> XFormersAttentionMetadata:
        """Return the metadata of a step whose decodes come first.

        A request without new tokens is padding. xFormers does not support padding, so the masks
        omit it.
        A group of cross-attention layers gets the mask of the encoders' keys alone.
        """
        metadata = XFormersAttentionMetadata(**step_fields(self, common_attn_metadata))
        spec, decodes = self.kv_cache_spec, metadata.decode_metadata
        if spec is None or decodes is None or not decodes.num_actual_tokens:
            return metadata
        masks: dict[str, Any] = {}
        if not isinstance(spec, CrossAttentionSpec):
            masks["attn_bias_reason"] = why_no_mask(decodes)
            if not masks["attn_bias_reason"]:
                masks["attn_bias"] = _mask(decodes, spec.block_size)
        if decodes.cross_block_table is not None:
            crossing = decodes.cross_metadata
            masks["cross_attn_bias_reason"] = why_no_mask(crossing)
            if not masks["cross_attn_bias_reason"]:
                masks["cross_attn_bias"] = _mask(crossing, spec.block_size)
        return replace(metadata, **masks)


class XFormersAttentionImpl(AttentionImpl):
    """Runs a layer's decodes in xFormers' split-K operator and all else in Triton.

    `decode_op` names the operator that runs the decodes, those of cross-attention included:
    "xformers" if it supports the layer, otherwise "triton", and `decode_op_reason` gives the
    reason. The decodes of a step run in Triton if its metadata gives a reason
    (`attn_bias_reason`), or if its output is FP8. Prefills and encoders always run in Triton.
    """

    def _set_up(self) -> None:
        super()._set_up()
        XFormersAttentionBackend.validate_head_size(self.head_size)
        self.decode_op_reason = why_no_split_k(self)
        self.decode_op = "triton" if self.decode_op_reason else "xformers"

    def forward(
        self,
        layer: object,
        query: Query,
        key: Key | None,
        value: Value | None,
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
        # step: attend without a cache if the layer is in an encoder
        if self.is_uncached:
            call = self.encoder_arguments(
                query, key, value, attn_metadata, output, output_scale
            )
            encoder_attention(**call)
            return output
        # step: write the new keys and values
        step = self.step_of(attn_metadata)
        cache = self.layer_cache(layer, *split_kv_cache(kv_cache), query.dtype)
        new = self.new_keys(cache, attn_metadata, key, value)
        if new is not None:
            reshape_and_cache(**new)
        # step: attend for the decodes, then for the prefills
        boundary = step.num_decode_tokens
        bias = getattr(
            attn_metadata, "cross_attn_bias" if self.crosses else "attn_bias", None
        )
        in_split_k = self.decode_op == "xformers" and output_scale is None and bias
        parts = (
            (slice(0, boundary), step.decode_metadata),
            (slice(boundary, step.num_actual_tokens), step.prefill_metadata),
        )
        for rows, part in parts:
            if part is None:
                continue
            if in_split_k and part is parts[0][1]:
                output[rows] = split_k_attention(
                    query[rows], cache.key, cache.value, bias, self.scale
                )
                continue
            paged_attention(
                **self.paged_arguments(
                    query[rows], cache, part, output[rows], output_scale
                )
            )
        return output


class XFormersAttentionBackend(AttentionBackend):
    """xFormers' paged split-K for decodes, Triton for prefills and encoders."""

    name = "XFORMERS"
    impl_cls = XFormersAttentionImpl
    metadata_cls = XFormersAttentionMetadata
    builder_cls = XFormersAttentionMetadataBuilder
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = TENSOR_SCALE_DTYPES
    stores_scales = True
    supported_kernel_block_sizes = (MultipleOf(16),)
    supported_attn_types = tuple(AttentionType)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return the head sizes it takes: multiples of 8 from 32 to 256."""
        return list(range(32, 257, 8))

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Raise if the backend does not support a head size.

        Raises:
            ValueError: the size is none of get_supported_head_sizes().
        """
        if head_size not in cls.get_supported_head_sizes():
            raise ValueError(
                f"head_size = {head_size}: expected a multiple of 8 from 32 to 256; the"
                f" TRITON backend takes any to {MAX_HEAD_SIZE}"
            )

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache.

        Raises:
            ValueError: a block size that is not a multiple of 16, the keys its kernel reads at
                once.
        """
        if block_size < 16 or block_size % 16:
            raise ValueError(f"block_size = {block_size}: expected a multiple of 16")
        return get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return every reason why it cannot run such a cache there."""
        return cls.why_not(spec) + why_no_device(device) + why_no_xformers()


def _mask(decodes: PagedAttentionMetadata, block_size: int) -> Any:
    """Return xFormers' mask of the decodes that have a token."""
    block_table, seq_lens = decodes.block_table, decodes.seq_lens_cpu
    if decodes.num_actual_tokens < len(seq_lens):
        kept = decodes.query_start_loc_cpu.diff().nonzero().flatten()
        block_table = block_table[kept.to(block_table.device)]
        seq_lens = seq_lens[kept]
    rows = [block_table.shape[1]] * len(seq_lens)
    check_sequences_fit([0] * len(rows), seq_lens.tolist(), rows, block_size)
    return build_decode_bias(seq_lens.tolist(), block_table, block_size)

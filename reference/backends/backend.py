"""Attention backend: all operations as one object with an engine's interface.

A backend bundles a cache shape, a metadata builder and a layer implementation, so that an engine
can swap one for another. A layer's forward is then always the same three steps: write the new
keys and values, attend for the decodes, attend for the prefills. Cross-attention takes them too,
with the encoders' keys in place of the sequences'; encoders cache nothing, so there is
one step alone.
"""

import torch
from torch import Tensor

from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from ...contract.kinds import HOST, AttentionType
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...contract.shapes import Key, KVCache, Output, Query, Value
from ...engine.backend_interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    metadata_fields,
)
from ...validation import FLOATS
from ..attention.encoder import encoder_attention
from ..attention.paged import paged_attention
from ..batch.batch_split import split_decodes_and_prefills
from ..batch.multimodal_prefix import fill_mm_prefix_query_ranges
from ..cache.cache_ops import reshape_and_cache
from ..cache.kv_cache import get_kv_cache_shape, split_kv_cache


class ReferenceAttentionMetadata(PagedAttentionMetadata):
    """One step's batch; the reference needs nothing beyond what all backends need."""


class ReferenceAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Builds the reference's metadata."""

    reorder_batch_threshold: int = 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ReferenceAttentionMetadata:
        """Return the metadata of a step whose decodes come first."""
        common = common_attn_metadata
        # step: find where the prefills begin
        if self.kv_cache_spec is None:
            boundary = (0, common.num_reqs, 0, common.num_actual_tokens)
        else:
            boundary = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        # step: find the image that contains each token
        ranges = torch.full(
            (common.num_actual_tokens, 2), -1, dtype=torch.int32, device=HOST
        )
        rows = fill_mm_prefix_query_ranges(
            ranges,
            common.mm_req_doc_ranges,
            common.query_start_loc_cpu,
            common.seq_lens_cpu,
        )
        query_ranges = ranges.to(self.device) if rows else None
        return ReferenceAttentionMetadata(
            **metadata_fields(common, boundary, query_ranges)
        )


class ReferenceAttentionImpl(AttentionImpl):
    """Runs a layer in plain torch."""

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
        compute_dtype = torch.promote_types(torch.float32, query.dtype)
        # step: attend without a cache if the layer is in an encoder
        if self.is_uncached:
            call = self.encoder_arguments(
                query, key, value, attn_metadata, output, output_scale
            )
            encoder_attention(**call, compute_dtype=compute_dtype)
            return output
        # step: write the new keys and values
        step = self.step_of(attn_metadata)
        cache = self.layer_cache(layer, *split_kv_cache(kv_cache), query.dtype)
        new = self.new_keys(cache, attn_metadata, key, value)
        if new is not None:
            reshape_and_cache(**new)
        # step: attend for the decodes, then for the prefills
        boundary = step.num_decode_tokens
        parts = (
            (slice(0, boundary), step.decode_metadata),
            (slice(boundary, step.num_actual_tokens), step.prefill_metadata),
        )
        for rows, part in parts:
            if part is None:
                continue
            call = self.paged_arguments(
                query[rows], cache, part, output[rows], output_scale
            )
            paged_attention(**call, compute_dtype=compute_dtype)
        return output


class ReferenceAttentionBackend(AttentionBackend):
    """Plain torch: every dtype, head size and block size, on any device."""

    name = "REFERENCE"
    impl_cls = ReferenceAttentionImpl
    metadata_cls = ReferenceAttentionMetadata
    builder_cls = ReferenceAttentionMetadataBuilder
    get_kv_cache_shape = staticmethod(get_kv_cache_shape)
    supported_dtypes = FLOATS
    supported_kv_cache_dtypes = TENSOR_SCALE_DTYPES
    stores_scales = True
    supported_attn_types = tuple(AttentionType)


BACKENDS = (ReferenceAttentionBackend,)

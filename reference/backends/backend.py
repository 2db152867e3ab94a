"""Attention backend: all operations as one object with an engine's interface.

A backend bundles a cache shape, a metadata builder and a layer implementation, so that an engine
can swap one for another. A layer's forward is then always the same three steps: write the new
keys and values, attend for the decodes, attend for the prefills. Cross-attention takes them too,
with the encoders' keys in place of the sequences'; encoders cache nothing, so there is
one step alone.
"""

import torch
from torch import Tensor

from ...bookkeeping.cache.kv_cache import get_kv_cache_shape, split_kv_cache
from ...contract.kinds import FP8_DTYPES, HOST, AttentionType
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...contract.shapes import Key, KVCache, Output, Query, Value
from ...contract.specs import KVCacheSpec
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
        # step: find the image of each token
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
        # step: attend inside an encoder, which keeps nothing
        if self.is_uncached:
            tokens, lengths, ranges = self.whole_prompts(attn_metadata, key, value)
            assert key is not None and value is not None
            encoder_attention(
                query[:tokens],
                key[:tokens],
                value[:tokens],
                **lengths,
                scale=self.scale,
                out=output[:tokens],
                compute_dtype=compute_dtype,
                options=self.options(query.device, output_scale, query_ranges=ranges),
            )
            return output
        # step: write the new keys and values
        step = attn_metadata.cross_metadata if self.crosses else attn_metadata
        key_cache, value_cache = split_kv_cache(kv_cache)
        value_cache = value_cache[..., : self.head_size_v]
        scales = self.scales(layer, kv_cache, query.dtype)
        slots = self.slots(attn_metadata, key, value)
        if slots is not None:
            assert key is not None and value is not None
            reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)
        # step: attend for the decodes, then for the prefills
        boundary = step.num_decode_tokens
        parts = (
            (slice(0, boundary), step.decode_metadata),
            (slice(boundary, step.num_actual_tokens), step.prefill_metadata),
        )
        for rows, part in parts:
            if part is None:
                continue
            paged_attention(
                query[rows],
                key_cache,
                value_cache,
                part.block_table,
                part.query_start_loc,
                part.seq_lens,
                part.max_query_len,
                part.max_seq_len,
                scale=self.scale,
                out=output[rows],
                compute_dtype=compute_dtype,
                options=self.options(
                    query.device,
                    output_scale,
                    causal=part.causal,
                    tree_mask=part.tree_mask,
                    query_ranges=part.query_ranges,
                    **scales,
                ),
            )
        return output


class ReferenceAttentionBackend(AttentionBackend):
    """Plain torch: every dtype, head size and block size, on any device."""

    name = "REFERENCE"
    supported_dtypes = FLOATS
    supported_kv_cache_dtypes = FP8_DTYPES
    supported_attn_types = tuple(AttentionType)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return an empty list: any."""
        return []

    @staticmethod
    def get_impl_cls() -> type[ReferenceAttentionImpl]:
        """Return the class that runs a layer."""
        return ReferenceAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[ReferenceAttentionMetadata]:
        """Return the class of its metadata."""
        return ReferenceAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[ReferenceAttentionMetadataBuilder]:
        """Return the class that builds its metadata."""
        return ReferenceAttentionMetadataBuilder

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
        return cls.why_not(spec)


BACKENDS = (ReferenceAttentionBackend,)

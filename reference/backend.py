"""How does an engine run all of this as one object?

A backend bundles a cache shape, a metadata builder and a layer implementation, so that an engine
can swap one for another. A layer's forward is then always the same three steps: write the new
keys and values, attend for the decodes, attend for the prefills.
"""

import torch
from torch import Tensor

from ..shared.backend_interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    metadata_fields,
)
from ..shared.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ..shared.refusals import FLOATS
from ..shared.shapes import Key, KVCache, Output, Query, Value
from ..shared.specs import KVCacheSpec
from .batch_split import split_decodes_and_prefills
from .cache_ops import reshape_and_cache
from .kv_cache import get_kv_cache_shape, split_kv_cache
from .paged_attention import paged_attention


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
        boundary = split_decodes_and_prefills(
            common_attn_metadata, self.reorder_batch_threshold
        )
        return ReferenceAttentionMetadata(
            **metadata_fields(common_attn_metadata, boundary)
        )


class ReferenceAttentionImpl(AttentionImpl):
    """Runs a layer in plain torch."""

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
        parts = (
            (slice(0, boundary), attn_metadata.decode_metadata),
            (
                slice(boundary, attn_metadata.num_actual_tokens),
                attn_metadata.prefill_metadata,
            ),
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
                out=output[rows],
                compute_dtype=torch.promote_types(torch.float32, query.dtype),
                **self.options(query.device),
            )
        return output


class ReferenceAttentionBackend(AttentionBackend):
    """Plain torch: every dtype, head size and block size, on any device."""

    name = "REFERENCE"
    supported_dtypes = FLOATS

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

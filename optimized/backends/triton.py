"""TRITON: the backend that runs every operation in this package's own kernels."""

from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from ...contract.graph_support import AttentionCGSupport
from ...contract.kinds import CACHE_DTYPES, HOST, AttentionType
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...contract.shapes import Key, KVCache, Output, Query, Value
from ...contract.specs import KVCacheSpec
from ...engine.backend_interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    metadata_fields,
)
from ..attention.encoder import encoder_attention
from ..attention.paged import paged_attention
from ..batch.batch_split import split_decodes_and_prefills
from ..batch.multimodal_prefix import fill_mm_prefix_query_ranges
from ..cache.cache_ops import reshape_and_cache
from ..cache.kv_cache import get_kv_cache_shape, split_kv_cache
from ..kernels.portable.host.tuning import MAX_HEAD_SIZE, max_head_size
from ..runtime.chip import why_no_device
from ..runtime.host_to_device import send


def step_fields(
    builder: AttentionMetadataBuilder, common: CommonAttentionMetadata
) -> dict[str, Any]:
    """Return the fields of a step that the metadata of both backends have."""
    # step: find where the prefills begin
    if builder.kv_cache_spec is None:
        boundary = (0, common.num_reqs, 0, common.num_actual_tokens)
    else:
        threshold = builder.reorder_batch_threshold
        assert threshold is not None
        boundary = split_decodes_and_prefills(common, threshold)
    # step: find the image that contains each token
    query_ranges = None
    if common.mm_req_doc_ranges:
        ranges = torch.full(
            (common.num_actual_tokens, 2), -1, dtype=torch.int32, device=HOST
        )
        rows = fill_mm_prefix_query_ranges(
            ranges,
            common.mm_req_doc_ranges,
            common.query_start_loc_cpu,
            common.seq_lens_cpu,
        )
        if rows:
            _, (query_ranges,) = send([ranges.numpy()], builder.device)
    return metadata_fields(common, boundary, query_ranges)


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
        return TritonAttentionMetadata(**step_fields(self, common_attn_metadata))


class TritonAttentionImpl(AttentionImpl):
    """Runs a layer in this package's own kernels."""

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
        """Write the step's keys and values, attend, and return `output`.

        Decodes and prefills are one call; its kernels separate them on the device.
        """
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
        rows = slice(0, step.num_actual_tokens)
        paged_attention(
            **self.paged_arguments(query[rows], cache, step, output[rows], output_scale)
        )
        return output


class TritonAttentionBackend(AttentionBackend):
    """Pure Triton: any block size, head sizes to 1,024, float16, bfloat16 and float32."""

    name = "TRITON"
    impl_cls = TritonAttentionImpl
    metadata_cls = TritonAttentionMetadata
    builder_cls = TritonAttentionMetadataBuilder
    get_kv_cache_shape = staticmethod(get_kv_cache_shape)
    supported_dtypes = CACHE_DTYPES
    supported_kv_cache_dtypes = TENSOR_SCALE_DTYPES
    stores_scales = True
    supported_attn_types = tuple(AttentionType)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return every head size it takes."""
        return list(range(1, MAX_HEAD_SIZE + 1))

    @classmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return every reason why it cannot run such a cache there."""
        # the largest head that fits depends on the device, which may not exist
        reasons = cls.why_not(spec) + why_no_device(device)
        if not reasons:
            largest = max_head_size(spec.dtype, torch.device(device))
            if spec.head_size > largest:
                reasons.append(
                    f"head_size = {spec.head_size}: expected at most {largest}"
                )
        return reasons

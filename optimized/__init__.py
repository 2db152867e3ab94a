"""Paged attention for production: numpy on the host, Triton, Gluon and xFormers on the device.

The same operations, names and signatures as `pagetwin.reference`. The kernels run on CUDA devices
of compute capability 8.0 and newer. Without a GPU they run in Triton's interpreter, which is
slow and exact, if TRITON_INTERPRET=1 is set before triton is imported.
"""

import importlib.util
import warnings

from ..contract.tested_versions import why_too_old, why_untested
from ..engine.triton_versions import why_no_triton

if importlib.util.find_spec("triton") is None:
    raise ImportError(why_no_triton())
if too_old := why_too_old():
    raise ImportError(too_old)
if untested := why_untested():
    warnings.warn(untested, stacklevel=2)

from ..contract.attention_options import AttentionOptions
from ..contract.block_classes import OutOfBlocks
from ..contract.extra_keys import ExtraKeys
from ..contract.kinds import PAD_SLOT_ID
from ..contract.metadata_classes import CommonAttentionMetadata
from ..contract.multimodal_features import MultiModalFeature
from ..contract.scheduler_classes import Request, RequestStatus, SchedulerOutput
from ..contract.specs import KVCacheSpec
from .attention.cascade import cascade_attention, use_cascade_attention
from .attention.context_parallel import (
    dcp_attention,
    get_dcp_local_seq_lens,
    get_dcp_ranks,
)
from .attention.encoder import encoder_attention
from .attention.latent import (
    concat_and_cache_mla,
    gather_latent_cache,
    get_mla_dims,
    latent_decode_attention,
    latent_prefill_attention,
)
from .attention.merge_states import (
    log2_lse_to_ln,
    lse_weighted_combine,
    merge_attn_states,
)
from .attention.paged import paged_attention
from .batch.batch_slices import (
    make_metadata_with_slice,
    slice_query_start_locs,
    split_attn_metadata,
)
from .batch.batch_split import (
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from .batch.causal_conv import compute_causal_conv1d_metadata
from .batch.draft_steps import (
    compute_token_to_req_indices,
    eagle_prepare_inputs_padded,
    eagle_prepare_next_token_padded,
    eagle_step_update_slot_mapping_and_metadata,
)
from .batch.fast_prefill import (
    create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    subclass_attention_backend,
    subclass_attention_metadata,
)
from .batch.layer_parameters import (
    get_per_layer_parameters,
    infer_global_hyperparameters,
)
from .batch.local_attention import make_local_attention_virtual_batches
from .batch.metadata import build_attn_metadata, build_common_attn_metadata
from .batch.multimodal_prefix import (
    compute_mm_prefix_range_tensor,
    compute_mm_prefix_ranges,
    fill_mm_prefix_query_ranges,
)
from .batch.rswa import fill_rswa_query_ranges
from .batch.scheduler import Scheduler
from .batch.spec_decode import (
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
)
from .batch.step_buffers import StepBuffers
from .cache.block_manager import BlockManager
from .cache.block_table import append_blocks, blocks_needed, make_block_table
from .cache.block_table_rows import BlockTable, mamba_get_block_table_tensor
from .cache.cache_ops import copy_blocks, gather_cache, reshape_and_cache, swap_blocks
from .cache.kv_cache import (
    allocate_kv_cache,
    get_kv_cache_shape,
    get_packed_kv_cache_shape,
    reshape_kv_cache,
    reshape_layered_kv_cache,
    split_kv_cache,
    split_packed_kv_cache,
    view_kv_cache,
)
from .cache.kv_cache_init import (
    allocate_kv_caches,
    bind_kv_cache,
    get_kv_cache_spec,
    init_kv_cache,
    reshape_kv_caches,
)
from .cache.slot_mapping import (
    compute_slot_mapping,
    compute_slot_mapping_batch,
    compute_slot_mapping_device,
    compute_slot_mapping_start_idx,
)
from .parallel.decode import DecodeContextParallel
from .parallel.heads import get_dcp_groups, get_tp_heads
from .parallel.prefill import PrefillContextParallel
from .parallel.ring import RingContextParallel
from .parallel.symmetric_ranks import SymmetricRanks
from .parallel.warm_up_ranks import warm_up_ranks
from .runtime.workspace import release_workspace
from .sparse.attention import convert_req_index_to_global_index, sparse_attention
from .sparse.indexer import index_scores, indexer_k_quant_and_cache, select_keys
from .sparse.indexer_batch import (
    balanced_prefill_row_shard,
    build_prefill_chunk_metadata,
    prepare_uniform_decode,
)
from .sparse.slots import (
    compute_kpool_tail_slot_mapping,
    compute_swa_indices_and_lens,
    get_compressed_slot_mapping,
)
from .tuning.load import load_tuning, tuning_in_use
from .tuning.tune import tune_kernels
from .v0.encoder_decoder import (
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
)
from .v0.graph_state import CommonAttentionState, get_attn_cg_support
from .v0.sequence_metadata import (
    CommonMetadataBuilder,
    is_block_tables_empty,
    make_tensor_with_pad,
)
from .warm_up.warm_up import WarmedKernel, warm_up
from .warm_up.warm_up_spec import WarmUpSpec

__all__ = [
    "PAD_SLOT_ID",
    "AttentionOptions",
    "BlockManager",
    "BlockTable",
    "CommonAttentionMetadata",
    "CommonAttentionState",
    "CommonMetadataBuilder",
    "DecodeContextParallel",
    "ExtraKeys",
    "KVCacheSpec",
    "MultiModalFeature",
    "OutOfBlocks",
    "PrefillContextParallel",
    "Request",
    "RequestStatus",
    "RingContextParallel",
    "Scheduler",
    "SchedulerOutput",
    "StepBuffers",
    "SymmetricRanks",
    "WarmUpSpec",
    "WarmedKernel",
    "allocate_kv_cache",
    "allocate_kv_caches",
    "append_blocks",
    "balanced_prefill_row_shard",
    "bind_kv_cache",
    "blocks_needed",
    "build_attn_metadata",
    "build_common_attn_metadata",
    "build_prefill_chunk_metadata",
    "cascade_attention",
    "compute_causal_conv1d_metadata",
    "compute_kpool_tail_slot_mapping",
    "compute_mm_prefix_range_tensor",
    "compute_mm_prefix_ranges",
    "compute_slot_mapping",
    "compute_slot_mapping_batch",
    "compute_slot_mapping_device",
    "compute_slot_mapping_start_idx",
    "compute_swa_indices_and_lens",
    "compute_token_to_req_indices",
    "concat_and_cache_mla",
    "convert_req_index_to_global_index",
    "copy_blocks",
    "create_fast_prefill_custom_backend",
    "dcp_attention",
    "eagle_prepare_inputs_padded",
    "eagle_prepare_next_token_padded",
    "eagle_step_update_slot_mapping_and_metadata",
    "encoder_attention",
    "fill_mm_prefix_query_ranges",
    "fill_rswa_query_ranges",
    "gather_cache",
    "gather_latent_cache",
    "get_attn_cg_support",
    "get_compressed_slot_mapping",
    "get_dcp_groups",
    "get_dcp_local_seq_lens",
    "get_dcp_ranks",
    "get_kv_cache_shape",
    "get_kv_cache_spec",
    "get_mla_dims",
    "get_num_prefill_decode_query_kv_tokens",
    "get_packed_kv_cache_shape",
    "get_per_layer_parameters",
    "get_seq_len_block_table_args",
    "get_tp_heads",
    "index_scores",
    "indexer_k_quant_and_cache",
    "infer_global_hyperparameters",
    "init_kv_cache",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
    "is_block_tables_empty",
    "latent_decode_attention",
    "latent_prefill_attention",
    "load_tuning",
    "log2_lse_to_ln",
    "lse_weighted_combine",
    "make_block_table",
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches",
    "make_metadata_with_slice",
    "make_tensor_with_pad",
    "mamba_get_block_table_tensor",
    "merge_attn_states",
    "paged_attention",
    "prepare_uniform_decode",
    "release_workspace",
    "reorder_batch_to_split_decodes_and_prefills",
    "reshape_and_cache",
    "reshape_attn_output_for_spec_decode",
    "reshape_kv_cache",
    "reshape_kv_caches",
    "reshape_layered_kv_cache",
    "reshape_query_for_spec_decode",
    "select_keys",
    "slice_query_start_locs",
    "sparse_attention",
    "split_attn_metadata",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_kv_cache",
    "split_packed_kv_cache",
    "split_prefill_chunks",
    "subclass_attention_backend",
    "subclass_attention_metadata",
    "swap_blocks",
    "tune_kernels",
    "tuning_in_use",
    "use_cascade_attention",
    "view_kv_cache",
    "warm_up",
    "warm_up_ranks",
]

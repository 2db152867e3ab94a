"""Attention metadata of one step: start locations, lengths, block table and slots.

numpy computes everything in one pinned buffer, which one asynchronous copy moves to the device. The
tensors of the metadata are views of that buffer and of its copy.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...contract.argument_types import typed
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...contract.shapes import BlockTable, CountsBuffer, SlotMapping
from ...engine.backend_interface import AttentionMetadataBuilder
from ...validation.step import check_attn_groups
from ..cache.block_table import padded_rows
from ..cache.slot_mapping import compute_slot_mapping_batch
from ..runtime.host_to_device import send


@typed
def build_common_attn_metadata(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> CommonAttentionMetadata:
    """Return one step's metadata from its requests, in the given order."""
    num_reqs = len(query_lens)
    # step: compute the slots of the new tokens
    slot_mapping = compute_slot_mapping_batch(
        query_lens, num_computed_tokens, block_rows, block_size
    ).numpy()
    # step: pad the rows to one table
    max_blocks = max((len(row) for row in block_rows), default=0)
    block_table = padded_rows(block_rows, max_blocks)
    # step: compute the start of each request
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    # step: compute the length of each sequence
    computed = np.asarray(num_computed_tokens, dtype=np.int32)
    seq_lens = computed + np.diff(query_start_loc)
    # step: copy everything to the device
    on_host, on_device = send(
        [slot_mapping, query_start_loc, seq_lens, block_table], torch.device(device)
    )
    return CommonAttentionMetadata(
        query_start_loc=on_device[1],
        query_start_loc_cpu=on_host[1],
        seq_lens=on_device[2],
        seq_lens_cpu=on_host[2],
        num_computed_tokens_cpu=torch.from_numpy(computed),
        num_reqs=num_reqs,
        num_actual_tokens=len(slot_mapping),
        max_query_len=max(query_lens, default=0),
        max_seq_len=int(seq_lens.max(initial=0)),
        block_table_tensor=on_device[3],
        slot_mapping=on_device[0],
    )


@typed
def build_attn_metadata(
    attn_metadata_builders: Sequence[AttentionMetadataBuilder],
    num_reqs: int,
    num_tokens: int,
    query_start_loc: CountsBuffer,
    query_start_loc_cpu: CountsBuffer,
    seq_lens: CountsBuffer,
    seq_lens_cpu: CountsBuffer,
    num_computed_tokens_cpu: CountsBuffer,
    block_tables: Sequence[BlockTable],
    slot_mappings: Sequence[SlotMapping],
    layer_names: Sequence[Sequence[str]],
    num_tokens_padded: int | None = None,
) -> dict[str, PagedAttentionMetadata]:
    """Return the metadata of every layer: one object per group of layers."""
    check_attn_groups(
        attn_metadata_builders,
        num_reqs,
        num_tokens,
        query_start_loc,
        query_start_loc_cpu,
        seq_lens,
        seq_lens_cpu,
        num_computed_tokens_cpu,
        block_tables,
        slot_mappings,
        layer_names,
        num_tokens_padded,
    )
    num_slots = num_tokens if num_tokens_padded is None else num_tokens_padded
    # step: slice the buffers to the batch
    starts = query_start_loc_cpu[: num_reqs + 1]
    lens = seq_lens_cpu[:num_reqs]
    attn_metadata: dict[str, PagedAttentionMetadata] = {}
    # step: build once per group and assign the result to its layers
    for group, names in enumerate(layer_names):
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=starts,
            seq_lens=seq_lens[:num_reqs],
            seq_lens_cpu=lens,
            num_computed_tokens_cpu=num_computed_tokens_cpu[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=int(np.diff(starts.numpy()).max()),
            max_seq_len=int(lens.numpy().max()),
            block_table_tensor=block_tables[group][:num_reqs],
            slot_mapping=slot_mappings[group][:num_slots],
        )
        metadata = attn_metadata_builders[group].build(0, common)
        attn_metadata.update(dict.fromkeys(names, metadata))
    return attn_metadata

"""Chunked local attention: each chunk of a sequence as a request of its own.

numpy finds the chunks of all requests at once. One copy moves their requests and entries to the
device, which selects the blocks itself, so the host never reads the block table.
"""

import numpy as np
import torch

from ...contract.argument_types import typed
from ...contract.metadata_classes import CommonAttentionMetadata
from ...validation.step_shapes import check_local_attention


@typed
def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    common_attn_metadata: CommonAttentionMetadata,
    block_size: int,
) -> CommonAttentionMetadata:
    """Return the step with one virtual request per chunk that holds new tokens."""
    check_local_attention(attn_chunk_size, common_attn_metadata, block_size)
    all_lens = common_attn_metadata.seq_lens_cpu.numpy()
    context_lens = all_lens - np.diff(common_attn_metadata.query_start_loc_cpu.numpy())
    # step: find the chunks that hold new tokens
    last = np.maximum(all_lens - 1, 0) // attn_chunk_size
    first = np.minimum(context_lens // attn_chunk_size, last)
    num_chunks = last - first + 1
    req = np.repeat(np.arange(len(all_lens)), num_chunks)
    chunk = np.arange(len(req)) - (num_chunks.cumsum() - num_chunks - first)[req]
    # step: count each chunk's new tokens and keys
    begin = chunk * attn_chunk_size
    end = np.minimum(begin + attn_chunk_size, all_lens[req])
    query_lens = np.maximum(0, end - np.maximum(begin, context_lens[req]))
    seq_lens = (end - begin).astype(np.int32)
    # step: copy the chunk's blocks from the row
    table = common_attn_metadata.block_table_tensor
    blocks_per_chunk = attn_chunk_size // block_size
    if not table.shape[1]:
        table = table.new_zeros(len(all_lens), 1)
    entry = chunk[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)
    # the last chunk may extend past the row; those entries are never read
    entry = np.minimum(entry, table.shape[1] - 1)
    picked = torch.from_numpy(np.column_stack([req, entry]))
    picked = picked.to(table.device, non_blocking=True)
    block_table = table[picked[:, :1], picked[:, 1:]]
    # step: copy the virtual requests to the device
    starts = np.zeros(len(req) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=starts[1:])
    query_start_loc, lens = torch.from_numpy(starts), torch.from_numpy(seq_lens)
    is_prefilling = common_attn_metadata.is_prefilling
    causal = common_attn_metadata.causal
    return common_attn_metadata.replace(
        query_start_loc=query_start_loc.to(table.device, non_blocking=True),
        query_start_loc_cpu=query_start_loc,
        seq_lens=lens.to(table.device, non_blocking=True),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=lens - query_start_loc.diff(),
        num_reqs=len(req),
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        block_table_tensor=block_table,
        causal=causal[torch.from_numpy(req).to(causal.device)]
        if isinstance(causal, torch.Tensor)
        else causal,
        encoder_seq_lens=None,
        encoder_seq_lens_cpu=None,
        max_encoder_seq_len=None,
        encoder_query_start_loc=None,
        encoder_query_start_loc_cpu=None,
        cross_block_table_tensor=None,
        cross_slot_mapping=None,
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu=None,
        is_prefilling=None
        if is_prefilling is None
        else is_prefilling[torch.from_numpy(req)],
    )

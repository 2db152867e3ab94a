"""Chunked local attention: each chunk of a sequence as a request of its own.

Chunked local attention divides every sequence into chunks of `attn_chunk_size` positions. A query
attends to the keys of its own chunk, up to itself. Kernels need no change: each chunk that holds
new tokens becomes a virtual request, whose sequence starts at the start of the chunk. A chunk is a
whole number of blocks, so its keys are a contiguous range of the request's block-table row.
"""

import torch
from torch import Tensor

from ...contract.kinds import HOST
from ...contract.metadata_classes import CommonAttentionMetadata
from ...validation import validated
from ...validation.step_shapes import check_local_attention


@validated(check_local_attention)
def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    common_attn_metadata: CommonAttentionMetadata,
    block_size: int,
) -> CommonAttentionMetadata:
    """Return the step with one virtual request per chunk that holds new tokens.

    Args:
        attn_chunk_size: positions per chunk, a multiple of `block_size`.
        common_attn_metadata: the step.
        block_size: slots in a block.

    Returns:
        The step's virtual requests, ordered by request and chunk, each causal if its request is.
        Its maxima are exact. The new tokens and their order do not change, so slots, positions
        and logits are the same. A request without new tokens has one virtual request, on its last
        chunk; a padding request has an empty one. Fields about encoders and ranks are None.

    Raises:
        ValueError: a chunk is not a whole number of blocks, or a sequence has fewer tokens than
            new ones.
        IndexError: a sequence is longer than its row.
        NotImplementedError: bidirectional ranges of images, or trees of draft tokens.

    Source:
        vLLM's function of that name.

    Example:
        Chunk 4, block 2: of 6 tokens the last 4 are new, in chunks 0 and 1.

        >>> chunked = make_local_attention_virtual_batches(
        ...     attn_chunk_size=4,
        ...     common_attn_metadata=build_common_attn_metadata(
        ...         query_lens=[4],
        ...         num_computed_tokens=[2],
        ...         block_rows=[[7, 2, 5]],
        ...         block_size=2,
        ...     ),
        ...     block_size=2,
        ... )
        >>> chunked.query_start_loc, chunked.seq_lens
        (tensor([0, 2, 4], dtype=torch.int32), tensor([4, 2], dtype=torch.int32))
        >>> chunked.block_table_tensor
        tensor([[7, 2],
                [5, 5]], dtype=torch.int32)
    """
    starts = common_attn_metadata.query_start_loc_cpu.tolist()
    reqs, chunks, query_lens, seq_lens = [], [], [], []
    for req, seq_len in enumerate(common_attn_metadata.seq_lens_cpu.tolist()):
        context_len = seq_len - (starts[req + 1] - starts[req])
        # step: find the chunks that hold new tokens
        last = max(seq_len - 1, 0) // attn_chunk_size
        first = min(context_len // attn_chunk_size, last)
        for chunk in range(first, last + 1):
            # step: count each chunk's new tokens and keys
            begin = chunk * attn_chunk_size
            end = min(begin + attn_chunk_size, seq_len)
            query_lens.append(max(0, end - max(begin, context_len)))
            seq_lens.append(end - begin)
            reqs.append(req)
            chunks.append(chunk)
    # step: copy the chunk's blocks from the row
    table = common_attn_metadata.block_table_tensor
    blocks_per_chunk = attn_chunk_size // block_size
    block_table = table.new_zeros(len(reqs), blocks_per_chunk)
    for virtual, (req, chunk) in enumerate(zip(reqs, chunks, strict=True)):
        for offset in range(blocks_per_chunk if table.shape[1] else 0):
            # the last chunk may extend past the row; those entries are never read
            entry = min(chunk * blocks_per_chunk + offset, table.shape[1] - 1)
            block_table[virtual, offset] = table[req, entry]
    # step: copy the virtual requests to the device
    queries = torch.tensor([0, *query_lens], dtype=torch.int32, device=HOST)
    query_start_loc = queries.cumsum(0, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=HOST)
    is_prefilling = common_attn_metadata.is_prefilling
    causal = common_attn_metadata.causal
    return common_attn_metadata.replace(
        query_start_loc=query_start_loc.to(table.device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=lens.to(table.device),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=lens - queries[1:],
        num_reqs=len(reqs),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        block_table_tensor=block_table,
        causal=causal[reqs] if isinstance(causal, Tensor) else causal,
        encoder_seq_lens=None,
        encoder_seq_lens_cpu=None,
        max_encoder_seq_len=None,
        encoder_query_start_loc=None,
        encoder_query_start_loc_cpu=None,
        cross_block_table_tensor=None,
        cross_slot_mapping=None,
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu=None,
        is_prefilling=None if is_prefilling is None else is_prefilling[reqs],
    )

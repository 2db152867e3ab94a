"""What does attention need to know about one step?

The scheduler decides who computes how many tokens. This file turns that decision, three lists, into
the tensors that the cache write and attention read: starts, lengths, block table, slot mapping. It
is done once a step and used by every layer.
"""

from collections.abc import Sequence

import torch

from ..shared.kinds import HOST
from ..shared.metadata_classes import CommonAttentionMetadata
from .block_table import make_block_table
from .slot_mapping import compute_slot_mapping_batch


def build_common_attn_metadata(
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> CommonAttentionMetadata:
    """Return one step's metadata from its requests, in the order they are given.

    Args:
        query_lens: [reqs] new tokens of each request, 0 included.
        num_computed_tokens: [reqs] tokens already in the cache.
        block_rows: [reqs] block ids of each request, in sequence order.
        block_size: slots in a block.
        device: where the cache lies.

    Returns:
        The metadata; its maxima are exact, 0 for an empty batch.

    Raises:
        IndexError: a sequence longer than its row, or a negative block id.
        ValueError: lists of different lengths, or a negative count.

    Source:
        What vLLM's V1 model runner computes before it builds a backend's metadata.

    Example:
        Request 0 decodes its fifth token; request 1 starts with three.

        >>> step = build_common_attn_metadata(
        ...     query_lens=[1, 3],
        ...     num_computed_tokens=[4, 0],
        ...     block_rows=[[7, 2], [5]],
        ...     block_size=4,
        ... )
        >>> step.query_start_loc, step.seq_lens
        (tensor([0, 1, 4], dtype=torch.int32), tensor([5, 3], dtype=torch.int32))
        >>> step.slot_mapping
        tensor([ 8, 20, 21, 22])
    """
    # step: find the slots of the new tokens
    slot_mapping = compute_slot_mapping_batch(
        query_lens, num_computed_tokens, block_rows, block_size
    )
    # step: pad the rows into one table
    block_table = make_block_table(block_rows)
    # step: add up where each request starts
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=HOST)
    # step: add up how long each sequence is
    seq_lens = torch.tensor(
        [a + b for a, b in zip(num_computed_tokens, query_lens, strict=True)],
        dtype=torch.int32,
        device=HOST,
    )
    # step: send everything to the device
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=torch.tensor(
            num_computed_tokens, dtype=torch.int32, device=HOST
        ),
        num_reqs=len(query_lens),
        num_actual_tokens=starts[-1],
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens.tolist(), default=0),
        block_table_tensor=block_table.to(device),
        slot_mapping=slot_mapping.to(device),
    )

"""Which requests of the batch decode, and which prefill?

Both answers are a few numpy operations on the host; nothing is read from the device.
"""

from collections.abc import Sequence

import numpy as np

from ..shared.metadata_classes import CommonAttentionMetadata
from ..shared.refusals import check_not_negative


def reorder_batch_to_split_decodes_and_prefills(
    num_scheduled_tokens: Sequence[int], decode_threshold: int = 1
) -> list[int]:
    """Return the order of the batch that has its decodes first, in the fewest swaps."""
    check_not_negative(decode_threshold=decode_threshold)
    counts = np.asarray(num_scheduled_tokens, dtype=np.int64)
    order = np.arange(len(counts))
    # step: count the decodes
    is_decode = counts <= decode_threshold
    num_decodes = int(is_decode.sum())
    # step: find the prefills before the boundary
    misplaced_prefills = np.flatnonzero(~is_decode[:num_decodes])
    # step: find the decodes behind it, the last one first
    misplaced_decodes = num_decodes + np.flatnonzero(is_decode[num_decodes:])[::-1]
    # step: swap them pair by pair
    order[misplaced_prefills] = misplaced_decodes
    order[misplaced_decodes] = misplaced_prefills
    return order.tolist()


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """Return where the decodes end in a batch that has them first."""
    check_not_negative(decode_threshold=decode_threshold)
    starts = common_attn_metadata.query_start_loc_cpu.numpy()
    query_lens = np.diff(starts)
    # step: find the first request that is no decode
    is_prefill = query_lens > decode_threshold
    if require_uniform:
        is_prefill |= (query_lens != query_lens[:1]) & (query_lens != 0)
    num_decodes = int(is_prefill.argmax()) if is_prefill.any() else len(query_lens)
    # step: count the tokens on both sides
    num_decode_tokens = int(starts[num_decodes])
    num_tokens = common_attn_metadata.num_actual_tokens
    return (
        num_decodes,
        len(query_lens) - num_decodes,
        num_decode_tokens,
        num_tokens - num_decode_tokens,
    )

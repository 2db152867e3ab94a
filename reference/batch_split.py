"""Which requests of the batch decode, and which prefill?

A request that brings one new token (a decode) wants another kernel than one that brings many (a
prefill). So a step puts the decodes first; then one boundary tells both parts apart, and each is a
plain slice of the batch.
"""

from collections.abc import Sequence

from ..shared.metadata_classes import CommonAttentionMetadata
from ..shared.refusals import check_not_negative


def reorder_batch_to_split_decodes_and_prefills(
    num_scheduled_tokens: Sequence[int], decode_threshold: int = 1
) -> list[int]:
    """Return the order of the batch that has its decodes first, in the fewest swaps.

    Args:
        num_scheduled_tokens: [reqs] new tokens of each request.
        decode_threshold: a request with at most that many new tokens is a decode.

    Returns:
        [reqs] order[i] is the request that stands at place i afterwards.

    Raises:
        ValueError: a negative threshold.

    Source:
        vLLM's function of that name, which swaps the rows of its input batch.

    Example:
        >>> reorder_batch_to_split_decodes_and_prefills([6, 1, 7, 1])
        [3, 1, 2, 0]
    """
    check_not_negative(decode_threshold=decode_threshold)
    order = list(range(len(num_scheduled_tokens)))
    # step: count the decodes
    is_decode = [count <= decode_threshold for count in num_scheduled_tokens]
    num_decodes = sum(is_decode)
    # step: find the prefills before the boundary
    misplaced_prefills = [i for i in order[:num_decodes] if not is_decode[i]]
    # step: find the decodes behind it, the last one first
    misplaced_decodes = [i for i in order[num_decodes:] if is_decode[i]][::-1]
    # step: swap them pair by pair
    for prefill, decode in zip(misplaced_prefills, misplaced_decodes, strict=True):
        order[prefill], order[decode] = order[decode], order[prefill]
    return order


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """Return where the decodes end in a batch that has them first.

    Args:
        common_attn_metadata: the step's batch.
        decode_threshold: a request with at most that many new tokens is a decode.
        require_uniform: decodes must all have as many new tokens as the first request;
            requests without new tokens are padding and may follow them.

    Returns:
        Decodes, prefills, new tokens of the decodes, new tokens of the prefills. Everything
        from the first request that is no decode on counts as prefill.

    Raises:
        ValueError: a negative threshold.

    Source:
        vLLM's function of that name.

    Example:
        New tokens [1, 1, 7, 3], threshold 1: the boundary lies before the 7.

        >>> split_decodes_and_prefills(build_common_attn_metadata(
        ...     query_lens=[1, 1, 7, 3],
        ...     num_computed_tokens=[5, 5, 5, 5],
        ...     block_rows=[[1], [2], [3], [4]],
        ...     block_size=16,
        ... ))
        (2, 2, 2, 10)
    """
    check_not_negative(decode_threshold=decode_threshold)
    starts = common_attn_metadata.query_start_loc_cpu
    query_lens = starts.diff().tolist()
    # step: find the first request that is no decode
    num_decodes = 0
    for query_len in query_lens:
        if query_len > decode_threshold:
            break
        if require_uniform and query_len not in (query_lens[0], 0):
            break
        num_decodes += 1
    # step: count the tokens on both sides
    num_decode_tokens = int(starts[num_decodes])
    num_tokens = common_attn_metadata.num_actual_tokens
    return (
        num_decodes,
        len(query_lens) - num_decodes,
        num_decode_tokens,
        num_tokens - num_decode_tokens,
    )

"""Batch order: decodes first, then prefills, and the boundary between them.

A request with one new token (a decode) uses another kernel than one with many (a prefill). A step
therefore puts the decodes first, so that one boundary separates two contiguous slices of the batch.
Some kernels need more regions: an extend is a prefill with tokens already in the cache, such as a
later chunk of a long prompt.
"""

from collections.abc import Sequence
from itertools import pairwise

from ...contract.argument_types import typed
from ...contract.integers import WideInt
from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.shapes import TokenCounts
from ...validation import check_not_negative, check_on_host, validated
from ...validation.step import check_decode_split, check_prefill_chunks, check_regions


@validated(check_regions)
def reorder_batch_to_split_decodes_and_prefills(
    num_scheduled_tokens: Sequence[int],
    decode_threshold: int = 1,
    num_computed_tokens: Sequence[int] | None = None,
    num_prompt_tokens: Sequence[int] | None = None,
) -> list[int]:
    """Return the order that puts decodes first and moves as few requests as possible.

    By default there are two regions: decodes, prefills. With `num_computed_tokens` there are
    three: decodes, extends, prefills. With `num_prompt_tokens` too there are four: decodes, short
    extends, long extends, prefills. Then a request with nothing computed is a prefill, however
    short, and a request within its prompt is not a decode.

    Args:
        num_scheduled_tokens: [reqs] new tokens of each request.
        decode_threshold: largest number of new tokens of a short request.
        num_computed_tokens: Optional. [reqs] tokens already in the cache.
        num_prompt_tokens: Optional. [reqs] tokens of each prompt.

    Returns:
        [reqs] order[i] is the request at position i after reordering. Requests that are in their
        region already keep their positions.

    Raises:
        ValueError: a negative threshold, counts of different lengths, or prompts without
            computed tokens.

    Source:
        vLLM's function of that name: two regions up to 0.11.0, three in 0.11.1, four later.

    Example:
        >>> reorder_batch_to_split_decodes_and_prefills([6, 1, 7, 1])
        [3, 1, 2, 0]
        >>> reorder_batch_to_split_decodes_and_prefills(
        ...     [6, 1, 7, 1], num_computed_tokens=[0, 5, 8, 5]
        ... )
        [3, 1, 2, 0]
        >>> reorder_batch_to_split_decodes_and_prefills(
        ...     [6, 1, 7, 1],
        ...     num_computed_tokens=[0, 5, 8, 0],
        ...     num_prompt_tokens=[6, 5, 15, 1],
        ... )
        [1, 2, 0, 3]
    """
    # step: assign each request to a region
    region = []
    for req, count in enumerate(num_scheduled_tokens):
        short = count <= decode_threshold
        if num_computed_tokens is None:
            region.append(0 if short else 1)
        elif num_prompt_tokens is None:
            region.append(0 if short else 1 if num_computed_tokens[req] > 0 else 2)
        elif num_computed_tokens[req] == 0:
            region.append(3)
        elif not short:
            region.append(2)
        else:
            region.append(int(num_computed_tokens[req] < num_prompt_tokens[req]))
    # step: find the positions with a request of another region
    target = sorted(region)
    misplaced = [i for i in range(len(region)) if region[i] != target[i]]
    # step: fill these positions region by region
    # two regions: start with the last one, so that every move swaps two rows
    sources = misplaced[::-1] if num_computed_tokens is None else misplaced
    order = list(range(len(region)))
    for i, req in zip(misplaced, sorted(sources, key=region.__getitem__), strict=True):
        order[i] = req
    return order


@typed
def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """Return the boundary between decodes and prefills in a batch with its decodes first.

    Args:
        common_attn_metadata: the step's batch.
        decode_threshold: largest number of new tokens of a decode.
        require_uniform: whether all decodes must have as many new tokens as the first request
            with any. Requests without new tokens are padding and count as decodes.
        treat_short_extends_as_decodes: whether a short request within its prompt is a decode.
            If False, the batch's `is_prefilling` marks such requests.

    Returns:
        Number of decodes, of prefills, of new tokens of the decodes, of new tokens of the
        prefills. All requests from the first one that is not a decode count as prefills.

    Raises:
        ValueError: a negative threshold, or `is_prefilling` is missing.

    Source:
        vLLM's function of that name.

    Example:
        New tokens [1, 1, 7, 3], threshold 1: the boundary is before the 7.

        >>> split_decodes_and_prefills(build_common_attn_metadata(
        ...     query_lens=[1, 1, 7, 3],
        ...     num_computed_tokens=[5, 5, 5, 5],
        ...     block_rows=[[1], [2], [3], [4]],
        ...     block_size=16,
        ... ))
        (2, 2, 2, 10)
    """
    is_prefilling = check_decode_split(
        common_attn_metadata, decode_threshold, treat_short_extends_as_decodes
    )
    starts = common_attn_metadata.query_start_loc_cpu
    query_lens = starts.diff().tolist()
    in_prompt = [False] * len(query_lens)
    if is_prefilling is not None:
        in_prompt = is_prefilling.tolist()
    # step: find the first request that is not a decode
    first_len = next((query_len for query_len in query_lens if query_len), 0)
    num_decodes = 0
    for query_len, prefilling in zip(query_lens, in_prompt, strict=True):
        if query_len > decode_threshold or prefilling:
            break
        if require_uniform and query_len not in (first_len, 0):
            break
        num_decodes += 1
    # step: count the tokens of decodes and prefills
    num_tokens = common_attn_metadata.num_actual_tokens
    # without a prefill, tokens after the last request are padding of the decodes
    whole = num_decodes == len(query_lens)
    num_decode_tokens = num_tokens if whole else int(starts[num_decodes])
    return (
        num_decodes,
        len(query_lens) - num_decodes,
        num_decode_tokens,
        num_tokens - num_decode_tokens,
    )


@typed
def split_decodes_prefills_and_extends(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int, int, int]:
    """Return the boundaries between decodes, extends and prefills in a batch of that order.

    Args:
        common_attn_metadata: the step's batch: decodes, then extends, then prefills.
        decode_threshold: largest number of new tokens of a decode.

    Returns:
        Number of decodes, extends and prefills, then the new tokens of each. The extends start at
        the first longer request, the prefills at the first longer request with nothing in the
        cache.

    Raises:
        ValueError: a negative threshold.

    Source:
        vLLM's function of that name.

    Example:
        New tokens [1, 1, 4, 6]; the 4 has eight tokens in the cache, the 6 none.

        >>> split_decodes_prefills_and_extends(build_common_attn_metadata(
        ...     query_lens=[1, 1, 4, 6],
        ...     num_computed_tokens=[3, 4, 8, 0],
        ...     block_rows=[[1], [2], [3], [4]],
        ...     block_size=16,
        ... ))
        (2, 1, 1, 2, 4, 6)
    """
    check_not_negative(decode_threshold=decode_threshold)
    starts = common_attn_metadata.query_start_loc_cpu
    query_lens = starts.diff().tolist()
    seq_lens = common_attn_metadata.seq_lens_cpu.tolist()
    num_reqs = len(query_lens)
    # step: find the first request that is not a decode
    first_extend = num_reqs
    for req in reversed(range(num_reqs)):
        if query_lens[req] > decode_threshold:
            first_extend = req
    # step: find the first of them without cached tokens
    first_prefill = num_reqs
    for req in reversed(range(first_extend, num_reqs)):
        if query_lens[req] > decode_threshold and query_lens[req] == seq_lens[req]:
            first_prefill = req
    # step: count the tokens of each region
    num_tokens = common_attn_metadata.num_actual_tokens
    bounds = [0, first_extend, first_prefill, num_reqs]
    # tokens after the last request are padding of the last region
    offsets = [
        num_tokens if bound == num_reqs else int(starts[bound]) for bound in bounds
    ]
    return (
        first_extend,
        first_prefill - first_extend,
        num_reqs - first_prefill,
        offsets[1],
        offsets[2] - offsets[1],
        num_tokens - offsets[2],
    )


@typed
def split_prefill_chunks(
    seq_lens_cpu: TokenCounts, workspace_size: WideInt, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Return chunks of requests whose sequences fit together in a workspace.

    Args:
        seq_lens_cpu: [reqs] tokens of each sequence, on the host.
        workspace_size: capacity of the workspace in tokens.
        request_offset: index of the first request.

    Returns:
        First request and end (exclusive) of each chunk. A chunk takes requests as long as they
        fit.

    Raises:
        ValueError: a sequence alone is larger than the workspace.

    Source:
        vLLM's function of that name.

    Example:
        >>> split_prefill_chunks(
        ...     torch.tensor([6, 5, 2], dtype=torch.int32), workspace_size=10
        ... )
        [(0, 1), (1, 3)]
    """
    check_on_host("seq_lens_cpu", seq_lens_cpu)
    seq_lens = seq_lens_cpu.tolist()
    check_prefill_chunks(seq_lens, workspace_size)
    # step: end a chunk before the sequence that does not fit
    bounds, total = [0], 0
    for req, seq_len in enumerate(seq_lens):
        if total + seq_len > workspace_size:
            bounds.append(req)
            total = 0
        total += seq_len
    if seq_lens:
        bounds.append(len(seq_lens))
    # step: pair the bounds of each chunk
    return [(request_offset + a, request_offset + b) for a, b in pairwise(bounds)]

"""Batch order: decodes first, then prefills, and the boundary between them.

All functions are a few numpy operations on the host; nothing is read from the device. Chunks of
prefills are found by bisection in the cumulative sum of the lengths, one search per chunk.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...contract.argument_types import typed
from ...contract.integers import WideInt
from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.shapes import TokenCounts
from ...validation import check_not_negative, check_on_host
from ...validation.step import check_decode_split, check_prefill_chunks, check_regions


@typed
def reorder_batch_to_split_decodes_and_prefills(
    num_scheduled_tokens: Sequence[int],
    decode_threshold: int = 1,
    num_computed_tokens: Sequence[int] | None = None,
    num_prompt_tokens: Sequence[int] | None = None,
) -> list[int]:
    """Return the order that puts decodes first and moves as few requests as possible."""
    check_regions(
        num_scheduled_tokens, decode_threshold, num_computed_tokens, num_prompt_tokens
    )
    # step: assign each request to a region
    is_long = np.asarray(num_scheduled_tokens, dtype=np.int64) > decode_threshold
    region = is_long.astype(np.int8)
    if num_computed_tokens is not None:
        computed = np.asarray(num_computed_tokens, dtype=np.int64)
        if num_prompt_tokens is None:
            region += is_long & (computed <= 0)
        else:
            in_prompt = computed < np.asarray(num_prompt_tokens, dtype=np.int64)
            region = np.where(is_long, 2, in_prompt)
            region[computed == 0] = 3
    # step: find the positions with a request of another region
    misplaced = np.flatnonzero(region != np.sort(region))
    # step: fill these positions region by region
    # two regions: start with the last one, so that every move swaps two rows
    sources = misplaced[::-1] if num_computed_tokens is None else misplaced
    order = np.arange(len(region))
    order[misplaced] = sources[np.argsort(region[sources], kind="stable")]
    return order.tolist()


@typed
def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> tuple[int, int, int, int]:
    """Return the boundary between decodes and prefills in a batch with its decodes first."""
    is_prefilling = check_decode_split(
        common_attn_metadata, decode_threshold, treat_short_extends_as_decodes
    )
    starts = common_attn_metadata.query_start_loc_cpu.numpy()
    query_lens = starts[1:] - starts[:-1]
    # step: find the first request that is not a decode
    is_prefill = query_lens > decode_threshold
    if require_uniform and len(query_lens):
        first_len = query_lens[(query_lens != 0).argmax()]
        is_prefill |= (query_lens != first_len) & (query_lens != 0)
    if is_prefilling is not None:
        is_prefill |= is_prefilling.numpy()
    num_decodes = _first(is_prefill)
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
    """Return the boundaries between decodes, extends and prefills in a batch of that order."""
    check_not_negative(decode_threshold=decode_threshold)
    starts = common_attn_metadata.query_start_loc_cpu.numpy()
    query_lens = starts[1:] - starts[:-1]
    num_reqs = len(query_lens)
    # step: find the first request that is not a decode
    is_long = query_lens > decode_threshold
    first_extend = _first(is_long)
    # step: find the first of them without cached tokens
    seq_lens = common_attn_metadata.seq_lens_cpu.numpy()
    first_prefill = _first(is_long & (query_lens == seq_lens))
    # step: count the tokens of each region
    num_tokens = common_attn_metadata.num_actual_tokens
    # tokens after the last request are padding of the last region
    extend_at, prefill_at = (
        num_tokens if first == num_reqs else int(starts[first])
        for first in (first_extend, first_prefill)
    )
    return (
        first_extend,
        first_prefill - first_extend,
        num_reqs - first_prefill,
        extend_at,
        prefill_at - extend_at,
        num_tokens - prefill_at,
    )


@typed
def split_prefill_chunks(
    seq_lens_cpu: TokenCounts, workspace_size: WideInt, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Return chunks of requests whose sequences fit together in a workspace."""
    check_on_host("seq_lens_cpu", seq_lens_cpu)
    seq_lens = seq_lens_cpu.numpy()
    check_prefill_chunks(seq_lens, workspace_size)
    totals = np.cumsum(seq_lens, dtype=np.int64)
    # step: end a chunk before the sequence that does not fit
    bounds, before = [0], 0
    while bounds[-1] < len(totals):
        end = int(totals.searchsorted(before + workspace_size, side="right"))
        bounds.append(end)
        before = int(totals[end - 1])
    # step: pair the bounds of each chunk
    return [(request_offset + a, request_offset + b) for a, b in pairwise(bounds)]


def _first(found: np.ndarray) -> int:
    """Return the index of the first True; the length if there is none."""
    return int(found.argmax()) if found.any() else len(found)

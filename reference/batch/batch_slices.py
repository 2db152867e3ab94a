"""Micro-batches: one step cut into slices of its requests and tokens.

Two micro-batches of a step can overlap: one computes while the other communicates. Each one is a
batch of its own, with some of the requests and some of the tokens. A cut may fall inside a
request. Then its first piece ends early, as if the sequence were shorter. Its second piece starts
late, as if the tokens of the first were in the cache already, which they are by then.
"""

from collections.abc import Sequence

import torch

from ...contract.argument_types import typed
from ...contract.kinds import HOST
from ...contract.metadata_classes import (
    CommonAttentionMetadata,
    UBatchSlice,
    cut_fields,
)
from ...contract.shapes import CountsBuffer, StartLoc
from ...validation import validated
from ...validation.step import check_micro_batch, check_request_slice


@typed
def slice_query_start_locs(
    query_start_loc: StartLoc, request_slice: slice
) -> CountsBuffer:
    """Return the starts of some requests, relative to the first one.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        request_slice: the requests. A stop past the last one is the end.

    Returns:
        [requests of the slice + 1] int32, a new tensor that begins with 0.

    Raises:
        ValueError: a slice without start or stop, or one that starts after the end.

    Source:
        vLLM's function of that name.

    Example:
        >>> slice_query_start_locs(
        ...     torch.tensor([0, 3, 7, 12], dtype=torch.int32), slice(1, 3)
        ... )
        tensor([0, 4, 9], dtype=torch.int32)
    """
    check_request_slice(query_start_loc, request_slice)
    # step: slice the starts and the last end
    starts = query_start_loc[request_slice.start : request_slice.stop + 1]
    # step: subtract the first start
    return starts - starts[0]


@validated(check_micro_batch)
def make_metadata_with_slice(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """Return one micro-batch of a step as a step of its own.

    Args:
        ubatch_slice: its requests and its tokens. The tokens start in the first of the requests
            and end in the last one. Both requests may be cut.
        attn_metadata: the step.

    Returns:
        The micro-batch. Its maxima are exact. A request that is cut at the end has a shorter
        sequence; one that is cut at the front has more computed tokens. Every field is sliced or
        copied.

    Raises:
        ValueError: an empty slice, or tokens that do not belong to the requests.
        NotImplementedError: the last request is cut while `dcp_local_seq_lens` is set.

    Source:
        vLLM's `_make_metadata_with_slice`.

    Example:
        Tokens 2 to 5 of a request with ten new tokens and eight in the cache.

        >>> step = build_common_attn_metadata(
        ...     query_lens=[10],
        ...     num_computed_tokens=[8],
        ...     block_rows=[[7, 2]],
        ...     block_size=16,
        ... )
        >>> part = make_metadata_with_slice(
        ...     UBatchSlice(slice(0, 1), slice(2, 6)), step
        ... )
        >>> part.query_start_loc, part.seq_lens
        (tensor([0, 4], dtype=torch.int32), tensor([14], dtype=torch.int32))
        >>> part.num_computed_tokens_cpu
        tensor([10], dtype=torch.int32)
        >>> part.slot_mapping
        tensor([122, 123, 124, 125])
    """
    requests, tokens = ubatch_slice.request_slice, ubatch_slice.token_slice
    # step: slice the fields that have an entry per request or token
    changes = cut_fields(attn_metadata, requests, tokens)
    # step: clip each request to the token slice
    starts = attn_metadata.query_start_loc_cpu.tolist()
    new_starts, front, back = [0], [], []
    for req in range(requests.start, requests.stop):
        begin = max(starts[req], tokens.start)
        end = min(starts[req + 1], tokens.stop)
        new_starts.append(new_starts[-1] + end - begin)
        front.append(begin - starts[req])
        back.append(starts[req + 1] - end)
    # step: shorten requests cut at the end, advance requests cut at the front
    device = attn_metadata.seq_lens.device
    query_start_loc = attn_metadata.query_start_loc_cpu.new_tensor(new_starts)
    cut_off = torch.tensor(back, dtype=torch.int32, device=HOST)
    skipped = torch.tensor(front, dtype=torch.int32, device=HOST)
    changes["seq_lens"] = changes["seq_lens"] - cut_off.to(device)
    changes["seq_lens_cpu"] = changes["seq_lens_cpu"] - cut_off
    changes["num_computed_tokens_cpu"] = changes["num_computed_tokens_cpu"] + skipped
    # step: select the tokens whose logits are wanted
    wanted = attn_metadata.logits_indices_padded
    if wanted is not None:
        own = []
        for token in wanted[: attn_metadata.num_logits_indices].tolist():
            if tokens.start <= token < tokens.stop:
                own.append(token - tokens.start)
        changes["logits_indices_padded"] = wanted.new_tensor(own)
        changes["num_logits_indices"] = len(own)
    return attn_metadata.replace(
        **changes,
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        num_reqs=requests.stop - requests.start,
        num_actual_tokens=min(tokens.stop, attn_metadata.num_actual_tokens)
        - tokens.start,
        max_query_len=int(query_start_loc.diff().max()),
        max_seq_len=int(changes["seq_lens_cpu"].max()),
    )


@typed
def split_attn_metadata(
    ubatch_slices: Sequence[UBatchSlice],
    common_attn_metadata: CommonAttentionMetadata,
) -> list[CommonAttentionMetadata]:
    """Return every micro-batch of a step as a step of its own.

    Args:
        ubatch_slices: the micro-batches, in any order.
        common_attn_metadata: the step, left as it is.

    Returns:
        One metadata object per slice.

    Raises:
        ValueError: as `make_metadata_with_slice`.
        NotImplementedError: as `make_metadata_with_slice`.

    Source:
        vLLM's function of that name.

    Example:
        New tokens [3, 1], cut after the second token.

        >>> step = build_common_attn_metadata(
        ...     query_lens=[3, 1],
        ...     num_computed_tokens=[0, 4],
        ...     block_rows=[[5], [7, 2]],
        ...     block_size=4,
        ... )
        >>> halves = split_attn_metadata(
        ...     [
        ...         UBatchSlice(slice(0, 1), slice(0, 2)),
        ...         UBatchSlice(slice(0, 2), slice(2, 4)),
        ...     ],
        ...     step,
        ... )
        >>> [half.query_start_loc_cpu.tolist() for half in halves]
        [[0, 2], [0, 1, 2]]
        >>> [half.seq_lens_cpu.tolist() for half in halves]
        [[2], [3, 5]]
    """
    return [
        make_metadata_with_slice(ubatch_slice, common_attn_metadata)
        for ubatch_slice in ubatch_slices
    ]

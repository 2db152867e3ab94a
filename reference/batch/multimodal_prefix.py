"""Multimodal prefixes: bidirectional attention among the tokens of one image.

In a prefix language model, the tokens of an image attend to each other in both directions, while
text stays causal. Each image is a range of positions, given by its first and its last. A key is
visible if it is not after the query, or if it is in the query's range. The ranges of a request do
not overlap.

A layer with a window has one of two meanings. In Gemma 3 the range is beside the window: keys that
are (causal and in the window) or in the range. In Gemma 4 the window limits both: (causal or in the
range) and in the window, which hides no later keys. The second is a range that begins later, where
the token's window does, so attention is the same (`clamp_sliding_window`).
"""

from collections.abc import Mapping, Sequence

import torch

from ...contract.kinds import HOST
from ...contract.multimodal_features import PREFIX_MODALITIES, MultiModalFeature
from ...contract.shapes import PrefixRanges, QueryRanges, StartLoc, TokenCounts
from ...validation import validated
from ...validation.step_shapes import (
    check_features,
    check_query_ranges,
    check_range_owners,
)


@validated(check_features)
def compute_mm_prefix_ranges(
    mm_features: Sequence[Sequence[MultiModalFeature]],
    sliding_window: int | None = None,
    clamp_sliding_window: bool = False,
    span_leading_pad_modulus: int = 0,
) -> dict[int, list[tuple[int, int]]]:
    """Return the ranges of each request's images and videos.

    Args:
        mm_features: [reqs] features of each prompt. Audio is ignored.
        sliding_window: Optional. Number of visible keys. A longer range is dropped, since its
            first token would attend past the window. If None, the window is unlimited.
        clamp_sliding_window: whether longer ranges are kept, for kernels that apply the window
            within them.
        span_leading_pad_modulus: if 0, a range is a run of embeddings. Otherwise it is a whole
            feature, special tokens included, without its leading padding, which ends before the
            first position that is one less than a multiple of this number.

    Returns:
        Request -> its ranges: first and last position, both inclusive. The list is empty if
        there are none.

    Raises:
        ValueError: a negative number, or a mask of another length than its feature.

    Source:
        vLLM's function of that name (0.33).

    Example:
        Of five tokens from position 2, the third separates two rows of an image.

        >>> compute_mm_prefix_ranges([
        ...     [MultiModalFeature("image", 2, 5, [True, True, False, True, True])]
        ... ])
        {0: [(2, 3), (5, 6)]}
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for req, features in enumerate(mm_features):
        found[req] = []
        for feature in features:
            if feature.modality not in PREFIX_MODALITIES:
                continue
            end = feature.offset + feature.length
            # step: find the runs of consecutive tokens
            if span_leading_pad_modulus:
                first = feature.offset
                while (first + 1) % span_leading_pad_modulus:
                    first += 1
                runs = [(first, end - 1)] if first < end else []
            else:
                runs = []
                flags = feature.is_embed
                for position in range(feature.offset, end):
                    if flags is not None and not flags[position - feature.offset]:
                        continue
                    if runs and runs[-1][1] == position - 1:
                        runs[-1] = (runs[-1][0], position)
                    else:
                        runs.append((position, position))
            # step: drop ranges longer than the window
            for first, last in runs:
                too_long = sliding_window is not None and (
                    last - first + 1 > sliding_window
                )
                if clamp_sliding_window or not too_long:
                    found[req].append((first, last))
    return found


@validated(check_range_owners)
def compute_mm_prefix_range_tensor(
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None,
    num_seqs: int,
    device: torch.device | str = "cpu",
) -> PrefixRanges | None:
    """Return the ranges of a batch as one tensor.

    Args:
        mm_prefix_range: Optional. Request -> its ranges. A missing request has none. If None, no
            request has any.
        num_seqs: requests in the batch.
        device: device of attention.

    Returns:
        [num_seqs, max_ranges, 2] int32 first and last position, padded with (0, 0): a range of
        one token does not change causal attention. None if the batch has no longer range.

    Raises:
        IndexError: ranges of a request that is not in the batch.

    Source:
        vLLM's function of that name (0.33).

    Example:
        >>> ranges = compute_mm_prefix_range_tensor({0: [(0, 2), (6, 7)]}, num_seqs=2)
        >>> ranges.tolist()
        [[[0, 2], [6, 7]], [[0, 0], [0, 0]]]
    """
    if mm_prefix_range is None:
        return None
    rows = [list(mm_prefix_range.get(req, [])) for req in range(num_seqs)]
    if all(row in ([], [(0, 0)]) for row in rows):
        return None
    max_ranges = max(len(row) for row in rows)
    padded = [row + [(0, 0)] * (max_ranges - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=HOST).to(device)


@validated(check_query_ranges)
def fill_mm_prefix_query_ranges(
    out: QueryRanges,
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None,
    query_start_loc_cpu: StartLoc,
    seq_lens_cpu: TokenCounts,
    sliding_window: int | None = None,
    clamp_sliding_window: bool = False,
) -> int:
    """Write the range of each new token and return how many rows were written.

    Args:
        out: [rows, 2] int32 on the host, modified in place: first and last position of the range
            that contains a new token, (-1, -1) for tokens outside all ranges. Rows after the new
            tokens are not modified; no row is if no new token is in a range.
        mm_prefix_range: Optional. Request -> its ranges. Ranges of one token are ignored, since
            they do not change causal attention. If None, there are none.
        query_start_loc_cpu: [reqs + 1] start of each request's new tokens.
        seq_lens_cpu: [reqs] tokens of each sequence, the new ones included.
        sliding_window: Optional. Number of visible keys, the query's own included. If None, the
            window is unlimited.
        clamp_sliding_window: whether a token's range begins at the earliest in its window. If not,
            the window does not matter here.

    Returns:
        Number of new tokens of the step, or 0 if none is in a range.

    Raises:
        IndexError: too few rows, or ranges of a request that is not in the batch.
        ValueError: a sequence has fewer tokens than new ones, a tensor is not on the host, or the
            window is below 1.

    Source:
        vLLM's function of that name (0.33).

    Example:
        Positions 4 to 6 are new. Two of them are in the image, positions 5 to 9.

        >>> out = torch.zeros(4, 2, dtype=torch.int32)
        >>> fill_mm_prefix_query_ranges(
        ...     out,
        ...     {0: [(5, 9)]},
        ...     torch.tensor([0, 3], dtype=torch.int32),
        ...     torch.tensor([7], dtype=torch.int32),
        ... )
        3
        >>> out.tolist()
        [[-1, -1], [5, 9], [5, 9], [0, 0]]
    """
    if mm_prefix_range is None:
        return 0
    starts = query_start_loc_cpu.tolist()
    written: dict[int, tuple[int, int]] = {}
    for req, ranges in mm_prefix_range.items():
        context_len = int(seq_lens_cpu[req]) - (starts[req + 1] - starts[req])
        # step: find the new tokens inside a range
        for token in range(starts[req], starts[req + 1]):
            position = context_len + token - starts[req]
            for first, last in ranges:
                if first < last and first <= position <= last:
                    written[token] = (first, last)
            # step: let the range begin in the token's window
            if clamp_sliding_window and sliding_window is not None and token in written:
                first, last = written[token]
                written[token] = (max(first, position - sliding_window + 1), last)
    if not written:
        return 0
    # step: write a row for every new token
    for token in range(starts[-1]):
        out[token] = torch.tensor(
            written.get(token, (-1, -1)), dtype=torch.int32, device=HOST
        )
    return int(starts[-1])

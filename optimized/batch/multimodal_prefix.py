"""Multimodal prefixes: bidirectional attention among the tokens of one image.

Runs are found where a mask changes. A range is written to all of its tokens at once.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...contract.argument_types import typed
from ...contract.multimodal_features import PREFIX_MODALITIES, MultiModalFeature
from ...contract.shapes import PrefixRanges, QueryRanges, StartLoc, TokenCounts
from ...validation.step_shapes import (
    check_features,
    check_query_ranges,
    check_range_owners,
)


@typed
def compute_mm_prefix_ranges(
    mm_features: Sequence[Sequence[MultiModalFeature]],
    sliding_window: int | None = None,
    clamp_sliding_window: bool = False,
    span_leading_pad_modulus: int = 0,
) -> dict[int, list[tuple[int, int]]]:
    """Return the ranges of each request's images and videos."""
    check_features(mm_features, sliding_window, span_leading_pad_modulus)
    found: dict[int, list[tuple[int, int]]] = {}
    for req, features in enumerate(mm_features):
        found[req] = []
        for feature in features:
            if feature.modality not in PREFIX_MODALITIES:
                continue
            # step: find the runs of consecutive tokens
            runs = _runs(feature, span_leading_pad_modulus)
            # step: drop ranges longer than the window
            found[req] += [
                (first, last)
                for first, last in runs
                if clamp_sliding_window
                or sliding_window is None
                or last - first < sliding_window
            ]
    return found


@typed
def compute_mm_prefix_range_tensor(
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None,
    num_seqs: int,
    device: torch.device | str = "cpu",
) -> PrefixRanges | None:
    """Return the ranges of a batch as one tensor."""
    if mm_prefix_range is None:
        return None
    check_range_owners(mm_prefix_range, num_seqs)
    rows = {req: row for req, row in mm_prefix_range.items() if row}
    if all(list(row) == [(0, 0)] for row in rows.values()):
        return None
    padded = np.zeros((num_seqs, max(map(len, rows.values())), 2), dtype=np.int32)
    for req, row in rows.items():
        padded[req, : len(row)] = row
    return torch.from_numpy(padded).to(device, non_blocking=True)


@typed
def fill_mm_prefix_query_ranges(
    out: QueryRanges,
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None,
    query_start_loc_cpu: StartLoc,
    seq_lens_cpu: TokenCounts,
    sliding_window: int | None = None,
    clamp_sliding_window: bool = False,
) -> int:
    """Write the range of each new token and return how many rows were written."""
    if mm_prefix_range is None:
        return 0
    check_query_ranges(
        out, mm_prefix_range, query_start_loc_cpu, seq_lens_cpu, sliding_window
    )
    starts, seq_lens = query_start_loc_cpu.tolist(), seq_lens_cpu.tolist()
    # step: find the new tokens inside a range
    pieces = []
    for req, ranges in mm_prefix_range.items():
        # index that the token of position 0 would have if it were new
        origin = starts[req + 1] - seq_lens[req]
        for first, last in ranges:
            begin = max(starts[req], origin + first)
            end = min(starts[req + 1], origin + last + 1)
            if first < last and begin < end:
                pieces.append((slice(begin, end), origin, first, last))
    if not pieces:
        return 0
    # step: let the range begin in the token's window
    window = sliding_window if clamp_sliding_window else None
    firsts = [
        first
        if window is None
        else np.maximum(
            np.arange(tokens.start, tokens.stop) - origin - window + 1, first
        )
        for tokens, origin, first, _ in pieces
    ]
    # step: write a row for every new token
    rows = out.numpy()
    rows[: starts[-1]] = -1
    for (tokens, _, _, last), first_of_token in zip(pieces, firsts, strict=True):
        rows[tokens, 0], rows[tokens, 1] = first_of_token, last
    return int(starts[-1])


def _runs(feature: MultiModalFeature, modulus: int) -> list[tuple[int, int]]:
    first, end = feature.offset, feature.offset + feature.length
    if modulus:
        first += -(first + 1) % modulus
    if modulus or feature.is_embed is None:
        return [(first, end - 1)] if first < end else []
    # a run starts where the mask rises and ends before it falls
    flags = np.zeros(feature.length + 2, dtype=np.int8)
    flags[1:-1] = np.asarray(feature.is_embed, dtype=bool)
    change = np.diff(flags)
    begins, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    return [
        (first + int(begin), first + int(stop) - 1)
        for begin, stop in zip(begins, ends, strict=True)
    ]

"""Adapter for spans of keys in vLLM's Triton kernels over caches with a scale per token and head.

The ranges of tokens are passed as the spans of images, or as the prefix of a reference sliding
window. The kernel has no argument for other ranges, so check it with
`--only "images and prefixes of codes"`.
"""

from dataclasses import replace
from itertools import pairwise

import torch
import vllm_formats

NAMES = ["scale", "out", "sliding_window", "k_scale", "v_scale"]
OPTIONS = {name: vllm_formats.SUPPORT.options[name] for name in NAMES}
SUPPORT = replace(
    vllm_formats.SUPPORT,
    operations=["paged_attention"],
    options=OPTIONS | {"query_ranges": None},
    never_together=[],
)


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,
    sliding_window=None,
    query_ranges=None,  # [tokens, 2]
    k_scale=None,  # [num_blocks, block_size, kv_heads] float32
    v_scale=None,
):
    """Return attention of each new token, with the range of keys that it attends to."""
    spans = {}
    if query_ranges is not None:
        spans = spans_of(query_ranges, query_start_loc, seq_lens, sliding_window)
    return vllm_formats.paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        scale=scale,
        out=out,
        sliding_window=sliding_window,
        k_scale=k_scale,
        v_scale=v_scale,
        spans=spans,
    )


def spans_of(query_ranges, query_start_loc, seq_lens, sliding_window):
    """Return ranges as arguments of the kernel.

    Raises:
        NotImplementedError: They are neither images nor a prefix of all tokens with a window.
    """
    device, ranges = query_ranges.device, query_ranges.tolist()
    images, prefixes, are_images, are_prefixes = [], [], True, True
    starts = pairwise(query_start_loc.tolist())
    for (begin, end), keys in zip(starts, seq_lens.tolist(), strict=True):
        positions = range(keys - (end - begin), keys)
        own = [tuple(one) for one in ranges[begin:end]]
        given = sorted({one for one in own if 0 <= one[0] <= one[1]})
        for first, last in given:
            inside = [first <= position <= last for position in positions]
            held = [one == (first, last) for one in own]
            are_images &= inside == held
            are_prefixes &= first == 0 and all(held) and last < positions[0]
        are_prefixes &= len(given) == 1
        images.append(given)
        prefixes.append(given[0][1] + 1 if given else 0)
    if are_images:
        most = max(1, *map(len, images), 1)
        padded = [[*own, *[(0, 0)] * (most - len(own))] for own in images]
        table = torch.tensor(padded, dtype=torch.int32, device=device)
        return {"mm_prefix_range": table}
    if are_prefixes and sliding_window is not None:
        lens = torch.tensor(prefixes, dtype=torch.int32, device=device)
        # the window is that of the prefix, and not one of the layer
        given = {"rswa_prefix_lens": lens, "rswa_window": sliding_window}
        return given | {"window_size": (-1, 0)}
    raise NotImplementedError("query_ranges: expected images, or a prefix and a window")

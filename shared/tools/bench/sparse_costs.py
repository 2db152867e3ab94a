"""Minimum of bytes and operations of sparse attention, of its indexer and of its selection."""

from typing import TYPE_CHECKING

from ...contract.indexer_cache import SCALE_BYTES

if TYPE_CHECKING:
    from .workloads import Workload

SPARSE_KINDS = ("sparse", "score", "select")
"""Attention over selected keys; the indexer's scores of all keys; the largest scores."""
SCORE_BYTES = POSITION_BYTES = 4


def count_selected(workload: "Workload") -> list[int]:
    """Return [tokens] keys that each token selects: all that it sees, if they are fewer.

    Example:
        2 new tokens of 10, 9 selected: they see 9 and 10 keys, so 9 and 9.
    """
    visible = [
        seen
        for new, kv in zip(workload.query_lens, workload.kv_lens, strict=True)
        for seen in range(kv - new + 1, kv + 1)
    ]
    return [min(seen, workload.selected) for seen in visible]


def count_visible(workload: "Workload") -> int:
    """Return the pairs of a new token and a key that it sees."""
    return sum(
        new * (2 * kv - new + 1) // 2
        for new, kv in zip(workload.query_lens, workload.kv_lens, strict=True)
    )


def sparse_bytes(workload: "Workload") -> int:
    """Return the minimum of bytes moved.

    Of attention: a request's selected keys and values once, at least those of its last token;
    slots, queries and outputs. Of scores: codes and scales once, queries, weights and scores. Of a
    selection: scores and positions.

    Example:
        One token selects 4 keys of 10, one latent of 3 elements and its first 2 as values, 16
        bits, 2 heads: 4 * 3 * 2 bytes of latents, 4 * 4 of slots, 2 * (3 + 2) * 2 of rows.
    """
    tokens, heads = workload.tokens, workload.query_heads
    if workload.kind == "select":
        scores = count_visible(workload) * SCORE_BYTES
        return scores + tokens * workload.selected * POSITION_BYTES
    if workload.kind == "score":
        keys = sum(workload.kv_lens) * (workload.head_size + SCALE_BYTES)
        queries = workload.head_size * workload.kv_dtype.itemsize + SCORE_BYTES
        return keys + tokens * heads * queries + count_visible(workload) * SCORE_BYTES
    row = workload.row_bytes(workload.head_size)
    if not workload.shares_values:
        row += workload.row_bytes(workload.value_size)
    read = sum(min(kv, workload.selected) for kv in workload.kv_lens)
    slots = tokens * workload.selected * POSITION_BYTES
    both = workload.head_size + workload.value_size
    rows = tokens * heads * both * workload.dtype.itemsize
    return read * row * workload.kv_heads + slots + rows


def sparse_flops(workload: "Workload") -> int:
    """Return the minimum of operations: 2 per element, query head and key; none of a selection."""
    if workload.kind == "select":
        return 0
    if workload.kind == "score":
        return 2 * workload.head_size * workload.query_heads * count_visible(workload)
    both = workload.head_size + workload.value_size
    return 2 * both * workload.query_heads * sum(count_selected(workload))

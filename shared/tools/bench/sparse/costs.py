"""Minimum of bytes and operations of sparse attention, of its indexer and of its selection."""

from typing import Protocol

import torch

from ....contract.indexer_cache import SCALE_BYTES

SPARSE_KINDS = ("sparse", "score", "select")
"""Attention over selected keys; the indexer's scores of all keys; the largest scores."""
SCORE_BYTES = POSITION_BYTES = 4


class SparseBatch(Protocol):
    """What of a workload counts; `Workload` has it."""

    @property
    def kind(self) -> str: ...
    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def kv_lens(self) -> tuple[int, ...]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def query_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def value_size(self) -> int: ...
    @property
    def shares_values(self) -> bool: ...
    @property
    def selected(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...
    def row_bytes(self, size: int) -> int:
        """Return the bytes of a key or value of so many elements in the cache."""
        ...


def count_selected(workload: SparseBatch) -> list[int]:
    """Return [tokens] keys that each token selects: all that are visible to it, if they are fewer.

    Example:
        2 new tokens of 10, 9 selected: 9 and 10 keys are visible, so 9 and 9.
    """
    return [min(count, workload.selected) for count in visible_keys(workload)]


def visible_keys(workload: SparseBatch) -> list[int]:
    """Return [tokens] keys that are visible to each token."""
    return [
        count
        for new, kv in zip(workload.query_lens, workload.kv_lens, strict=True)
        for count in range(kv - new + 1, kv + 1)
    ]


def count_visible(workload: SparseBatch) -> int:
    """Return the pairs of a new token and a key that is visible to it."""
    return sum(visible_keys(workload))


def sparse_bytes(workload: SparseBatch) -> int:
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


def sparse_flops(workload: SparseBatch) -> int:
    """Return the minimum of operations: 2 per element, query head and key; none of a selection."""
    if workload.kind == "select":
        return 0
    if workload.kind == "score":
        return 2 * workload.head_size * workload.query_heads * count_visible(workload)
    both = workload.head_size + workload.value_size
    return 2 * both * workload.query_heads * sum(count_selected(workload))

"""The attention that a step should have, in float64, and comparisons with it.

The oracle is the reference in float64. Each row's error budget is derived from what the reference
loses when it computes in the dtype of the cache. A long prefill of a long sequence has more scores
than fit in memory, so it is computed in chunks: queries a to b of a request are exactly a shorter
request whose sequence ends at its b-th query.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.budgets import Verdict, judge_rows
from ...contract.operations import Implementation
from .batch import ReplayBatch

MAX_SCORES_PER_CHUNK = 2**27
"""Score elements (query heads * queries * keys) that a chunk may have."""


@dataclass(frozen=True)
class ExpectedAttention:
    """The attention that a step should have.

    Args:
        exact: [tokens, query_heads, head_size] in float64.
        same_dtype: the same, computed in the dtype of the cache.
        magnitude: the same over the absolute values: the size of what is averaged.
    """

    exact: Tensor
    same_dtype: Tensor
    magnitude: Tensor

    def compare(self, output: Tensor) -> Verdict:
        """Return the worst row (token) of an output, relative to its error budget."""
        return judge_rows(
            output, self.exact, self.same_dtype, output.dtype, self.magnitude
        )


def split_into_chunks(
    query_lens: list[int],
    num_computed_tokens: list[int],
    query_heads: int,
    max_scores: int = MAX_SCORES_PER_CHUNK,
) -> list[tuple[int, int, int]]:
    """Return request, first query and end (exclusive) of each chunk, in the batch's order.

    Example:
        One request with 5 queries after 3 cached keys, 1 head, at most 16 scores per chunk:
        queries 0 to 2 attend to up to 5 keys (10 scores), 2 to 4 to up to 7 (14), the last to 8.

        >>> split_into_chunks([5], [3], query_heads=1, max_scores=16)
        [(0, 0, 2), (0, 2, 4), (0, 4, 5)]
    """
    chunks = []
    batch = zip(query_lens, num_computed_tokens, strict=True)
    for request, (query_len, computed) in enumerate(batch):
        first = 0
        while first < query_len:
            limit = max_scores // query_heads
            # the largest count with count * (computed + first + count) <= limit
            keys = computed + first
            count = int(((keys * keys + 4 * limit) ** 0.5 - keys) / 2)
            end = min(query_len, first + max(1, count))
            chunks.append((request, first, end))
            first = end
    return chunks


def compute_expected_attention(
    reference: Implementation,
    batch: ReplayBatch,
    query: Tensor,
    cache: Tensor,
    max_scores: int = MAX_SCORES_PER_CHUNK,
) -> ExpectedAttention:
    """Return the attention that a step should have.

    Args:
        reference: the implementation that defines the result.
        batch: the step.
        query: [tokens, query_heads, head_size].
        cache: [2, num_blocks, block_size, kv_heads, head_size], the step's own keys and values
            included.
        max_scores: score elements that may be in memory at once.
    """
    chunks = split_into_chunks(
        batch.query_lens, batch.num_computed_tokens, query.shape[1], max_scores
    )
    seq_lens = [batch.num_computed_tokens[req] + end for req, _, end in chunks]
    query_lens = [end - first for _, first, end in chunks]
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    device = query.device
    table = reference.make_block_table(
        [batch.block_rows[request] for request, _, _ in chunks], device=device
    )
    key_cache, value_cache = reference.split_kv_cache(cache)

    def attend(compute_dtype: torch.dtype, out: Tensor, values: Tensor) -> Tensor:
        reference.paged_attention(
            query,
            key_cache,
            values,
            table,
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            max(query_lens),
            max(seq_lens),
            out=out,
            compute_dtype=compute_dtype,
        )
        return out

    return ExpectedAttention(
        exact=attend(
            torch.float64, torch.empty_like(query, dtype=torch.float64), value_cache
        ),
        same_dtype=attend(query.dtype, torch.empty_like(query), value_cache),
        magnitude=attend(
            torch.float32,
            torch.empty_like(query, dtype=torch.float32),
            value_cache.abs(),
        ),
    )


def first_difference(found: Tensor, expected: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first element whose bits differ; None if all are equal.

    NaN equals NaN of the same bits, and 0 differs from -0, because the bytes were only copied.
    """
    if found.shape != expected.shape:
        return ()
    same = _bits(found) == _bits(expected)
    if bool(same.all()):
        return None
    index: list[int] = (~same).nonzero()[0].tolist()
    return tuple(index)


def describe_difference(
    found: Mapping[str, object], expected: Mapping[str, object]
) -> str:
    """Return the first field that differs, its index and both values; "" if none differs."""
    for name, right in expected.items():
        value = found[name]
        if isinstance(right, Tensor) and isinstance(value, Tensor):
            if value.dtype != right.dtype or value.shape != right.shape:
                return (
                    f"{name} is {value.dtype} {list(value.shape)}: expected {right.dtype}"
                    f" {list(right.shape)}"
                )
            index = first_difference(value, right)
            if index is not None:
                return (
                    f"{name}{list(index)} = {value[index].item()}: expected"
                    f" {right[index].item()}"
                )
        elif value != right:
            return f"{name} = {value}: expected {right}"
    return ""


_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])

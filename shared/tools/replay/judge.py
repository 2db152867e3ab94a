"""Is a step's attention right?

The truth is the reference in float64, the budget what the reference loses when it computes in the
dtype of the cache. A long prefill against a long sequence has more scores than memory, so it is
judged in pieces: queries a to b of a request are exactly a shorter request, one whose sequence ends
at its b-th query.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.budgets import Verdict, judge_rows
from ...contract.operations import Implementation
from .batch import Batch

SCORES_A_PIECE = 2**27
"""Score elements (query heads * queries * keys) that a piece may have."""


@dataclass(frozen=True)
class Truth:
    """What a step's attention should be.

    Args:
        exact: [tokens, query_heads, head_size] float64.
        same_dtype: the same, computed in the dtype of the cache.
        magnitude: the same over the absolute values, which says how large what is averaged is.
    """

    exact: Tensor
    same_dtype: Tensor
    magnitude: Tensor

    def judge(self, answer: Tensor) -> Verdict:
        """Return how an answer's rows (tokens) stand against their budgets."""
        return judge_rows(
            answer, self.exact, self.same_dtype, answer.dtype, self.magnitude
        )


def cut_into_pieces(
    query_lens: list[int],
    num_computed_tokens: list[int],
    query_heads: int,
    scores_a_piece: int = SCORES_A_PIECE,
) -> list[tuple[int, int, int]]:
    """Return request, first and last query (exclusive) of each piece, in the batch's order.

    Example:
        One request with 5 queries behind 3 keys, 1 head, at most 16 scores a piece: queries 0
        to 2 see up to 5 keys (10 scores), 2 to 4 see up to 7 (14), the last one sees 8.

        >>> cut_into_pieces([5], [3], query_heads=1, scores_a_piece=16)
        [(0, 0, 2), (0, 2, 4), (0, 4, 5)]
    """
    pieces = []
    batch = zip(query_lens, num_computed_tokens, strict=True)
    for request, (query_len, computed) in enumerate(batch):
        first = 0
        while first < query_len:
            room = scores_a_piece // query_heads
            # the largest count with count * (computed + first + count) <= room
            keys = computed + first
            count = int(((keys * keys + 4 * room) ** 0.5 - keys) / 2)
            last = min(query_len, first + max(1, count))
            pieces.append((request, first, last))
            first = last
    return pieces


def find_truth(
    reference: Implementation,
    batch: Batch,
    query: Tensor,
    cache: Tensor,
    scores_a_piece: int = SCORES_A_PIECE,
) -> Truth:
    """Return what a step's attention should be.

    Args:
        reference: the implementation that is right by definition.
        batch: the step.
        query: [tokens, query_heads, head_size].
        cache: [2, num_blocks, block_size, kv_heads, head_size], the step's own keys and values
            included.
        scores_a_piece: score elements that may lie in memory at once.
    """
    pieces = cut_into_pieces(
        batch.query_lens, batch.num_computed_tokens, query.shape[1], scores_a_piece
    )
    seq_lens = [batch.num_computed_tokens[req] + last for req, _, last in pieces]
    query_lens = [last - first for _, first, last in pieces]
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    device = query.device
    table = reference.make_block_table(
        [batch.block_rows[request] for request, _, _ in pieces], device=device
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

    return Truth(
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
    """Return the index of the first element that differs bit for bit; None if none does.

    NaN equals NaN of the same bits, and 0 differs from -0: bytes were moved, not computed.
    """
    if found.shape != expected.shape:
        return ()
    same = _bits(found) == _bits(expected)
    if bool(same.all()):
        return None
    place: list[int] = (~same).nonzero()[0].tolist()
    return tuple(place)


def name_differences(
    found: Mapping[str, object], expected: Mapping[str, object]
) -> str:
    """Return which of the fields differs first, where, and both values; "" if none does."""
    for name, right in expected.items():
        value = found[name]
        if isinstance(right, Tensor) and isinstance(value, Tensor):
            if value.dtype != right.dtype or value.shape != right.shape:
                return (
                    f"{name} is {value.dtype} {list(value.shape)}: expected {right.dtype}"
                    f" {list(right.shape)}"
                )
            place = first_difference(value, right)
            if place is not None:
                return (
                    f"{name}{list(place)} = {value[place].item()}: expected"
                    f" {right[place].item()}"
                )
        elif value != right:
            return f"{name} = {value}: expected {right}"
    return ""


_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])

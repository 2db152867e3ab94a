"""Batches that compile the kernels of families that compute every request of a call."""

from collections.abc import Iterator
from typing import Any

from ....runtime.family import BatchLimits, Warm

MOST_TOKENS = 64
"""New tokens of a request, at most, each number of which may have a kernel of its own."""


def warm_every(plan: Any, limits: BatchLimits) -> Iterator[Warm]:
    """Yield one request of each number of tokens, and the most requests of one token."""
    name, keys = type(plan).__name__, limits.max_key_len
    for query_len in range(1, min(limits.max_query_len, MOST_TOKENS) + 1):
        yield Warm(name, 1, query_len, keys)
    yield Warm(name, limits.num_reqs, 1, keys)

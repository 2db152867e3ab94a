"""Comparison of a step's inputs among the ranks, so that a difference is named on every rank."""

import json
import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .rank_group import RankGroup


def agree_on_batch(
    ranks: RankGroup,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    max_seq_len: int,
    key_cache: Tensor,
    causal: bool,
) -> None:
    """Compare the batch of a step, and the blocks of the cache. The batch is copied to the host.

    Raises:
        RankError: The ranks do not have the same batch, or blocks of other shapes or dtypes.
    """
    if ranks.world_size == 1:
        return
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    ranks.agree(
        step=ranks.step,
        block_shape=list(key_cache.shape[1:]),
        cache_dtype=str(key_cache.dtype),
        causal=bool(causal),
        num_tokens=num_tokens,
        max_seq_len=max_seq_len,
        requests=len(lens),
        query_start_loc=starts[:32],
        seq_lens=lens[:32],
        checksum=checksum([starts, lens]),
    )


def agree_on_prompts(ranks: RankGroup, query_lens: Sequence[int]) -> None:
    """Compare the prompts of a step among the ranks.

    Raises:
        RankError: The ranks do not have the same prompts.
    """
    lens = list(query_lens)
    ranks.agree(
        step=ranks.step,
        prompts=len(lens),
        query_lens=lens[:64],
        checksum=checksum(lens),
    )


def agree_on_rows(ranks: RankGroup, key: Tensor, value: Tensor) -> None:
    """Compare the shapes and dtypes of exchanged keys and values, apart from their tokens.

    Raises:
        RankError: The ranks do not have the same.
    """
    ranks.agree(
        key_shape=list(key.shape[1:]),
        value_shape=list(value.shape[1:]),
        key_dtype=str(key.dtype),
        value_dtype=str(value.dtype),
    )


def checksum(values: Any) -> int:
    """Return a checksum of values that JSON can represent."""
    return zlib.crc32(json.dumps(values).encode())

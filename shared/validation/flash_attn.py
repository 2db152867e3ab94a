"""What calls of flash-attn's functions may ask for: everything that a twin computes exactly."""

from numbers import Integral
from typing import Any

from torch import Tensor

from ..contract.argument_types import typed
from ..contract.attention_options import AttentionOptions
from ..contract.shapes import (
    BlockTable,
    KeyCache,
    Query,
    StartLoc,
    TokenCounts,
    ValueCache,
)
from .attention import check_paged_attention
from .primitives import values_checked

HINTS = (
    "deterministic",
    "num_splits",
    "pack_gqa",
    "scheduler_metadata",
    "sm_margin",
    "softmax_lse_dtype",
    "fa_version",
    "max_seqlen_k_new",
    "cu_seqlens_k_new",
)
"""Arguments that change how a call is computed and not what it returns."""


def check_axes(count: int, **tensors: Tensor) -> None:
    """Raise if a tensor has another number of axes."""
    for name, tensor in tensors.items():
        if tensor.dim() != count:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected {count} axes"
            )


def check_same_sizes(axes: str, **tensors: Tensor) -> None:
    """Raise if tensors differ in their first axes.

    Args:
        axes: Names of these axes, separated by spaces.
        tensors: Named tensors.
    """
    count = len(axes.split())
    sizes = {name: list(tensor.shape[:count]) for name, tensor in tensors.items()}
    if len(set(map(tuple, sizes.values()))) > 1:
        given = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"expected the same numbers ({axes}): {given}")


def check_own_rows(batch: int, cache_batch: int) -> None:
    """Raise if a cache without a table has fewer sequences than a batch."""
    if cache_batch < batch:
        raise ValueError(
            f"k_cache has {cache_batch} sequences for {batch} requests: a block_table or"
            " cache_batch_idx names the sequence of each"
        )


def check_no_dropout(dropout_p: float, return_attn_probs: bool) -> None:
    """Raise if a call asks for dropout or for the weights."""
    if isinstance(dropout_p, Tensor):
        raise TypeError("dropout_p is a tensor: expected a number, which has to be 0")
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p = {dropout_p}: dropout is not computed, only inference"
        )
    if return_attn_probs:
        raise NotImplementedError(
            "return_attn_probs = True: weights are never stored; return_softmax_lse = True"
            " returns the log-sum-exp"
        )


def check_others(function: str, others: dict[str, Any]) -> None:
    """Raise if further arguments are given that would change the result."""
    given = [
        name
        for name, value in others.items()
        if name not in HINTS and (isinstance(value, Tensor) or value)
    ]
    if given:
        raise NotImplementedError(f"{function} does not take {', '.join(given)}")


def read_window(
    causal: bool, window_size: tuple[int | None, int | None]
) -> tuple[bool, int | None]:
    """Return whether a call is causal, and the keys of its window on each side.

    Raises:
        NotImplementedError: The sides of a window differ, and none is 0.
        TypeError: `causal` is not a truth value: versions have other orders of arguments.
        ValueError: It is not a pair.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal = {causal!r:.60}: expected True or False")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size = {window_size!r:.60}: expected a pair")
    left, right = (-1 if side is None else side for side in window_size)
    if causal or right == 0:
        return True, left + 1 if left >= 0 else None
    if left < 0 and right < 0:
        return False, None
    if left != right:
        raise NotImplementedError(
            f"window_size = ({left}, {right}): both sides have to be equal in a call that is not"
            " causal"
        )
    return False, left + 1


def check_slopes(slopes: Tensor | None, is_causal: bool) -> None:
    """Raise if slopes differ between sequences, or would apply to later keys."""
    if slopes is None:
        return
    if slopes.dim() != 1:
        raise NotImplementedError(
            f"alibi_slopes has shape {list(slopes.shape)}: expected [query_heads], the same for"
            " every sequence"
        )
    if not is_causal:
        raise NotImplementedError(
            "alibi_slopes need a causal call: keys after a query would get their distance with"
            " another sign"
        )


def check_tables(
    block_table: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None = None,
) -> Tensor | None:
    """Return the block table, by whichever name it came.

    Raises:
        ValueError: Both names are used, or there is a table beside `cache_batch_idx`.
    """
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are two names of one argument")
    table = page_table if block_table is None else block_table
    if table is not None and cache_batch_idx is not None:
        raise ValueError("a block_table and cache_batch_idx both say where keys are")
    return table


def check_query_starts(
    starts: Tensor | None, longest: int | None, k: Tensor | None
) -> None:
    """Raise if packed queries come without their largest number, or with keys to store."""
    if (starts is None) != (longest is None):
        raise ValueError("cu_seqlens_q and max_seqlen_q belong together: one is None")
    if starts is not None and k is not None:
        raise NotImplementedError(
            "cu_seqlens_q beside k and v: store the keys before the call"
        )


def check_key_count(count: int, new: int, most: int) -> None:
    """Raise if a number of keys, with those that are stored, does not fit the cache."""
    if not isinstance(count, Integral):
        raise TypeError(
            f"cache_seqlens = {count!r:.60}: expected a number or an int32 tensor"
        )
    if not 0 <= count <= most - new:
        raise ValueError(
            f"cache_seqlens = {count} and {new} new keys: expected 0 to {most} together"
        )


def check_lengths(
    table: Tensor | None, key_starts: Tensor | None, used: Tensor | None
) -> None:
    """Raise if the numbers of keys are given twice, not at all, or without a table."""
    if table is None and used is not None:
        raise ValueError("seqused_k needs a block_table: packed keys have cu_seqlens_k")
    if table is None and key_starts is None:
        raise ValueError("cu_seqlens_k = None: packed keys need their starts")
    if table is not None and (key_starts is None) == (used is None):
        raise ValueError(
            "a block_table needs the numbers of keys: cu_seqlens_k or seqused_k, not both"
        )


def check_cache_call(
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_leftpad: Tensor | None,
    cache_seqlens: int | Tensor | None,
) -> None:
    """Raise if a call on a cache asks for a rotation or a padding, or for half of an append."""
    if rotary_cos is not None or rotary_sin is not None:
        raise NotImplementedError(
            "rotary_cos, rotary_sin: rotate q and k before the call; nothing is rotated inside"
        )
    if cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad: keys start at position 0")
    if (k is None) != (v is None):
        raise ValueError("k and v are stored together: one of them is None")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens = None: k and v are stored after those keys")


@typed
def check_call_on_pages(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None,
    options: AttentionOptions,
) -> None:
    """Raise what `paged_attention` would raise, of contents too where those are checked."""
    check_paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        None,
        None,
        options,
        contents=values_checked(query),
        scale=scale,
    )

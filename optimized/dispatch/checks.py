"""Validation of calls: their arguments, in the order of the functions that validate them.

Types, axes and gradients are validated here and not at each call: a repeated call is compared with
earlier ones.
"""

from ...contract.argument_types import typed
from ...contract.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    Query,
    RaggedKey,
    RaggedValue,
    StartLoc,
    TokenCounts,
    ValueCache,
)
from ...validation import check_encoder_attention, check_paged_attention
from ...validation.cascade import check_cascade
from ..runtime.attention_call import AttentionCall


@typed
def check_paged_types(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    out: Output | None,
    lse: LogSumExp | None,
) -> None:
    """Raise for another type, axes, gradients, and numbers of more than 32 bits."""


@typed
def check_ragged_types(
    query: Query,
    key: RaggedKey,
    value: RaggedValue,
    query_start_loc: StartLoc,
    key_start_loc: StartLoc,
    max_query_len: int,
    max_key_len: int,
    out: Output | None,
    lse: LogSumExp | None,
) -> None:
    """Raise for another type, axes, gradients, and numbers of more than 32 bits."""


def check_paged_call(call: AttentionCall, prefix_len: int, contents: bool) -> None:
    """Raise if a call of `paged_attention` is wrong; validate contents too if `contents` is True.

    Args:
        prefix_len: not used.
    """
    (
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len, scale,
        out, lse, options,
    ) = call  # fmt: skip
    assert block_table is not None
    check_paged_types(
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len, out, lse
    )  # fmt: skip
    check_paged_attention(
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len,
        out, lse, options, contents=contents, scale=scale,
    )  # fmt: skip


def check_encoder_call(call: AttentionCall, prefix_len: int, contents: bool) -> None:
    """Raise if a call of `encoder_attention` is wrong; validate contents too if it is given True.

    Args:
        prefix_len: not used.
    """
    (
        query, key, value, _, starts, lengths, max_query_len, max_key_len, scale,
        out, lse, options,
    ) = call  # fmt: skip
    check_ragged_types(
        query, key, value, starts, lengths, max_query_len, max_key_len, out, lse
    )  # fmt: skip
    check_encoder_attention(
        query, key, value, starts, lengths, max_query_len, max_key_len, out, lse,
        options, contents=contents, scale=scale,
    )  # fmt: skip


def check_cascade_call(call: AttentionCall, prefix_len: int, contents: bool) -> None:
    """Raise if a call of `cascade_attention` is wrong; validate contents too if it is given True.

    Args:
        prefix_len: keys that all sequences begin with.
    """
    (
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len, scale,
        out, lse, options,
    ) = call  # fmt: skip
    assert block_table is not None
    check_paged_types(
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len, out, lse
    )  # fmt: skip
    check_cascade(
        query, key, value, block_table, starts, lengths, max_query_len, max_key_len,
        prefix_len, out, lse, options, contents, scale,
    )  # fmt: skip

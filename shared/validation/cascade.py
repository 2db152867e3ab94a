"""Validation of attention that combines partial results: cascade and context parallel."""

from collections.abc import Sequence

from torch import Tensor

from ..contract.attention_options import OPTIONS_BY_POSITION, AttentionOptions
from .attention import check_bound, check_paged_attention
from .attention_options import (
    check_cache_scales,
    check_options,
    check_positions,
    reject_options,
)
from .batch import check_block_ids, check_start_loc
from .primitives import FLOATS, check_dtype, check_not_negative, check_positive
from .score_numbers import check_score_scale
from .step_shapes import check_multiple, check_ranks


def check_cascade(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    common_prefix_len: int,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    contents: bool,
    scale: float | None = None,
) -> None:
    """Reject a prefix that is not whole blocks, or is not fully visible to every new token."""
    _check_plain(options, out, "the shared prefix is read once for all queries")
    options = options.with_causal(True)
    check_paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        out,
        lse,
        options,
        contents,
    )
    check_score_scale(scale)
    check_not_negative(common_prefix_len=common_prefix_len)
    block_size, max_blocks = key_cache.shape[1], block_table.shape[1]
    check_multiple("common_prefix_len", common_prefix_len, "block_size", block_size)
    if common_prefix_len > max_blocks * block_size:
        raise IndexError(
            f"common_prefix_len = {common_prefix_len}: expected at most"
            f" {max_blocks * block_size}, what a row of {max_blocks} blocks of"
            f" {block_size} holds"
        )
    if contents and common_prefix_len:
        _check_shared_rows(
            block_table,
            query_start_loc,
            seq_lens,
            common_prefix_len,
            block_size,
            options.causal,
        )


def _check_shared_rows(
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    common_prefix_len: int,
    block_size: int,
    causal: bool | Tensor | None,
) -> None:
    """Raise an error for requests that do not share the prefix, or do not see all of it."""
    prefix_blocks = common_prefix_len // block_size
    rows = block_table[:, :prefix_blocks].tolist()
    lens = zip(query_start_loc.diff().tolist(), seq_lens.tolist(), strict=True)
    for req, (query_len, seq_len) in enumerate(lens):
        if not query_len:
            continue
        attends_to_all = not (causal[req] if isinstance(causal, Tensor) else causal)
        shared = seq_len if attends_to_all else seq_len - query_len
        if shared < common_prefix_len:
            which = "keys" if attends_to_all else "keys before its new tokens"
            raise ValueError(
                f"request {req} has {shared} {which}: expected at least common_prefix_len ="
                f" {common_prefix_len}, since every new token attends to the whole prefix; give a"
                " shorter one"
            )
        for entry, (own, first) in enumerate(zip(rows[req], rows[0], strict=True)):
            if own != first:
                raise ValueError(
                    f"block_table[{req}, {entry}] = {own}: expected {first}, as in row 0,"
                    f" since all requests share the first common_prefix_len ="
                    f" {common_prefix_len} keys; give a shorter one"
                )


def check_dcp_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    dcp_world_size: int,
    dcp_rank: int,
    dcp_kv_cache_interleave_size: int,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    contents: bool,
    scale: float | None = None,
) -> int:
    """Return the maximum number of keys of one sequence on a rank; raise for invalid arguments.

    Invalid are ranks that do not exist, and sequences whose share exceeds the rank's table rows.
    """
    check_ranks(dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    _check_plain(options, out, "a rank packs its share of the keys without gaps")
    options = options.with_causal(True)
    if options.tree_mask is not None or options.causal is not True:
        reject_options(
            options,
            ("causal", "tree_mask"),
            "a token attends to the rank's share of the keys up to its own position",
        )
    # the rows hold the rank's share of the keys, so the share is compared with them below
    check_paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        0,
        out,
        lse,
        options,
        contents=False,
    )
    check_score_scale(scale)
    check_not_negative(max_seq_len=max_seq_len)
    num_blocks, block_size, _, _ = key_cache.shape
    reqs, max_blocks = block_table.shape
    of_rank = (dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    share = count_share(max_seq_len, *of_rank)
    if share > max_blocks * block_size:
        raise IndexError(
            f"max_seq_len = {max_seq_len} gives rank {dcp_rank} {share} keys: expected at most"
            f" {max_blocks * block_size}, what a row of {max_blocks} blocks of"
            f" {block_size} holds"
        )
    if not contents:
        return share
    check_cache_scales(options, key_cache, value_cache, contents)
    check_options(options, query, reqs, out, contents)
    check_start_loc("query_start_loc", query_start_loc, reqs, query.shape[0], True)
    query_lens, lens = query_start_loc.diff().tolist(), seq_lens.tolist()
    check_positions(options, query_lens, lens)
    check_bound(
        "max_query_len", max_query_len, query_lens, "request {} has {} new tokens"
    )
    check_bound("max_seq_len", max_seq_len, lens, "seq_lens[{}] = {}")
    shares = [count_share(seq_len, *of_rank) for seq_len in lens]
    check_block_ids(block_table, seq_lens.new_tensor(shares), block_size, num_blocks)
    return share


def _check_plain(options: AttentionOptions, out: Tensor | None, why: str) -> None:
    """Reject options that depend on the distance between a query and a key."""
    reject_options(
        options, OPTIONS_BY_POSITION, f"{why}, and then a key's position is not known"
    )
    reject_options(
        options,
        ("out_scale", "batch_invariant"),
        "partial results are combined in the dtype of the arithmetic",
    )
    if out is not None:
        check_dtype("out", out, *FLOATS)


def count_share(seq_len: int, ranks: int, rank: int, in_a_row: int) -> int:
    """Return how many keys of a sequence a rank stores."""
    rounds, rest = divmod(seq_len, ranks * in_a_row)
    return rounds * in_a_row + min(max(rest - rank * in_a_row, 0), in_a_row)


def check_cascade_choice(
    common_prefix_len: int,
    query_lens: Sequence[int],
    num_query_heads: int,
    num_kv_heads: int,
    num_sms: int,
    dcp_world_size: int,
) -> None:
    """Reject negative counts, sizes below 1 and query heads that do not divide."""
    check_not_negative(common_prefix_len=common_prefix_len)
    check_positive(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
        dcp_world_size=dcp_world_size,
    )
    check_multiple("num_query_heads", num_query_heads, "num_kv_heads", num_kv_heads)
    for req, query_len in enumerate(query_lens):
        if query_len < 0:
            raise ValueError(f"query_lens[{req}] = {query_len}: expected at least 0")

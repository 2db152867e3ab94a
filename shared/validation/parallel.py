"""Validation of attention that several ranks compute together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contract.argument_kinds import INT32
from ..contract.attention_options import OPTIONS_PER_BATCH, AttentionOptions
from ..contract.cache_formats import TENSOR_SCALE_DTYPES, head_size_of
from ..contract.parallel import KeySplits, PrefillShare, RankBatch, RingShare
from .attention import check_paged_attention
from .attention_options import reject_options
from .batch import check_block_ids, check_start_loc
from .cascade import count_share
from .primitives import (
    FLOATS,
    check_dtype,
    check_length,
    check_positive,
    check_same_device,
)
from .results import check_results
from .step_shapes import check_multiple, check_ranks

EXCHANGES = ("all_to_all", "reduce_scatter")
TAKEN_IN_A_RING = ("causal", "logits_soft_cap", "sinks", "batch_invariant")
TAKEN = (
    *("causal", "logits_soft_cap", "sinks", "k_scale", "v_scale"),
    *("k_global_scale", "v_global_scale", "batch_invariant"),
)


def check_context_parallel(
    world_size: int,
    rank: int,
    num_query_heads: int,
    head_size: int,
    max_num_tokens: int,
    interleave_size: int,
    exchange: str,
    splits: KeySplits | None,
) -> None:
    """Reject sizes below 1, unknown exchanges, and splits whose keys several ranks store."""
    check_ranks(world_size, rank, interleave_size)
    check_positive(
        num_query_heads=num_query_heads,
        head_size=head_size,
        max_num_tokens=max_num_tokens,
    )
    if exchange not in EXCHANGES:
        raise ValueError(
            f"exchange = {exchange!r}: expected {' or '.join(map(repr, EXCHANGES))}"
        )
    if splits is None:
        return
    check_positive(count=splits.count, run=splits.run)
    if exchange != "all_to_all":
        raise ValueError(
            f"exchange = {exchange!r} with fixed splits: expected 'all_to_all', because a"
            " reduce-scatter adds in an order of its own"
        )
    if world_size == 1:
        return
    check_multiple("interleave_size", interleave_size, "splits.run", splits.run)
    check_multiple(
        "splits.count * splits.run",
        splits.count * splits.run,
        "interleave_size * ranks",
        interleave_size * world_size,
    )


def check_rank_batch(
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    max_seq_len: int,
    of_rank: tuple[int, int, int],
    max_num_tokens: int,
    splits: KeySplits | None,
    causal: bool,
    max_query_len: int | None,
    contents: bool,
) -> None:
    """Reject a step that does not fit the buffers, or whose share exceeds the rank's table rows."""
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    check_dtype("seq_lens", seq_lens, torch.int32)
    reqs, max_blocks = block_table.shape
    check_length("seq_lens", seq_lens, reqs, "one per request")
    check_length("query_start_loc", query_start_loc, reqs + 1, "requests + 1")
    if not 0 <= num_tokens <= max_num_tokens:
        raise ValueError(
            f"num_tokens = {num_tokens}: expected 0 to {max_num_tokens}, for which the buffers"
            " are allocated; create the object with a larger max_num_tokens"
        )
    num_blocks, block_size = key_cache.shape[:2]
    world_size, rank, interleave_size = of_rank
    if world_size > 1:
        check_multiple("block_size", block_size, "interleave_size", interleave_size)
    if splits is not None:
        check_multiple("block_size", block_size, "splits.run", splits.run)
    share = count_share(max_seq_len, *of_rank)
    if share > max_blocks * block_size:
        raise IndexError(
            f"max_seq_len = {max_seq_len} gives rank {rank} {share} keys: expected at most"
            f" {max_blocks * block_size}, what a row of {max_blocks} blocks of {block_size}"
            " holds"
        )
    if not contents:
        return
    check_start_loc("query_start_loc", query_start_loc, reqs, num_tokens, True)
    query_lens, lens = query_start_loc.diff().tolist(), seq_lens.tolist()
    for req, (query_len, seq_len) in enumerate(zip(query_lens, lens, strict=True)):
        if max_query_len is not None and query_len > max_query_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens: expected at most max_query_len ="
                f" {max_query_len}"
            )
        if not 0 <= seq_len <= max_seq_len:
            raise ValueError(
                f"seq_lens[{req}] = {seq_len}: expected 0 to max_seq_len = {max_seq_len}"
            )
        if causal and query_len > seq_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens but seq_lens[{req}] = {seq_len}:"
                " expected the new tokens to be part of the sequence"
            )
    shares = [count_share(seq_len, *of_rank) for seq_len in lens]
    check_block_ids(block_table, seq_lens.new_tensor(shares), block_size, num_blocks)


def check_rank_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RankBatch,
    num_query_heads: int,
    world_size: int,
    options: AttentionOptions,
    splits: KeySplits | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Reject shapes that are not those of the step, and options that need positions."""
    check_dtype("query", query, *FLOATS)
    expected = (batch.num_tokens, num_query_heads, head_size_of(key_cache))
    if tuple(query.shape) != expected:
        raise ValueError(
            f"query has shape {list(query.shape)}: expected {list(expected)}, the tokens of the"
            " batch and this rank's query heads"
        )
    check_multiple(
        "query heads of all ranks",
        num_query_heads * world_size,
        "kv_heads",
        key_cache.shape[2],
    )
    _check_results(
        query, {"key_cache": key_cache, "value_cache": value_cache}, out, lse
    )
    reject_options(
        options,
        tuple(option for option in options.given if option not in TAKEN),
        "a rank attends to its share of the keys, whose distances it does not know",
    )
    if options.causal not in (None, True):
        raise NotImplementedError(
            f"causal = {options.causal} in options: expected None; give causal to prepare"
        )
    if options.batch_invariant and splits is None:
        raise ValueError(
            "batch_invariant = True: expected fixed splits; give splits=KeySplits(...) to"
            " DecodeContextParallel"
        )
    if options.sinks is not None:
        check_length(
            "sinks", options.sinks, num_query_heads, "one per query head of this rank"
        )


def check_prefill_share(query_lens: Sequence[int], block_size: int) -> None:
    """Reject negative lengths and a block size below 1."""
    check_positive(block_size=block_size)
    for req, query_len in enumerate(query_lens):
        if query_len < 0:
            raise ValueError(f"query_lens[{req}] = {query_len}: expected at least 0")
    if sum(query_lens) > INT32:
        raise ValueError(
            f"query_lens has {sum(query_lens)} tokens in all: expected at most {INT32}, as"
            " locations have 32 bits"
        )


def check_prefill_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    share: PrefillShare,
    block_size: int,
    scale: float | None,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    contents: bool,
) -> None:
    """Reject what would raise an error after the exchange, and options per request or token."""
    _check_tokens(query, key, value, len(share.tokens))
    batched = [
        option
        for option in OPTIONS_PER_BATCH
        if isinstance(getattr(options, option), Tensor)
    ]
    reject_options(
        options, batched, "each rank has other requests, which are chunks of prompts"
    )
    _check_causal(options)
    blocks = len(share.gathered_rows) // block_size, block_size
    # the shapes of the gathered keys and values
    key_cache, value_cache = (
        tensor.new_empty(()).expand(*blocks, *tensor.shape[1:])
        for tensor in (key, value)
    )
    check_paged_attention(
        query, key_cache, value_cache, share.block_table, share.query_start_loc, share.seq_lens,
        share.max_query_len, share.max_seq_len, out, lse, options, contents, scale,
    )  # fmt: skip
    check_results(out, lse, {"key": key, "value": value}, takes_fp8=True)


def check_ring_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    share: RingShare,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
) -> None:
    """Reject what would raise an error while a share is on its way, and options of positions."""
    _check_tokens(query, key, value, len(share.tokens))
    check_dtype("query", query, *FLOATS)
    check_dtype("key", key, query.dtype)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key has shape {list(key.shape)}: expected a head size of {query.shape[-1]}, that of"
            " the query"
        )
    check_multiple("query heads", query.shape[1], "kv_heads", key.shape[1])
    _check_results(query, {"key": key, "value": value}, out, lse)
    reject_options(
        options,
        tuple(option for option in options.given if option not in TAKEN_IN_A_RING),
        "the keys of a round have no positions; PrefillContextParallel takes options by position",
    )
    _check_causal(options)
    if options.batch_invariant:
        raise ValueError(
            "batch_invariant = True: expected False, since a ring groups the keys by ranks and a"
            " row's bits depend on their number; PrefillContextParallel gives the bits of one rank"
        )
    if options.sinks is not None:
        check_length("sinks", options.sinks, query.shape[1], "one per query head")


def _check_tokens(query: Tensor, key: Tensor, value: Tensor, tokens: int) -> None:
    """Reject other tokens than those of a rank's share."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3 or len(tensor) != tokens:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [{tokens}, heads, size], the"
                " tokens that the share lists"
            )
    check_dtype("key", key, *FLOATS, *TENSOR_SCALE_DTYPES)
    check_dtype(
        "query", query, *(FLOATS if key.dtype in TENSOR_SCALE_DTYPES else (key.dtype,))
    )
    check_dtype("value", value, key.dtype)
    check_same_device(query=query, key=key, value=value)


def _check_causal(options: AttentionOptions) -> None:
    """Reject attention of a token to keys after it, which its chunk does not receive."""
    if options.causal not in (None, True):
        raise NotImplementedError(
            f"causal = {options.causal}: expected None, since a chunk of a prompt attends to the"
            " keys up to its end only; use encoder_attention on one rank"
        )


def _check_results(
    query: Tensor, keys: dict[str, Tensor], out: Tensor | None, lse: Tensor | None
) -> None:
    """Reject outputs and log-sum-exps of another shape or dtype, or in memory that is read.

    Args:
        query: [tokens, query_heads, head_size].
        keys: The keys and then the values, by their arguments' names.
        out, lse: Optional. The results.
    """
    rows, heads = query.shape[:2]
    value_head_size = head_size_of(list(keys.values())[1])
    for name, tensor, shape in (
        ("out", out, (rows, heads, value_head_size)),
        ("lse", lse, (heads, rows)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected {list(shape)}"
            )
        if tensor is not None:
            check_same_device(**{"query": query, name: tensor})
    check_results(out, lse, {"query": query, **keys})


def check_tp_heads(
    num_query_heads: int, num_kv_heads: int, tp_world_size: int, tp_rank: int
) -> None:
    """Reject heads that do not divide among the ranks, and ranks that do not exist."""
    check_ranks(tp_world_size, tp_rank, 1)
    check_positive(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads)
    check_multiple("num_query_heads", num_query_heads, "num_kv_heads", num_kv_heads)
    check_multiple("num_query_heads", num_query_heads, "tp_world_size", tp_world_size)
    _check_copies(num_kv_heads, tp_world_size)


def check_dcp_groups(
    num_kv_heads: int, tp_world_size: int, dcp_world_size: int
) -> None:
    """Reject groups whose ranks would not store the same KV heads."""
    check_positive(
        num_kv_heads=num_kv_heads,
        tp_world_size=tp_world_size,
        dcp_world_size=dcp_world_size,
    )
    _check_copies(num_kv_heads, tp_world_size)
    copies = max(1, tp_world_size // num_kv_heads)
    check_multiple("copies of a KV head", copies, "dcp_world_size", dcp_world_size)


def _check_copies(num_kv_heads: int, tp_world_size: int) -> None:
    """Raise an error if a rank would have a part of a KV head's copies."""
    if num_kv_heads % tp_world_size and tp_world_size % num_kv_heads:
        raise ValueError(
            f"num_kv_heads = {num_kv_heads} and tp_world_size = {tp_world_size}: expected one to"
            " be a multiple of the other"
        )

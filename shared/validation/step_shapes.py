"""Validation of chunks, draft tokens, ranks, ranges and rows."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..contract.integers import LARGEST, as_array, as_int, as_ints
from ..contract.kinds import HOST
from ..contract.metadata_classes import CommonAttentionMetadata
from .batch import check_start_loc
from .memory import check_own_memory
from .primitives import check_dtype, check_length, check_not_negative, check_positive

MAX_INT32 = torch.iinfo(torch.int32).max


def check_on_host(**tensors: Tensor) -> None:
    """Raise an error for a tensor that is not on the host, where a step is planned."""
    for name, tensor in tensors.items():
        if tensor.device.type != HOST.type:
            raise ValueError(
                f"{name} is on {tensor.device}: expected cpu, where a step is planned;"
                " pass the host's copy"
            )


def check_multiple(name: str, number: int, divisor_name: str, divisor: int) -> None:
    """Raise an error for a number that is not a multiple of the divisor."""
    if number % divisor:
        raise ValueError(
            f"{name} = {number} is not a multiple of {divisor_name} = {divisor}"
        )


def check_local_attention(
    attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int
) -> None:
    """Raise an error for chunks that are not whole blocks, and sequences longer than their row."""
    common = common_attn_metadata
    check_positive(attn_chunk_size=attn_chunk_size, block_size=block_size)
    check_multiple("attn_chunk_size", attn_chunk_size, "block_size", block_size)
    if common.mm_req_doc_ranges:
        raise NotImplementedError(
            f"mm_req_doc_ranges = {common.mm_req_doc_ranges}: expected none, since a chunk"
            " that ends within an image cannot see both ways; run these layers unchunked"
        )
    check_no_tree(common)
    check_query_lens(common.query_start_loc_cpu, common.seq_lens_cpu)
    max_blocks = common.block_table_tensor.shape[1]
    for req, seq_len in enumerate(common.seq_lens_cpu.tolist()):
        if seq_len > max_blocks * block_size:
            raise IndexError(
                f"seq_lens[{req}] = {seq_len}: expected at most {max_blocks * block_size},"
                f" what {max_blocks} blocks of {block_size} hold"
            )


def check_query_lens(query_start_loc_cpu: Tensor, seq_lens_cpu: Tensor) -> None:
    """Raise an error for requests with more new tokens than tokens."""
    check_on_host(query_start_loc_cpu=query_start_loc_cpu, seq_lens_cpu=seq_lens_cpu)
    check_dtype("seq_lens_cpu", seq_lens_cpu, torch.int32)
    reqs = len(seq_lens_cpu)
    check_start_loc("query_start_loc_cpu", query_start_loc_cpu, reqs, 2**31, True)
    batch = zip(query_start_loc_cpu.diff().tolist(), seq_lens_cpu.tolist(), strict=True)
    for req, (query_len, seq_len) in enumerate(batch):
        if query_len > seq_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens but seq_lens[{req}] ="
                f" {seq_len}: expected the new tokens to be part of the sequence"
            )


def check_no_tree(common: CommonAttentionMetadata) -> None:
    """Raise an error if a step has a tree mask, which indexes all new tokens of a request."""
    if common.tree_mask is not None:
        raise NotImplementedError(
            "tree_mask is given: expected None, since a tree counts the new tokens of a"
            " request as they are; run these layers on the whole step"
        )


def check_wanted_logits(common: CommonAttentionMetadata) -> Tensor:
    """Return `logits_indices_padded`; raise unless its tokens are the last of their requests."""
    check_no_tree(common)
    indices, count = common.logits_indices_padded, common.num_logits_indices
    if indices is None or count is None:
        missing = "logits_indices_padded" if indices is None else "num_logits_indices"
        raise ValueError(
            f"{missing} = None: expected the tokens whose logits are wanted; a step without"
            " them cannot skip the others"
        )
    if not 0 <= count <= len(indices):
        raise ValueError(
            f"num_logits_indices = {count}: expected 0 to {len(indices)}, the length of"
            " logits_indices_padded"
        )
    check_logits_indices(common.query_start_loc_cpu, indices[:count].to(HOST))
    return indices


def check_logits_indices(query_start_loc: Tensor, indices: Tensor) -> None:
    """Raise an error for logits of other tokens than the last ones of each request, in order.

    Args:
        query_start_loc: [reqs + 1], on the host.
        indices: [logits], on the host.
    """
    starts, found = query_start_loc.numpy(), indices.numpy()
    for place in np.flatnonzero((found < 0) | (found >= starts[-1]))[:1].tolist():
        raise IndexError(
            f"logits_indices_padded[{place}] = {found[place]}: expected 0 <= index <"
            f" {starts[-1]}, the new tokens of the step"
        )
    ends = starts[1:].astype(np.int64)
    req = np.searchsorted(ends, np.sort(found), side="right")
    counts = np.bincount(req, minlength=len(ends))
    expected = (ends - counts.cumsum())[req] + np.arange(len(found))
    for place in np.flatnonzero(found != expected)[:1].tolist():
        raise ValueError(
            f"logits_indices_padded[{place}] = {found[place]}: expected"
            f" {expected[place]}, since causal attention takes a request's queries for its"
            " last tokens, in order; run steps that need other logits without fast prefill"
        )


def check_spec_decode_query(query: Tensor, batch_size: int) -> None:
    """Raise an error for queries that do not divide evenly among the requests."""
    if query.dim() != 3:
        raise ValueError(
            f"query has shape {list(query.shape)}: expected [tokens, query_heads, head_size]"
        )
    check_positive(batch_size=batch_size)
    if query.shape[0] % batch_size:
        raise ValueError(
            f"query has {query.shape[0]} tokens for batch_size = {batch_size}: expected a"
            " multiple, the same number of tokens for each request"
        )


def check_spec_decode_output(attn_output: Tensor) -> None:
    """Raise an error for an output that cannot be viewed with one row per token."""
    if attn_output.dim() not in (3, 4):
        raise ValueError(
            f"attn_output has shape {list(attn_output.shape)}: expected"
            " [reqs, query_len, query_heads, head_size] or [tokens, query_heads, head_size]"
        )
    if attn_output.dim() == 3:
        return
    reqs, query_len = attn_output.shape[:2]
    req_stride, token_stride = attn_output.stride()[:2]
    if reqs > 1 and query_len > 1 and req_stride != query_len * token_stride:
        raise ValueError(
            f"attn_output has strides {list(attn_output.stride())}: expected requests that"
            " are contiguous, so that no copy is needed; call .contiguous() first"
        )


def check_conv_starts(query_start_loc_p: Tensor) -> None:
    """Raise an error for starts that are on a device, do not begin at 0, or decrease."""
    check_on_host(query_start_loc_p=query_start_loc_p)
    reqs = max(query_start_loc_p.numel() - 1, 0)
    check_start_loc("query_start_loc_p", query_start_loc_p, reqs, 2**31, True)


def check_ranks(
    dcp_world_size: int, dcp_rank: int | None, interleave_size: int
) -> None:
    """Raise an error for a rank that does not exist, and a split without ranks."""
    check_positive(
        dcp_world_size=dcp_world_size, dcp_kv_cache_interleave_size=interleave_size
    )
    if dcp_rank is not None and not 0 <= dcp_rank < dcp_world_size:
        raise ValueError(
            f"dcp_rank = {dcp_rank}: expected 0 <= rank < dcp_world_size ="
            f" {dcp_world_size}"
        )


def check_rank_lens(seq_lens: Tensor) -> None:
    """Raise an error for lengths that no sequence has, or that are not counted in 32 bits."""
    if seq_lens.dim() != 1:
        raise ValueError(f"seq_lens has shape {list(seq_lens.shape)}: expected [reqs]")
    for req, seq_len in enumerate(seq_lens.tolist()):
        if not 0 <= seq_len <= MAX_INT32:
            raise ValueError(
                f"seq_lens[{req}] = {seq_len}: expected 0 to {MAX_INT32}, the largest int32"
            )


def check_block_table_sizes(
    block_size: int,
    max_num_reqs: int,
    max_num_blocks_per_req: int,
    kernel_block_size: int,
    dcp_world_size: int,
    dcp_rank: int,
    dcp_kv_cache_interleave_size: int,
) -> None:
    """Raise an error for an unknown rank, and for sizes that are not multiples of each other."""
    check_ranks(dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size)
    check_positive(block_size=block_size, kernel_block_size=kernel_block_size)
    check_not_negative(
        max_num_reqs=max_num_reqs, max_num_blocks_per_req=max_num_blocks_per_req
    )
    check_multiple("block_size", block_size, "kernel_block_size", kernel_block_size)
    check_multiple(
        "kernel_block_size",
        kernel_block_size,
        "dcp_kv_cache_interleave_size",
        dcp_kv_cache_interleave_size,
    )


def check_row_indices(max_num_reqs: int, **rows: int) -> None:
    """Raise an error for a row that the table does not have."""
    for name, row in rows.items():
        if not 0 <= as_int(name, row, smallest=-LARGEST - 1) < max_num_reqs:
            raise IndexError(
                f"{name} = {row}: expected 0 <= row < {max_num_reqs}, the rows of the table"
            )


def check_num_rows(max_num_reqs: int, num_reqs: int) -> None:
    """Raise an error for a number of rows below 0, or above that of the table."""
    check_not_negative(num_reqs=num_reqs)
    check_row_indices(max_num_reqs + 1, num_reqs=num_reqs)


def check_row_takes(
    block_ids: Sequence[int],
    row_idx: int,
    num_held: Sequence[int] | np.ndarray,
    width: int,
    blocks_per_entry: int,
) -> None:
    """Raise an error for an unknown row, blocks that do not fit in it, or invalid block ids.

    Args:
        block_ids: blocks to append.
        row_idx: the row.
        num_held: [rows] entries that each row keeps.
        width: entries of a row.
        blocks_per_entry: entries per block.
    """
    check_row_indices(len(num_held), row_idx=row_idx)
    as_ints("block_ids", block_ids, smallest=-LARGEST - 1)
    held = int(num_held[row_idx])
    if held + len(block_ids) * blocks_per_entry > width:
        raise IndexError(
            f"the row holds {held // blocks_per_entry} blocks and gets {len(block_ids)}"
            f" more: expected at most {width // blocks_per_entry}; make"
            " max_num_blocks_per_req larger"
        )
    largest = 2**31 // blocks_per_entry
    for place, block_id in enumerate(block_ids):
        if not 0 <= block_id < largest:
            raise IndexError(
                f"block_ids[{place}] = {block_id}: expected 0 <= block id < {largest}"
            )


def check_positions(
    req_indices: Sequence[int],
    positions: Sequence[int],
    num_blocks_per_row: Sequence[int] | np.ndarray,
    tokens_per_block: int,
) -> None:
    """Raise an error for a position past the end of its row."""
    if len(req_indices) != len(positions):
        raise ValueError(
            f"req_indices has {len(req_indices)} entries but positions has"
            f" {len(positions)}: expected one of each per token"
        )
    reqs = as_array("req_indices", req_indices)
    places = as_array("positions", positions)
    outside = (reqs < 0) | (reqs >= len(num_blocks_per_row))
    for token in np.flatnonzero(outside)[:1].tolist():
        check_row_indices(
            len(num_blocks_per_row), **{f"req_indices[{token}]": int(reqs[token])}
        )
    reach = np.asarray(num_blocks_per_row, np.int64)[reqs] * tokens_per_block
    for token in np.flatnonzero((places < 0) | (places >= reach))[:1].tolist():
        raise IndexError(
            f"positions[{token}] = {places[token]}: expected 0 <= position <"
            f" {reach[token]}, what the blocks of row {reqs[token]} hold; append a block"
            " first"
        )


def check_mamba_block_table(
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
    num_speculative_blocks: int,
    mamba_cache_mode: str,
    contents: bool,
) -> None:
    """Raise an error for a mode that does not exist, and rows that end before the last blocks."""
    if mamba_cache_mode not in ("none", "all", "align"):
        raise ValueError(
            f"mamba_cache_mode = {mamba_cache_mode!r}: expected 'none', 'all' or 'align'"
        )
    if mamba_cache_mode != "align":
        return
    check_positive(block_size=block_size)
    check_not_negative(num_speculative_blocks=num_speculative_blocks)
    check_length("seq_lens", seq_lens, block_table.shape[0], "rows of the block table")
    if not contents:
        return
    max_blocks = block_table.shape[1]
    for req, seq_len in enumerate(seq_lens.tolist()):
        needed = max(seq_len - 1, 0) // block_size + 1 + num_speculative_blocks
        if needed > max_blocks:
            raise IndexError(
                f"seq_lens[{req}] = {seq_len} with {num_speculative_blocks} speculative"
                f" blocks needs {needed} entries: expected at most {max_blocks}, the width"
                " of the block table"
            )


def check_features(
    mm_features: Sequence[Sequence[object]],
    sliding_window: int | None,
    span_leading_pad_modulus: int,
) -> None:
    """Raise an error for a negative number, and for a mask of another length than its feature."""
    check_not_negative(span_leading_pad_modulus=span_leading_pad_modulus)
    if sliding_window is not None:
        check_not_negative(sliding_window=sliding_window)
    for req, row in enumerate(mm_features):
        for place, feature in enumerate(row):
            offset, length = (
                getattr(feature, "offset", 0),
                getattr(feature, "length", 0),
            )
            is_embed = getattr(feature, "is_embed", None)
            if offset < 0 or length < 0:
                raise ValueError(
                    f"feature {place} of request {req} has offset = {offset}, length ="
                    f" {length}: expected both from 0"
                )
            if is_embed is not None and len(is_embed) != length:
                raise ValueError(
                    f"feature {place} of request {req} has length = {length} but a mask of"
                    f" {len(is_embed)}: expected one flag per token"
                )


def check_range_owners(
    mm_prefix_range: Mapping[int, object] | None, num_seqs: int
) -> None:
    """Raise an error for ranges of a request that the batch does not have."""
    for req in mm_prefix_range or ():
        if not 0 <= req < num_seqs:
            raise IndexError(
                f"mm_prefix_range has request {req}: expected 0 <= request < {num_seqs}"
            )


def check_query_ranges(
    out: Tensor,
    mm_prefix_range: Mapping[int, object] | None,
    query_start_loc_cpu: Tensor,
    seq_lens_cpu: Tensor,
    sliding_window: int | None,
) -> None:
    """Raise an error for a batch without such requests or lengths, too few rows, or no window."""
    if mm_prefix_range is None:
        return
    if sliding_window is not None:
        check_positive(sliding_window=sliding_window)
    check_query_lens(query_start_loc_cpu, seq_lens_cpu)
    check_range_owners(mm_prefix_range, len(seq_lens_cpu))
    num_tokens = int(query_start_loc_cpu[-1])
    check_on_host(out=out)
    check_dtype("out", out, torch.int32)
    if out.dim() != 2 or out.shape[1] != 2:
        raise ValueError(f"out has shape {list(out.shape)}: expected [rows, 2]")
    check_own_memory(out=out)
    if num_tokens > out.shape[0]:
        raise IndexError(
            f"out has {out.shape[0]} rows: expected at least {num_tokens}, the new tokens of"
            " the step"
        )


def check_has_layers(per_layer_params: Mapping[str, object]) -> None:
    """Raise an error for an empty mapping."""
    if not per_layer_params:
        raise ValueError("per_layer_params = {}: expected at least one layer")


def check_layer_impl(name: str, impl: object, impl_cls: type) -> None:
    """Raise an error for a layer of another class, without a scale, or with an invalid window."""
    if not isinstance(impl, impl_cls):
        raise TypeError(
            f"layer {name!r} runs {type(impl).__name__}: expected {impl_cls.__name__}"
        )
    if not hasattr(impl, "scale"):
        raise TypeError(f"the implementation of layer {name!r} has no scale")
    window = getattr(impl, "sliding_window", None)
    if window is not None and (not isinstance(window, Sequence) or len(window) != 2):
        raise TypeError(
            f"layer {name!r} has sliding_window = {window!r}: expected None or the pair"
            " (keys seen to the left, keys seen to the right)"
        )

"""Validation of batches of the indexer: chunks of prompts, rows per rank, uniform decodes."""

import torch
from torch import Tensor

from .batch import check_block_table, check_start_loc
from .primitives import (
    check_dtype,
    check_length,
    check_on_host,
    check_positive,
    check_same_device,
)
from .sparse_slots import check_whole_groups
from .step_shapes import check_rank_lens


def check_prefill_chunk(
    start_idx: int,
    end_idx: int,
    query_start_loc_cpu: Tensor,
    seq_lens_cpu: Tensor,
    compress_ratio: int,
    query_slice: slice | None,
    dcp_world_size: int,
    dcp_rank: int,
    dcp_kv_cache_interleave_size: int,
) -> None:
    """Raise an error for requests that are not in the batch, and for slices that skip rows."""
    check_whole_groups(
        compress_ratio, dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size
    )
    _check_lens("seq_lens_cpu", seq_lens_cpu)
    reqs = len(seq_lens_cpu)
    check_on_host("query_start_loc_cpu", query_start_loc_cpu)
    check_start_loc(
        "query_start_loc_cpu", query_start_loc_cpu, reqs, 2**31 - 1, contents=True
    )
    if not 0 <= start_idx < end_idx <= reqs:
        raise IndexError(
            f"start_idx = {start_idx} and end_idx = {end_idx}: expected 0 <= start_idx <"
            f" end_idx <= {reqs}, the requests of the batch"
        )
    if query_slice is not None:
        start, stop = query_slice.start or 0, query_slice.stop
        ends_early = stop is not None and stop < start
        if query_slice.step not in (None, 1) or start < 0 or ends_early:
            raise ValueError(
                f"query_slice = {query_slice}: expected a start of at least 0, an end that is"
                " not less, and no step"
            )


def check_row_shard(
    seq_lens_cpu: Tensor,
    query_lens_cpu: Tensor,
    compress_ratio: int,
    tp_size: int,
    min_rows: int,
) -> None:
    """Raise an error for lengths that are not of one batch, and for no ranks."""
    check_positive(compress_ratio=compress_ratio, tp_size=tp_size, min_rows=min_rows)
    _check_lens("seq_lens_cpu", seq_lens_cpu)
    _check_lens("query_lens_cpu", query_lens_cpu)
    check_length("query_lens_cpu", query_lens_cpu, len(seq_lens_cpu), "requests")
    lens = zip(query_lens_cpu.tolist(), seq_lens_cpu.tolist(), strict=True)
    for req, (query_len, seq_len) in enumerate(lens):
        if query_len > seq_len:
            raise ValueError(
                f"query_lens_cpu[{req}] = {query_len}: expected at most {seq_len}, the tokens"
                " of the sequence"
            )


def check_uniform_decode(
    seq_lens: Tensor, block_table: Tensor, max_decode_len: int
) -> None:
    """Raise an error for lengths and rows of other requests."""
    check_positive(max_decode_len=max_decode_len)
    check_block_table(block_table)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_length("seq_lens", seq_lens, block_table.shape[0], "rows of the block table")
    check_same_device(block_table=block_table, seq_lens=seq_lens)


def _check_lens(name: str, lens: Tensor) -> None:
    check_dtype(name, lens, torch.int32)
    check_on_host(name, lens)
    check_rank_lens(lens)

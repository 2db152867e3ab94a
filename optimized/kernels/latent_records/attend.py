"""Launches of attention over records: tiles, splits and workspace. The host reads no lengths."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....contract.latent_formats import LatentFormat
from ...runtime.chip import count_processors
from ...runtime.launcher import INTERPRETED, launch_kernel, must_widen
from ..fp8 import has_native_fp8
from ..softmax import LOG2_E
from .decode import (
    Batch,
    DecodeTiles,
    Results,
    combine_records_kernel,
    decode_records_kernel,
)
from .record import make_config, record_cache

KEYS_PER_SPLIT = 512
"""Keys of a split, at least."""
MAX_SPLITS = 32
TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def choose_tiles(dtype: torch.dtype, is_split: bool, names_slots: bool) -> DecodeTiles:
    """Return the tiles of queries of a dtype.

    These compile without spills for every chip. With 32 rows, ptxas spills 440 bytes for sm_90.
    """
    uses_bfloat16 = dtype == torch.bfloat16 and not INTERPRETED
    return DecodeTiles(
        BLOCK_M=16,
        BLOCK_N=32 if uses_bfloat16 else 16,
        DOT=tl.bfloat16 if uses_bfloat16 else tl.float32,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        ROUND=tl.float32 if must_widen(dtype) else TRITON_DTYPES[dtype],
        IS_SPLIT=is_split,
        NAMES_SLOTS=names_slots,
    )


def choose_splits(programs: int, max_seq_len: int, device: torch.device) -> int:
    """Return the number of splits of a request's keys.

    Args:
        programs: Query tiles of all requests.
        max_seq_len: Most keys of a request.
    """
    wanted = 2 * count_processors(device) // max(programs, 1)
    return max(1, min(wanted, MAX_SPLITS, max_seq_len // KEYS_PER_SPLIT))


def attend_to_records(
    form: LatentFormat,
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    lse: Tensor | None,
    names_slots: bool = False,
) -> Tensor:
    """Return the average latent of each row: [tokens, heads, kv_lora_rank].

    Args:
        query: [tokens, heads, width] in the space of the latents, packed.
        lse: Optional. [heads, tokens], modified in place.
        names_slots: Whether the entries of `block_table` are slots, not blocks.

    The other arguments are those of `latent_decode_attention`.
    """
    tokens, heads, _ = query.shape
    rank, dtype, device = form.kv_lora_rank, query.dtype, query.device
    buffer_dtype = torch.float32 if must_widen(dtype) else dtype
    # rows past the last request
    mean = query.new_zeros(1, tokens, heads, rank, dtype=buffer_dtype)
    if lse is not None:
        lse.fill_(-torch.inf)
    reqs, rows = seq_lens.shape[0], max_query_len * heads
    if not (reqs and rows and tokens and kv_cache.numel()):
        return mean[0].to(dtype)
    query_tiles = triton.cdiv(rows, choose_tiles(dtype, False, False).BLOCK_M)
    splits = choose_splits(query_tiles * reqs, max_seq_len, device)
    tiles = choose_tiles(dtype, splits > 1, names_slots)
    config = make_config(form, has_native_fp8(device))
    final = _results(mean, None if lse is None else lse[None])
    results, partial_out, partial_lse = final, mean, lse
    if splits > 1:
        partial_out = query.new_empty(splits, tokens, heads, rank, dtype=torch.float32)
        partial_lse = partial_out.new_full((splits, heads, tokens), -torch.inf)
        results = _results(partial_out, partial_lse)
    starts, lens = query_start_loc.contiguous(), seq_lens.contiguous()
    strides = block_table.stride(0), block_table.stride(1)
    batch = Batch(block_table, starts, lens, *strides, kv_cache.shape[1], window)
    launch_kernel(
        decode_records_kernel,
        (query_tiles, reqs, splits),
        query,
        record_cache(kv_cache),
        batch,
        results,
        scale * LOG2_E.value,
        heads,
        splits,
        config,
        tiles,
        num_warps=8,
        # two tiles of float32 do not fit the shared memory of every chip
        num_stages=2 if tl.bfloat16 == tiles.DOT else 1,
    )
    if splits > 1:
        launch_kernel(
            combine_records_kernel,
            (tokens, heads),
            partial_out,
            partial_lse,
            final,
            tokens,
            heads,
            splits,
            config,
        )
    return mean[0].to(dtype)


def _results(out: Tensor, lse: Tensor | None) -> Results:
    """Return rows and their log-sum-exp as kernels take them; both have an axis of splits first."""
    strides = (0, 0, 0) if lse is None else lse.stride()
    return Results(out, lse, *out.stride()[:3], *strides)


def check_record_queries(query: Tensor, name: str = "q_nope") -> None:
    """Raise for queries of a dtype that the kernels of records do not have."""
    if query.dtype == torch.float64:
        raise NotImplementedError(
            f"{name} is torch.float64: expected float16, bfloat16 or float32; the reference"
            " takes float64"
        )

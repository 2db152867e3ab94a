"""Indexer: cheap scores of all keys of a sequence, and the positions of the largest ones.

The write has a program per token, and the scores have one per token and 64 keys. The selection is a
few operations of torch: the smallest of the largest scores is a threshold. All scores above it are
selected, and as many equal ones as are missing, from the lowest position on. The host reads
nothing. A radix selection in one launch, with histograms of 11 bits, took 112 us for 4,096 keys and
2,584 for 131,072, and these operations 84 and 140 (H200, triton 3.6).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract.indexer_cache import split_indexer_cache
from ...contract.shapes import (
    BlockTable,
    IndexCache,
    IndexKey,
    IndexQuery,
    IndexScores,
    IndexWeights,
    Selected,
    SlotMapping,
    StartLoc,
    TokenCounts,
)
from ...validation import values_checked
from ...validation.indexer import (
    check_index_scores,
    check_indexer_write,
    check_select_keys,
)
from ..kernels.fp8 import has_native_fp8
from ..kernels.sparse.indexer import (
    KEYS_PER_PROGRAM,
    IndexerCache,
    IndexQueries,
    Sequences,
    index_scores_kernel,
    write_indexer_kernel,
)
from ..kernels.sparse.move_to_front import move_to_front
from ..runtime.launcher import (
    INTERPRETED,
    check_launch,
    launch_kernel,
    next_power_of_2,
)
from ..runtime.operators import operator


@operator(changed=["kv_cache"])
def indexer_k_quant_and_cache(
    k: IndexKey,
    kv_cache: IndexCache,
    slot_mapping: SlotMapping,
    scale_fmt: str | None = None,
) -> None:
    """Write the codes and the scale of each new token's indexer key to its slot.

    Raises:
        NotImplementedError: keys of float64. The reference takes them.
    """
    check_indexer_write(
        k, kv_cache, slot_mapping, scale_fmt, contents=values_checked(kv_cache)
    )
    _reject_float64("k", k)
    check_launch(kv_cache)
    tokens, dim = slot_mapping.shape[0], k.shape[1]
    if not tokens or not kv_cache.numel():
        return
    launch_kernel(
        write_indexer_kernel,
        (tokens,),
        k,
        _views(kv_cache),
        slot_mapping,
        *k.stride(),
        slot_mapping.stride(0),
        kv_cache.shape[1],
        # DIM, BLOCK_D, UE8M0
        dim,
        next_power_of_2(dim),
        scale_fmt is not None,
    )


@operator(like=["weights"], sizes={"keys": "max_seq_len"})
def index_scores(
    query: IndexQuery,
    weights: IndexWeights,
    kv_cache: IndexCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_seq_len: int,
) -> IndexScores:
    """Return the indexer's score of each key for each new token.

    Raises:
        NotImplementedError: queries of float64. The reference takes them.
    """
    check_index_scores(
        query, weights, kv_cache, block_table, query_start_loc, seq_lens, max_seq_len,
        contents=values_checked(query),
    )  # fmt: skip
    _reject_float64("query", query)
    check_launch(kv_cache)
    tokens, heads, dim = query.shape
    scores = weights.new_empty(tokens, max_seq_len)
    reqs = seq_lens.shape[0]
    if not scores.numel():
        return scores
    if not reqs or not kv_cache.numel():
        return scores.fill_(-torch.inf)
    is_fp8, is_wide = query.dtype == torch.float8_e4m3fn, query.dtype == torch.float32
    keys = KEYS_PER_PROGRAM // 4 if is_wide else KEYS_PER_PROGRAM
    launch_kernel(
        index_scores_kernel,
        (tokens, triton.cdiv(max_seq_len, keys)),
        IndexQueries(
            query.view(torch.uint8) if is_fp8 else query,
            weights,
            *query.stride(),
            *weights.stride(),
        ),
        _views(kv_cache),
        Sequences(
            block_table,
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            *block_table.stride(),
        ),
        scores,
        reqs,
        reqs.bit_length(),
        kv_cache.shape[1],
        max_seq_len,
        # HEADS, DIM, BLOCK_H, BLOCK_D, BLOCK_N, IS_FP8, NATIVE_FP8
        heads,
        dim,
        max(16, next_power_of_2(heads)),
        max(16, next_power_of_2(dim)),
        keys,
        is_fp8,
        has_native_fp8(query.device),
        _choose_dot_dtype(query.dtype),
    )
    return scores


@operator(sizes={"selected": "topk"})
def select_keys(scores: IndexScores, topk: int) -> Selected:
    """Return the positions of the largest scores of each token, in the order of positions."""
    check_select_keys(scores, topk)
    tokens, width = scores.shape
    selected = scores.new_full((tokens, topk), -1, dtype=torch.int32)
    taken = min(topk, width)
    if not tokens or not taken:
        return selected
    # step: leave out what has no score
    has_score = scores > -torch.inf
    scores = torch.where(has_score, scores, -torch.inf)
    # step: select the largest scores, and of equal ones the lowest positions
    least = scores.topk(taken, dim=1, sorted=False).values.amin(1, keepdim=True)
    above = scores > least
    equal = (scores == least) & has_score
    missing = taken - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    # step: return them in the order of positions
    position = torch.arange(width, dtype=torch.int32, device=scores.device)
    found = move_to_front(torch.where(chosen, position, -1))
    selected[:, :taken] = found[:, :taken]
    return selected


def _choose_dot_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype of products of queries with keys in FP8, which float16 holds."""
    if dtype in (torch.float8_e4m3fn, torch.float16):
        return tl.float16
    # products of bfloat16 are wrong in the interpreter
    is_exact = dtype == torch.bfloat16 and not INTERPRETED
    return tl.bfloat16 if is_exact else tl.float32


def _views(kv_cache: Tensor) -> IndexerCache:
    """Return a cache as kernels take it."""
    codes, scales = split_indexer_cache(kv_cache)
    block, slot, _ = codes.stride()
    return IndexerCache(codes, scales, block, slot, scales.stride(0))


def _reject_float64(name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.float64:
        raise NotImplementedError(
            f"{name} is torch.float64: expected float16, bfloat16 or float32; the reference"
            " takes float64"
        )

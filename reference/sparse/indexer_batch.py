"""Batches of the indexer: gathered keys of a chunk, rows per rank, drafts one by one.

Kernels that score gathered keys need no block table. The keys of some requests are copied one after
the other, and each row scores a range of them:

1. `build_prefill_chunk_metadata` returns the ranges of a chunk's rows.
2. `balanced_prefill_row_shard` gives ranks rows with equal work. Later rows of a prompt score more
   keys than earlier ones.
3. `prepare_uniform_decode` makes each drafted token a request of its own, for kernels that take
   one token per request.

`index_scores` needs none of them: it reads the cache by blocks, and takes any number of tokens.

Source: vLLM 0.33.
"""

import torch
from torch import Tensor

from ...contract.indexer_classes import IndexerPrefillChunkMetadata
from ...contract.kinds import HOST
from ...contract.shapes import BlockTable, StartLoc, TokenCounts
from ...contract.step_positions import step_positions
from ...validation import validated
from ...validation.indexer_batch import (
    check_prefill_chunk,
    check_row_shard,
    check_uniform_decode,
)


@validated(check_prefill_chunk)
def build_prefill_chunk_metadata(
    start_idx: int,
    end_idx: int,
    query_start_loc_cpu: StartLoc,
    seq_lens_cpu: TokenCounts,
    compress_ratio: int = 1,
    query_slice: slice | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    dcp_kv_cache_interleave_size: int = 1,
    device: torch.device | str = "cpu",
) -> IndexerPrefillChunkMetadata | None:
    """Return where the keys of some requests are gathered, and which of them each row scores.

    Args:
        start_idx, end_idx: First request of the chunk, and the end.
        query_start_loc_cpu: [reqs + 1] start of each request's new tokens, on the host.
        seq_lens_cpu: [reqs] tokens of each sequence, the new ones included.
        compress_ratio: Tokens per key. A token scores the keys that are complete at its position.
        query_slice: Optional. Rows of the chunk that are scored, counted from its first; an end
            past the last row is the last row. If None, all are.
        dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size: With decode context parallelism,
            ranks take turns to store this many tokens, a multiple of `compress_ratio`.
        device: Device of the tensors of the result.

    Returns:
        The metadata, or None if no request has a key.

    Raises:
        IndexError: The requests are not in the batch.
        ValueError: Lengths or ranks do not match, or a slice has a step or no valid bounds.
        TypeError: A tensor is not int32.

    Source:
        vLLM's function of that name (0.33), which also returns the rows of the block table.

    Example:
        Requests of 3 and 2 tokens, the last 2 and 1 of which are new.

        >>> chunk = build_prefill_chunk_metadata(
        ...     start_idx=0,
        ...     end_idx=2,
        ...     query_start_loc_cpu=torch.tensor([0, 2, 3], dtype=torch.int32),
        ...     seq_lens_cpu=torch.tensor([3, 2], dtype=torch.int32),
        ... )
        >>> chunk.cu_seqlen_ks.tolist(), chunk.cu_seqlen_ke.tolist()
        ([0, 0, 3], [2, 3, 5])
        >>> chunk.token_to_seq.tolist()
        [0, 0, 0, 1, 1]
    """
    starts = query_start_loc_cpu[start_idx : end_idx + 1].long()
    lens, first = seq_lens_cpu[start_idx:end_idx].long(), int(starts[0])
    # step: count the keys of each request, on each rank
    keys = lens // compress_ratio
    if not keys.sum():
        return None
    interleave = max(dcp_kv_cache_interleave_size // compress_ratio, 1)
    rank_keys = _keys_of_ranks(keys, dcp_world_size, interleave)
    # step: place the keys of the requests one after the other
    cu_keys, cu_local = _starts_of(keys), _starts_of(rank_keys[:, dcp_rank])
    token_to_seq = torch.arange(len(keys), device=HOST).repeat_interleave(keys)
    # step: find the request and the position of each row of the slice
    tokens = int(starts[-1]) - first
    rows = range(tokens)[query_slice or slice(None)]
    req, position = step_positions(starts - first, lens, tokens)
    req, position = req[rows.start : rows.stop], position[rows.start : rows.stop]
    # step: count the keys that are complete at the position of a row
    complete = ((position + 1) // compress_ratio).clamp(min=0)
    complete = _keys_of_ranks(complete, dcp_world_size, interleave)[:, dcp_rank]
    return IndexerPrefillChunkMetadata(
        cu_seqlen_ks=cu_local[req].int().to(device),
        cu_seqlen_ke=(cu_local[req] + complete).int().to(device),
        cu_seq_lens=cu_keys.int().to(device),
        token_to_seq=token_to_seq.int().to(device),
        total_seq_lens=int(keys.sum()),
        max_seqlen_k=int(keys.max()),
        token_start=first + rows.start,
        token_end=first + rows.stop,
        num_reqs=len(keys),
        skip_kv_gather=rows.start > 0,
        local_cu_seq_lens=cu_local.int().to(device),
        local_total_seq_lens=int(cu_local[-1]),
        max_local_total_seq_lens=int(rank_keys.sum(0).max()),
    )


def _keys_of_ranks(keys: Tensor, ranks: int, interleave: int) -> Tensor:
    """Return how many of the first keys each rank stores: [..., ranks]."""
    turns, rest = keys // (interleave * ranks), keys % (interleave * ranks)
    rank = torch.arange(ranks, device=keys.device)
    own_rest = rest[..., None] - rank * interleave
    return turns[..., None] * interleave + own_rest.clamp(0, interleave)


def _starts_of(counts: Tensor) -> Tensor:
    """Return where each of several runs starts, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


@validated(check_row_shard)
def balanced_prefill_row_shard(
    seq_lens_cpu: TokenCounts,
    query_lens_cpu: TokenCounts,
    compress_ratio: int,
    tp_size: int,
    min_rows: int = 1,
) -> list[int] | None:
    """Return how many rows of a prefill each rank scores, so that all score about as many keys.

    A rank ends before the row with which the ranks so far would score more than their share. No
    rank scores more than its share and the keys of one row.

    Args:
        seq_lens_cpu: [reqs] tokens of each sequence, the new ones included, on the host.
        query_lens_cpu: [reqs] new tokens of each request.
        compress_ratio: Tokens per key.
        tp_size: Number of ranks.
        min_rows: Rows per rank below which a split is not worth its exchange.

    Returns:
        [ranks] rows of each rank, at least one, in the order of ranks. None if there is one rank,
        or fewer rows than `min_rows` per rank.

    Raises:
        ValueError: A number is out of range, or a request has more new tokens than tokens.
        TypeError: A tensor is not int32.

    Source:
        vLLM's function of that name (0.33).

    Example:
        Rows score 1, 2, 3, 4 and 5 keys, and the share of two ranks is 7.5.

        >>> balanced_prefill_row_shard(
        ...     seq_lens_cpu=torch.tensor([5], dtype=torch.int32),
        ...     query_lens_cpu=torch.tensor([5], dtype=torch.int32),
        ...     compress_ratio=1,
        ...     tp_size=2,
        ... )
        [3, 2]
    """
    rows = int(query_lens_cpu.sum())
    if tp_size == 1 or rows < min_rows * tp_size:
        return None
    # step: count the keys that the rows score
    _, position = step_positions(_starts_of(query_lens_cpu), seq_lens_cpu, rows)
    scored = ((position + 1) // compress_ratio).cumsum(0)
    # step: end each rank before the row that exceeds its share
    rank = torch.arange(1, tp_size, device=HOST)
    share = scored[-1] * rank
    end = torch.searchsorted(scored * tp_size, share, right=True)
    # step: give each rank a row at least
    end = (end - rank).clamp(min=0).cummax(0).values + rank
    end = end.minimum(rows - tp_size + rank)
    bounds = torch.cat([end.new_zeros(1), end, end.new_tensor([rows])])
    return bounds.diff().tolist()


@validated(check_uniform_decode)
def prepare_uniform_decode(
    seq_lens: TokenCounts, block_table: BlockTable, max_decode_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each new token of a decode as a request of its own.

    Args:
        seq_lens: [reqs] tokens of each sequence, the new ones included.
        block_table: [reqs, max_blocks].
        max_decode_len: New tokens of each request.

    Returns:
        [tokens] int32 keys that each token attends to, 0 where a request has fewer tokens than
        that; [tokens, max_blocks] int32 row of its request; and [tokens] int32 new tokens, 1.

    Raises:
        ValueError: Shapes or devices do not match, or `max_decode_len` is below 1.
        TypeError: A tensor is not int32.

    Source:
        vLLM's `PrepareUniformDecodeKernel` (0.33).

    Example:
        Two drafted tokens per request. The second request is padding.

        >>> lens, table, new = prepare_uniform_decode(
        ...     seq_lens=torch.tensor([5, 0], dtype=torch.int32),
        ...     block_table=torch.tensor([[7, 2], [0, 0]], dtype=torch.int32),
        ...     max_decode_len=2,
        ... )
        >>> lens.tolist(), table.tolist(), new.tolist()
        ([4, 5, 0, 0], [[7, 2], [7, 2], [0, 0], [0, 0]], [1, 1, 1, 1])
    """
    # step: count the keys up to each token
    later = torch.arange(
        max_decode_len - 1, -1, -1, dtype=torch.int32, device=seq_lens.device
    )
    lens = (seq_lens[:, None] - later).clamp(min=0).flatten()
    # step: repeat the rows of the requests
    table = block_table.repeat_interleave(max_decode_len, dim=0)
    return lens, table, torch.ones_like(lens)

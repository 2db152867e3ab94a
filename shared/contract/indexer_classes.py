"""The metadata of a chunk of prompts, whose keys the indexer gathers before it scores them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class IndexerPrefillChunkMetadata:
    """Where the gathered keys of a chunk are, and which of them each row scores.

    Keys are states of `compress_ratio` tokens. With context parallelism, ks and ke count the keys
    of this rank alone.

    Args:
        cu_seqlen_ks, cu_seqlen_ke: [rows] int32 first key of a row, and the end of its keys.
        cu_seq_lens: [reqs + 1] int32 where each request's keys start.
        token_to_seq: [total_seq_lens] int32 request of each key, counted from the chunk's first.
        total_seq_lens: Keys of all requests.
        max_seqlen_k: Keys of the longest sequence.
        token_start, token_end: Rows of the step that the chunk scores.
        num_reqs: Requests of the chunk.
        skip_kv_gather: Whether an earlier chunk has gathered the same keys.
        local_cu_seq_lens: [reqs + 1] int32 where each request's keys start on this rank.
        local_total_seq_lens, max_local_total_seq_lens: Keys of all requests on this rank, and on
            the rank that has most of them.
    """

    cu_seqlen_ks: Tensor
    cu_seqlen_ke: Tensor
    cu_seq_lens: Tensor
    token_to_seq: Tensor
    total_seq_lens: int
    max_seqlen_k: int
    token_start: int
    token_end: int
    num_reqs: int
    skip_kv_gather: bool
    local_cu_seq_lens: Tensor
    local_total_seq_lens: int
    max_local_total_seq_lens: int

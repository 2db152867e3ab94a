"""Batches of the indexer: gathered keys of a chunk, rows per rank, drafts one by one."""

from ...reference.sparse.indexer_batch import (
    balanced_prefill_row_shard,
    build_prefill_chunk_metadata,
    prepare_uniform_decode,
)

__all__ = [
    "balanced_prefill_row_shard",
    "build_prefill_chunk_metadata",
    "prepare_uniform_decode",
]

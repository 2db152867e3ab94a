"""The batch of one rank: requests whose queries attend to the same keys, and the keys' slots."""

import torch

from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.parallel import KeySplits, RankBatch
from ...contract.shapes import BlockTable, KeyCache, StartLoc, TokenCounts
from ..parallel.key_splits import offsets_of_runs, stored_splits


def make_rank_batch(
    key_cache: KeyCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    num_tokens: int,
    max_seq_len: int,
    causal: bool,
    max_query_len: int,
    keeps_requests: bool,
    splits: KeySplits,
    of_rank: tuple[int, int, int],
) -> RankBatch:
    """Return the batch of a rank, each slot a block of its own.

    Args:
        key_cache, block_table, query_start_loc, seq_lens: Those of `DecodeContextParallel.prepare`.
        num_tokens, max_seq_len, causal, max_query_len: Likewise.
        keeps_requests: Whether the requests are those of the step. If not, each new token is one.
        splits: The splits of every sequence's keys.
        of_rank: Number of ranks, this rank, interleave size.
    """
    world_size, rank, interleave_size = of_rank
    block_size = key_cache.shape[1]
    own = stored_splits(splits, world_size, rank, interleave_size)
    runs = -(-max_seq_len // (splits.run * splits.count)) + 1
    requests = len(block_table) if keeps_requests else num_tokens
    slots = torch.zeros(
        len(own), requests, runs * splits.run, dtype=torch.int32, device=HOST
    )
    lens = torch.zeros(len(own), requests, dtype=torch.int32, device=HOST)
    slot_mapping = torch.full(
        (num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=HOST
    )
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        row = block_table[req].to(HOST)
        tokens = range(starts[req], starts[req + 1])
        for request in [req] if keeps_requests else tokens:
            # step: find each token's position
            position = seq_len - starts[req + 1] + request
            up_to = position + 1 if causal else seq_len
            for index, split in enumerate(own):
                # step: find the slots of the split's keys
                first = offsets_of_runs(
                    splits, split, runs, world_size, interleave_size
                )
                keys = (
                    first[:, None] + torch.arange(splits.run, device=HOST)
                ).flatten()
                # step: count its keys up to that position
                positions = (
                    torch.arange(up_to, device=HOST) // splits.run % splits.count
                )
                count = int((positions == split).sum())
                lens[index, request] = count
                keys = keys[:count]
                block = row[keys // block_size]
                slots[index, request, :count] = block * block_size + keys % block_size
                # step: find the new token's slot if this rank stores it
                if causal and position // splits.run % splits.count == split:
                    slot_mapping[request] = slots[index, request, count - 1]
    device = block_table.device
    start_loc = torch.arange(len(own) * requests + 1, dtype=torch.int32, device=device)
    return RankBatch(
        num_tokens=num_tokens,
        splits=len(own),
        block_table=slots.flatten(0, 1).to(device),
        query_start_loc=query_start_loc if keeps_requests else start_loc,
        seq_lens=lens.flatten().to(device),
        max_query_len=max_query_len if keeps_requests else 1,
        max_seq_len=runs * splits.run,
        slot_mapping=slot_mapping.to(device),
        is_token=torch.arange(num_tokens, device=device) < starts[-1],
        slots_per_block=1,
    )

"""The batch of one rank, computed on the device: requests whose queries attend to the same keys."""

import torch
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ...contract.parallel import RankBatch
from ...validation.cascade import count_share
from .rank_splits import RankSplits


def make_rank_batch(
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    max_seq_len: int,
    causal: bool,
    max_query_len: int,
    splits: RankSplits,
    requests_to: Tensor,
) -> RankBatch:
    """Return the batch of a rank. The host does not wait.

    Args:
        key_cache, block_table, query_start_loc, seq_lens: Those of `DecodeContextParallel.prepare`.
        num_tokens, max_seq_len, causal, max_query_len: Likewise.
        splits: The splits that this rank stores.
        requests_to: [requests + 1] int32, 0 and the numbers up to that of the requests.
    """
    if not len(block_table):
        return _empty_batch(num_tokens, splits, requests_to)
    token = requests_to[:num_tokens]
    starts = query_start_loc.contiguous()
    max_share = count_share(
        max_seq_len, splits.splits.count, splits.own[0], splits.splits.run
    )
    if not causal and not splits.is_fixed:
        # the queries of a request attend to the same keys
        return RankBatch(
            num_tokens=num_tokens,
            splits=1,
            block_table=block_table,
            query_start_loc=starts,
            seq_lens=splits.lens(seq_lens),
            max_query_len=max_query_len,
            max_seq_len=max_share,
            slot_mapping=torch.full_like(token, PAD_SLOT_ID, dtype=torch.int64),
            is_token=token < starts[-1],
            slots_per_block=key_cache.shape[1],
        )
    # step: find each token's position
    req = torch.searchsorted(starts[1:], token, right=True)
    is_token = token < starts[-1]
    req = req.clamp(max=len(block_table) - 1)
    seq_len = seq_lens[req]
    position = torch.where(is_token, seq_len - starts[req + 1] + token, 0)
    up_to = torch.where(is_token, position + 1 if causal else seq_len, 0)
    rows = block_table[req]
    # step: find the slots of the split's keys
    table, per_block = splits.tables(rows, key_cache)
    # step: count its keys up to that position
    lens = splits.lens(up_to)
    # step: find the new token's slot if this rank stores it
    slots = torch.full_like(position, PAD_SLOT_ID, dtype=torch.int64)
    if causal and rows.shape[1]:
        slots = splits.slots(rows, position, key_cache.shape[1])
    requests = len(splits.own) * num_tokens
    return RankBatch(
        num_tokens=num_tokens,
        splits=len(splits.own),
        block_table=table,
        query_start_loc=requests_to[: requests + 1],
        seq_lens=lens,
        max_query_len=1,
        max_seq_len=max_share,
        slot_mapping=torch.where(is_token, slots, PAD_SLOT_ID),
        is_token=is_token,
        slots_per_block=per_block,
    )


def _empty_batch(num_tokens: int, splits: RankSplits, requests_to: Tensor) -> RankBatch:
    """Return the batch of a step without requests, in which all tokens are padding."""
    requests = len(splits.own) * num_tokens
    nothing = torch.zeros(requests, 0, dtype=torch.int32, device=splits.device)
    slots = torch.full((num_tokens,), PAD_SLOT_ID, device=splits.device)
    return RankBatch(
        num_tokens=num_tokens,
        splits=len(splits.own),
        block_table=nothing,
        query_start_loc=requests_to[: requests + 1],
        seq_lens=torch.zeros(requests, dtype=torch.int32, device=splits.device),
        max_query_len=1,
        max_seq_len=0,
        slot_mapping=slots,
        is_token=slots != PAD_SLOT_ID,
        slots_per_block=splits.splits.run,
    )

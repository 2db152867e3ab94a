"""New keys of a step's prompts, in blocks that a rank does not share.

Ranks that share keys store a part of a prompt's new keys each. So that its new tokens can attend to
each other on every rank, all of them are also written into these blocks, in the dtype of the cache.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 16


@dataclass(frozen=True)
class NewBlocks:
    """Where a step's new keys are in these blocks, for all layers. A request has blocks of its own.

    Args:
        slot_mapping: [tokens] int64 slot of each new token; -1 for padding.
        block_table: [reqs, max_blocks] int32. Entries past the end of a request are not read.
        lens: [reqs] int32 new keys of each request.

    Example:
        Two requests of 20 and 3 new tokens have the blocks 0 and 1, and 2.
    """

    slot_mapping: Tensor
    block_table: Tensor
    lens: Tensor


def count_blocks(max_tokens: int, max_reqs: int) -> int:
    """Return the blocks that any step within these bounds fits in."""
    return max_tokens // BLOCK_SIZE + max_reqs


def find_new_blocks(metadata: Any) -> NewBlocks:
    """Return the blocks of a step. The host does not wait.

    Args:
        metadata: the `PagetwinMetadata` of the step.
    """
    starts, device = metadata.query_start_loc, metadata.query_start_loc.device
    reqs = len(starts) - 1
    # a block more than it fills is left to each request before, so blocks never overlap
    first = starts[:-1] // BLOCK_SIZE + torch.arange(reqs, device=device)
    width = -(-metadata.max_query_len // BLOCK_SIZE)
    table = first[:, None] + torch.arange(width, device=device)
    token = torch.arange(metadata.num_actual_tokens, dtype=starts.dtype, device=device)
    req = torch.searchsorted(starts[1:], token, right=True).clamp(max=reqs - 1)
    slots = first[req] * BLOCK_SIZE + token - starts[req]
    return NewBlocks(
        torch.where(token < starts[-1], slots, -1).long(),
        table.to(torch.int32),
        starts.diff(),
    )

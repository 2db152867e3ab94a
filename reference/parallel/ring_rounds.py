"""Rounds of a ring: the keys that a rank's chunks attend to while each rank's share is held."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract.kinds import HOST
from ...contract.parallel import RingRound, RingShare
from .prefill_chunks import zigzag_chunks


def list_rounds(
    query_lens: Sequence[int],
    world_size: int,
    rank: int,
    block_size: int,
    device: torch.device | str,
) -> RingShare:
    """Return the chunks that a rank computes, and which keys they attend to in each round.

    The share of a rank has its two chunks of each prompt, one after the other, from a new block
    on. Chunks of ranks are in zig-zag order, so there are three cases. In round 0 a rank holds its
    own share. The share of a rank before it precedes both of its chunks with its first chunk. The
    share of a rank after it precedes only the second chunk, with both chunks.

    Args:
        query_lens: Tokens of each prompt, all of them new.
        block_size: Slots in a block of a share.
    """
    chunks = [
        [zigzag_chunks(query_len, world_size, owner) for query_len in query_lens]
        for owner in range(world_size)
    ]
    blocks = [
        [-(-(len(front) + len(back)) // block_size) for front, back in of_rank]
        for of_rank in chunks
    ]
    tokens, slots, query_counts = [_numbers(0, 0)], [_numbers(0, 0)], [0]
    for req, (front, back) in enumerate(chunks[rank]):
        start = sum(query_lens[:req])
        for chunk in (front, back):
            tokens.append(_numbers(start + chunk.start, len(chunk)))
            query_counts.append(len(chunk))
        first = sum(blocks[rank][:req]) * block_size
        slots.append(_numbers(first, len(front) + len(back)))
    rounds = []
    for number in range(world_size):
        owner = (rank - number) % world_size
        lens = []
        for front, back in chunks[owner]:
            lens.append(len(front) if owner <= rank else 0)
            lens.append(len(front) + (len(back) if owner >= rank else 0))
        rounds.append(
            RingRound(
                block_table=_table(blocks[owner]).to(device),
                seq_lens=torch.tensor(lens, dtype=torch.int32, device=HOST).to(device),
                max_seq_len=max(lens, default=0),
                causal=number == 0,
            )
        )
    starts = torch.tensor(query_counts, device=HOST).cumsum(0).to(torch.int32)
    return RingShare(
        tokens=torch.cat(tokens).to(device),
        slots=torch.cat(slots).to(device),
        num_blocks=max(sum(of_rank) for of_rank in blocks),
        query_start_loc=starts.to(device),
        max_query_len=max(query_counts),
        rounds=tuple(rounds),
    )


def _numbers(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count, dtype=torch.int64, device=HOST)


def _table(blocks: list[int]) -> Tensor:
    """Return the blocks of each prompt in a share, the same for both chunks of a prompt."""
    width = max(blocks, default=0)
    table = torch.zeros(2 * len(blocks), width, dtype=torch.int32, device=HOST)
    for req, count in enumerate(blocks):
        first = sum(blocks[:req])
        table[2 * req : 2 * req + 2, :count] = _numbers(first, count)
    return table

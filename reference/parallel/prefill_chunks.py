"""Chunks of prompts in zig-zag order, which give each rank the same work."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract.kinds import HOST
from ...contract.parallel import PrefillShare


def zigzag_chunks(query_len: int, world_size: int, rank: int) -> list[range]:
    """Return the two chunks of a prompt that a rank computes, as positions.

    A prompt has two chunks per rank. A later chunk attends to more keys, so rank r gets chunk r
    from the front and chunk r from the back.

    Example:
        >>> [zigzag_chunks(8, world_size=2, rank=rank) for rank in (0, 1)]
        [[range(0, 2), range(6, 8)], [range(2, 4), range(4, 6)]]
    """
    chunks = 2 * world_size
    bounds = [index * query_len // chunks for index in range(chunks + 1)]
    return [
        range(bounds[index], bounds[index + 1]) for index in (rank, chunks - 1 - rank)
    ]


def share_prompts(
    query_lens: Sequence[int],
    world_size: int,
    rank: int,
    block_size: int,
    device: torch.device | str,
) -> PrefillShare:
    """Return the chunks that a rank computes, and where their keys are among the gathered ones.

    Args:
        query_lens: Tokens of each prompt, all of them new.
        block_size: Slots in a block of the gathered keys.
    """
    starts = [sum(query_lens[:req]) for req in range(len(query_lens))]
    # the tokens of each rank, chunk after chunk, and each token's row among the gathered ones
    of_ranks: list[list[int]] = [
        [
            start + position
            for start, query_len in zip(starts, query_lens, strict=True)
            for chunk in zigzag_chunks(query_len, world_size, owner)
            for position in chunk
        ]
        for owner in range(world_size)
    ]
    max_tokens = max(len(tokens) for tokens in of_ranks)
    rows = torch.zeros(sum(query_lens), dtype=torch.int64, device=HOST)
    for owner, tokens in enumerate(of_ranks):
        rows[tokens] = torch.arange(len(tokens), device=HOST) + owner * max_tokens
    # each prompt begins in a block of its own
    blocks = [-(-query_len // block_size) for query_len in query_lens]
    slots = torch.zeros(sum(blocks) * block_size, dtype=torch.int64, device=HOST)
    width = max(blocks, default=0)
    table = torch.zeros(2 * len(query_lens), width, dtype=torch.int32, device=HOST)
    query_counts, ends = [], []
    for req, query_len in enumerate(query_lens):
        first = sum(blocks[:req])
        begin = first * block_size
        slots[begin : begin + query_len] = rows[starts[req] : starts[req] + query_len]
        for half, chunk in enumerate(zigzag_chunks(query_len, world_size, rank)):
            ids = torch.arange(
                first, first + blocks[req], dtype=torch.int32, device=HOST
            )
            table[2 * req + half, : blocks[req]] = ids
            query_counts.append(len(chunk))
            ends.append(chunk.stop)

    def on_device(numbers: Tensor) -> Tensor:
        return numbers.to(device)

    query_starts = (
        torch.tensor([0, *query_counts], device=HOST).cumsum(0).to(torch.int32)
    )
    return PrefillShare(
        tokens=on_device(torch.tensor(of_ranks[rank], dtype=torch.int64, device=HOST)),
        max_tokens=max_tokens,
        gathered_rows=on_device(slots),
        block_table=on_device(table),
        query_start_loc=on_device(query_starts),
        seq_lens=on_device(torch.tensor(ends, dtype=torch.int32, device=HOST)),
        max_query_len=max(query_counts, default=0),
        max_seq_len=max(ends, default=0),
    )

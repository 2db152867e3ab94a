"""Classes of parallel attention: fixed splits of the keys, and the batch of one rank."""

from dataclasses import dataclass

from .shapes import (
    BlockTable,
    Positions,
    SlotMapping,
    StartLoc,
    TokenCounts,
    TokenFlags,
)


@dataclass(frozen=True)
class KeySplits:
    """Fixed splits of every sequence's keys, whose partial results are exchanged.

    Position p belongs to split `p // run % count`, so a key's split depends on its position alone.
    If `run` divides the interleave size, and interleave size * ranks divides run * count, then all
    keys of a split are stored on one rank. So the same partial results are computed on any such
    number of ranks.

    Args:
        count: Number of splits. Each is a partial result of every row.
        run: Consecutive positions of one split.

    Example:
        Four splits of runs of two: positions 0 and 1 belong to split 0, positions 8 and 9 as well.

        >>> splits = KeySplits(count=4, run=2)
        >>> [position // splits.run % splits.count for position in (0, 1, 2, 7, 8, 9)]
        [0, 0, 1, 3, 0, 0]
    """

    count: int = 128
    run: int = 1


@dataclass(frozen=True)
class RankBatch:
    """One step on one rank, which all layers share: requests that need no mask.

    All queries of a request attend to the same keys. So in a causal step each new token is a
    request of its own, once per split. In a step that is not causal and has no fixed splits, the
    requests are those of the step.

    Args:
        num_tokens: New tokens of the step, padding included.
        splits: Splits that this rank stores. One if the splits are the ranks.
        block_table: [requests, max_blocks] of each request, split after split.
        query_start_loc: [requests + 1] where each request's queries start.
        seq_lens: [requests] keys of each request.
        max_query_len: At least the number of queries of every request. A captured graph keeps
            this number and the next one, so they must hold for every replay.
        max_seq_len: At least every entry of `seq_lens`.
        slot_mapping: [tokens] the slot of each new token on this rank. PAD_SLOT_ID if another
            rank stores the token, and for padding.
        is_token: [tokens] False for padding.
        slots_per_block: Slots in a block of `block_table`. It may be a part of the cache's block.
    """

    num_tokens: int
    splits: int
    block_table: BlockTable
    query_start_loc: StartLoc
    seq_lens: TokenCounts
    max_query_len: int
    max_seq_len: int
    slot_mapping: SlotMapping
    is_token: TokenFlags
    slots_per_block: int


@dataclass(frozen=True)
class PrefillShare:
    """The chunks of one step's prompts that a rank computes.

    Args:
        tokens: [tokens] int64, indices of this rank's tokens among all new tokens of the step.
        max_tokens: The largest number of tokens of a rank.
        gathered_rows: [slots] int64, the row of each slot's key among the gathered keys, of which
            each rank has `max_tokens`. 0 for slots past the end of a prompt.
        block_table: [chunks, max_blocks] blocks of `gathered_rows`, per chunk of this rank.
        query_start_loc: [chunks + 1] where each chunk's queries start.
        seq_lens: [chunks] keys up to the end of each chunk.
        max_query_len, max_seq_len: The largest of these.
    """

    tokens: Positions
    max_tokens: int
    gathered_rows: SlotMapping
    block_table: BlockTable
    query_start_loc: StartLoc
    seq_lens: TokenCounts
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class RingRound:
    """The keys of one round of a ring: those of one rank that this rank's chunks attend to.

    Args:
        block_table: [chunks, max_blocks] blocks of the held share, per chunk of this rank.
        seq_lens: [chunks] keys that each chunk attends to in this round. 0 if all of them are
            past the end of the chunk.
        max_seq_len: The largest of these. If 0, nothing is attended to in this round.
        causal: Whether the keys are those of the chunks themselves. If not, they all precede them.
    """

    block_table: BlockTable
    seq_lens: TokenCounts
    max_seq_len: int
    causal: bool


@dataclass(frozen=True)
class RingShare:
    """The chunks of one step's prompts that a rank computes, and the keys of each round.

    Args:
        tokens: [tokens] int64, indices of this rank's tokens among all new tokens of the step.
        slots: [tokens] int64, the slot of each of them in the share that is sent.
        num_blocks: Blocks of a share, the same number on all ranks.
        query_start_loc: [chunks + 1] where each chunk's queries start.
        max_query_len: The longest chunk.
        rounds: One per rank. Round i has the keys of rank (rank - i) % ranks.
    """

    tokens: Positions
    slots: SlotMapping
    num_blocks: int
    query_start_loc: StartLoc
    max_query_len: int
    rounds: tuple[RingRound, ...]


@dataclass(frozen=True)
class RankHeads:
    """The heads of one rank under tensor parallelism.

    Args:
        query_start, query_stop: Its query heads among all query heads.
        kv_start, kv_stop: The KV heads that they read, among all KV heads.
        copies: Ranks that store the same KV heads. Above 1 if there are more ranks than KV heads.
    """

    query_start: int
    query_stop: int
    kv_start: int
    kv_stop: int
    copies: int

"""What does a step consist of, apart from its numbers?

The scheduler says who computes how much. A batch is that decision in the order in which it runs,
the requests that decode first: lists of plain integers, from which each twin makes its own
metadata. A request keeps its row from step to step, as in an engine, whose rows are tensors that
nobody wants to move; so it is the rows left behind by finished requests that bring disorder.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """One step's requests.

    Args:
        scheduled_tokens: [reqs] new tokens of each request, in the order of the rows.
        order: [reqs] which of them stands at each place of the batch.
        query_lens: [reqs] new tokens, in the order of the batch.
        num_computed_tokens: [reqs] tokens that were in the cache before.
        block_rows: [reqs] block ids.
        block_size: slots in a block.
    """

    scheduled_tokens: list[int]
    order: list[int]
    query_lens: list[int]
    num_computed_tokens: list[int]
    block_rows: list[list[int]]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def used_blocks(self) -> list[int]:
        """Return every block of the batch's rows once, by id."""
        return sorted({block_id for row in self.block_rows for block_id in row})

    def request_of(self, token: int) -> tuple[int, int]:
        """Return the place in the batch and the position in its sequence of a new token."""
        for place, query_len in enumerate(self.query_lens):
            if token < query_len:
                return place, self.num_computed_tokens[place] + token
            token -= query_len
        raise IndexError(f"the batch has {self.num_tokens} new tokens")


def keep_rows(rows: Sequence[int], scheduled: Sequence[int]) -> list[int]:
    """Return which request stands in each row of the next step.

    The row of a request that left is filled by the last one; new requests come behind.

    Args:
        rows: the requests of the last step, by number.
        scheduled: the requests of this one.

    Source:
        vLLM's `InputBatch.condense`.

    Example:
        >>> keep_rows([4, 5, 6, 7], scheduled=[5, 6, 7, 8])
        [7, 5, 6, 8]
    """
    kept, place = list(rows), 0
    while place < len(kept):
        if kept[place] in scheduled:
            place += 1
            continue
        last = kept.pop()
        if place < len(kept):
            kept[place] = last
    return kept + [request for request in scheduled if request not in kept]


def make_batch(
    scheduled_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    order: Sequence[int],
    block_size: int,
) -> Batch:
    """Return the batch that has the requests of the rows in that order."""
    return Batch(
        scheduled_tokens=list(scheduled_tokens),
        order=list(order),
        query_lens=[scheduled_tokens[place] for place in order],
        num_computed_tokens=[num_computed_tokens[place] for place in order],
        block_rows=[list(block_rows[place]) for place in order],
        block_size=block_size,
    )

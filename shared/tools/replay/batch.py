"""The batch of one replay step, as plain integers from which each twin builds its own metadata.

The scheduler decides which request computes how many tokens. A batch holds that decision in the
order of execution: decodes first. A request keeps its batch row from step to step, as in an engine.
When a request finishes, the last row moves into the gap, so rows do not stay in order of arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplayBatch:
    """The requests of one step.

    Args:
        scheduled_tokens: [reqs] new tokens of each request, in the order of the rows before
            reordering.
        order: [reqs] the row at each index of the batch.
        query_lens: [reqs] new tokens, in the order of the batch.
        num_computed_tokens: [reqs] tokens that were in the cache before the step.
        block_rows: [reqs] block ids of each request.
        block_size: slots per block.
    """

    scheduled_tokens: list[int]
    order: list[int]
    query_lens: list[int]
    num_computed_tokens: list[int]
    block_rows: list[list[int]]
    block_size: int

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(self.query_lens)

    def used_blocks(self) -> list[int]:
        """Return every block of the batch's rows once, sorted by id."""
        return sorted({block_id for row in self.block_rows for block_id in row})

    def request_of(self, token: int) -> tuple[int, int]:
        """Return the batch index of a new token's request, and the token's position in it."""
        for index, query_len in enumerate(self.query_lens):
            if token < query_len:
                return index, self.num_computed_tokens[index] + token
            token -= query_len
        raise IndexError(f"the batch has {self.num_tokens} new tokens")


def keep_rows(rows: Sequence[int], scheduled: Sequence[int]) -> list[int]:
    """Return the request of each batch row of the next step.

    The last row moves into the row of a request that has left. New requests are appended.

    Args:
        rows: the requests of the last step, by number.
        scheduled: the requests of this step.

    Source:
        vLLM's `InputBatch.condense`.

    Example:
        >>> keep_rows([4, 5, 6, 7], scheduled=[5, 6, 7, 8])
        [7, 5, 6, 8]
    """
    kept, index = list(rows), 0
    while index < len(kept):
        if kept[index] in scheduled:
            index += 1
            continue
        last = kept.pop()
        if index < len(kept):
            kept[index] = last
    return kept + [request for request in scheduled if request not in kept]


def make_batch(
    scheduled_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_rows: Sequence[Sequence[int]],
    order: Sequence[int],
    block_size: int,
) -> ReplayBatch:
    """Return the batch that has the requests of the rows in the given order."""
    return ReplayBatch(
        scheduled_tokens=list(scheduled_tokens),
        order=list(order),
        query_lens=[scheduled_tokens[row] for row in order],
        num_computed_tokens=[num_computed_tokens[row] for row in order],
        block_rows=[list(block_rows[row]) for row in order],
        block_size=block_size,
    )

"""Scheduled rows: the rows of a step as the scheduler gave them, compared with its block table."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from ..findings import Corruption
from ..step import HostStep, Integers
from .row_table import RowTable


class ScheduledRow(NamedTuple):
    """What the scheduler decided about one request of a step, in one group of layers.

    Args:
        request_id: the request.
        num_computed_tokens: tokens that are in the cache before the step.
        num_scheduled_tokens: new tokens of the step.
        block_ids: the request's whole row, in sequence order. A tuple is not compared again while
            it is the same object.
    """

    request_id: Hashable
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[int]

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence after the step's cache write."""
        return self.num_computed_tokens + self.num_scheduled_tokens


class ScheduledRows:
    """The rows of one step by content, to be compared with its block table.

    Args:
        rows: the requests of the step.
        lines: [reqs] the line of each in the table.
        table: the ledger's table.
        block_size: slots per block.
        are_own: whether no block that the step writes has another holder.
    """

    def __init__(
        self,
        rows: tuple[ScheduledRow, ...],
        lines: Integers,
        table: RowTable,
        block_size: int,
        are_own: bool,
    ) -> None:
        self._rows = rows
        self._lines, self._table = lines, table
        self.block_size, self._are_own = block_size, are_own

    def are_own(self, num_blocks: int | None) -> bool:
        """Return whether no written block has another holder, and all are blocks of the cache.

        Args:
            num_blocks: Optional. Blocks in the cache. If None, any number is one of a block.
        """
        table = self._table
        is_inside = num_blocks is None or table.largest < num_blocks
        return self._are_own and table.smallest >= 0 and is_inside

    def match(self, step: HostStep) -> tuple[dict[int, Hashable], Corruption | None]:
        """Return the request of each row of the batch, and the first row that is not one.

        Rows and requests are matched by their lengths and blocks, because engines order them
        differently.

        Args:
            step: the metadata of the step.
        """
        computed = np.array([row[1] for row in self._rows], dtype=np.int64)
        new = np.array([row[2] for row in self._rows], dtype=np.int64)
        index = self._table.find(self._lines, new, computed + new, step)
        if index is None:
            return self._match_each(step)
        rows = np.flatnonzero(step.query_lens > 0).tolist()
        requests = [self._rows[place].request_id for place in index.tolist()]
        return dict(zip(rows, requests, strict=True)), None

    def _match_each(
        self, step: HostStep
    ) -> tuple[dict[int, Hashable], Corruption | None]:
        """Return the same as `match`, row by row, for steps in which a row is wrong."""
        by_content: defaultdict[tuple[int, int, bytes], list[Hashable]]
        by_content = defaultdict(list)
        for scheduled in self._rows:
            blocks = np.asarray(scheduled.block_ids, dtype=np.int32)
            key = (
                scheduled.num_scheduled_tokens,
                scheduled.seq_len,
                self._used(blocks, scheduled),
            )
            by_content[key].append(scheduled.request_id)
        names: dict[int, Hashable] = {}
        strangers = []
        query_lens = step.query_lens
        for row in np.flatnonzero(query_lens > 0).tolist():
            content = step.blocks_of(row).astype(np.int32).tobytes()
            key = (int(query_lens[row]), int(step.seq_lens[row]), content)
            found = by_content.get(key)
            if found:
                names[row] = found.pop()
            else:
                strangers.append(row)
        if not strangers:
            return names, None
        rest = [request_id for found in by_content.values() for request_id in found]
        return names, self._describe(step, strangers[0], rest)

    def _used(self, blocks: Integers, row: ScheduledRow) -> bytes:
        return blocks[: -(-row.seq_len // self.block_size)].tobytes()

    def _describe(
        self, step: HostStep, row: int, unmatched: Sequence[Hashable]
    ) -> Corruption:
        """Return the sentence about a row that no scheduled request has."""
        found = step.blocks_of(row)
        lengths = (int(step.query_lens[row]), int(step.seq_lens[row]))
        for scheduled in self._rows:
            if scheduled.request_id not in unmatched:
                continue
            if (scheduled.num_scheduled_tokens, scheduled.seq_len) != lengths:
                continue
            given = np.asarray(scheduled.block_ids[: len(found)], dtype=np.int64)
            differs = np.flatnonzero(found[: len(given)] != given)
            column = int(differs[0]) if differs.size else len(given)
            expected = int(given[column]) if column < len(given) else "no further block"
            return Corruption(
                "block table",
                f"entry {column} of its block-table row is block {int(found[column])}:"
                f" expected {expected}, which the scheduler gave it",
                row,
                scheduled.request_id,
                {"kind": "block table", "given": given.tolist()},
            )
        return Corruption(
            "block table",
            f"a request with {lengths[0]} new tokens and {lengths[1]} tokens is in the"
            " batch: expected only requests that the scheduler chose",
            row,
        )

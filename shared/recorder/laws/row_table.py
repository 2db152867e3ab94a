"""Row table: the blocks of all requests as one array, to be compared with a step's rows at once."""

from collections.abc import Hashable, Sequence

import numpy as np

from ..step import HostStep, Integers


class RowTable:
    """The scheduler's rows, one line per request.

    A line is not used again before `reuse`, because the metadata of a step are checked when the
    scheduler has already decided about the next one.
    """

    def __init__(self) -> None:
        self._blocks = np.full((0, 0), -1, dtype=np.int32)
        self._line: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._removed: list[int] = []
        self._order: Integers = np.zeros(0, dtype=np.int64)
        """What `find` returned last."""
        self.smallest, self.largest = 0, -1
        """The smallest block id so far, at most 0, and the largest one."""

    def append(
        self, request_id: Hashable, column: int, block_ids: Sequence[int]
    ) -> None:
        """Write blocks to a request's line, from a column on."""
        if request_id not in self._line:
            if not self._free:
                self._grow(lines=max(8, 2 * len(self._blocks)))
            line = self._line[request_id] = self._free.pop()
            self._blocks[line] = -1
        last = column + len(block_ids)
        if last > self._blocks.shape[1]:
            self._grow(columns=max(last, 2 * self._blocks.shape[1]))
        self._blocks[self._line[request_id], column:last] = block_ids
        self.smallest = min((self.smallest, *block_ids))
        self.largest = max((self.largest, *block_ids))

    def remove(self, request_id: Hashable) -> None:
        """Forget a request. Its line keeps its blocks until `reuse`."""
        line = self._line.pop(request_id, None)
        if line is not None:
            self._removed.append(line)

    def reuse(self) -> None:
        """Let new requests have the lines of those that were removed."""
        self._free += self._removed
        self._removed = []

    def lines_of(self, request_ids: Sequence[Hashable]) -> Integers:
        """Return the line of each request."""
        return np.array(
            [self._line[request_id] for request_id in request_ids], dtype=np.int64
        )

    def _grow(self, lines: int = 0, columns: int = 0) -> None:
        before, (had, width) = self._blocks, self._blocks.shape
        shape = (max(lines, had), max(columns, width))
        self._blocks = np.full(shape, -1, dtype=np.int32)
        self._blocks[:had, :width] = before
        self._free += range(had, shape[0])

    def find(
        self, lines: Integers, new_tokens: Integers, seq_lens: Integers, step: HostStep
    ) -> Integers | None:
        """Return which of the scheduled requests each row of a step is.

        The last block of a request is one that it writes, so no other request has it.

        Args:
            lines, new_tokens, seq_lens: [reqs] line, new tokens and length of each request.
            step: the metadata of the step.

        Returns:
            [rows] indices into `lines`, for the rows with new tokens. None if lengths or blocks of
            any row are not those of a request, or if two rows are those of the same request.
        """
        rows = np.flatnonzero(step.query_lens > 0)
        lens = step.seq_lens[rows]
        if not len(rows) or len(rows) != len(lines) or lens.min() < 1:
            return None
        last, given_last = (lens - 1) // step.block_size, (seq_lens - 1)
        given_last //= step.block_size
        width = int(max(last.max(), given_last.max())) + 1
        if width > min(step.block_table.shape[1], self._blocks.shape[1]):
            return None
        table, is_used = step.block_table[:, :width], np.arange(width) <= last[:, None]
        if len(rows) < len(table):
            table = table[rows]
        new_lens = step.query_lens[rows]

        def is_equal(index: Integers) -> bool:
            return (
                bool((seq_lens[index] == lens).all())
                and bool((new_tokens[index] == new_lens).all())
                and not ((self._blocks[lines[index], :width] != table) & is_used).any()
            )

        # engines keep the order of requests from step to step
        if len(self._order) == len(rows) and is_equal(self._order):
            return self._order
        given = self._blocks[lines, given_last]
        order = np.argsort(given)
        written = table[np.arange(len(rows)), last]
        place = np.searchsorted(given, written, sorter=order)
        index: Integers = order[np.minimum(place, len(order) - 1)]
        if len(set(index.tolist())) < len(index) or not is_equal(index):
            return None
        self._order = index
        return index

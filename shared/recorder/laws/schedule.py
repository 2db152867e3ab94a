"""Ledger: the blocks that the scheduler gave to each request, and the laws that follow from them.

A block table that is wrong but consistent with its own slots cannot be found from one step's
metadata. The engine therefore tells the recorder what its scheduler decided. The ledger keeps its
own copy of each request's row, and compares the step's block table with it.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..findings import Corruption
from ..step import HostStep, Integers


@dataclass(frozen=True)
class ScheduledRow:
    """What the scheduler decided about one request of a step.

    Args:
        request_id: the request.
        num_computed_tokens: tokens that are in the cache before the step.
        num_scheduled_tokens: new tokens of the step.
        block_ids: the request's whole row, in sequence order.
    """

    request_id: Hashable
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[int]

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence after the step's cache write."""
        return self.num_computed_tokens + self.num_scheduled_tokens


@dataclass(frozen=True)
class Scheduled:
    """One step as the scheduler decided it.

    Args:
        rows: the requests of the step.
        appended: request, column and block of each entry that is new in a row.
    """

    rows: tuple[ScheduledRow, ...]
    appended: list[tuple[Hashable, int, int]]


class Ledger:
    """The blocks of each request, as the scheduler gave them.

    Args:
        block_size: slots per block.
        knows_all: whether the engine tells of every request that holds blocks, scheduled or not,
            and of every request that loses them. If False, only the requests of a step are
            compared with each other.
    """

    def __init__(self, block_size: int, knows_all: bool = True) -> None:
        self.block_size = block_size
        self.knows_all = knows_all
        self._holders: defaultdict[int, set[Hashable]] = defaultdict(set)
        self._rows: dict[Hashable, list[int]] = {}
        self._appended: list[tuple[Hashable, int, int]] = []

    def free(self, request_ids: Iterable[Hashable]) -> None:
        """Forget requests that finished or were preempted."""
        for request_id in request_ids:
            for block_id in self._rows.pop(request_id, ()):
                self._holders[block_id].discard(request_id)

    def schedule(self, rows: Sequence[ScheduledRow]) -> Corruption | None:
        """Take over a step's rows; return a violation if a written block has another holder.

        Args:
            rows: the requests of the step. A request that is not named keeps its blocks.
        """
        if not self.knows_all:
            self._holders.clear()
            self._rows.clear()
        self._appended = []
        for each in rows:
            before = self._rows.get(each.request_id)
            if each.block_ids != before:
                self._assign(each.request_id, list(each.block_ids), before or [])
        for each in rows:
            first = each.num_computed_tokens // self.block_size
            last = -(-each.seq_len // self.block_size)
            for block_id in self._rows[each.request_id][first:last]:
                if len(self._holders[block_id]) > 1:
                    return self._describe(each.request_id, block_id)
        return None

    def appended(self) -> list[tuple[Hashable, int, int]]:
        """Return request, column and block of each entry that the last `schedule` added."""
        return self._appended

    def _describe(self, writer: Hashable, block_id: int) -> Corruption:
        others = self._holders[block_id] - {writer}
        other = sorted(others, key=str)[0]
        return Corruption(
            "block ownership",
            f"block {block_id} was given to request {writer!r}, which writes to it in this"
            f" step, while request {other!r} holds it: expected a block that only the"
            " writer holds",
            request_id=other,
            evidence={
                "kind": "ownership",
                "block": block_id,
                "rows": [self._rows[writer], self._rows[other]],
            },
        )

    def _assign(self, request_id: Hashable, row: list[int], before: list[int]) -> None:
        if row[: len(before)] != before:
            for block_id in before:
                self._holders[block_id].discard(request_id)
            before = []
        for column in range(len(before), len(row)):
            self._holders[row[column]].add(request_id)
            self._appended.append((request_id, column, row[column]))
        self._rows[request_id] = row


class ScheduledRows:
    """The rows of one step by content, to be compared with its block table.

    Args:
        rows: the requests of the step.
        block_size: slots per block.
    """

    def __init__(self, rows: Sequence[ScheduledRow], block_size: int) -> None:
        self._rows = {each.request_id: each for each in rows}
        self._block_size = block_size

    def match(self, step: HostStep) -> tuple[dict[int, Hashable], Corruption | None]:
        """Return the request of each row of the batch, and the first row that is not one.

        Rows and requests are matched by their lengths and blocks, because engines order them
        differently.

        Args:
            step: the metadata of the step.
        """
        by_content: defaultdict[tuple[int, int, bytes], list[Hashable]]
        by_content = defaultdict(list)
        for each in self._rows.values():
            blocks = np.asarray(each.block_ids, dtype=np.int32)
            key = (each.num_scheduled_tokens, each.seq_len, self._used(blocks, each))
            by_content[key].append(each.request_id)
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
        rest = [each for found in by_content.values() for each in found]
        return names, self._describe(step, strangers[0], rest)

    def _used(self, blocks: Integers, row: ScheduledRow) -> bytes:
        return blocks[: -(-row.seq_len // self._block_size)].tobytes()

    def _describe(
        self, step: HostStep, row: int, unmatched: Sequence[Hashable]
    ) -> Corruption:
        """Return the sentence about a row that no scheduled request has."""
        found = step.blocks_of(row)
        lengths = (int(step.query_lens[row]), int(step.seq_lens[row]))
        for request_id in unmatched:
            each = self._rows[request_id]
            if (each.num_scheduled_tokens, each.seq_len) != lengths:
                continue
            given = np.asarray(each.block_ids[: len(found)], dtype=np.int64)
            differs = np.flatnonzero(found[: len(given)] != given)
            column = int(differs[0]) if differs.size else len(given)
            expected = int(given[column]) if column < len(given) else "no further block"
            return Corruption(
                "block table",
                f"entry {column} of its block-table row is block {int(found[column])}:"
                f" expected {expected}, which the scheduler gave it",
                row,
                request_id,
                {"kind": "block table", "given": given.tolist()},
            )
        return Corruption(
            "block table",
            f"a request with {lengths[0]} new tokens and {lengths[1]} tokens is in the"
            " batch: expected only requests that the scheduler chose",
            row,
        )


def entries_match(
    appended: Sequence[tuple[Hashable, int, int]],
    rows: Mapping[Hashable, int],
    step: HostStep,
) -> bool:
    """Return whether the entries that a step's schedule added are in its block table.

    It costs less than `ScheduledRows.match`, for steps that have the requests of the step before.

    Args:
        appended: result of `Ledger.appended`.
        rows: the row of each request in the step before.
        step: the metadata of the step.
    """
    width = step.block_table.shape[1]
    return all(
        request_id in rows
        and column < width
        and step.block_table[rows[request_id], column] == block_id
        for request_id, column, block_id in appended
    )

"""Ledger: the blocks that the scheduler gave to each request, and the law of their ownership.

A block table that is wrong but consistent with its own slots cannot be found from one step's
metadata. The engine therefore tells the recorder what its scheduler decided. The ledger keeps its
own copy of each request's rows, and compares the step's block tables with them.

A model whose layers differ has several groups of layers, and a request has a row of blocks in each
of them. All groups take their blocks from one pool, so a block has one holder among all groups.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..findings import Corruption
from .row_table import RowTable
from .scheduled_rows import ScheduledRow, ScheduledRows


class ScheduledGroup(NamedTuple):
    """What the scheduler decided about a step, for one group of layers.

    Args:
        rows: the requests of the step.
        block_size: slots per block.
        window: Optional. Keys that a query attends to, if a request gives up the blocks before
            them. If None, it keeps all of its blocks.
    """

    rows: Sequence[ScheduledRow]
    block_size: int
    window: int | None = None


class GroupRows:
    """The rows of all requests in one group of layers."""

    def __init__(self) -> None:
        self.rows: dict[Hashable, tuple[int, ...]] = {}
        self.given_up: dict[Hashable, int] = {}
        """How many leading blocks of a row its request has given up; 0 if not named."""
        self.joined: dict[Hashable, int] = {}
        """The computed tokens of the requests that joined in the current step."""
        self.table = RowTable()

    def held(self, request_id: Hashable) -> tuple[int, ...]:
        """Return the blocks of a request that it has not given up."""
        row, first = self.rows.get(request_id, ()), self.given_up.get(request_id, 0)
        return row[first:] if first else row

    def remove(self, request_id: Hashable) -> None:
        """Forget a request."""
        self.rows.pop(request_id, None)
        self.given_up.pop(request_id, None)
        self.table.remove(request_id)


class Ledger:
    """The blocks of each request, as the scheduler gave them.

    Args:
        knows_all: whether the engine tells of every request that holds blocks, scheduled or not,
            and of every request that loses them. If False, only the requests of a step are
            compared with each other.
    """

    def __init__(self, knows_all: bool = True) -> None:
        self.knows_all = knows_all
        self._holders: dict[int, int] = {}
        """How many rows hold each block."""
        self._shared: set[int] = set()
        """Blocks that more than one row holds."""
        self._groups: dict[Hashable, GroupRows] = {}

    def free(self, request_ids: Iterable[Hashable]) -> None:
        """Forget requests that finished or were preempted."""
        for request_id in request_ids:
            for group in self._groups.values():
                self._release(group.held(request_id))
                group.remove(request_id)

    def schedule(self, groups: Mapping[Hashable, ScheduledGroup]) -> Corruption | None:
        """Take over a step's rows; return a violation if a written block has another holder.

        A request may join in the step that fills a block of its prefix.

        Args:
            groups: the rows of each group of layers. A request that is not named keeps its blocks.
        """
        if not self.knows_all:
            every = [row for group in self._groups.values() for row in group.rows]
            self.free(every)
        for name, given in groups.items():
            group = self._groups.setdefault(name, GroupRows())
            group.joined.clear()
            known = group.rows
            for request_id, computed, _, block_ids in given.rows:
                if block_ids is not known.get(request_id):
                    self._assign(group, request_id, tuple(block_ids), computed)
            if given.window is not None:
                for request_id, computed, _, _ in given.rows:
                    first_key = max(0, computed - given.window + 1)
                    self._give_up(group, request_id, first_key // given.block_size)
        for name, given in groups.items() if self._shared else ():
            for row in given.rows:
                finding = self._check_writer(name, given.block_size, row)
                if finding is not None:
                    return finding
        return None

    def step_rows(
        self, groups: Mapping[Hashable, ScheduledGroup], are_own: bool
    ) -> dict[Hashable, ScheduledRows]:
        """Return rows that `schedule` took over, to be compared with the step's metadata later.

        Args:
            groups: the rows of each group of layers.
            are_own: whether `schedule` found no violation in them.
        """
        step_rows = {}
        for name, given in groups.items():
            table = self._groups[name].table
            lines = table.lines_of([row.request_id for row in given.rows])
            rows = tuple(given.rows)
            step_rows[name] = ScheduledRows(
                rows, lines, table, given.block_size, are_own
            )
        return step_rows

    def all_checked(self) -> None:
        """Reuse the memory of freed requests: no step that had them is still to be checked."""
        for group in self._groups.values():
            group.table.reuse()

    def _check_writer(
        self, name: Hashable, block_size: int, writer: ScheduledRow
    ) -> Corruption | None:
        """Return a violation if a block that a request writes has another holder."""
        first = writer.num_computed_tokens // block_size
        last = -(-writer.seq_len // block_size)
        own = self._groups[name]
        written = own.rows[writer.request_id][first:last]
        if self._shared.isdisjoint(written):
            return None
        for column, block_id in enumerate(written, first):
            if block_id not in self._shared:
                continue
            is_filled = writer.seq_len >= (column + 1) * block_size
            for other, group in self._groups.items():
                for request_id in group.rows:
                    if (other, request_id) == (name, writer.request_id):
                        continue
                    if block_id not in group.held(request_id):
                        continue
                    is_prefix_hit = (
                        is_filled
                        and group is own
                        and group.joined.get(request_id, 0) >= (column + 1) * block_size
                        and group.rows[request_id][column : column + 1] == (block_id,)
                    )
                    if not is_prefix_hit:
                        return self._describe(name, writer, block_id, other, request_id)
        return None

    def _describe(
        self,
        name: Hashable,
        writer: ScheduledRow,
        block_id: int,
        other: Hashable,
        holder: Hashable,
    ) -> Corruption:
        """Return the sentence about a block that a request writes and another one holds.

        Args:
            name, writer: the group of layers and the request that writes.
            block_id: the block.
            other, holder: the group of layers and the request that holds it.
        """
        where = "" if other == name else " for another group of layers"
        rows = [self._groups[name].rows[writer.request_id]]
        rows.append(self._groups[other].rows[holder])
        return Corruption(
            "block ownership",
            f"block {block_id} was given to request {writer.request_id!r}, which writes to it"
            f" in this step, while request {holder!r} holds it{where}: expected a block that"
            " only the writer holds",
            request_id=holder,
            evidence={
                "kind": "ownership",
                "block": block_id,
                "rows": [list(row) for row in rows],
            },
        )

    def _assign(
        self,
        group: GroupRows,
        request_id: Hashable,
        row: tuple[int, ...],
        num_computed_tokens: int,
    ) -> None:
        """Append to a request's row, or replace it."""
        before = group.rows.get(request_id, ())
        if row[: len(before)] != before:
            self._release(group.held(request_id))
            group.remove(request_id)
            before = ()
        if not before:
            group.joined[request_id] = num_computed_tokens
        added = row[len(before) :]
        for block_id in set(added).difference(group.held(request_id)):
            holders = self._holders[block_id] = self._holders.get(block_id, 0) + 1
            if holders > 1:
                self._shared.add(block_id)
        group.table.append(request_id, len(before), added)
        group.rows[request_id] = row

    def _give_up(self, group: GroupRows, request_id: Hashable, first: int) -> None:
        """Release the blocks of a row before its block `first`."""
        before = group.given_up.get(request_id, 0)
        if first <= before:
            return
        row = group.rows[request_id]
        self._release(set(row[before:first]).difference(row[first:]))
        group.given_up[request_id] = first

    def _release(self, blocks: Iterable[int]) -> None:
        for block_id in set(blocks):
            self._holders[block_id] -= 1
            if self._holders[block_id] < 2:
                self._shared.discard(block_id)

"""Grids of a cascade's portable launches: how the work over the prefix and the rest is split."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....runtime.attention_call import AttentionCall
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import (
    BatchLimits,
    CascadePrefix,
    Estimate,
    PrefixWork,
    Task,
    Warm,
)
from ....runtime.launcher import Launcher
from ..cascade import (
    CascadeTensors,
    cascade_prefix_kernel,
    cascade_rest_kernel,
    cascade_short_rest_kernel,
)
from ..options.score import lower_tensors
from .cost import estimate_split
from .launches import Launches
from .make_launcher import as_bits
from .plan import PortablePlan
from .tuning import choose_short_rest_tiles


@dataclass(frozen=True)
class Grid:
    """One launch of a cascade: its kernel, and how its work is split.

    Args:
        launcher: the kernel with its constants.
        kv_heads, splits, reqs: programs along the axes of the grid.
        split_rows: rows that the workspace reserves per partial result.
    """

    launcher: Launcher
    kv_heads: int
    splits: int
    split_rows: int
    reqs: int = 1

    @property
    def partials(self) -> int:
        """Rows of partial results, of which each program has two at most."""
        return round_up(2 * self.splits * self.kv_heads * self.split_rows)

    @classmethod
    def choose(
        cls,
        launches: Launches,
        kernel: Any,
        num_reqs: int,
        block_m: int,
        rows: int,
        keys: int,
        query_tiles: int,
    ) -> "Grid":
        """Return the launch over at most `keys` keys of `num_reqs` requests.

        Args:
            rows: rows of a request, at most.
            query_tiles: query tiles of all requests, at most.
        """
        launcher, block_n, most = launches.append(
            num_reqs, block_m, kernel, lower_cascade, CascadeTensors
        )
        splits = min(most, query_tiles * -(-keys // block_n))
        return cls(launcher, launches.kv_heads, splits, min(block_m, rows))

    def start(self, call: AttentionCall, prefix: CascadePrefix, options: Any) -> None:
        """Launch the kernel.

        Args:
            prefix: the prefix. Its workspace has log-sum-exps over the prefix, their values,
                log-sum-exps of other partial results, and their values.
            options: those of the launch that are tensors or scales.
        """
        query, key, value, block_table, starts, lengths = call[:6]
        assert block_table is not None
        workspace, begins, semaphores = (
            prefix.workspace, prefix.begins, prefix.semaphores,
        )  # fmt: skip
        out, lse, at = call.out, call.lse, workspace.data_ptr()
        pointers = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), block_table.data_ptr(),
            starts.data_ptr(), lengths.data_ptr(), out.data_ptr(),
            0 if lse is None else lse.data_ptr(), at + 4 * begins[2],
            at + 4 * begins[1], semaphores.data_ptr(), at + 4 * begins[0], at,
        )  # fmt: skip
        numbers = (
            query.shape[0],
            starts.shape[0] - 1,
            prefix.length,
            -(-prefix.length // prefix.split_len),
            self.split_rows,
            call.scale,
            block_table.stride(0),
            *((0, 0) if lse is None else lse.stride()),
        )
        tensors = (
            query, key, value, block_table, starts, lengths, out, lse, workspace,
            begins, semaphores,
        )  # fmt: skip
        grid = (self.kv_heads, self.splits, self.reqs)
        self.launcher(grid, pointers, options, numbers, tensors)


class PortablePrefixPlan(PortablePlan):
    """Launches over a prefix, all queries as one request.

    Attributes:
        is_overlapped: whether the second launch of a cascade may begin before this one has ended.
    """

    is_overlapped = False

    def __init__(self, call: AttentionCall) -> None:
        super().__init__(call)
        self.row_tiles = tuple(tiles.block_m for tiles in self.launches.row_tiles)

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return the time of an append of all queries to the prefix."""
        block_m = cover(self.row_tiles, batch.tokens * layer.group_size)
        rates = self.launches.tables.rates
        return Estimate(estimate_split(layer, batch, block_m, rates), block_m)

    def choose(self, call: AttentionCall, prefix_len: int, block_m: int) -> Grid:
        """Return the launch over a prefix.

        Args:
            block_m: rows of a query tile.
        """
        rows = call.query.shape[0] * self.launches.group_size
        return Grid.choose(
            self.launches, cascade_prefix_kernel, 1, block_m, rows, prefix_len,
            -(-rows // block_m),
        )  # fmt: skip

    def divide(
        self, call: AttentionCall, prefix_len: int, division: int = 0
    ) -> PrefixWork:
        """Return how the work over a prefix is divided.

        Args:
            call: the call.
            prefix_len: keys of the prefix, at least 1.
            division: rows of a query tile. 0 stands for those of the smallest that takes all rows.
        """
        grid = self.choose(call, prefix_len, division or self._cover(call))
        return PrefixWork(prefix_len, grid.splits, grid.partials)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Store the partial results of all tokens, those of padding included."""
        assert task.prefix is not None
        values = lower_tensors(call.options) if self._has_values else None
        block_m = task.division or self._cover(call)
        # the whole prefix is one split
        self.choose(call, task.prefix.length, block_m).start(call, task.prefix, values)

    def _cover(self, call: AttentionCall) -> int:
        return cover(self.row_tiles, call.query.shape[0] * self.launches.group_size)

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield a batch per query tile."""
        for block_m in self.row_tiles:
            yield Warm(
                f"cascade_prefix_kernel, {block_m} rows", 1, limits.max_query_len,
                limits.max_key_len, Task(division=block_m),
            )  # fmt: skip


def cover(row_tiles: Sequence[int], rows: int) -> int:
    """Return the rows of the smallest tile that takes `rows` rows, or of the largest tile."""
    *smaller, largest = row_tiles
    return next((block_m for block_m in smaller if block_m >= rows), largest)


def choose_rest(
    rest: Launches,
    call: AttentionCall,
    block_m: int,
    rest_len: int,
    is_dependent: bool,
) -> Grid:
    """Return the launch over the rest: a program per query tile if the rests are short and many.

    Args:
        rest: launches over the rest.
        call: the call; `max_key_len` includes the prefix.
        block_m: rows of a query tile.
        rest_len: keys after the prefix, at most.
        is_dependent: whether the launch may begin before the one over the prefix has ended. A
            stream-K partition does not: with 32 requests it took 94 us and not 91.
    """
    num_reqs = call.query_start_loc.shape[0] - 1
    rows = call.max_query_len * rest.group_size
    query_tiles = -(-rows // block_m)
    programs = num_reqs * query_tiles * rest.kv_heads
    thresholds = rest.tables.thresholds
    tiles = choose_short_rest_tiles(rest.row_tiles, call.query.dtype, block_m)
    if (
        tiles is not None
        and rest_len <= thresholds.short_rest_keys
        and programs >= thresholds.short_rest_programs * rest.processors
    ):
        launcher, _, _ = rest.append(
            # the kernel is the same for any number of requests
            1, block_m, cascade_short_rest_kernel, lower_cascade, CascadeTensors,
            is_dependent, tiles,
        )  # fmt: skip
        return Grid(launcher, rest.kv_heads, query_tiles, 0, num_reqs)
    return Grid.choose(
        rest, cascade_rest_kernel, num_reqs, block_m, rows, rest_len,
        call.query.shape[0] * rest.group_size // block_m + num_reqs,
    )  # fmt: skip


def round_up(number: int) -> int:
    """Return the smallest multiple of 4, which is 16 bytes, that is at least `number`."""
    return -(-number // 4) * 4


def lower_cascade(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    begins: list[int],
    semaphores: Tensor,
) -> CascadeTensors:
    """Return the tensors of a launch."""
    return CascadeTensors(
        q=query,
        k=as_bits(key),
        v=as_bits(value),
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=lengths,
        out=out,
        lse=lse,
        partial_out=workspace[begins[2] :],
        partial_lse=workspace[begins[1] :],
        semaphores=semaphores,
        prefix_out=workspace[begins[0] :],
        prefix_lse=workspace,
    )

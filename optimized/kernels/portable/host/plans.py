"""Plans of the portable decode, append and prefill kernels."""

import math
from collections.abc import Iterator
from itertools import product
from typing import ClassVar, NamedTuple

from ....runtime.attention_call import AttentionCall
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import BatchLimits, Estimate, Task, Warm
from ....runtime.launcher import Launcher
from .cost import estimate_append, estimate_decode, estimate_prefill_of_rows
from .decode_sizes import count_parts
from .launches import BRIEF, REQS_PER_PASS, DecodeKernel
from .make_launches import MAX_WORKSPACE, SPLIT_SIZE
from .plan import PortablePlan

MAX_CHOSEN = 256
"""Launches that a plan keeps: one per combination of a batch's bounds."""


class DecodeGrid(NamedTuple):
    """A decode launch.

    Args:
        launcher: the kernel with its constants.
        grid: programs along each axis.
        counters: counters of finished splits.
        split_rows: rows of a request, at most.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    counters: int
    split_rows: int


class PortableDecodePlan(PortablePlan):
    """Launches that compute the short requests of a batch.

    The key tiles of all requests are divided evenly among the programs, so a request may be split
    over several. The workspace holds two partial results per program. Few requests have a kernel of
    their own, with a number of programs per request.

    Attributes:
        kernel: Optional. A kernel with the same arguments in place of the stream-K one.
        short_rows: the most rows of a request that it computes.
    """

    kernel: ClassVar[DecodeKernel | None] = None

    def __init__(self, call: AttentionCall) -> None:
        super().__init__(call)
        self.short_rows = self.launches.short_rows
        self._chosen: dict[tuple[int, int, int], DecodeGrid] = {}

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return what the short requests add to the launch of the long ones."""
        return estimate_decode(layer, batch)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute the short requests of a batch, and clear the rows of no request."""
        bounds = (
            call.query_start_loc.shape[0] - 1, call.max_query_len, call.max_key_len,
        )  # fmt: skip
        chosen = self._chosen.get(bounds)
        if chosen is None:
            if len(self._chosen) >= MAX_CHOSEN:
                self._chosen.clear()
            chosen = self._chosen[bounds] = self.choose(*bounds)
        launcher, grid, counters, rows = chosen
        partials = self.find_partials(call, counters, 2 * math.prod(grid), rows)
        self.start(launcher, grid, call, partials)

    def choose(self, num_reqs: int, max_query_len: int, max_key_len: int) -> DecodeGrid:
        """Return the launch of a batch with these bounds."""
        launches = self.launches
        kv_heads = launches.kv_heads
        rows = min(launches.short_rows, max_query_len * launches.group_size)
        if self.kernel is None:
            splits, parts = launches.short_splits(num_reqs, rows, max_key_len)
            if splits:
                launcher = launches.short_decode(rows // parts, parts)
                grid = (kv_heads * parts, splits, num_reqs)
                counters = num_reqs * kv_heads * parts
                return DecodeGrid(launcher, grid, counters, rows // parts)
        launcher, block_n, most = launches.decode(
            num_reqs, rows, max_query_len, max_key_len, self.kernel
        )
        max_keys = launches.bound_keys(max_key_len, block_n)
        splits = min(most, num_reqs * max(1, -(-max_keys // block_n)))
        return DecodeGrid(launcher, (kv_heads, splits, 1), splits * kv_heads, rows)

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield batches with every kernel: few or many requests, few or many keys."""
        launches = self.launches
        brief = min(BRIEF, limits.max_key_len)
        counts = req_counts(limits.num_reqs, launches.full_reqs)
        batches = list(product(counts, sorted({brief, limits.max_key_len})))
        # if some batch is one of few decodes, this one is, and they all have its kernels
        few = (1, min(launches.small_batch_tiles.block_n, limits.max_key_len))
        most = min(limits.max_query_len, self.short_rows // launches.group_size)
        # a decode launch serves the short requests of a longer batch too
        query_lens = sorted({*range(1, most + 1), limits.max_query_len})
        batches.append(few)
        if count_parts(launches.group_size) > 1:
            # whether few decodes have parts of their query heads depends on their keys
            lens = [2**i for i in range(limits.max_key_len.bit_length())]
            batches += product(counts, lens)
        for (num_reqs, keys), query_len in product(batches, query_lens):
            launcher = self.choose(num_reqs, query_len, keys).launcher
            yield Warm(launcher.name, num_reqs, query_len, keys, kernel=id(launcher))


class PortableAppendPlan(PortablePlan):
    """Launches that compute all requests of a batch, split over their keys."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__(call)
        self.row_tiles = tuple(tiles.block_m for tiles in self.launches.row_tiles)

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return the time of an append, and the rows of its query tiles."""
        rates = self.launches.tables.rates
        return estimate_append(layer, batch, self.row_tiles, rates)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute all requests, and clear the rows of no request.

        Args:
            call: the call.
            task: `division` is the rows of a query tile, one of `row_tiles`.
        """
        launches, block_m = self.launches, task.division
        num_reqs = call.query_start_loc.shape[0] - 1
        append, block_n, max_splits = launches.append(num_reqs, block_m)
        rows = call.query.shape[0] * launches.group_size
        # each request has at most the tiles that its rows fill, and one that is not full
        query_tiles = rows // block_m + num_reqs
        splits = min(max_splits, query_tiles * max(1, -(-call.max_key_len // block_n)))
        split_rows = min(block_m, call.max_query_len * launches.group_size)
        counters = splits * launches.kv_heads
        partials = self.find_partials(call, counters, 2 * counters, split_rows)
        self.start(append, (launches.kv_heads, splits, 1), call, partials)

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield batches with every kernel: by the number of requests, and by the query tile."""
        launches = self.launches
        if limits.max_query_len * launches.group_size <= launches.short_rows:
            return
        for num_reqs in req_counts(limits.num_reqs, launches.full_reqs):
            for block_m in reversed(self.row_tiles):
                launcher = launches.append(num_reqs, block_m)[0]
                yield Warm(
                    f"append_kernel, {block_m} rows", num_reqs, limits.max_query_len,
                    limits.max_key_len, Task(division=block_m), id(launcher),
                )  # fmt: skip


class PortablePrefillPlan(PortablePlan):
    """Launches that compute the long requests of a batch: a program per query tile."""

    clears_padding = False

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return the time of a prefill."""
        rates = self.launches.tables.rates
        return estimate_prefill_of_rows(layer, batch, self.launches.block_m, rates)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute all requests of more than `task.short_rows` rows."""
        launches = self.launches
        num_reqs = call.query_start_loc.shape[0] - 1
        # each request has at most the tiles that its rows fill, and one that is not full
        rows = call.query.shape[0] * launches.group_size
        tiles = rows // launches.block_m + num_reqs
        alone, spread = launches.prefills
        if launches.split_size:
            # if the tiles do not fill the chip, their splits get programs of their own
            splits = -(-call.max_key_len // launches.split_size)
            counters = tiles * launches.kv_heads
            split_rows = min(launches.block_m, call.max_query_len * launches.group_size)
            count = -(-counters * splits * split_rows // 4) * 4
            if (
                splits > 1
                and counters < launches.processors
                and count * (launches.value_size + 1) <= MAX_WORKSPACE
            ):
                partials = self.find_partials(
                    call, counters, counters * splits, split_rows
                )
                self.start(spread, (tiles, launches.kv_heads, splits), call, partials)
                return
        self.start(alone, (tiles, launches.kv_heads, 1), call, None)

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield a batch, and for batch-invariant rows one with one split and one with several."""
        short_rows = self.launches.short_rows
        if limits.max_query_len * self.launches.group_size <= short_rows:
            return
        for keys in sorted({min(SPLIT_SIZE, limits.max_key_len), limits.max_key_len}):
            name = self.launches.prefills[0].name
            yield Warm(name, 1, limits.max_query_len, keys, Task(short_rows))


def req_counts(most: int, full_reqs: int) -> list[int]:
    """Return numbers of requests on both sides of every limit between kernels.

    Args:
        most: requests, at most.
        full_reqs: that of the launches.
    """
    limits = {1, full_reqs - 1, full_reqs, most}
    limits |= {count for limit in REQS_PER_PASS for count in (limit, limit + 1)}
    return sorted(count for count in limits if 1 <= count <= most)

"""Kernel family of latent attention: one kv head, whose values are the first columns of its keys.

The family computes every request of a call, of any number of rows, with all options but
batch-invariant rows. Latents are plain, or FP8 numbers with a scale. Their tiles are in
latent_tiles.py.
"""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch

from .....contract.cache_formats import find_format
from ....runtime.attention_call import AttentionCall
from ....runtime.chip import count_processors
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import (
    ALWAYS,
    EVERYTHING,
    BatchLimits,
    Estimate,
    KernelFamily,
    Role,
    Task,
    Warm,
)
from ....runtime.launcher import Launcher, next_power_of_2
from ....runtime.workspace import find_workspace
from ..arguments import StreamK
from ..formats.fp8 import FP8_FORMATS
from ..latent import (
    FIELDS,
    MAX_SEGMENTS,
    Combination,
    LatentTensors,
    latent_combine_kernel,
    latent_kernel,
)
from .latent_tiles import (
    COMBINE_TILES,
    MAX_COLUMNS,
    MAX_WIDTH,
    MIN_KEYS,
    choose_combination,
    choose_latent_tiles,
)
from .launches import reqs_per_pass
from .make_launcher import lower_call, make_launcher
from .make_launches import LEAST_COLUMNS
from .plan import Partials, PortablePlan
from .plans import MAX_CHOSEN, req_counts
from .tuning import Tiles

FORMATS = ("auto", *FP8_FORMATS)
"""Formats of caches that the kernel reads."""
WARM_TOKENS = 64
"""New tokens of a request, at most, each number of which may have kernels of its own."""


class LatentGrid(NamedTuple):
    """Both launches of a batch.

    Args:
        launcher, columns, segments: the first one, and its programs along each axis.
        partial_rows: rows of a query tile, at most.
        combiner: Optional. The second one. None if no query tile can be split.
        groups, splits: its programs along the first and the last axis.
    """

    launcher: Launcher
    columns: int
    segments: int
    partial_rows: int
    combiner: Launcher | None
    groups: int
    splits: int


class PortableLatentPlan(PortablePlan):
    """Launches of latent attention for calls with one signature."""

    takes_all_bounds: ClassVar[bool] = True

    def __init__(self, call: AttentionCall) -> None:
        super().__init__(call)
        launches, value = self.launches, call.value
        rank, width = value.shape[-1], call.query.shape[-1]
        self._config = launches.config._replace(
            HEAD_DIM=rank,
            BLOCK_D=launches.config.BLOCK_DV,
            ROPE_DIM=width - rank,
            BLOCK_ROPE=pad(width - rank),
            PIN_FP8_V=True,
            CLEAR_PADDING=True,
            MASK_ALL_TILES=True,
        )
        options = call.options
        self._of_call = (
            call.query.dtype,
            launches.config.CACHE_FORMAT in FP8_FORMATS,
            options.tree_mask is not None or options.position_bias is not None,
            call.query.device,
        )
        self._processors = count_processors(call.query.device)
        self._launchers: dict[tuple[Tiles, int, bool], Launcher] = {}
        self._combiners: dict[Combination, Launcher] = {}
        self._chosen: dict[BatchBounds, LatentGrid] = {}

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the values are the first columns of the keys."""
        return call.key.data_ptr() == call.value.data_ptr()

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return ALWAYS: the kernel reads each latent once, as key and value."""
        return ALWAYS

    def launch(self, call: AttentionCall, task: Task = EVERYTHING) -> None:
        """Compute all requests, and clear the rows of no request."""
        bounds = BatchBounds(
            call.query_start_loc.shape[0] - 1, call.query.shape[0],
            call.max_query_len, call.max_key_len,
        )  # fmt: skip
        grid = self._chosen.get(bounds)
        if grid is None:
            if len(self._chosen) >= MAX_CHOSEN:
                self._chosen.clear()
            grid = self._chosen[bounds] = self.choose(bounds)
        partials = self.find_latent_partials(call, grid)
        self.start(grid.launcher, (grid.columns, grid.segments, 1), call, partials)
        if grid.combiner is not None:
            programs = (grid.groups, grid.columns, grid.splits)
            self.start(grid.combiner, programs, call, partials)

    def choose(self, bounds: BatchBounds) -> LatentGrid:
        """Return the launches of a batch with these bounds."""
        num_reqs, tokens, max_query_len, max_key_len = bounds
        heads = self.launches.group_size
        # without new tokens there may be rows of no request
        rows = max(1, max_query_len) * heads
        tiles, programs = choose_latent_tiles(rows, *self._of_call)
        query_tiles = -(-rows // tiles.block_m)
        # a long request beside short ones does not get programs that these leave idle
        mean_tiles = -(-tokens * heads // (num_reqs * tiles.block_m))
        columns = max(1, min(query_tiles, mean_tiles, MAX_COLUMNS))
        column_tiles = -(-query_tiles // columns)
        min_tiles = max(1, MIN_KEYS // tiles.block_n)
        most = num_reqs * column_tiles * -(-max_key_len // (min_tiles * tiles.block_n))
        resident = self._processors * programs // columns
        segments = max(1, min(most, resident, MAX_SEGMENTS.value))
        # a split query tile crosses the end of a segment, and one of a column crosses each end
        splits = min(segments - 1, num_reqs * column_tiles)
        partial_rows = min(rows, tiles.block_m)
        combiner, groups = None, 0
        if splits:
            combination = choose_combination(splits * columns * partial_rows)
            channels = min(combination.CHANNELS, self._config.BLOCK_DV)
            combination = combination._replace(CHANNELS=channels)
            combiner = self._find_combiner(combination)
            groups = -(-partial_rows // combination.ROWS)
            groups *= self._config.BLOCK_DV // channels
        launcher = self._find_launcher(tiles, num_reqs)
        return LatentGrid(
            launcher, columns, segments, partial_rows, combiner, groups, splits
        )

    def _find_launcher(self, tiles: Tiles, num_reqs: int) -> Launcher:
        """Return the launcher of the first kernel."""
        per_pass = reqs_per_pass(num_reqs)
        key = (tiles, per_pass, num_reqs > per_pass)
        if key not in self._launchers:
            plan = StreamK(
                MIN_TILES=max(1, MIN_KEYS // tiles.block_n),
                QUERY_TILES=True,
                REQS_PER_PASS=per_pass,
                MANY_REQS=num_reqs > per_pass,
                COMBINE_ROWS=0,
                COMBINE_SPLITS=0,
            )
            config = self._config._replace(BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n)
            self._launchers[key] = make_launcher(
                latent_kernel, self.launches.fixed, tiles, (lower_call, LatentTensors),
                config=config, plan=plan,
            )  # fmt: skip
        return self._launchers[key]

    def _find_combiner(self, combination: Combination) -> Launcher:
        """Return the launcher of the second kernel."""
        if combination not in self._combiners:
            self._combiners[combination] = make_launcher(
                latent_combine_kernel, self.launches.fixed, COMBINE_TILES,
                (lower_call, LatentTensors), config=self._config, plan=combination,
            )  # fmt: skip
        return self._combiners[combination]

    def find_latent_partials(self, call: AttentionCall, grid: LatentGrid) -> Partials:
        """Return the workspace of both launches: partial results, and which tiles are split."""
        notes = grid.columns * FIELDS.value * MAX_SEGMENTS.value
        partials = 2 * grid.segments * grid.columns * grid.partial_rows
        # the values begin at a multiple of 16 bytes, after the log-sum-exps
        num_lse = -(-partials // 4) * 4
        numbers = notes + num_lse * (self.launches.value_size + 1)
        _, workspace = find_workspace(call.query.device, 0, numbers)
        splits = workspace[:notes].view(torch.int32)
        return Partials(grid.partial_rows, workspace[notes:], num_lse, splits)

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield batches with every kernel: by requests, and by rows of a request."""
        counts = req_counts(limits.num_reqs, self.launches.full_reqs)
        longest = max(1, min(limits.max_query_len, WARM_TOKENS))
        for num_reqs in reversed(counts):
            for query_len in range(1, longest + 1):
                bounds = BatchBounds(
                    num_reqs, num_reqs * query_len, query_len, limits.max_key_len
                )
                grid = self.choose(bounds)
                yield Warm(
                    grid.launcher.name, num_reqs, query_len, limits.max_key_len,
                    kernel=(id(grid.launcher), id(grid.combiner)),
                )  # fmt: skip


def is_latent(call: AttentionCall) -> bool:
    """Return whether the values of a call may be columns of its keys, in a format of FORMATS."""
    query, key, value, block_table = call[:4]
    if block_table is None or call.options.batch_invariant or value.shape[-2] != 1:
        return False
    if key.stride() != value.stride() or key.dtype != value.dtype:
        return False
    rank, width = value.shape[-1], query.shape[-1]
    if not 0 < rank < width or pad(rank) + pad(width - rank) > MAX_WIDTH:
        return False
    return find_format(key.dtype, call.options.k_scale).name in FORMATS


def pad(columns: int) -> int:
    """Return the columns of a tile that has so many."""
    return max(LEAST_COLUMNS, next_power_of_2(columns))


FAMILY = KernelFamily("portable latent", Role.EVERY, is_latent, PortableLatentPlan)

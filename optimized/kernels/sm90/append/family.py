"""Kernel family of verification and append on Hopper chips: supported calls and plans.

The family computes every request of a call, of any mixture of lengths. Its estimate (`cost.py`) is
the least for requests of more rows than a decode tile has and of many keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ....runtime.attention_call import AttentionCall
from ....runtime.chip import count_processors
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import (
    EVERYTHING,
    BatchLimits,
    Estimate,
    KernelFamily,
    Role,
    Task,
    Warm,
)
from ....runtime.launcher import next_power_of_2
from ....runtime.workspace import find_workspace
from ..common.chip import is_hopper
from ..common.config import BOX_COLUMNS, WARPGROUP_M, Sm90Config, with_whole_acc
from ..common.plan import Sm90Plan
from ..common.planes import takes_groups, unsupported
from ..common.stream_k import MIN_TILES
from ..common.work_item import MAX_SEGMENTS
from ..prefill import family as sm90
from .cost import choose_append_rows, estimate_segments
from .kernel import AppendArguments, append_kernel


def supports(call: AttentionCall) -> bool:
    """Return whether the kernels compute calls with this signature."""
    return is_hopper(call.query.device) and _is_supported(call)


def plan(call: AttentionCall) -> "AppendPlan":
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernels do not support.
    """
    if not _is_supported(call):
        raise unsupported("Hopper append kernel")
    base = sm90.plan(call, may_cut_tokens=False)
    group = next_power_of_2(base.group_size)
    config = with_whole_acc(base.config)
    config = config._replace(GROUP=group, SPLIT_TILES=1, HAS_SEGMENTS=True)
    q_box = (WARPGROUP_M.value // group, group, BOX_COLUMNS.value)
    boxes = (q_box, *base.boxes[1:3], q_box)
    made = AppendPlan.derive(base, config, boxes)
    if has_narrow_tile(config):
        config = config._replace(CONSUMERS=1, STAGES=NARROW_STAGES)
        made.narrow = AppendPlan.derive(base, config, boxes)
    return made


NARROW_STAGES = 3
"""K tiles, and V tiles, in flight with one consumer warpgroup, whose queries take less memory."""


def has_narrow_tile(config: Sm90Config) -> bool:
    """Return whether calls whose requests have few rows get one consumer warpgroup.

    A second warpgroup takes time even without a row. With one warpgroup and a third stage, 1
    request of 8 tokens over 2,048 keys takes 23 us and not 33, 8 of 4 with a group of 16 over 4,096
    keys 32 and not 45, 64 of 6 over 1,024 86 and not 99, and 16 of 16 over 16,384 270 and not 275.
    Other head sizes, windows and chunks are not measured.

    Args:
        config: of the calls.
    """
    is_local = config.WINDOW or config.CHUNK_SIZE
    return config.KEY_SIZE == config.HEAD_SIZE == 128 and not is_local


@dataclass
class AppendPlan(Sm90Plan):
    """Launches of the Hopper append kernel for all calls with one signature.

    Args:
        boxes: the TMA box of the queries has tokens, heads and columns. The output has none.
        constants: the kernel's constexpr arguments.
        narrow: Optional. The plan with the query tile of one consumer warpgroup. If None, there is
            one tile.
    """

    kernel: ClassVar[Any] = append_kernel
    arguments: ClassVar[Any] = AppendArguments
    narrow: "AppendPlan | None" = None

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Rows of each query tile, fewest first."""
        narrow = () if self.narrow is None else (self.narrow.tile_rows,)
        return (*narrow, self.tile_rows)

    def query_lens(self, most: int) -> list[int]:
        """Return longest requests, up to `most` tokens, of which each has another query tile."""
        found = {min(most, rows // self.config.GROUP) for rows in self.row_tiles[:-1]}
        return sorted({*found, most} - {0})

    def count_segments(self, call: AttentionCall) -> int:
        """Return the segments of a KV head: one per SM that it gets, or fewer for few KV tiles."""
        config = self.config
        kv_heads = self.num_heads // self.group_size
        num_reqs = call.query_start_loc.shape[0] - 1
        # a request has at most the tiles that its tokens fill, and one that is not full
        query_tiles = call.query.shape[0] // (self.tile_rows // config.GROUP) + num_reqs
        tiles = query_tiles * max(1, -(-call.max_key_len // config.BLOCK_N))
        segments = count_processors(call.query.device) // kv_heads
        return max(1, min(segments, -(-tiles // MIN_TILES.value), MAX_SEGMENTS.value))

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return the time of an append, and its segments of a KV head."""
        return estimate_segments(layer, batch, self.row_tiles)

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield a batch per query tile."""
        for query_len in self.query_lens(limits.max_query_len):
            if query_len * self.group_size > limits.short_rows:
                yield Warm(type(self).__name__, 1, query_len, limits.max_key_len)

    def launch(self, call: AttentionCall, task: Task = EVERYTHING) -> None:
        """Compute all requests, and clear the rows of no request.

        Args:
            call: one that the plan takes; its `out` and `lse` are modified in place.
            task: `division` is the segments of a KV head, at most. 0 stands for `count_segments`.
        """
        rows = call.max_query_len * self.config.GROUP
        is_narrow = choose_append_rows(self.row_tiles, rows) < self.tile_rows
        if self.narrow is not None and is_narrow:
            self.narrow.launch(call, task)
            return
        config = self.config
        kv_heads = self.num_heads // self.group_size
        most = self.count_segments(call)
        segments = min(task.division or most, most)
        partial_rows = min(self.tile_rows, call.max_query_len * config.GROUP)
        partials = 2 * segments * kv_heads * partial_rows
        semaphores, numbers = find_workspace(
            call.query.device,
            segments * kv_heads * (self.tile_rows // WARPGROUP_M.value),
            partials * (config.HEAD_DIM + 1),
        )
        given = self.name_arguments(call)
        given |= {
            "partials": numbers,
            "semaphores": semaphores,
            "partial_rows": partial_rows,
        }
        self.launch_with_maps(call, (kv_heads, segments, 1), given)


def _is_supported(call: AttentionCall) -> bool:
    """Return whether the kernels compute such calls, whatever their device."""
    return not call.options.batch_invariant and takes_groups(call)


FAMILY = KernelFamily("sm90 append", Role.EVERY, supports, plan)

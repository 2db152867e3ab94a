"""Kernel family of batch-invariant attention on Hopper chips: supported calls and plans.

The family computes every request of a call, of any mixture of lengths. A row's result follows from
its own keys, because its query tile, KV tiles and splits have fixed bounds, and one kernel computes
prefills and decodes. If the query tiles are few, each split of their keys is a work item, and a
second kernel folds the splits in the order in which a work item folds several.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
from ...portable.host.make_launches import MAX_WORKSPACE
from ..common.chip import is_hopper
from ..common.config import BOX_COLUMNS, LOG2_E, WARPGROUP_M
from ..common.entry import launch_by_pointers
from ..common.plan import Sm90Plan
from ..common.planes import takes_groups
from ..common.warm import warm_every
from ..prefill import family as sm90
from .kernel import (
    ROWS,
    FoldArguments,
    InvariantArguments,
    fold_kernel,
    invariant_kernel,
)

SPLIT_KEYS = 4096
"""Keys per split, as in the portable kernels."""
ITEMS_PER_PROCESSOR = 4
"""Query tiles per SM, fewer than which share their splits. With more, every SM has enough."""


def supports(call: AttentionCall) -> bool:
    """Return whether the kernels compute calls with this signature."""
    return is_hopper(call.query.device) and _is_supported(call)


def plan(call: AttentionCall) -> "InvariantPlan":
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernels do not support.
    """
    if not _is_supported(call):
        raise NotImplementedError(
            "the batch-invariant Hopper kernel does not support this call: expected one for"
            " which supports(call) is True; use the portable kernel"
        )
    base = sm90.plan(call)
    config = base.config
    group = next_power_of_2(base.group_size)
    config = config._replace(
        # a row does not depend on whether its log-sum-exp is wanted
        FAST_TANH=False,
        GROUP=group,
        SPLIT_TILES=SPLIT_KEYS // config.BLOCK_N,
    )
    q_box = (WARPGROUP_M.value // group, group, BOX_COLUMNS.value)
    out_box = (WARPGROUP_M.value // group, group, config.HEAD_DIM)
    boxes = (q_box, *base.boxes[1:3], out_box)
    return InvariantPlan.derive(base, config, boxes)


@dataclass
class InvariantPlan(Sm90Plan):
    """Launches of the batch-invariant Hopper kernels for all calls with one signature.

    Args:
        boxes: the TMA boxes of queries and outputs have tokens, heads and columns.
        constants: the kernels' constexpr arguments.
    """

    arguments: ClassVar[Any] = InvariantArguments
    _folder: Launcher = field(init=False)

    def __post_init__(self) -> None:
        """Create the launchers."""
        kernels = (
            (invariant_kernel, self.lower),
            (fold_kernel, lambda *tensors: tensors),
        )
        self.launcher, self._folder = (
            Launcher(kernel, lower, self.constants, num_warps=4, num_stages=1)
            for kernel, lower in kernels
        )

    def count_splits(self, call: AttentionCall, num_tiles: int) -> int:
        """Return how many work items share a query tile; 1 if the tiles fill the chip.

        Args:
            call: the call.
            num_tiles: query tiles of all KV heads, at most.
        """
        splits = max(1, -(-call.max_key_len // SPLIT_KEYS))
        if num_tiles >= ITEMS_PER_PROCESSOR * count_processors(call.query.device):
            return 1
        return splits if splits * self._numbers_per_split(call) <= MAX_WORKSPACE else 1

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return ALWAYS: rows of one call may not have the bits of another kernel."""
        return ALWAYS

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield one request of each number of tokens, and many requests."""
        return warm_every(self, limits)

    def launch(self, call: AttentionCall, task: Task = EVERYTHING) -> None:
        """Compute all requests, and clear the rows of no request.

        Args:
            call: one that the plan takes; its `out` and `lse` are modified in place.
            task: not used.
        """
        block_table, out, lse = call.block_table, call.out, call.lse
        starts, sinks = call.query_start_loc, call.options.sinks
        assert block_table is not None
        config, device = self.config, call.query.device
        num_tokens, num_reqs = call.query.shape[0], starts.shape[0] - 1
        # a request has at most the tiles that its tokens fill, and one that is not full
        num_tiles = num_tokens // (self.tile_rows // config.GROUP) + num_reqs
        num_tiles *= self.num_heads // self.group_size
        num_splits = self.count_splits(call, num_tiles)
        num_programs = min(num_tiles * num_splits, count_processors(device))
        kept = num_programs * self.tile_rows * config.HEAD_DIM
        shared = num_splits * self._numbers_per_split(call) if num_splits > 1 else 0
        work_counter, states = find_workspace(device, 2, kept + shared)
        lse_stride_head, lse_stride_token = (0, 0) if lse is None else lse.stride()
        arguments = {
            "q_desc": call.query,
            "k_desc": call.key,
            "v_desc": call.value,
            "out_desc": out,
            "out": out,
            "lse": lse,
            "states": states,
            "block_table": block_table,
            "query_start_loc": starts,
            "kv_lens": call.lengths,
            "work_counter": work_counter,
            "sinks": None if sinks is None else sinks.contiguous(),
            "scale_log2": call.scale * LOG2_E.value,
            "num_reqs": num_reqs,
            "num_tokens": num_tokens,
            "num_heads": self.num_heads,
            "group_size": self.group_size,
            "num_splits": num_splits,
            **self.strides,
            "lse_stride_head": lse_stride_head,
            "lse_stride_token": lse_stride_token,
            "block_table_stride": block_table.stride(0),
        }
        self.launch_with_maps(call, (num_programs, 1, 1), arguments)
        if num_splits > 1:
            groups = -(-num_tokens * self.num_heads // ROWS.value)
            given = {**arguments, "num_programs": num_programs}
            launch_by_pointers(self._folder, (groups, 1, 1), FoldArguments, given)

    def _numbers_per_split(self, call: AttentionCall) -> int:
        rows = call.query.shape[0] * self.num_heads
        return rows * (self.config.HEAD_DIM + 2)


def _is_supported(call: AttentionCall) -> bool:
    """Return whether the kernels compute such calls, whatever their device."""
    return call.options.batch_invariant and takes_groups(call)


FAMILY = KernelFamily("sm90 invariant", Role.EVERY, supports, plan)

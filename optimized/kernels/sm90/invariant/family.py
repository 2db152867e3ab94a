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
from ..common.config import BOX_COLUMNS, WARPGROUP_M, with_whole_acc
from ..common.entry import launch_by_pointers
from ..common.plan import Sm90Plan
from ..common.planes import takes_groups, unsupported
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
        raise unsupported("batch-invariant Hopper kernel")
    base = sm90.plan(call, may_cut_tokens=False)
    config = with_whole_acc(base.config)
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

    kernel: ClassVar[Any] = invariant_kernel
    arguments: ClassVar[Any] = InvariantArguments
    _folder: Launcher = field(init=False)

    def __post_init__(self) -> None:
        """Create the launchers."""
        super().__post_init__()
        self._folder = Launcher(
            fold_kernel, lambda *tensors: tensors, self.constants, 4, 1
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
        config, device = self.config, call.query.device
        given = self.name_arguments(call)
        num_tokens = given["num_tokens"]
        # a request has at most the tiles that its tokens fill, and one that is not full
        num_tiles = num_tokens // (self.tile_rows // config.GROUP) + given["num_reqs"]
        num_tiles *= self.num_heads // self.group_size
        num_splits = self.count_splits(call, num_tiles)
        num_programs = min(num_tiles * num_splits, count_processors(device))
        kept = num_programs * self.tile_rows * config.HEAD_DIM
        shared = num_splits * self._numbers_per_split(call) if num_splits > 1 else 0
        work_counter, states = find_workspace(device, 2, kept + shared)
        given |= {
            "states": states,
            "work_counter": work_counter,
            "num_splits": num_splits,
            "num_programs": num_programs,
        }
        self.launch_with_maps(call, (num_programs, 1, 1), given)
        if num_splits > 1:
            groups = -(-num_tokens * self.num_heads // ROWS.value)
            launch_by_pointers(self._folder, (groups, 1, 1), FoldArguments, given)

    def _numbers_per_split(self, call: AttentionCall) -> int:
        rows = call.query.shape[0] * self.num_heads
        return rows * (self.config.HEAD_DIM + 2)


def _is_supported(call: AttentionCall) -> bool:
    """Return whether the kernels compute such calls, whatever their device."""
    return call.options.batch_invariant and takes_groups(call)


FAMILY = KernelFamily("sm90 invariant", Role.EVERY, supports, plan)

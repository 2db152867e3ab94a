"""Kernel family of verification and append on Hopper chips: supported calls and plans.

The family computes every request of a call, of any mixture of lengths. The cost model
(`launch/cost_model.py`) selects it for requests of more rows than a decode tile has and of many
keys.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....launch.attention_call import AttentionCall
from ....launch.launcher import Launcher, next_power_of_2
from ....launch.tuning import count_processors, is_hopper
from ....launch.workspace import find_workspace
from .. import family as sm90
from ..config import BOX_COLUMNS, LOG2_E, WARPGROUP_M, Config, choose_consumers
from ..family import Sm90Plan, find_planes
from .kernel import append_kernel
from .segments import MAX_SEGMENTS

MIN_TILES = 2
"""KV tiles of a segment, at least."""


def supports(call: AttentionCall) -> bool:
    """Return whether the kernels compute calls with this signature."""
    return is_hopper(call.query.device) and _is_supported(call)


def plan(call: AttentionCall) -> "AppendPlan":
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernels do not support.
    """
    if not _is_supported(call):
        raise NotImplementedError(
            "the Hopper append kernel does not support this call: expected one for which"
            " supports(call) is True; use the portable kernel"
        )
    base = sm90.plan(call)
    config: Config = base.constants["config"]
    group = next_power_of_2(base.group_size)
    # partial results are accumulators of one part, with padded columns
    consumers = choose_consumers(config.HEAD_SIZE, True)
    config = config._replace(GROUP=group, SPLIT_TILES=1, CONSUMERS=consumers)
    q_box = (WARPGROUP_M.value // group, group, BOX_COLUMNS.value)
    return AppendPlan(
        dtype=base.dtype,
        planes=base.planes,
        boxes=(q_box, *base.boxes[1:3], q_box),
        tokens=base.tokens,
        keys=base.keys,
        num_heads=base.num_heads,
        group_size=base.group_size,
        tile_rows=WARPGROUP_M.value * consumers,
        # of the keys and values, and of the output
        strides=(*base.strides[2:8], *base.strides[10:]),
        constants={"config": config},
    )


@dataclass
class AppendPlan(Sm90Plan):
    """Launches of the Hopper append kernel for all calls with one signature.

    Args:
        boxes: the TMA box of the queries has tokens, heads and columns. The output has none.
        strides: the kernel's arguments from `k_block_rows` to `out_stride_head`.
        constants: the kernel's constexpr arguments.
    """

    def __post_init__(self) -> None:
        """Create the launcher."""
        self.launcher = Launcher(
            append_kernel, self.lower, self.constants, num_warps=4, num_stages=1
        )

    def count_segments(self, call: AttentionCall) -> int:
        """Return the segments of a KV head: one per SM that it gets, or fewer for few KV tiles."""
        config: Config = self.constants["config"]
        kv_heads = self.num_heads // self.group_size
        num_reqs = call.query_start_loc.shape[0] - 1
        # a request has at most the tiles that its tokens fill, and one that is not full
        query_tiles = call.query.shape[0] // (self.tile_rows // config.GROUP) + num_reqs
        tiles = query_tiles * max(1, -(-call.max_key_len // config.BLOCK_N))
        segments = count_processors(call.query.device) // kv_heads
        return max(1, min(segments, -(-tiles // MIN_TILES), MAX_SEGMENTS.value))

    def launch(self, call: AttentionCall) -> None:
        """Compute all requests, and clear the rows of no request.

        Args:
            call: one that the plan takes; its `out` and `lse` are modified in place.
        """
        query, key, value, block_table = call[:4]
        out, lse, starts = call.out, call.lse, call.query_start_loc
        assert block_table is not None
        config: Config = self.constants["config"]
        num_reqs = starts.shape[0] - 1
        kv_heads = self.num_heads // self.group_size
        segments = self.count_segments(call)
        partial_rows = min(self.tile_rows, call.max_query_len * config.GROUP)
        partials = 2 * segments * kv_heads * partial_rows
        semaphores, numbers = find_workspace(
            query.device,
            segments * kv_heads * (self.tile_rows // WARPGROUP_M.value),
            partials * (config.HEAD_DIM + 2),
        )
        outputs = (out, lse, numbers, semaphores)
        others = (block_table, starts, call.lengths)
        strides = (*self.strides, *((0, 0) if lse is None else lse.stride()))
        sinks = call.options.sinks
        sinks = None if sinks is None else sinks.contiguous()
        extra_rows = self.extra_rows(query, key)

        def make_maps(*addresses: int) -> list[Any]:
            return self.tensor_maps(addresses[:3], extra_rows[:3])

        maps: list[Any] = []
        if self.launcher.is_ready:
            maps = make_maps(*(each.data_ptr() for each in (query, key, value)))
        self.launcher(
            (kv_heads, segments, 1),
            [0 if each is None else each.data_ptr() for each in (*outputs, *others)],
            (sinks, call.scale * LOG2_E.value),
            (
                num_reqs,
                query.shape[0],
                MIN_TILES,
                partial_rows,
                self.group_size,
                *strides,
                block_table.stride(0),
            ),
            (query, key, value, *outputs, *others),
            maps,
            make_maps,
        )

    def lower(
        self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None
    ) -> tuple[Any, ...]:
        """Return a call's descriptors and tensors in the order of the kernel's arguments."""
        tensors, extra_rows = (query, key, value), self.extra_rows(query, key)
        descriptors = map(self.describe, range(3), tensors, extra_rows)
        return (*descriptors, *others)


def _is_supported(call: AttentionCall) -> bool:
    """Return whether a call reads pages with a causal mask, and has what the kernels support."""
    if call.options.batch_invariant or find_planes(call) is None:
        return False
    if call.block_table is None or not call.options.causal:
        return False
    group_size = call.query.shape[1] // call.value.shape[-2]
    return (
        call.out.dtype == call.query.dtype
        and next_power_of_2(group_size) <= WARPGROUP_M.value
    )

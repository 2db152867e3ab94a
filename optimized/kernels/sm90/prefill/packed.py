"""Launch plan of the Hopper prefill kernel with query tiles of all query heads of a KV head.

Groups that do not divide the 64 rows of a warpgroup have two plans. The plan of `family.plan` has
one query head per tile, which leaves few rows unused if requests are long. `PackedPlan` has all
query heads of a token in one tile: 12 tokens of 5 heads are 60 of 64 rows, as in
FlashAttention-3 (`PackGQA`).

TMA loads and stores such a tile as one box of 12 tokens, 5 heads and 64 columns per 64 columns.
The hardware takes boxes of any size up to 256. Sizes of Triton's types are powers of two, so the
kernel's code declares a box of 8 tokens and 8 heads (`box_rows`), which has as many rows in shared
memory as a warpgroup. An instruction names the tensor map, the coordinates and the address only,
so the code is the same for both boxes. The host encodes the map with the true one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....runtime.attention_call import AttentionCall
from ....runtime.launcher import is_profiled
from ..common.config import WARPGROUP_M
from ..common.entry import find_ends, find_order
from ..common.plan import Address
from .cost import packs_heads
from .plan import PrefillPlan


def plan_packed(base: PrefillPlan) -> "PackedPlan | None":
    """Return the plan with all query heads of a KV head in a tile for the calls of another plan.

    Args:
        base: the plan with one query head per tile.

    Returns:
        None if the number of these heads divides the rows of a warpgroup, which `base` packs, or is
        larger.
    """
    group, rows = base.group_size, WARPGROUP_M.value
    if group > rows or rows % group == 0:
        return None
    config = base.config._replace(GROUP=group)
    # `box_rows` of the kernel, which only Triton calls: version 3.6 gives it a tuple
    q_box, out_box = ((rows // 8, 8, base.boxes[index][-1]) for index in (0, 3))
    return PackedPlan.derive(base, config, (q_box, *base.boxes[1:3], out_box))


@dataclass
class PackedPlan(PrefillPlan):
    """Launches with query tiles of whole tokens, for groups that do not divide WARPGROUP_M.

    It is not usable if this version of Triton does not let `Launcher` encode the tensor maps.
    """

    encodes_maps: ClassVar[bool] = True

    def is_chosen(self, max_query_len: int) -> bool:
        """Return whether requests of at most so many tokens have fewer tiles by this plan.

        A profiler's hooks are called by launches through Triton, which this plan does not have.
        """
        if not self.is_usable or is_profiled():
            return False
        return packs_heads(self.group_size, max_query_len, self.tile_rows)

    def launch_with_maps(
        self,
        call: AttentionCall,
        grid: tuple[int, int, int],
        given: Mapping[str, Any],
        may_be_converted: bool = False,
    ) -> None:
        """Launch the kernel, or set `is_usable` to False and launch nothing.

        Args:
            call, grid, given, may_be_converted: as in `Sm90Plan`.
        """
        _, pointers, options = find_ends(self.arguments)
        arguments = find_order(self.arguments)(given)
        self.is_usable = self.launcher.load(
            arguments[pointers:options], arguments[options:], arguments[:pointers]
        )
        if self.is_usable:
            super().launch_with_maps(call, grid, given, may_be_converted)

    def describe(
        self, index: int, tensor: Tensor | Address, extra_rows: int
    ) -> TensorDescriptor:
        """Return the TMA descriptor of a tensor.

        Those of queries and outputs have an attribute `true_box`: tokens and heads of the box, in
        place of the ones that Triton's type has.

        Args:
            index, tensor, extra_rows: as in `Sm90Plan`.
        """
        descriptor = super().describe(index, tensor, extra_rows)
        if index in (0, 3):
            vars(descriptor)["true_box"] = (
                WARPGROUP_M.value // self.group_size,
                self.group_size,
            )
        return descriptor

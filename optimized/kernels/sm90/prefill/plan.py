"""Launch plan of the Hopper prefill kernel."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....runtime.attention_call import AttentionCall
from ....runtime.chip import count_processors
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import BatchLimits, Estimate, Task, Warm
from ....runtime.workspace import find_workspace
from ..common.config import SWIZZLE_ROWS, WARPGROUP_M
from ..common.plan import Sm90Plan
from ..common.traits import clears_padding
from .cost import estimate_hopper_prefill
from .kernel import PrefillArguments, prefill_kernel
from .width import PrefillBounds, has_narrow_tile, takes_less_time

NARROW, WIDE = 1, 2
"""Divisions of a prefill: query tiles of one warpgroup, and of all."""
MAX_WIDTHS = 256
"""Bounds of batches for which a plan keeps the width."""


@dataclass
class PrefillPlan(Sm90Plan):
    """Launches of the Hopper prefill kernel for all calls with one signature.

    Args:
        packed: Optional. The plan for short requests, whose tiles have all query heads of a KV
            head (`PackedPlan`). If None, this plan computes all calls.
        narrow: Optional. The plan with query tiles of one warpgroup, for small batches. If None,
            there is one width.
        is_usable: whether a launch has not found that this version of Triton cannot make it.
    """

    kernel: ClassVar[Any] = prefill_kernel
    arguments: ClassVar[Any] = PrefillArguments
    packed: "PrefillPlan | None" = None
    narrow: "PrefillPlan | None" = None
    is_usable: bool = True
    _widths: dict[PrefillBounds, bool] = field(default_factory=dict)

    @property
    def clears_padding(self) -> bool:
        """Whether `launch_prefill` without short rows clears the rows of no request."""
        # called by its function: triton 3.6 would give it a tuple without names
        return bool(clears_padding.fn(self.config))

    def is_chosen(self, max_query_len: int) -> bool:
        """Return whether this plan computes requests of at most so many tokens."""
        return True

    def fitted(self) -> "PrefillPlan":
        """Return the plan for the same calls with keys in float16 (`Sm90Config.FITS_QUERIES`).

        This plan is one of queries, keys and values in bfloat16, without TAIL_DIM.
        """
        config = self.config._replace(FITS_QUERIES=True)
        return replace(
            self,
            dtype=torch.float16,
            constants={"config": config},
            packed=None if self.packed is None else self.packed.fitted(),
            narrow=None,
            _widths={},
            _tensor_maps={},
        )

    def with_narrow(self) -> "PrefillPlan":
        """Return this plan, with one with narrow query tiles if such calls have them."""
        if has_narrow_tile(self.config):
            config = self.config._replace(CONSUMERS=1)
            self.narrow = type(self).derive(self, config, self.boxes)
        return self

    def find_packed(self, max_query_len: int) -> "PrefillPlan | None":
        """Return the plan for short requests if it is chosen for some of this length."""
        packed = self.packed
        is_chosen = packed is not None and packed.is_chosen(max_query_len)
        return packed if is_chosen else None

    def prefers_narrow(self, call: AttentionCall, short_rows: int = 0) -> bool:
        """Return whether a batch takes less time with narrow tiles, as its bounds say.

        Args:
            short_rows: those of `launch_prefill`. If there are some, the host does not know how
                many requests are long, and assumes as many as have all tokens.
        """
        reqs, tokens = call.query_start_loc.shape[0] - 1, call.query.shape[0]
        if short_rows:
            reqs = min(reqs, -(-tokens // max(1, call.max_query_len)))
        bounds = PrefillBounds(reqs, tokens, call.max_query_len, call.max_key_len)
        is_narrow = self._widths.get(bounds)
        if is_narrow is None:
            if len(self._widths) >= MAX_WIDTHS:
                self._widths.clear()
            processors = count_processors(call.query.device)
            packed = self.find_packed(call.max_query_len)
            is_narrow = takes_less_time(
                self.config,
                None if packed is None else packed.config,
                self.num_heads,
                bounds,
                processors,
            )
            self._widths[bounds] = is_narrow
        return is_narrow

    def count_items(self, call: AttentionCall, tile_rows: int) -> int:
        """Return the work items of a batch, at most.

        A request has at most the query tiles that its tokens fill, and one that is not full.
        """
        config, tokens = self.config, call.query.shape[0]
        tile_tokens = (
            tile_rows // WARPGROUP_M.value * (WARPGROUP_M.value // config.GROUP)
        )
        tiles = tokens * config.ROWS_PER_TOKEN // tile_tokens
        tiles += call.query_start_loc.shape[0] - 1
        return tiles * self.num_heads // (config.GROUP * config.ROWS_PER_TOKEN)

    def prefill_lens(self, least: int, most: int) -> list[int]:
        """Return longest requests of `least` to `most` tokens, each with another kernel."""
        if self.packed is None:
            return [most]
        is_chosen = self.packed.is_chosen
        of_most = is_chosen(most)
        others = (
            length for length in range(least, most) if is_chosen(length) != of_most
        )
        return [*islice(others, 1), most]

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return the time of a prefill."""
        has_packed = self.packed is not None
        is_cut = self.config.ROWS_PER_TOKEN > 1
        return Estimate(estimate_hopper_prefill(layer, batch, has_packed, is_cut))

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield a batch for each kernel: the query tile follows from the longest request."""
        if limits.max_query_len * self.group_size <= limits.short_rows:
            return
        task, keys = Task(limits.short_rows), limits.max_key_len
        least = limits.short_rows // self.group_size + 1
        lens = set(self.prefill_lens(least, limits.max_query_len))
        if self.boxes[1][0] == SWIZZLE_ROWS.value:
            # `sm90 code prefill` may take longer requests, and copies their keys first
            lens.add(least)
        divisions = [(query_len, WIDE) for query_len in sorted(lens)]
        if self.narrow is not None:
            divisions.append((limits.max_query_len, NARROW))
        for query_len, division in divisions:
            of_tile = task._replace(division=division)
            yield Warm(type(self).__name__, 1, query_len, keys, of_tile)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute all requests of more than `task.short_rows` rows."""
        self.launch_prefill(call, task.short_rows, division=task.division)

    def launch_prefill(
        self,
        call: AttentionCall,
        short_rows: int,
        scales: tuple[Tensor | None, Tensor | None] = (None, None),
        key_factors: Tensor | None = None,
        division: int = 0,
    ) -> None:
        """Compute all requests of more than `short_rows` rows (queries times group size).

        The outputs of the other requests are not written. A query without a visible key gets the
        output 0 and the log-sum-exp -inf.

        Args:
            call: one that the plan takes; its `out` and `lse` are modified in place.
            short_rows: rows of the largest request that the decode kernel computes. If 0, there is
                no decode launch, and the rows of no request are cleared if `clears_padding`.
            scales: Optional. [num_heads] float32 factors of the keys, and of the values, of each
                query head, the same for those of a KV head: both or none in all launches of a
                plan. If None, they are 1.
            key_factors: Optional. [kv_heads, requests, keys] float32 factor of each key, in all
                launches of a plan or none. `call.block_table` has the blocks of these keys in
                order. If None, they are 1.
            division: NARROW, WIDE, or 0: as the batch's bounds say.
        """
        if call.max_query_len * self.group_size <= short_rows:
            return
        narrow = self.narrow
        if narrow is not None and (
            division == NARROW
            or (not division and self.prefers_narrow(call, short_rows))
        ):
            narrow.launch_prefill(call, short_rows, scales, key_factors)
            return
        packed = self.find_packed(call.max_query_len)
        if packed is not None:
            packed.launch_prefill(call, short_rows, scales, key_factors)
            if packed.is_usable:
                return
            self.packed = None
        given = self.name_arguments(call)
        tokens, device = call.query.shape[0], call.query.device
        # with all query heads of a KV head in a tile, the kernel counts tokens and KV heads
        group, rows_per_token = self.config.GROUP, self.config.ROWS_PER_TOKEN
        num_heads = self.num_heads // (group * rows_per_token)
        num_items = self.count_items(call, self.tile_rows)
        grid = (min(num_items, count_processors(device)), 1, 1)
        given |= {
            "work_counter": find_workspace(device, 2, 0)[0],
            "k_scales": scales[0],
            "v_scales": scales[1],
            "key_factors": key_factors,
            "factor_stride_head": 0 if key_factors is None else key_factors.stride(0),
            "num_heads": num_heads,
            "group_size": self.group_size // (group * rows_per_token),
            "max_decode_rows": short_rows // group,
            "cleared_tokens": tokens if self.clears_padding and not short_rows else 0,
        }
        self.launch_with_maps(call, grid, given, may_be_converted=True)

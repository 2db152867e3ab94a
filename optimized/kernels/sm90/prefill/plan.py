"""Launch plan of the Hopper prefill kernel."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....runtime.attention_call import AttentionCall
from ....runtime.chip import count_processors
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import BatchLimits, Estimate, Task, Warm
from ....runtime.workspace import find_workspace
from ..common.config import WARPGROUP_M
from ..common.plan import Sm90Plan
from ..common.traits import clears_padding
from .cost import estimate_hopper_prefill
from .kernel import PrefillArguments, prefill_kernel


@dataclass
class PrefillPlan(Sm90Plan):
    """Launches of the Hopper prefill kernel for all calls with one signature.

    Args:
        packed: Optional. The plan for short requests, whose tiles have all query heads of a KV
            head (`PackedPlan`). If None, this plan computes all calls.
        is_usable: whether a launch has not found that this version of Triton cannot make it.
    """

    kernel: ClassVar[Any] = prefill_kernel
    arguments: ClassVar[Any] = PrefillArguments
    packed: "PrefillPlan | None" = None
    is_usable: bool = True

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
            _tensor_maps={},
        )

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
        for query_len in self.prefill_lens(least, limits.max_query_len):
            yield Warm(type(self).__name__, 1, query_len, keys, task)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute all requests of more than `task.short_rows` rows."""
        self.launch_prefill(call, task.short_rows)

    def launch_prefill(
        self,
        call: AttentionCall,
        short_rows: int,
        scales: tuple[Tensor | None, Tensor | None] = (None, None),
        key_factors: Tensor | None = None,
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
        """
        if call.max_query_len * self.group_size <= short_rows:
            return
        packed = self.packed
        if packed is not None and packed.is_chosen(call.max_query_len):
            packed.launch_prefill(call, short_rows, scales, key_factors)
            if packed.is_usable:
                return
            self.packed = None
        given = self.name_arguments(call)
        tokens, device = call.query.shape[0], call.query.device
        # with all query heads of a KV head in a tile, the kernel counts tokens and KV heads
        group, rows_per_token = self.config.GROUP, self.config.ROWS_PER_TOKEN
        num_heads = self.num_heads // (group * rows_per_token)
        # a request has at most the tiles that its tokens fill, and one that is not full
        tile_tokens = self.config.CONSUMERS * (WARPGROUP_M.value // group)
        num_items = tokens * rows_per_token // tile_tokens + given["num_reqs"]
        num_items *= num_heads
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

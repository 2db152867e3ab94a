"""Partial results over a shared prefix on Hopper chips: supported calls, plans, splits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from ....runtime.attention_call import AttentionCall
from ....runtime.chip import count_processors
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import (
    ALWAYS,
    BatchLimits,
    Estimate,
    KernelFamily,
    PrefixWork,
    Role,
    Task,
    Warm,
)
from ....runtime.workspace import MAX_KEPT_NUMBERS
from ..common.chip import is_hopper
from ..common.config import with_whole_acc
from ..common.plan import Sm90Plan
from ..common.planes import find_planes
from ..prefill import family as sm90
from .kernel import PrefixArguments, cascade_prefix_sm90_kernel

ITEM_TILES = 4
"""KV tiles that take as long as what a work item does besides them. It is estimated. With it, a
prefix of 4,096 keys has 4 splits for 512 rows of 8 KV heads: 32 us on an H200. One split takes 63,
two take 41, eight 38."""
MAX_SPLITS = 16
"""Splits of the prefix, at most: the second launch reads a partial result of each."""


def supports(call: AttentionCall) -> bool:
    """Return whether the kernel computes partial results of calls with this signature.

    Args:
        call: the call over the prefix: it is not causal and has no sinks.
    """
    options = call.options
    # positions in the call over the prefix are not those of the sequence
    if options.sliding_window is not None or options.attention_chunk_size is not None:
        return False
    return (
        is_hopper(call.query.device)
        and call.block_table is not None
        and find_planes(call) is not None
    )


def plan(call: AttentionCall) -> "PrefixPlan":
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernel does not support.
    """
    base = sm90.plan(call, may_cut_tokens=False)
    # the log-sum-exp is always computed, and its error budget is small
    config = with_whole_acc(base.config)._replace(FAST_TANH=False)
    return PrefixPlan.derive(base, config, base.boxes)


@lru_cache(1024)
def choose_split_len(
    prefix_len: int, block_n: int, step: int, items: int, processors: int, most: int
) -> int:
    """Return the keys per split of the prefix.

    The time is estimated as rounds of work items times KV tiles of an item, and ITEM_TILES more.

    Args:
        prefix_len: keys of the prefix.
        block_n: keys of a KV tile.
        step: what the result must be a multiple of.
        items: work items per split.
        processors: multiprocessors of the chip.
        most: splits, at most.

    Example:
        512 rows of 8 KV heads in tiles of 128 rows are 32 work items per split. 4 splits of 4,096
        keys fill 128 of 132 multiprocessors:

        >>> choose_split_len(4096, 128, 128, 32, 132, 16)
        1024
    """
    best, best_len = math.inf, prefix_len
    for splits in range(1, most + 1):
        split_len = -(-prefix_len // (splits * step)) * step
        rounds = -(-items * -(-prefix_len // split_len) // processors)
        cost = rounds * (split_len / block_n + ITEM_TILES)
        if cost < best:
            best, best_len = cost, split_len
    return best_len


@dataclass
class PrefixPlan(Sm90Plan):
    """Launches of the Hopper kernel over a prefix for all calls with one signature.

    Attributes:
        is_overlapped: whether the second launch of a cascade may begin before this one has ended.
            128 short rests then take 78 us with the prefix and not 80.
    """

    is_overlapped: ClassVar[bool] = True
    kernel: ClassVar[Any] = cascade_prefix_sm90_kernel
    arguments: ClassVar[Any] = PrefixArguments

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return ALWAYS: it is not compared with the portable kernel."""
        return ALWAYS

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield one batch: there is one kernel."""
        keys = limits.max_key_len
        yield Warm(self.launcher.name, limits.num_reqs, limits.max_query_len, keys)

    def divide(
        self, call: AttentionCall, prefix_len: int, division: int = 0
    ) -> PrefixWork:
        """Return how the work over a prefix is divided.

        Args:
            call: the call.
            prefix_len: keys of the prefix, at least 1.
            division: not used.
        """
        return PrefixWork(self.split_len(call, prefix_len))

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Store the partial results of all tokens, those of padding included."""
        assert task.prefix is not None
        length, split_len, begins, workspace, _ = task.prefix
        self.launch_prefix(call, length, split_len, begins[0], workspace)

    def split_len(self, call: AttentionCall, prefix_len: int) -> int:
        """Return the keys per split of the prefix.

        Args:
            call: the call.
            prefix_len: keys of the prefix, at least 1.
        """
        config = self.config
        tokens = call.query.shape[0]
        numbers = tokens * self.num_heads * (config.HEAD_SIZE + 1)
        return choose_split_len(
            prefix_len,
            config.BLOCK_N,
            math.lcm(config.BLOCK_N, config.BLOCK_SIZE),
            self._count_tiles(tokens),
            count_processors(call.query.device),
            max(1, min(MAX_SPLITS, MAX_KEPT_NUMBERS // numbers)),
        )

    def launch_prefix(
        self,
        call: AttentionCall,
        prefix_len: int,
        split_len: int,
        values_begin: int,
        workspace: Tensor,
    ) -> None:
        """Store the partial results of all tokens, those of padding included.

        Args:
            call: one that the plan takes.
            prefix_len: keys of the prefix, at least 1.
            split_len: what the method of this name returns.
            values_begin: index in `workspace` of the values of partial results.
            workspace: float32. Written: log-sum-exps [splits, tokens, heads] in base 2 at its
                begin, and values [splits, tokens, heads, value_size].
        """
        group = self.config.GROUP
        items = self._count_tiles(call.query.shape[0]) * -(-prefix_len // split_len)
        given = self.name_arguments(call)
        given |= {
            "prefix_out": workspace[values_begin:],
            "prefix_lse": workspace,
            "prefix_len": prefix_len,
            "split_len": split_len,
            "num_heads": self.num_heads // group,
            "group_size": self.group_size // group,
        }
        programs = min(items, count_processors(call.query.device))
        self.launch_with_maps(call, (programs, 1, 1), given)

    def _count_tiles(self, tokens: int) -> int:
        """Return the work items per split of the prefix."""
        group = self.config.GROUP
        return -(-tokens // (self.tile_rows // group)) * (self.num_heads // group)


FAMILY = KernelFamily("sm90 prefix", Role.PREFIX, supports, plan)

"""Ranks of drawn batches: how the keys and heads of a call are distributed over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .drawn_numbers import Ints

STEP, GATHER, RING = (
    "DecodeContextParallel",
    "PrefillContextParallel",
    "RingContextParallel",
)
"""Operations of several ranks: a step over a shared cache, and prefills of two kinds."""


@dataclass(frozen=True)
class RankLayout:
    """The ranks that compute the batches of a signature together.

    Args:
        operation: STEP, GATHER or RING.
        world_size: Ranks that share each sequence's keys, or compute chunks of each prompt.
        tp_world_size: Ranks that the query heads of a STEP are distributed over, a multiple of
            `world_size`. If both are equal, each rank stores all KV heads. If not, it stores those
            that its query heads read, and `world_size` ranks with the same KV head share keys.
        interleave_size: Consecutive positions that one rank stores.
        exchange: How partial results are exchanged.
        splits: Optional. Number of fixed splits and positions per run. If None, there are none.
    """

    operation: str
    world_size: int
    tp_world_size: int = 1
    interleave_size: int = 1
    exchange: str = "all_to_all"
    splits: tuple[int, int] | None = None

    @property
    def is_step(self) -> bool:
        """Whether keys are in a cache. If not, all of them are new."""
        return self.operation == STEP

    @property
    def is_joined(self) -> bool:
        """Whether rows are merged from partial results."""
        return self.operation != GATHER

    def takes(self, block_size: int, query_heads: int, kv_heads: int) -> bool:
        """Return whether calls of these sizes can be distributed."""
        if not self.is_step:
            return True
        if block_size % self.interleave_size or query_heads % self.tp_world_size:
            return False
        if self.splits is not None:
            count, run = self.splits
            period = self.interleave_size * self.world_size
            if self.interleave_size % run or count * run % period:
                return False
        if self.tp_world_size == self.world_size:
            return True
        if kv_heads % self.tp_world_size == 0:
            return self.world_size == 1
        copies, rest = divmod(self.tp_world_size, kv_heads)
        return not rest and copies % self.world_size == 0

    def heads_of(
        self, rank: int, query_heads: int, kv_heads: int
    ) -> tuple[slice, slice]:
        """Return the query heads of a rank, and the KV heads that it stores."""
        share = query_heads // self.tp_world_size
        own = slice(rank * share, (rank + 1) * share)
        if self.tp_world_size == self.world_size:
            return own, slice(0, kv_heads)
        group = query_heads // kv_heads
        return own, slice(own.start // group, (own.stop - 1) // group + 1)

    def stored_on(self, rank: int, position: Ints) -> Ints:
        """Return for each position its index among those of a rank; -1 on other ranks."""
        group, within = np.divmod(position, self.interleave_size)
        index = group // self.world_size * self.interleave_size + within
        return np.where(group % self.world_size == rank, index, -1)

    def idle_ranks(self, key_lens: tuple[int, ...]) -> int:
        """Return how often a rank has no key of a request that has keys."""
        runs = [-(-key_len // self.interleave_size) for key_len in key_lens if key_len]
        return sum(max(0, self.world_size - run) for run in runs)

    def simpler(self) -> Iterator["RankLayout"]:
        """Yield ranks that are simpler by one change."""
        for world_size in range(1, self.world_size):
            ranks = replace(self, world_size=world_size)
            yield replace(ranks, tp_world_size=world_size) if self.is_step else ranks
        if self.tp_world_size > self.world_size:
            yield replace(self, tp_world_size=self.world_size)
        if self.splits is not None:
            yield replace(self, splits=None)
        for interleave_size in range(1, self.interleave_size):
            yield replace(self, interleave_size=interleave_size)
        if self.exchange != "all_to_all":
            yield replace(self, exchange="all_to_all")

    def describe(self) -> dict[str, str]:
        """Return what differs among ranks of one operation, by name."""
        found = {"operation": self.operation, "ranks": str(self.world_size)}
        if self.is_step:
            splits = "none" if self.splits is None else "{} x {}".format(*self.splits)
            found |= {
                "tensor-parallel ranks": str(self.tp_world_size),
                "interleave size": str(self.interleave_size),
                "exchange": self.exchange,
                "splits": splits,
            }
        return found

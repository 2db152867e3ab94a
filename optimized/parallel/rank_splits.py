"""Splits of a rank: which ones it stores, their block tables, and the slots of new tokens.

The keys of a fixed split are runs of slots. So the cache is viewed as blocks of one run, and a
block table lists the runs of each split.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ...contract.parallel import KeySplits
from ...engine.rank_waits import wait_for_ranks
from .key_splits import offsets_of_runs, order_of_partials, stored_splits


class _Runs(NamedTuple):
    """Where the runs of this rank's splits are in a row of the block table.

    Args:
        column: [splits * runs] entry of the row.
        within: [splits, runs] the run's index in that block.
        per_block: runs between the starts of two blocks.
    """

    column: Tensor
    within: Tensor
    per_block: int


class RankSplits:
    """The splits that a rank stores.

    Args:
        of_rank: number of ranks, this rank, interleave size.
        fixed: Optional. Fixed splits. If None, each rank's share is one split.
        device: of the cache.
    """

    def __init__(
        self,
        of_rank: tuple[int, int, int],
        fixed: KeySplits | None,
        device: torch.device,
    ) -> None:
        world_size, rank, interleave_size = of_rank
        self.of_rank = of_rank
        self.is_fixed = fixed is not None
        self.splits = fixed or KeySplits(world_size, interleave_size)
        self.own = [rank]
        order = list(range(world_size))
        if fixed is not None:
            self.own = stored_splits(fixed, *of_rank)
            order = order_of_partials(fixed, world_size, interleave_size)
        self.device = device
        self.order = torch.tensor(order, device=device)
        first = [split * self.splits.run for split in self.own]
        self._first = torch.tensor(first, dtype=torch.int32, device=device)
        self._known: dict[tuple[int, ...], _Runs] = {}

    def lens(self, up_to: Tensor) -> Tensor:
        """Return how many of the first keys of a sequence each split has.

        Args:
            up_to: [tokens] number of keys.

        Returns:
            [splits * tokens] int32.
        """
        run = self.splits.run
        rest = (up_to % (run * self.splits.count))[None, :] - self._first[:, None]
        lens = (up_to // (run * self.splits.count))[None, :] * run
        return (lens + rest.clamp(0, run)).flatten().to(torch.int32)

    def tables(self, rows: Tensor, key_cache: Tensor) -> tuple[Tensor, int]:
        """Return the block table of each split and token, and the slots in one of its blocks.

        Args:
            rows: [tokens, max_blocks] the row of each token's request.
        """
        if not self.is_fixed:
            return rows, key_cache.shape[1]
        key = (rows.shape[1], key_cache.shape[1], *key_cache.stride()[:2])
        runs = self._known.get(key)
        if runs is None:
            wait_for_ranks("indices are copied to the device")
            runs = self._known[key] = self._find_runs(rows.shape[1], key_cache)
        entries = rows[:, runs.column] * runs.per_block
        entries = entries.view(len(rows), *runs.within.shape) + runs.within
        return entries.transpose(0, 1).flatten(0, 1), self.splits.run

    def _find_runs(self, max_blocks: int, key_cache: Tensor) -> _Runs:
        """Return where the runs of each split are, for one width of the block table."""
        world_size, _, interleave_size = self.of_rank
        run, block_size = self.splits.run, key_cache.shape[1]
        num_runs = -(-max_blocks * block_size // (run * len(self.own)))
        offsets = torch.stack(
            [
                offsets_of_runs(
                    self.splits, split, num_runs, world_size, interleave_size
                )
                for split in self.own
            ]
        )
        # the last entries of a row may be past its end; then no split reads them
        column = (offsets // block_size).clamp(max=max_blocks - 1)
        within = (offsets % block_size // run).to(torch.int32)
        per_block = runs_per_block(key_cache, run)
        return _Runs(
            column.flatten().to(self.device), within.to(self.device), per_block
        )

    def slots(self, rows: Tensor, position: Tensor, block_size: int) -> Tensor:
        """Return the slot of each position on this rank, PAD_SLOT_ID if it is on another one."""
        world_size, rank, interleave_size = self.of_rank
        group = position // interleave_size
        offset = group // world_size * interleave_size + position % interleave_size
        column = (offset // block_size).clamp(max=rows.shape[1] - 1).long()
        block = rows.gather(1, column[:, None])[:, 0].long()
        slot = block * block_size + offset % block_size
        return torch.where(group % world_size == rank, slot, PAD_SLOT_ID)


def runs_per_block(cache: Tensor, run: int) -> int:
    """Return how many runs of slots there are between the starts of two blocks.

    Raises:
        ValueError: The distance between two blocks is not a multiple of a run.
    """
    block, slot = cache.stride()[:2]
    if block % (slot * run):
        raise ValueError(
            f"the cache has strides {block} per block and {slot} per slot: expected a multiple of"
            f" {run} slots per block; use a contiguous cache"
        )
    return block // (slot * run)


def as_runs(cache: Tensor, run: int) -> Tensor:
    """Return a cache as blocks of one run each, [blocks, run, kv_heads, ...]. If 0, as it is."""
    if not run:
        return cache
    num_blocks, block_size, *shape = cache.shape
    per_block = runs_per_block(cache, run)
    _, slot, *strides = cache.stride()
    return cache.as_strided(
        ((num_blocks - 1) * per_block + block_size // run, run, *shape),
        (slot * run, slot, *strides),
    )


def scale_as_runs(
    name: str, scale: Tensor | float | None, cache: Tensor, run: int
) -> Tensor | float | None:
    """Return the scale of a cache for blocks of one run each.

    Raises:
        ValueError: Scales that are measured have another distance between two blocks.
    """
    if not run or not isinstance(scale, Tensor) or scale.dim() < 3:
        return scale
    expected = runs_per_block(cache, run)
    if runs_per_block(scale, run) != expected:
        raise ValueError(
            f"{name} has strides {list(scale.stride())}: expected {expected * run} slots from block"
            " to block, as the cache has, with fixed splits; keep both in contiguous tensors"
        )
    return as_runs(scale, run)

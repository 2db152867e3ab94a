"""Persistent block-table rows: append, move, swap and clear as requests come and go.

The rows are one numpy array, modified in place. A step copies the used rows to pinned memory of its
own and starts the copy to the device. The host does not wait, and later changes do not reach it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...contract import shapes
from ...contract.argument_types import typed
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...validation import values_checked
from ...validation.step_shapes import (
    check_block_table_sizes,
    check_mamba_block_table,
    check_num_rows,
    check_positions,
    check_row_indices,
    check_row_takes,
)


@typed
class BlockTable:
    """The rows of all requests of an engine, for one group of layers."""

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        device: torch.device | str = "cpu",
        kernel_block_size: int | None = None,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        dcp_kv_cache_interleave_size: int = 1,
    ) -> None:
        """Create a table of empty rows; the attribute `block_size` is the kernel's."""
        self.block_size = block_size if kernel_block_size is None else kernel_block_size
        check_block_table_sizes(
            block_size,
            max_num_reqs,
            max_num_blocks_per_req,
            self.block_size,
            dcp_world_size,
            dcp_rank,
            dcp_kv_cache_interleave_size,
        )
        self.entries_per_block = block_size // self.block_size
        self.max_num_reqs = max_num_reqs
        self.max_num_blocks_per_req = max_num_blocks_per_req * self.entries_per_block
        self.device = torch.device(device)
        self.dcp_world_size = dcp_world_size
        self.dcp_rank = dcp_rank
        self.dcp_kv_cache_interleave_size = dcp_kv_cache_interleave_size
        width = self.max_num_blocks_per_req
        self._table = np.zeros((max_num_reqs, width), dtype=np.int32)
        self._held = np.zeros(max_num_reqs, dtype=np.int32)

    @property
    def num_blocks_per_row(self) -> list[int]:
        """Number of entries per row, in blocks of the kernel."""
        held: list[int] = self._held.tolist()
        return held

    def append_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Append blocks to a row."""
        self._check_takes(block_ids, row_idx, self._held)
        held = int(self._held[row_idx])
        # step: write one entry per kernel block
        first = np.asarray(block_ids, dtype=np.int32) * self.entries_per_block
        entries = (first[:, None] + np.arange(self.entries_per_block)).reshape(-1)
        self._table[row_idx, held : held + len(entries)] = entries
        self._held[row_idx] += len(entries)

    def add_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Replace the content of a row."""
        self._check_takes(block_ids, row_idx, np.zeros_like(self._held))
        self._table[row_idx] = 0
        self._held[row_idx] = 0
        self.append_row(block_ids, row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Copy a row over another row."""
        check_row_indices(self.max_num_reqs, src=src, tgt=tgt)
        self._table[tgt] = self._table[src]
        self._held[tgt] = self._held[src]

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        check_row_indices(self.max_num_reqs, src=src, tgt=tgt)
        self._table[[src, tgt]] = self._table[[tgt, src]]
        self._held[[src, tgt]] = self._held[[tgt, src]]

    def clear(self) -> None:
        """Empty all rows."""
        self._table.fill(0)
        self._held.fill(0)

    def compute_slot_mapping(
        self, req_indices: Sequence[int], positions: Sequence[int]
    ) -> shapes.SlotMapping:
        """Return this rank's slot of each token."""
        tokens_per_entry = self.block_size * self.dcp_world_size
        # an array, since building a list of all rows in every step is slow
        check_positions(req_indices, positions, self._held, tokens_per_entry)
        in_a_row = self.dcp_kv_cache_interleave_size
        req = np.asarray(req_indices, dtype=np.int64)
        position = np.asarray(positions, dtype=np.int64)
        # step: look up the block
        block_id = self._table[req, position // tokens_per_entry].astype(np.int64)
        # step: add the offset among this rank's tokens
        turn, place = np.divmod(position % tokens_per_entry, in_a_row)
        rounds, rank = np.divmod(turn, self.dcp_world_size)
        slots = block_id * self.block_size + rounds * in_a_row + place
        slots[rank != self.dcp_rank] = PAD_SLOT_ID
        return torch.from_numpy(slots)

    def get_device_tensor(self, num_reqs: int) -> shapes.BlockTable:
        """Return a copy of the first rows on the device of the cache."""
        check_num_rows(self.max_num_reqs, num_reqs)
        live = torch.empty(
            (num_reqs, self.max_num_blocks_per_req),
            dtype=torch.int32,
            device=HOST,
            pin_memory=self.device.type == "cuda",
        )
        live.numpy()[:] = self._table[:num_reqs]
        return live.to(self.device, non_blocking=True)

    def _check_takes(
        self, block_ids: Sequence[int], row_idx: int, num_held: np.ndarray
    ) -> None:
        width, per_block = self.max_num_blocks_per_req, self.entries_per_block
        check_row_takes(block_ids, row_idx, num_held, width, per_block)


@typed
def mamba_get_block_table_tensor(
    block_table: shapes.BlockTable,
    seq_lens: shapes.TokenCounts,
    block_size: int,
    num_speculative_blocks: int = 0,
    mamba_cache_mode: str = "none",
) -> shapes.StateBlocks:
    """Return the blocks that hold the states of Mamba layers in this step."""
    check_mamba_block_table(
        block_table,
        seq_lens,
        block_size,
        num_speculative_blocks,
        mamba_cache_mode,
        contents=values_checked(block_table),
    )
    if mamba_cache_mode != "align":
        return block_table
    # step: find the block of the last token
    last = (seq_lens - 1).clamp(min=0) // block_size
    # step: select it and the blocks of the draft tokens
    offsets = torch.arange(1 + num_speculative_blocks, device=seq_lens.device)
    return block_table.gather(1, last[:, None] + offsets)

"""Persistent block-table rows: append, move, swap and clear as requests come and go.

An engine keeps one table for its whole life. A request gets a row when it starts and releases it
when it ends. Then the last row moves into the gap, so that the used rows stay contiguous. A row
grows by a block when its sequence needs one. Reusing a row discards its previous content.

A kernel may use smaller blocks than the block manager: then each block of the manager is several
entries. If ranks share a sequence (`attention/context_parallel.py`), a row holds the blocks of this
rank. Each of them covers as many positions as all ranks together store in one block.
"""

from collections.abc import Sequence

import torch

from ...contract import shapes
from ...contract.argument_types import typed
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...validation import validated
from ...validation.step_shapes import (
    check_block_table_sizes,
    check_mamba_block_table,
    check_num_rows,
    check_positions,
    check_row_indices,
    check_row_takes,
)
from .block_table import make_block_table


@typed
class BlockTable:
    """The rows of all requests of an engine, for one group of layers.

    Args:
        block_size: slots in a block of the manager.
        max_num_reqs: rows.
        max_num_blocks_per_req: blocks of the manager that a row holds.
        device: device of the cache.
        kernel_block_size: Optional. Slots in a block of the kernel, a divisor of `block_size`.
            If None, the same as `block_size`.
        dcp_world_size, dcp_rank: number of ranks that share each sequence, and this rank.
        dcp_kv_cache_interleave_size: consecutive positions that one rank stores, a divisor of
            the kernel's block size.

    Raises:
        ValueError: a number is out of range, or a size is not a multiple of its divisor.

    Source:
        vLLM's class of that name.

    Example:
        >>> table = BlockTable(block_size=4, max_num_reqs=3, max_num_blocks_per_req=2)
        >>> table.add_row([7, 2], 0)
        >>> table.add_row([5], 1)
        >>> table.append_row([9], 1)
        >>> table.get_device_tensor(2)
        tensor([[7, 2],
                [5, 9]], dtype=torch.int32)
        >>> table.compute_slot_mapping(req_indices=[0, 1, 1], positions=[5, 3, 4])
        tensor([ 9, 23, 36])
        >>> table.move_row(1, 0)
        >>> table.get_device_tensor(1)
        tensor([[5, 9]], dtype=torch.int32)
    """

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
        self._rows: list[list[int]] = [[] for _ in range(max_num_reqs)]

    @property
    def num_blocks_per_row(self) -> list[int]:
        """Number of entries per row, in blocks of the kernel."""
        return [len(row) for row in self._rows]

    def append_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Append blocks to a row.

        Args:
            block_ids: blocks of the manager, in sequence order.
            row_idx: the row.

        Raises:
            IndexError: no such row, no space in it, or an invalid block id. The row is not
                modified.
        """
        self._check_takes(block_ids, row_idx, self.num_blocks_per_row)
        row = self._rows[row_idx]
        for block_id in block_ids:
            # step: write one entry per kernel block
            for entry in range(self.entries_per_block):
                row.append(block_id * self.entries_per_block + entry)

    def add_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Replace the content of a row.

        Args:
            block_ids: blocks of the manager, in sequence order.
            row_idx: the row.

        Raises:
            IndexError: no such row, no space in it, or an invalid block id. The row is not
                modified.
        """
        self._check_takes(block_ids, row_idx, [0] * self.max_num_reqs)
        self._rows[row_idx] = []
        self.append_row(block_ids, row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Copy a row over another row.

        Args:
            src: the row to copy. It keeps its blocks until it is reused.
            tgt: the row to overwrite.

        Raises:
            IndexError: no such row.
        """
        check_row_indices(self.max_num_reqs, src=src, tgt=tgt)
        self._rows[tgt] = list(self._rows[src])

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows.

        Args:
            src, tgt: the rows.

        Raises:
            IndexError: no such row.
        """
        check_row_indices(self.max_num_reqs, src=src, tgt=tgt)
        self._rows[src], self._rows[tgt] = self._rows[tgt], self._rows[src]

    def clear(self) -> None:
        """Empty all rows."""
        self._rows = [[] for _ in range(self.max_num_reqs)]

    def compute_slot_mapping(
        self, req_indices: Sequence[int], positions: Sequence[int]
    ) -> shapes.SlotMapping:
        """Return this rank's slot of each token.

        Args:
            req_indices: [tokens] row of each token.
            positions: [tokens] position of each token in its sequence.

        Returns:
            [tokens] int64 on the host; PAD_SLOT_ID for tokens that another rank stores.

        Raises:
            IndexError: no such row, or a position past the end of its blocks.
            ValueError: lists of different lengths.
        """
        tokens_per_entry = self.block_size * self.dcp_world_size
        check_positions(
            req_indices, positions, self.num_blocks_per_row, tokens_per_entry
        )
        interleave = self.dcp_kv_cache_interleave_size
        slots = []
        for req, position in zip(req_indices, positions, strict=True):
            # step: look up the block
            block_id = self._rows[req][position // tokens_per_entry]
            # step: add the offset among this rank's tokens
            group, offset = divmod(position % tokens_per_entry, interleave)
            rounds, rank = divmod(group, self.dcp_world_size)
            slot = block_id * self.block_size + rounds * interleave + offset
            slots.append(slot if rank == self.dcp_rank else PAD_SLOT_ID)
        return torch.tensor(slots, dtype=torch.int64, device=HOST)

    def get_device_tensor(self, num_reqs: int) -> shapes.BlockTable:
        """Return a copy of the first rows on the device of the cache.

        Args:
            num_reqs: number of rows.

        Returns:
            [num_reqs, max_num_blocks_per_req] int32, padded with 0.

        Raises:
            IndexError: more rows than there are.
            ValueError: a negative number.
        """
        check_num_rows(self.max_num_reqs, num_reqs)
        rows = self._rows[:num_reqs]
        return make_block_table(rows, self.max_num_blocks_per_req, self.device)

    def _check_takes(
        self, block_ids: Sequence[int], row_idx: int, num_held: Sequence[int]
    ) -> None:
        width, per_block = self.max_num_blocks_per_req, self.entries_per_block
        check_row_takes(block_ids, row_idx, num_held, width, per_block)


@validated(check_mamba_block_table)
def mamba_get_block_table_tensor(
    block_table: shapes.BlockTable,
    seq_lens: shapes.TokenCounts,
    block_size: int,
    num_speculative_blocks: int = 0,
    mamba_cache_mode: str = "none",
) -> shapes.StateBlocks:
    """Return the blocks that hold the states of Mamba layers in this step.

    A state summarizes all tokens before it, so a layer needs only the last state, and one more per
    draft token.

    Args:
        block_table: [reqs, max_blocks].
        seq_lens: [reqs] tokens of each sequence.
        block_size: tokens between two stored states.
        num_speculative_blocks: blocks for draft tokens, after the last one.
        mamba_cache_mode: "none": a row holds only these blocks. "all": every block of a row
            holds a state, and the layer selects. "align": a row is as long as the sequence, and
            the blocks are selected here.

    Returns:
        [reqs, 1 + num_speculative_blocks] int32 with "align"; otherwise the table itself.

    Raises:
        ValueError: another mode, or a number out of range.
        IndexError: a row ends before its last blocks.

    Source:
        vLLM's function of that name (0.33).

    Example:
        5 tokens end in block 1 of 4 tokens each, 9 tokens in block 2.

        >>> mamba_get_block_table_tensor(
        ...     torch.tensor([[7, 2, 0], [5, 9, 4]], dtype=torch.int32),
        ...     torch.tensor([5, 9], dtype=torch.int32),
        ...     block_size=4,
        ...     mamba_cache_mode="align",
        ... )
        tensor([[2],
                [4]], dtype=torch.int32)
    """
    if mamba_cache_mode != "align":
        return block_table
    selected = block_table.new_zeros(len(seq_lens), 1 + num_speculative_blocks)
    for req, seq_len in enumerate(seq_lens.tolist()):
        # step: find the block of the last token
        last = max(seq_len - 1, 0) // block_size
        # step: select it and the blocks of the draft tokens
        selected[req] = block_table[req, last : last + 1 + num_speculative_blocks]
    return selected

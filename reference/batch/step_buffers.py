"""Step buffers: tensors with fixed addresses that hold each step's metadata.

A captured CUDA graph reads the addresses with which it was captured. An engine therefore keeps one
set of tensors and writes every step into them. The block table persists as well: a step only adds
the blocks that were allocated since the last one. So the cost of a step does not grow with the
length of the context.
"""

from collections.abc import Sequence

import torch

from ...contract.argument_types import typed
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.metadata_classes import CommonAttentionMetadata
from ...validation.step import (
    check_buffer_sizes,
    check_buffered_step,
    check_new_blocks,
    check_rows,
)
from ..cache.slot_mapping import compute_slot_mapping_batch


@typed
class StepBuffers:
    """The tensors of an engine's steps, allocated once and written in place.

    Args:
        max_num_reqs: requests in the largest step, and rows of the block table.
        max_num_tokens: new tokens in the largest step.
        max_blocks: blocks of the longest sequence.
        block_size: slots in a block.
        device: device of the cache.

    Raises:
        ValueError: a size below 1 (0 for `max_blocks`).

    Source:
        vLLM's model runner: its input batch, block tables and CpuGpuBuffers.

    Example:
        Row 0 starts with three tokens, then decodes its fourth and fifth. Block 2 is appended
        before the fifth.

        >>> buffers = StepBuffers(
        ...     max_num_reqs=2, max_num_tokens=8, max_blocks=2, block_size=4
        ... )
        >>> buffers.append_blocks([0], [[7]])
        >>> buffers.build([3], [0]).slot_mapping
        tensor([28, 29, 30])
        >>> buffers.build([1], [3]).slot_mapping
        tensor([31])
        >>> buffers.append_blocks([0], [[2]])
        >>> step = buffers.build([1], [4], num_reqs_padded=2, num_tokens_padded=2)
        >>> step.slot_mapping, step.seq_lens
        (tensor([ 8, -1]), tensor([5, 0], dtype=torch.int32))
        >>> step.block_table_tensor[0]
        tensor([7, 2], dtype=torch.int32)
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        max_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the tensors of the largest step."""
        check_buffer_sizes(max_num_reqs, max_num_tokens, max_blocks, block_size)
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self._rows: list[list[int]] = [[] for _ in range(max_num_reqs)]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        self._block_table = zeros(max_num_reqs, max_blocks)
        self._ordered_table = zeros(max_num_reqs, max_blocks)
        self._query_start_loc = zeros(max_num_reqs + 1)
        self._seq_lens = zeros(max_num_reqs)
        self._slot_mapping = torch.full(
            (max_num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=self.device
        )

    @property
    def num_blocks_per_row(self) -> list[int]:
        """Number of blocks in each row of the table."""
        return [len(row) for row in self._rows]

    def append_blocks(
        self, rows: Sequence[int], new_blocks: Sequence[Sequence[int]]
    ) -> None:
        """Append new blocks to some rows; the next step includes them.

        Args:
            rows: rows of the table, each once.
            new_blocks: per row the block ids to append.

        Raises:
            IndexError: no such row, a row would be longer than the table is wide, or a block id
                is negative.
            ValueError: the number of lists is not the number of rows, or a row is given twice.
        """
        held = self.num_blocks_per_row
        check_new_blocks(rows, new_blocks, held, self.max_blocks)
        # step: append the new ids to each row
        for row, blocks in zip(rows, new_blocks, strict=True):
            for offset, block_id in enumerate(blocks):
                self._block_table[row, held[row] + offset] = block_id
            self._rows[row].extend(blocks)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Empty some rows, whose requests have ended.

        Args:
            rows: rows of the table. Their content is not erased, because later steps do not read
                it.

        Raises:
            IndexError: no such row.
        """
        check_rows("rows", rows, self.max_num_reqs)
        for row in rows:
            self._rows[row] = []

    def build(
        self,
        query_lens: Sequence[int],
        num_computed_tokens: Sequence[int],
        rows: Sequence[int] | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> CommonAttentionMetadata:
        """Write one step into the buffers and return its metadata.

        Args:
            query_lens: [reqs] new tokens of each request.
            num_computed_tokens: [reqs] tokens already in the cache.
            rows: Optional. [reqs] row of the table of each request. If None, request i has row
                i, and the table is not copied.
            num_reqs_padded, num_tokens_padded: Optional. The size of a captured graph, to which
                the step is padded with empty requests and tokens without a slot. If None, the
                step is not padded.

        Returns:
            The metadata. Its tensors on the device are views of the buffers, valid until the
            next step is built. Its tensors on the host are not shared. Its maxima are exact.
            `num_reqs` counts padding, `num_actual_tokens` does not.

        Raises:
            IndexError: a sequence is longer than its row, or a row does not exist.
            ValueError: lists of different lengths, a negative count, or a step larger than the
                buffers.
        """
        check_buffered_step(
            self,
            query_lens,
            num_computed_tokens,
            rows,
            num_reqs_padded,
            num_tokens_padded,
        )
        num_reqs, num_tokens = len(query_lens), sum(query_lens)
        batch_rows = range(num_reqs) if rows is None else rows
        block_rows = [self._rows[row] for row in batch_rows]
        # step: compute the slots of the new tokens
        slot_mapping = compute_slot_mapping_batch(
            query_lens, num_computed_tokens, block_rows, self.block_size
        )
        # step: pad to the size of the captured graph
        reqs = num_reqs if num_reqs_padded is None else num_reqs_padded
        tokens = num_tokens if num_tokens_padded is None else num_tokens_padded
        lens = self._padded(query_lens, reqs)
        computed = self._padded(num_computed_tokens, reqs)
        starts = torch.zeros(reqs + 1, dtype=torch.int32, device=HOST)
        starts[1:] = lens.cumsum(0)
        seq_lens = lens + computed
        # step: copy everything to the device
        self._query_start_loc[: reqs + 1] = starts
        self._seq_lens[:reqs] = seq_lens
        self._slot_mapping[:tokens] = PAD_SLOT_ID
        self._slot_mapping[:num_tokens] = slot_mapping
        # step: copy the rows in batch order
        block_table = self._block_table
        if rows is not None:
            block_table = self._ordered_table
            for req, row in enumerate(rows):
                block_table[req] = self._block_table[row]
        return CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: reqs + 1],
            query_start_loc_cpu=starts,
            seq_lens=self._seq_lens[:reqs],
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=computed,
            num_reqs=reqs,
            num_actual_tokens=num_tokens,
            max_query_len=int(max(query_lens, default=0)),
            max_seq_len=max(seq_lens.tolist(), default=0),
            block_table_tensor=block_table[:reqs],
            slot_mapping=self._slot_mapping[:tokens],
        )

    @staticmethod
    def _padded(counts: Sequence[int], reqs: int) -> torch.Tensor:
        padded = torch.zeros(reqs, dtype=torch.int32, device=HOST)
        padded[: len(counts)] = torch.tensor(counts, dtype=torch.int32, device=HOST)
        return padded

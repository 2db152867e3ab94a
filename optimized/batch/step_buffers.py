"""Step buffers: tensors with fixed addresses that hold each step's metadata.

The rows of block ids are stored twice: in numpy, where slots are computed, and on the device. A
step writes starts, lengths, slots and new blocks into one pinned buffer. One asynchronous copy
moves its filled part to the device, where the new blocks are scattered into the table. There are
two pinned buffers; one is filled again only after its copy has finished. Nothing is read from the
device.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...contract.argument_types import typed
from ...contract.integers import as_array
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.metadata_classes import CommonAttentionMetadata
from ...engine.rank_waits import wait_for_ranks
from ...validation.step import (
    check_buffer_sizes,
    check_buffered_step,
    check_new_blocks,
    check_rows,
)

_INT32, _INT64 = 4, 8  # bytes
_NUM_PINNED_BUFFERS = 2


@typed
class StepBuffers:
    """The tensors of an engine's steps, allocated once and written in place.

    One buffer on the device holds, in this order: starts, lengths, rows, slots. New entries of the
    block table are copied to the space after the slots of the step, which no graph reads.
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
        self._host_table = np.zeros((max_num_reqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_reqs, dtype=np.int64)
        self._row_offsets = np.arange(max_num_reqs, dtype=np.int64) * max_blocks
        self._token_numbers = np.arange(max_num_tokens, dtype=np.int64)
        # row -> number of its blocks that the device has; only of rows with new blocks
        self._num_sent: dict[int, int] = {}
        # offsets of the sections of the buffer, in bytes
        self._lens_at = (max_num_reqs + 1) * _INT32
        self._rows_at = self._lens_at + max_num_reqs * _INT32
        rows_end = self._rows_at + max_num_reqs * _INT32
        self._slots_at = -(-rows_end // _INT64) * _INT64
        slots_end = self._slots_at + max_num_tokens * _INT64
        # space for the blocks that a step's own tokens can need; more get a copy of their own
        self._max_new = max_num_reqs + -(-max_num_tokens // block_size)
        num_bytes = slots_end + self._max_new * (_INT64 + _INT32)
        self._pinned = [
            _PinnedBuffer(num_bytes, self.device) for _ in range(_NUM_PINNED_BUFFERS)
        ]
        self._num_steps = 0
        is_power_of_two = block_size & (block_size - 1) == 0
        self._block_shift = block_size.bit_length() - 1 if is_power_of_two else None

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self._block_table = zeros(max_num_reqs, max_blocks, dtype=torch.int32)
        self._ordered_table = zeros(max_num_reqs, max_blocks, dtype=torch.int32)
        self._bytes = zeros(num_bytes, dtype=torch.uint8)
        self._query_start_loc = self._bytes[: self._lens_at].view(torch.int32)
        self._seq_lens = self._bytes[self._lens_at : self._rows_at].view(torch.int32)
        self._rows = self._bytes[self._rows_at : rows_end].view(torch.int32)
        self._slot_mapping = self._bytes[self._slots_at : slots_end].view(torch.int64)
        self._slot_mapping.fill_(PAD_SLOT_ID)

    @property
    def num_blocks_per_row(self) -> np.ndarray:
        """Number of blocks in each row of the table."""
        return self._num_blocks

    def append_blocks(
        self, rows: Sequence[int], new_blocks: Sequence[Sequence[int]]
    ) -> None:
        """Append new blocks to some rows; the next step includes them."""
        check_new_blocks(rows, new_blocks, self._num_blocks, self.max_blocks)
        # step: append the new ids to each row
        for row, blocks in zip(rows, new_blocks, strict=True):
            held = int(self._num_blocks[row])
            self._host_table[row, held : held + len(blocks)] = blocks
            self._num_blocks[row] = held + len(blocks)
            self._num_sent.setdefault(int(row), held)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Empty some rows, whose requests have ended."""
        check_rows("rows", rows, self.max_num_reqs)
        self._num_blocks[np.asarray(rows, dtype=np.int64)] = 0
        for row in rows:
            self._num_sent.pop(int(row), None)

    def build(
        self,
        query_lens: Sequence[int],
        num_computed_tokens: Sequence[int],
        rows: Sequence[int] | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> CommonAttentionMetadata:
        """Write one step into the buffers and return its metadata."""
        lens = as_array("query_lens", query_lens)
        computed = as_array("num_computed_tokens", num_computed_tokens)
        num_reqs, num_tokens = len(lens), int(lens.sum())
        check_buffered_step(
            self, lens, computed, rows, num_reqs_padded, num_tokens_padded
        )
        own_rows: slice | np.ndarray = slice(num_reqs)
        if rows is not None:
            own_rows = np.asarray(rows, dtype=np.int64)
        reqs = num_reqs if num_reqs_padded is None else num_reqs_padded
        tokens = num_tokens if num_tokens_padded is None else num_tokens_padded
        starts = np.zeros(reqs + 1, dtype=np.int32)
        lens.cumsum(out=starts[1 : num_reqs + 1])
        pinned = self._pinned[self._num_steps % _NUM_PINNED_BUFFERS]
        self._num_steps += 1
        pinned.wait()
        # step: compute the slots of the new tokens
        slots_end = self._slots_at + tokens * _INT64
        slots = pinned.array[self._slots_at : slots_end].view(np.int64)
        first_positions = computed - starts[:num_reqs]
        self._compute_slots(slots[:num_tokens], lens, first_positions, own_rows)
        # step: pad to the size of the captured graph
        slots[num_tokens:] = PAD_SLOT_ID
        starts[num_reqs + 1 :] = num_tokens
        host_counts = np.zeros((2, reqs), dtype=np.int32)
        host_counts[0, :num_reqs] = computed
        np.add(computed, lens, out=host_counts[1, :num_reqs], casting="unsafe")
        # step: copy everything to the device
        ints = pinned.array[: self._slots_at].view(np.int32)
        ints[: reqs + 1] = starts
        ints[self._lens_at // _INT32 :][:reqs] = host_counts[1]
        if rows is not None:
            ints[self._rows_at // _INT32 :][:num_reqs] = np.asarray(rows)
        self._copy_to_device(pinned, slots_end)
        # step: copy the rows in batch order
        block_table = self._block_table
        if rows is not None:
            block_table = self._ordered_table
            torch.index_select(
                self._block_table, 0, self._rows[:num_reqs], out=block_table[:num_reqs]
            )
        counts_cpu = torch.from_numpy(host_counts)
        return CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: reqs + 1],
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=self._seq_lens[:reqs],
            seq_lens_cpu=counts_cpu[1],
            num_computed_tokens_cpu=counts_cpu[0],
            num_reqs=reqs,
            num_actual_tokens=num_tokens,
            max_query_len=int(lens.max(initial=0)),
            max_seq_len=int(host_counts[1].max(initial=0)),
            block_table_tensor=block_table[:reqs],
            slot_mapping=self._slot_mapping[:tokens],
        )

    def _compute_slots(
        self,
        slots: np.ndarray,
        lens: np.ndarray,
        first_positions: np.ndarray,
        own_rows: slice | np.ndarray,
    ) -> None:
        """Write the slot of every new token to `slots`, which is modified in place.

        `first_positions`: difference between a token's position and its index in the batch.
        """
        block_size = self.block_size
        position = self._token_numbers[: len(slots)] + first_positions.repeat(lens)
        if self._block_shift is None:
            entry = position // block_size
            position -= entry * block_size
        else:
            # a shift is faster than a division
            entry = position >> self._block_shift
            position &= block_size - 1
        entry += self._row_offsets[own_rows].repeat(lens)
        block_id = self._host_table.reshape(-1).take(entry)
        np.multiply(block_id, block_size, out=slots, dtype=np.int64)
        slots += position

    def _copy_to_device(self, pinned: "_PinnedBuffer", end: int) -> None:
        """Copy the filled part of a buffer and the new blocks after it to the device at once."""
        if not self._num_sent:
            pinned.send(self._bytes, end)
            return
        rows = np.array([*self._num_sent], dtype=np.int64)
        sent = np.array([*self._num_sent.values()], dtype=np.int64)
        self._num_sent.clear()
        # each entry once: `scatter_` writes in any order
        counts = self._num_blocks[rows] - sent
        ends = counts.cumsum()
        total = int(ends[-1])
        firsts = rows * self.max_blocks + sent - (ends - counts)
        offsets: np.ndarray = firsts.repeat(counts) + np.arange(total)
        block_ids = self._host_table.reshape(-1).take(offsets)
        table = self._block_table.view(-1)
        if total > self._max_new:
            pinned.send(self._bytes, end)
            table.scatter_(
                0,
                torch.from_numpy(offsets).to(self.device),
                torch.from_numpy(block_ids).to(self.device),
            )
            return
        ids_at = end + total * _INT64
        last = ids_at + total * _INT32
        pinned.array[end:ids_at].view(np.int64)[:] = offsets
        pinned.array[ids_at:last].view(np.int32)[:] = block_ids
        pinned.send(self._bytes, last)
        table.scatter_(
            0,
            self._bytes[end:ids_at].view(torch.int64),
            self._bytes[ids_at:last].view(torch.int32),
        )


class _PinnedBuffer:
    """Pinned host memory and the event that marks the end of its last asynchronous copy."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._bytes = torch.zeros(
            num_bytes, dtype=torch.uint8, device=HOST, pin_memory=on_cuda
        )
        self.array: np.ndarray = self._bytes.numpy()
        self._copied = torch.cuda.Event() if on_cuda else None

    def wait(self) -> None:
        """Wait until the last copy from this buffer has finished."""
        if self._copied is not None and not self._copied.query():
            # the stream may also run a collective, which another rank has left out
            wait_for_ranks("a pinned buffer is filled again")
            self._copied.synchronize()

    def send(self, target: torch.Tensor, num_bytes: int) -> None:
        """Copy the first bytes to the start of `target`, which is modified in place."""
        target[:num_bytes].copy_(self._bytes[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(target.device))

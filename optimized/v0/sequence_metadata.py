"""Attention metadata from sequence groups, the form of vLLM V0.

Adding a group stores numbers and references to its rows. The slots of all sequences are computed
at once with numpy when the step is built, and one copy moves everything to the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.v0.sequence_classes import (
    MultiModalPlaceholderMap,
    SequenceAttentionMetadata,
    SequenceGroup,
    SequenceInput,
)
from ...reference.v0.sequence_metadata import (
    is_block_tables_empty as is_block_tables_empty,
)
from ...validation import check_block_rows
from ...validation.v0.sequences import (
    check_builder_sizes,
    check_rows_padded,
    check_seq_group,
    check_sequence_step,
)
from ..cache.block_table import blocks_needed, padded_rows
from ..cache.slot_mapping import (
    compute_slot_mapping_batch,
    compute_slot_mapping_start_idx,
)
from ..runtime.host_to_device import send


@typed
def make_tensor_with_pad(
    x: Sequence[Sequence[int | float]],
    pad: int | float,
    dtype: torch.dtype,
    max_len: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return rows of different lengths as one tensor, padded at the end.

    All rows are converted as one list and stored through one mask.
    """
    check_rows_padded(x, max_len)
    lens = np.fromiter(map(len, x), np.int64, len(x))
    width = int(lens.max(initial=0)) if max_len is None else max_len
    owned = torch.from_numpy(np.arange(width) < lens[:, None])
    padded = torch.full((len(x), width), pad, dtype=dtype, device=HOST)
    numbers = list(chain.from_iterable(x))
    padded[owned] = torch.tensor(numbers, dtype=dtype, device=HOST)
    return padded.to(device)


@typed
class CommonMetadataBuilder:
    """Collects a step's sequence groups and builds its metadata."""

    def __init__(
        self,
        block_size: int,
        sliding_window: int | None = None,
        chunked_prefill_enabled: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Store the settings of all steps."""
        check_builder_sizes(block_size, sliding_window)
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.chunked_prefill_enabled = chunked_prefill_enabled
        self.device = device
        self.stage = "new"

    def prepare(self) -> None:
        """Start a step and discard the groups of the last one."""
        self.context_lens: list[int] = []
        self.block_tables: list[list[int]] = []
        self.prefill_seq_lens: list[int] = []
        self.curr_seq_lens: list[int] = []
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.multimodal_placeholder_maps: dict[str, MultiModalPlaceholderMap] = {}
        self.query_lens: list[int] = []
        # per sequence: position of its first new token with a slot, and the entries of its row
        # from that token's block on
        self._first_stored: list[int] = []
        self._stored_rows: list[list[int]] = []
        self.stage = "collecting"

    def add_seq_group(self, group: SequenceGroup) -> None:
        """Add a group to the step; if the group is invalid, the step does not change."""
        check_seq_group(self, group)
        # step: count the placeholders
        if group.is_prompt and group.multi_modal_placeholder_maps:
            self._count_placeholders(group)
        has_cache = not is_block_tables_empty(group.block_tables)
        block_size = self.block_size
        for sequence in group.sequences:
            # step: keep the blocks that attention reads
            whole = group.row(sequence)
            dropped = self._blocks_dropped(group, sequence) if has_cache else 0
            reads_cache = (
                self.chunked_prefill_enabled
                or not group.is_prompt
                or group.prefix_cache_hit
                or sequence.context_len > 0
            )
            self.block_tables.append(list(whole[dropped:]) if reads_cache else [])
            # step: count the tokens
            seq_len = sequence.orig_seq_len
            self.query_lens.append(sequence.query_len)
            self.context_lens.append(sequence.context_len)
            if group.is_prompt:
                self.num_prefills += 1
                self.num_prefill_tokens += sequence.query_len
                self.prefill_seq_lens.append(seq_len)
            else:
                self.num_decode_tokens += 1
                self.curr_seq_lens.append(seq_len - dropped * block_size)
            # step: compute the slots of the new tokens
            start_idx = compute_slot_mapping_start_idx(
                group.is_prompt,
                sequence.query_len,
                sequence.context_len,
                self.sliding_window,
            )
            first = max(start_idx, sequence.context_len) if has_cache else seq_len
            entries = whole[first // block_size : -(-seq_len // block_size)]
            self._first_stored.append(first)
            self._stored_rows.append(list(entries) if first < seq_len else [])

    def build(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        cuda_graph_pad_size: int = -1,
        batch_size: int | None = None,
        max_blocks: int | None = None,
    ) -> SequenceAttentionMetadata:
        """Return the metadata of the groups that were added."""
        check_sequence_step(
            self, seq_lens, query_lens, cuda_graph_pad_size, batch_size, max_blocks
        )
        # step: pad the batch to the captured size
        padding = max(cuda_graph_pad_size, 0)
        slot_mapping = np.pad(self._slots(), (0, padding), constant_values=PAD_SLOT_ID)
        context_lens = np.asarray([*self.context_lens, *[0] * padding], dtype=np.int32)
        query_lens = [*query_lens, *[1] * padding]
        rows = [*self.block_tables, *[[]] * padding]
        # step: pad the rows to one table
        if max_blocks is None:
            max_blocks = max(map(len, rows))
        check_block_rows(rows, max_blocks)
        block_tables = padded_rows(rows, max_blocks)
        # step: compute the start of each sequence
        starts = np.zeros((2, len(query_lens) + 1), dtype=np.int32)
        np.cumsum([query_lens, seq_lens], axis=1, out=starts[:, 1:])
        # step: convert the placeholders to index maps
        placeholders = {
            modality: placeholder_map.index_map()
            for modality, placeholder_map in self.multimodal_placeholder_maps.items()
        }
        # step: copy everything to the device
        seq_lens_array = np.asarray(seq_lens, dtype=np.int32)
        _, sent = send(
            [slot_mapping, seq_lens_array, context_lens, starts, block_tables],
            torch.device(self.device),
        )
        self.stage = "built"
        return SequenceAttentionMetadata(
            num_prefills=self.num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens + padding,
            slot_mapping=sent[0],
            multi_modal_placeholder_index_maps=placeholders,
            enable_kv_scales_calculation=True,
            seq_lens=list(seq_lens),
            seq_lens_tensor=sent[1],
            max_prefill_seq_len=max(self.prefill_seq_lens, default=0),
            max_decode_seq_len=max(self.curr_seq_lens, default=0),
            max_query_len=max(query_lens),
            query_start_loc=sent[3][0],
            seq_start_loc=sent[3][1],
            context_lens_tensor=sent[2],
            block_tables=sent[4],
            use_cuda_graph=cuda_graph_pad_size >= 0,
        )

    @property
    def slot_mapping(self) -> list[int]:
        """The slots of the groups that were added."""
        slots: list[int] = self._slots().tolist()
        return slots

    def _slots(self) -> np.ndarray:
        first = np.asarray(self._first_stored, dtype=np.int64)
        before = first - np.asarray(self.context_lens, dtype=np.int64)
        stored = np.asarray(self.query_lens, dtype=np.int64) - before
        counts = np.stack([before, stored], axis=1).reshape(-1)
        is_stored = np.repeat(np.tile([False, True], len(first)), counts)
        slots = np.full(len(is_stored), PAD_SLOT_ID, dtype=np.int64)
        slots[is_stored] = compute_slot_mapping_batch(
            stored.tolist(),
            np.where(stored > 0, first % self.block_size, 0).tolist(),
            self._stored_rows,
            self.block_size,
        ).numpy()
        return slots

    def _blocks_dropped(self, group: SequenceGroup, sequence: SequenceInput) -> int:
        """Return the number of blocks before a decode's sliding window."""
        if group.is_prompt or not sequence.curr_sliding_window_block:
            return 0
        used = blocks_needed(sequence.orig_seq_len, self.block_size)
        return max(0, used - sequence.curr_sliding_window_block)

    def _count_placeholders(self, group: SequenceGroup) -> None:
        maps = self.multimodal_placeholder_maps
        for modality, placeholders in group.multi_modal_placeholder_maps.items():
            before = maps.get(modality, MultiModalPlaceholderMap())
            before = replace(before, dest_len=self.num_prefill_tokens)
            maps[modality] = before.extend(placeholders.repeat(len(group.sequences)))

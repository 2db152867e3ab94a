"""Attention metadata from sequence groups, the form of vLLM V0.

A user's request may run as several sequences (beams, samples): a group. A step takes some groups
within their prompt and some that decode, prompts first. The metadata is collected group by group:
the slot of each new token, the block-table row of each sequence, its lengths. A prompt whose keys
are all new needs no row, as it reads nothing from the cache. A chunk of a longer prompt, a prompt
with a prefix-cache hit, and every decode need one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.kinds import HOST, PAD_SLOT_ID
from ...contract.v0.sequence_classes import (
    BlockTables,
    MultiModalPlaceholderMap,
    SequenceAttentionMetadata,
    SequenceGroup,
    SequenceInput,
)
from ...validation import validated
from ...validation.v0.sequences import (
    check_builder_sizes,
    check_rows_padded,
    check_seq_group,
    check_sequence_step,
)
from ..cache.block_table import blocks_needed, make_block_table
from ..cache.slot_mapping import compute_slot_mapping, compute_slot_mapping_start_idx


@validated(check_rows_padded)
def make_tensor_with_pad(
    x: Sequence[Sequence[int | float]],
    pad: int | float,
    dtype: torch.dtype,
    max_len: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return rows of different lengths as one tensor, padded at the end.

    Args:
        x: rows of numbers.
        pad: value of the padding.
        dtype: dtype of the tensor.
        max_len: Optional. Width of the tensor. If None, the length of the longest row.
        device: device of the tensor.

    Returns:
        [rows, max_len]; [0, 0] without rows.

    Raises:
        IndexError: a row is longer than `max_len`.

    Source:
        vLLM's function of that name.

    Example:
        >>> make_tensor_with_pad(
        ...     [[7, 2], [5]], pad=-1, dtype=torch.int64, max_len=3
        ... )
        tensor([[ 7,  2, -1],
                [ 5, -1, -1]])
    """
    width = max((len(row) for row in x), default=0) if max_len is None else max_len
    padded = torch.full((len(x), width), pad, dtype=dtype, device=HOST)
    for i, row in enumerate(x):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype, device=HOST)
    return padded.to(device)


@typed
class CommonMetadataBuilder:
    """Collects a step's sequence groups and builds its metadata.

    `prepare()` starts a step, `add_seq_group()` adds to it, prompts first, and `build()` returns
    the metadata. Building again returns equal metadata. A group can be added only to a step that
    is started and not yet built.

    The lists of the current step are attributes with vLLM's names: `slot_mapping`,
    `context_lens`, `block_tables`, `prefill_seq_lens`, `curr_seq_lens` (tokens of each decode that
    attention reads), and the counts `num_prefills`, `num_prefill_tokens`, `num_decode_tokens`.

    Source:
        vLLM's class of that name.

    Example:
        >>> builder = CommonMetadataBuilder(block_size=4)
        >>> builder.prepare()
        >>> builder.add_seq_group(SequenceGroup(
        ...     is_prompt=True,
        ...     sequences=(SequenceInput(seq_id=0, query_len=3),),
        ...     block_tables={0: [5]},
        ... ))
        >>> builder.add_seq_group(SequenceGroup(
        ...     is_prompt=False,
        ...     sequences=(SequenceInput(seq_id=1, query_len=1, context_len=4),),
        ...     block_tables={1: [7, 2]},
        ... ))
        >>> step = builder.build([3, 5], [3, 1])
        >>> step.slot_mapping
        tensor([20, 21, 22,  8])
        >>> step.block_tables
        tensor([[0, 0],
                [7, 2]], dtype=torch.int32)
    """

    def __init__(
        self,
        block_size: int,
        sliding_window: int | None = None,
        chunked_prefill_enabled: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Store the settings of all steps.

        Args:
            block_size: slots in a block.
            sliding_window: Optional. Number of visible keys, the query's own included. If None,
                all keys are visible.
            chunked_prefill_enabled: whether prompts may come in chunks, so that each one needs
                its row.
            device: device of the metadata.

        Raises:
            ValueError: a number is out of range.
        """
        check_builder_sizes(block_size, sliding_window)
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.chunked_prefill_enabled = chunked_prefill_enabled
        self.device = device
        self.stage = "new"

    def prepare(self) -> None:
        """Start a step and discard the groups of the last one."""
        self.slot_mapping: list[int] = []
        self.context_lens: list[int] = []
        self.block_tables: list[list[int]] = []
        self.prefill_seq_lens: list[int] = []
        self.curr_seq_lens: list[int] = []
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.multimodal_placeholder_maps: dict[str, MultiModalPlaceholderMap] = {}
        self.query_lens: list[int] = []
        self.stage = "collecting"

    def add_seq_group(self, group: SequenceGroup) -> None:
        """Add a group to the step; if the group is invalid, the step does not change.

        With a sliding window, the tokens of a prompt that are not visible to later ones get no
        slot. Attention therefore takes a prompt's new keys from the layer, and only its context
        from the cache.

        Args:
            group: prompts come before decodes.

        Raises:
            RuntimeError: no step is started, or it is already built.
            IndexError: a sequence is longer than its row.
            KeyError: a sequence has no row.
            ValueError: a decode of several tokens, a prompt after a decode, a placeholder map
                of another length than its sequence, or a negative length.
        """
        check_seq_group(self, group)
        # step: count the placeholders
        for modality, placeholders in group.multi_modal_placeholder_maps.items():
            if not group.is_prompt:
                continue
            before = self.multimodal_placeholder_maps.get(
                modality, MultiModalPlaceholderMap()
            )
            # tokens of groups without such placeholders come in between
            before = replace(before, dest_len=self.num_prefill_tokens)
            self.multimodal_placeholder_maps[modality] = before.extend(
                placeholders.repeat(len(group.sequences))
            )
        for sequence in group.sequences:
            # step: keep the blocks that attention reads
            row, dropped = self._row_to_read(group, sequence)
            self.block_tables.append(row)
            # step: count the tokens
            self.query_lens.append(sequence.query_len)
            self.context_lens.append(sequence.context_len)
            if group.is_prompt:
                self.num_prefills += 1
                self.num_prefill_tokens += sequence.query_len
                self.prefill_seq_lens.append(sequence.orig_seq_len)
            else:
                self.num_decode_tokens += 1
                seq_len = sequence.orig_seq_len - dropped * self.block_size
                self.curr_seq_lens.append(seq_len)
            # step: compute the slots of the new tokens
            self.slot_mapping.extend(self._slots(group, sequence))

    def build(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        cuda_graph_pad_size: int = -1,
        batch_size: int | None = None,
        max_blocks: int | None = None,
    ) -> SequenceAttentionMetadata:
        """Return the metadata of the groups that were added.

        Args:
            seq_lens: [batch] tokens of each sequence that attention may read, in the order of
                addition; 1 for each padding sequence of a graph.
            query_lens: [seqs] new tokens of each sequence, without padding sequences.
            cuda_graph_pad_size: number of padding sequences of a captured graph, or -1 if no
                graph is replayed.
            batch_size: Optional. Sequences of the captured graph. Ignored without a graph.
            max_blocks: Optional. Width of the block table. If None, the length of the longest
                row. Required with a graph.

        Returns:
            Metadata with its own tensors, which later steps do not modify. A padding sequence
            has one token without a slot and a row of zeros.

        Raises:
            RuntimeError: no step is started.
            ValueError: no group, lengths other than those of the groups, or a step that does not
                fit the graph.
            IndexError: a row is longer than `max_blocks`.
        """
        check_sequence_step(
            self, seq_lens, query_lens, cuda_graph_pad_size, batch_size, max_blocks
        )
        # step: pad the batch to the captured size
        padding = max(cuda_graph_pad_size, 0)
        slot_mapping = [*self.slot_mapping, *[PAD_SLOT_ID] * padding]
        context_lens = [*self.context_lens, *[0] * padding]
        query_lens = [*query_lens, *[1] * padding]
        rows = [*self.block_tables, *[[]] * padding]
        # step: pad the rows to one table
        block_tables = make_block_table(rows, max_blocks)
        # step: compute the start of each sequence
        query_start_loc, seq_start_loc = [0], [0]
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            query_start_loc.append(query_start_loc[-1] + query_len)
            seq_start_loc.append(seq_start_loc[-1] + seq_len)
        # step: convert the placeholders to index maps
        placeholders = {
            modality: placeholder_map.index_map()
            for modality, placeholder_map in self.multimodal_placeholder_maps.items()
        }
        # step: copy everything to the device
        metadata = SequenceAttentionMetadata(
            num_prefills=self.num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens + padding,
            slot_mapping=torch.tensor(slot_mapping, dtype=torch.int64, device=HOST).to(
                self.device
            ),
            multi_modal_placeholder_index_maps=placeholders,
            enable_kv_scales_calculation=True,
            seq_lens=list(seq_lens),
            seq_lens_tensor=self._to_device(seq_lens),
            max_prefill_seq_len=max(self.prefill_seq_lens, default=0),
            max_decode_seq_len=max(self.curr_seq_lens, default=0),
            max_query_len=max(query_lens),
            query_start_loc=self._to_device(query_start_loc),
            seq_start_loc=self._to_device(seq_start_loc),
            context_lens_tensor=self._to_device(context_lens),
            block_tables=block_tables.to(self.device),
            use_cuda_graph=cuda_graph_pad_size >= 0,
        )
        self.stage = "built"
        return metadata

    def _row_to_read(
        self, group: SequenceGroup, sequence: SequenceInput
    ) -> tuple[list[int], int]:
        """Return the row that attention reads, and the number of blocks dropped before it."""
        reads_cache = (
            self.chunked_prefill_enabled
            or not group.is_prompt
            or group.prefix_cache_hit
            or sequence.context_len > 0
        )
        if is_block_tables_empty(group.block_tables) or not reads_cache:
            return [], 0
        row = list(group.row(sequence))
        if group.is_prompt or not sequence.curr_sliding_window_block:
            return row, 0
        # counted from the sequence's last block, since a row may have unused entries after it
        used = blocks_needed(sequence.orig_seq_len, self.block_size)
        dropped = max(0, used - sequence.curr_sliding_window_block)
        return row[dropped:], dropped

    def _slots(self, group: SequenceGroup, sequence: SequenceInput) -> list[int]:
        """Return the slots of a sequence's new tokens, looked up in its whole row."""
        if is_block_tables_empty(group.block_tables):
            return [PAD_SLOT_ID] * sequence.query_len
        start_idx = compute_slot_mapping_start_idx(
            group.is_prompt,
            sequence.query_len,
            sequence.context_len,
            self.sliding_window,
        )
        slots: list[int] = compute_slot_mapping(
            is_profile_run=False,
            seq_len=sequence.orig_seq_len,
            context_len=sequence.context_len,
            start_idx=start_idx,
            block_size=self.block_size,
            block_table=group.row(sequence),
        ).tolist()
        return slots

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=HOST).to(self.device)


@typed
def is_block_tables_empty(
    block_tables: BlockTables | Sequence[int | None] | None,
) -> bool:
    """Return whether a group has no cache: no tables, or None for every sequence.

    Args:
        block_tables: rows of block ids by sequence id. An empty row counts as a row, and so does
            anything that is not a mapping.

    Source:
        vLLM's function of that name. A profile run has no tables.

    Example:
        >>> is_block_tables_empty({0: None, 1: None}), is_block_tables_empty({0: []})
        (True, False)
    """
    if block_tables is None:
        return True
    if not isinstance(block_tables, Mapping):
        return False
    return all(row is None for row in block_tables.values())

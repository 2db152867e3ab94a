"""Sequence groups and their metadata, the forms of vLLM's V0 engine.

The input is groups of sequences, one group per user request. The output is metadata with the
prompts first and the decodes after them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ..argument_types import typed
from ..integers import WideInt
from ..shapes import BlockTable, SlotMapping, StartLoc, TokenCounts

BlockTables = Mapping[int, Sequence[int] | None]
"""Row of block ids per sequence id; None for a sequence without a cache."""


@typed
@dataclass(frozen=True, kw_only=True)
class SequenceInput:
    """One sequence of a group.

    Args:
        seq_id: key of its row in the group's `block_tables`.
        query_len: new tokens.
        context_len: tokens already in the cache.
        curr_sliding_window_block: number of last blocks that attention may read, for a decode
            with a sliding window; 0 if all.
    """

    seq_id: WideInt
    query_len: int
    context_len: int = 0
    curr_sliding_window_block: int = 0

    @property
    def orig_seq_len(self) -> int:
        """Tokens of the sequence, independent of a sliding window."""
        return self.context_len + self.query_len


@dataclass(frozen=True)
class IndexMap:
    """Row and token of each embedding that replaces a placeholder."""

    src: list[int]
    dest: list[int]


@dataclass(frozen=True, kw_only=True)
class MultiModalPlaceholderMap:
    """The rows of image (or audio) embeddings that replace placeholder tokens.

    Args:
        src_ranges: ranges of rows of the embeddings.
        src_len: number of all rows of the embeddings.
        dest_ranges: ranges of tokens, together as long as the rows.
        dest_len: number of all tokens.
    """

    src_ranges: tuple[range, ...] = ()
    src_len: int = 0
    dest_ranges: tuple[range, ...] = ()
    dest_len: int = 0

    def extend(self, other: "MultiModalPlaceholderMap") -> "MultiModalPlaceholderMap":
        """Return the concatenation of both maps, with the other's indices shifted."""
        return MultiModalPlaceholderMap(
            src_ranges=(*self.src_ranges, *_shifted(other.src_ranges, self.src_len)),
            src_len=self.src_len + other.src_len,
            dest_ranges=(
                *self.dest_ranges,
                *_shifted(other.dest_ranges, self.dest_len),
            ),
            dest_len=self.dest_len + other.dest_len,
        )

    def repeat(self, count: int) -> "MultiModalPlaceholderMap":
        """Return the map of `count` sequences with the same images.

        Each has placeholders of its own. They share the embeddings.
        """
        copies = [_shifted(self.dest_ranges, i * self.dest_len) for i in range(count)]
        return MultiModalPlaceholderMap(
            src_ranges=self.src_ranges * count,
            src_len=self.src_len,
            dest_ranges=tuple(placeholders for copy in copies for placeholders in copy),
            dest_len=self.dest_len * count,
        )

    def index_map(self) -> IndexMap:
        """Return the ranges as lists of indices.

        Raises:
            ValueError: the number of rows is not the number of placeholders.
        """
        src = [row for rows in self.src_ranges for row in rows]
        dest = [token for tokens in self.dest_ranges for token in tokens]
        if len(src) != len(dest):
            raise ValueError(
                f"the map has {len(src)} rows of embeddings for {len(dest)} placeholders:"
                " expected one row each"
            )
        return IndexMap(src, dest)


def _shifted(ranges: Sequence[range], by: int) -> tuple[range, ...]:
    """Return ranges that are shifted by an offset."""
    return tuple(range(span.start + by, span.stop + by) for span in ranges)


@typed
@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The sequences of one user's request in one step.

    Args:
        is_prompt: whether they are within their prompt. A decode has one new token per sequence.
        sequences: at least one sequence.
        block_tables: Optional. Row of block ids per sequence id. Entries past the end of the
            sequence are never read. If None, or if all rows are None, nothing is cached (in a
            profile run, or for a model that needs none).
        prefix_cache_hit: whether the context of the prompt was found in the cache.
        multi_modal_placeholder_maps: map per modality for one sequence of a prompt. The sequences
            of a group share the embeddings.
    """

    is_prompt: bool
    sequences: tuple[SequenceInput, ...]
    block_tables: BlockTables | None = None
    prefix_cache_hit: bool = False
    multi_modal_placeholder_maps: Mapping[str, MultiModalPlaceholderMap] = field(
        default_factory=dict
    )

    def row(self, sequence: SequenceInput) -> Sequence[int]:
        """Return a sequence's row of block ids; it is empty if nothing is cached."""
        return (self.block_tables or {}).get(sequence.seq_id) or ()


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The fields of all metadata of the sequence-group form (vLLM's name).

    Args:
        num_prefills: sequences within their prompt, which come first.
        num_prefill_tokens: their new tokens.
        num_decode_tokens: new tokens of the decodes, one per sequence.
        slot_mapping: [tokens] slot of every new token, or PAD_SLOT_ID.
        multi_modal_placeholder_index_maps: Optional. Per modality, the embeddings that replace
            tokens.
        enable_kv_scales_calculation: whether a layer may measure its scales in this step.
    """

    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    slot_mapping: SlotMapping
    multi_modal_placeholder_index_maps: Mapping[str, IndexMap] | None = None
    enable_kv_scales_calculation: bool = True

    def asdict_zerocopy(
        self, skip_fields: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return the fields by name, without copies.

        Args:
            skip_fields: Optional. Names to exclude. Unknown names are ignored.
        """
        skipped = skip_fields or ()
        return {
            metadata_field.name: getattr(self, metadata_field.name)
            for metadata_field in fields(self)
            if metadata_field.name not in skipped
        }

    @property
    def prefill_metadata(self) -> "AttentionMetadata | None":
        """The prompts alone; None if there are none."""
        raise NotImplementedError(f"{type(self).__name__} lacks prefill_metadata")

    @property
    def decode_metadata(self) -> "AttentionMetadata | None":
        """The decodes alone; None if there are none."""
        raise NotImplementedError(f"{type(self).__name__} lacks decode_metadata")


@dataclass(frozen=True, kw_only=True)
class SequenceAttentionMetadata(AttentionMetadata):
    """One step's batch in the sequence-group form: prompts first, then decodes.

    Padding sequences of a captured CUDA graph come last and count as decodes.

    Args:
        seq_lens: [seqs] tokens of each sequence that attention may read, on the host.
        seq_lens_tensor: [seqs] the same, on the device.
        max_prefill_seq_len, max_decode_seq_len: maximum length of the prompts and of the decodes;
            0 if there are none.
        max_query_len: an upper bound on the new tokens of one sequence.
        max_decode_query_len: Optional. The same for the decodes. If None, 1.
        query_start_loc: [seqs + 1] start of each sequence's new tokens.
        seq_start_loc: [seqs + 1] start of each sequence if all `seq_lens` tokens are
            concatenated.
        context_lens_tensor: [seqs] tokens in the cache before the step.
        block_tables: [seqs, max_blocks]; entries past a row's end are 0 and never read.
        use_cuda_graph: whether the step replays a captured graph.
        encoder_seq_lens, encoder_seq_lens_tensor: [seqs] tokens of each sequence's encoder.
        encoder_seq_start_loc: [seqs + 1] start of each of them.
        max_encoder_seq_len: an upper bound on them.
        num_encoder_tokens: tokens that the encoder computes in this step.
        cross_slot_mapping: [encoder tokens] slot of each of these tokens.
        cross_block_tables: [seqs, max_blocks] blocks that cross-attention reads.
    """

    seq_lens: list[int] | None = None
    seq_lens_tensor: TokenCounts | None = None
    max_prefill_seq_len: int = 0
    max_decode_seq_len: int = 0
    max_query_len: int | None = None
    max_decode_query_len: int | None = None
    query_start_loc: StartLoc | None = None
    seq_start_loc: StartLoc | None = None
    context_lens_tensor: TokenCounts | None = None
    block_tables: BlockTable | None = None
    use_cuda_graph: bool = False
    encoder_seq_lens: list[int] | None = None
    encoder_seq_lens_tensor: TokenCounts | None = None
    encoder_seq_start_loc: StartLoc | None = None
    max_encoder_seq_len: int | None = None
    num_encoder_tokens: int | None = None
    cross_slot_mapping: SlotMapping | None = None
    cross_block_tables: BlockTable | None = None

    @cached_property
    def prefill_metadata(self) -> "SequenceAttentionMetadata | None":
        """The prompts; None if there are none."""
        if not self.num_prefills:
            return None
        return replace(
            self,
            **self._rows(slice(0, self.num_prefills)),
            num_decode_tokens=0,
            slot_mapping=self.slot_mapping[: self.num_prefill_tokens],
            max_decode_seq_len=0,
            max_decode_query_len=None,
            use_cuda_graph=False,
        )

    @cached_property
    def decode_metadata(self) -> "SequenceAttentionMetadata | None":
        """The decodes, with starts relative to the first; None if there are none."""
        if not self.num_decode_tokens:
            return None
        # the encoder tokens of a step belong to its prompts
        encoders: dict[str, Any] = {}
        if self.num_prefills:
            encoders["num_encoder_tokens"] = _none_or(self.num_encoder_tokens, 0)
            encoders["cross_slot_mapping"] = _cut(self.cross_slot_mapping, slice(0, 0))
        return replace(
            self,
            **self._rows(slice(self.num_prefills, None)),
            **encoders,
            num_prefills=0,
            num_prefill_tokens=0,
            slot_mapping=self.slot_mapping[self.num_prefill_tokens :],
            multi_modal_placeholder_index_maps=None,
            max_prefill_seq_len=0,
            max_query_len=self.max_decode_query_len or 1,
        )

    def _rows(self, rows: slice) -> dict[str, Any]:
        """Return the fields that have an entry per sequence, sliced."""
        starts = slice(rows.start, None if rows.stop is None else rows.stop + 1)
        cut = {name: _cut(getattr(self, name), rows) for name in FIELDS_PER_SEQUENCE}
        for name in FIELDS_OF_STARTS:
            some = _cut(getattr(self, name), starts)
            cut[name] = some if some is None or rows.start == 0 else some - some[:1]
        return cut


def _cut(whole: Any, part: slice) -> Any:
    return None if whole is None else whole[part]


def _none_or(value: Any, other: Any) -> Any:
    return None if value is None else other


# How each field is handled when prompts and decodes are separated. Every field is in exactly one of
# these tuples; a test enforces it, so that a new field cannot be forgotten.
FIELDS_PER_SEQUENCE = (
    "seq_lens",
    "seq_lens_tensor",
    "context_lens_tensor",
    "block_tables",
    "encoder_seq_lens",
    "encoder_seq_lens_tensor",
    "cross_block_tables",
)
FIELDS_OF_STARTS = ("query_start_loc", "seq_start_loc", "encoder_seq_start_loc")
FIELDS_CUT_BY_HAND = (
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "slot_mapping",
    "multi_modal_placeholder_index_maps",
    "max_prefill_seq_len",
    "max_decode_seq_len",
    "max_query_len",
    "max_decode_query_len",
    "use_cuda_graph",
    "num_encoder_tokens",
    "cross_slot_mapping",
)
FIELDS_CARRIED = ("enable_kv_scales_calculation", "max_encoder_seq_len")

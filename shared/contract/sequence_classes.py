"""What goes into the sequence-group form of a step, and what comes out?

In: groups of sequences, one group a user's request. Out: metadata with the prompts first and the
decodes behind them. vLLM's V0 engine worked this way, and models built on it still speak of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from .shapes import BlockTable, SlotMapping, StartLoc, TokenCounts

BlockTables = Mapping[int, Sequence[int] | None]
"""Each sequence's row of block ids, by its id; None where it has no cache."""


@dataclass(frozen=True, kw_only=True)
class SequenceInput:
    """One sequence of a group: what vLLM keeps in parallel lists.

    Args:
        seq_id: which row of the group's `block_tables` is its own.
        query_len: new tokens.
        context_len: tokens already in the cache.
        curr_sliding_window_block: of a decode under a sliding window, how many of its last
            blocks attention may read; 0: all.
    """

    seq_id: int
    query_len: int
    context_len: int = 0
    curr_sliding_window_block: int = 0

    @property
    def orig_seq_len(self) -> int:
        """Tokens of the sequence, whatever part of them attention may read."""
        return self.context_len + self.query_len


@dataclass(frozen=True)
class IndexMap:
    """Of each embedding that replaces a placeholder: its row, and its token in the batch."""

    src: list[int]
    dest: list[int]


@dataclass(frozen=True, kw_only=True)
class MultiModalPlaceholderMap:
    """Which rows of the image (or audio) embeddings replace which placeholder tokens.

    Args:
        src_ranges: rows of the embeddings, as ranges.
        src_len: rows of the embeddings there are, wanted or not.
        dest_ranges: tokens, as ranges; together as long as the rows.
        dest_len: tokens there are, placeholders or not.
    """

    src_ranges: tuple[range, ...] = ()
    src_len: int = 0
    dest_ranges: tuple[range, ...] = ()
    dest_len: int = 0

    def extend(self, other: "MultiModalPlaceholderMap") -> "MultiModalPlaceholderMap":
        """Return one map of both, the other's rows and tokens counted on behind these."""
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
        """Return the map of `count` sequences that show the same images.

        Each has placeholders of its own; the embeddings are there once.
        """
        copies = [_shifted(self.dest_ranges, i * self.dest_len) for i in range(count)]
        return MultiModalPlaceholderMap(
            src_ranges=self.src_ranges * count,
            src_len=self.src_len,
            dest_ranges=tuple(each for copy in copies for each in copy),
            dest_len=self.dest_len * count,
        )

    def index_map(self) -> IndexMap:
        """Return the ranges written out.

        Raises:
            ValueError: more rows than placeholders, or fewer.
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
    """Return ranges that begin so much later."""
    return tuple(range(each.start + by, each.stop + by) for each in ranges)


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The sequences of one user's request in one step.

    Args:
        is_prompt: whether they are still in their prompt; a decode brings one token each.
        sequences: at least one.
        block_tables: each sequence's row of block ids, by its id; entries past its end are
            never read. None, or all rows None: there is no cache (a run that measures memory,
            or a model that needs none).
        prefix_cache_hit: the context of the prompt was found in the cache.
        multi_modal_placeholder_maps: of a prompt, each modality's map for one of its
            sequences; the embeddings are there once a group.
    """

    is_prompt: bool
    sequences: tuple[SequenceInput, ...]
    block_tables: BlockTables | None = None
    prefix_cache_hit: bool = False
    multi_modal_placeholder_maps: Mapping[str, MultiModalPlaceholderMap] = field(
        default_factory=dict
    )

    def row(self, sequence: SequenceInput) -> Sequence[int]:
        """Return a sequence's row of block ids; an empty one if there is no cache."""
        return (self.block_tables or {}).get(sequence.seq_id) or ()


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """What all metadata of the sequence-group form has (vLLM's name).

    Args:
        num_prefills: sequences in their prompt; they come first.
        num_prefill_tokens: their new tokens.
        num_decode_tokens: new tokens of the decodes behind them, one a sequence.
        slot_mapping: [tokens] slot of every new token, or PAD_SLOT_ID.
        multi_modal_placeholder_index_maps: by modality, which embedding replaces which token.
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
        """Return the fields by name, each the very object that is stored.

        Args:
            skip_fields: names to leave out; names of no field are ignored.
        """
        skipped = skip_fields or ()
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in skipped
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

    Sequences that fill a captured CUDA graph stand last and count as decodes.

    Args:
        seq_lens: [seqs] tokens that attention may read of each sequence, on the host.
        seq_lens_tensor: [seqs] the same, on the device.
        max_prefill_seq_len, max_decode_seq_len: the longest of each part; 0 where it is empty.
        max_query_len: an upper bound on the new tokens of one sequence.
        max_decode_query_len: the same of the decodes alone; None: 1.
        query_start_loc: [seqs + 1] where each sequence's new tokens start.
        seq_start_loc: [seqs + 1] where each sequence starts if all `seq_lens` tokens lie one
            after another.
        context_lens_tensor: [seqs] tokens in the cache before the step.
        block_tables: [seqs, max_blocks]; entries past a row's end are 0 and never read.
        use_cuda_graph: whether the step replays a captured graph.
        encoder_seq_lens, encoder_seq_lens_tensor: [seqs] tokens of each sequence's encoder.
        encoder_seq_start_loc: [seqs + 1] where each of them starts.
        max_encoder_seq_len: an upper bound on them.
        num_encoder_tokens: tokens that go through the encoder in this step.
        cross_slot_mapping: [encoder tokens] where each one's key and value go.
        cross_block_tables: [seqs, max_blocks] where cross-attention reads.
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
        """The prompts alone; None if there are none."""
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
        """The decodes alone, starts counted from 0; None if there are none."""
        if not self.num_decode_tokens:
            return None
        # what encoders write in a step belongs to its prompts
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
        """Return the fields that have an entry for each sequence, cut to some of them."""
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


# What becomes of each field when the prompts and the decodes are told apart. Every field stands in
# exactly one of these, which a test holds: a field added later cannot be forgotten.
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

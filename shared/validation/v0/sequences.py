"""Validation of sequence groups and their lengths."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...contract.integers import LARGEST, as_int, as_ints, as_list
from ...contract.kinds import AttentionType
from ...contract.v0.sequence_classes import SequenceGroup, SequenceInput
from ..batch import check_read_entries, check_row_reaches
from ..primitives import check_not_negative, check_positive


class CollectedStep(Protocol):
    """What `CommonMetadataBuilder` says about the step that it collects.

    `stage` is "new", "collecting" or "built". A new builder has no other attribute of these but
    `block_size`.
    """

    stage: str
    block_size: int
    num_prefills: int
    num_decode_tokens: int
    prefill_seq_lens: list[int]
    curr_seq_lens: list[int]
    query_lens: list[int]


def check_builder_sizes(block_size: int, sliding_window: int | None) -> None:
    """Raise an error for a block size below 1, or a window below 0."""
    check_positive(block_size=block_size)
    if sliding_window is not None:
        check_not_negative(sliding_window=sliding_window)


def check_begun(stage: str) -> None:
    """Raise an error for a builder in which no step has begun."""
    if stage == "new":
        raise RuntimeError(
            "no step is started: call prepare() before add_seq_group() and build()"
        )


def check_seq_group(step: CollectedStep, group: Any) -> None:
    """Raise an error for a group that does not fit the step, before any of it is added."""
    check_begun(step.stage)
    if step.stage == "built":
        raise RuntimeError(
            "this step's metadata is built: call prepare() before the next step's groups,"
            " or they would be added to the old ones"
        )
    if not isinstance(group, SequenceGroup):
        raise TypeError(f"group = {group!r:.60}: expected a SequenceGroup")
    sequences = as_list("sequences", group.sequences, "SequenceInput")
    for sequence in sequences:
        if not isinstance(sequence, SequenceInput):
            raise TypeError(f"sequences has {sequence!r:.60}: expected SequenceInput")
    if not isinstance(group.block_tables, Mapping | None):
        raise TypeError(
            f"block_tables = {group.block_tables!r:.60}: expected a mapping from seq_id to row"
        )
    if not isinstance(group.multi_modal_placeholder_maps, Mapping):
        raise TypeError(
            f"multi_modal_placeholder_maps = {group.multi_modal_placeholder_maps!r:.60}: expected"
            " a mapping from modality to MultiModalPlaceholderMap"
        )
    if not sequences:
        raise ValueError("sequences = (): expected at least one in a group")
    if group.is_prompt and step.num_decode_tokens:
        raise ValueError(
            f"a prompt comes after {step.num_decode_tokens} decodes: expected prompts first;"
            " sort the groups"
        )
    tables = group.block_tables or {}
    has_cache = any(row is not None for row in tables.values())
    if group.prefix_cache_hit and not has_cache:
        raise ValueError(
            f"prefix_cache_hit = True with block_tables = {group.block_tables}: expected a"
            " row, since the context is in the cache"
        )
    for sequence in group.sequences:
        for name in ("query_len", "context_len", "curr_sliding_window_block"):
            as_int(name, getattr(sequence, name))
        if not group.is_prompt and sequence.query_len != 1:
            raise ValueError(
                f"sequence {sequence.seq_id} decodes query_len = {sequence.query_len} tokens:"
                " expected 1; a prompt may have more"
            )
        if has_cache:
            _check_row(group, sequence, step.block_size)
        if group.is_prompt:
            _check_placeholders(group, sequence)


def _check_row(group: Any, sequence: Any, block_size: int) -> None:
    if sequence.seq_id not in group.block_tables:
        known = ", ".join(map(str, group.block_tables))
        raise KeyError(
            f"block_tables has no row of sequence {sequence.seq_id}: expected one beside"
            f" those of {known}"
        )
    row = group.block_tables[sequence.seq_id]
    if row is None:
        raise ValueError(
            f"block_tables[{sequence.seq_id}] = None: expected a row, as other sequences of"
            " the group have; None for all means no cache"
        )
    row = as_list(f"block_tables[{sequence.seq_id}]", row, "block ids")
    check_row_reaches(len(row), sequence.orig_seq_len, block_size)
    name = f"block_tables[{sequence.seq_id}]"
    # what comes after is never read
    read = row[: -(-sequence.orig_seq_len // block_size)]
    as_ints(name, read, -LARGEST - 1)
    check_read_entries(name, read, 0, sequence.orig_seq_len, block_size)


def _check_placeholders(group: Any, sequence: Any) -> None:
    for modality, placeholders in group.multi_modal_placeholder_maps.items():
        if placeholders.dest_len != sequence.query_len:
            raise ValueError(
                f"multi_modal_placeholder_maps[{modality!r}].dest_len ="
                f" {placeholders.dest_len}: expected {sequence.query_len}, the new tokens"
                f" of sequence {sequence.seq_id}"
            )


def check_sequence_step(
    step: CollectedStep,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    cuda_graph_pad_size: int,
    batch_size: int | None,
    max_blocks: int | None,
) -> None:
    """Raise an error for lengths that are not those of the groups, and a step unlike its graph."""
    check_begun(step.stage)
    if as_int("cuda_graph_pad_size", cuda_graph_pad_size, -LARGEST - 1) < -1:
        raise ValueError(
            f"cuda_graph_pad_size = {cuda_graph_pad_size}: expected -1 (no graph) or the"
            " sequences that fill it, from 0"
        )
    if not step.query_lens:
        raise ValueError("the step has no sequence: expected a group before build()")
    as_ints("query_lens", query_lens)
    as_ints("seq_lens", seq_lens)
    _check_alike("query_lens", query_lens, step.query_lens, "new tokens")
    if not max(query_lens):
        raise ValueError(
            f"query_lens = {list(query_lens)}: expected a new token in the step"
        )
    # no list longer than the one that is given
    padding = [1] * min(max(cuda_graph_pad_size, 0), len(seq_lens))
    _check_alike(
        "seq_lens",
        seq_lens,
        [*step.prefill_seq_lens, *step.curr_seq_lens, *padding],
        "tokens that attention reads, 1 where padding fills a graph",
    )
    if cuda_graph_pad_size >= 0:
        padded = len(query_lens) + cuda_graph_pad_size
        _check_captured_step(step.num_prefills, padded, batch_size, max_blocks)


def _check_alike(
    name: str, given: Sequence[int], own: Sequence[int], what: str
) -> None:
    if len(given) != len(own):
        raise ValueError(
            f"{name} has {len(given)} entries: expected {len(own)}, the sequences of the"
            " groups and the padding after them"
        )
    for place, (one, other) in enumerate(zip(given, own, strict=True)):
        if one != other:
            raise ValueError(
                f"{name}[{place}] = {one}: expected {other}, what its group says ({what})"
            )


def _check_captured_step(
    num_prefills: int, padded: int, batch_size: int | None, max_blocks: int | None
) -> None:
    """Raise an error for a step that does not fit the graph that it replays."""
    if num_prefills:
        raise ValueError(
            f"cuda_graph_pad_size is given in a step with {num_prefills} prompts: expected"
            " decodes alone, as a graph is captured for one new token per sequence; -1 runs"
            " without a graph"
        )
    if batch_size != padded:
        raise ValueError(
            f"batch_size = {batch_size}: expected {padded}, the sequences of the step and"
            " those that fill the graph"
        )
    if max_blocks is not None:
        as_int("max_blocks", max_blocks, largest=2**31 - 1)
    else:
        raise ValueError(
            "max_blocks = None: expected the width of the captured graph's block table"
        )


def check_rows_padded(x: Sequence[Sequence[Any]], max_len: int | None) -> None:
    """Raise an error for a row that is longer than the width of the tensor."""
    if max_len is None:
        return
    check_not_negative(max_len=max_len)
    for place, row in enumerate(x):
        if len(row) > max_len:
            raise IndexError(
                f"x[{place}] has {len(row)} entries: expected at most max_len = {max_len}"
            )


def check_attn_type(attn_type: str) -> None:
    """Raise an error for an unknown attention type."""
    kinds = [kind.value for kind in AttentionType]
    if attn_type not in kinds:
        raise ValueError(f"attn_type = {attn_type!r}: expected one of {kinds}")


def check_encoder_only_prompt(is_prompt: bool) -> None:
    """Raise an error for the decodes of a model that has no decoder."""
    if not is_prompt:
        raise ValueError(
            "is_prompt = False with attn_type = 'encoder_only': expected True, as a model"
            " without a decoder does not decode"
        )


def check_encoder_fields(
    attn_metadata: Any, attn_type: str, cross_block_tables: bool
) -> None:
    """Raise an error for metadata without the lengths of the encoder's sequences."""
    needed = ["encoder_seq_lens_tensor", "max_encoder_seq_len"]
    for name in needed + ["cross_block_tables"] * cross_block_tables:
        if getattr(attn_metadata, name) is None:
            raise ValueError(
                f"{name} = None with attn_type = {str(attn_type)!r}: expected the"
                " encoder's, from the step's metadata"
            )


def check_encoder_tokens(attn_metadata: Any, attn_type: str) -> None:
    """Raise an error for metadata without the number of encoder tokens."""
    if attn_metadata.num_encoder_tokens is None:
        raise ValueError(
            f"num_encoder_tokens = None with attn_type = {str(attn_type)!r}: expected the"
            " tokens of the step that go through the encoder, 0 if there are none"
        )

"""Metadata of sequence groups: every field is classified, copied to its parts, and refilled."""

from dataclasses import fields

import pytest
import torch
from captured_steps import decodes, make_state, tensors
from pagetwin.contract.v0 import sequence_classes
from pagetwin.contract.v0.graph_classes import (
    CAPTURE_VALUES,
    GraphInputBuffers,
    buffer_names,
)
from pagetwin.contract.v0.sequence_classes import (
    MultiModalPlaceholderMap,
    SequenceAttentionMetadata,
)
from support.twins import Twin

pytestmark = pytest.mark.quick


def test_every_field_is_classified_once() -> None:
    classified = (
        *sequence_classes.FIELDS_PER_SEQUENCE,
        *sequence_classes.FIELDS_OF_STARTS,
        *sequence_classes.FIELDS_CUT_BY_HAND,
        *sequence_classes.FIELDS_CARRIED,
    )
    names = [field.name for field in fields(SequenceAttentionMetadata)]
    assert sorted(classified) == sorted(names)


@pytest.mark.parametrize("encoder", [False, True])
def test_every_tensor_of_a_captured_step_is_refilled_or_never_changes(
    twin: Twin, encoder: bool
) -> None:
    state = make_state(twin, encoder)
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
    assert set(tensors(captured)) == {*buffer_names(encoder), "query_start_loc"}
    assert [field.name for field in fields(GraphInputBuffers)] == list(CAPTURE_VALUES)


def test_a_sequence_step_is_written_out_without_copies() -> None:
    metadata = decodes([4, 8], [[0], [1]], [3, 7])
    names = [field.name for field in fields(metadata)]
    skipped = {"slot_mapping", "no such field"}
    values = metadata.asdict_zerocopy(skipped)
    assert list(values) == [name for name in names if name not in skipped]
    assert all(
        getattr(metadata, name) is field_value for name, field_value in values.items()
    )


def test_base_metadata_cannot_be_cut_into_parts() -> None:
    base = sequence_classes.AttentionMetadata(slot_mapping=torch.empty(0).long())
    for part in ("prefill_metadata", "decode_metadata"):
        with pytest.raises(NotImplementedError, match="AttentionMetadata lacks"):
            getattr(base, part)


def test_a_map_of_two_lengths_cannot_be_written_out() -> None:
    uneven = MultiModalPlaceholderMap(src_ranges=(range(2),), src_len=2)
    with pytest.raises(ValueError, match="4 rows of embeddings for 0 placeholders"):
        uneven.extend(uneven).index_map()

"""Metadata classes: every field is classified, and the methods of a step agree with its requests.

The laws compare whole steps. These tests fail when a field is added that no law would fill.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.steps import Requests, whole_step
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.checks.metadata import expect_fields
from pagetwin.contract import metadata_classes, sequence_classes
from pagetwin.contract.graph_classes import (
    CAPTURE_VALUES,
    GraphInputBuffers,
    buffer_names,
)
from pagetwin.contract.metadata_classes import (
    PART_FIELDS_PER_REQUEST,
    CommonAttentionMetadata,
    PagedAttentionMetadata,
)
from pagetwin.contract.sequence_classes import (
    MultiModalPlaceholderMap,
    SequenceAttentionMetadata,
)
from support.captured_steps import decodes, make_state, tensors
from support.twins import Twin
from torch import Tensor

pytestmark = pytest.mark.quick

CUT_BY_HAND = (
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "query_start_loc_cpu",
    "max_seq_len",
    "slot_mapping",
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "query_ranges",
    "max_encoder_seq_len",
    "encoder_query_start_loc",
    "encoder_query_start_loc_cpu",
    "cross_slot_mapping",
)
CLASSIFIED: dict[type, tuple[str, ...]] = {
    CommonAttentionMetadata: (
        *metadata_classes.FIELDS_PER_REQUEST,
        *metadata_classes.FIELDS_PER_TOKEN,
        *metadata_classes.FIELDS_CARRIED,
        *metadata_classes.FIELDS_CUT_BY_HAND,
    ),
    PagedAttentionMetadata: (*PART_FIELDS_PER_REQUEST, *CUT_BY_HAND),
    SequenceAttentionMetadata: (
        *sequence_classes.FIELDS_PER_SEQUENCE,
        *sequence_classes.FIELDS_OF_STARTS,
        *sequence_classes.FIELDS_CUT_BY_HAND,
        *sequence_classes.FIELDS_CARRIED,
    ),
}
"""What becomes of each field when a batch is cut into micro-batches, or into its two parts."""


@pytest.mark.parametrize("kind", CLASSIFIED, ids=lambda kind: kind.__name__)
def test_every_field_is_classified_once(kind: Any) -> None:
    assert sorted(CLASSIFIED[kind]) == sorted(field.name for field in fields(kind))


@pytest.mark.parametrize("encoder", [False, True])
def test_every_tensor_of_a_captured_step_is_refilled_or_never_changes(
    twin: Twin, encoder: bool
) -> None:
    state = make_state(twin, encoder)
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
    assert set(tensors(captured)) == {*buffer_names(encoder), "query_start_loc"}
    assert [field.name for field in fields(GraphInputBuffers)] == list(CAPTURE_VALUES)


def test_a_whole_step_has_something_in_every_field() -> None:
    """The laws fill a step with `whole_step`; a field that it leaves empty is not compared."""
    step = whole_step(Requests((3, 2), (0, 4)), torch.device("cpu"))
    assert all(getattr(step, field.name) is not None for field in fields(step))


def changed(value: Any) -> Any:
    """Return another value of the same type and size."""
    if isinstance(value, Tensor):
        other = value.clone()
        flat = other.view(-1)
        flat[-1] = flat[-1].logical_not() if other.dtype == torch.bool else flat[-1] + 1
        return other
    return {7: [(0, 1)]} if isinstance(value, dict) else value + 1


@pytest.mark.parametrize(
    "name", [field.name for field in fields(CommonAttentionMetadata)]
)
def test_the_laws_notice_a_change_of_every_field(name: str) -> None:
    device = torch.device("cpu")
    right = whole_step(Requests((3, 2), (0, 4)), device)
    values = {field.name: getattr(right, field.name) for field in fields(right)}
    expect_fields("the step", right, values, device)
    for other in (None, changed(values[name])):
        with pytest.raises(Disagreement, match=name):
            expect_fields("the step", replace(right, **{name: other}), values, device)


# ---- methods of a step


def test_a_step_counts_its_tokens_on_the_device(
    twin: Twin, device: torch.device
) -> None:
    step = twin.build_common_attn_metadata(
        [3, 0, 2], [5, 0, 1], [[4, 2], [], [9]], 4, device
    )
    assert step.batch_size() == 3
    assert step.naive_query_lens().tolist() == [3, 0, 2]
    assert step.compute_num_computed_tokens().tolist() == [5, 0, 1]
    assert step.compute_num_computed_tokens() is step.compute_num_computed_tokens()
    assert step.token_to_req_indices().tolist() == [0, 0, 0, 2, 2]
    padded = step.replace(num_actual_tokens=7)
    assert padded.token_to_req_indices().tolist() == [0, 0, 0, 2, 2, 3, 3]
    longer = step.replace(seq_lens=step.seq_lens + 1)
    assert longer.compute_num_computed_tokens().tolist() == [6, 1, 2]


def test_unpadded_removes_the_padding_of_every_field() -> None:
    device = torch.device("cpu")
    whole = whole_step(Requests((3, 2), (0, 4)), device)
    alone = whole.unpadded(3, 1)
    assert (alone.num_reqs, alone.num_actual_tokens) == (1, 3)
    for names, size in (
        (metadata_classes.FIELDS_PER_REQUEST, 1),
        (metadata_classes.FIELDS_PER_TOKEN, 3),
    ):
        for name in names:
            found, before = getattr(alone, name), getattr(whole, name)
            if isinstance(before, Tensor):
                assert found.tolist() == before[:size].tolist(), name
    with pytest.raises(IndexError, match=r"num_actual_reqs = .*: expected 0 to"):
        whole.unpadded(0, 3)


# ---- metadata of sequence groups


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

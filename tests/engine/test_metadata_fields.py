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
from pagetwin.contract import metadata_classes
from pagetwin.contract.metadata_classes import (
    PART_FIELDS_PER_REQUEST,
    CommonAttentionMetadata,
    PagedAttentionMetadata,
)
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
}
"""What becomes of each field when a batch is cut into micro-batches, or into its two parts."""


@pytest.mark.parametrize("kind", CLASSIFIED, ids=lambda kind: kind.__name__)
def test_every_field_is_classified_once(kind: Any) -> None:
    assert sorted(CLASSIFIED[kind]) == sorted(field.name for field in fields(kind))


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

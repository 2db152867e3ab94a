"""Does each kind of attention take the right lengths and tables?"""

from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.kinds import AttentionType
from pagetwin.contract.sequence_classes import SequenceAttentionMetadata

ENCODER_FIELDS = ("encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len")
CROSS_FIELDS = ("cross_slot_mapping", "cross_block_tables")


def full(**changes: Any) -> SequenceAttentionMetadata:
    """Return metadata of two prompts and a decode, every tensor another object."""
    values: dict[str, Any] = {
        "num_prefills": 2,
        "num_prefill_tokens": 7,
        "num_decode_tokens": 1,
        "slot_mapping": torch.arange(8),
        "seq_lens_tensor": torch.tensor([3, 4, 9], dtype=torch.int32),
        "max_prefill_seq_len": 4,
        "max_decode_seq_len": 9,
        "block_tables": torch.zeros(3, 2, dtype=torch.int32),
        "encoder_seq_lens": [5, 6, 2],
        "encoder_seq_lens_tensor": torch.tensor([5, 6, 2], dtype=torch.int32),
        "max_encoder_seq_len": 6,
        "num_encoder_tokens": 11,
        "cross_slot_mapping": torch.arange(11),
        "cross_block_tables": torch.ones(3, 1, dtype=torch.int32),
    }
    return SequenceAttentionMetadata(**{**values, **changes})


@given(missing=st.sets(st.sampled_from(ENCODER_FIELDS + CROSS_FIELDS)))
def test_a_field_is_set_unless_it_is_none(missing: set[str], twin: Twin) -> None:
    metadata = full(**dict.fromkeys(missing))
    encoder = not missing & set(ENCODER_FIELDS)
    assert twin.is_all_encoder_attn_metadata_set(metadata) is encoder
    cross = encoder and not missing & set(CROSS_FIELDS)
    assert twin.is_all_cross_attn_metadata_set(metadata) is cross


def test_nothing_is_there_and_yet_set(twin: Twin) -> None:
    """A batch without encoder tokens has an empty list and a longest length of 0."""
    metadata = full(
        encoder_seq_lens=[],
        encoder_seq_lens_tensor=torch.empty(0, dtype=torch.int32),
        max_encoder_seq_len=0,
    )
    assert twin.is_all_encoder_attn_metadata_set(metadata) is True


@pytest.mark.parametrize("is_prompt", [True, False])
@pytest.mark.parametrize("kind", list(AttentionType))
def test_each_kind_takes_whose_keys_it_reads(
    kind: AttentionType, is_prompt: bool, twin: Twin
) -> None:
    """A model without a decoder once had no answer."""
    metadata = full()
    own = metadata.seq_lens_tensor
    longest = metadata.max_prefill_seq_len if is_prompt else metadata.max_decode_seq_len
    encoder = metadata.encoder_seq_lens_tensor
    expected = {
        "decoder": (own, longest, metadata.block_tables),
        "encoder": (encoder, 6, None),
        "encoder_only": (own, longest, None),
        "encoder_decoder": (encoder, 6, metadata.cross_block_tables),
    }[kind.value]
    # the string is as good as the kind
    for attn_type in (kind, kind.value):
        if kind == AttentionType.ENCODER_ONLY and not is_prompt:
            with pytest.raises(ValueError, match="does not decode"):
                twin.get_seq_len_block_table_args(metadata, is_prompt, attn_type)
            continue
        found = twin.get_seq_len_block_table_args(metadata, is_prompt, attn_type)
        assert all(one is other for one, other in zip(found, expected, strict=True))


@given(prefill=st.integers(0, 9), decode=st.integers(0, 9), encoder=st.integers(0, 9))
def test_each_kind_counts_who_asks_and_who_answers(
    prefill: int, decode: int, encoder: int, twin: Twin
) -> None:
    metadata = full(
        num_prefill_tokens=prefill, num_decode_tokens=decode, num_encoder_tokens=encoder
    )
    expected = {
        AttentionType.DECODER: (prefill, prefill, decode),
        AttentionType.ENCODER_ONLY: (prefill, prefill, decode),
        AttentionType.ENCODER: (encoder, encoder, 0),
        AttentionType.ENCODER_DECODER: (prefill, encoder, decode),
    }
    for kind, counts in expected.items():
        for attn_type in (kind, kind.value):
            found = twin.get_num_prefill_decode_query_kv_tokens(metadata, attn_type)
            assert found == counts


def test_an_unknown_kind_is_refused(twin: Twin) -> None:
    """Any other string once counted as a decoder."""
    for call in (
        lambda: twin.get_seq_len_block_table_args(full(), True, "decode"),
        lambda: twin.get_num_prefill_decode_query_kv_tokens(full(), "decode"),
    ):
        with pytest.raises(ValueError, match="attn_type = 'decode': expected one of"):
            call()


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("encoder", "encoder_seq_lens_tensor"),
        ("encoder", "max_encoder_seq_len"),
        ("encoder_decoder", "encoder_seq_lens_tensor"),
        ("encoder_decoder", "cross_block_tables"),
    ],
)
def test_a_length_that_is_missing_is_named(kind: str, field: str, twin: Twin) -> None:
    with pytest.raises(ValueError, match=f"{field} = None with attn_type = '{kind}'"):
        twin.get_seq_len_block_table_args(full(**{field: None}), True, kind)
    metadata = full(num_encoder_tokens=None)
    with pytest.raises(ValueError, match="num_encoder_tokens = None"):
        twin.get_num_prefill_decode_query_kv_tokens(metadata, kind)

"""Which lengths and which tables does each kind of attention take?

A choice between objects that are there already: nothing is computed, copied or read from the
device, so the two files differ in nothing but words.
"""

from ...contract.kinds import AttentionType
from ...contract.sequence_classes import SequenceAttentionMetadata
from ...contract.shapes import BlockTable, TokenCounts
from ...validation.sequences import (
    check_attn_type,
    check_encoder_fields,
    check_encoder_only_prompt,
    check_encoder_tokens,
)


def is_all_encoder_attn_metadata_set(attn_metadata: SequenceAttentionMetadata) -> bool:
    """Return whether the metadata has what attention inside an encoder needs."""
    return (
        attn_metadata.encoder_seq_lens is not None
        and attn_metadata.encoder_seq_lens_tensor is not None
        and attn_metadata.max_encoder_seq_len is not None
    )


def is_all_cross_attn_metadata_set(attn_metadata: SequenceAttentionMetadata) -> bool:
    """Return whether the metadata has what cross-attention needs."""
    return (
        is_all_encoder_attn_metadata_set(attn_metadata)
        and attn_metadata.cross_slot_mapping is not None
        and attn_metadata.cross_block_tables is not None
    )


def get_seq_len_block_table_args(
    attn_metadata: SequenceAttentionMetadata, is_prompt: bool, attn_type: str
) -> tuple[TokenCounts | None, int, BlockTable | None]:
    """Return whose keys are read: their lengths, the longest one, and where they lie."""
    check_attn_type(attn_type)
    if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        # step: the sequence's own tokens
        longest = (
            attn_metadata.max_prefill_seq_len
            if is_prompt
            else attn_metadata.max_decode_seq_len
        )
        if attn_type == AttentionType.DECODER:
            return attn_metadata.seq_lens_tensor, longest, attn_metadata.block_tables
        check_encoder_only_prompt(is_prompt)
        return attn_metadata.seq_lens_tensor, longest, None
    # step: the encoder's tokens
    crosses = attn_type == AttentionType.ENCODER_DECODER
    check_encoder_fields(attn_metadata, attn_type, cross_block_tables=crosses)
    longest_encoder = attn_metadata.max_encoder_seq_len
    assert longest_encoder is not None
    table = attn_metadata.cross_block_tables if crosses else None
    return attn_metadata.encoder_seq_lens_tensor, longest_encoder, table


def get_num_prefill_decode_query_kv_tokens(
    attn_metadata: SequenceAttentionMetadata, attn_type: str
) -> tuple[int, int, int]:
    """Return the queries and keys of the prompts, and the queries of the decodes, in tokens."""
    check_attn_type(attn_type)
    prefill_tokens = attn_metadata.num_prefill_tokens
    decode_tokens = attn_metadata.num_decode_tokens
    if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        return prefill_tokens, prefill_tokens, decode_tokens
    check_encoder_tokens(attn_metadata, attn_type)
    encoder_tokens = attn_metadata.num_encoder_tokens
    assert encoder_tokens is not None
    if attn_type == AttentionType.ENCODER:
        return encoder_tokens, encoder_tokens, 0
    return prefill_tokens, encoder_tokens, decode_tokens

"""Encoder-decoder models: the lengths and block table of each attention type.

A decoder's tokens read their own sequence through the block table. In a model with an encoder they
also read the encoder's tokens, through a second table (cross-attention). The encoder's tokens read
each other, all at once and in both directions; they come from nowhere but the step itself, so they
have no table. One step's metadata holds the lengths of both sides, and the kind says which to take.
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
    """Return whether the metadata has what attention inside an encoder needs.

    Args:
        attn_metadata: an empty list or a longest length of 0 is there; None is not.

    Source:
        vLLM's function of that name.

    Example:
        >>> is_all_encoder_attn_metadata_set(SequenceAttentionMetadata(
        ...     num_prefills=1,
        ...     num_prefill_tokens=2,
        ...     slot_mapping=torch.tensor([8, 9]),
        ...     encoder_seq_lens=[3],
        ...     encoder_seq_lens_tensor=torch.tensor([3], dtype=torch.int32),
        ...     max_encoder_seq_len=3,
        ... ))
        True
    """
    return (
        attn_metadata.encoder_seq_lens is not None
        and attn_metadata.encoder_seq_lens_tensor is not None
        and attn_metadata.max_encoder_seq_len is not None
    )


def is_all_cross_attn_metadata_set(attn_metadata: SequenceAttentionMetadata) -> bool:
    """Return whether the metadata has what cross-attention needs.

    Args:
        attn_metadata: all that the encoder needs, and the encoder's slots and block table.

    Source:
        vLLM's function of that name.

    Example:
        An encoder's lengths alone do not say where its keys lie in the cache.

        >>> is_all_cross_attn_metadata_set(SequenceAttentionMetadata(
        ...     num_prefills=1,
        ...     num_prefill_tokens=2,
        ...     slot_mapping=torch.tensor([8, 9]),
        ...     encoder_seq_lens=[3],
        ...     encoder_seq_lens_tensor=torch.tensor([3], dtype=torch.int32),
        ...     max_encoder_seq_len=3,
        ... ))
        False
    """
    return (
        is_all_encoder_attn_metadata_set(attn_metadata)
        and attn_metadata.cross_slot_mapping is not None
        and attn_metadata.cross_block_tables is not None
    )


def get_seq_len_block_table_args(
    attn_metadata: SequenceAttentionMetadata, is_prompt: bool, attn_type: str
) -> tuple[TokenCounts | None, int, BlockTable | None]:
    """Return whose keys are read: their lengths, the longest one, and where they lie.

    Args:
        attn_metadata: of the prompts or of the decodes, or of both.
        is_prompt: whether the longest length of the prompts is wanted, or of the decodes.
        attn_type: an `AttentionType`, or its string.

    Returns:
        [seqs] lengths, an upper bound on them, and [seqs, max_blocks] a block table, or None
        where keys are not read from a cache. The metadata's own objects, not copies.

    Raises:
        ValueError: no such kind, the metadata lacks what the kind needs, or a decode of a model
            that has no decoder.

    Source:
        vLLM's function of that name, which has no answer for "encoder_only".

    Example:
        A prompt of 2 tokens, and 3 tokens of an encoder whose keys lie in block 6.

        >>> get_seq_len_block_table_args(
        ...     SequenceAttentionMetadata(
        ...         num_prefills=1,
        ...         num_prefill_tokens=2,
        ...         slot_mapping=torch.tensor([8, 9]),
        ...         encoder_seq_lens=[3],
        ...         encoder_seq_lens_tensor=torch.tensor([3], dtype=torch.int32),
        ...         max_encoder_seq_len=3,
        ...         cross_slot_mapping=torch.tensor([24, 25, 26]),
        ...         cross_block_tables=torch.tensor([[6]], dtype=torch.int32),
        ...     ),
        ...     is_prompt=True,
        ...     attn_type="encoder_decoder",
        ... )
        (tensor([3], dtype=torch.int32), 3, tensor([[6]], dtype=torch.int32))
    """
    check_attn_type(attn_type)
    if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        # step: select the sequence's own tokens
        longest = (
            attn_metadata.max_prefill_seq_len
            if is_prompt
            else attn_metadata.max_decode_seq_len
        )
        if attn_type == AttentionType.DECODER:
            return attn_metadata.seq_lens_tensor, longest, attn_metadata.block_tables
        check_encoder_only_prompt(is_prompt)
        return attn_metadata.seq_lens_tensor, longest, None
    # step: select the encoder's tokens
    crosses = attn_type == AttentionType.ENCODER_DECODER
    check_encoder_fields(attn_metadata, attn_type, cross_block_tables=crosses)
    longest_encoder = attn_metadata.max_encoder_seq_len
    assert longest_encoder is not None
    table = attn_metadata.cross_block_tables if crosses else None
    return attn_metadata.encoder_seq_lens_tensor, longest_encoder, table


def get_num_prefill_decode_query_kv_tokens(
    attn_metadata: SequenceAttentionMetadata, attn_type: str
) -> tuple[int, int, int]:
    """Return the queries and keys of the prompts, and the queries of the decodes, in tokens.

    Args:
        attn_metadata: of the whole step.
        attn_type: an `AttentionType`, or its string.

    Returns:
        Query tokens of the prompts, new key tokens of the prompts, query tokens of the decodes.
        The keys of an encoder are the step's encoder tokens; an encoder does not decode.

    Raises:
        ValueError: no such kind, or `num_encoder_tokens` is None where it is needed.

    Source:
        vLLM's function of that name, which takes any other string for "decoder".

    Example:
        Two prompt tokens ask about 3 encoder tokens.

        >>> get_num_prefill_decode_query_kv_tokens(
        ...     SequenceAttentionMetadata(
        ...         num_prefills=1,
        ...         num_prefill_tokens=2,
        ...         slot_mapping=torch.tensor([8, 9]),
        ...         num_encoder_tokens=3,
        ...     ),
        ...     attn_type="encoder_decoder",
        ... )
        (2, 3, 0)
    """
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

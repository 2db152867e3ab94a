"""Encoder-decoder models: the lengths and block table of each attention type.

A decoder's tokens read their own sequence through the block table. In an encoder-decoder model
they also read the encoder's tokens, through a second table (cross-attention). The encoder's tokens
read each other in both directions. They are computed in the same step, so they have no table. One
step's metadata holds the lengths of both sides, and the attention type selects among them.
"""

from ...contract.argument_types import typed
from ...contract.kinds import AttentionType
from ...contract.shapes import BlockTable, TokenCounts
from ...contract.v0.sequence_classes import SequenceAttentionMetadata
from ...validation.v0.sequences import (
    check_attn_type,
    check_encoder_fields,
    check_encoder_only_prompt,
    check_encoder_tokens,
)


@typed
def is_all_encoder_attn_metadata_set(attn_metadata: SequenceAttentionMetadata) -> bool:
    """Return whether the metadata is complete for attention within an encoder.

    Args:
        attn_metadata: metadata of a step. An empty list and a maximum of 0 count as present.

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


@typed
def is_all_cross_attn_metadata_set(attn_metadata: SequenceAttentionMetadata) -> bool:
    """Return whether the metadata is complete for cross-attention.

    Args:
        attn_metadata: metadata of a step. Cross-attention also needs the encoder's slots and
            block table.

    Source:
        vLLM's function of that name.

    Example:
        The encoder's lengths alone do not determine the location of its keys in the cache.

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


@typed
def get_seq_len_block_table_args(
    attn_metadata: SequenceAttentionMetadata, is_prompt: bool, attn_type: str
) -> tuple[TokenCounts | None, int, BlockTable | None]:
    """Return the lengths, the maximum length and the block table of the keys to read.

    Args:
        attn_metadata: metadata of the prompts, of the decodes, or of both.
        is_prompt: whether the maximum length is that of the prompts or of the decodes. The two are
            separate launches, each bounded by its own longest sequence, so that a long prompt does
            not enlarge the grid of the decodes.
        attn_type: an `AttentionType`, or its string.

    Returns:
        [seqs] lengths, an upper bound on them, and a block table [seqs, max_blocks], or None if
        the keys are not read from a cache. They are the metadata's own objects, not copies.

    Raises:
        ValueError: unknown type, incomplete metadata, or a decode of a model without a decoder.

    Source:
        vLLM's function of that name.

    Example:
        A prompt of 2 tokens, and 3 tokens of an encoder with its keys in block 6.

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


@typed
def get_num_prefill_decode_query_kv_tokens(
    attn_metadata: SequenceAttentionMetadata, attn_type: str
) -> tuple[int, int, int]:
    """Return the number of query and key tokens of the prompts, and of query tokens of the decodes.

    Args:
        attn_metadata: metadata of the whole step.
        attn_type: an `AttentionType`, or its string.

    Returns:
        Query tokens of the prompts, new key tokens of the prompts, query tokens of the decodes.
        The keys of an encoder are the step's encoder tokens. An encoder has no decodes.

    Raises:
        ValueError: unknown type, or `num_encoder_tokens` is None but needed.

    Source:
        vLLM's function of that name.

    Example:
        Two prompt tokens attend to 3 encoder tokens.

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

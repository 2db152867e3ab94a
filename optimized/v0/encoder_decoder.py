"""Encoder-decoder models: the lengths and block table of each attention type."""

from ...reference.v0.encoder_decoder import (
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
)

__all__ = [
    "get_num_prefill_decode_query_kv_tokens",
    "get_seq_len_block_table_args",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
]

"""Speculative decoding: the draft tokens of a request as a batch axis."""

from ...reference.batch.spec_decode import (
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
)

__all__ = ["reshape_attn_output_for_spec_decode", "reshape_query_for_spec_decode"]

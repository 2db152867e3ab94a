"""Derived backends and metadata classes for layers that run on some tokens of a step."""

from ...reference.batch.fast_prefill_backend import (
    WantedTokensBuilder,
    derive_fast_prefill_backend,
    subclass_attention_backend,
    subclass_attention_metadata,
)

__all__ = [
    "WantedTokensBuilder",
    "derive_fast_prefill_backend",
    "subclass_attention_backend",
    "subclass_attention_metadata",
]

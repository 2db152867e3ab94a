"""Prefix cache: which block holds which content, so that equal beginnings are computed once."""

from ...reference.cache.prefix_cache import (
    ALL_BLOCKS,
    NO_CONTENT,
    Key,
    PrefixCache,
    generate_block_hash_extra_keys,
)

__all__ = [
    "ALL_BLOCKS",
    "NO_CONTENT",
    "Key",
    "PrefixCache",
    "generate_block_hash_extra_keys",
]

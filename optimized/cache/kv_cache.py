"""KV cache: its shape, memory layout and views."""

from ...reference.cache.kv_cache import (
    allocate_kv_cache,
    get_kv_cache_shape,
    get_packed_kv_cache_shape,
    reshape_kv_cache,
    reshape_layered_kv_cache,
    split_kv_cache,
    split_packed_kv_cache,
    view_kv_cache,
)

__all__ = [
    "allocate_kv_cache",
    "get_kv_cache_shape",
    "get_packed_kv_cache_shape",
    "reshape_kv_cache",
    "reshape_layered_kv_cache",
    "split_kv_cache",
    "split_packed_kv_cache",
    "view_kv_cache",
]

"""KV caches of a model: allocation, reshaping and binding to layers."""

from ...reference.cache.kv_cache_init import (
    allocate_kv_caches,
    bind_kv_cache,
    get_kv_cache_spec,
    init_kv_cache,
    reshape_kv_caches,
)

__all__ = [
    "allocate_kv_caches",
    "bind_kv_cache",
    "get_kv_cache_spec",
    "init_kv_cache",
    "reshape_kv_caches",
]

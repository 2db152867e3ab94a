"""Paged attention to be read: plain torch, any device, loops welcome.

One file per concept. For an evening, in this order: block_table, slot_mapping, kv_cache, cache_ops,
batch_split, metadata, paged_attention, backend. `pagetwin.shared.operations.CONCEPTS` lists all.
"""

"""The KV cache in plain torch: block tables, slot mapping, layouts, writes and copies."""

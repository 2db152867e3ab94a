"""Chunks of prompts in zig-zag order, which give each rank the same work."""

from ...reference.parallel.prefill_chunks import share_prompts, zigzag_chunks

__all__ = ["share_prompts", "zigzag_chunks"]

"""Block manager: which request holds which block, and which blocks are shared."""

from ...reference.cache.block_manager import BlockManager

__all__ = ["BlockManager"]

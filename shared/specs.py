"""What does one layer's KV cache look like?"""

from dataclasses import dataclass

import torch

from .refusals import check_positive


@dataclass(frozen=True)
class KVCacheSpec:
    """The page of one attention layer: what a block holds, and how many bytes that is.

    Args:
        block_size: slots (tokens) in a block, any number from 1.
        num_kv_heads: key/value heads of the layer.
        head_size: elements of one head's key, and of its value.
        dtype: element type of the cache.

    Raises:
        ValueError: a number below 1.

    Example:
        16 slots of 8 heads of 128 bfloat16 elements, keys and values: 65,536 bytes a page.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_positive(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
        )

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, its keys and its values together."""
        elements = 2 * self.block_size * self.num_kv_heads * self.head_size
        return elements * self.dtype.itemsize

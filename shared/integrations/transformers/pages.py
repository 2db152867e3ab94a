"""Where do one layer's keys and values lie?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """One layer's cache.

    Args:
        key_cache: [num_blocks, block_size, kv_heads, head_size].
        value_cache: [num_blocks, block_size, kv_heads, value_head_size].
    """

    key_cache: Tensor
    value_cache: Tensor

    @classmethod
    def like(
        cls, key: Tensor, value: Tensor, num_blocks: int, block_size: int
    ) -> "Pages":
        """Return pages for such keys and values, full of NaN.

        Args:
            key, value: [tokens, kv_heads, elements].
            num_blocks: blocks in the cache.
            block_size: slots in a block.
        """
        caches = [
            each.new_full((num_blocks, block_size, *each.shape[1:]), torch.nan)
            for each in (key, value)
        ]
        return cls(*caches)

    def forget(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN, so that who reads them cannot go unnoticed."""
        if blocks:
            index = torch.tensor(list(blocks), device=self.key_cache.device)
            self.key_cache[index] = torch.nan
            self.value_cache[index] = torch.nan

"""The paged KV cache of one layer of a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """One layer's key cache and value cache.

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
        """Return caches for such keys and values, filled with NaN.

        Args:
            key, value: [tokens, kv_heads, elements].
            num_blocks: blocks in the cache.
            block_size: slots per block.
        """
        caches = [
            states.new_full((num_blocks, block_size, *states.shape[1:]), torch.nan)
            for states in (key, value)
        ]
        return cls(*caches)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, one (source, destination) pair after another."""
        for cache in (self.key_cache, self.value_cache):
            for source, destination in pairs:
                cache[destination] = cache[source]

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a read of them gives NaN."""
        if blocks:
            index = torch.tensor(list(blocks), device=self.key_cache.device)
            self.key_cache[index] = torch.nan
            self.value_cache[index] = torch.nan

"""Laws of `copy_blocks` and `swap_blocks`: blocks are copied within caches and between them."""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..candidates.setting import Setting
from ..cases.batches import LAYOUTS, empty_cache
from ..cases.caches import DTYPES, FP8, CacheSizes, any_bytes, draw_sizes
from ..cases.reuse import compiled
from ..checks.canaries import copy_of, expect_memory, kept
from ..checks.expect import expect_same
from .law import law


@dataclass(frozen=True)
class Moves:
    """Blocks that are copied.

    Args:
        pairs: source block and destination block of each copy.
        sizes: sizes of one cache. A second cache differs from it only in the number of blocks.
        others: number of blocks of the destination, or of every further layer.
        layers: number of layers of a copy. Their layouts differ.
    """

    pairs: tuple[tuple[int, int], ...]
    sizes: CacheSizes
    others: int
    layers: int
    seed: int

    def mapping(self) -> Tensor:
        """Return the pairs as a tensor on the host."""
        return torch.tensor(self.pairs, dtype=torch.int64).view(-1, 2)

    def cache(self, device: torch.device, number: int, num_blocks: int) -> Tensor:
        """Return [2, num_blocks, ...] of random bytes. The number selects the layout."""
        layouts = (self.sizes.layout, self.sizes.value_layout, *LAYOUTS)
        one = self.sizes
        cache = empty_cache(
            layouts[number % len(layouts)],
            num_blocks,
            one.block_size,
            one.kv_heads,
            one.head_size,
            one.dtype,
            device,
        )
        return cache.copy_(any_bytes(cache.shape, one.dtype, self.seed + number))


@st.composite
def moves(draw: st.DrawFn, is_one_cache: bool) -> Moves:
    """Return pairs in which no block is written twice, or written and read in one cache."""
    pick = Random(draw(st.integers(0, 2**20)))
    sizes = draw_sizes(pick, compiled(pick), (*DTYPES, *FP8))
    others = pick.choice([1, 3, 6])
    there = min(sizes.num_blocks, others) if is_one_cache else others
    given = pick.sample(range(there), pick.randint(0, there))
    here = there if is_one_cache else sizes.num_blocks
    taken = [block for block in range(here) if not is_one_cache or block not in given]
    pairs = tuple((pick.choice(taken), block) for block in given) if taken else ()
    return Moves(pairs, sizes, others, pick.choice([0, 1, 2, 4]), pick.randrange(2**16))


@law("copy_blocks", cases=moves(is_one_cache=True))
def a_copied_block_is_its_source_in_every_layer(setting: Setting, moved: Moves) -> None:
    """Keys and values are copied. Layers may have different strides and numbers of blocks."""
    caches = [
        moved.cache(
            setting.device, layer, moved.others if layer else moved.sizes.num_blocks
        )
        for layer in range(moved.layers)
    ]
    right = [copy_of(cache) for cache in caches]
    for cache in right:
        for source, destination in moved.pairs:
            for half in range(2):
                cache[half, destination] = cache[half, source].clone()
    mapping = moved.mapping()
    with kept(block_mapping=mapping):
        found = setting.candidate.copy_blocks(caches, mapping)
    expect_same("what a copy returns", found, None)
    for layer, (cache, wanted) in enumerate(zip(caches, right, strict=True)):
        expect_memory(f"cache of layer {layer}", cache, wanted)


@law("swap_blocks", cases=moves(is_one_cache=False))
def a_swapped_block_equals_its_source_which_is_unchanged(
    setting: Setting, moved: Moves
) -> None:
    """Blocks are copied only from the first cache to the second, which has its own ids."""
    source = moved.cache(setting.device, 0, moved.sizes.num_blocks)
    destination = moved.cache(setting.device, 1, moved.others)
    right = copy_of(destination)
    for taken, given in moved.pairs:
        for half in range(2):
            right[half, given] = source[half, taken].cpu()
    mapping = moved.mapping()
    with kept(source=source, block_mapping=mapping):
        found = setting.candidate.swap_blocks(source, destination, mapping)
    expect_same("what a swap returns", found, None)
    expect_memory("destination", destination, right)


@law("swap_blocks", cases=[torch.float16, torch.float32, torch.float8_e4m3fn])
def a_swap_to_the_host_and_back_preserves_blocks(
    setting: Setting, dtype: torch.dtype
) -> None:
    """Blocks are swapped out to a cache on the host, and swapped back into other blocks."""
    sizes = (4, 3, 2, 8)
    here = empty_cache("interleaved", *sizes, dtype, setting.device)
    here.copy_(any_bytes(here.shape, dtype, 5))
    there = empty_cache("hnd", 5, *sizes[1:], dtype)
    before = copy_of(here)
    setting.candidate.swap_blocks(here, there, torch.tensor([[3, 0], [1, 4]]))
    setting.candidate.swap_blocks(there, here, torch.tensor([[0, 2], [4, 0]]))
    before[:, 2], before[:, 0] = before[:, 3].clone(), before[:, 1].clone()
    expect_memory("cache", here, before)

"""Laws of the memory of one cache: its shape, its allocation, and the views of its bytes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.layouts import KVCacheLayout
from ...contract.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from ..candidates.setting import Setting
from ..cases.batches import LAYOUTS, empty_cache
from ..checks.cache_memory import (
    DTYPES,
    PAGE,
    SPEC,
    expect_view,
    is_packed_in,
    numbered_bytes,
    some_bytes,
)
from ..checks.canaries import kept, packed
from ..checks.expect import expect_rejection, expect_same
from .law import law


@dataclass(frozen=True)
class View:
    """Bytes, and the shape and order in which they are viewed.

    Args:
        shape: Lengths of the axes.
        order: The axes, outermost in memory first.
        dtype: The dtype of the elements.
        front: The number of unrelated elements before the bytes.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    front: int = 0

    def raw(self, device: torch.device) -> Tensor:
        """Return the bytes, a slice of a larger allocation."""
        count = torch.Size(self.shape).numel() * self.dtype.itemsize
        front = self.front * self.dtype.itemsize
        return numbered_bytes(front + count + 16, device)[front : front + count]


@st.composite
def views(draw: st.DrawFn) -> View:
    """Return a few short axes in any order, including orders that are not swaps."""
    pick = Random(draw(st.integers(0, 2**20)))
    axes = pick.choice([1, 2, 3, 3, 4, 5, 5])
    shape = tuple(pick.choice([1, 2, 3, 4, 5]) for _ in range(axes))
    if pick.random() < 0.1:
        shape = (*shape[:-1], 0)
    order = tuple(pick.sample(range(axes), axes))
    return View(shape, order, pick.choice(DTYPES), pick.choice([0, 0, 3]))


@law("view_kv_cache", cases=views())
def axes_are_in_memory_in_the_requested_order(setting: Setting, view: View) -> None:
    raw = view.raw(setting.device)
    with kept(raw=raw):
        found = setting.candidate.view_kv_cache(raw, view.dtype, view.shape, view.order)
    own = is_packed_in(view.order, view.shape)
    expect_view("view", found, raw, view.shape, view.dtype, own)


@dataclass(frozen=True)
class Paged:
    """The sizes of a cache.

    Args:
        num_blocks: The number of blocks.
        spec: The spec of a block.
        order: The five axes, outermost in memory first.
        num_layers: The number of layers in one allocation.
        layout: The layout of an allocation of several layers.
        kernel_block_size: Slots in a block of the kernels. If None, the engine's.
    """

    num_blocks: int
    spec: KVCacheSpec
    order: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_layers: int = 1
    layout: KVCacheLayout = KVCacheLayout.NHD
    kernel_block_size: int | None = None

    def __repr__(self) -> str:
        return (
            f"Paged({self.num_blocks}, {self.spec}, {self.order}, {self.num_layers},"
            f" {self.layout}, {self.kernel_block_size})"
        )

    def raw(self, device: torch.device) -> Tensor:
        """Return the bytes of all layers."""
        pages = self.num_layers * self.num_blocks
        return numbered_bytes(pages * self.spec.page_size_bytes, device)

    @property
    def shape(self) -> tuple[int, ...]:
        """The five axes of one layer."""
        spec = self.spec
        sizes = (spec.block_size, spec.num_kv_heads, spec.head_size)
        return (2, self.num_blocks, *sizes)


@st.composite
def pages(draw: st.DrawFn) -> Paged:
    """Return small caches of all orders and layouts, with equal and unequal axes."""
    pick = Random(draw(st.integers(0, 2**20)))
    spec = KVCacheSpec(
        pick.choice([1, 2, 3, 4, 5]),
        pick.choice([1, 2, 3]),
        pick.choice([1, 2, 3, 8]),
        pick.choice(DTYPES),
    )
    return Paged(
        pick.choice([0, 1, 2, 3, 5]),
        spec,
        pick.choice(list(permutations(range(5)))),
        pick.choice([1, 2, 3]),
        pick.choice(list(KVCacheLayout)),
    )


@law("get_kv_cache_shape", "get_packed_kv_cache_shape", cases=pages())
def the_shape_of_a_cache_follows_from_its_sizes(setting: Setting, case: Paged) -> None:
    spec = case.spec
    sizes = (case.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    found = setting.candidate.get_kv_cache_shape(*sizes)
    expect_same("shape", tuple(found), (2, *sizes))
    found = setting.candidate.get_packed_kv_cache_shape(*sizes)
    packed = (2, sizes[0], spec.block_size * spec.num_kv_heads * spec.head_size)
    expect_same("packed shape", tuple(found), packed)
    named = {
        "num_blocks": sizes[0],
        "block_size": sizes[1],
        "num_kv_heads": sizes[2],
        "head_size": sizes[3],
    }
    by_name = setting.candidate.get_kv_cache_shape(**named)
    expect_same("shape by name", tuple(by_name), (2, *sizes))


SPECS = [
    KVCacheSpec(3, 2, 5, torch.float16),
    KVCacheSpec(16, 1, 8, torch.float32),
    KVCacheSpec(16, 8, 64, torch.float8_e4m3fn),
    FullAttentionSpec(4, 2, 8, torch.bfloat16, sliding_window=3),
    SlidingWindowSpec(4, 2, 8, torch.float16, sliding_window=3),
    ChunkedLocalAttentionSpec(4, 2, 8, torch.float16, attention_chunk_size=8),
    CrossAttentionSpec(4, 2, 8, torch.float16),
    MLAAttentionSpec(16, 1, 36, torch.bfloat16),
]


@law("allocate_kv_cache", cases=SPECS)
def a_new_cache_has_one_page_per_block_and_is_zero(
    setting: Setting, spec: KVCacheSpec
) -> None:
    """A page of latents is counted once: latents replace both keys and values."""
    halves = 1 if isinstance(spec, MLAAttentionSpec) else 2
    page = halves * spec.block_size * spec.num_kv_heads * spec.head_size
    page *= torch.empty(0, dtype=spec.dtype).element_size()
    for num_blocks in (0, 1, 7):
        found = setting.candidate.allocate_kv_cache(spec, num_blocks, setting.device)
        right = torch.zeros(num_blocks * page, dtype=torch.int8)
        expect_same("bytes", found.cpu(), right)
        expect_same("device", found.device.type, setting.device.type)
        found.fill_(1)  # the next allocation must be zero even if it reuses this memory
    again = setting.candidate.allocate_kv_cache(spec, 7, setting.device)
    expect_same("bytes of the next cache", again.cpu(), right)


@law("reshape_kv_cache", cases=pages())
def a_layers_cache_is_a_view_of_its_bytes_in_the_order_of_its_axes(
    setting: Setting, case: Paged
) -> None:
    raw = case.raw(setting.device)[: case.num_blocks * case.spec.page_size_bytes]
    for orders in ((), (case.order,)):
        with kept(raw=raw):
            found = setting.candidate.reshape_kv_cache(raw, case.spec, *orders)
        own = is_packed_in(*orders or (tuple(range(5)),), case.shape)
        expect_view("cache", found, raw, case.shape, case.spec.dtype, own)


@st.composite
def layered(draw: st.DrawFn) -> Paged:
    """Return allocations of several layers, some with padded pages or with kernel blocks."""
    case = draw(pages())
    pick = Random(draw(st.integers(0, 2**20)))
    spec, is_whole = case.spec, case.layout is not KVCacheLayout.LHBNC
    is_whole &= case.layout is not KVCacheLayout.BHLNC
    if pick.random() < 0.4 and (is_whole or spec.num_kv_heads == 1):
        padding = pick.choice([1, 2, 9]) * spec.dtype.itemsize
        padded = replace(spec, page_size_padded=spec.page_size_bytes + padding)
        return replace(case, spec=padded)
    parts = pick.choice([0, 0, 1, 2, 3])
    size = spec.block_size * max(parts, 1)
    kernel = spec.block_size if parts else None
    return replace(case, spec=replace(spec, block_size=size), kernel_block_size=kernel)


@law("reshape_layered_kv_cache", cases=layered())
def each_layer_of_one_allocation_is_stored_where_its_layout_says(
    setting: Setting, case: Paged
) -> None:
    """Each letter of the layout's name is an axis; a head's key and value are adjacent.

    The axes after the block are those of a page, whose padding follows. A block of the kernels is
    a part of a page.
    """
    raw, spec = case.raw(setting.device), case.spec
    names = {"HND": "LBHNC", "NHD": "LBNHC"}
    letters = names.get(case.layout.name, case.layout.name)
    slots = case.kernel_block_size or spec.block_size
    sizes = {
        "L": case.num_layers,
        "B": case.num_blocks * (spec.block_size // slots),
        "H": spec.num_kv_heads,
        "N": slots,
        "C": 2 * spec.head_size,
    }
    page_end = max(letters.index("L"), letters.index("B"))
    page = slots * spec.num_kv_heads * sizes["C"]
    padding = spec.page_size_bytes // spec.dtype.itemsize - page
    padding = 0 if case.kernel_block_size else padding

    def offset_of(
        layer: int, half: int, block: int, slot: int, head: int, part: int
    ) -> int:
        content = half * spec.head_size + part
        index = {"L": layer, "B": block, "H": head, "N": slot, "C": content}
        found = pages_before = 0
        for place, letter in enumerate(letters):
            found = found * sizes[letter] + index[letter]
            pages_before = found if place == page_end else pages_before
        return found + pages_before * padding

    kernel = case.kernel_block_size
    with kept(raw=raw):
        found = setting.candidate.reshape_layered_kv_cache(
            raw,
            spec,
            num_layers=case.num_layers,
            layout=case.layout,
            **({} if kernel is None else {"kernel_block_size": kernel}),
        )
    rest = (slots, spec.num_kv_heads, spec.head_size)
    shape = (case.num_layers, 2, sizes["B"], *rest)
    expect_view("caches", found, raw, shape, spec.dtype, offset_of)


@law("split_kv_cache", cases=LAYOUTS)
def halves_of_a_cache_are_views_of_it(setting: Setting, layout: str) -> None:
    """Keys come first. A write to a half changes that element of the cache only."""
    cache = empty_cache(layout, 3, 2, 2, 5, torch.float32, setting.device)
    numbers = torch.arange(120.0).view(cache.shape)
    cache.copy_(numbers)
    with kept(kv_cache=cache):
        found = setting.candidate.split_kv_cache(cache)
        expect_same("number of halves", len(found), 2)
        for half, view in enumerate(found):
            expect_same(f"half {half}", packed(view), numbers[half])
    for half, view in enumerate(found):
        view[2, 1, 0, 3] = -1.0 - half
        numbers[half, 2, 1, 0, 3] = -1.0 - half
        expect_same("cache", packed(cache), numbers)


@dataclass(frozen=True)
class Packed:
    """A cache in the packed layout of the first paged-attention kernels."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    parts: int
    dtype: torch.dtype


@st.composite
def packed_caches(draw: st.DrawFn) -> Packed:
    """Return caches whose heads consist of a few parts of 16 bytes."""
    pick = Random(draw(st.integers(0, 2**20)))
    return Packed(
        pick.choice([0, 1, 2, 3]),
        pick.choice([1, 2, 3, 4]),
        pick.choice([1, 2, 3]),
        pick.choice([1, 2, 3]),
        pick.choice(DTYPES),
    )


@law("split_packed_kv_cache", cases=packed_caches())
def a_packed_cache_is_split_into_parts_of_sixteen_bytes(
    setting: Setting, case: Packed
) -> None:
    """For keys, one part of all slots is contiguous; for values, one element is."""
    part = 16 // torch.empty(0, dtype=case.dtype).element_size()
    heads, slots, size = case.num_kv_heads, case.block_size, case.parts * part
    block = slots * heads * size
    raw = numbered_bytes(
        2 * case.num_blocks * block * case.dtype.itemsize, setting.device
    )
    cache = raw.view(case.dtype).view(2, case.num_blocks, block)
    with kept(kv_cache=cache):
        found = setting.candidate.split_packed_kv_cache(cache, heads, size)
    expect_same("number of halves", len(found), 2)

    def key_offset(block_id: int, head: int, which: int, slot: int, inside: int) -> int:
        before = block_id * block + head * size * slots
        return before + which * slots * part + slot * part + inside

    def value_offset(block_id: int, head: int, element: int, slot: int) -> int:
        half = case.num_blocks * block
        return half + block_id * block + (head * size + element) * slots + slot

    key_shape = (case.num_blocks, heads, case.parts, slots, part)
    value_shape = (case.num_blocks, heads, size, slots)
    expect_view("key view", found[0], raw, key_shape, case.dtype, key_offset)
    expect_view("value view", found[1], raw, value_shape, case.dtype, value_offset)


PADDED = replace(SPEC, page_size_padded=PAGE + 8)

REJECTED: dict[str, Callable[[Any], Any]] = {
    "less than no blocks": lambda c: c.get_kv_cache_shape(-1, 4, 2, 8),
    "blocks without slots": lambda c: c.get_kv_cache_shape(1, 0, 2, 8),
    "no heads": lambda c: c.get_kv_cache_shape(1, 4, 0, 8),
    "heads without elements": lambda c: c.get_kv_cache_shape(1, 4, 2, 0),
    "less than no packed blocks": lambda c: c.get_packed_kv_cache_shape(-1, 4, 2, 8),
    "packed heads without elements": lambda c: c.get_packed_kv_cache_shape(1, 4, 2, 0),
    "an allocation of less than no blocks": lambda c: c.allocate_kv_cache(SPEC, -1),
    "an axis twice": lambda c: c.view_kv_cache(
        some_bytes(6), torch.int8, (2, 3), (0, 0)
    ),
    "an axis too few": lambda c: c.view_kv_cache(
        some_bytes(6), torch.int8, (2, 3), (0,)
    ),
    "a negative axis": lambda c: c.view_kv_cache(
        some_bytes(6), torch.int8, (2, 3), (0, -1)
    ),
    "a shape of fewer bytes": lambda c: c.view_kv_cache(
        some_bytes(8), torch.int8, (2, 3), (0, 1)
    ),
    "a shape of more bytes": lambda c: c.view_kv_cache(
        some_bytes(6), torch.float16, (2, 3), (0, 1)
    ),
    "half a page": lambda c: c.reshape_kv_cache(some_bytes(PAGE * 3 // 2), SPEC),
    "a page and a number": lambda c: c.reshape_kv_cache(some_bytes(PAGE + 2), SPEC),
    "bytes that are numbers already": lambda c: c.reshape_kv_cache(
        torch.zeros(PAGE, dtype=torch.float16), SPEC
    ),
    "no order of five axes": lambda c: c.reshape_kv_cache(
        some_bytes(PAGE), SPEC, (0, 1, 2, 3)
    ),
    "no layers": lambda c: c.reshape_layered_kv_cache(
        some_bytes(PAGE), SPEC, 0, KVCacheLayout.NHD
    ),
    "a kernel block that does not divide a block": lambda c: c.reshape_layered_kv_cache(
        some_bytes(PAGE), SPEC, 1, KVCacheLayout.NHD, kernel_block_size=3
    ),
    "padded pages that a layout divides": lambda c: c.reshape_layered_kv_cache(
        some_bytes(PAGE + 8), PADDED, 1, KVCacheLayout.BHLNC
    ),
    "padded pages that kernel blocks divide": lambda c: c.reshape_layered_kv_cache(
        some_bytes(PAGE + 8), PADDED, 1, KVCacheLayout.NHD, kernel_block_size=2
    ),
    "padded pages whose halves are apart": lambda c: c.reshape_kv_cache(
        some_bytes(PAGE + 8), PADDED
    ),
    "cells of another format": lambda c: c.reshape_kv_cache(
        some_bytes(PAGE), replace(SPEC, num_head_slots=1, state_content_bytes=64)
    ),
    "layered cells of another format": lambda c: c.reshape_layered_kv_cache(
        some_bytes(PAGE),
        replace(SPEC, num_head_slots=1, state_content_bytes=64),
        1,
        KVCacheLayout.NHD,
    ),
    "bytes that are not contiguous": lambda c: c.reshape_layered_kv_cache(
        some_bytes(2 * PAGE)[::2], SPEC, 1, KVCacheLayout.NHD
    ),
    "a page for two layers": lambda c: c.reshape_layered_kv_cache(
        some_bytes(PAGE * 3), SPEC, 2, KVCacheLayout.NHD
    ),
    "heads that are not whole parts": lambda c: c.split_packed_kv_cache(
        torch.zeros(2, 1, 48, dtype=torch.float16), 1, 12
    ),
    "heads that do not fill a block": lambda c: c.split_packed_kv_cache(
        torch.zeros(2, 1, 40, dtype=torch.float16), 1, 16
    ),
    "a packed cache of four axes": lambda c: c.split_packed_kv_cache(
        torch.zeros(2, 1, 4, 16, dtype=torch.float16), 1, 16
    ),
    "a packed cache of no heads": lambda c: c.split_packed_kv_cache(
        torch.zeros(2, 1, 32, dtype=torch.float16), 0, 16
    ),
}


@law(
    "get_kv_cache_shape",
    "get_packed_kv_cache_shape",
    "allocate_kv_cache",
    "view_kv_cache",
    "reshape_kv_cache",
    "reshape_layered_kv_cache",
    "split_packed_kv_cache",
    cases=list(REJECTED),
    claim="rejects shapes",
)
def bytes_that_are_not_a_cache_are_rejected(setting: Setting, case: str) -> None:
    expect_rejection(case, lambda: REJECTED[case](setting.candidate))

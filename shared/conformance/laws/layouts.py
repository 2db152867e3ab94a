"""Laws of the memory of caches: allocation, views, and binding to layers.

The offset of each element is computed here, axis by axis, and its value is read from the bytes. A
view must have the same value at the same indices and must not copy.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations, product
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.kinds import FP8_DTYPES
from ...contract.layouts import KV_CACHE_LAYOUT_VARIABLE, KVCacheLayout
from ...contract.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from ..generators.batches import LAYOUTS, empty_cache
from ..harness.canaries import kept, memory_of, packed
from ..harness.expect import Disagreement, expect_refusal, expect_same
from ..harness.law import Setting, law

DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8_DTYPES)


def numbered_bytes(count: int, device: torch.device) -> Tensor:
    """Return bytes that differ from their neighbours and are not NaN in any float dtype."""
    return (torch.arange(count) * 7 % 59).to(torch.int8).to(device)


def expect_view(
    what: str,
    found: Tensor,
    raw: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    place: Callable[..., int],
) -> None:
    """Raise if any element of a view is wrong, or if the view is a copy.

    Args:
        what: The name of the view in messages.
        found: The view.
        raw: [bytes] The memory of the view.
        shape, dtype: The expected shape and dtype.
        place: Function that maps the indices of an element to its offset in `raw`, in elements.
    """
    expect_same(f"shape of {what}", tuple(found.shape), tuple(shape))
    elements = raw.cpu().view(torch.uint8).view(-1, dtype.itemsize)
    places = [place(*index) for index in product(*map(range, shape))]
    right = elements[torch.tensor(places, dtype=torch.int64)].contiguous().view(dtype)
    expect_same(what, packed(found), right.view(shape))
    mine, theirs = memory_of(found).data_ptr(), memory_of(raw).data_ptr()
    if found.numel() and mine != theirs:
        raise Disagreement(
            what, "as a whole", "a copy", "a view of the bytes it is given"
        )


def is_packed_in(order: Sequence[int], shape: Sequence[int]) -> Callable[..., int]:
    """Return a function from indices to the offset in memory, outermost axis first."""

    def place(*index: int) -> int:
        found = 0
        for axis in order:
            found = found * shape[axis] + index[axis]
        return found

    return place


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
    """

    num_blocks: int
    spec: KVCacheSpec
    order: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_layers: int = 1
    layout: KVCacheLayout = KVCacheLayout.NHD

    def __repr__(self) -> str:
        return (
            f"Paged({self.num_blocks}, {self.spec}, {self.order}, {self.num_layers},"
            f" {self.layout})"
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
def a_cache_has_the_axes_that_its_numbers_say(setting: Setting, case: Paged) -> None:
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
def a_fresh_cache_has_a_page_a_block_and_is_zero(
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
def a_layers_cache_is_its_bytes_in_the_order_of_its_axes(
    setting: Setting, case: Paged
) -> None:
    raw = case.raw(setting.device)[: case.num_blocks * case.spec.page_size_bytes]
    for orders in ((), (case.order,)):
        with kept(raw=raw):
            found = setting.candidate.reshape_kv_cache(raw, case.spec, *orders)
        own = is_packed_in(*orders or (tuple(range(5)),), case.shape)
        expect_view("cache", found, raw, case.shape, case.spec.dtype, own)


@law("reshape_layered_kv_cache", cases=pages())
def each_layer_of_one_allocation_is_where_its_layout_says(
    setting: Setting, case: Paged
) -> None:
    """Each letter of the layout's name is an axis; a head's key and value are adjacent."""
    raw, spec = case.raw(setting.device), case.spec
    names = {"HND": "LBHNC", "NHD": "LBNHC"}
    letters = names.get(case.layout.name, case.layout.name)
    sizes = {
        "L": case.num_layers,
        "B": case.num_blocks,
        "H": spec.num_kv_heads,
        "N": spec.block_size,
        "C": 2 * spec.head_size,
    }

    def place(
        layer: int, half: int, block: int, slot: int, head: int, part: int
    ) -> int:
        content = half * spec.head_size + part
        index = {"L": layer, "B": block, "H": head, "N": slot, "C": content}
        found = 0
        for letter in letters:
            found = found * sizes[letter] + index[letter]
        return found

    with kept(raw=raw):
        found = setting.candidate.reshape_layered_kv_cache(
            raw, spec, num_layers=case.num_layers, layout=case.layout
        )
    shape = (case.num_layers, *case.shape)
    expect_view("caches", found, raw, shape, spec.dtype, place)


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
def a_packed_cache_is_cut_into_parts_of_sixteen_bytes(
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

    def key_place(block_id: int, head: int, which: int, slot: int, inside: int) -> int:
        before = block_id * block + head * size * slots
        return before + which * slots * part + slot * part + inside

    def value_place(block_id: int, head: int, element: int, slot: int) -> int:
        half = case.num_blocks * block
        return half + block_id * block + (head * size + element) * slots + slot

    key_shape = (case.num_blocks, heads, case.parts, slots, part)
    value_shape = (case.num_blocks, heads, size, slots)
    expect_view("key view", found[0], raw, key_shape, case.dtype, key_place)
    expect_view("value view", found[1], raw, value_shape, case.dtype, value_place)


def some_bytes(count: int) -> Tensor:
    """Return zeros."""
    return torch.zeros(count, dtype=torch.int8)


SPEC = KVCacheSpec(4, 2, 8, torch.float16)
PAGE = 2 * 4 * 2 * 8 * 2
REFUSED: dict[str, Callable[[Any], Any]] = {
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
    "an axis from behind": lambda c: c.view_kv_cache(
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
    "a page for two layers": lambda c: c.reshape_layered_kv_cache(
        some_bytes(PAGE * 3), SPEC, 2, KVCacheLayout.NHD
    ),
    "heads that are no whole parts": lambda c: c.split_packed_kv_cache(
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
    cases=list(REFUSED),
    claim="refuses shapes",
)
def bytes_that_are_not_a_cache_are_rejected(setting: Setting, case: str) -> None:
    expect_refusal(case, lambda: REFUSED[case](setting.candidate))


class SlotsFirst:
    """The part of a backend that a cache needs: [2, blocks, slots, heads, elements]."""

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the axes as the kernel indexes them."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        """Return the axes, the outermost in memory first."""
        return (0, 1, 3, 2, 4) if layout is KVCacheLayout.HND else (0, 1, 2, 3, 4)


class BlocksFirst(SlotsFirst):
    """A backend that stores a block's keys and values together.

    Its orders are cyclic permutations of the axes, so an order and its inverse differ.
    """

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        """Return the axes, the outermost in memory first."""
        return (1, 3, 0, 2, 4) if layout is KVCacheLayout.HND else (1, 2, 0, 3, 4)


class HeadsThird(SlotsFirst):
    """A backend that indexes [blocks, 2, heads, slots, elements]."""

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the axes as the kernel indexes them."""
        return (num_blocks, 2, num_kv_heads, block_size, head_size)


BACKENDS = {each.__name__: each for each in (SlotsFirst, BlocksFirst, HeadsThird)}


@dataclass
class CachedLayer:
    """The part of a layer that a cache needs."""

    spec: KVCacheSpec | None = None
    kv_sharing_target_layer_name: str | None = None
    kv_cache: Any = None
    asked: list[tuple[int, torch.dtype]] = field(default_factory=list)

    def get_kv_cache_spec(
        self, block_size: int, dtype: torch.dtype
    ) -> KVCacheSpec | None:
        """Return the spec of a block, and record the arguments."""
        self.asked.append((block_size, dtype))
        return self.spec


class NoAttention:
    """A layer without attention and without a cache."""


@dataclass(frozen=True)
class CachedModel:
    """The caches of a model.

    Args:
        tensors: The numbers of the layers that share each tensor, in the order of the groups.
        backends: The backend of each layer, by number.
        num_blocks: The number of blocks that can be allocated to requests.
        spare: The number of further blocks in every tensor.
        sharers: Layers without a cache of their own, each with the number of the layer whose cache
            it shares.
        layout: The name of the requested layout.
        is_from_environment: Whether the layout is read from the environment.
    """

    tensors: tuple[tuple[int, ...], ...]
    backends: tuple[tuple[int, str], ...]
    num_blocks: int
    spare: int
    sharers: tuple[tuple[int, int], ...]
    layout: str
    is_from_environment: bool

    def config(self) -> KVCacheConfig:
        """Return one group per position in a tensor. Page sizes are equal, specs differ."""
        places = range(max(map(len, self.tensors), default=0))
        groups = [
            [name_of(names[n]) for names in self.tensors if n < len(names)]
            for n in places
        ]
        size = (self.num_blocks + self.spare) * PAGE
        return KVCacheConfig(
            self.num_blocks,
            tuple(
                KVCacheTensor(size, tuple(map(name_of, each))) for each in self.tensors
            ),
            tuple(
                KVCacheGroupSpec(tuple(names), GROUP_SPECS[n % len(GROUP_SPECS)])
                for n, names in enumerate(groups)
            ),
        )

    def attn_backends(self) -> dict[str, Any]:
        """Return the backend of each layer."""
        return {name_of(number): BACKENDS[each] for number, each in self.backends}

    def layers(self) -> dict[str, Any]:
        """Return the layers, not sorted by number, and one layer without a cache."""
        numbers = [number for number, _ in self.backends]
        Random(len(numbers)).shuffle(numbers)
        layers: dict[str, Any] = {
            name_of(number): CachedLayer(kv_sharing_target_layer_name=name_of(target))
            for number, target in self.sharers[:1]
        }
        layers |= {name_of(number): CachedLayer() for number in numbers}
        layers["model.mlp"] = NoAttention()
        return layers | {
            name_of(number): CachedLayer(kv_sharing_target_layer_name=name_of(target))
            for number, target in self.sharers[1:]
        }


GROUP_SPECS = (
    SPEC,
    KVCacheSpec(8, 2, 8, torch.float8_e4m3fn),
    SlidingWindowSpec(2, 2, 8, torch.float32, sliding_window=3),
)


def name_of(number: int) -> str:
    """Return a layer's name; sorted as strings, 10 comes before 9."""
    return f"model.layers.{number}.attn"


@st.composite
def models(draw: st.DrawFn) -> CachedModel:
    """Return layers with own or shared tensors, of backends with different layouts."""
    pick = Random(draw(st.integers(0, 2**20)))
    numbers = pick.sample(range(120), 12)
    tensors = tuple(
        tuple(numbers.pop() for _ in range(pick.choice([1, 1, 2, 3])))
        for _ in range(pick.choice([0, 1, 2, 3]))
    )
    own = [number for each in tensors for number in each]
    sharers = tuple(
        (numbers.pop(), pick.choice(own)) for _ in range(pick.choice([0, 1, 2])) if own
    )
    return CachedModel(
        tensors,
        tuple((number, pick.choice(list(BACKENDS))) for number in own),
        num_blocks=pick.choice([0, 1, 2, 3]),
        spare=pick.choice([0, 0, 1]),
        sharers=sharers,
        layout=pick.choice(["NHD", "HND"]),
        is_from_environment=pick.random() < 0.5,
    )


@contextmanager
def layout_of(model: CachedModel) -> Iterator[KVCacheLayout | None]:
    """Yield the layout argument, or None if the layout comes from the environment."""
    before = os.environ.pop(KV_CACHE_LAYOUT_VARIABLE, None)
    other = {"NHD": "HND", "HND": "NHD"}[model.layout]
    passed = None if model.is_from_environment else KVCacheLayout[model.layout]
    # an argument takes precedence over the environment
    os.environ[KV_CACHE_LAYOUT_VARIABLE] = model.layout if passed is None else other
    try:
        yield passed
    finally:
        os.environ.pop(KV_CACHE_LAYOUT_VARIABLE)
        if before is not None:
            os.environ[KV_CACHE_LAYOUT_VARIABLE] = before


def expect_names(what: str, found: dict[str, Any], numbers: Sequence[int]) -> None:
    """Raise if the layers or their order differ."""
    expect_same(f"layers of {what}", list(found), list(map(name_of, numbers)))


def expect_caches(model: CachedModel, caches: dict[str, Tensor], raw: Any) -> None:
    """Raise if a cache is not a view of its tensor in the layout of its backend."""
    layout = KVCacheLayout[model.layout]
    backends = model.attn_backends()
    for group in model.config().kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            shape = backends[name].get_kv_cache_shape(
                model.num_blocks + model.spare,
                spec.block_size,
                spec.num_kv_heads,
                spec.head_size,
            )
            order = backends[name].get_kv_cache_stride_order(layout)
            own = is_packed_in(order, shape)
            expect_view(name, caches[name], raw[name], shape, spec.dtype, own)


@law("allocate_kv_caches", cases=models())
def each_tensor_is_allocated_once_and_is_zero(
    setting: Setting, model: CachedModel
) -> None:
    """Layers of one tensor share all bytes; layers of different tensors share none."""
    raw = setting.candidate.allocate_kv_caches(model.config(), setting.device)
    expect_names("the bytes", raw, [n for numbers in model.tensors for n in numbers])
    size = (model.num_blocks + model.spare) * PAGE
    for tensor in raw.values():
        expect_same("bytes", tensor.cpu(), torch.zeros(size, dtype=torch.int8))
        expect_same("device", tensor.device.type, setting.device.type)
    for number, sharing in enumerate(model.tensors):
        raw[name_of(sharing[0])].fill_(number + 1)
    for number, sharing in enumerate(model.tensors):
        for layer in sharing:
            right = torch.full((size,), number + 1, dtype=torch.int8)
            expect_same("bytes that were written", raw[name_of(layer)].cpu(), right)


@law("reshape_kv_caches", cases=models())
def each_layer_gets_its_bytes_in_the_layout_of_its_backend(
    setting: Setting, model: CachedModel
) -> None:
    """An argument overrides the environment, which is read at every call."""
    size = (model.num_blocks + model.spare) * PAGE
    raw: dict[str, Tensor] = {}
    for number, sharing in enumerate(model.tensors):
        tensor = numbered_bytes(size + 64 * number, setting.device)[64 * number :]
        raw |= {name_of(layer): tensor for layer in sharing}
    config, backends = model.config(), model.attn_backends()
    with layout_of(model) as layout:
        caches = setting.candidate.reshape_kv_caches(config, raw, backends, layout)
    named = [name for group in config.kv_cache_groups for name in group.layer_names]
    expect_same("layers of the caches", list(caches), named)
    expect_caches(model, caches, raw)


@law("bind_kv_cache", cases=models())
def each_layer_is_handed_its_own_cache_or_the_one_it_shares(
    setting: Setting, model: CachedModel
) -> None:
    """Results are sorted by the number in the name; other layers do not get a cache."""
    numbers = [number for number, _ in model.backends]
    caches = {name_of(number): torch.full((1,), float(number)) for number in numbers}
    layers, before = model.layers(), dict(caches)
    found = setting.candidate.bind_kv_cache(caches, layers)
    expect_names("the caches", found, sorted(numbers))
    expect_same("kv_caches, which is only read", list(caches), list(before))
    targets = dict(model.sharers)
    for name, layer in layers.items():
        if isinstance(layer, NoAttention):
            expect_same("cache of no attention", hasattr(layer, "kv_cache"), False)
            continue
        number = int(name.split(".")[2])
        right = before[name_of(targets.get(number, number))]
        if layer.kv_cache is not right:
            raise Disagreement(name, "its cache", layer.kv_cache, right)
    for name, cache in found.items():
        if cache is not before[name]:
            raise Disagreement(name, "what is returned", cache, before[name])


@law("init_kv_cache", cases=models())
def a_model_gets_caches_that_are_zero_in_the_order_of_its_layers(
    setting: Setting, model: CachedModel
) -> None:
    """Layers that share bytes each have a view of them, in their own layout."""
    layers, config = model.layers(), model.config()
    backends = model.attn_backends()
    with layout_of(model) as layout:
        caches = setting.candidate.init_kv_cache(
            layers, config, backends, setting.device, layout
        )
    expect_names("the caches", caches, sorted(number for number, _ in model.backends))
    raw: dict[str, Tensor] = {}
    for number, sharing in enumerate(model.tensors):
        memory = memory_of(caches[name_of(sharing[0])])
        size = (model.num_blocks + model.spare) * PAGE
        zeros = torch.zeros(size, dtype=torch.uint8)
        expect_same("memory of a tensor", memory.cpu(), zeros)
        memory.copy_(numbered_bytes(size, setting.device) + number)
        raw |= {name_of(layer): memory.view(torch.int8) for layer in sharing}
    expect_caches(model, caches, raw)
    targets = dict(model.sharers)
    for name, layer in layers.items():
        if isinstance(layer, CachedLayer):
            number = int(name.split(".")[2])
            if layer.kv_cache is not caches[name_of(targets.get(number, number))]:
                raise Disagreement(
                    name, "its cache", layer.kv_cache, "the one returned"
                )


@law("get_kv_cache_spec", cases=DTYPES)
def only_layers_with_a_cache_have_a_spec(setting: Setting, dtype: torch.dtype) -> None:
    """Specs have the order of the layers; each layer's method is called once."""
    layers: dict[str, Any] = {
        "model.layers.9": CachedLayer(GROUP_SPECS[0]),
        "model.mlp": NoAttention(),
        "model.layers.2": CachedLayer(GROUP_SPECS[1]),
        "model.encoder.3": CachedLayer(None),
        "model.layers.10": CachedLayer(SPECS[-1]),
        "model.layers.11": CachedLayer(
            None, kv_sharing_target_layer_name="model.layers.9"
        ),
    }
    before = list(layers)
    found = setting.candidate.get_kv_cache_spec(layers, 24, dtype)
    keeping = ["model.layers.9", "model.layers.2", "model.layers.10"]
    expect_same("layers of the specs", list(found), keeping)
    for name, spec in found.items():
        if spec is not layers[name].spec:
            raise Disagreement(name, "its spec", spec, layers[name].spec)
    expect_same("layers, which are only read", list(layers), before)
    for name, layer in layers.items():
        if isinstance(layer, CachedLayer):
            expect_same(f"what {name} was asked", layer.asked, [(24, dtype)])
    expect_same(
        "specs of no layers", setting.candidate.get_kv_cache_spec({}, 4, dtype), {}
    )


ONE = CachedModel(
    ((3,),), ((3, "SlotsFirst"),), 2, 0, (), "NHD", is_from_environment=False
)
NAME = name_of(3)
REFUSED_MODELS: dict[str, dict[str, Any]] = {
    "a layer without bytes": {"raw": {}},
    "a layer without a backend": {"backends": {}},
    "fewer pages than blocks": {"raw": {NAME: some_bytes(PAGE)}},
    "bytes that are no whole pages": {"raw": {NAME: some_bytes(2 * PAGE + 2)}},
    "a cache without its layer": {"layers": {}},
    "a second cache without its layer": {
        "caches": {NAME: torch.zeros(1), name_of(4): torch.zeros(1)},
        "layers": {NAME: CachedLayer()},
    },
    "a layer of a cache that is not there": {
        "layers": {NAME: CachedLayer(), "l.4": CachedLayer(None, "model.layers.5.attn")}
    },
    "a name without a number": {
        "caches": {NAME: torch.zeros(1), "attn": torch.zeros(1)},
        "layers": {NAME: CachedLayer(), "attn": CachedLayer()},
    },
    "a name of two numbers": {
        "caches": {NAME: torch.zeros(1), "layers.1.experts.2": torch.zeros(1)},
        "layers": {NAME: CachedLayer(), "layers.1.experts.2": CachedLayer()},
    },
}


@law(
    "reshape_kv_caches",
    "bind_kv_cache",
    cases=list(REFUSED_MODELS),
    claim="refuses shapes",
)
def an_incomplete_model_is_rejected_and_no_layer_changed(
    setting: Setting, case: str
) -> None:
    """All arguments are validated before the first layer gets its cache."""
    given = REFUSED_MODELS[case]
    if "layers" in given:
        layers = given["layers"]
        caches = given.get("caches", {NAME: torch.zeros(1)})
        expect_refusal(case, lambda: setting.candidate.bind_kv_cache(caches, layers))
        for name, layer in layers.items():
            expect_same(f"cache of {name}", layer.kv_cache, None)
            layer.kv_cache = None
        return
    raw = given.get("raw", {NAME: some_bytes(2 * PAGE)})
    backends = given.get("backends", ONE.attn_backends())
    expect_refusal(
        case,
        lambda: setting.candidate.reshape_kv_caches(
            ONE.config(), raw, backends, KVCacheLayout.NHD
        ),
    )

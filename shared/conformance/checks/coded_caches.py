"""Caches of codes: their memory, and calls of attention over them.

Codes and scales are in tensors of their own with any strides, or in pages that hold all of them.
Slots that are not allocated have scales of NaN.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import (
    FORMATS,
    CacheFormat,
    head_size_of,
    split_page,
)
from ...contract.nvfp4_pages import split_nvfp4_page
from ..base.support import OutsideSupport
from ..cases.batches import LAYOUTS, NAN, empty_cache
from ..cases.caches import CacheSizes
from ..cases.options import Call
from ..oracles.cache_formats import RULES, encode_by_hand
from .canaries import copy_of, expect_memory

CODED = tuple(form for name, form in FORMATS.items() if name in RULES)
"""Formats that have a rule of their own."""
PAGES = ("pages by slot", "pages by head")
"""Orders of pages that hold codes and scales."""
APART, PACKED = "apart", "packed"
"""Codes and scales in tensors of their own, with any strides, or in contiguous ones."""
SLOT_SCALES = ("packed", "heads first", "every other")


def format_of(seed: int, *head_sizes: int) -> CacheFormat:
    """Return the format of a case, one that has these head sizes."""
    fitting = [form for form in CODED if fits(form, *head_sizes)]
    return fitting[seed % len(fitting)]


def fits(form: CacheFormat, *head_sizes: int) -> bool:
    """Return whether a format has these head sizes."""
    return not any(size % form.head_size_step for size in head_sizes)


def try_formats(
    forms: Iterable[CacheFormat], try_one: Callable[[CacheFormat], None]
) -> None:
    """Try the formats that a candidate supports, one after the other.

    Args:
        try_one: Raises OutsideSupport for a format that the candidate does not support.

    Raises:
        OutsideSupport: It supports none of them.
    """
    outside, tried = None, False
    for form in forms:
        try:
            try_one(form)
            tried = True
        except OutsideSupport as why:
            outside = why
    if outside is not None and not tried:
        raise outside


@dataclass(frozen=True)
class CodedCache:
    """Keys, values and their scales.

    Args:
        key, value: [num_blocks, block_size, kv_heads, elements].
        k_scale, v_scale: Scales that are measured, [num_blocks, block_size, kv_heads] or
            [num_blocks, block_size, kv_heads, blocks], or given.
        global_scales: What block scales of keys and of values are multiplied by. If empty, there
            are none.
        page: Optional. The bytes that hold all four. If None, each has memory of its own.
        is_by_head: Whether a page is stored head by head.
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor
    v_scale: Tensor
    global_scales: tuple[float, ...] = ()
    page: Tensor | None = None
    is_by_head: bool = False

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and their scales."""
        return self.key, self.value, self.k_scale, self.v_scale

    @property
    def options(self) -> dict[str, float]:
        """The arguments with the global scales."""
        names = ("k_global_scale", "v_global_scale")
        return dict(zip(names, self.global_scales, strict=False))

    def given(self, form: CacheFormat, number: int) -> Tensor | float | None:
        """Return the scale of the keys (0) or values (1) that is not measured; None without one."""
        if self.global_scales:
            return self.global_scales[number]
        return None if form.is_measured else self.parts[2 + number]

    def copied(self, form: CacheFormat) -> "CodedCache":
        """Return the same views of copied memory, on the host."""
        if self.page is None:
            key, value, k_scale, v_scale = map(copy_of, self.parts)
            return CodedCache(key, value, k_scale, v_scale, self.global_scales)
        sizes = self.key.shape[1:3], head_size_of(self.key), head_size_of(self.value)
        page = self.page.cpu().clone()
        return in_page(page, *sizes, form, self.is_by_head, self.global_scales)

    def expect_same(self, right: "CodedCache") -> None:
        """Raise if a byte of the memory differs from the expected one."""
        if self.page is not None and right.page is not None:
            expect_memory("page", self.page, right.page)
            return
        names = ("key cache", "value cache", "k_scale", "v_scale")
        for name, found, wanted in zip(names, self.parts, right.parts, strict=True):
            expect_memory(name, found, wanted)


def in_page(
    page: Tensor,
    slots_and_heads: Sequence[int],
    head_size: int,
    value_head_size: int,
    form: CacheFormat,
    by_head: bool,
    global_scales: tuple[float, ...] = (),
) -> CodedCache:
    """Return the views of a page."""
    if form.channels_per_scale:
        block_size, kv_heads = slots_and_heads
        parts = split_nvfp4_page(
            page, block_size, kv_heads, head_size, value_head_size, by_head
        )
    else:
        slots = page.transpose(1, 2) if by_head else page
        parts = split_page(slots, head_size, value_head_size, form)
    return CodedCache(*parts, global_scales, page=page, is_by_head=by_head)


def empty_page(
    form: CacheFormat,
    slots: tuple[int, int, int],
    sizes: tuple[int, int],
    by_head: bool,
) -> Tensor:
    """Return pages of some blocks, slots and heads full of -86 as a byte."""
    blocks, block_size, heads = slots
    size = form.page_bytes(block_size, heads, *sizes, torch.uint8)
    if form.channels_per_scale:
        # blocks with padding at their end
        return torch.full((blocks, size + 5), 170, dtype=torch.uint8)
    order = (heads, block_size) if by_head else (block_size, heads)
    shape = (blocks, *order, size // (block_size * heads))
    return torch.full(shape, 170, dtype=torch.uint8)


def make_coded(
    form: CacheFormat,
    sizes: CacheSizes,
    device: torch.device,
    seed: int,
    order: str | None = None,
) -> CodedCache:
    """Return a cache full of -86 as code, and of NaN as measured scale.

    Args:
        sizes: Those of `fit_sizes`, whose dtype is not used. Layouts are those of keys and values,
            unless pages are drawn.
        seed: Draws the strides of scales, and scales that are given.
        order: Optional. One of PAGES, APART or PACKED. If None, it is drawn.
    """
    pick = Random(f"coded {seed}")
    slots = sizes.num_blocks, sizes.block_size, sizes.kv_heads
    both = sizes.head_size, sizes.value_head_size
    stored = [form.elements(size) for size in both]
    assert form.dtype is not None
    global_scales: tuple[float, ...] = ()
    if form.channels_per_scale:
        pair = pick.choices([0.011, 0.25, 1.0, 3.7], k=2)
        global_scales = (pair[0], pair[1])
    if form.is_measured and not any(elements % 4 for elements in stored):
        order = order or pick.choice((*PAGES, APART))
        if order in PAGES:
            by_head = order == PAGES[1]
            page = empty_page(form, slots, both, by_head).to(device)
            cache = in_page(page, slots[1:], *both, form, by_head, global_scales)
            for scale in cache.parts[2:]:
                scale.fill_(NAN)
            return cache
    unused = 170 if form.dtype == torch.uint8 else -86
    key, value = (
        empty_cache(layout, *slots, size, form.dtype, device, content=unused)[half]
        for half, (layout, size) in enumerate(
            zip((sizes.layout, sizes.value_layout), stored, strict=True)
        )
    )
    if form.is_measured:
        is_packed = order == PACKED
        made = [
            slot_scales(form, slots, size, pick, device, is_packed) for size in both
        ]
    else:
        numbers = [pick.choices([0.011, 0.25, 0.3, 1.7], k=slots[2]) for _ in range(2)]
        made = [torch.tensor(number).to(device) for number in numbers]
    return CodedCache(key, value, made[0], made[1], global_scales)


def fit_sizes(form: CacheFormat, sizes: CacheSizes) -> CacheSizes:
    """Return sizes of which the codes of a key or value fill their bytes and their blocks."""
    step = form.head_size_step
    heads = [
        -(-size // step) * step for size in (sizes.head_size, sizes.value_head_size)
    ]
    return replace(sizes, head_size=heads[0], value_head_size=heads[1])


def slot_scales(
    form: CacheFormat,
    slots: tuple[int, int, int],
    head_size: int,
    pick: Random,
    device: torch.device,
    is_packed: bool,
) -> Tensor:
    """Return scales of NaN with drawn strides, one per slot and head or per block of channels."""
    step = form.channels_per_scale
    blocks = head_size // step if step else 1
    kind = "packed" if is_packed else pick.choice(SLOT_SCALES)
    order = (slots[0], slots[2], slots[1]) if kind == "heads first" else slots
    wide = 2 if kind == "every other" else 1
    scales = torch.full((*order, blocks * wide), NAN, device=device)
    scales = scales.to(form.scale_dtype)
    scales = scales[..., ::wide]
    if kind == "heads first":
        scales = scales.transpose(1, 2)
    return scales if step else scales[..., 0]


def put(stored: Tensor, places: Any, new: Tensor) -> None:
    """Set elements of memory on any device, in the dtype that it has.

    Args:
        places: An index of `stored`, on its device.
    """
    if stored.element_size() == 1:
        # torch does not index every dtype of one byte
        stored, new = stored.view(torch.uint8), new.view(torch.uint8)
    stored[places] = new.to(stored.device)


def coded_call(
    call: Call, form: CacheFormat, seed: int, order: str | None = None
) -> Call:
    """Return a paged call whose cache holds its numbers in a format.

    Slots without numbers, where the given cache is NaN, have codes of -86 and a scale of NaN.
    """
    plain = [call.arguments[name].cpu() for name in ("key_cache", "value_cache")]
    blocks, block_size, heads, head_size = plain[0].shape
    pick = Random(f"layout {seed}")
    layouts = LAYOUTS[:1] if order == PACKED else LAYOUTS
    sizes = CacheSizes(
        blocks, block_size, heads, head_size, plain[1].shape[3], torch.int8,
        pick.choice(layouts), pick.choice(layouts),
    )  # fmt: skip
    cache = make_coded(form, sizes, call.query.device, seed, order)
    halves = zip(plain, cache.parts[:2], cache.parts[2:], strict=True)
    for number, (numbers, codes, scale) in enumerate(halves):
        used = ~numbers.isnan().flatten(2).any(2)  # [num_blocks, block_size]
        place = used.to(codes.device)
        given = cache.given(form, number)
        made, measured = encode_by_hand(form, numbers[used], given)
        put(codes, place, made)
        if measured is not None:
            put(scale, place, measured)
    arguments: dict[str, Any] = {
        "key_cache": cache.key,
        "value_cache": cache.value,
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
    } | cache.options
    return replace(call, arguments=call.arguments | arguments)

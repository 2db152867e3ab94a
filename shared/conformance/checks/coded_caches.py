"""Caches of codes: their memory, and calls of attention over them.

Codes and scales are in tensors of their own with any strides, or in pages that hold all of them.
Slots that are not allocated have scales of NaN.
"""

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
from ..cases.batches import LAYOUTS, NAN, empty_cache
from ..cases.caches import CacheSizes
from ..cases.options import Call
from ..oracles.cache_formats import RULES, encode_by_hand
from .canaries import copy_of, expect_memory

CODED = tuple(form for name, form in FORMATS.items() if name in RULES)
"""Formats that have a rule of their own."""
PAGES = ("pages by slot", "pages by head")
"""Orders of pages that hold codes and scales."""
APART = "apart"
"""Codes and scales in tensors of their own."""
SLOT_SCALES = ("packed", "heads first", "every other")


def format_of(seed: int, *head_sizes: int) -> CacheFormat:
    """Return the format of a case, one that has these head sizes."""
    fitting = [
        form
        for form in CODED
        if not any(size % form.codes_per_element for size in head_sizes)
    ]
    return fitting[seed % len(fitting)]


@dataclass(frozen=True)
class CodedCache:
    """Keys, values and their scales.

    Args:
        key, value: [num_blocks, block_size, kv_heads, elements].
        k_scale, v_scale: Scales that are measured, [num_blocks, block_size, kv_heads], or given.
        page: Optional. The bytes that hold all four. If None, each has memory of its own.
        is_by_head: Whether a page is stored head by head.
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor
    v_scale: Tensor
    page: Tensor | None = None
    is_by_head: bool = False

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and their scales."""
        return self.key, self.value, self.k_scale, self.v_scale

    def copied(self, form: CacheFormat) -> "CodedCache":
        """Return the same views of copied memory, on the host."""
        if self.page is None:
            key, value, k_scale, v_scale = map(copy_of, self.parts)
            return CodedCache(key, value, k_scale, v_scale)
        sizes = head_size_of(self.key), head_size_of(self.value)
        return in_page(self.page.cpu().clone(), *sizes, form, self.is_by_head)

    def expect_same(self, right: "CodedCache") -> None:
        """Raise if a byte of the memory differs from the expected one."""
        if self.page is not None and right.page is not None:
            expect_memory("page", self.page, right.page)
            return
        names = ("key cache", "value cache", "k_scale", "v_scale")
        for name, found, wanted in zip(names, self.parts, right.parts, strict=True):
            expect_memory(name, found, wanted)


def in_page(
    page: Tensor, head_size: int, value_head_size: int, form: CacheFormat, by_head: bool
) -> CodedCache:
    """Return the views of a page."""
    slots = page.transpose(1, 2) if by_head else page
    parts = split_page(slots, head_size, value_head_size, form)
    return CodedCache(*parts, page=page, is_by_head=by_head)


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
        order: Optional. One of PAGES, or APART. If None, it is drawn.
    """
    pick = Random(f"coded {seed}")
    slots = sizes.num_blocks, sizes.block_size, sizes.kv_heads
    both = sizes.head_size, sizes.value_head_size
    stored = [form.elements(size) for size in both]
    assert form.dtype is not None
    if form.is_measured and not any(elements % 4 for elements in stored):
        order = order or pick.choice((*PAGES, APART))
        if order != APART:
            by_head = order == PAGES[1]
            shape = (slots[0], slots[2], slots[1]) if by_head else slots
            page = torch.full((*shape, sum(stored) + 8), 170, dtype=torch.uint8)
            cache = in_page(page.to(device), *both, form, by_head)
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
        made = [slot_scales(slots, pick, device) for _ in range(2)]
    else:
        numbers = [pick.choices([0.011, 0.25, 0.3, 1.7], k=slots[2]) for _ in range(2)]
        made = [torch.tensor(number).to(device) for number in numbers]
    return CodedCache(key, value, made[0], made[1])


def fit_sizes(form: CacheFormat, sizes: CacheSizes) -> CacheSizes:
    """Return sizes of which the codes of a key or value fill their bytes."""
    step = form.codes_per_element
    heads = [
        -(-size // step) * step for size in (sizes.head_size, sizes.value_head_size)
    ]
    return replace(sizes, head_size=heads[0], value_head_size=heads[1])


def slot_scales(
    slots: tuple[int, int, int], pick: Random, device: torch.device
) -> Tensor:
    """Return scales of NaN with drawn strides, one per slot and head."""
    kind = pick.choice(SLOT_SCALES)
    if kind == "heads first":
        shape = (slots[0], slots[2], slots[1])
        return torch.full(shape, NAN, device=device).transpose(1, 2)
    wide = 2 if kind == "every other" else 1
    return torch.full((*slots, wide), NAN, device=device)[..., 0]


def coded_call(
    call: Call, form: CacheFormat, seed: int, order: str | None = None
) -> Call:
    """Return a paged call whose cache holds its numbers in a format.

    Slots without numbers, where the given cache is NaN, have codes of -86 and a scale of NaN.
    """
    plain = [call.arguments[name].cpu() for name in ("key_cache", "value_cache")]
    blocks, block_size, heads, head_size = plain[0].shape
    pick = Random(f"layout {seed}")
    sizes = CacheSizes(
        blocks, block_size, heads, head_size, plain[1].shape[3], torch.int8,
        pick.choice(LAYOUTS), pick.choice(LAYOUTS),
    )  # fmt: skip
    cache = make_coded(form, sizes, call.query.device, seed, order)
    halves = zip(plain, cache.parts[:2], cache.parts[2:], strict=True)
    for numbers, codes, scale in halves:
        used = ~numbers.isnan().flatten(2).any(2)  # [num_blocks, block_size]
        place = used.to(codes.device)
        given = None if form.is_measured else scale
        made, measured = encode_by_hand(form, numbers[used], given)
        codes[place] = made.to(codes.device)
        if measured is not None:
            scale[place] = measured.to(codes.device)
    arguments: dict[str, Any] = {
        "key_cache": cache.key,
        "value_cache": cache.value,
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
    }
    return replace(call, arguments=call.arguments | arguments)

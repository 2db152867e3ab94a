"""Memory that tensors share, compared with the addresses of all of their bytes."""

from itertools import combinations
from math import prod
from random import Random

import pytest
import torch
from pagetwin.contract.cache_formats import FORMATS, split_page
from pagetwin.contract.nvfp4_pages import split_nvfp4_page
from pagetwin.reference import (
    eagle_step_update_slot_mapping_and_metadata,
    fill_mm_prefix_query_ranges,
    fill_rswa_query_ranges,
)
from pagetwin.validation.memory import overlaps_itself, share_memory
from torch import Tensor

DTYPES = torch.uint8, torch.int16, torch.float32
STRIDES = 0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32


def draw_view(pick: Random, memory: Tensor) -> Tensor:
    """Return a view of up to four axes, with strides that may overlap."""
    typed = memory.view(pick.choice(DTYPES))
    while True:
        shape = [pick.randint(1, 4) for _ in range(pick.randint(1, 4))]
        strides = [pick.choice(STRIDES) for _ in shape]
        start = pick.randint(0, 24)
        steps = zip(shape, strides, strict=True)
        if start + sum((size - 1) * step for size, step in steps) < typed.numel():
            return typed.as_strided(shape, strides, start)


def bytes_of(view: Tensor) -> list[int]:
    """Return the address of each byte of each element."""
    places = torch.arange(view.storage_offset() + prod(view.shape) * 40)
    found = places.as_strided(view.shape, view.stride(), view.storage_offset())
    width = view.itemsize
    return [
        place * width + byte
        for place in found.flatten().tolist()
        for byte in range(width)
    ]


def test_views_share_memory_if_they_have_a_byte_in_common() -> None:
    pick, memory = Random(0), torch.zeros(400, dtype=torch.uint8)
    found = []
    for _ in range(1500):
        one, other = draw_view(pick, memory), draw_view(pick, memory)
        own, others = bytes_of(one), bytes_of(other)
        found.append(bool(set(own) & set(others)))
        assert share_memory(one, other) == found[-1], (one.stride(), other.stride())
        assert overlaps_itself(one) == (len(set(own)) < len(own)), one.stride()
    assert 100 < sum(found) < 1400


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("alternates", [False, True])
def test_parts_of_a_page_share_nothing(by_head: bool, alternates: bool) -> None:
    page = torch.zeros(5, 16 * 4 * 2 * 36 + 64, dtype=torch.uint8)
    parts = split_nvfp4_page(page, 16, 4, 64, by_head=by_head, alternates=alternates)
    rows = torch.zeros(5, 4, 16, 2 * 68, dtype=torch.uint8)
    rows = rows.transpose(1, 2) if by_head else rows
    for views in (parts, split_page(rows, 64, 64, FORMATS["int8_per_token_head"])):
        for one, other in combinations(views, 2):
            assert not share_memory(one, other)
            assert not overlaps_itself(one)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_ranges_in_one_row_are_rejected() -> None:
    rows = torch.zeros(1, 2, dtype=torch.int32).expand(4, 2)
    with pytest.raises(
        ValueError, match=r"out has shape .* expected memory of its own"
    ):
        fill_rswa_query_ranges(rows, ints(2), ints(0, 4), ints(4))
    with pytest.raises(
        ValueError, match=r"out has shape .* expected memory of its own"
    ):
        fill_mm_prefix_query_ranges(rows, {0: [(0, 1)]}, ints(0, 4), ints(4), 2)
    slots = torch.zeros(1, dtype=torch.int64).expand(2)
    lens, table = ints(4, 4), torch.zeros(2, 4, dtype=torch.int32)
    positions = torch.tensor([3, 3])
    with pytest.raises(ValueError, match=r"out_slot_mapping has shape .* of its own"):
        eagle_step_update_slot_mapping_and_metadata(
            positions, table, lens, 4, 12, positions, slots
        )
    assert not rows.any() and not slots.any() and positions.tolist() == [3, 3]

"""Cache writes: the tokens and the elements of a program."""

import pytest
import torch
from pagetwin.contract.cache_formats import FORMATS, split_page
from pagetwin.optimized.kernels.kv_cache import choose_tile, choose_tokens
from pagetwin.optimized.kernels.measured_write import align_rows, choose_rows

# elements of a token, and microseconds by tokens per program (tests/gpu/sweep.py, 2026-11-24, on an
# H200; in the order of their tokens: 1 to 29,462)
SWEPT: list[tuple[int, dict[int, float]]] = [
    (512, {1: 4.93, 2: 4.90, 4: 5.09, 8: 5.54}),
    (512, {1: 5.09, 2: 5.09, 4: 5.31, 8: 5.57}),
    (1024, {1: 5.31, 2: 5.31, 4: 5.79, 8: 6.34}),
    (512, {1: 5.44, 2: 5.47, 4: 5.28, 8: 5.76}),
    (1024, {1: 5.22, 2: 5.44, 4: 5.63, 8: 6.34}),
    (1024, {1: 5.25, 2: 5.28, 4: 5.89, 8: 6.21}),
    (256, {1: 5.25, 2: 5.28, 4: 5.25, 8: 5.09}),
    (512, {1: 5.38, 2: 5.31, 4: 5.50, 8: 5.76}),
    (512, {1: 5.34, 2: 5.44, 4: 5.66, 8: 5.86}),
    (1024, {1: 5.73, 2: 5.50, 4: 5.98, 8: 6.27}),
    (512, {1: 5.57, 2: 5.66, 4: 5.82, 8: 6.08}),
    (512, {1: 5.73, 2: 5.57, 4: 5.60, 8: 5.95}),
    (1024, {1: 6.05, 2: 6.05, 4: 6.53, 8: 6.69}),
    (1024, {1: 6.85, 2: 6.82, 4: 7.10, 8: 8.00}),
    (2048, {1: 19.10, 2: 19.07, 4: 19.46, 8: 19.81}),
    (2048, {1: 23.49, 2: 22.98, 4: 23.78, 8: 26.56}),
    (2048, {1: 37.25, 2: 38.43, 4: 38.24, 8: 38.37}),
    (2048, {1: 57.57, 2: 59.04, 4: 58.98, 8: 59.14}),
    (1024, {1: 41.63, 2: 41.34, 4: 42.53, 8: 42.43}),
    (512, {1: 36.67, 2: 30.98, 4: 28.70, 8: 29.86}),
]


@pytest.mark.parametrize(("elements", "times"), SWEPT)
def test_the_chosen_tile_takes_at_most_6_percent_more_than_any_other(
    elements: int, times: dict[int, float]
) -> None:
    tokens = choose_tokens(choose_tile(elements))
    assert times[tokens] <= 1.06 * min(times.values())


def test_a_program_writes_as_many_elements_of_every_cache() -> None:
    tiles = {256: 8, 512: 4, 640: 2, 1024: 2, 2048: 2, 4096: 2}
    assert {size: choose_tokens(choose_tile(size)) for size in tiles} == tiles
    # no more tokens than were measured
    assert [choose_tokens(choose_tile(size)) for size in (1, 16, 128)] == [
        8,
        8,
        8,
    ]


def test_a_program_with_measured_scales_has_all_heads_of_a_token_if_they_fit() -> None:
    tiles = {8: (2, 8), 2: (8, 2), 40: (1, 16), 5: (2, 8), 1: (16, 1)}
    assert {heads: choose_rows(16, heads) for heads in tiles} == tiles
    # rows of more elements than a program writes
    assert choose_rows(0, 3) == (1, 1)


@pytest.mark.parametrize(
    ("name", "alignments"),
    [("int8_per_token_head", (8, 4)), ("int4_per_token_head", (8, 4))],
)
def test_rows_of_pages_are_stored_in_words(
    name: str, alignments: tuple[int, int]
) -> None:
    """A scale of four bytes is after each row: single bytes were stored before."""
    form = FORMATS[name]
    size = 2 * form.elements(128) + 8
    page = torch.zeros(3, 16, 2, size, dtype=torch.uint8)
    page = page.flatten()[-page.data_ptr() % 16 :][: 2 * page[0].numel()]
    key, value, *_ = split_page(page.view(2, 16, 2, size), 128, 128, form)
    assert (align_rows(key), align_rows(value)) == alignments


def test_an_axis_of_one_has_no_stride_that_counts() -> None:
    codes = torch.zeros(16, dtype=torch.int32).view(torch.uint8)
    assert codes.data_ptr() % 16 == 0
    assert align_rows(codes.as_strided((1, 2, 1, 16), (1, 16, 1, 1))) == 16
    assert align_rows(codes.as_strided((2, 2, 1, 16), (1, 16, 1, 1))) == 1

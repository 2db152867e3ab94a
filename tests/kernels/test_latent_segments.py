"""Segments of Hopper's latent decodes: the chosen number against measured ones."""

import pytest
from pagetwin.optimized.kernels.sm90.latent.segments import LENGTHS, choose_segments

MEASURED: dict[tuple[int, int, int, int], tuple[float, ...]] = {
    # requests, heads, keys, tokens: us with segments of 2, 4 and 8 KV tiles
    (1, 64, 8192, 1): (25.2, 23.8, 27.5), (1, 16, 8192, 1): (22.9, 21.6, 25.7),
    (1, 128, 8192, 1): (30.8, 25.2, 28.6), (1, 8, 4096, 1): (19.0, 19.5, 25.3),
    (1, 64, 2048, 1): (18.6, 21.4, 27.5), (1, 64, 32768, 1): (49.1, 46.2, 36.5),
    (2, 64, 4096, 1): (22.8, 22.8, 28.2), (4, 64, 4096, 1): (29.0, 24.9, 29.5),
    (4, 128, 2048, 1): (25.1, 23.4, 28.0), (16, 8, 4096, 4): (39.9, 40.5, 40.4),
    (8, 16, 8192, 1): (40.0, 40.5, 39.7), (64, 16, 4096, 1): (92.8, 93.4, 92.1),
    (1, 128, 131072, 1): (83.7, 84.0, 83.3), (16, 64, 4096, 2): (50.7, 50.8, 51.1),
}  # fmt: skip
"""An H200, bfloat16, 2026-11-30."""


def choose(reqs: int, heads: int, keys: int, tokens: int) -> int:
    rows = heads * tokens
    return choose_segments(reqs, -(-rows // 64), -(-keys // 64), min(rows, 64), 132)


@pytest.mark.parametrize("batch", MEASURED)
def test_the_chosen_segments_take_at_most_7_percent_more_than_the_best(
    batch: tuple[int, int, int, int],
) -> None:
    reqs, heads, keys, tokens = batch
    total = reqs * -(-heads * tokens // 64) * -(-keys // 64)
    numbers = [min(total // length, 132) for length in LENGTHS]
    times = dict(zip(reversed(numbers), reversed(MEASURED[batch]), strict=True))
    assert times[choose(*batch)] <= 1.07 * min(times.values())


def test_a_batch_without_keys_has_one_segment() -> None:
    assert choose(1, 64, 0, 1) == choose(1, 64, 64, 1) == 1


@pytest.mark.parametrize("reqs", [1, 3, 132, 4000])
def test_there_are_at_most_as_many_segments_as_multiprocessors(reqs: int) -> None:
    assert 1 <= choose(reqs, 128, 131072, 4) <= 132

"""Tests of few decodes, whose programs per request are fixed before the launch."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.dispatch import dispatch
from pagetwin.optimized.kernels.portable.host.decode_sizes import (
    count_time,
    split_short_decodes,
)
from pagetwin.optimized.kernels.portable.host.plans import (
    DecodeGrid,
    PortableDecodePlan,
)
from support.planted_keys import plant
from support.thresholds import OF_A_CHIP, set_thresholds
from support.twins import TWINS

# keys of a KV tile, multiprocessors, programs at once
CHIP = (64, 132, 132)
TWO_PER_SM = (128, 132, 264)
# numbers of a partial result: 4 rows of 128
SMALL = 512


def test_few_decodes_have_no_more_programs_than_the_chip_has_multiprocessors() -> None:
    for pairs, num_tiles in product(range(1, 140), range(180)):
        # one request has the most tiles per program
        splits = split_short_decodes(1, pairs, num_tiles, *CHIP, OF_A_CHIP, SMALL)
        tiles = max(1, num_tiles)
        assert splits * pairs <= 132 and splits <= tiles
        if pairs <= 66:
            # with more tiles per multiprocessor than that, stream-K
            assert (splits > 0) is (-(-tiles // (132 // pairs)) <= 40)
        if splits:
            # no split is empty, and no number of splits takes less time
            assert -(-tiles // splits) * (splits - 1) < tiles
            times = [
                count_time(tiles, count, SMALL)
                for count in range(1, min(tiles, 132 // pairs) + 1)
            ]
            assert count_time(tiles, splits, SMALL) <= min(times) + 1e-9


def test_decodes_over_more_keys_than_were_measured_stay_in_the_stream_k_partition() -> (
    None
):
    most = {
        # two programs per pair: by how many tiles one of so many requests may exceed the mean
        (1, 66): 2 * 40,
        (2, 33): 2 * 40,
        (3, 22): 2 * 30,
        (66, 1): 2 * 20,
        # one, and less than one
        (67, 1): 512 // 64,
        (33, 4): 512 // 64,
        (133, 1): -1,
    }
    for (reqs, heads), num_tiles in most.items():
        more = split_short_decodes(reqs, heads, num_tiles + 1, *CHIP, OF_A_CHIP, SMALL)
        assert more == 0
        if num_tiles > 0:
            found = split_short_decodes(reqs, heads, num_tiles, *CHIP, OF_A_CHIP, SMALL)
            assert found == 132 // (reqs * heads)


def test_each_pair_of_many_short_decodes_has_a_program_if_all_run_at_once() -> None:
    assert split_short_decodes(33, 8, 4, *TWO_PER_SM, OF_A_CHIP, SMALL) == 1
    # one pair more, and keys that stream-K divides
    assert split_short_decodes(265, 1, 4, *TWO_PER_SM, OF_A_CHIP, SMALL) == 0
    assert split_short_decodes(33, 8, 5, *TWO_PER_SM, OF_A_CHIP, SMALL) == 0
    # one program per multiprocessor
    assert split_short_decodes(17, 8, 3, 128, 132, 132, OF_A_CHIP, SMALL) == 0


# requests, KV heads, KV tiles, their keys, programs at once; microseconds in the stream-K
# partition, and of few decodes by splits (tests/gpu/sweep.py, 2026-11-24, on an H200)
SWEPT: list[tuple[tuple[int, int, int, int, int], float, dict[int, float]]] = [
    ((8, 2, 13, 128, 132), 19.6, {4: 15.5, 7: 14.9, 13: 18.7}),
    ((4, 8, 3, 128, 132), 18.9, {2: 12.4, 3: 11.2}),
    ((3, 8, 73, 128, 132), 46.4, {2: 61.4, 5: 41.2, 11: 42.6}),
    ((2, 8, 11, 128, 264), 16.3, {4: 12.5, 6: 12.1, 11: 12.8}),
    ((2, 2, 75, 128, 132), 24.7, {15: 18.4, 25: 18.7, 38: 24.3}),
    ((33, 8, 4, 128, 264), 19.9, {1: 18.5}),
    ((2, 8, 164, 64, 132), 67.8, {4: 79.5, 8: 58.5, 15: 63.7}),
    ((17, 8, 3, 128, 264), 18.4, {1: 12.3}),
    ((1, 4, 77, 128, 132), 21.2, {16: 18.7, 26: 19.0, 39: 24.7}),
    ((5, 8, 10, 128, 132), 21.5, {1: 22.3, 3: 18.4, 5: 22.5}),
    ((1, 8, 27, 128, 264), 14.6, {7: 13.5, 14: 13.1, 27: 14.6}),
    ((5, 4, 4, 128, 132), 14.6, {2: 12.7, 4: 11.7}),
    ((1, 4, 115, 128, 132), 25.1, {15: 23.2, 29: 22.3, 58: 30.1}),
    # batches of seed 2 with more than 20 tiles per program. Two programs per multiprocessor, which
    # are never chosen, would take 51.3 in the second and 30.6 in the seventh
    ((8, 8, 43, 128, 132), 63.6, {1: 70.7, 2: 58.8, 4: 62.9}),
    ((2, 8, 203, 64, 132), 58.8, {4: 95.6, 8: 58.1}),
    ((1, 8, 524, 64, 132), 87.7, {8: 121.5, 16: 82.7, 32: 90.1}),
    ((2, 8, 246, 128, 132), 75.1, {4: 95.9, 8: 71.6, 16: 72.4}),
    ((3, 8, 106, 128, 132), 54.5, {2: 82.0, 5: 50.5, 11: 55.2}),
    ((2, 8, 177, 128, 132), 66.3, {4: 74.9, 8: 60.7, 16: 65.0}),
    ((5, 8, 74, 128, 264), 32.0, {1: 81.8, 3: 37.7}),
    ((1, 8, 419, 128, 132), 71.1, {8: 85.8, 16: 68.8, 32: 75.4}),
    ((3, 8, 102, 128, 132), 60.6, {2: 78.9, 5: 54.3, 11: 58.9}),
    ((17, 8, 4, 128, 264), 19.1, {1: 14.3}),
    # a window of 1,024: more keys than a segment of stream-K has
    ((20, 8, 18, 64, 132), 51.8, {1: 69.0}),
    ((18, 8, 10, 128, 132), 36.9, {1: 45.2}),
    ((27, 8, 10, 128, 132), 45.0, {1: 47.3}),
    ((4, 8, 10, 128, 132), 21.0, {2: 17.7, 4: 16.4, 5: 19.0}),
    ((55, 8, 10, 128, 132), 60.4, {1: 62.6}),
]


@pytest.mark.parametrize(("batch", "stream_k", "few"), SWEPT)
def test_the_chosen_decode_kernel_takes_at_most_3_percent_more_than_the_other_one(
    batch: tuple[int, int, int, int, int],
    stream_k: float,
    few: dict[int, float],
) -> None:
    reqs, heads, num_tiles, block_n, resident = batch
    # 8 rows of 128 with 2 and 4 KV heads, and 4 or fewer of 128, 8 of 64, or 2 of 256 with 8
    numbers = SMALL if heads == 8 else 2 * SMALL
    splits = split_short_decodes(
        reqs, heads, num_tiles, block_n, 132, resident, OF_A_CHIP, numbers
    )
    times = {0: stream_k} | few
    assert times[splits] <= 1.03 * min(times.values())


# requests, KV heads, query heads of one, keys; microseconds by splits (an H200, 2026-11-30)
FEW_KV_HEADS: list[tuple[tuple[int, int, int, int], dict[int, float]]] = [
    ((1, 1, 16, 4096), {4: 18.5, 8: 14.4, 11: 14.3, 16: 14.1, 32: 17.0}),
    ((1, 1, 16, 16384), {8: 30.0, 12: 24.5, 16: 21.9, 22: 21.4, 32: 21.5, 64: 27.3}),
    ((1, 1, 16, 131072), {32: 58.0, 47: 50.0, 64: 48.3, 128: 59.9}),
    ((2, 1, 16, 8192), {8: 20.0, 11: 18.8, 16: 17.7, 22: 18.2, 32: 19.6, 64: 27.2}),
    ((4, 1, 16, 4096), {4: 19.0, 8: 15.5, 11: 15.4, 16: 15.9, 32: 19.2}),
    ((8, 1, 16, 4096), {4: 20.0, 8: 16.6, 11: 16.7, 16: 17.9}),
    ((1, 1, 48, 4096), {4: 23.8, 8: 20.2, 11: 20.9, 16: 21.7, 32: 29.2}),
    ((1, 1, 48, 16384), {8: 38.4, 12: 34.1, 16: 31.2, 22: 32.0, 32: 34.7, 64: 48.6}),
    ((1, 1, 48, 131072), {24: 89.5, 32: 77.3, 47: 70.8, 64: 71.6, 128: 99.4}),
    ((2, 1, 48, 8192), {4: 36.5, 8: 27.0, 11: 25.6, 16: 25.8, 22: 27.2, 32: 31.6}),
    ((8, 1, 48, 4096), {4: 25.4, 8: 22.3, 11: 23.0, 16: 25.1}),
    ((2, 2, 32, 8192), {4: 36.1, 8: 25.6, 11: 24.1, 16: 23.0, 22: 24.5, 32: 28.4}),
    ((1, 2, 32, 16384), {8: 37.9, 12: 31.8, 16: 28.6, 22: 28.3, 32: 29.0, 64: 40.5}),
]


@pytest.mark.parametrize(("batch", "times"), FEW_KV_HEADS)
def test_few_kv_heads_have_as_many_splits_as_are_worth_their_combination(
    batch: tuple[int, int, int, int], times: dict[int, float]
) -> None:
    """With a program per multiprocessor, 48 heads took up to 2.6 times as long."""
    reqs, kv_heads, group, keys = batch
    numbers = 1 << (group - 1).bit_length() << 7
    splits = split_short_decodes(
        reqs, kv_heads, keys // 128, 128, 132, 132, OF_A_CHIP, numbers
    )
    assert min(times) <= splits <= max(times)
    assert np.interp(splits, list(times), list(times.values())) <= 1.05 * min(
        times.values()
    )


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return kernels and grids of decode launches, of which each batch is short."""
    found: list[tuple[str, Any]] = []
    choose = PortableDecodePlan.choose

    def note(*arguments: Any) -> DecodeGrid:
        decode = choose(*arguments)
        found.append((decode.launcher.name, decode.grid))
        return decode

    monkeypatch.setattr(PortableDecodePlan, "choose", note)
    # a repeated call is not planned again
    dispatch.PIPELINE.plans.clear()
    # the interpreter has 4 multiprocessors: 4 programs per request, 2, or 1
    set_thresholds(monkeypatch, short_tiles=8, min_segment=256)
    return found


def expect_equal(
    plan: BatchPlan, device: torch.device, grids: list[Any], **options: Any
) -> None:
    """Compare outputs and log-sum-exps of both twins, launched twice on the same counters."""
    batch = build(plan, device)
    heads, tokens = batch.query.shape[1], batch.query.shape[0]
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.linspace(0.1, 1.0, heads, device=device)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2.0, 3.0, heads, device=device)
    found = []
    for twin in ("reference", "optimized", "optimized"):
        lse = batch.query.new_zeros(heads, tokens)
        out = TWINS[twin].paged_attention(
            **batch.arguments(), lse=lse, options=AttentionOptions(**options)
        )
        found.append((out, lse))
    assert {name for name, _ in grids} == {"short_decode_kernel"}
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], atol=2e-6, rtol=2e-6)


BATCHES = {
    "one key": BatchPlan((1,), (1,), kv_heads=1),
    "one tile": BatchPlan((1,), (32,), kv_heads=1),
    "one key more than a tile": BatchPlan((1,), (33,), kv_heads=1),
    "splits of one tile": BatchPlan((1,), (128,), kv_heads=1, needle="last"),
    "splits of two tiles": BatchPlan((1,), (250,), kv_heads=1, needle="last"),
    "an odd number of tiles": BatchPlan((1,), (129,), kv_heads=1, needle="last"),
    "two kv heads": BatchPlan((1,), (250,), kv_heads=2, needle="first"),
    "two splits": BatchPlan((1, 1), (250, 90), kv_heads=1, needle="first"),
    "one program per request": BatchPlan((1,) * 4, (99, 1, 7, 33), kv_heads=1),
    "ragged": BatchPlan((1, 1, 1), (120, 7, 33), kv_heads=1, needle="tile edge"),
    "a long one and others of one key": BatchPlan((1, 1), (1, 255), kv_heads=1),
    "drafts": BatchPlan((4, 1), (110, 90), group=4, kv_heads=1, needle="first new"),
    "requests of no token": BatchPlan((0, 1, 0), (50, 90, 0), kv_heads=1),
    "padding": BatchPlan((1, 1), (60, 33), kv_heads=1, padding=5, spare_max=7),
    "loose bounds": BatchPlan((1, 1), (60, 33), kv_heads=1, spare_max=300),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BATCHES)
def test_short_decodes_are_right(
    name: str, grids: list[Any], device: torch.device
) -> None:
    expect_equal(BATCHES[name], device, grids)


OPTIONS: dict[str, dict[str, Any]] = {
    "a window that begins within a tile": {"sliding_window": 70},
    "chunks": {"attention_chunk_size": 64},
    "sinks": {"sinks": True},
    "a window and sinks": {"sliding_window": 45, "sinks": True},
    "a cap": {"logits_soft_cap": 2.0},
    "slopes": {"alibi_slopes": True},
    "not causal": {"causal": False},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_short_decodes_with_options_are_right(
    name: str, grids: list[Any], device: torch.device
) -> None:
    plan = BatchPlan((1, 2), (190, 130), kv_heads=1, group=3, needle="tile edge")
    expect_equal(plan, device, grids, **OPTIONS[name])


def test_a_request_without_a_key_has_a_zero_row(
    grids: list[Any], device: torch.device
) -> None:
    plan = BatchPlan((1, 1), (0, 90), kv_heads=1)
    expect_equal(plan, device, grids, causal=False)


@pytest.mark.sample(5)
@pytest.mark.parametrize("reqs", [1, 2, 3])
@pytest.mark.parametrize("position", [31, 32, 63, 64, 127, 128, 191, 192, 198])
def test_no_key_is_lost_at_the_edge_of_a_split(
    position: int, reqs: int, grids: list[Any], device: torch.device
) -> None:
    """One key outweighs all others. One request has splits of 2 tiles, two of 4, three one."""
    plan = BatchPlan((1,) * reqs, (199,) * reqs, group=4, kv_heads=1)
    batch = build(plan, device)
    plant(batch.rows, batch.key_cache, batch.value_cache, batch.query, position)
    found = [
        TWINS[twin].paged_attention(**batch.arguments())
        for twin in ("optimized", "reference")
    ]
    torch.testing.assert_close(*found, atol=2e-6, rtol=2e-6)
    assert {name for name, _ in grids} == {"short_decode_kernel"}


@pytest.mark.usefixtures("unchecked_values")
def test_keys_that_the_bound_left_out_are_divided_as_all_others(
    grids: list[Any], device: torch.device
) -> None:
    """A `max_seq_len` that is too small costs time, not keys."""
    batch = build(BatchPlan((1,), (250,), kv_heads=1, needle="last"), device)
    arguments = batch.arguments()
    right = TWINS["reference"].paged_attention(**arguments)
    found = TWINS["optimized"].raw.paged_attention(**arguments | {"max_seq_len": 60})
    assert grids[-1][0] == "short_decode_kernel" and grids[-1][1][1] < 4
    torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-6)


@pytest.mark.extended
def test_the_programs_of_a_request_do_not_depend_on_its_length(
    grids: list[Any], device: torch.device
) -> None:
    """A CUDA graph is launched again when the lengths have changed, and its bounds have not."""
    batch = build(BatchPlan((1, 1), (250, 250), kv_heads=1, needle="last"), device)
    arguments = batch.arguments()
    for lens in ((250, 250), (1, 250), (33, 64), (249, 2)):
        arguments["seq_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
        right = TWINS["reference"].paged_attention(**arguments)
        found = TWINS["optimized"].raw.paged_attention(**arguments)
        torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-6)
    assert len(set(grids)) == 1

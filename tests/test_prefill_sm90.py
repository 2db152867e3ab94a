"""Tests of the Hopper prefill kernel: supported calls, compiled code, results on a GPU."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compile_prefill_sm90 import CASES, EVERY_DAY
from compiler_process import json_lines
from conftest import Twin
from pagetwin.conformance.generators.batches import BatchPlan, BatchTensors
from pagetwin.conformance.generators.batches import build as build_alike
from pagetwin.conformance.oracles.dense import judge_attention, judge_lse, same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90 import family, scheduler
from pagetwin.optimized.kernels.sm90.config import (
    MASK_BEGIN,
    MASK_END,
    NARROW_TILE_KEYS,
    WARPGROUP_M,
    Config,
    choose_consumers,
    choose_group,
    choose_masks,
    count_tokens,
    has_lower_bound,
)
from pagetwin.optimized.kernels.sm90.family import Plane, _find_plane
from pagetwin.optimized.launch import workspace
from pagetwin.optimized.launch.attention_call import AttentionCall
from pagetwin.optimized.launch.direct_launch import find_direct_launch
from torch import Tensor
from triton.backends.nvidia.driver import wrap_handle_tensordesc

SCRIPT = Path(__file__).parent / "compile_prefill_sm90.py"
BF16, FP16 = torch.bfloat16, torch.float16
NAN = float("nan")
CAUSAL = AttentionOptions(causal=True)
SIZES = [64, 96, 128, 192, 256]
"""Head sizes of most tests. Those of 192 have values of 128."""
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def needs_hopper(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test anywhere but on a CUDA device of capability 9.0."""
    reason = "needs a CUDA device of capability 9.0"
    return pytest.mark.cuda(pytest.mark.skipif(not IS_HOPPER, reason=reason)(test))


def build(plan: BatchPlan, device: str = "cpu") -> BatchTensors:
    """Return the tensors of a plan. Head size 192 is that of queries and keys: values have 128."""
    batch = build_alike(plan, device)
    if plan.head_size != 192:
        return batch
    return replace(batch, value_cache=batch.value_cache[..., :128])


@pytest.mark.compile
def test_the_assembler_lets_products_and_softmax_overlap(
    report_lines: Callable[..., None],
) -> None:
    """Earlier faults: serialized wgmma, 16-bit numbers unpacked and packed, register spills."""
    lines = json_lines(SCRIPT, *range(EVERY_DAY))
    assert len(lines) == EVERY_DAY
    for case, line in zip(CASES, lines, strict=False):
        report_lines(
            f"sm_90   {line['case']:<40} {line['registers']:>3} registers"
            f" {line['spilled']:>4} bytes spilled {line['shared']:>7} bytes shared"
        )
        assert not line["warnings"], line
        assert line["shared"] <= 232448, line
        # the spills are in the producer warps and at the ends of a work item, of which
        # batch-invariant rows have one per split, and appends combine partial results
        is_invariant = "batch_invariant" in case.options
        is_split = is_invariant or case.is_append
        assert line["spilled"] <= (288 if is_split else 256), line
        consumers = choose_consumers(case.head_size, is_split or case.is_prefix)
        has_left_edge = "sliding_window" in case.options
        loops = 2 + has_left_edge + (case.head_size > 128 or is_split)
        assert len(line["loops"]) == loops * consumers, line
        for consumer in range(consumers):
            of_consumer = line["loops"][consumer * loops : (consumer + 1) * loops]
            # the loop without masks, which has most iterations
            hot = min(of_consumer, key=lambda loop: loop["instructions"])
            # wgmma instructions are in flight within one block
            has_narrow_tiles = case.head_size == 64 and has_left_edge
            tile_products = 4 if case.head_size == 256 or has_narrow_tiles else 8
            if case.head_size == 96:
                # 64 and 32 columns of P @ V, and then Q @ K
                tile_products = 8 + 8 + 96 // 16
            assert hot["HGMMA"] == tile_products, line
            if consumers == 3:
                # they also pass their turn on, before all exponentials are done
                assert hot["MUFU before BAR"] < hot["MUFU"] * 0.8, line
            for loop in of_consumer:
                # nothing is repacked; loops with masks have few iterations, and one instruction
                # in 64 of theirs may store or load what was spilled
                few = loop["instructions"] // 64
                assert loop["PRMT"] <= 1, line
                num_barriers = 3 if case.head_size == 96 else consumers - 1
                assert loop["BAR"] <= num_barriers, line
                assert loop["STL"] <= (0 if loop is hot else few), line
                assert loop["LDL"] <= (1 if loop is hot else few), line


CACHE = (100, 16, 8, 128)
PLANES = {
    "contiguous": (CACHE, (16384, 1024, 128, 1), Plane(1600, 1024, 1024, 16, 0, 128)),
    "heads before slots": (
        CACHE,
        (16384, 128, 2048, 1),
        Plane(99 * 128 + 16 + 7 * 16, 128, 128, 128, 16, 0),
    ),
    "keys and values interleaved": (
        CACHE,
        (32768, 1024, 128, 1),
        Plane(99 * 32 + 16, 1024, 1024, 32, 0, 128),
    ),
    "keys beside values": (
        CACHE,
        (32768, 256, 4096, 1),
        Plane(99 * 128 + 16 + 7 * 16, 128, 256, 128, 16, 0),
    ),
    "ragged": ((99, 8, 128), (1024, 128, 1), Plane(99, 1024, 1024, 0, 0, 128)),
    "heads before tokens": (
        (99, 8, 128),
        (128, 99 * 128, 1),
        Plane(99 + 7 * 99, 128, 128, 0, 99, 0),
    ),
    "every other element": (CACHE, (32768, 2048, 256, 2), None),
    "a row that is not aligned": ((99, 8, 128), (1028, 128, 1), None),
    "blocks that begin between rows": (CACHE, (16384 + 512, 1024, 128, 1), None),
    "one token for all": ((99, 8, 128), (0, 128, 1), None),
    "no rows": ((0, 8, 128), (1024, 128, 1), None),
    "more rows than a coordinate holds": (
        (2**28, 16, 8, 128),
        (16384, 1024, 128, 1),
        None,
    ),
}


@pytest.mark.parametrize("name", PLANES)
def test_a_plane_has_the_rows_and_columns_of_every_head_and_block(name: str) -> None:
    shape, strides, expected = PLANES[name]
    assert _find_plane(shape, strides) == expected


@pytest.mark.parametrize("name", [name for name, each in PLANES.items() if each[2]])
def test_an_element_has_the_row_and_column_of_its_plane_that_tma_is_given(
    name: str,
) -> None:
    shape, strides, plane = PLANES[name]
    assert plane is not None
    blocks = shape[0] if len(shape) == 4 else 1
    for block in {0, 1, blocks - 1} & set(range(blocks)):
        for slot in (0, shape[-3] - 1):
            for head in (0, shape[-2] - 1):
                index = (block, slot, head, 5)[-len(shape) :]
                row = block * plane.block_rows + slot + head * plane.head_rows
                column = head * plane.head_columns + 5
                address = sum(
                    i * stride for i, stride in zip(index, strides, strict=True)
                )
                assert row * plane.stride + column == address
                assert row < plane.rows and column < plane.width


def test_blocks_that_a_box_would_cross_are_not_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = torch.zeros(8, 8, 128, dtype=BF16)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    for block_size, is_supported in ((16, True), (48, True), (24, False), (8, False)):
        keys = torch.zeros(2, block_size, 2, 128, dtype=BF16)
        call = AttentionCall(
            query, keys, keys, torch.zeros(1, 2, dtype=torch.int32), starts, starts[1:],
            8, 8, 0.1, query, None, AttentionOptions(causal=True),
        )  # fmt: skip
        monkeypatch.setattr(family, "is_hopper", lambda device: True)
        assert family.supports(call) == is_supported
        if not is_supported:
            with pytest.raises(NotImplementedError, match="does not support this call"):
                family.plan(call)


@pytest.mark.parametrize(
    "given",
    [{"alibi_slopes": torch.ones(3)}, {"out_scale": 0.0}, {"k_scale": 1.0}],
)
def test_an_option_is_noticed_whatever_its_value(given: dict[str, Any]) -> None:
    """A tensor compared with None is neither true nor false, and 0 is not None."""
    others = family.get_other_options
    count = len(family.OTHER_OPTIONS)
    assert others(AttentionOptions()).count(None) == count
    assert others(AttentionOptions(**given)).count(None) == count - 1


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_windows_and_chunks_are_supported_if_the_call_is_causal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    batch = build(BatchPlan((8,), (8,), head_size=128, dtype=BF16))
    for causal in (True, False):
        options = AttentionOptions(causal=causal, **{name: 5})
        call = to_call(batch, *batch.fresh(), options)
        assert family.supports(call) == causal


@pytest.mark.parametrize("head_size", [32, 64, 80, 88, 96, 112, 128, 192, 256])
def test_a_head_is_computed_in_tiles_of_a_power_of_two(
    head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    batch = build_alike(BatchPlan((8,), (8,), head_size=head_size, dtype=BF16))
    call = to_call(batch, *batch.fresh())
    assert family.supports(call) == (head_size in family.HEAD_SIZES)
    if head_size in family.HEAD_SIZES:
        config = family.plan(call).constants["config"]
        assert head_size == config.HEAD_SIZE
        assert config.HEAD_DIM in (64, 128, 256) and 2 * head_size > config.HEAD_DIM


@pytest.mark.parametrize("has_heads_first", [False, True])
@pytest.mark.parametrize("head_size", [80, 96, 112])
def test_the_maps_of_padded_heads_address_each_element_and_no_padding(
    head_size: int, has_heads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box past the last column would overwrite the next head, or read it for nothing."""
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    sizes = {"head_size": head_size, "group": 1, "dtype": BF16}
    batch = build_alike(BatchPlan((8,), (40,), block_size=16, **sizes))
    caches = batch.key_cache, batch.value_cache
    if has_heads_first:
        caches = tuple(
            each.transpose(1, 2).contiguous().transpose(1, 2) for each in caches
        )
    batch = replace(batch, key_cache=caches[0], value_cache=caches[1])
    call = to_call(batch, *batch.fresh())
    plan = family.plan(call)
    for index, tensor in enumerate((call.query, *caches, call.out)):
        made = plan.describe(index, tensor, 0)
        assert len(made.block_shape) == 3
        assert list(made.shape[1:]) == [tensor.shape[-2], head_size]
        for place in itertools.product(*((0, size - 1) for size in tensor.shape)):
            row, head, column = place[-3:]
            if tensor.dim() == 4:
                row += place[0] * plan.planes[index].block_rows
            assert row < made.shape[0]
            address = row * made.strides[0] + head * made.strides[1] + column
            expected = zip(place, tensor.stride(), strict=True)
            assert address == sum(i * stride for i, stride in expected)


@pytest.mark.parametrize(
    ("head_size", "value_size", "is_supported"),
    [(192, 128, True), (192, 64, False), (128, 64, False), (256, 128, False)],
)
def test_values_may_be_narrower_than_keys_of_head_size_192(
    head_size: int,
    value_size: int,
    is_supported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    batch = build_alike(BatchPlan((8,), (8,), head_size=head_size, dtype=BF16))
    batch = replace(batch, value_cache=batch.value_cache[..., :value_size])
    call = to_call(batch, *batch.fresh())
    assert family.supports(call) == is_supported
    if is_supported:
        plan = family.plan(call)
        config = plan.constants["config"]
        assert head_size == config.HEAD_DIM + config.TAIL_DIM
        assert config.HEAD_SIZE == config.HEAD_DIM == value_size
        # queries in columns of 64, outputs in rows of a value
        assert plan.boxes[0] == (64, 64) and plan.boxes[3] == (64, value_size)


@pytest.mark.parametrize(
    ("head_size", "given", "block_n"),
    [
        (64, {}, 128),
        (64, {"sliding_window": 1}, 64),
        (64, {"sliding_window": NARROW_TILE_KEYS}, 64),
        (64, {"sliding_window": NARROW_TILE_KEYS + 1}, 128),
        (64, {"attention_chunk_size": NARROW_TILE_KEYS}, 64),
        (64, {"attention_chunk_size": NARROW_TILE_KEYS + 1}, 128),
        (64, {"sliding_window": 9999, "attention_chunk_size": 100}, 64),
        (80, {"sliding_window": 100}, 128),
        (128, {"sliding_window": 100}, 128),
        (256, {}, 64),
    ],
)
def test_short_windows_and_chunks_of_head_size_64_have_narrow_kv_tiles(
    head_size: int,
    given: dict[str, int],
    block_n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    plan = BatchPlan((8,), (8,), head_size=head_size, block_size=256, dtype=BF16)
    batch = build(plan)
    call = to_call(batch, *batch.fresh(), AttentionOptions(causal=True, **given))
    made = family.plan(call)
    config = made.constants["config"]
    assert block_n == config.BLOCK_N
    # a TMA box has the keys of one tile
    assert made.boxes[1] == made.boxes[2]
    assert (made.boxes[1][0], made.boxes[1][-1]) == (block_n, 64)


class Int32(int):
    """An integer whose division rounds toward zero, as a kernel's does."""

    def __add__(self, other: int) -> "Int32":
        return Int32(int(self) + int(other))

    def __sub__(self, other: int) -> "Int32":
        return Int32(int(self) - int(other))

    def __mul__(self, other: int) -> "Int32":
        return Int32(int(self) * int(other))

    def __floordiv__(self, other: int) -> "Int32":
        quotient = abs(self) // abs(other)
        return Int32(quotient if (self < 0) == (other < 0) else -quotient)


def run_on_host(
    *mutations: tuple[str, str], more: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """Return the scheduler's functions of positions and tiles as functions of Python.

    Args:
        mutations: text of the source, each found once, and what replaces it.
        more: further functions that rely on these.
    """
    functions = (
        scheduler.first_visible_key,
        scheduler.first_kv_tile,
        scheduler.find_tiles,
        scheduler.locate_work,
        *more,
    )
    source = "\n".join(
        inspect.getsource(each.fn).replace("@gluon.jit\n", "") for each in functions
    )
    for old, new in mutations:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    limits = {
        "minimum": lambda a, b: Int32(min(a, b)),
        "maximum": lambda a, b: Int32(max(a, b)),
    }
    names = {
        # triton 3.6 passes a NamedTuple to a constexpr function as a tuple: call what it wraps
        **{name: getattr(each, "fn", each) for name, each in vars(scheduler).items()},
        "gl": SimpleNamespace(constexpr=None, **limits),
    }
    exec(source, names)
    return names


def check_tiles(
    names: dict[str, Any], config: Config, query_len: int, kv_len: int
) -> None:
    """Assert that every warpgroup computes the KV tiles of its rows, with the masks they need."""
    consumers = config.CONSUMERS
    tokens, block_n = count_tokens.fn(config), config.BLOCK_N
    tile_tokens = consumers * tokens
    masks = choose_masks.fn(config)
    keys = np.arange(-(-kv_len // block_n) * block_n)
    batch = SimpleNamespace(num_heads=Int32(1))
    request = scheduler.RequestBounds(
        Int32(0), Int32(query_len), Int32(kv_len), Int32(0)
    )
    items = scheduler.ItemRange(0, Int32(0), Int32(1), 0, 0)
    for item in range(-(-query_len // tile_tokens)):
        work = names["locate_work"](
            batch, Int32(item), items, request, config, tile_tokens
        )
        if work.num_kv_tiles <= 0:
            continue
        first_tile = names["first_kv_tile"](work, config)
        end_tile = first_tile + work.num_kv_tiles
        for consumer in range(consumers):
            position = work.position + consumer * tokens
            own = names["find_tiles"](work, position, config)
            # the same tiles pass through the pipeline for every warpgroup
            assert own.after >= 0 and own.before >= 0
            assert own.last + 1 + own.after == end_tile
            assert own.first - own.before == first_tile
            assert own.first <= own.full_begin <= own.full_end <= own.last

            rows = np.arange(position, position + tokens)
            rows = rows[(rows >= 0) & (rows < kv_len)][:, None]
            ends = np.minimum(rows + 1, kv_len) if config.CAUSAL else rows * 0 + kv_len
            begins = rows * 0
            if config.WINDOW:
                begins = np.maximum(begins, rows - config.WINDOW + 1)
            if config.CHUNK_SIZE:
                begins = np.maximum(begins, rows - rows % config.CHUNK_SIZE)
            for row, begin in zip(rows.flat, begins.flat, strict=True):
                assert begin == names["first_visible_key"](Int32(row), config)
            is_after, is_before = keys >= ends, keys < begins
            is_visible = ~is_after & ~is_before
            tiles = np.flatnonzero(
                is_visible.any(0).reshape(-1, block_n).any(1)
            ).tolist()
            if not tiles:
                continue
            assert own.first <= tiles[0] and tiles[-1] <= own.last
            if has_lower_bound.fn(config):
                assert (own.first, own.last) == (tiles[0], tiles[-1])
            for tile in range(own.first, own.last + 1):
                mask = 0
                if tile == own.last or tile >= own.full_end:
                    mask = masks[0]
                elif tile < own.full_begin:
                    mask = masks[1]
                columns = slice(tile * block_n, (tile + 1) * block_n)
                assert mask & MASK_END.value or not is_after[:, columns].any()
                assert mask & MASK_BEGIN.value or not is_before[:, columns].any()


def check_all_tiles(*mutations: tuple[str, str]) -> None:
    """Run `check_tiles` for windows and chunks around the sizes of tiles and warpgroups."""
    names = run_on_host(*mutations)
    limits = [(0, 0), (40, 150), (200, 64)]
    limits += [
        (window, 0) for window in (1, 63, 64, 65, 66, 128, 130, 191, 192, 193, 330)
    ]
    limits += [(0, chunk) for chunk in (64, 100, 127, 128, 300)]
    shapes = [(1, 1), (64, 64), (200, 200), (300, 700), (129, 514), (400, 300)]
    tiles = [(64, 64, 1), (64, 128, 1), (128, 128, 1), (256, 64, 1)]
    tiles += [(64, 64, 8), (128, 128, 4), (256, 64, 64)]
    for head_dim, block_n, group in tiles:
        for window, chunk_size in limits:
            causals = (True,) if window or chunk_size else (True, False)
            for causal, shape in itertools.product(causals, shapes):
                config = Config(
                    head_dim, head_dim, 16, block_n, 2, causal, window, chunk_size,
                    GROUP=group, CONSUMERS=choose_consumers(head_dim, False),
                )  # fmt: skip
                check_tiles(names, config, *shape)


def test_a_warpgroup_computes_its_kv_tiles_with_the_masks_that_they_need() -> None:
    check_all_tiles()


WRONG_TILES = {
    "a window of one key more": (
        "position - (config.WINDOW - 1)",
        "position - config.WINDOW",
    ),
    "a window of one key less": (
        "position - (config.WINDOW - 1)",
        "position - (config.WINDOW - 2)",
    ),
    "a chunk that begins late": (
        "position // config.CHUNK_SIZE * config.CHUNK_SIZE",
        "position // config.CHUNK_SIZE * config.CHUNK_SIZE + 1",
    ),
    "the last row is of another warpgroup": (
        "last_row = position + count_tokens(config) - 1",
        "last_row = position + count_tokens(config)",
    ),
    "the first row stands for the last": (
        "last_row = position + count_tokens(config) - 1",
        "last_row = position",
    ),
    "the tile with the last key is skipped": (
        "gl.maximum(last_row // BLOCK_N, first)",
        "gl.maximum((last_row - 1) // BLOCK_N, first)",
    ),
    "no tile after the last is skipped": ("last = own_last", "pass"),
    "the tile with the first key is skipped": (
        "gl.minimum(first_visible_key(position, config) // BLOCK_N, last)",
        "gl.minimum((first_visible_key(position, config) + BLOCK_N - 1) // BLOCK_N, last)",
    ),
    "the first tile is of the last row": (
        "gl.minimum(first_visible_key(position, config) // BLOCK_N, last)",
        "gl.minimum(first_visible_key(last_row, config) // BLOCK_N, last)",
    ),
    "no tile before the first is skipped": ("first = own_first", "pass"),
    "skipped tiles are not counted": ("before = own_first - first", "before = 0"),
    "no mask at the begin of the last row's window": (
        "(first_visible_key(last_row, config) + BLOCK_N - 1) // BLOCK_N",
        "first_visible_key(last_row, config) // BLOCK_N",
    ),
    "no mask at the begin of the first row's window only": (
        "(first_visible_key(last_row, config) + BLOCK_N - 1) // BLOCK_N",
        "(first_visible_key(position, config) + BLOCK_N - 1) // BLOCK_N",
    ),
    "no mask on the diagonal": (
        "full_end = gl.maximum(position + 1, 0) // BLOCK_N",
        "full_end = gl.maximum(last_row + 1, 0) // BLOCK_N",
    ),
    "no mask on the diagonal of a work item": (
        "full_end = gl.maximum(work.position + 1, 0) // BLOCK_N",
        "full_end = work.seq_len // BLOCK_N",
    ),
    "a work item without its last tile": (
        "num_kv_tiles = (kv_end + BLOCK_N - 1) // BLOCK_N",
        "num_kv_tiles = kv_end // BLOCK_N",
    ),
    "a work item with tiles of another window": (
        "num_kv_tiles -= first_visible_key(position, config) // BLOCK_N",
        "num_kv_tiles -= first_visible_key(position + TILE_TOKENS, config) // BLOCK_N",
    ),
}


@pytest.mark.parametrize("name", WRONG_TILES)
def test_a_wrong_bound_of_the_kv_tiles_is_found(name: str) -> None:
    with pytest.raises(AssertionError):
        check_all_tiles(WRONG_TILES[name])


@pytest.mark.parametrize(
    ("group", "head_size", "in_a_tile"),
    [
        (1, 128, 1), (2, 64, 2), (4, 96, 4), (7, 128, 1), (8, 256, 8), (12, 128, 1),
        (64, 128, 64), (128, 64, 1), (4, 192, 1),
    ],
)  # fmt: skip
def test_a_query_tile_has_the_heads_of_a_kv_head_if_their_number_divides_its_rows(
    group: int, head_size: int, in_a_tile: int
) -> None:
    assert head_size == 192 or choose_group(group) == in_a_tile
    plan = BatchPlan((9,), (9,), group=group, head_size=head_size, dtype=BF16)
    batch = build(plan)
    made = family.plan(to_call(batch, *batch.fresh()))
    assert in_a_tile == made.constants["config"].GROUP
    for index in (0, 3):
        # tokens, query heads and columns; with one head rows and columns
        *rows, columns = made.boxes[index]
        assert len(rows) == (2 if in_a_tile > 1 else 1)
        assert np.prod(rows) == WARPGROUP_M.value and columns >= 64
    # heads that share memory have no step that a box could take
    shared = batch.query[:, :1].expand(batch.query.shape)
    made = family.plan(to_call(replace(batch, query=shared), *batch.fresh()))
    assert made.constants["config"].GROUP == 1


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "padded rows"])
def test_a_box_of_several_heads_addresses_each_element_of_the_call(layout: str) -> None:
    """Also of a call that has other tokens than the one that the plan was made for."""
    plan = BatchPlan((9,), (9,), group=4, head_size=128, dtype=BF16)
    batch = build(plan)
    shape = {"heads first": (8, 20, 128), "padded rows": (20, 8, 136)}
    memory = torch.zeros(shape.get(layout, (20, 8, 128)), dtype=BF16)
    whole = memory.transpose(0, 1) if layout == "heads first" else memory[..., :128]
    made = family.plan(
        to_call(replace(batch, query=whole[:9]), whole[:9], batch.fresh()[1])
    )
    extra_rows = made.extra_rows(whole[:15], batch.key_cache)
    for index in (0, 3):
        found = made.describe(index, whole[:15], extra_rows[index])
        assert (list(found.shape), list(found.strides)) == (
            [15, 8, 128],
            list(whole.stride()),
        )


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_request_is_short_by_its_rows_however_many_heads_a_tile_has(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BatchPlan((9,), (9,), group=group, head_size=128, dtype=BF16)
    batch = build(plan)
    call = to_call(batch, *batch.fresh())
    made = family.plan(call)
    launches: list[Any] = []
    monkeypatch.setattr(family, "count_processors", lambda device: 132)
    keep: Any = lambda *each: launches.append(each)  # noqa: E731
    keep.is_ready = False
    made.launcher = keep
    for short_rows in range(9 * group):
        made.launch_prefill(call, short_rows)
        _, num_heads, heads_per_kv_head, max_decode_rows = launches.pop()[3][:4]
        assert num_heads == 2 * heads_per_kv_head
        for query_len in range(1, 10):
            is_long = query_len * heads_per_kv_head > max_decode_rows
            assert is_long == (query_len * group > short_rows)


def test_no_call_is_supported_on_another_device() -> None:
    batch = build(BatchPlan((8,), (8,), head_size=128, dtype=BF16))
    assert not family.supports(to_call(batch, *batch.fresh()))


def to_call(
    batch: BatchTensors,
    out: Tensor,
    lse: Tensor | None,
    options: AttentionOptions = CAUSAL,
) -> AttentionCall:
    """Return the call that computes a batch."""
    plan = batch.plan
    return AttentionCall(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.max_query_len,
        int(max(plan.kv_lens)),
        plan.head_size**-0.5 if plan.scale is None else plan.scale,
        out,
        lse,
        options,
    )


def make_plan(call: AttentionCall) -> family.Sm90Plan:
    """Return the Hopper family's launch plan of a call that it supports."""
    assert family.supports(call)
    plan = family.plan(call)
    assert plan.takes(call)
    return plan


def run(
    batch: BatchTensors,
    short_rows: int = 0,
    options: AttentionOptions = CAUSAL,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel into an output and a log-sum-exp full of NaN."""
    fresh, lse = batch.fresh()
    out = fresh if out is None else out
    call = to_call(batch, out, lse, options)
    plan = make_plan(call)
    # the first launch goes through Triton, the second through `Launcher`
    for _ in range(2):
        out.fill_(NAN)
        lse.fill_(NAN)
        plan.launch_prefill(call, short_rows)
    return out, lse


def assert_right(
    batch: BatchTensors,
    reference: Twin,
    short_rows: int = 0,
    options: AttentionOptions = CAUSAL,
) -> None:
    """Assert that computed rows are within their error budgets, and others are unchanged."""
    out, lse = run(batch, short_rows, options)
    attend = partial(reference.paged_attention, options=options)
    start = 0
    skipped = torch.ones(batch.query.shape[0], dtype=torch.bool, device=out.device)
    for query_len in batch.plan.query_lens:
        if query_len * batch.plan.group > short_rows:
            skipped[start : start + query_len] = False
        start += query_len
    assert bool(out[skipped].isnan().all())
    assert bool(lse[:, skipped].isnan().all())
    right, right_lse = batch.fresh()
    attend(**batch.arguments(), out=right, lse=right_lse)
    out[skipped] = right[skipped]
    lse[:, skipped] = right_lse[:, skipped]
    judged = SimpleNamespace(paged_attention=attend)
    verdict, exact_lse = judge_attention(batch, out, judged)
    assert verdict.ok, verdict
    share = judge_lse(batch, lse, exact_lse)
    assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"


BATCHES = {
    "one tile": BatchPlan((64,), (64,)),
    "a prompt": BatchPlan((400,), (400,), needle="first"),
    "a chunk of a prompt": BatchPlan((130,), (515,), needle="tile edge"),
    "ragged": BatchPlan(
        (1, 200, 0, 77, 129, 3), (50, 200, 40, 300, 129, 260), needle="last"
    ),
    "fewer queries than keys": BatchPlan((17, 65), (17, 1000)),
    "many requests": BatchPlan(
        (2,) * 70 + (100,), (5,) * 70 + (300,), needle="first new"
    ),
    "blocks of 48": BatchPlan((150,), (333,), block_size=48, needle="block edge"),
    "blocks of 64": BatchPlan((150, 9), (333, 70), block_size=64),
    "blocks of 256": BatchPlan(
        (150, 9), (600, 70), block_size=256, needle="block edge"
    ),
    "heads before slots": BatchPlan((150, 66), (333, 66), layout="hnd"),
    "interleaved": BatchPlan((150, 66), (333, 66), layout="interleaved"),
    "both": BatchPlan((150, 66), (333, 66), layout="interleaved hnd", fused=False),
    "two layouts": BatchPlan(
        (150, 66), (333, 66), layout="hnd", value_layout="interleaved"
    ),
    "shared blocks": BatchPlan((90, 66), (333, 400), table="shared prefix"),
    "one head each": BatchPlan((150,), (333,), group=1, kv_heads=3),
    "three heads to one": BatchPlan((150, 66), (333, 66), group=3),
    "four heads to one": BatchPlan(
        (1, 200, 0, 77, 129), (50, 200, 40, 300, 129), group=4, needle="last"
    ),
    "eight heads to one": BatchPlan((150, 7), (333, 9), group=8, padding=3),
    "sixty-four heads to one": BatchPlan((35, 9), (200, 9), group=64, kv_heads=1),
    "seven heads to one": BatchPlan((150,), (333,), group=7, kv_heads=1, padding=3),
    "a large scale": BatchPlan((150,), (333,), scale=1.0, spare_max=7),
}


@needs_hopper
@pytest.mark.parametrize("head_size", [*family.HEAD_SIZES, 192])
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_within_its_error_budget(
    name: str, head_size: int, reference: Twin
) -> None:
    plan = replace(BATCHES[name], head_size=head_size, dtype=BF16)
    assert_right(build(plan, "cuda"), reference)


@needs_hopper
@pytest.mark.parametrize("place", range(16))
def test_the_weight_of_the_largest_score_is_one(place: int, reference: Twin) -> None:
    """For each column of a thread's: some exponentials are computed by a polynomial."""
    plan = BatchPlan((300,), (300,), head_size=128, dtype=BF16, needle="first")
    batch = build(plan, "cuda")
    block = batch.rows[0][0]
    for cache in (batch.key_cache, batch.value_cache):
        cache[block, [0, place]] = cache[block, [place, 0]].clone()
    assert_right(batch, reference)


OPTIONS: dict[str, dict[str, Any]] = {
    "a window of one key": {"sliding_window": 1},
    "a window": {"sliding_window": 100},
    "a window of a tile": {"sliding_window": 128},
    "a window of several tiles": {"sliding_window": 330},
    "chunks": {"attention_chunk_size": 100},
    "chunks of a tile": {"attention_chunk_size": 64},
    "a window in chunks": {"sliding_window": 40, "attention_chunk_size": 150},
    "a cap": {"logits_soft_cap": 3.0},
    "a cap far above the scores": {"logits_soft_cap": 1000.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 90, "logits_soft_cap": 20.0, "sinks": True},
}


def make_options(batch: BatchTensors, given: dict[str, Any]) -> AttentionOptions:
    """Return the options of a causal call, with a sink per head if there are sinks."""
    if "sinks" in given:
        heads = batch.query.shape[1]
        sinks = torch.linspace(-3.0, 4.0, heads, device=batch.query.device)
        given = {**given, "sinks": sinks}
    return AttentionOptions(causal=True, **given)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("group", [7, 8])
@pytest.mark.parametrize("needle", ["none", "first new", "tile edge"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_row_of_a_call_with_options_is_within_its_error_budget(
    name: str, needle: str, group: int, head_size: int, reference: Twin
) -> None:
    """Seven query heads to a KV head are in tiles of their own, eight in one."""
    plan = BatchPlan(
        (1, 200, 0, 77, 129, 300),
        (50, 200, 40, 300, 129, 700),
        group=group,
        head_size=head_size,
        dtype=BF16,
        needle=needle,
    )
    batch = build(plan, "cuda")
    assert_right(batch, reference, options=make_options(batch, OPTIONS[name]))


@needs_hopper
@pytest.mark.parametrize("needle", ["none", "first new", "tile edge"])
@pytest.mark.parametrize("limit", [NARROW_TILE_KEYS, NARROW_TILE_KEYS + 1])
@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_windows_and_chunks_around_the_change_of_the_kv_tile(
    name: str, limit: int, needle: str, reference: Twin
) -> None:
    """With one key more, tiles of head size 64 have 128 keys and not 64.

    The first new token of the second request outweighs all other keys, and leaves the window of
    its last 200 rows.
    """
    plan = BatchPlan(
        (300, 1230, 77), (1500, 1231, 2300), head_size=64, dtype=BF16, needle=needle
    )
    batch = build(plan, "cuda")
    assert_right(batch, reference, options=make_options(batch, {name: limit}))


@needs_hopper
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_blocks_before_every_window_are_not_read(
    name: str, head_size: int, block_size: int
) -> None:
    """They may have been reallocated, and then hold NaN."""
    plan = BatchPlan(
        (150, 40), (777, 295), head_size=head_size, block_size=block_size, dtype=BF16
    )
    batch = build(plan, "cuda")
    options = AttentionOptions(causal=True, **{name: 70})
    before = run(batch, options=options)
    caches = batch.key_cache.clone(), batch.value_cache.clone()
    for query_len, kv_len, row in zip(
        plan.query_lens, plan.kv_lens, batch.rows, strict=True
    ):
        first = kv_len - query_len
        first = first - 69 if name == "sliding_window" else first // 70 * 70
        for cache in caches:
            cache[row[: max(first, 0) // block_size]] = NAN
    again = replace(batch, key_cache=caches[0], value_cache=caches[1])
    after = run(again, options=options)
    for one, other in zip(before, after, strict=True):
        assert bool(one.isfinite().all())
        assert same_bits(one, other)


@needs_hopper
@pytest.mark.parametrize("head_size", [64, 128, 192])
@pytest.mark.parametrize("name", ["ragged", "a chunk of a prompt", "a large scale"])
def test_every_row_of_float16_is_within_its_error_budget(
    name: str, head_size: int, reference: Twin
) -> None:
    plan = replace(BATCHES[name], head_size=head_size, dtype=FP16)
    assert_right(build(plan, "cuda"), reference)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("group", [2, 3])
def test_short_requests_are_not_written(
    group: int, head_size: int, reference: Twin
) -> None:
    plan = replace(BATCHES["ragged"], head_size=head_size, group=group, dtype=BF16)
    for short_rows in (2, 3, 16, 154, 155, 258):
        assert_right(build(plan, "cuda"), reference, short_rows)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("poison", [0.0, float("inf"), 1e4])
def test_unallocated_slots_do_not_change_a_bit(head_size: int, poison: float) -> None:
    """NaN or another value past a sequence's end gives bitwise equal results."""
    plan = BatchPlan((40, 150, 7), (40, 333, 129), head_size=head_size, dtype=BF16)
    batch = build(plan, "cuda")
    before = run(batch)
    caches = [
        torch.where(cache.isnan(), poison, cache)
        for cache in (batch.key_cache, batch.value_cache)
    ]
    table = batch.block_table.clone()
    for req, row in enumerate(batch.rows):
        table[req, len(row) :] = 0
    after = run(
        replace(batch, key_cache=caches[0], value_cache=caches[1], block_table=table)
    )
    for one, other in zip(before, after, strict=True):
        assert bool(one.isfinite().all())
        assert same_bits(one, other)


@needs_hopper
def test_a_query_without_a_visible_key_gets_zero() -> None:
    """A sequence shorter than its queries: the first of them precede its first key."""
    plan = BatchPlan((300, 40), (300, 40), head_size=128, dtype=BF16)
    batch = build(plan, "cuda")
    whole, whole_lse = run(batch)
    short = torch.tensor([100, 0], dtype=torch.int32, device="cuda")
    out, lse = run(replace(batch, seq_lens=short))
    assert bool((out[:200] == 0).all() and (lse[:, :200] == -torch.inf).all())
    assert bool((out[300:] == 0).all() and (lse[:, 300:] == -torch.inf).all())
    assert bool(out[200:300].isfinite().all() and lse[:, 200:300].isfinite().all())
    assert bool(whole.isfinite().all() and whole_lse.isfinite().all())


def ragged(batch: BatchTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch's keys and values concatenated, and the index of each request's first."""
    rows = []
    for kv_len, row in zip(batch.plan.kv_lens, batch.rows, strict=True):
        size = batch.plan.block_size
        rows += [row[p // size] * size + p % size for p in range(kv_len)]
    rows += [0] * 40  # padding
    index = torch.tensor(rows, device=batch.query.device)
    keys, values = (
        cache.reshape(-1, *cache.shape[2:])[index]
        for cache in (batch.key_cache, batch.value_cache)
    )
    keys[-40:] = NAN
    values[-40:] = NAN
    starts = torch.tensor([0, *batch.plan.kv_lens], device=batch.query.device)
    return keys, values, starts.cumsum(0).int()


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_keys_give_the_same_bits_as_a_cache(
    head_size: int, causal: bool
) -> None:
    plan = replace(BATCHES["ragged"], head_size=head_size, dtype=BF16)
    batch = build(plan, "cuda")
    options = AttentionOptions(causal=causal)
    expected, expected_lse = run(batch, options=options)
    keys, values, starts = ragged(batch)
    out, lse = batch.fresh()
    call = to_call(batch, out, lse, options)._replace(
        key=keys, value=values, block_table=None, lengths=starts
    )
    make_plan(call).launch_prefill(call, 0)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
def test_without_a_mask_every_query_attends_to_its_whole_sequence(
    head_size: int,
) -> None:
    plan = BatchPlan((200, 5, 90), (300, 0, 129), head_size=head_size, dtype=BF16)
    batch = build(plan, "cuda")
    out, lse = run(batch, options=AttentionOptions(causal=False))
    keys, values, starts = ragged(batch)
    begins = batch.query_start_loc.tolist()
    for req, (begin, end) in enumerate(itertools.pairwise(begins)):
        own = slice(int(starts[req]), int(starts[req + 1]))
        if own.start == own.stop:
            assert bool((out[begin:end] == 0).all())
            assert bool((lse[:, begin:end] == -torch.inf).all())
            continue
        key, value = (
            each[own].double().repeat_interleave(plan.group, 1)
            for each in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", batch.query[begin:end].double(), key)
        scores *= head_size**-0.5
        exact = torch.einsum("hqk,khd->qhd", scores.softmax(2), value)
        # one rounding of the result, and of each weight
        budget = 4 * torch.finfo(BF16).eps * value.abs().amax()
        assert float((out[begin:end].double() - exact).abs().max()) < float(budget) / 4
        assert torch.allclose(
            lse[:, begin:end].double(), scores.logsumexp(2), atol=1e-5
        )


@needs_hopper
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("layout", ["heads first", "padded rows"])
def test_the_output_may_have_any_strides(layout: str, group: int) -> None:
    plan = BatchPlan((150, 20), (333, 20), head_size=128, group=group, dtype=BF16)
    batch = build(plan, "cuda")
    expected, _ = run(batch)
    tokens, heads, size = expected.shape
    if layout == "heads first":
        memory = torch.full((heads, tokens, size), NAN, dtype=BF16, device="cuda")
        out = memory.transpose(0, 1)
    else:
        memory = torch.full(
            (tokens + 2, heads, size + 8), NAN, dtype=BF16, device="cuda"
        )
        out = memory[1:-1, :, :size]
    run(batch, out=out)
    assert same_bits(out, expected)
    assert int(memory.isnan().sum()) == memory.numel() - out.numel()


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
def test_an_output_of_float32_is_rounded_to_the_output_of_16_bits(
    head_size: int,
) -> None:
    """Latent prefill merges outputs of float32, which TMA does not store."""
    plan = BatchPlan((150, 20), (333, 20), head_size=head_size, dtype=BF16, padding=2)
    batch = build(plan, "cuda")
    expected, expected_lse = run(batch)
    out, lse = run(batch, out=torch.full_like(expected, NAN, dtype=torch.float32))
    assert same_bits(out[:170].to(BF16), expected[:170])
    assert same_bits(lse[:, :170], expected_lse[:, :170])
    assert bool((out[:170] != expected[:170]).any())
    assert bool(out[170:].isnan().all())


@needs_hopper
def test_one_captured_launch_serves_other_lengths(reference: Twin) -> None:
    plans = [
        BatchPlan((200, 3, 90), (300, 40, 129), head_size=128, dtype=BF16),
        BatchPlan((93, 0, 200), (129, 40, 300), head_size=128, dtype=BF16, seed=1),
        BatchPlan((50, 50, 193), (50, 200, 300), head_size=128, dtype=BF16, seed=2),
    ]
    batches = [build(plan, "cuda") for plan in plans]
    blocks = max(batch.key_cache.shape[0] for batch in batches)
    columns = max(batch.block_table.shape[1] for batch in batches)
    first = batches[0]
    caches = [
        torch.full((blocks, *first.key_cache.shape[1:]), NAN, dtype=BF16, device="cuda")
        for _ in range(2)
    ]
    table = torch.zeros(3, columns, dtype=torch.int32, device="cuda")
    live = replace(
        first,
        query=torch.empty_like(first.query),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        query_start_loc=first.query_start_loc.clone(),
        seq_lens=first.seq_lens.clone(),
        max_query_len=200,
    )
    out, lse = first.fresh()
    run(live, out=out)  # compiles
    call = to_call(live, out, lse)
    plan = make_plan(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch_prefill(call, 0)
    for _ in range(2):
        for batch in batches:
            live.query.copy_(batch.query)
            for cache, content in zip(
                caches, (batch.key_cache, batch.value_cache), strict=True
            ):
                cache[: content.shape[0]] = content
            table[:, : batch.block_table.shape[1]] = batch.block_table
            live.query_start_loc.copy_(batch.query_start_loc)
            live.seq_lens.copy_(batch.seq_lens)
            out.fill_(NAN)
            lse.fill_(NAN)
            graph.replay()
            verdict, exact_lse = judge_attention(batch, out, reference)
            assert verdict.ok, verdict
            assert judge_lse(batch, lse, exact_lse) <= 1


@needs_hopper
@pytest.mark.parametrize("head_size", SIZES)
def test_calls_of_one_plan_may_have_any_number_of_tokens(
    head_size: int, reference: Twin
) -> None:
    """A plan does not depend on the tokens and addresses of the first call."""
    launch_plan = None
    for query_len in (40, 500, 1, 130):
        plan = BatchPlan((query_len,), (500,), head_size=head_size, dtype=BF16)
        batch = build(replace(plan, seed=query_len), "cuda")
        out, lse = batch.fresh()
        call = to_call(batch, out, lse)
        launch_plan = launch_plan or make_plan(call)
        assert launch_plan.takes(call)
        launch_plan.launch_prefill(call, 0)
        verdict, exact_lse = judge_attention(batch, out, reference)
        assert verdict.ok, verdict
        assert judge_lse(batch, lse, exact_lse) <= 1


def test_a_kernel_whose_launch_cannot_be_found_is_left_to_triton() -> None:
    """A direct launch needs a part of Triton's launcher. Without it the launch is still right."""
    options = {"launch_cooperative_grid": False, "launch_pdl": False}
    of_triton_37 = {"arg_annotations": (), "kernel_signature": b""}
    scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
    maker: Any = SimpleNamespace(launch=print, **options, **of_triton_37)
    compiled = SimpleNamespace(
        run=maker, function=7, packed_metadata=(4, 1, 0), metadata=SimpleNamespace()
    )
    usual = find_direct_launch(compiled, 0)
    assert usual is not None and usual.function is maker
    vars(maker).update(scratch)
    direct = find_direct_launch(compiled, 0)
    assert direct is not None and direct.function is print
    maker.launch = lambda *arguments: arguments
    usual = find_direct_launch(compiled, 0)
    assert usual is not None and usual.function is maker
    compiled.metadata.tensordesc_meta = [{"swizzle": 3}]
    assert find_direct_launch(compiled, 0) is None

    # as this version of triton wraps the launch of a kernel with tensor maps
    kinds = {"query": "tensordesc<fp16[64, 64]>", "scale": "fp32"}
    maker.launch = wrap_handle_tensordesc(print, kinds, [{"swizzle": 3}])
    direct = find_direct_launch(compiled, 0)
    assert direct is not None and direct.function is print
    maker.global_scratch_size = 128
    usual = find_direct_launch(compiled, 0)
    # a copy of Triton's launcher object, which takes encoded tensor maps
    assert usual is not None and usual.function.launch is print


@needs_hopper
def test_many_launches_in_a_row_give_the_same_bits() -> None:
    """Each takes its work items from the counter that the launch before set back to 0."""
    plan = BatchPlan(
        (300, 5, 170), (400, 40, 300), head_size=64, dtype=BF16, kv_heads=4
    )
    batch = build(plan, "cuda")
    expected = run(batch)
    for _ in range(50):
        for one, other in zip(run(batch), expected, strict=True):
            assert torch.equal(one, other)
    for kept in workspace._streams.values():
        assert not bool(kept.counters.any())


@pytest.fixture(autouse=True)
def own_counters() -> Iterator[None]:
    """Start every test without counters, so that a failed test does not affect the next."""
    workspace.release_workspace()
    yield

"""Calls that the Hopper prefill kernel supports, and the tensor maps of their tensors."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.batches import build as build_alike
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.cascade import family as cascade
from pagetwin.optimized.kernels.sm90.common import planes
from pagetwin.optimized.kernels.sm90.common.config import (
    NARROW_TILE_KEYS,
    WARPGROUP_M,
    choose_group,
    with_whole_acc,
)
from pagetwin.optimized.kernels.sm90.common.planes import Plane, find_plane
from pagetwin.optimized.kernels.sm90.common.traits import (
    acc_columns,
    count_q_stages,
    key_columns,
    q_columns,
)
from pagetwin.optimized.kernels.sm90.prefill import family
from pagetwin.optimized.kernels.sm90.prefill.plan import PrefillPlan
from pagetwin.optimized.runtime.attention_call import AttentionCall
from support.compile_prefill_sm90 import BF16
from support.sm90_calls import build, check_supported, to_call

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
    assert find_plane(shape, strides) == expected


@pytest.mark.parametrize("name", [name for name, plane in PLANES.items() if plane[2]])
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
    for block_size, is_supported in ((16, True), (24, True), (8, True), (12, False)):
        keys = torch.zeros(2, block_size, 2, 128, dtype=BF16)
        call = AttentionCall(
            query, keys, keys, torch.zeros(1, 2, dtype=torch.int32), starts, starts[1:],
            8, 8, 0.1, query, None, AttentionOptions(causal=True),
        )  # fmt: skip
        check_supported(family, call, is_supported, monkeypatch)


@pytest.mark.parametrize(
    "given",
    [{"alibi_slopes": torch.ones(3)}, {"out_scale": 0.0}, {"k_scale": 1.0}],
)
def test_an_option_is_noticed_whatever_its_value(given: dict[str, Any]) -> None:
    """A tensor compared with None is neither true nor false, and 0 is not None."""
    others = planes.get_other_options
    count = len(planes.OTHER_OPTIONS)
    assert others(AttentionOptions()).count(None) == count
    assert others(AttentionOptions(**given)).count(None) == count - 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_windows_and_chunks_are_supported_except_over_the_prefix_of_a_cascade(
    name: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = build(BatchPlan((8,), (8,), head_size=128, dtype=BF16))
    options = AttentionOptions(causal=causal, **{name: 5})
    call = to_call(batch, *batch.fresh(), options)
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    monkeypatch.setattr(cascade, "is_hopper", lambda device: True)
    assert family.supports(call)
    assert not cascade.supports(call)
    assert cascade.supports(call._replace(options=AttentionOptions(causal=causal)))


def plan_sizes(key_size: int, value_size: int, **options: Any) -> PrefillPlan:
    """Return the plan of a causal call with such head sizes, with the options of each family."""
    size = max(key_size, value_size)
    batch = build_alike(BatchPlan((8,), (8,), head_size=size, dtype=BF16))
    batch = replace(
        batch,
        query=batch.query[..., :key_size],
        key_cache=batch.key_cache[..., :key_size],
        value_cache=batch.value_cache[..., :value_size],
    )
    out, lse = batch.fresh()
    call = to_call(
        batch, out[..., :value_size], lse, AttentionOptions(causal=True, **options)
    )
    return family.plan(call)


@pytest.mark.parametrize("head_size", [4, 12, *range(8, 257, 8), 264])
def test_head_sizes_are_multiples_of_eight(
    head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = build_alike(BatchPlan((8,), (8,), head_size=head_size, dtype=BF16))
    call = to_call(batch, *batch.fresh())
    is_supported = head_size % 8 == 0 and head_size <= 256
    check_supported(family, call, is_supported, monkeypatch)


@pytest.mark.parametrize("head_size", range(8, 257, 8))
def test_products_take_the_columns_of_a_head_and_few_more(head_size: int) -> None:
    """Those of a query and key are rounded up to 16; 40 columns of an accumulator to 64."""
    config = plan_sizes(head_size, head_size).config
    tile, tail = key_columns.fn(config, False), key_columns.fn(config, True)
    parts = [*tile, *((config.KEY_DIM + first, size) for first, size in tail)]
    multiplied = [first + i for first, size in parts for i in range(size)]
    assert multiplied == list(range(-(-head_size // 16) * 16))
    acc = acc_columns.fn(config)
    assert [first + i for first, size in acc for i in range(size)] == list(
        range(sum(size for _, size in acc))
    )
    assert len(acc) <= 3 and all(size in (16, 32, 64, 128, 256) for _, size in acc)
    columns = sum(size for _, size in acc)
    assert head_size <= columns <= max(16, head_size * 8 // 5)
    # no part crosses from the tile into its tail
    for first, size in acc:
        assert (first < config.HEAD_DIM) == (first + size <= config.HEAD_DIM)
    assert acc_columns.fn(with_whole_acc(config)) == ((0, pad(head_size)),)


def pad(head_size: int) -> int:
    """Return the columns of an accumulator that has one part."""
    return next(size for size in (64, 128, 256) if head_size <= size)


@pytest.mark.parametrize("key_size", [8, 64, 72, 96, 128, 136, 192, 200, 256])
@pytest.mark.parametrize("value_size", [8, 64, 72, 96, 104, 128, 136, 192, 200, 256])
def test_the_tiles_of_every_pair_of_head_sizes_fit_into_shared_memory(
    key_size: int, value_size: int
) -> None:
    """Of a block's 232,448 bytes, 3 KiB are left to work items and mbarriers."""
    for window in (0, 100):
        options = {"sliding_window": window} if window else {}
        base = plan_sizes(key_size, value_size, **options).config
        for config in (base, with_whole_acc(base)):
            columns = config.KEY_DIM + config.TAIL_DIM
            columns += config.HEAD_DIM + config.V_TAIL_DIM
            elements = config.STAGES * config.BLOCK_N * columns
            rows = count_q_stages.fn(config) * config.CONSUMERS * WARPGROUP_M.value
            elements += rows * sum(q_columns.fn(config))
            assert 2 * elements <= 232448 - (3 << 10), config


@pytest.mark.parametrize("has_heads_first", [False, True])
@pytest.mark.parametrize("head_size", [24, 80, 96, 112, 160, 200])
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
            cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches
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


def test_keys_of_192_and_values_of_128_have_maps_of_rows_and_columns() -> None:
    plan = plan_sizes(192, 128)
    config = plan.config
    assert (config.KEY_DIM, config.TAIL_DIM) == (128, 64)
    assert (config.HEAD_DIM, config.V_TAIL_DIM) == (128, 0)
    # queries in columns of 64, outputs in rows of a value
    assert plan.boxes[0] == (64, 64) and plan.boxes[3] == (64, 128)


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
        (160, {}, 64),
        (192, {}, 128),
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


@pytest.mark.parametrize(
    ("group", "kv_heads", "fused", "rows_per_token"),
    [
        (71, 1, False, 71), (48, 1, False, 48), (128, 1, False, 128),
        # whole tokens fill a tile, or most of it
        (64, 1, False, 1), (32, 1, False, 1), (24, 1, False, 1),
        # rows have several strides
        (71, 2, False, 1), (71, 1, True, 1),
    ],
)  # fmt: skip
def test_many_heads_of_one_kv_head_are_rows_of_one_stride(
    group: int, kv_heads: int, fused: bool, rows_per_token: int
) -> None:
    plan = BatchPlan(
        (9,),
        (9,),
        group=group,
        kv_heads=kv_heads,
        head_size=64,
        dtype=BF16,
        fused=fused,
    )
    batch = build(plan)
    call = to_call(batch, *batch.fresh())
    made = family.plan(call)
    assert rows_per_token == made.config.ROWS_PER_TOKEN
    assert family.plan(call, may_cut_tokens=False).config.ROWS_PER_TOKEN == 1
    if rows_per_token == 1:
        return
    assert made.config.GROUP == 1 and made.packed is None
    # of a call with other tokens than the first one
    query = torch.zeros(11, group, 64, dtype=BF16)
    found = made.describe(0, query, made.extra_rows(query, call.key)[0])
    assert list(found.shape) == [11 * group, 64] and list(found.strides) == [64, 1]


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
    place = "pagetwin.optimized.kernels.sm90.prefill.plan.count_processors"
    monkeypatch.setattr(place, lambda device: 132)
    keep: Any = lambda *given: launches.append(given)  # noqa: E731
    keep.is_ready = False
    keep.load = lambda *_: True
    for own_plan in (made, made.packed):
        if own_plan is not None:
            own_plan.launcher = keep
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

"""Tables of a device: the default ones are the recorded constants, and results follow from none."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized import WarmUpSpec, load_tuning, paged_attention, warm_up
from pagetwin.optimized.dispatch import dispatch
from pagetwin.optimized.kernels.portable.host import tuning
from pagetwin.optimized.kernels.portable.host.cascade import (
    PortablePrefixPlan,
    choose_rest,
)
from pagetwin.optimized.kernels.portable.host.cost import Rates
from pagetwin.optimized.kernels.portable.host.plans import (
    PortableAppendPlan,
    PortableDecodePlan,
    PortablePrefillPlan,
)
from pagetwin.optimized.kernels.portable.host.tuning import (
    Thresholds,
    Tiles,
    choose_tiles,
)
from pagetwin.optimized.kernels.portable.tables.active_tables import (
    ActiveTables,
    activate,
    find_tables,
    trying,
)
from pagetwin.optimized.kernels.portable.tables.kernel_tables import (
    DEFAULT,
    KernelTables,
    TileKey,
)
from pagetwin.optimized.runtime import attention_call
from pagetwin.optimized.runtime.cost_layer import BatchBounds, describe_layer
from pagetwin.optimized.runtime.launcher import Launcher
from pagetwin.optimized.tuning.candidates import TileSpace
from pagetwin.optimized.tuning.trial import PreparedCase
from pagetwin.tools.bench.accuracy import expect_all
from pagetwin.tools.bench.inputs import Inputs, draw_inputs
from pagetwin.tools.bench.workloads import Workload
from pagetwin.tools.tune.jobs import TunedLayer
from pagetwin.tools.tune.layers import LayerSizes
from support.forced_choices import no_launch_for_all, one_launch_for_all
from support.thresholds import OF_A_CHIP
from support.twins import WITHOUT_GPU

CPU = torch.device("cpu")
KEY = TileKey("prefill", 0, 32, 32, 2, "auto", True, ())
KEYS = {
    "decode": KEY._replace(role="decode", rows=16),
    "small batch": KEY._replace(role="small batch", rows=16),
    "append": KEY._replace(role="append", rows=32),
    "prefill": KEY,
}
"""Keys of the batches below, in the interpreter."""
DEFAULTS = {role: Tiles(key.rows or 32, 32, 4, 1) for role, key in KEYS.items()}

LARGE, SMALL = 227 * 1024, 99 * 1024
# bytes of shared memory, elements of a head, dtype: tiles of decodes, of few decodes, of prefills
RECORDED = [
    (LARGE, 64, torch.bfloat16, ((16, 128, 4, 5), (16, 128, 4, 5), (128, 64, 4, 3))),
    (LARGE, 128, torch.bfloat16, ((16, 128, 4, 3), (16, 128, 4, 5), (128, 64, 4, 3))),
    (LARGE, 256, torch.bfloat16, ((16, 64, 4, 3), (16, 64, 4, 5), (64, 64, 8, 2))),
    (LARGE, 512, torch.bfloat16, ((16, 32, 4, 2), (16, 32, 4, 2), (32, 32, 8, 2))),
    (LARGE, 64, torch.float32, ((16, 64, 8, 2), (16, 64, 8, 2), (64, 32, 8, 2))),
    (SMALL, 64, torch.bfloat16, ((16, 64, 4, 5), (16, 64, 4, 5), (64, 64, 4, 2))),
    (SMALL, 128, torch.bfloat16, ((16, 64, 4, 3), (16, 64, 4, 5), (64, 32, 4, 2))),
    (SMALL, 256, torch.bfloat16, ((16, 32, 4, 2), (16, 32, 4, 2), (32, 32, 4, 1))),
    (SMALL, 128, torch.float32, ((16, 32, 8, 2), (16, 32, 8, 2), (32, 32, 8, 1))),
]


@pytest.mark.parametrize(("memory", "size", "dtype", "tiles"), RECORDED)
def test_the_default_tiles_are_the_recorded_ones(
    memory: int,
    size: int,
    dtype: torch.dtype,
    tiles: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(shared_memory_per_block_optin=memory),
    )
    tuning._table.cache_clear()
    try:
        found = choose_tiles(size, dtype, torch.device("cuda", 7), has_window=False)
    finally:
        tuning._table.cache_clear()
    assert found == tuple(Tiles(*numbers) for numbers in tiles)


def test_the_default_rates_and_limits_are_the_recorded_ones() -> None:
    assert Rates() == Rates((0.7e6, 1.1e6, 1.8e6, 3.2e6), 40.0, 35.0, 1.0)
    assert Thresholds(512, 20, 1024, 1.5) == replace(
        OF_A_CHIP, short_rest_keys=1024, short_rest_programs=tuning.SHORT_REST_PROGRAMS
    )
    assert KernelTables() == DEFAULT and DEFAULT.fingerprint == "default"


def test_the_fingerprint_follows_from_the_contents() -> None:
    tiles = Tiles(16, 64, 4, 3)
    one = DEFAULT.with_tiles(KEYS["decode"], tiles).with_tiles(KEY, tiles)
    other = DEFAULT.with_tiles(KEY, tiles).with_tiles(KEYS["decode"], tiles)
    assert one.fingerprint == other.fingerprint != "default"
    faster = replace(one, rates=replace(one.rates, split_us=20.0))
    assert len({one.fingerprint, faster.fingerprint, "default"}) == 3


@st.composite
def drawn_tables(draw: st.DrawFn) -> KernelTables:
    """Return tables with any valid tiles, thresholds and rates."""
    tables = KernelTables(
        thresholds=Thresholds(
            min_segment=draw(st.sampled_from((16, 32, 128))),
            short_tiles=draw(st.sampled_from((1, 2, 8))),
        ),
        rates=Rates(split_us=draw(st.sampled_from((1.0, 40.0, 400.0)))),
    )
    for role, key in KEYS.items():
        grid = TileSpace(key, DEFAULTS[role], 1, 0).grid()
        tables = tables.with_tiles(key, draw(st.sampled_from(grid)))
    return tables


def draw_batch(query_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Inputs:
    workload = Workload(
        "drawn", "decode", "", query_lens, kv_lens, 4, 2, 32,
        dtype=torch.float16, kv_dtype=torch.float16,
    )  # fmt: skip
    return draw_inputs(workload, 1, CPU)


def attend(inputs: Inputs, **options: Any) -> torch.Tensor:
    return paged_attention(
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_table,
        inputs.query_start_loc, inputs.seq_lens, inputs.max_query_len,
        inputs.max_seq_len, out=inputs.fresh(), options=AttentionOptions(**options),
    )  # fmt: skip


BATCHES = [
    draw_batch((1,), (70,)),
    draw_batch((1, 1, 1, 1, 1), (5, 33, 64, 17, 40)),
    draw_batch((20, 1, 35), (33, 40, 35)),
]


@WITHOUT_GPU
@settings(max_examples=8)
@given(drawn_tables(), st.sampled_from(BATCHES), st.booleans())
def test_attention_with_any_tables_is_within_its_error_budget(
    tables: KernelTables, inputs: Inputs, is_one_launch: bool
) -> None:
    forced = one_launch_for_all if is_one_launch else no_launch_for_all
    with trying(tables), forced():
        out = attend(inputs)
    finding = expect_all(inputs).check(out, torch.float16)
    assert finding.ok, finding.message


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Let the device have the default tables again afterwards."""
    yield
    load_tuning(None, CPU)


@WITHOUT_GPU
def test_batch_invariant_rows_have_the_same_bits_with_any_tables(
    unloaded: None,
) -> None:
    inputs = BATCHES[2]
    expected = attend(inputs, batch_invariant=True)
    tables = replace(
        DEFAULT.with_tiles(KEY, Tiles(16, 16, 4, 1)), thresholds=Thresholds(16, 1)
    )
    activate(CPU, ActiveTables(tables))
    assert find_tables(CPU) is tables
    assert torch.equal(attend(inputs, batch_invariant=True), expected)
    # with other tiles other rows are rounded
    assert not torch.equal(attend(inputs), expected)


def key_widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that gets kernel and BLOCK_N of each launch from now on."""
    found: list[tuple[str, int]] = []
    launch = Launcher.__call__

    def note(self: Launcher, *arguments: Any, **named: Any) -> None:
        found.append((self.name, self._fixed["config"].BLOCK_N))
        launch(self, *arguments, **named)

    monkeypatch.setattr(Launcher, "__call__", note)
    return found


@WITHOUT_GPU
def test_no_plan_outlives_the_tables_that_it_was_made_from(
    monkeypatch: pytest.MonkeyPatch, unloaded: None
) -> None:
    # plans are kept, as they are of compiled kernels
    monkeypatch.setattr(attention_call, "INTERPRETED", False)
    inputs, launched = BATCHES[0], key_widths(monkeypatch)
    load_tuning(None, CPU)
    tables = DEFAULT.with_tiles(KEYS["small batch"], Tiles(16, 64, 4, 1))
    attend(inputs)
    made = len(dispatch.PIPELINE.plans)
    attend(inputs)
    assert made == len(dispatch.PIPELINE.plans) == 1
    before = dispatch.PIPELINE.plans
    activate(CPU, ActiveTables(tables))
    dispatch.PIPELINE.forget_plans()
    assert len(before) == 1 and len(dispatch.PIPELINE.plans) == 0
    attend(inputs)
    load_tuning(None, CPU)
    attend(inputs)
    assert [width for _, width in launched] == [32, 32, 64, 32]


@WITHOUT_GPU
def test_a_warm_up_compiles_what_calls_with_the_tables_launch(
    monkeypatch: pytest.MonkeyPatch, unloaded: None
) -> None:
    launched: set[tuple[str, str]] = set()

    def note(self: Launcher, *arguments: Any, **named: Any) -> None:
        constants = {"config", "plan", "SPLIT_SIZE"} & set(self._fixed)
        fixed = [(name, self._fixed[name]) for name in sorted(constants)]
        launched.add((self.name, repr((fixed, self._chosen))))

    monkeypatch.setattr(Launcher, "__call__", note)
    caches = torch.zeros(2, 40, 16, 2, 32, dtype=torch.float16)
    spec = WarmUpSpec(
        key_cache=caches[0], value_cache=caches[1], num_query_heads=4,
        max_num_reqs=40, max_query_len=60, max_seq_len=500,
    )  # fmt: skip
    warmed = {}
    tables = replace(
        DEFAULT.with_tiles(KEYS["decode"], Tiles(16, 16, 8, 2, 3))
        .with_tiles(KEYS["small batch"], Tiles(16, 64, 2, 3, 2))
        .with_tiles(KEYS["append"], Tiles(32, 16, 4, 2, 1))
        .with_tiles(KEY, Tiles(64, 16, 8, 1)),
        thresholds=Thresholds(min_segment=128, short_tiles=5),
    )
    for name, active in (("default", DEFAULT), ("tuned", tables)):
        activate(CPU, ActiveTables(active))
        launched.clear()
        warm_up(spec)
        warmed[name] = set(launched)
        launched.clear()
        for reqs in (1, 2, 9, 40):
            for query_len, keys in ((1, 20), (1, 400), (3, 90), (50, 480)):
                lens = torch.arange(reqs + 1, dtype=torch.int32)
                paged_attention(
                    caches.new_zeros(reqs, 4, 32), *caches,
                    torch.zeros(reqs, 32, dtype=torch.int32), lens,
                    torch.ones(reqs, dtype=torch.int32), query_len, keys,
                )  # fmt: skip
        assert launched and launched <= warmed[name]
    assert not warmed["default"] & warmed["tuned"]


@WITHOUT_GPU
def test_a_plan_has_all_that_its_tables_say_after_others_are_loaded() -> None:
    layer = TunedLayer(LayerSizes(4, 2, 32), "float16", "auto", 1 << 30, 4, True)
    call = PreparedCase(layer.cases([((3, 1, 40),)])[0]).call
    tables = KernelTables(
        tiles=((KEYS["decode"], Tiles(16, 16, 4, 1, 3)),),
        thresholds=Thresholds(64, 5, 16, 0.5),
        rates=Rates((1e6, 2e6, 3e6, 4e6), 7.0, 5.0, 2.0),
    )
    with trying(tables):
        decode, append = PortableDecodePlan(call), PortableAppendPlan(call)
        prefill, prefix = PortablePrefillPlan(call), PortablePrefixPlan(call)
    launcher, block_n, segments = decode.launches.decode(40, 1, 1, 4000)
    assert launcher._fixed["plan"].MIN_TILES == 64 // 16
    assert (block_n, segments) == (16, 4 * 3 // 2)
    # one request has two programs per KV head, with twice as many tiles at most
    tile = decode.launches.small_batch_tiles.block_n
    assert decode.launches.short_splits(1, 4, 2 * 2 * 5 * tile) == (2, 1)
    assert decode.launches.short_splits(1, 4, 2 * 2 * 5 * tile + 1) == (0, 1)
    layer_of_call, bounds = describe_layer(call), BatchBounds(3, 24, 8, 400)
    default = Rates()
    for plan in (append, prefill, prefix):
        found = plan.estimate(layer_of_call, bounds).time
        with trying(DEFAULT):
            assert plan.estimate(layer_of_call, bounds).time == found
            other = type(plan)(call).estimate(layer_of_call, bounds).time
        assert found < other, type(plan)
    assert tables.rates.flops(64) == 3e6 and default.flops(64) == 1.8e6
    rest = append.launches
    grids = [
        choose_rest(rest, call, rest.row_tiles[0].block_m, length, False)
        for length in (16, 17)
    ]
    # three requests have programs of their own up to 16 keys
    assert [grid.reqs for grid in grids] == [3, 1]

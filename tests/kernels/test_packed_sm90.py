"""Query tiles of whole tokens in the Hopper prefill kernel, for groups that do not divide 64.

Most results are those of the interpreter (gluon_interpreter), where a row without a token has NaN.
Groups of 3, 5 and 7 in test_prefill_sm90.py, which needs a GPU, have such tiles too.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cost_layers import LLAMA
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.common.config import WARPGROUP_M
from pagetwin.optimized.kernels.sm90.prefill import family, packed
from pagetwin.optimized.kernels.sm90.prefill.cost import (
    estimate_hopper_prefill,
    packed_tokens,
    packs_heads,
)
from pagetwin.optimized.kernels.sm90.prefill.packed import PackedPlan
from pagetwin.optimized.runtime import launcher as launcher_module
from pagetwin.optimized.runtime.cost_layer import BatchBounds
from pagetwin.optimized.runtime.launcher import Launcher
from pagetwin.optimized.warm_up import warm_up
from pagetwin.optimized.warm_up.warm_up_spec import WarmUpSpec
from support.compiler_process import json_lines
from support.hopper import (
    BF16,
    FP16,
    UNLIKE,
    Case,
    check,
    make_batch,
    plan_of,
    pretend_hopper,
)  # fmt: skip
from support.hopper_checks import check_orders
from support.sm90_calls import assert_right, build, needs_hopper, own_counters, to_call

pytestmark = pytest.mark.long

__all__ = ["own_counters"]
GROUPS = (3, 5, 6, 7)


@pytest.fixture
def packed_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Choose tiles of whole tokens for requests of any length, and note the heads per launch."""
    launched: list[int] = []
    launch = PackedPlan.launch_with_maps

    def note(plan: PackedPlan, *args: Any, **named: Any) -> None:
        launched.append(plan.config.GROUP)
        launch(plan, *args, **named)

    monkeypatch.setattr(PackedPlan, "launch_with_maps", note)
    monkeypatch.setattr(PackedPlan, "is_chosen", lambda plan, max_query_len: True)
    return launched


def edges(group: int) -> tuple[int, ...]:
    """Return lengths on both sides of the edges of a warpgroup and of a tile with two."""
    tokens = WARPGROUP_M.value // group
    return (tokens, tokens + 1, 2 * tokens, 2 * tokens + 1, 1, 0, 3 * tokens - 1)


CASES = {
    **{
        f"groups of {group}, tile edges": Case(
            "prefill",
            plan_of(
                edges(group),
                tuple(length + 120 - 7 * i for i, length in enumerate(edges(group))),
                128,
                group=group,
                needle="last",
            ),
        )
        for group in GROUPS
    },
    **{
        f"groups of {group}, window, sinks": Case(
            "prefill",
            plan_of((25, 40), (330, 140), 128, group=group, needle="tile edge"),
            {"sliding_window": 100, "sinks": True},
        )
        for group in GROUPS
    },
    **{
        f"groups of {group}, fewer keys than queries": Case(
            "prefill",
            plan_of((30, 25), (30, 25), 128, group=group),
            {"causal": False},
            has_lse=False,
            seq_lens=(9, 0),
        )
        for group in GROUPS
    },
    "two KV heads, padding, layouts": Case(
        "prefill", plan_of((13, 3), (140, 9), 128, group=5, kv_heads=2, padding=7, **UNLIKE)
    ),
    "many work items": Case(
        "prefill",
        plan_of((26,) * 5, (70, 150, 30, 260, 26), 128, group=5, kv_heads=2, dtype=FP16),
    ),
    "head size 64": Case(
        "prefill", plan_of((36, 37, 12), (150, 200, 12), 64, group=5, kv_heads=2)
    ),
    "head size 64, window, sinks": Case(
        "prefill", plan_of((40,), (300,), 64, group=7, needle="first new"),
        {"sliding_window": 70, "sinks": True},
    ),
    "head size 80, two KV heads": Case(
        "prefill", plan_of((37, 36), (150, 70), 80, group=5, kv_heads=2, padding=2)
    ),
    "head size 96": Case("prefill", plan_of((64, 5), (150, 70), 96, group=3)),
    "head size 112": Case("prefill", plan_of((25,), (150,), 112, group=5, kv_heads=2)),
    "head size 256": Case("prefill", plan_of((25, 9), (150, 60), 256, group=6, kv_heads=2)),
    "chunks": Case(
        "prefill", plan_of((40,), (290,), 128, group=5), {"attention_chunk_size": 100}
    ),
    "soft cap": Case(
        "prefill", plan_of((25,), (150,), 128, group=5), {"logits_soft_cap": 3.0}, False
    ),
    "soft cap, sinks, log-sum-exp": Case(
        "prefill", plan_of((25,), (150,), 128, group=7),
        {"logits_soft_cap": 3.0, "sinks": True},
    ),
    "scales": Case(
        "prefill", plan_of((25,), (150,), 128, group=5, kv_heads=2, **UNLIKE),
        has_scales=True,
    ),
    "ragged keys, not causal": Case(
        "prefill", plan_of((25, 5), (150, 130), 128, group=5), {"causal": False},
        is_ragged=True,
    ),
    "more heads than half of the rows": Case(
        "prefill", plan_of((3, 2), (150, 20), 128, group=33)
    ),
    "twelve heads": Case("prefill", plan_of((11, 10), (150, 20), 128, group=12)),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the run without a GPU")
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_within_its_error_budget(
    name: str,
    reference: Any,
    packed_launches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pretend_hopper(monkeypatch):
        check(CASES[name], reference)
    assert packed_launches == [CASES[name].plan.group]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the run without a GPU")
@pytest.mark.parametrize("group", GROUPS)
def test_a_query_without_a_visible_key_gets_zero(
    group: int, packed_launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence shorter than its queries: the first of them precede its first key."""
    plan = BatchPlan((40, 9), (40, 9), head_size=128, dtype=BF16, group=group)
    batch = replace(build(plan), seq_lens=torch.tensor([10, 0], dtype=torch.int32))
    found = []
    for is_packed in (True, False):
        monkeypatch.setattr(PackedPlan, "is_chosen", lambda *_, it=is_packed: it)
        out, lse = batch.fresh()
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        with pretend_hopper(monkeypatch):
            family.plan(to_call(batch, out, lse)).launch_prefill(
                to_call(batch, out, lse), 0
            )
        assert bool((out[:30] == 0).all() and (lse[:, :30] == -torch.inf).all())
        assert bool((out[40:] == 0).all() and (lse[:, 40:] == -torch.inf).all())
        found.append((out, lse))
    assert packed_launches == [group]
    for one, other in zip(*found, strict=True):
        assert same_bits(one, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the run without a GPU")
@pytest.mark.parametrize("lateness", [0.0, 1.0])
@pytest.mark.parametrize("name", ["many work items", "head size 64"])
@pytest.mark.usefixtures("packed_launches")
def test_the_order_of_roles_programs_and_copies_changes_no_bit(
    name: str, lateness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_orders(CASES[name], lateness, monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the run without a GPU")
@pytest.mark.usefixtures("packed_launches")
def test_an_output_of_float32_has_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is stored row by row, where a whole tile has rows without a token."""
    batch = make_batch(CASES["two KV heads, padding, layouts"])
    found = []
    for dtype in (BF16, torch.float32):
        out, lse = batch.fresh()
        out = torch.full(out.shape, float("nan"), dtype=dtype)
        with pretend_hopper(monkeypatch):
            call = to_call(batch, out, lse)
            family.plan(call).launch_prefill(call, 0)
        found.append((out.float(), lse))
    torch.testing.assert_close(*(out for out, _ in found), atol=0.0, rtol=2**-8)
    assert same_bits(*(lse for _, lse in found))


@needs_hopper
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group", [*GROUPS, 12, 33])
def test_every_row_is_within_its_error_budget_on_a_gpu(
    group: int, head_size: int, packed_launches: list[int], reference: Any
) -> None:
    """Triton's types declare other boxes than the tensor maps have."""
    lens = (*edges(group), 300)
    plan = BatchPlan(
        lens,
        tuple(length + 120 - 7 * i for i, length in enumerate(lens)),
        head_size=head_size,
        group=group,
        dtype=BF16,
        needle="last",
        padding=3,
    )
    assert_right(build(plan, "cuda"), reference)
    # the second launch has kept tensor maps
    assert packed_launches == [group] * 2


def make(group: int, head_size: int = 128, **given: Any) -> Any:
    """Return the plan of calls, and one of the calls."""
    plan = BatchPlan((9,), (9,), group=group, head_size=head_size, dtype=BF16, **given)
    batch = build(plan)
    call = to_call(batch, *batch.fresh())
    return family.plan(call), call


@pytest.mark.quick
@pytest.mark.parametrize(
    ("group", "head_size", "is_packed"),
    [
        (1, 128, False), (4, 128, False), (64, 128, False), (65, 128, False),
        (3, 192, False), (3, 64, True), (5, 128, True), (33, 80, True), (7, 256, True),
    ],
)  # fmt: skip
def test_a_group_that_does_not_divide_the_rows_has_two_plans(
    group: int, head_size: int, is_packed: bool
) -> None:
    made, _ = make(group, head_size)
    assert (made.packed is not None) == is_packed
    if made.packed is not None:
        assert made.config.GROUP == 1
        assert made.packed.config == made.config._replace(GROUP=group)


@pytest.mark.quick
@pytest.mark.parametrize("group", [3, 5, 6, 7, 12, 33])
@pytest.mark.parametrize("tile_rows", [128, 192])
def test_the_plan_with_fewer_tiles_is_chosen(group: int, tile_rows: int) -> None:
    tokens = packed_tokens(group, tile_rows)
    assert tokens == tile_rows // 64 * (64 // group)
    for length in range(1, 700):
        tiles = -(-length // tokens), group * -(-length // tile_rows)
        assert packs_heads(group, length, tile_rows) == (tiles[0] <= tiles[1])
    assert packs_heads(group, tokens, tile_rows)
    assert not packs_heads(group, 64 * tile_rows, tile_rows)


@pytest.mark.parametrize("group", [3, 5, 7])
def test_the_cost_model_estimates_the_plan_that_is_chosen(group: int) -> None:
    layer = replace(LLAMA, group_size=group, kv_heads=8)
    for length, keys in ((37, 562), (24, 624), (100, 2000), (128, 128), (1024, 1024)):
        times = [
            estimate_hopper_prefill(
                layer, BatchBounds(28, 28 * length, length, keys), has_packed
            )
            for has_packed in (True, False)
        ]
        if packs_heads(group, length, 128):
            tokens = packed_tokens(group, 128)
            fewer = -(-length // tokens) < group * -(-length // 128)
            assert times[0] < times[1] if fewer else times[0] <= times[1]
        else:
            assert times[0] == times[1]


@pytest.mark.quick
def test_a_box_has_the_heads_of_a_kv_head_and_a_type_has_powers_of_two() -> None:
    made, call = make(5, padding=3)
    for index, tensor in ((0, call.query), (3, call.out)):
        found = made.packed.describe(index, tensor, 0)
        assert list(found.block_shape) == [8, 8, 128]
        assert found.true_box == (12, 5)
        assert list(found.shape) == [12, 10, 128]
    assert not hasattr(made.packed.describe(1, call.key, 0), "true_box")


@pytest.mark.quick
@pytest.mark.parametrize("sizes", [[8, 8, 64], [8, 8, 32]])
def test_a_tensor_map_is_encoded_with_the_true_box(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, call = make(5)
    kinds: list[Any] = []

    def encode(descriptor: Any, kind: Any) -> list[int]:
        kinds.append((descriptor, kind))
        return [1]

    monkeypatch.setattr(launcher_module, "_find_encoder", lambda: (encode, ()))
    plan = made.packed
    plan.launcher._map_kinds = [{"block_size": list(sizes), "swizzle": 3}] * 4
    for index, tensor in enumerate((call.query, call.key, call.value, call.out)):
        descriptor = plan.describe(index, tensor, 0)
        assert plan.launcher.encode(index, descriptor) == [1]
    boxes = [kind["block_size"] for _, kind in kinds]
    assert boxes == [[12, 5, sizes[-1]], sizes, sizes, [12, 5, sizes[-1]]]
    assert plan.launcher._map_kinds[0]["block_size"] == sizes


@pytest.mark.quick
@pytest.mark.parametrize("is_known", [False, True])
def test_a_kernel_that_cannot_be_launched_with_such_maps_is_not_launched(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan with one query head per tile computes the call, and all later ones."""
    made, call = make(5)
    monkeypatch.setattr(launcher_module, "INTERPRETED", False)
    monkeypatch.setattr(launcher_module, "current_device", lambda: 0)
    monkeypatch.setattr(launcher_module, "current_stream", lambda device: 0)
    place = "pagetwin.optimized.kernels.sm90.prefill.plan"
    monkeypatch.setattr(f"{place}.count_processors", lambda device: 132)
    started: list[Any] = []
    direct = SimpleNamespace(device=0, start=lambda *given: started.append(given))
    monkeypatch.setattr(
        launcher_module, "find_direct_launch", lambda *_: direct if is_known else None
    )
    kinds = [{"block_size": [8, 8, 64]}] * 4
    compiled = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=kinds))
    kernel = SimpleNamespace(
        warmup=lambda *args, **named: compiled,
        arg_names=PackedPlan.kernel.arg_names,
    )
    made.packed.launcher._kernel = kernel
    monkeypatch.setattr(Launcher, "encode", lambda self, index, descriptor: [index])
    alone: list[Any] = []
    made.launcher = lambda *given: alone.append(given)
    made.launcher.is_ready = False  # type: ignore[attr-defined]
    for _ in range(2):
        made.launch_prefill(call, 0)
    assert len(started) == 2 * is_known and len(alone) == 2 * (not is_known)
    assert (made.packed is not None) == is_known
    if is_known:
        grid, _, (*maps, first) = started[0][0], *started[0][1:2], started[0][2][:5]
        assert maps == [0, 1, 2, 3] and first == call.out.data_ptr()
        # a tile of 24 tokens and one that is not full, of two KV heads
        assert grid == (2, 1, 1)


@pytest.mark.quick
@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that it has a GPU")
def test_the_driver_gets_the_true_box_at_the_first_launch_and_in_repeated_calls(
    tmp_path: Path,
) -> None:
    script = Path(__file__).with_name("packed_launches.py")
    short, long = json_lines(script, tmp_path)
    assert short["true"] == [2, 2, 2] and short["type"] == [0, 0, 0]
    assert short["is_repeated"] and short["profiled"] == 0
    assert long["true"] == long["type"] == [0, 0, 0] and long["is_repeated"]


def test_a_profiler_gets_the_plan_that_triton_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its hooks are called by launches through Triton."""
    made, _ = make(5)
    assert made.packed.is_chosen(37)
    monkeypatch.setattr(packed, "is_profiled", lambda: True)
    assert not made.packed.is_chosen(37)


@pytest.mark.quick
@pytest.mark.parametrize("group", [4, 5, 12, 33])
@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("most", [4, 100, 128, 600, 1025, 5000])
def test_lengths_of_a_warm_up_choose_both_plans(
    most: int, least: int, group: int
) -> None:
    """Unless no length up to the longest one chooses the other plan."""
    made, _ = make(group)
    found = made.prefill_lens(least, most)
    assert found[-1] == most and all(least <= length <= most for length in found)
    if made.packed is None:
        assert len(found) == 1
        return
    chosen = [made.packed.is_chosen(length) for length in range(least, most + 1)]
    assert [made.packed.is_chosen(length) for length in found[::-1]] == [
        chosen[-1],
        *({*chosen} - {chosen[-1]}),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the run without a GPU")
def test_a_warm_up_of_groups_of_five_compiles_both_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[int] = []
    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    monkeypatch.setattr(
        Launcher,
        "__call__",
        lambda launcher, *given: (
            launched.append(launcher._fixed["config"].GROUP)
            if launcher.name == "prefill_kernel"
            else None
        ),
    )
    monkeypatch.setattr(
        "pagetwin.optimized.kernels.sm90.prefill.plan.count_processors",
        lambda device: 132,
    )
    cache = torch.zeros(2, 6, 16, 2, 128, dtype=BF16)
    spec = WarmUpSpec(
        key_cache=cache[0], value_cache=cache[1], num_query_heads=10, max_num_reqs=2,
        max_query_len=600, max_seq_len=800, options=(AttentionOptions(),),
    )  # fmt: skip
    found = warm_up.launch_within(spec)
    prefills = [launch for launch in found if launch.kernel == "PrefillPlan"]
    assert {packs_heads(5, launch.max_query_len, 128) for launch in prefills} == {
        True,
        False,
    }
    # the first call validates, and is launched too
    assert sorted(launched[1:]) == [1, 1, 5]


# microseconds with all heads of a token in a tile and with one, by new tokens per request: 28, 51,
# 16, 48, 8, 4 and 8 requests (2026-11-24, on an H200)
TIMED: dict[int, dict[int, tuple[float, float]]] = {
    3: {
        37: (44.2, 76.3), 24: (66.3, 117.7), 64: (48.4, 60.9), 100: (276.5, 282.1),
        300: (42.1, 44.3), 1024: (77.4, 71.3), 2048: (390.4, 371.2),
    },
    5: {
        37: (57.8, 107.6), 24: (69.5, 174.1), 64: (62.9, 90.2), 100: (432.3, 444.0),
        300: (60.0, 64.5), 1024: (115.9, 106.1), 2048: (639.8, 595.4),
    },
    6: {
        37: (59.6, 126.8), 24: (90.2, 202.8), 64: (76.7, 105.2), 100: (427.3, 524.3),
        300: (61.5, 69.9), 1024: (133.6, 122.7), 2048: (760.7, 706.4),
    },
    7: {
        37: (45.9, 76.2), 24: (58.8, 125.6), 64: (45.9, 73.1), 100: (260.9, 324.7),
        300: (41.6, 48.0), 1024: (82.5, 78.5), 2048: (435.1, 422.9),
    },
}  # fmt: skip


@pytest.mark.parametrize("group", TIMED)
def test_the_faster_query_tiles_are_chosen(group: int) -> None:
    for tokens, (all_heads, one_head) in TIMED[group].items():
        assert packs_heads(group, tokens, 128) == (all_heads < one_head), tokens

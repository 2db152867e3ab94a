"""Few decodes with many query heads per KV head: parts of the heads have programs of their own."""

from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.options import paged_call, quantised_call
from pagetwin.conformance.checks.coded_caches import coded_call
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.dispatch import dispatch
from pagetwin.optimized.dispatch.choice import AttentionPlan
from pagetwin.optimized.kernels.portable.host import make_launches
from pagetwin.optimized.kernels.portable.host.decode_sizes import count_parts
from pagetwin.optimized.kernels.portable.host.plans import (
    DecodeGrid,
    PortableDecodePlan,
)
from pagetwin.optimized.runtime.family import BatchLimits
from support.hopper_codes import to_family
from support.thresholds import set_thresholds

Grids = list[tuple[str, tuple[int, int, int]]]
FP16 = torch.float16


@pytest.mark.parametrize(
    ("group", "parts"),
    [(16, 1), (17, 1), (18, 2), (24, 2), (40, 4), (48, 3), (64, 4), (96, 1)],
)
def test_heads_that_share_a_kv_head_are_divided_into_equal_parts(
    group: int, parts: int
) -> None:
    assert count_parts(group) == parts


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Grids:
    """Return kernels and grids of decode launches on a chip that has room for all parts."""
    found: Grids = []
    choose = PortableDecodePlan.choose

    def note(*arguments: Any) -> DecodeGrid:
        decode = choose(*arguments)
        found.append((decode.launcher.name, decode.grid))
        return decode

    monkeypatch.setattr(PortableDecodePlan, "choose", note)
    monkeypatch.setattr(make_launches, "count_processors", lambda device: 132)
    # an append does not compute all requests of a batch with a long one
    monkeypatch.setattr(AttentionPlan, "choose", lambda *_: None)
    set_thresholds(monkeypatch, short_tiles=20, min_segment=512)
    dispatch.PIPELINE.plans.clear()
    return found


PARTED: dict[str, tuple[BatchPlan, dict[str, Any]]] = {
    "three parts": (BatchPlan((1,), (250,), kv_heads=1, group=48), {}),
    "parts of two kv heads": (BatchPlan((1, 1), (250, 190), kv_heads=2, group=24), {}),
    "parts of ten heads": (BatchPlan((1, 1), (199, 7), kv_heads=1, group=40), {}),
    "padding": (
        BatchPlan((1, 0, 1), (160, 33, 140), kv_heads=1, group=24, padding=5), {}
    ),
    "a long request": (BatchPlan((1, 5, 1), (260, 50, 140), kv_heads=2, group=20), {}),
    "sinks, slopes and a window": (
        BatchPlan((1,), (290,), kv_heads=2, group=32),
        {
            "sinks": torch.linspace(-2.0, 3.0, 64), "sliding_window": 150,
            "alibi_slopes": torch.linspace(0.1, 1.0, 64),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTED)
def test_every_row_of_parts_is_right(
    name: str, grids: Grids, device: torch.device
) -> None:
    plan, options = PARTED[name]
    needles = [
        (req, keys - 1) for req, keys in enumerate(plan.kv_lens) if plan.query_lens[req]
    ]
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    call = paged_call(plan, device, needles, **moved)
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))
    assert {grid[0] for _, grid in grids} == {plan.kv_heads * count_parts(plan.group)}
    assert {kernel for kernel, _ in grids} == {"short_decode_kernel"}


@pytest.mark.parametrize("form", ["int8_per_token_head", "a scale per head"])
def test_parts_read_the_scales_of_their_kv_head(
    form: str, grids: Grids, device: torch.device
) -> None:
    plan = BatchPlan((1, 1), (260, 140), kv_heads=2, group=24, dtype=FP16)
    call = paged_call(plan, device)
    if form in FORMATS:
        call = coded_call(call, FORMATS[form], 3)
    else:
        scales = torch.tensor([0.25, 2.0], device=device)
        call = quantised_call(call, torch.float8_e4m3fn, scales, scales.flip(0))
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))
    assert {grid[0] for _, grid in grids} == {4}


def test_a_warm_up_starts_the_kernel_of_parts_and_that_of_whole_groups(
    grids: Grids, device: torch.device
) -> None:
    """One key has no parts, many keys have, and many requests have not."""
    call = paged_call(BatchPlan((1,), (250,), kv_heads=1, group=48, dtype=FP16), device)
    plan = PortableDecodePlan(to_family(call)[0])
    warm = list(plan.bounds(BatchLimits(64, 1, 4096, 0)))
    assert {parts for _, parts in plan.launches.short_decodes} == {1, 3}
    kernels = {found.kernel for found in warm}
    started = {id(launcher) for launcher in plan.launches.short_decodes.values()}
    assert started <= kernels

"""Hopper's prefills with query tiles of one warpgroup: which batches have them, and their rows."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.code_prefill import family as code_prefill
from pagetwin.optimized.kernels.sm90.prefill import family
from pagetwin.optimized.kernels.sm90.prefill import plan as prefill_plan
from pagetwin.optimized.kernels.sm90.prefill.plan import NARROW, WIDE, PrefillPlan
from pagetwin.optimized.runtime import cost_layer
from pagetwin.optimized.runtime.attention_call import AttentionCall
from pagetwin.optimized.runtime.family import BatchLimits
from support.compile_prefill_sm90 import BF16
from support.hopper import CASES, check, pretend_hopper
from support.prefill_batches import BATCHES, OPTIONS
from support.sm90_calls import (
    assert_right,
    build,
    make_options,
    needs_hopper,
    own_counters,
)
from support.twins import Twin

__all__ = ["own_counters"]

NARROW_CASES = [
    name
    for name, case in CASES.items()
    # tiles of whole tokens have one width
    if name.startswith("prefill")
    and (64 % case.plan.group == 0 or case.plan.group > 64)
]
SHORT = (180, 215, 112, 262, 305, 139, 106, 94, 70, 265, 341, 208)
Lens = Sequence[int]
PROMPTS = (128,), (333,), (300,) * 4, SHORT, (1024,), (2048,), (1024,) * 4
MEASURED: list[tuple[Lens, Lens, bool]] = [
    *((lens, lens, True) for lens in PROMPTS),
    ((64,) * 16, (4096,) * 16, True), ((256,), (8192,), True),
    ((40,) * 8, (1500,) * 8, False), ((200,) * 8, (200,) * 8, False),
]  # fmt: skip
"""Batches: new tokens and keys of each request, and whether attention is causal."""
RATIOS: dict[tuple[int, int, int, int | None], list[float]] = {
    (32, 8, 128, None): [0.68, 0.79, 0.87, 0.92, 0.95, 1.18, 1.17, 1.21, 0.71, 1.08, 0.89],
    (64, 8, 64, None): [0.70, 0.76, 0.79, 0.90, 1.01, 1.28, 1.22, 1.28, 0.99, 1.21, 1.04],
    (16, 8, 256, None): [0.77, 0.85, 0.81, 0.93, 0.93, 0.93, 1.05, 1.18, 0.66, 0.84, 1.19],
    (32, 32, 96, None): [0.66, 0.77, 0.88, 0.86, 0.85, 1.19, 1.06, 0.77, 0.60, 0.80, 0.90],
    (12, 12, 64, None): [0.67, 0.65, 0.89, 0.82, 0.72, 0.88, 0.86, 0.61, 0.53, 0.65, 0.71],
    (32, 8, 128, 512): [0.76, 0.78, 0.94, 0.91, 0.95, 0.99, 1.09, 0.92, 0.66, 0.89, 0.92],
    (8, 4, 256, 512): [0.82, 0.74, 0.97, 0.85, 0.68, 0.95, 0.88, 0.67, 0.63, 0.66, 0.94],
}  # fmt: skip
"""Time with one warpgroup divided by that with all, by query heads, KV heads, head size and window,
for each of these batches (an H200, bfloat16, 2026-11-30)."""
LATENT_PROMPTS: list[tuple[int, Lens, float]] = [
    (16, SHORT, 0.88), (16, (333,), 0.74), (16, (2048,), 0.95), (32, SHORT, 0.99),
    (32, (333,), 0.85), (32, (300,) * 4, 0.88), (32, (2048,), 1.17), (128, SHORT, 1.08),
    (128, (333,), 0.96), (128, (2048,), 1.74),
]  # fmt: skip
"""The same of prompts with so many heads of 192 and 128."""
PACKED: dict[tuple[int, int, int], list[tuple[Lens, Lens, bool, float]]] = {
    (14, 2, 64): [
        ((333,), (333,), True, 0.56), (SHORT, SHORT, True, 0.82),
        ((64,) * 16, (4096,) * 16, True, 0.95), ((40,) * 8, (1500,) * 8, False, 0.58),
    ],
    (40, 8, 128): [
        ((333,), (333,), True, 0.79), (SHORT, SHORT, True, 1.02),
        ((64,) * 16, (4096,) * 16, True, 1.08), ((40,) * 8, (1500,) * 8, False, 1.39),
    ],
    (28, 4, 128): [
        ((333,), (333,), True, 0.76), ((300,) * 4, (300,) * 4, True, 0.89),
        ((64,) * 16, (4096,) * 16, True, 1.22), ((40,) * 8, (1500,) * 8, False, 1.08),
    ],
    (12, 2, 128): [
        ((333,), (333,), True, 0.65), ((200,) * 8, (200,) * 8, False, 0.78),
        ((64,) * 16, (4096,) * 16, True, 1.20), ((40,) * 8, (1500,) * 8, False, 0.69),
    ],
    (36, 4, 64): [
        ((333,), (333,), True, 0.70), ((1024,), (1024,), True, 0.84),
        ((64,) * 16, (4096,) * 16, True, 1.19), ((40,) * 8, (1500,) * 8, False, 1.20),
    ],
}  # fmt: skip
"""Time of narrow tiles of one head divided by that of tiles with all heads of a KV head."""


def make_call(
    lens: Lens,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    key_lens: Lens = (),
    causal: bool = True,
    **options: Any,
) -> AttentionCall:
    """Return a call without contents: lengths, query and KV heads, head sizes.

    Args:
        key_lens: keys of each request. If empty, the requests are prompts.
    """
    tokens, longest, most_keys = sum(lens), max(lens), max(key_lens or lens)
    blocks = -(-most_keys // 16)
    with torch.device("meta"):
        query = torch.empty(tokens, heads[0], sizes[0], dtype=BF16)
        cache = torch.empty(len(lens) * blocks, 16, heads[1], max(sizes), dtype=BF16)
        return AttentionCall(
            query, cache[..., : sizes[0]], cache[..., : sizes[1]],
            torch.empty(len(lens), blocks, dtype=torch.int32),
            torch.empty(len(lens) + 1, dtype=torch.int32),
            torch.empty(len(lens), dtype=torch.int32), longest, most_keys, 0.1,
            torch.empty(tokens, heads[0], sizes[1], dtype=BF16), None,
            AttentionOptions(causal=causal, **options),
        )  # fmt: skip


@pytest.fixture
def by_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the width follow from the bounds of a batch, on a chip of 132 multiprocessors."""
    monkeypatch.undo()
    monkeypatch.setattr(prefill_plan, "count_processors", lambda _: 132)


def loss(call: AttentionCall, ratio: float) -> float:
    """Return the time of the chosen width divided by that of the better one."""
    is_narrow = family.plan(call).prefers_narrow(call)
    return (ratio if is_narrow else 1.0) / min(1.0, ratio)


@pytest.mark.usefixtures("by_bounds")
def test_the_chosen_width_takes_the_least_time_of_nearly_all_batches() -> None:
    losses = [
        loss(make_call(lens, (heads, heads), (192, 128)), ratio)
        for heads, lens, ratio in LATENT_PROMPTS
    ]
    for (heads, kv_heads, size, window), ratios in RATIOS.items():
        for (lens, key_lens, causal), ratio in zip(MEASURED, ratios, strict=True):
            call = make_call(
                lens, (heads, kv_heads), (size, size), key_lens, causal,
                sliding_window=window,
            )  # fmt: skip
            losses.append(loss(call, ratio))
    assert len(losses) == 87
    assert max(losses) <= 1.2 and sum(number > 1.05 for number in losses) <= 5
    assert math.prod(losses) ** (1 / len(losses)) <= 1.01


@pytest.mark.usefixtures("by_bounds")
@pytest.mark.parametrize("heads", PACKED)
def test_narrow_tiles_of_one_head_are_chosen_where_they_are_faster_than_packed_ones(
    heads: tuple[int, int, int],
) -> None:
    for lens, key_lens, causal, ratio in PACKED[heads]:
        call = make_call(lens, heads[:2], (heads[2],) * 2, key_lens, causal)
        plan = family.plan(call)
        assert plan.find_packed(max(lens)) is not None
        assert loss(call, ratio) <= 1.23, (lens, ratio)
        if ratio < 0.8 or ratio > 1.1:
            assert plan.prefers_narrow(call) is (ratio < 1), (lens, ratio)


@pytest.mark.usefixtures("by_bounds")
@pytest.mark.parametrize("keys", [2048, 8192])
def test_short_requests_do_not_count_where_a_decode_computes_them(keys: int) -> None:
    """128 decodes and 2,048 new tokens took 1.12 times FlashAttention-3 with narrow tiles."""
    lens, key_lens = (1,) * 128 + (2048,), (4096,) * 128 + (keys,)
    call = make_call(lens, (32, 8), (128, 128), key_lens)
    assert not family.plan(call).prefers_narrow(call, 16)


@pytest.mark.usefixtures("by_bounds")
def test_a_width_is_estimated_once_per_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call((40,), (32, 8), (128, 128))
    made = family.plan(call)
    assert made.prefers_narrow(call)
    monkeypatch.setattr(prefill_plan, "takes_less_time", lambda *_: False)
    assert made.prefers_narrow(call)
    assert not made.prefers_narrow(call._replace(max_key_len=41))
    monkeypatch.setattr(prefill_plan, "MAX_WIDTHS", 2)
    assert not made.prefers_narrow(call._replace(max_key_len=42))
    assert not made.prefers_narrow(call), "the plan keeps more than its limit"


def test_a_plan_has_one_of_each_width_and_a_warm_up_launches_both() -> None:
    made = family.plan(make_call((40,), (32, 8), (128, 128)))
    assert made.narrow is not None and made.narrow.narrow is None
    assert made.narrow.config == made.config._replace(CONSUMERS=1)
    assert made.narrow.tile_rows == 64
    assert made.fitted().narrow is None
    bounds = list(made.bounds(BatchLimits(4, 512, 4096, 16)))
    assert [warm.task.division for warm in bounds] == [WIDE, NARROW]


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_warm_up_launches_boxes_of_8_rows_for_requests_that_are_not_copied(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The family before this one takes long requests, so a warm-up left these boxes out."""
    monkeypatch.setattr(cost_layer, "count_processors", lambda _: 132)
    call = make_call((40,), (32, 8), (128, 128))
    cache = torch.empty(512, block_size, 8, 128, dtype=BF16, device="meta")
    call = call._replace(key=cache, value=cache)
    copied = code_prefill.plan(call) if block_size == 8 else None
    left = [
        warm.max_query_len
        for warm in family.plan(call).bounds(BatchLimits(4, 2048, 4096, 16))
        if copied is None
        or not copied.takes(
            call._replace(max_query_len=warm.max_query_len, max_key_len=4096)
        )
    ]
    assert set(left) == ({5} if block_size == 8 else {2048})


@pytest.mark.parametrize(
    ("heads", "sizes", "options", "has_narrow"),
    [
        ((32, 8), (128, 128), {}, True), ((16, 16), (192, 128), {}, True),
        ((32, 8), (64, 64), {}, True), ((64, 8), (256, 256), {}, True),
        ((32, 8), (128, 128), {"sliding_window": 100}, True),
        ((32, 8), (128, 128), {"logits_soft_cap": 30.0}, True),
        # of one head, not of whole tokens
        ((10, 2), (128, 128), {}, True),
        # tiles that begin within a token
        ((48, 1), (128, 128), {}, False),
    ],
)  # fmt: skip
def test_tiles_that_begin_within_a_token_have_one_width(
    heads: tuple[int, int], sizes: tuple[int, int], options: Any, has_narrow: bool
) -> None:
    made = family.plan(make_call((40,), heads, sizes, **options))
    assert (made.narrow is not None) is has_narrow
    widths = {warm.task.division for warm in made.bounds(BatchLimits(4, 512, 4096, 16))}
    assert widths == ({NARROW, WIDE} if has_narrow else {WIDE})


@pytest.mark.long
@pytest.mark.usefixtures("narrow")
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels")
@pytest.mark.parametrize("name", NARROW_CASES)
def test_every_row_of_narrow_tiles_is_right_in_the_interpreter(
    name: str, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = set()
    count = PrefillPlan.count_items

    def note(plan: PrefillPlan, call: AttentionCall, tile_rows: int) -> int:
        widths.add(plan.config.CONSUMERS)
        return count(plan, call, tile_rows)

    monkeypatch.setattr(PrefillPlan, "count_items", note)
    with pretend_hopper(monkeypatch):
        check(CASES[name], reference)
    assert widths == {1}


SIZES = [64, 72, 96, 128, 160, 192, 256]
"""Head sizes. Those of 192 have values of 128."""


@needs_hopper
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("head_size", SIZES)
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_of_narrow_tiles_is_within_its_error_budget(
    name: str, head_size: int, reference: Twin
) -> None:
    plan = replace(BATCHES[name], head_size=head_size, dtype=BF16)
    assert_right(build(plan, "cuda"), reference)


@needs_hopper
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("name", OPTIONS)
def test_narrow_tiles_with_options_are_within_their_error_budget(
    name: str, group: int, causal: bool, head_size: int, reference: Twin
) -> None:
    plan = BatchPlan(
        (1, 200, 0, 77, 129, 300), (50, 200, 40, 300, 129, 700), group=group,
        head_size=head_size, dtype=BF16, needle="tile edge",
    )  # fmt: skip
    batch = build(plan, "cuda")
    options = replace(make_options(batch, OPTIONS[name]), causal=causal)
    assert_right(batch, reference, options=options)

"""Laws of attention over cache formats whose scales are measured.

It is compared with the exact result over the numbers that the codes mean, and over the numbers
before they were codes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...contract.cache_formats import CacheFormat
from ..candidates.calls.calling import expect_right, run_call
from ..candidates.candidate import BATCH_INVARIANT
from ..candidates.setting import Setting
from ..cases.batches import BatchPlan
from ..cases.choice_calls import build_call
from ..cases.options import Call, paged_call
from ..checks.coded_caches import (
    CODED,
    PACKED,
    coded_call,
    fits,
    format_of,
    try_formats,
)
from ..checks.expect import Disagreement
from ..oracles.brute_force import Answer, OracleRequest
from ..oracles.cache_formats import most_off
from .attention import Drawn, drawn_calls
from .attention_rejections import Change, base_call, expect_rejected
from .batch_invariance import claimed, expect_same_alone
from .law import law

PLAIN = {"cache": "as the query", "scales": "none"}


@law("paged_attention", cases=drawn_calls(fixed=PLAIN))
def attention_over_codes_is_right_under_any_options(
    setting: Setting, case: Drawn
) -> None:
    """Slots of no sequence have scales of NaN. About half of the requests hold a needle."""
    call = build_call(*case, setting.device)
    sizes = [call.arguments[name].shape[3] for name in ("key_cache", "value_cache")]
    call = coded_call(call, format_of(case[1], *sizes), case[1])
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=drawn_calls(fixed=PLAIN), claim=BATCH_INVARIANT)
def a_request_over_codes_is_bitwise_equal_in_any_batch_if_that_is_claimed(
    setting: Setting, case: Drawn
) -> None:
    call = build_call(*case, setting.device)
    sizes = [call.arguments[name].shape[3] for name in ("key_cache", "value_cache")]
    call = coded_call(call, format_of(case[1], *sizes), case[1])
    expect_same_alone(claimed(setting), call, Random(case[1]))


STEPS = [BatchPlan((1, 3, 17), (60, 33, 17), seed=seed) for seed in range(2)]
STEPS += [BatchPlan((2,), (90,), head_size=128, kv_heads=1, scale=0.01, seed=2)]
STEPS += [BatchPlan((3, 1), (40, 65), head_size=24, dtype=torch.bfloat16, seed=3)]


@law("paged_attention", cases=STEPS)
def attention_over_codes_is_as_near_as_their_steps(
    setting: Setting, plan: BatchPlan
) -> None:
    """It is compared with exact attention over the numbers before they were codes.

    A key that is off by e changes the score of a query q by at most |q| |e|. If all scores are off
    by at most d, each weight is off by a factor of at most exp(2 d).
    """
    call = paged_call(setting.fit(plan), setting.device)
    exact = call.answer()

    def try_one(form: CacheFormat) -> None:
        coded = coded_call(call, form, plan.seed)
        out, _ = run_call(setting, coded)
        allowed = allowed_by_steps(coded, call.requests(), form, exact)
        off = (out.cpu().double() - exact.out).abs()
        share = (off / allowed).nan_to_num(torch.inf, posinf=torch.inf)
        if share.max() > 1:
            at = [int(index) for index in np.unravel_index(share.argmax(), share.shape)]
            raise Disagreement(
                "output",
                f"at {at}, {form.name}, {float(share.max()):.3g} times what its steps allow",
                float(out[tuple(at)]),
                float(exact.out[tuple(at)]),
            )

    head_size = call.query.shape[-1]
    measured = [form for form in CODED if form.is_measured and fits(form, head_size)]
    try_formats(measured, try_one)


def allowed_by_steps(
    call: Call, requests: Sequence[OracleRequest], form: CacheFormat, exact: Answer
) -> Tensor:
    """Return how far attention over codes may be from attention over the numbers, as `out`.

    Args:
        requests: Those of the call with the numbers.
        exact: Their result.
    """
    allowed = torch.zeros_like(exact.out)
    token, eps = 0, torch.finfo(call.dtype).eps
    scale = call.arguments.get("scale") or call.query.shape[-1] ** -0.5
    k_global, v_global = map(call.arguments.get, ("k_global_scale", "v_global_scale"))
    for request in requests:
        queries = request.query.double()
        heads, kv_heads = queries.shape[1], request.key.shape[1]
        reads = [head * kv_heads // heads for head in range(heads)]
        off_keys, length = most_off(form, request.key, k_global)
        off_values, _ = most_off(form, request.value, v_global)
        by_element = queries.abs() * off_keys.amax(0)[reads]
        by_length = queries.norm(dim=-1) * length.amax(0)[reads]
        score = torch.minimum(by_element.sum(-1), by_length) * scale
        rows = slice(token, token + len(queries))
        moved = torch.expm1(2 * score)[..., None] * exact.sizes[rows]
        values = request.value.double().abs().amax(0) + off_values.amax(0)
        # weights and the result are rounded to the dtype
        rounded = 2 * eps * values[reads] + 1e-30
        allowed[rows] = moved + off_values.amax(0)[reads] + rounded
        token += len(queries)
    return allowed


NEEDLES = [
    (BatchPlan((1, 1, 1), (33, 16, 1), seed=3), [(0, 32), (1, 0), (2, 0)]),
    (BatchPlan((1,), (300,), kv_heads=1, dtype=torch.float16), [(0, 299)]),
    (BatchPlan((1, 1), (257, 129), group=3, block_size=24), [(0, 0), (1, 64)]),
    (BatchPlan((5, 4), (70, 21), head_size=24, seed=1), [(0, 65), (1, 16)]),
    (BatchPlan((6, 1), (290, 65), kv_heads=1, group=8), [(0, 284), (1, 63)]),
    (BatchPlan((33, 40), (33, 101), layout="hnd", padding=2), [(0, 0), (1, 61)]),
    (BatchPlan((21, 1), (43, 43), dtype=torch.bfloat16), [(0, 22), (1, 42)]),
]
"""Decodes, short appends and prompts, with a key per request that outweighs all others."""


@law("paged_attention", cases=NEEDLES)
def attention_over_codes_finds_each_needle(
    setting: Setting, case: tuple[BatchPlan, list[tuple[int, int]]]
) -> None:
    """The needle is on the edge of a block, of a tile, or of what a query attends to."""
    plan, needles = case
    kept_needles = [(req, key) for req, key in needles if key < plan.kv_lens[req]]

    def try_one(form: CacheFormat) -> None:
        call = paged_call(plan, setting.device, kept_needles)
        call = coded_call(call, form, plan.seed)
        expect_right(setting, call, run_call(setting, call))

    try_formats([form for form in CODED if fits(form, plan.head_size)], try_one)


def with_a_tail(call: Call) -> Call:
    """Return a call in which the first key of each request has a weight of 1, and others 4e-4."""
    key = call.arguments["key_cache"].clone()
    key[~key.isnan()] = 0
    for row in filter(None, call.rows):
        key[row[0], 0] = -math.log(4e-4) / key.shape[3] ** 0.5
    value = call.arguments["value_cache"].abs()
    query = torch.ones_like(call.query)
    return call.changed(query=query, key_cache=key, value_cache=value)


@law(
    "paged_attention",
    cases=[*product([1e-4, 1e-2, 1.0, 300.0, 8000.0], [False, True])],
)
def values_of_any_size_keep_their_relative_accuracy(
    setting: Setting, case: tuple[float, bool]
) -> None:
    """In float16 the product of a weight and the scale of a value is subnormal, or overflows.

    Many keys of small weights have a part in the result, too.
    """
    size, has_tail = case
    lens = (300, 150) if has_tail else (40, 19)
    plan = setting.fit(BatchPlan((1, 3), lens, dtype=torch.float16, seed=5))
    call = paged_call(plan, setting.device)
    if has_tail:
        call = with_a_tail(call)
    values = (call.arguments["value_cache"].float() * size).to(plan.dtype)
    call = call.changed(value_cache=values)

    def try_one(form: CacheFormat) -> None:
        coded = coded_call(call, form, plan.seed)
        expect_right(setting, coded, run_call(setting, coded))

    measured = [
        form
        for form in CODED
        # a format that loses rows loses those whose rotation float16 does not reach, too
        if form.is_measured and not (form.loses and size > 1000)
    ]
    try_formats([form for form in measured if fits(form, plan.head_size)], try_one)


@law("cascade_attention", cases=[0, 1, 2])
def a_shared_prefix_of_codes_is_read_once(setting: Setting, seed: int) -> None:
    """The result is that of attention over the whole sequences."""
    plan = BatchPlan((1, 2, 1), (40, 37, 33), table="scattered", seed=seed)
    plan = setting.fit(plan)
    call = paged_call(plan, setting.device)
    size = call.arguments["key_cache"].shape[1]
    prefix = 32 // size * size
    rows, table = [list(row) for row in call.rows], call.arguments["block_table"]
    for req, row in enumerate(rows):
        row[: prefix // size] = rows[0][: prefix // size]
        table[req, : prefix // size] = table[0, : prefix // size]

    def try_one(form: CacheFormat) -> None:
        coded = coded_call(replace(call, rows=rows), form, seed)
        shared = replace(
            coded,
            operation="cascade_attention",
            arguments=coded.arguments | {"common_prefix_len": prefix},
        )
        expect_right(setting, coded, run_call(setting, shared))

    try_formats([form for form in CODED if fits(form, plan.head_size)], try_one)


def scales_like(call: Call, **changes: Any) -> Tensor:
    """Return the scales of the keys with another shape, dtype or device."""
    shape = changes.get("shape", call.arguments["k_scale"].shape)
    return torch.ones(shape, dtype=changes.get("dtype", torch.float32))


WRONG_SCALES: dict[str, Change] = {
    "codes without scales": lambda call: {"k_scale": None, "v_scale": None},
    "a number": lambda call: {"k_scale": 0.5},
    "no scale of the values": lambda call: {"v_scale": None},
    "a negative global scale": lambda call: {"k_global_scale": -1.0},
    "no global scale, or one without block scales": lambda call: {
        "v_global_scale": None if call.arguments["k_scale"].dim() == 4 else 1.0
    },
    "scales of fewer blocks": lambda call: {
        "k_scale": scales_like(call, shape=(1, *call.arguments["k_scale"].shape[1:]))
    },
    "scales of other slots": lambda call: {
        "v_scale": call.arguments["v_scale"].transpose(1, 2).contiguous()
    },
    "scales in half precision": lambda call: {
        "v_scale": scales_like(call, dtype=torch.float16)
    },
}


@law("paged_attention", cases=list(WRONG_SCALES), claim="rejects shapes")
def wrong_scales_of_codes_are_rejected(setting: Setting, what: str) -> None:
    base = base_call(setting)
    for form in CODED:
        if form.is_measured and fits(form, base.query.shape[-1]):
            call = coded_call(base, form, 0)
            expect_rejected(setting, what, call, WRONG_SCALES[what])


RANGES = {
    "an image": (BatchPlan((30, 1, 5), (41, 33, 20), group=1), [(13, 29), (0, 32), (16, 18)]),
    "an image that ends after the last key": (BatchPlan((30, 1), (41, 33)), [(13, 60), (0, 40)]),
    "an image and a window": (
        BatchPlan((24, 6), (40, 38), seed=1, head_size=64), [(20, 35), (31, 37)]
    ),
    "a prefix and a window": (
        BatchPlan((1, 3, 20), (75, 70, 90), seed=2, head_size=64), [(0, 17), (0, 3), (0, 69)]
    ),
}  # fmt: skip
"""Batches, and the range of keys of each request: of an image, whose tokens alone attend to it, or
of a prefix, which all new tokens attend to. A window has 9 keys."""


@law("paged_attention", cases=list(RANGES))
def images_and_prefixes_of_codes_are_visible_to_their_tokens(
    setting: Setting, name: str
) -> None:
    """A kernel of its own for a format must not forget the ranges of the plain one."""
    plan, spans = RANGES[name]
    plan = setting.fit(plan)
    ranges = torch.full((sum(plan.query_lens), 2), -1, dtype=torch.int32)
    token = 0
    for new, keys, (first, last) in zip(
        plan.query_lens, plan.kv_lens, spans, strict=True
    ):
        for position in range(keys - new, keys):
            if "prefix" in name or first <= position <= last:
                ranges[token] = torch.tensor([first, last])
            token += 1
    options: dict[str, Any] = {"sliding_window": 9} if "window" in name else {}
    padded = torch.nn.functional.pad(ranges, (0, 0, 0, plan.padding), value=-1)
    call = paged_call(plan, setting.device, query_ranges=padded, **options)

    def try_one(form: CacheFormat) -> None:
        coded = coded_call(call, form, plan.seed, PACKED)
        expect_right(setting, coded, run_call(setting, coded))

    try_formats([form for form in CODED if fits(form, plan.head_size)], try_one)

"""Laws of batches that are larger than the tiles of a program.

Kernels process tiles: some requests, some heads and some keys at a time. The cases therefore have
more requests than a tile. Their lengths are equal, or one is much longer; some requests are idle,
empty or prompts. Other cases have more heads per group, or head sizes so large that only a few
splits of a row fit, or windows that are wider than a tile but narrower than the sequence.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..candidates.calls.calling import expect_right, expect_same_results, run_call
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, LAYOUTS, NEEDLES, BatchPlan
from ..cases.options import paged_call, quantised_call, ragged_call, slopes
from ..cases.rearranging import only
from ..cases.reuse import compiled
from .law import law

EVEN = (1, 16, 64, 96, 128, 640)
"""Numbers of keys in batches whose requests have equal lengths."""
RAGGED = (0, 1, 31, 32, 33, 64, 65, 97, 130, 300)


@dataclass(frozen=True)
class LargeBatch:
    """Requests that share a launch.

    Args:
        plan: The number of new tokens and keys of each request.
        option: The mask or the sinks: a key of OPTIONS, "sinks" or "flags".
        is_paged: Whether keys are stored in pages. If False, they are ragged.
    """

    plan: BatchPlan
    option: str = "none"
    is_paged: bool = True


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "a window": {"sliding_window": 100},
    "a short window": {"sliding_window": 20},
    "a window of few tokens": {"sliding_window": 3},
    "chunks": {"attention_chunk_size": 150},
    "not causal": {"causal": False},
}


def option_of(name: str, heads: int, reqs: int) -> dict[str, Any]:
    """Return the arguments of attention for an option of a large batch."""
    if name == "sinks":
        return {"sinks": slopes(heads, 3.0)}
    if name == "flags":
        return {"causal": torch.tensor([req % 2 == 0 for req in range(reqs)])}
    return OPTIONS[name]


def draw_lengths(pick: Random, counts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return new tokens and keys per request: equal, ragged, or one much longer."""
    count = pick.choice(counts)
    kind = pick.choice(["even", "even", "ragged", "one long", "some idle", "prompts"])
    lens = [pick.choice(RAGGED[: 10 if count < 10 else 5]) for _ in range(count)]
    if kind == "even":
        lens = [pick.choice(EVEN[: 6 if count < 10 else 3])] * count
    drafts = pick.choice([1, 1, 1, 2, 5])
    news = [min(drafts, length) for length in lens]
    index = pick.randrange(count)
    if kind == "one long":
        lens[index] = pick.choice([300, 520, 640])
        news[index] = drafts
    for req in range(count):
        if kind == "some idle" and pick.random() < 0.3:
            news[req] = 0
        if kind == "prompts" and (req == index or pick.random() < 0.1):
            news[req] = lens[req] = pick.choice([33, 40, 70])
    return news, lens


@st.composite
def large_batches(
    draw: st.DrawFn, counts: tuple[int, ...], is_paged: bool = True
) -> LargeBatch:
    """Return a large batch of one of the given sizes; one seed determines all of it."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    news, lens = draw_lengths(pick, counts)
    option = kernel.choice([*OPTIONS, "none", "none", "sinks", "sinks", "flags"])
    plan = BatchPlan(
        tuple(news),
        tuple(lens),
        block_size=kernel.choice([16, 16, 3, 32]),
        kv_heads=kernel.choice([1, 1, 2, 3]),
        group=kernel.choice([1, 2, 3, 8]),
        head_size=kernel.choice([8, 16]),
        dtype=kernel.choice(DTYPES),
        layout=kernel.choice(LAYOUTS),
        needle=pick.choice(["none", *NEEDLES]),
        padding=pick.choice([0, 1, 5]),
        spare_max=pick.choice([0, 0, 7]),
        seed=pick.randrange(2**16),
    )
    return LargeBatch(plan, option, is_paged)


def expect_right_batch(setting: Setting, batch: LargeBatch) -> None:
    heads = batch.plan.kv_heads * batch.plan.group
    options = option_of(batch.option, heads, len(batch.plan.query_lens))
    call = paged_call(batch.plan, setting.device, **options)
    call = call if batch.is_paged else ragged_call(call)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=large_batches((1, 2, 3, 5, 9, 13)))
def requests_are_right_however_their_lengths_share_the_work(
    setting: Setting, batch: LargeBatch
) -> None:
    """Lengths are equal, ragged, or one is much longer; some requests are idle or prompts."""
    expect_right_batch(setting, batch)


@law("encoder_attention", cases=large_batches((2, 3, 5), is_paged=False))
def ragged_requests_are_right_however_long_each_is(
    setting: Setting, batch: LargeBatch
) -> None:
    expect_right_batch(setting, batch)


def many(count: int, idle: int = 1, **changes: Any) -> BatchPlan:
    """Return a plan of many decodes of up to two tiles, with idle requests and one prompt.

    Args:
        count: The number of requests.
        idle: The number of idle requests for every three decodes, on average.
        changes: Other fields of the plan.
    """
    pick = Random(count)
    lens = [pick.choice(RAGGED[1:5]) for _ in range(count)]
    news = [pick.choice([1] * 3 + [0] * idle) for _ in range(count)]
    news[-1] = 1
    lens[count // 2] = news[count // 2] = 20
    return BatchPlan(
        tuple(news), tuple(lens), **{"kv_heads": 1, "head_size": 8, **changes}
    )


ALIKE = BatchPlan(
    (1,) * 66, (33,) * 66, kv_heads=1, group=1, head_size=8, needle="last"
)
MANY = {
    "a few more than 64": LargeBatch(
        many(67, group=1, padding=1, needle="last"), "sinks"
    ),
    "more than 128": LargeBatch(many(131, idle=6, group=1, needle="first")),
    "all alike": LargeBatch(ALIKE),
    "none with a key after the 64th": LargeBatch(
        BatchPlan(
            (1,) * 60 + (0,) * 10, (40,) * 60 + (9,) * 10, kv_heads=1, head_size=8
        )
    ),
    "prompts and idle ones up to the 64th": LargeBatch(
        BatchPlan((0,) * 65 + (1, 1), (3,) * 65 + (200, 9), kv_heads=1, head_size=8)
    ),
}


@law("paged_attention", cases=[*MANY.values()])
def there_may_be_any_number_of_requests(setting: Setting, batch: LargeBatch) -> None:
    expect_right_batch(setting, batch)


def decodes(count: int, *lens: int, needle: str = "last") -> LargeBatch:
    """Return decodes of the lengths in turn, with one small head."""
    kv_lens = tuple(lens[req % len(lens)] for req in range(count))
    plan = BatchPlan((1,) * count, kv_lens, kv_heads=1, group=1, head_size=8)
    return LargeBatch(replace(plan, needle=needle))


LONG = [
    *(decodes(1, 1025), decodes(1, 4097, needle="first"), decodes(2, 12001, 3)),
    decodes(300, 1, 2),
]


@law("paged_attention", cases=LONG)
def sequences_may_be_long_and_decodes_many(setting: Setting, batch: LargeBatch) -> None:
    expect_right_batch(setting, batch)


@law(
    "paged_attention",
    cases=[(1, 32 * tiles) for tiles in range(1, 25)]
    + [(count, 32 * tiles) for count in (2, 3, 5) for tiles in (4, 7, 8, 10)],
)
def equal_requests_are_right_at_every_length(
    setting: Setting, case: tuple[int, int]
) -> None:
    """The length is a whole number of tiles, and the needle is the last key."""
    count, length = case
    plan = BatchPlan((1,) * count, (length,) * count, kv_heads=1, group=2, head_size=8)
    plan = replace(plan, needle="last", seed=length)
    call = paged_call(plan, setting.device)
    expect_right(setting, call, run_call(setting, call))


LARGE = {
    "71 heads share a kv head": LargeBatch(
        BatchPlan((1, 3), (40, 9), kv_heads=1, group=71, head_size=8, padding=2)
    ),
    "33 heads share one, of two": LargeBatch(
        BatchPlan((1, 2), (130, 9), group=33, head_size=8, padding=3), "sinks"
    ),
    "20 heads share one, and much padding": LargeBatch(
        BatchPlan((1,), (9,), group=20, head_size=8, padding=12)
    ),
    "chunks after a long context that end past the next tile": LargeBatch(
        BatchPlan((20, 17), (140, 257), kv_heads=1)
    ),
    "heads of 256 on many keys": LargeBatch(
        BatchPlan((3, 1), (300, 20), kv_heads=1, group=5, head_size=256), "sinks"
    ),
    "heads of 256 and a window that ends far back": LargeBatch(
        BatchPlan((5,), (400,), kv_heads=1, group=3, head_size=256), "a window"
    ),
    "heads of 600 and drafts that outgrow their window": LargeBatch(
        BatchPlan((5,), (259,), kv_heads=1, group=3, head_size=600),
        "a window of few tokens",
    ),
    "heads of 600 on many keys": LargeBatch(
        BatchPlan((5, 1), (260, 130), kv_heads=1, group=3, head_size=600),
        "a short window",
    ),
}


@law("paged_attention", cases=[*LARGE.values()])
def groups_and_heads_may_be_larger_than_a_tile(
    setting: Setting, batch: LargeBatch
) -> None:
    expect_right_batch(setting, batch)


@law("paged_attention", cases=["prefill", "fp8"])
def a_call_does_not_affect_the_next_one_of_equal_shape(
    setting: Setting, kind: str
) -> None:
    """The tensors are the same ones with other contents; numbers and options are others too."""
    news = (1, 1, 1) if kind != "prefill" else (20, 1, 1)
    plan = BatchPlan(news, (90, 40, 33), group=2, head_size=8, needle="last")
    calls = []
    for seed, cap, scale in ((1, 3.0, 0.2), (2, 0.7, 0.5)):
        lens = plan.kv_lens[:: 3 - 2 * seed]
        own = replace(plan, seed=seed, kv_lens=lens, scale=scale)
        call = paged_call(
            own, setting.device, logits_soft_cap=cap, sinks=slopes(4, cap)
        )
        if kind == "fp8":
            scales = (slopes(2, scale), slopes(2, cap))
            call = quantised_call(call, torch.float8_e4m3fn, *scales)
        calls.append(call)
    first, second = calls
    kept = first.arguments
    before = run_call(setting, first)
    expect_right(setting, first, before)
    old = {
        name: tensor.clone()
        for name, tensor in kept.items()
        if isinstance(tensor, Tensor)
    }
    for name in old:
        kept[name].copy_(second.arguments[name])
        second.arguments[name] = kept[name]
    expect_right(setting, second, run_call(setting, second))
    for name, tensor in old.items():
        kept[name].copy_(tensor)
    expect_same_results("after another call", run_call(setting, first), before)


@law("paged_attention", cases=[0, 1, 2])
def a_batch_does_not_affect_the_next_one(setting: Setting, seed: int) -> None:
    """The result stays bitwise equal after calls with fewer requests or another order."""
    lens = ((200, 20, 70), (130, 130, 130), (320, 2, 33))[seed]
    plan = BatchPlan((1, 2, 1), lens, group=3, head_size=8, needle="last", seed=seed)
    call = paged_call(plan, setting.device)
    before = run_call(setting, call)
    expect_right(setting, call, before)
    for reqs in ([2], [2, 1, 0]):
        other = only(call, reqs)
        expect_right(setting, other, run_call(setting, other))
        expect_same_results(f"after {reqs}", run_call(setting, call), before)

"""Laws of invariance: changes of a call that must not change its result.

Page addresses, the contents of unallocated slots and the contents of other requests do not change
a single bit. Another order of requests, a request alone, a prompt in chunks and larger bounds may
round differently. In these cases every row must stay within its error budget.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import pack_options
from ..candidates.calls.calling import expect_right, expect_same_results, run_call
from ..candidates.setting import Setting
from ..cases.batches import NAN, BatchPlan
from ..cases.choice_calls import build_call
from ..cases.options import Call, bias_table, paged_call, quantised_call, slopes
from ..cases.rearranging import (
    as_views,
    moved_pages,
    of_parts,
    only,
    poisoned,
    rows_of,
    rows_of_answer,
    with_other_requests,
)
from ..checks.canaries import checked_values
from ..checks.expect import expect_same
from ..oracles.brute_force import Answer
from .attention import Designed, Drawn, drawn_calls
from .law import law

POISONS = (0.0, float("inf"), 1e4, -3e38)


@law("paged_attention", cases=drawn_calls(fixed={"batch": "verification"}))
def results_are_bitwise_equal_wherever_pages_are_stored(
    setting: Setting, case: Drawn
) -> None:
    call = build_call(*case, setting.device)
    moved = moved_pages(call, Random(case[1]))
    found = run_call(setting, call)
    expect_same_results("with its pages elsewhere", run_call(setting, moved), found)


@law("paged_attention", cases=Designed("paged_attention", step=2))
def results_are_bitwise_equal_whatever_unallocated_slots_hold(
    setting: Setting, case: Drawn
) -> None:
    """Free slots, tails of rows and trees, and rows after the last request hold any value."""
    call = build_call(*case, setting.device)
    other = poisoned(call, POISONS[case[1] % len(POISONS)])
    expect_same_results(
        "with other poison", run_call(setting, other), run_call(setting, call)
    )


@law("encoder_attention", cases=Designed("encoder_attention"))
def results_are_bitwise_equal_whatever_follows_the_last_key(
    setting: Setting, case: Drawn
) -> None:
    call = build_call(*case, setting.device)
    other = poisoned(call, POISONS[case[1] % len(POISONS)])
    expect_same_results(
        "with other poison", run_call(setting, other), run_call(setting, call)
    )


def same_rows(what: str, setting: Setting, call: Call, other: Call, req: int) -> None:
    """Raise if any bit of one request's rows changes."""
    rows = rows_of(call, [req])
    (out, lse), (before, lse_before) = run_call(setting, other), run_call(setting, call)
    expect_same(f"output {what}", out[rows], before[rows].cpu())
    if lse is not None and lse_before is not None:
        expect_same(f"log-sum-exp {what}", lse[:, rows], lse_before[:, rows].cpu())


@law("paged_attention", cases=drawn_calls(fixed={"batch": "verification"}))
def results_are_bitwise_equal_whatever_other_requests_hold(
    setting: Setting, case: Drawn
) -> None:
    """The other requests may contain NaN."""
    call = build_call(*case, setting.device)
    pick = Random(case[1])
    kept = pick.randrange(len(call.query_lens))
    other = with_other_requests(call, kept, pick)
    same_rows("with other neighbours", setting, call, other, kept)


@law("paged_attention", cases=drawn_calls(fixed={"batch": "mixed"}))
def the_order_and_number_of_requests_change_nothing_beyond_rounding(
    setting: Setting, case: Drawn
) -> None:
    """A subset of the requests runs in another order; one may occur twice."""
    call = build_call(*case, setting.device)
    pick = Random(case[1])
    reqs = list(range(len(call.query_lens)))
    pick.shuffle(reqs)
    reqs = reqs[: pick.randint(1, len(reqs))]
    reqs += pick.choice([[], reqs[:1]])
    part = only(call, reqs)
    answer = rows_of_answer(call.answer(), rows_of(call, reqs))
    expect_right(setting, part, run_call(setting, part), answer)


WHOLE = {
    "batch": "prefill",
    "causal": "yes",
    "tree_mask": "none",
    "query_ranges": "none",
}


@law("paged_attention", cases=drawn_calls(fixed=WHOLE))
def a_prompt_in_chunks_equals_the_prompt_in_one_step(
    setting: Setting, case: Drawn
) -> None:
    """Each chunk attends to the keys up to its end; chunks run in turn or in one batch."""
    call = build_call(*case, setting.device)
    pick = Random(case[1])
    parts: list[tuple[int, int, int]] = []
    for req, query_len in enumerate(call.query_lens):
        cuts = {0, query_len, *(pick.randint(0, query_len) for _ in range(2))}
        edges = sorted(cuts)
        parts += [(req, *edge) for edge in pairwise(edges)]
    answer = call.answer()
    batches = [parts] if pick.random() < 0.5 else [[part] for part in parts]
    starts = [rows_of(call, range(req))[-1:] for req in range(len(call.query_lens))]
    for batch in batches:
        rows = [
            (starts[req][0] + 1 if starts[req] else 0) + own
            for req, begin, end in batch
            for own in range(begin, end)
        ]
        part = of_parts(call, batch)
        expect_right(
            setting, part, run_call(setting, part), rows_of_answer(answer, rows)
        )


@law("paged_attention", cases=[0, 1])
def a_prompt_token_by_token_equals_the_prompt_in_one_step(
    setting: Setting, seed: int
) -> None:
    """Every query is a separate request; all use the same block-table row."""
    plan = BatchPlan((18,), (18,), group=3, needle="block edge", seed=seed)
    if setting.is_fitting:
        plan = replace(setting.fit(plan), query_lens=(18,))
    call = paged_call(plan, setting.device)
    part = of_parts(call, [(0, own, own + 1) for own in range(18)])
    expect_right(setting, part, run_call(setting, part), call.answer())


BOUNDS = [
    (lens, query_bound, key_bound, name)
    for lens in (
        ((1, 1), (40, 70)),
        ((3, 1), (40, 70)),
        ((20, 1), (40, 70)),
        # drafts that the device divides otherwise than the host, and requests without tokens
        ((4, 0, 1, 0), (40, 12, 70, 0)),
        ((0, 1, 0), (0, 70, 9)),
    )
    for query_bound, key_bound in ((0, 0), (1, 30), (40, 230), (0, 3930))
    for name in ("plain", "window", "sinks", "flags", "ranges")
    if (key_bound < 3000 or lens[0] == (1, 1))
    and (name not in ("flags", "ranges") or key_bound == 230)
]


@law("paged_attention", cases=BOUNDS)
def larger_bounds_change_nothing_beyond_rounding(
    setting: Setting,
    case: tuple[tuple[tuple[int, ...], tuple[int, ...]], int, int, str],
) -> None:
    """`max_query_len` and `max_seq_len` are upper bounds only: the host knows no more of drafts.

    Larger bounds may give a row more splits, most of which are then empty. Requests without new
    tokens, or without keys, take no part.
    """
    (query_lens, key_lens), query_bound, key_bound, name = case
    plan = BatchPlan(query_lens, key_lens, spare_blocks=300, kv_heads=1, needle="last")
    plan = setting.fit(plan)
    call = paged_call(plan, setting.device)
    call = call.changed(
        max_query_len=max(plan.query_lens) + query_bound, max_seq_len=70 + key_bound
    )
    if name == "window":
        call = call.changed(sliding_window=9)
    if name == "sinks":
        call = call.changed(sinks=torch.tensor([0.0, 3.0]))
    if name == "flags":
        flags = [req % 2 == 0 for req in range(len(plan.query_lens))]
        call = call.changed(causal=torch.tensor(flags))
    if name == "ranges":
        ranges = [[2, 5]] * (sum(plan.query_lens) + plan.padding)
        call = call.changed(
            query_ranges=torch.tensor(ranges, dtype=torch.int32), sliding_window=3
        )
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[0, 1, 2, 3])
def lengths_and_flags_may_be_views_with_any_strides(
    setting: Setting, seed: int
) -> None:
    """Views are lengths, starts, block tables, flags, biases, trees and ranges."""
    plan = setting.fit(BatchPlan((3, 1, 5), (20, 9, 33), seed=seed, padding=seed % 2))
    flags = torch.tensor([True, False, True])
    chain = torch.ones(6, 6, dtype=torch.bool).tril()
    # the last request's tree differs from those before it
    tree = torch.stack([chain, chain, torch.eye(6, dtype=torch.bool)])
    tokens = sum(plan.query_lens) + plan.padding
    ranges = torch.tensor([[2, 5]] * tokens, dtype=torch.int32)
    choices: list[dict[str, Any]] = [
        {"causal": flags},
        {"tree_mask": tree, "position_bias": bias_table(4)},
        {"query_ranges": ranges, "sliding_window": 3, "position_bias": bias_table(4)},
        {"tree_mask": tree, "query_ranges": ranges},
    ]
    options = choices[seed]
    expect_same_from_views(
        setting, paged_call(plan, setting.device, **options), list(options)
    )


@law("paged_attention", cases=["alibi_slopes", "sinks", "k_scale", "v_scale"])
def parameters_per_head_may_be_views_with_any_strides(
    setting: Setting, name: str
) -> None:
    """NaN is between the elements; the batch has short and long requests."""
    plan = setting.fit(BatchPlan((3, 1, 20), (20, 300, 33)))
    call = paged_call(plan, setting.device)
    numbers = slopes(2, 0.3) if name.endswith("scale") else slopes(4)
    if name.endswith("scale"):
        call = quantised_call(call, torch.float8_e4m3fn, 0.1, 0.1)
    expect_same_from_views(setting, call.changed(**{name: numbers}), [name])


def expect_same_from_views(setting: Setting, call: Call, names: list[str]) -> None:
    """Raise if results are wrong for strided views with garbage between elements."""
    views = as_views(call, ("query_start_loc", "seq_lens", "block_table", *names))
    # a compiler may sum in another order for other strides, so results need not be bitwise equal
    expect_right(setting, call, run_call(setting, views))


@law("paged_attention", cases=[0, 1])
def checking_contents_changes_nothing(setting: Setting, seed: int) -> None:
    """PAGETWIN_CHECK_VALUES=1 rejects invalid contents and accepts all others."""
    plan = BatchPlan((3, 0, 1), (20, 0, 40), padding=seed, spare_blocks=2)
    call = paged_call(setting.fit(plan), setting.device)
    before = run_call(setting, call)
    with checked_values():
        found = run_call(setting, call)
    expect_same_results("with its contents checked", found, before)


FAR = 2**30 + 64
"""Stride of an axis in elements; twice this stride does not fit a signed 32-bit integer."""


@dataclass(frozen=True)
class FarAttention:
    """A call in which the elements of one tensor are far apart.

    Args:
        what: The tensor: "pages", "query" or "output".
        query_len: The number of new tokens.
    """

    what: str
    query_len: int


@law(
    "paged_attention",
    cases=[
        FarAttention(what, query_len)
        for what in ("pages", "query", "output")
        for query_len in (1, 3, 20)
        if what == "pages" or query_len == 3
    ],
)
def addresses_of_attention_have_64_bits(setting: Setting, far: FarAttention) -> None:
    """Element 2 of an axis is past 2**31 elements; a 32-bit offset would become negative."""
    plan = BatchPlan(
        (far.query_len,),
        (33,),
        kv_heads=1,
        group=1,
        head_size=16,
        dtype=torch.float16,
        seed=far.query_len,
    )
    call = paged_call(plan, setting.device, [(0, 32)])
    tokens = len(call.query)
    # on a host, only the touched part takes memory
    memory = torch.empty(2 * FAR + 2**12, dtype=torch.float16, device=setting.device)
    if far.what == "output":
        out = memory.as_strided((tokens, 1, 16), (FAR, 16, 1)).fill_(NAN)
        expect_right(setting, call, run_call(setting, call, out=out))
        return
    if far.what == "query":
        query = memory.as_strided((tokens, 1, 16), (FAR, 16, 1))
        query.copy_(call.query)
        call = call.changed(query=query)
        expect_right(setting, call, run_call(setting, call))
        return
    names = ("key_cache", "value_cache")
    caches = {
        name: memory.as_strided((3, 16, 1, 16), (FAR, 32, 16, 1), 16 * half)
        for half, name in enumerate(names)
    }
    table = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    for name, cache in caches.items():
        cache.copy_(call.arguments[name][call.rows[0]].flip(0))
    answer: Answer = call.answer()
    call = replace(call.changed(**caches, block_table=table), rows=table.tolist())
    expect_right(setting, call, run_call(setting, call), answer)


FAR_AXES = [
    ("query", 1),
    ("key_cache", 1),
    ("key_cache", 2),
    ("value_cache", 1),
    ("value_cache", 2),
    ("block_table", 0),
    ("block_table", 1),
    ("position_bias", 0),
    ("query_ranges", 0),
    ("tree_mask", 0),
    ("out", 0),
    ("out", 1),
    ("lse", 0),
    ("lse", 1),
]
"""Tensors of a call, and an axis of three entries of each."""


def far_apart(tensor: Tensor, axis: int) -> Tensor:
    """Return a view with the same numbers, in which the entries of one axis are FAR apart."""
    strides, compact = [0] * tensor.dim(), 1
    for number in reversed(range(tensor.dim())):
        if number != axis:
            strides[number], compact = compact, compact * tensor.shape[number]
    strides[axis] = FAR
    # on a host, only the touched part takes memory
    memory = tensor.new_empty(2 * FAR + compact)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


@law("paged_attention", cases=FAR_AXES)
def every_axis_of_a_tensor_of_attention_may_be_outermost(
    setting: Setting, case: tuple[str, int]
) -> None:
    """Heads, slots, requests and tokens whose third entry is past 2**31 elements."""
    name, axis = case
    is_output = name in ("out", "lse")
    # of an output the last token is padding, which is cleared
    news, lens = ((1, 1), (5, 9)) if is_output else ((1, 1, 1), (5, 9, 7))
    plan = BatchPlan(
        news, lens, block_size=3, kv_heads=3, group=1, head_size=4,
        dtype=torch.float16, padding=int(is_output), spare_blocks=0,
    )  # fmt: skip
    call = paged_call(plan, setting.device)
    if name in ("query_ranges", "tree_mask", "position_bias"):
        call = Change(name).of(call)
    given = dict(call.arguments)
    outputs = {
        "out": torch.full(call.query.shape, NAN, dtype=torch.float16),
        "lse": torch.full((3, 3), NAN),
    }
    for tensors in (given, outputs):
        if name in tensors:
            tensors[name] = far_apart(tensors[name].to(setting.device), axis)
    outputs = {what: output.to(setting.device) for what, output in outputs.items()}
    setting.candidate.paged_attention(**pack_options(**given), **outputs)
    expect_right(setting, call, (outputs["out"], outputs["lse"]))


@dataclass(frozen=True)
class Change:
    """An argument of attention that gets another value."""

    name: str
    seed: int = 0

    def of(self, call: Call) -> Call:
        """Return the call with that argument changed, so that its result differs."""
        given, heads = call.arguments, call.query.shape[1]
        tokens = len(call.query)
        others: dict[str, Callable[[], Any]] = {
            "query": lambda: given["query"] * -1.5,
            "key_cache": lambda: given["key_cache"] * -1.5,
            "value_cache": lambda: given["value_cache"] * 1.5,
            "scale": lambda: 0.9,
            "sliding_window": lambda: 5,
            "attention_chunk_size": lambda: 8,
            "logits_soft_cap": lambda: 0.3,
            "alibi_slopes": lambda: slopes(heads),
            "sinks": lambda: slopes(heads, 2.0),
            "causal": lambda: False,
            "flags": lambda: torch.tensor([True, False]),
            "tree_mask": lambda: torch.eye(6).bool().repeat(len(call.rows), 1, 1),
            "query_ranges": lambda: torch.tensor(
                [[17, 19]] * tokens, dtype=torch.int32
            ),
            "position_bias": lambda: bias_table(heads),
        }
        name = "causal" if self.name == "flags" else self.name
        return call.changed(**{name: others[self.name]()})


CHANGES = [
    Change(name, seed)
    for name in (
        "query",
        "key_cache",
        "value_cache",
        "scale",
        "sliding_window",
        "attention_chunk_size",
        "logits_soft_cap",
        "alibi_slopes",
        "sinks",
        "causal",
        "flags",
        "tree_mask",
        "query_ranges",
        "position_bias",
    )
    for seed in (0, 1)
]


@law("paged_attention", cases=CHANGES)
def every_argument_of_attention_has_its_effect(
    setting: Setting, change: Change
) -> None:
    """A decode and a request of five new tokens, on tens and on hundreds of keys."""
    key_lens = (45, 20) if change.seed == 0 else (300, 150)
    plan = setting.fit(BatchPlan((1, 5), key_lens, seed=change.seed, kv_heads=1))
    call = change.of(paged_call(plan, setting.device))
    expect_right(setting, call, run_call(setting, call))

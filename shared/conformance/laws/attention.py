"""Laws of attention over a paged cache and over contiguous (ragged) keys and values.

The expected result is computed key by key in float64, under any options (`brute_force`). The error
budget of each row is derived from the error of plain torch in the same dtype. `design` covers every
pair of options; drawn choices and batches cover the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..candidates.calls.calling import (
    expect_right,
    expect_same_results,
    run_call,
    value_size_of,
)
from ..candidates.setting import Setting
from ..cases.batches import CORNERS, DTYPES, LAYOUTS, NAN, NEEDLES, BatchPlan, plans
from ..cases.choice_calls import build_call
from ..cases.option_pairs import Choice, design, drawn_choice
from ..cases.options import paged_call, ragged_call
from ..cases.reuse import compiled
from ..checks.canaries import kept
from ..checks.expect import expect_same
from .law import law

Drawn = tuple[Choice, int]
"""The chosen options, and the seed of the batch."""


@dataclass(frozen=True)
class Designed(Sequence[Drawn]):
    """The choices that together cover every pair of options of an operation.

    They are computed when the first one is used: most processes need none of them.

    Args:
        operation: The operation.
        step: Distance of the choices in the list of all.
        most: Optional. The maximum number of choices. If None, all of them.
    """

    operation: str
    step: int = 1
    most: int | None = None

    def _all(self) -> list[Drawn]:
        drawn = [
            (choice, seed)
            for seed, choice in enumerate(design())
            if choice["operation"] == self.operation
        ]
        return drawn[:: self.step][: self.most]

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]


@st.composite
def drawn_calls(
    draw: st.DrawFn,
    operation: str = "paged_attention",
    fixed: dict[str, str] | None = None,
) -> Drawn:
    """Return any valid choice of options for an operation, and a seed for its batch."""
    seed = draw(st.integers(0, 2**20))
    start = {"operation": operation} | (fixed or {})
    return drawn_choice(seed, start), seed


PAGED, RAGGED = Designed("paged_attention"), Designed("encoder_attention")


def expect_right_answer(setting: Setting, case: Drawn) -> None:
    call = build_call(*case, setting.device)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=PAGED)
def paged_attention_is_right_for_every_pair_of_options(
    setting: Setting, case: Drawn
) -> None:
    """Padding rows after the last request and rows without a visible key are checked too."""
    expect_right_answer(setting, case)


@law("encoder_attention", cases=RAGGED)
def encoder_attention_is_right_for_every_pair_of_options(
    setting: Setting, case: Drawn
) -> None:
    expect_right_answer(setting, case)


@law("paged_attention", cases=drawn_calls())
def paged_attention_is_right_under_any_options(setting: Setting, case: Drawn) -> None:
    expect_right_answer(setting, case)


@law("encoder_attention", cases=drawn_calls("encoder_attention"))
def encoder_attention_is_right_under_any_options(setting: Setting, case: Drawn) -> None:
    expect_right_answer(setting, case)


@law("paged_attention", cases=plans(max_reqs=3))
def every_new_token_attends_to_its_sequence_up_to_itself(
    setting: Setting, plan: BatchPlan
) -> None:
    """Ragged lengths on both sides of block edges, scattered blocks, idle and empty requests."""
    call = paged_call(plan, setting.device)
    expect_right(setting, call, run_call(setting, call))


@law("encoder_attention", cases=plans(max_reqs=3))
def every_token_of_an_encoder_attends_to_its_whole_input(
    setting: Setting, plan: BatchPlan
) -> None:
    call = ragged_call(paged_call(plan, setting.device, causal=False))
    expect_right(setting, call, run_call(setting, call))


LONG = {
    "a row of many tiles": BatchPlan((1,), (600,), kv_heads=1, needle="first"),
    "drafts on many tiles": BatchPlan((3,), (530,), kv_heads=1, needle="first new"),
    "long beside short": BatchPlan((1, 4, 1), (400, 9, 1), group=3, needle="last"),
    "other values than keys": BatchPlan(
        (2, 17), (40, 17), layout="hnd", value_layout="padded"
    ),
    "all kv heads, odd groups": BatchPlan((1, 9), (33, 20), kv_heads=3, group=7),
}


@law("paged_attention", cases=[*CORNERS.values(), *LONG.values()])
def large_heads_odd_blocks_and_long_rows_are_right(
    setting: Setting, plan: BatchPlan
) -> None:
    call = paged_call(plan, setting.device)
    expect_right(setting, call, run_call(setting, call))


@st.composite
def wide_values(draw: st.DrawFn) -> tuple[BatchPlan, int]:
    """Return a plan, and a smaller head size for its values."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    plan = BatchPlan(
        pick.choice([(1, 2), (17, 1)]),
        (20, 33),
        head_size=kernel.choice([8, 24, 48]),
        layout=kernel.choice(LAYOUTS),
        value_layout=kernel.choice(LAYOUTS),
        needle=pick.choice(NEEDLES),
        dtype=kernel.choice(DTYPES),
        seed=pick.randrange(2**16),
    )
    return plan, kernel.choice([1, 5, plan.head_size - 1])


@law("paged_attention", cases=wide_values())
def values_may_be_smaller_than_keys(
    setting: Setting, case: tuple[BatchPlan, int]
) -> None:
    """The values are a slice, as in a latent cache whose keys also hold a positional part."""
    plan, size = case
    call = paged_call(plan, setting.device)
    call = call.changed(value_cache=call.arguments["value_cache"][..., :size])
    expect_right(setting, call, run_call(setting, call))


SMALL = Designed("paged_attention", step=3)
SMALL_RAGGED = Designed("encoder_attention", step=3, most=2)
"""Every third choice, for laws that call the operation twice."""


def expect_reads_kept(setting: Setting, case: Drawn) -> None:
    call = build_call(*case, setting.device)
    tensors = {
        name: argument
        for name, argument in call.arguments.items()
        if isinstance(argument, Tensor)
    }
    with kept(**tensors):
        run_call(setting, call)


@law("paged_attention", cases=SMALL)
def attention_changes_nothing_that_it_reads(setting: Setting, case: Drawn) -> None:
    expect_reads_kept(setting, case)


@law("encoder_attention", cases=SMALL_RAGGED)
def ragged_attention_changes_nothing_that_it_reads(
    setting: Setting, case: Drawn
) -> None:
    expect_reads_kept(setting, case)


def expect_same_bits(setting: Setting, case: Drawn) -> None:
    call = build_call(*case, setting.device)
    expect_same_results("once more", run_call(setting, call), run_call(setting, call))


@law("paged_attention", cases=SMALL)
def equal_calls_of_attention_give_bitwise_equal_results(
    setting: Setting, case: Drawn
) -> None:
    expect_same_bits(setting, case)


@law("encoder_attention", cases=SMALL_RAGGED)
def equal_calls_of_ragged_attention_give_bitwise_equal_results(
    setting: Setting, case: Drawn
) -> None:
    expect_same_bits(setting, case)


def expect_nothing_beside(setting: Setting, case: Drawn) -> None:
    call = build_call(*case, setting.device)
    tokens, heads, _ = call.query.shape
    size, dtype = value_size_of(call), call.out_dtype or call.dtype
    canary = torch.full((tokens + 4, 2 * heads + 1, size + 5), 7.0)
    wide = canary.to(dtype).to(setting.device)
    out = wide[2 : tokens + 2, 1::2, 2 : size + 2]
    found = run_call(setting, call, out=out)
    expect_right(setting, call, found)
    around = wide.float()
    around[2 : tokens + 2, 1::2, 2 : size + 2] = 7.0
    expect_same("what lies around the output", around.cpu(), canary)


@law("paged_attention", cases=SMALL)
def nothing_is_written_outside_of_the_output(setting: Setting, case: Drawn) -> None:
    """The output is every other head of a larger tensor; the rest of it must not change."""
    expect_nothing_beside(setting, case)


@law("encoder_attention", cases=SMALL_RAGGED)
def nothing_is_written_outside_of_the_output_of_ragged_attention(
    setting: Setting, case: Drawn
) -> None:
    expect_nothing_beside(setting, case)


@law("paged_attention", cases=[(1, 0), (7, 0), (1, 2), (20, 3)])
def nothing_is_written_outside_of_the_log_sum_exp(
    setting: Setting, case: tuple[int, int]
) -> None:
    """The log-sum-exp is a strided view of a larger tensor; the rest of it must not change."""
    query_len, padding = case
    plan = setting.fit(BatchPlan((query_len, 1), (40, 9), padding=padding))
    call = paged_call(plan, setting.device)
    tokens, heads, size = call.query.shape
    wide = torch.full((heads + 2, 2 * tokens + 1), 7.0, device=setting.device)
    lse = wide[1 : heads + 1, 1::2]
    out = torch.full((tokens, heads, size), NAN, device=setting.device)
    out = out.to(plan.dtype)
    taken = setting.candidate.support.options
    if taken is not None and "lse" not in taken:
        return
    setting.candidate.paged_attention(**call.keywords, out=out, lse=lse)
    expect_right(setting, call, (out, lse))
    lse.fill_(7.0)
    expect_same(
        "what lies around the log-sum-exp", wide.cpu(), torch.full(wide.shape, 7.0)
    )


@st.composite
def sink_levels(draw: st.DrawFn) -> tuple[int, float, int]:
    """Return new tokens, the sinks' logit minus the keys' largest log-sum-exp, and a seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    level = pick.choice([-20.0, -1.0, 0.0, 1.0, 20.0, 1e4])
    return pick.choice([1, 3, 17]), level, pick.randrange(2**16)


@law("paged_attention", cases=sink_levels())
def a_sink_takes_part_in_the_softmax_once(
    setting: Setting, case: tuple[int, float, int]
) -> None:
    """Sinks far below, near and far above the log-sum-exp; kernels may split the longer row."""
    query_len, level, seed = case
    plan = BatchPlan(
        (query_len, 1), (40, 300), kv_heads=1, group=3, seed=seed, padding=1
    )
    plan = setting.fit(plan)
    call = paged_call(plan, setting.device)
    heaviest = call.answer().lse[:, : sum(plan.query_lens)].amax(1)
    # some kernels take sinks in bfloat16, so the values are those that it holds
    call = call.changed(sinks=(heaviest + level).bfloat16().float())
    expect_right(setting, call, run_call(setting, call))


EMPTY = [
    (options, queries, keys)
    for options in ("plain", "sinks", "flags", "cap")
    for queries, keys in (((3, 1), (0, 9)), ((1, 0, 1), (0, 0, 0)), ((20, 1), (0, 70)))
]


Empty = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Options, query lengths and key lengths of requests, some of which have no key."""


def expect_nothing_seen(setting: Setting, operation: str, case: Empty) -> None:
    options, query_lens, key_lens = case
    plan = BatchPlan(query_lens, key_lens, kv_heads=1, padding=2, spare_blocks=1)
    plan = setting.fit(plan)
    call = paged_call(plan, setting.device, causal=False)
    if options == "sinks":
        call = call.changed(sinks=torch.tensor([-2.0, 3.0]))
    if options == "flags":
        call = call.changed(causal=torch.tensor([False] * len(query_lens)))
    if options == "cap":
        call = call.changed(logits_soft_cap=3.0)
    if operation == "encoder_attention":
        call = ragged_call(call)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=EMPTY)
def a_query_without_visible_keys_has_output_zero_and_lse_minus_infinity(
    setting: Setting, case: Empty
) -> None:
    """Except that of its sink, if it has one. Padding rows after the last request do too."""
    expect_nothing_seen(setting, "paged_attention", case)


@law("encoder_attention", cases=EMPTY)
def a_query_without_visible_ragged_keys_has_output_zero_and_lse_minus_infinity(
    setting: Setting, case: Empty
) -> None:
    expect_nothing_seen(setting, "encoder_attention", case)


def expect_zeros(setting: Setting, operation: str, rows: int) -> None:
    plan = setting.fit(BatchPlan((), (), padding=rows))
    call = paged_call(plan, setting.device)
    size, dtype = plan.head_size, plan.dtype
    if operation == "encoder_attention":
        keys = torch.full((2, 2, size), NAN, dtype=dtype)
        starts = torch.zeros(1, dtype=torch.int32)
        paged = ("key_cache", "value_cache", "block_table", "seq_lens", "max_seq_len")
        call = call.changed(**dict.fromkeys(paged), key=keys, value=keys, max_key_len=0)
        call = replace(call.changed(key_start_loc=starts), operation=operation)
    zeros = torch.zeros(rows, 4, size, dtype=dtype)
    lse = torch.full((4, rows), -torch.inf)
    found = run_call(setting, call)
    expect_same("output", found[0].cpu(), zeros)
    if found[1] is not None:
        expect_same("log-sum-exp", found[1].cpu(), lse)


@law("paged_attention", cases=[1, 3])
def an_empty_batch_gives_rows_of_zeros(setting: Setting, rows: int) -> None:
    expect_zeros(setting, "paged_attention", rows)


@law("encoder_attention", cases=[1, 3])
def an_empty_ragged_batch_gives_rows_of_zeros(setting: Setting, rows: int) -> None:
    expect_zeros(setting, "encoder_attention", rows)


@law("paged_attention", cases=[(0, 1), (3, 20), (6, 7)])
def nan_in_a_query_affects_only_its_own_row(
    setting: Setting, case: tuple[int, int]
) -> None:
    token, query_len = case
    plan = setting.fit(BatchPlan((1, query_len, 1), (9, 40, 33)))
    call = paged_call(plan, setting.device)
    token %= len(call.query)
    before = run_call(setting, call)
    query = call.query.clone()
    query[token] = NAN
    found = run_call(setting, call.changed(query=query))
    rows = [row for row in range(len(query)) if row != token]
    expect_same("output of other rows", found[0][rows], before[0][rows].cpu())
    if found[1] is not None and before[1] is not None:
        expect_same("their log-sum-exp", found[1][:, rows], before[1][:, rows].cpu())

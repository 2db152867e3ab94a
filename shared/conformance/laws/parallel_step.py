"""Laws of the parallel attention step: several ranks share each sequence and exchange results.

All ranks run in this process, in an order that is drawn (`candidates/calls/ranks.py`). The caches
of the ranks are made position by position, as in the laws of `dcp_attention`. The new tokens are
not in them, so each rank has to write its own ones. Slots that a rank does not use hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.kinds import PAD_SLOT_ID
from ...contract.parallel import KeySplits, RankBatch
from ...engine.rank_group import RankGroup
from ..candidates.calls.calling import expect_right
from ..candidates.calls.ranks import run_ranks
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, LAYOUTS, NAN
from ..cases.options import Call
from ..checks.canaries import checked_values, kept
from ..checks.expect import Disagreement, expect_rejection, expect_same
from .dcp_attention import Dealt
from .law import law


@dataclass(frozen=True)
class Shared:
    """A batch that ranks compute together.

    Args:
        dealt: The batch and how its keys are distributed.
        exchange: How partial results are exchanged.
        splits: Optional. Number of fixed splits and positions per run. If None, there are none.
        order: Seed of the order in which the ranks run.
    """

    dealt: Dealt
    exchange: str = "all_to_all"
    splits: tuple[int, int] | None = None
    order: int = 0


@dataclass(frozen=True)
class Found:
    """The results of one rank: its rows, its cache after the step, and its slots."""

    out: Tensor
    lse: Tensor
    caches: tuple[Tensor, Tensor]
    slots: Tensor


def whole_call(dealt: Dealt, device: torch.device) -> Call:
    """Return attention over the whole sequences, with a tensor for the log-sum-exp."""
    call = dealt.whole(device)
    return replace(call, wants_lse=True, out_dtype=call.dtype)


def without_new_tokens(dealt: Dealt, call: Call, rank: int) -> Call:
    """Write NaN to a rank's cache where its new tokens are to be written, and return the call.

    The caches stay the views that they are: a copy of one might have other strides.
    """
    caches = [call.arguments[name] for name in ("key_cache", "value_cache")]
    for row, query_len, key_len in zip(
        call.rows, dealt.query_lens, dealt.key_lens, strict=True
    ):
        for index, position in enumerate(dealt.positions_of(rank, key_len)):
            if position >= key_len - query_len:
                block, offset = divmod(index, dealt.block_size)
                for cache in caches:
                    cache[row[block], offset] = NAN
    return call


def run_rank(setting: Setting, shared: Shared, whole: Call, ranks: RankGroup) -> Found:
    """Return the results of one rank, whose object has served another step and other queries."""
    dealt = shared.dealt
    heads = whole.query.shape[1] // dealt.ranks
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    full = dealt.share(whole, ranks.rank)
    call = full if dealt.kind == "fp8" else without_new_tokens(dealt, full, ranks.rank)
    given = call.arguments
    query, caches = given["query"][:, own], (given["key_cache"], given["value_cache"])
    step = setting.candidate.DecodeContextParallel(
        ranks,
        num_query_heads=heads,
        head_size=query.shape[-1],
        max_num_tokens=max(1, len(query) + dealt.spare_max),
        interleave_size=dealt.in_a_row,
        exchange=shared.exchange,
        splits=None if shared.splits is None else KeySplits(*shared.splits),
        value_head_size=caches[1].shape[-1],
        dtype=query.dtype,
        device=setting.device,
    )
    # idle steps before it: one whose block table is narrower, one whose blocks are farther apart
    apart = torch.cat([caches[0], caches[0]], dim=1)[:, : dealt.block_size]
    for cache, width in ((caches[0], 1), (apart, None)):
        step.prepare(
            cache,
            given["block_table"][:, :width],
            torch.zeros_like(given["query_start_loc"]),
            torch.zeros_like(given["seq_lens"]),
            num_tokens=len(query),
            max_seq_len=0,
        )
    batch = step.prepare(
        caches[0], given["block_table"], given["query_start_loc"], given["seq_lens"],
        num_tokens=len(query), max_seq_len=given["max_seq_len"],
    )  # fmt: skip
    if dealt.kind != "fp8":
        step.write(*new_tokens(whole, len(query)), *caches, batch)
    out = torch.full((*query.shape[:2], caches[1].shape[-1]), NAN, dtype=whole.dtype)
    out = out.to(setting.device)
    lse = torch.full(
        (heads, len(query)), NAN, dtype=torch.float32, device=setting.device
    )
    options = rank_options(whole, own)
    step.attend(query * 3 + 1, *caches, batch, options=options)
    found = step.attend(
        query,
        *caches,
        batch,
        scale=given.get("scale"),
        out=out,
        lse=lse,
        options=options,
    )
    expect_same("the given output is returned", found.data_ptr(), out.data_ptr())
    return Found(out, lse, caches, batch.slot_mapping)


def rank_options(whole: Call, own: slice) -> AttentionOptions:
    """Return the options of a rank, whose sinks are those of its heads."""
    names = ("logits_soft_cap", "sinks", "k_scale", "v_scale")
    given = {name: whole.arguments[name] for name in names if name in whole.arguments}
    if "sinks" in given:
        given["sinks"] = given["sinks"][own]
    return replace(DEFAULT_OPTIONS, **given)


def new_tokens(whole: Call, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the new tokens, NaN in rows of padding."""
    caches = (whole.arguments["key_cache"], whole.arguments["value_cache"])
    key, value = (
        cache.new_full((tokens, *cache.shape[2:]), NAN, device="cpu")
        for cache in caches
    )
    row = 0
    for request in whole.requests():
        count = len(request.query)
        if count:
            key[row : row + count] = request.key[-count:].to(key.dtype)
            value[row : row + count] = request.value[-count:].to(value.dtype)
        row += count
    return key.to(caches[0].device), value.to(caches[0].device)


def run_all(setting: Setting, shared: Shared, whole: Call) -> list[Found]:
    """Return the results of all ranks."""
    return run_ranks(
        shared.dealt.ranks,
        lambda ranks: run_rank(setting, shared, whole, ranks),
        shared.order,
        setting.device,
    )


@st.composite
def shared_batches(draw: st.DrawFn) -> Shared:
    """Return a ragged batch on one to four ranks, drawn from one seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    ranks = pick.choice([1, 2, 2, 3, 4])
    block_size, in_a_row = pick.choice([(16, 1), (16, 2), (16, 16), (4, 4), (6, 3)])
    query_lens = tuple(pick.choice([0, 1, 1, 2, 4]) for _ in range(pick.randint(0, 3)))
    key_lens = tuple(
        query_len + pick.choice([0, 1, 7, 16, 33]) for query_len in query_lens
    )
    splits = pick.choice([None, (ranks * in_a_row, 1), (2 * ranks, in_a_row)])
    dealt = Dealt(
        query_lens,
        key_lens,
        ranks=ranks,
        in_a_row=in_a_row,
        kind=pick.choice(["plain", "plain", "cap", "sinks", "values", "fp8"]),
        needles=tuple(
            min(pick.choice([-1, 0, key_len - 1, key_len // 2]), key_len - 1)
            for key_len in key_lens
        ),
        block_size=block_size,
        group=ranks * pick.choice([1, 2]),
        dtype=pick.choice(DTYPES),
        layout=pick.choice(LAYOUTS),
        padding=pick.choice([0, 0, 2]),
        spare_max=pick.choice([0, 5]),
        seed=pick.randrange(2**16),
    )
    exchange = "all_to_all" if splits else pick.choice(["all_to_all", "reduce_scatter"])
    return Shared(dealt, exchange, splits, pick.randrange(100))


@law("DecodeContextParallel", cases=shared_batches())
def all_ranks_together_compute_attention_over_the_whole_sequences(
    setting: Setting, shared: Shared
) -> None:
    """In any order of the ranks; each rank returns its own heads."""
    whole = whole_call(shared.dealt, setting.device)
    found = run_all(setting, shared, whole)
    out = torch.cat([answer.out for answer in found], dim=1)
    lse = torch.cat([answer.lse for answer in found])
    expect_right(setting, whole, (out, lse), is_joined=True)


@law("DecodeContextParallel", cases=shared_batches())
def each_new_token_is_written_to_one_slot_of_one_rank(
    setting: Setting, shared: Shared
) -> None:
    """The cache of a rank then holds its share of the keys, and nothing else has changed."""
    dealt = replace(shared.dealt, kind="plain")
    shared = replace(shared, dealt=dealt)
    whole = whole_call(dealt, setting.device)
    found = run_all(setting, shared, whole)
    tokens = sum(dealt.query_lens)
    written = torch.stack([answer.slots != PAD_SLOT_ID for answer in found]).sum(0)
    right = torch.zeros(len(whole.query), dtype=torch.int64)
    right[:tokens] = 1
    expect_same("ranks that write each token", written.cpu(), right)
    for rank, answer in enumerate(found):
        call = dealt.share(whole, rank)
        for name, cache in zip(
            ("key_cache", "value_cache"), answer.caches, strict=True
        ):
            expect_same(f"{name} of rank {rank}", cache, call.arguments[name])


PADDED = [
    Shared(Dealt((1, 2), (9, 20), 2, 2, "sinks", (-1, 0), group=2, padding=2), exchange)
    for exchange in ("all_to_all", "reduce_scatter")
]


@law("DecodeContextParallel", cases=PADDED)
def padding_of_a_parallel_step_gets_zeros_and_no_sink(
    setting: Setting, shared: Shared
) -> None:
    whole = whole_call(shared.dealt, setting.device)
    found = run_all(setting, shared, whole)
    lse = torch.cat([answer.lse for answer in found])[:, -shared.dealt.padding :]
    expect_same("log-sum-exps of padding", lse, torch.full_like(lse, -torch.inf))
    out = torch.cat([answer.out for answer in found], dim=1)[-shared.dealt.padding :]
    expect_same("rows of padding", out, torch.zeros_like(out))


WAYS = ((1, 1), (2, 1), (4, 2), (8, 1))
"""Numbers of ranks and interleave sizes whose product divides 8."""
BITS = [
    Dealt((2,), (37,), 1, 1, "plain", (20,), group=8, seed=3),
    Dealt(
        (1, 0, 1), (40, 3, 5), 1, 1, "sinks", (-1, 0, 4), group=8, dtype=torch.bfloat16
    ),
]


@law("DecodeContextParallel", cases=BITS, claim="batch_invariant")
def fixed_splits_give_the_same_bits_on_any_number_of_ranks(
    setting: Setting, dealt: Dealt
) -> None:
    """And with any interleave size, whatever else is in the batch."""
    seen: list[tuple[Tensor, Tensor]] = []
    for ranks, in_a_row in WAYS:
        redealt = replace(dealt, ranks=ranks, in_a_row=in_a_row)
        whole = whole_call(redealt, setting.device)
        found = run_all(setting, Shared(redealt, splits=(8, 1), order=ranks), whole)
        out = torch.cat([one.out for one in found], dim=1)
        lse = torch.cat([one.lse for one in found])
        seen.append((out, lse))
        where = f"on {ranks} ranks, interleave size {in_a_row}"
        expect_same(f"rows {where}", bits(out), bits(seen[0][0]))
        expect_same(f"log-sum-exps {where}", bits(lse), bits(seen[0][1]))


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element, so that -0 differs from 0."""
    return tensor.contiguous().view(torch.uint8)


CROSS = [
    Dealt((5, 1), (3, 20), 2, 2, seed=9),
    Dealt((2, 2), (0, 9), 3, 1, seed=4),
    Dealt((40, 0, 1), (37, 6, 0), 2, 16, "fp8", padding=3, seed=2),
]


@law("DecodeContextParallel", cases=CROSS)
def tokens_of_a_batch_that_is_not_causal_attend_to_all_keys(
    setting: Setting, dealt: Dealt
) -> None:
    """As in cross-attention, and of the keys before a chunk. The new tokens are not stored."""
    dealt = replace(dealt, group=dealt.ranks)
    whole = whole_call(dealt, setting.device).changed(causal=False)
    heads = whole.query.shape[1] // dealt.ranks

    def work(ranks: RankGroup, bounds: dict[str, int]) -> tuple[Tensor, Tensor]:
        given = dealt.share(whole, ranks.rank).arguments
        step = make_step(setting, ranks, heads, len(whole.query), given)
        batch = prepare(step, given, causal=False, **bounds)
        stored = (batch.slot_mapping != PAD_SLOT_ID).any().item()
        expect_same("a new token has a slot", stored, False)
        lse = torch.full(
            (heads, len(whole.query)), NAN, dtype=torch.float32, device=setting.device
        )
        query = whole.query[:, ranks.rank * heads :][:, :heads]
        caches = (given["key_cache"], given["value_cache"])
        options = rank_options(whole, slice(0, heads))
        return step.attend(query, *caches, batch, lse=lse, options=options), lse

    for bounds in ({}, {"max_query_len": max(dealt.query_lens)}):
        found = run_ranks(
            dealt.ranks, partial(work, bounds=bounds), dealt.seed, setting.device
        )
        out = torch.cat([out_of_rank for out_of_rank, _ in found], dim=1)
        lse = torch.cat([lse_of_rank for _, lse_of_rank in found])
        expect_right(setting, whole, (out, lse), is_joined=True)


@law("DecodeContextParallel", cases=CROSS)
def a_rank_reads_the_keys_of_a_request_that_is_not_causal_once(
    setting: Setting, dealt: Dealt
) -> None:
    """Not once per new token: all of them attend to the same keys."""
    dealt = replace(dealt, group=dealt.ranks)
    whole = whole_call(dealt, setting.device).changed(causal=False)

    def work(ranks: RankGroup) -> list[int]:
        given = dealt.share(whole, ranks.rank).arguments
        step = make_step(setting, ranks, 1, len(whole.query), given)
        longest = max(dealt.query_lens)
        batch = prepare(step, given, causal=False, max_query_len=longest)
        expect_same("longest request", batch.max_query_len, longest)
        starts = whole.arguments["query_start_loc"]
        expect_same("starts of requests", batch.query_start_loc, starts)
        lens: list[int] = batch.seq_lens.tolist()
        return lens

    found = run_ranks(dealt.ranks, work, dealt.seed, setting.device)
    for rank, lens in enumerate(found):
        right = [len(dealt.positions_of(rank, key_len)) for key_len in dealt.key_lens]
        expect_same(f"keys of each request on rank {rank}", lens, right)


def make_step(
    setting: Setting, ranks: RankGroup, heads: int, tokens: int, given: dict[str, Any]
) -> Any:
    """Return the step of a rank."""
    return setting.candidate.DecodeContextParallel(
        ranks,
        num_query_heads=heads,
        head_size=given["key_cache"].shape[-1],
        max_num_tokens=tokens,
        interleave_size=given["dcp_kv_cache_interleave_size"],
        dtype=given["query"].dtype,
        device=setting.device,
    )


def prepare(step: Any, given: dict[str, Any], **changes: Any) -> RankBatch:
    """Return the batch of a rank."""
    names = ("key_cache", "block_table", "query_start_loc", "seq_lens", "max_seq_len")
    arguments = {name: given[name] for name in names}
    arguments["num_tokens"] = len(given["query"])
    batch: RankBatch = step.prepare(**arguments | changes)
    return batch


ONE = Dealt((2, 1), (40, 9), 1, 1)
Change = Callable[[dict[str, Any]], dict[str, Any]]
UNFIT_STEPS: dict[str, dict[str, Any]] = {
    "no interleave": {"interleave_size": 0},
    "an unknown exchange": {"exchange": "ring"},
    "no heads": {"num_query_heads": 0},
    "no tokens": {"max_num_tokens": 0},
    "splits without a run": {"splits": KeySplits(4, 0)},
    "splits that are added": {"splits": KeySplits(4), "exchange": "reduce_scatter"},
}
UNFIT_BATCHES: dict[str, Change] = {
    "more tokens than the buffers hold": lambda given: {"num_tokens": 9},
    "a bound that no row holds": lambda given: {"max_seq_len": 10**4},
    "lengths of 64 bits": lambda given: {"seq_lens": given["seq_lens"].long()},
}
UNFIT_CALLS: dict[str, dict[str, Any]] = {
    "a window": {"options": AttentionOptions(sliding_window=8)},
    "invariance without splits": {"options": AttentionOptions(batch_invariant=True)},
    "sinks for other heads": {"options": AttentionOptions(sinks=torch.ones(5))},
    "an output of another shape": {"out": torch.zeros(3, 4, 5)},
}


@law(
    "DecodeContextParallel",
    cases=[*UNFIT_STEPS, *UNFIT_BATCHES, *UNFIT_CALLS],
    claim="rejects shapes",
)
def invalid_parallel_steps_are_rejected(setting: Setting, what: str) -> None:
    whole = whole_call(ONE, setting.device)
    given = ONE.share(whole, 0).arguments
    heads, tokens = whole.query.shape[1], len(whole.query)
    right: dict[str, Any] = {
        "num_query_heads": heads, "head_size": 16, "max_num_tokens": tokens,
        "device": setting.device,
    }  # fmt: skip
    make = setting.candidate.DecodeContextParallel
    if what in UNFIT_STEPS:
        changed = right | UNFIT_STEPS[what]
        expect_rejection(what, lambda: make(RankGroup(), **changed))
        return
    step = make(RankGroup(), **right)
    if what in UNFIT_BATCHES:
        changes = UNFIT_BATCHES[what](given)
        expect_rejection(what, lambda: prepare(step, given, **changes))
        return
    batch = prepare(step, given)
    caches = given["key_cache"], given["value_cache"]
    with kept(key=caches[0], value=caches[1]):
        expect_rejection(
            what, lambda: step.attend(whole.query, *caches, batch, **UNFIT_CALLS[what])
        )


OF_RANKS: dict[str, tuple[Any, Any]] = {
    "num_query_heads": (2, 4),
    "head_size": (16, 32),
    "max_num_tokens": (4, 5),
    "interleave_size": (1, 2),
    "exchange": ("all_to_all", "reduce_scatter"),
    "splits": (KeySplits(2), KeySplits(4)),
    "the default splits": (None, KeySplits(2)),
    "value_head_size": (None, 8),
    "dtype": (torch.float32, torch.bfloat16),
}
"""Arguments of two ranks that differ."""


@law("DecodeContextParallel", cases=list(OF_RANKS))
def ranks_that_do_not_agree_on_the_step_are_rejected(
    setting: Setting, what: str
) -> None:
    """Every rank raises, before any result is exchanged."""
    name = what.removeprefix("the default ")

    def work(ranks: RankGroup) -> str:
        given = {"num_query_heads": 2, "head_size": 16, "max_num_tokens": 4}
        given[name] = OF_RANKS[what][ranks.rank]
        make = setting.candidate.DecodeContextParallel
        try:
            make(ranks, **given, device=setting.device)
        except RuntimeError as error:
            return str(error)
        return ""

    for rank, message in enumerate(run_ranks(2, work, 0, setting.device)):
        if f"rank {rank}" not in message:
            raise Disagreement("error", f"of rank {rank}", message, f"rank {rank} ...")


DIFFERENT_BATCHES: dict[str, Change] = {
    "query_start_loc": lambda given: {
        "query_start_loc": given["query_start_loc"].clamp(max=2)
    },
    "seq_lens": lambda given: {"seq_lens": given["seq_lens"] - 1},
    "num_tokens": lambda given: {"num_tokens": len(given["query"]) + 1},
    "max_seq_len": lambda given: {"max_seq_len": given["max_seq_len"] + 1},
    "requests": lambda given: {
        "query_start_loc": given["query_start_loc"][[0, 1, 2, 2]],
        "seq_lens": given["seq_lens"].repeat(2)[:3],
        "block_table": given["block_table"].repeat(2, 1)[:3],
    },
    "causal": lambda given: {"causal": False},
    "block_shape": lambda given: {"key_cache": given["key_cache"].repeat(1, 1, 2, 1)},
    "cache_dtype": lambda given: {"key_cache": given["key_cache"].double()},
}
"""Arguments of `prepare` on the second rank, which are right by themselves."""


@law("DecodeContextParallel", cases=list(DIFFERENT_BATCHES))
def ranks_that_do_not_agree_on_the_batch_are_rejected(
    setting: Setting, what: str
) -> None:
    """Where contents are validated. Every rank raises, before any result is exchanged."""
    dealt = replace(ONE, ranks=2)
    whole = whole_call(dealt, setting.device)

    def work(ranks: RankGroup) -> str:
        given = dealt.share(whole, ranks.rank).arguments
        step = make_step(setting, ranks, 1, len(whole.query) + 1, given)
        changes = DIFFERENT_BATCHES[what](given) if ranks.rank else {}
        try:
            prepare(step, given, **changes)
        except RuntimeError as error:
            return str(error)
        return ""

    with checked_values():
        found = run_ranks(2, work, 0, setting.device)
    for rank, message in enumerate(found):
        if f"{what} = " not in message:
            raise Disagreement("error", f"of rank {rank}", message, f"{what} = ...")

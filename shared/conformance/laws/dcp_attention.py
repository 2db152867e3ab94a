"""Laws of decode context parallel (DCP) attention: several ranks share each sequence.

Positions are assigned to ranks here one by one, and the expected result of a rank is computed over
the keys that it stores. The results of all ranks, combined in float64, are attention over the whole
sequence, which is computed too. Slots that a rank does not use hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..candidates.calls.calling import (
    Result,
    expect_right,
    expect_same_results,
    run_call,
)
from ..candidates.setting import Setting
from ..cases.batches import (
    DTYPES,
    LAYOUTS,
    NAN,
    BatchPlan,
    draw_rows,
    empty_cache,
    table_of_rows,
)
from ..cases.options import Call, paged_call, quantised_call, slopes
from ..cases.reuse import compiled
from ..checks.canaries import kept
from ..checks.expect import Disagreement, budgets, expect_budget, expect_rejection
from ..oracles.brute_force import (
    Answer,
    OracleRequest,
    attend_by_hand,
    judge_log_sum_exp,
)
from .law import law

KINDS = ("plain", "plain", "cap", "sinks", "values", "fp8", "fp8")


@dataclass(frozen=True)
class Dealt:
    """The parameters of a batch whose keys are distributed over ranks.

    Args:
        query_lens, key_lens: new tokens and keys of each request, on all ranks together.
        ranks, in_a_row: number of ranks, and consecutive positions that go to the same rank.
        kind: the option that is set, one of KINDS.
        needles: index of the key that outweighs all others, per request. If -1, there is none.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    ranks: int
    in_a_row: int
    kind: str = "plain"
    needles: tuple[int, ...] = ()
    block_size: int = 16
    group: int = 2
    dtype: torch.dtype = torch.float32
    layout: str = "separate"
    padding: int = 0
    spare_max: int = 0
    seed: int = 0

    def whole(self, device: torch.device) -> Call:
        """Return attention over the whole sequences."""
        plan = BatchPlan(
            self.query_lens,
            self.key_lens,
            kv_heads=1 + self.seed % 2,
            group=self.group,
            dtype=self.dtype,
            padding=self.padding,
            seed=self.seed,
        )
        needles = [(req, key) for req, key in enumerate(self.needles) if key >= 0]
        call = paged_call(plan, device, needles)
        # near the largest log-sum-exp of each head
        level = call.answer().lse.amax(1) if len(call.query) else torch.zeros(1)
        level = level + slopes(call.query.shape[1], 2.0) - 1
        options: dict[str, dict[str, Any]] = {
            "cap": {"logits_soft_cap": 3.0},
            "sinks": {"sinks": level.clamp(min=-9.0).float()},
        }
        if self.kind == "fp8":
            heads = call.arguments["key_cache"].shape[2]
            scales = (slopes(heads, 0.2), slopes(heads, 0.01).flip(0))
            return quantised_call(call, torch.float8_e4m3fn, *scales)
        if self.kind == "values":
            values = call.arguments["value_cache"][..., :11]
            call = call.changed(value_cache=values)
        return call.changed(**options.get(self.kind, {}))

    def positions_of(self, rank: int, count: int) -> list[int]:
        """Return those of the first `count` positions that a rank stores."""
        return [
            position
            for position in range(count)
            if position // self.in_a_row % self.ranks == rank
        ]

    def share(self, call: Call, rank: int) -> Call:
        """Return the call of one rank, with its own cache, blocks and block table."""
        requests, size = call.requests(), self.block_size
        owned = [self.positions_of(rank, key_len) for key_len in self.key_lens]
        counts = [-(-len(positions) // size) for positions in owned]
        generator = torch.Generator().manual_seed(self.seed + rank)
        rows, num_blocks = draw_rows(counts, "scattered", generator)
        longest = max(self.key_lens, default=0) + self.spare_max
        width = -(-len(self.positions_of(rank, longest)) // size) + rank % 2
        caches = {}
        for half, name in enumerate(("key_cache", "value_cache")):
            like = call.arguments[name]
            cache = empty_cache(
                self.layout, num_blocks, size, like.shape[2], like.shape[3], like.dtype
            )[half]
            for row, positions, request in zip(rows, owned, requests, strict=True):
                numbers = request.value if half else request.key
                for index, position in enumerate(positions):
                    cache[row[index // size], index % size] = numbers[position]
            caches[name] = cache
        changes = {
            **caches,
            "block_table": table_of_rows(rows, width),
            "max_seq_len": longest,
            "max_query_len": max(self.query_lens, default=0) + self.spare_max,
            "dcp_world_size": self.ranks,
            "dcp_rank": rank,
            "dcp_kv_cache_interleave_size": self.in_a_row,
            "causal": None,
        }
        return replace(call.changed(**changes), operation="dcp_attention", rows=rows)

    def answer_of(self, call: Call, rank: int) -> Answer:
        """Return the expected result of a rank: each token attends to its keys up to itself."""
        requests = []
        for request, key_len in zip(call.requests(), self.key_lens, strict=True):
            context = key_len - len(request.query)
            for own in range(len(request.query)):
                positions = self.positions_of(rank, context + own + 1)
                one = request.query[own : own + 1]
                scales = (
                    None if scale is None else scale[positions]
                    for scale in (request.k_scale, request.v_scale)
                )  # fmt: skip
                keys, values = request.key[positions], request.value[positions]
                requests.append(OracleRequest(one, keys, values, *scales))
        given = call.arguments
        names = ("scale", "logits_soft_cap", "k_scale", "v_scale")
        options = {name: given[name] for name in names if name in given}
        if rank == 0 and "sinks" in given:
            options["sinks"] = given["sinks"]
        options["causal"] = False
        if not requests:
            empty = call.query.cpu()[:0]
            requests = [
                OracleRequest(
                    empty,
                    *(
                        given[name].cpu()[0, :0]
                        for name in ("key_cache", "value_cache")
                    ),
                )
            ]
        return attend_by_hand(requests, options, len(call.query))


@st.composite
def deals(draw: st.DrawFn) -> Dealt:
    """Return a ragged batch and its ranks, drawn from one seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    reqs = pick.randint(1, 3)
    query_lens = tuple(pick.choice([0, 1, 1, 2, 5]) for _ in range(reqs))
    contexts = [0, 1, 2, 7, 15, 16, 17, 31, 40, 64]
    key_lens = tuple(query_len + pick.choice(contexts) for query_len in query_lens)
    needles = tuple(
        pick.choice([-1, 0, key_len - 1, key_len - query_len, key_len // 2])
        for query_len, key_len in zip(query_lens, key_lens, strict=True)
    )
    return Dealt(
        query_lens,
        key_lens,
        ranks=pick.choice([1, 2, 2, 3, 4]),
        in_a_row=pick.choice([1, 1, 2, 3, 16]),
        kind=kernel.choice(KINDS),
        needles=tuple(
            min(needle, key_len - 1)
            for needle, key_len in zip(needles, key_lens, strict=True)
        ),
        block_size=kernel.choice([16, 16, 1, 3]),
        group=kernel.choice([1, 2, 3]),
        dtype=kernel.choice(DTYPES),
        layout=kernel.choice(LAYOUTS),
        padding=pick.choice([0, 0, 2]),
        spare_max=pick.choice([0, 0, 5]),
        seed=pick.randrange(2**16),
    )


@law("dcp_attention", cases=deals())
def a_rank_attends_to_the_keys_that_it_stores(setting: Setting, dealt: Dealt) -> None:
    """Zero and minus infinity where it stores none. Sinks are counted on rank 0 only."""
    whole = dealt.whole(setting.device)
    # one rank per case; another law runs all ranks
    rank = Random(dealt.seed).randrange(dealt.ranks)
    call = dealt.share(whole, rank)
    answer = dealt.answer_of(whole, rank)
    expect_right(setting, call, run_call(setting, call), answer)


def run_all_ranks(setting: Setting, dealt: Dealt, whole: Call) -> list[Result]:
    """Return every rank's result. The output is float32, so that it is rounded once."""
    tokens, heads, _ = whole.query.shape
    size = whole.arguments["value_cache"].shape[-1]
    shape = (tokens, heads, size)
    found: list[Result] = []
    for rank in range(dealt.ranks):
        out = torch.full(shape, NAN, device=setting.device)
        lse = torch.full((heads, tokens), NAN, device=setting.device)
        call = dealt.share(whole, rank)
        setting.candidate.dcp_attention(**call.keywords, out=out, lse=lse)
        found.append((out, lse))
    return found


@law("dcp_attention", cases=deals())
def the_combined_results_of_all_ranks_are_full_attention(
    setting: Setting, dealt: Dealt
) -> None:
    # every token is a program on every rank, so there are few of both
    few = tuple(min(query_len, 2) for query_len in dealt.query_lens)
    dealt = replace(dealt, ranks=min(dealt.ranks, 3), query_lens=few)
    whole = dealt.whole(setting.device)
    found = run_all_ranks(setting, dealt, whole)
    # step: combine the partial results of the ranks in float64
    lses = torch.stack([lse for _, lse in found if lse is not None]).cpu().double()
    joint = lses.logsumexp(0)
    # the softmax over no key is 0 / 0
    shares = lses.softmax(0).masked_fill(lses == -torch.inf, 0.0)
    outs = torch.stack([out for out, _ in found]).cpu().double()
    total = (shares.transpose(1, 2)[..., None] * outs).sum(0)
    # step: compare it with attention over the whole sequences
    answer = whole.answer()
    same, _ = whole.run_into(setting.truth, None, False, compute_dtype=whole.dtype)
    stored, terms = total.to(whole.dtype), answer.terms(is_joined=True)
    expect_budget("joint output", stored, answer.out, same, *terms)
    share = judge_log_sum_exp(joint.float(), answer)
    if share > 1:
        raise Disagreement(
            "joint log-sum-exp", f"as a whole{budgets(share, 'its')}", joint, answer.lse
        )


EDGES = [
    Dealt((8, 1), (37, 20), ranks, in_a_row, needles=(needle, 19), seed=needle)
    for ranks, in_a_row in ((2, 1), (3, 2), (2, 16))
    for needle in (0, 15, 16, 32, 36)
]


@law("dcp_attention", cases=EDGES)
def a_new_token_attends_to_no_later_key_on_any_rank(
    setting: Setting, dealt: Dealt
) -> None:
    whole = dealt.whole(setting.device)
    keeper = dealt.needles[0] // dealt.in_a_row % dealt.ranks
    call = dealt.share(whole, keeper)
    expect_right(setting, call, run_call(setting, call), dealt.answer_of(whole, keeper))


TWO = Dealt((3, 1), (40, 9), 2, 1)


@law("dcp_attention", cases=[0, 1])
def a_rank_changes_nothing_that_it_reads(setting: Setting, rank: int) -> None:
    """The default interleave size is 1, and an output is allocated if none is given."""
    call = TWO.share(TWO.whole(setting.device), rank)
    tensors = {
        name: argument
        for name, argument in call.arguments.items()
        if isinstance(argument, Tensor)
    }
    with kept(**tensors):
        once = run_call(setting, call)
    made = replace(call, out_dtype=None, wants_lse=False)
    made = made.changed(dcp_kv_cache_interleave_size=None)
    expect_same_results("made", run_call(setting, made), once)


Change = Callable[[Call], dict[str, Any]]
UNFIT: dict[str, Change] = {
    "a rank that is not there": lambda call: {"dcp_rank": 2},
    "a negative rank": lambda call: {"dcp_rank": -1},
    "no ranks": lambda call: {"dcp_world_size": 0, "dcp_rank": 0},
    "nothing in a row": lambda call: {"dcp_kv_cache_interleave_size": 0},
    "a bound that no row holds": lambda call: {"max_seq_len": 10**4},
    "a negative bound": lambda call: {"max_seq_len": -1},
    "a window": lambda call: {"sliding_window": 8},
    "chunks": lambda call: {"attention_chunk_size": 16},
    "slopes": lambda call: {"alibi_slopes": torch.ones(2)},
    "a bias": lambda call: {"position_bias": torch.ones(2, 3)},
    "ranges": lambda call: {"query_ranges": torch.zeros(4, 2, dtype=torch.int32)},
    "lengths of 64 bits": lambda call: {"seq_lens": call.arguments["seq_lens"].long()},
    "sinks for other heads": lambda call: {"sinks": torch.ones(3)},
    "an output of integers": lambda call: {
        "out": call.query.new_zeros(call.query.shape).int()
    },
    "a log-sum-exp of 16 bits": lambda call: {
        "lse": call.query.new_zeros(call.query.shape[1], 4, dtype=torch.float16)
    },
    "queries as output": lambda call: {"out": call.query},
}
CONTENTS: dict[str, Change] = {
    "more new tokens than keys": lambda call: {
        "seq_lens": torch.tensor([2, 9], dtype=torch.int32)
    },
    "a length above its bound": lambda call: {
        "seq_lens": torch.tensor([41, 9], dtype=torch.int32)
    },
    "a negative length": lambda call: {
        "seq_lens": torch.tensor([40, -1], dtype=torch.int32)
    },
    "starts that fall": lambda call: {
        "query_start_loc": torch.tensor([0, 3, 2], dtype=torch.int32)
    },
    "a block that is not there": lambda call: {
        "block_table": call.arguments["block_table"].clamp(max=0) + 10**6
    },
}


def expect_rejected(setting: Setting, what: str, change: Change) -> None:
    call = TWO.share(TWO.whole(setting.device), 1)
    shape = call.query.shape
    with setting.device:
        changes = change(call)
        out = changes.pop("out", torch.full(shape, 7.0))
        lse = changes.pop("lse", torch.full((shape[1], 4), NAN))
    call = call.changed(**changes)
    with kept(out=out, lse=lse):
        expect_rejection(
            what,
            lambda: setting.candidate.dcp_attention(**call.keywords, out=out, lse=lse),
        )


@law("dcp_attention", cases=[*UNFIT], claim="rejects shapes")
def invalid_arguments_of_a_rank_are_rejected(setting: Setting, what: str) -> None:
    expect_rejected(setting, what, UNFIT[what])


@law("dcp_attention", cases=[*CONTENTS], claim="rejects contents")
def invalid_batches_of_a_rank_are_rejected_if_contents_are_checked(
    setting: Setting, what: str
) -> None:
    expect_rejected(setting, what, CONTENTS[what])

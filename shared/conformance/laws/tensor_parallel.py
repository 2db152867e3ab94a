"""Laws of tensor parallelism over heads, also together with decode context parallelism."""

import torch

from ...engine.rank_group import RankGroup
from ..candidates.calls.calling import expect_right
from ..candidates.calls.ranks import run_ranks
from ..candidates.setting import Setting
from ..cases.batches import NAN
from ..checks.expect import expect_rejection, expect_same
from .dcp_attention import Dealt
from .law import law
from .parallel_step import make_step, prepare, whole_call

HEADS = [(8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (6, 6, 3), (8, 1, 8), (64, 8, 16)]
"""Query heads, KV heads, ranks."""


@law("get_tp_heads", cases=HEADS)
def each_query_head_is_on_one_rank_with_the_kv_head_that_it_reads(
    setting: Setting, heads: tuple[int, int, int]
) -> None:
    query_heads, kv_heads, world_size = heads
    found: list[int] = []
    for rank in range(world_size):
        own = setting.candidate.get_tp_heads(query_heads, kv_heads, world_size, rank)
        found += range(own.query_start, own.query_stop)
        right = {
            head * kv_heads // query_heads
            for head in range(own.query_start, own.query_stop)
        }
        where = f"KV heads of rank {rank}"
        expect_same(where, list(range(own.kv_start, own.kv_stop)), sorted(right))
        expect_same("copies", own.copies, max(1, world_size // kv_heads))
    expect_same("query heads of all ranks", found, list(range(query_heads)))


@law(
    "get_dcp_groups", "get_tp_heads", cases=[(2, 8, 2), (2, 8, 4), (4, 4, 1), (1, 6, 3)]
)
def ranks_of_a_group_store_the_same_kv_heads(
    setting: Setting, sizes: tuple[int, int, int]
) -> None:
    kv_heads, tp_world_size, dcp_world_size = sizes
    groups = setting.candidate.get_dcp_groups(*sizes)
    every = [rank for group in groups for rank in group]
    expect_same("ranks of all groups", every, list(range(tp_world_size)))
    for group in groups:
        expect_same("ranks of a group", len(group), dcp_world_size)
        firsts = [
            setting.candidate.get_tp_heads(
                kv_heads * tp_world_size, kv_heads, tp_world_size, rank
            ).kv_start
            for rank in group
        ]
        expect_same("first KV head", firsts, firsts[:1] * dcp_world_size)


BOTH = [
    (Dealt((1, 2), (37, 20), 2, 2, needles=(36, 0), group=4, seed=5), 8),
    (Dealt((1, 1), (17, 40), 2, 1, needles=(-1, 39), group=2, seed=7), 4),
    (Dealt((2, 1), (30, 5), 3, 1, needles=(29, -1), group=3, seed=9), 6),
]
"""A batch whose keys are on some ranks, and the ranks over which its heads are distributed."""
KV_HEADS = 2
Both = tuple[Dealt, int]


def run_rank(
    setting: Setting, case: Both, group: list[int], ranks: RankGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and log-sum-exps of the heads of one rank of a group."""
    dealt, tp_world_size = case
    whole = whole_call(dealt, setting.device)
    own = setting.candidate.get_tp_heads(
        whole.query.shape[1], KV_HEADS, tp_world_size, group[ranks.rank]
    )
    given = dict(dealt.share(whole, ranks.rank).arguments)
    for name in ("key_cache", "value_cache"):
        given[name] = given[name][:, :, own.kv_start : own.kv_stop]
    query = whole.query[:, own.query_start : own.query_stop]
    heads = query.shape[1]
    step = make_step(setting, ranks, heads, len(query), given)
    batch = prepare(step, given)
    lse = torch.full(
        (heads, len(query)), NAN, dtype=torch.float32, device=setting.device
    )
    caches = given["key_cache"], given["value_cache"]
    return step.attend(query, *caches, batch, lse=lse), lse


def groups_of(setting: Setting, case: Both) -> list[list[int]]:
    """Return the groups of ranks that share the keys of the same KV heads."""
    dealt, tp_world_size = case
    groups: list[list[int]] = setting.candidate.get_dcp_groups(
        KV_HEADS, tp_world_size, dealt.ranks
    )
    return groups


@law("get_tp_heads", "get_dcp_groups", "DecodeContextParallel", cases=BOTH)
def heads_and_keys_on_several_ranks_together_are_attention_on_one(
    setting: Setting, case: Both
) -> None:
    dealt = case[0]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for group in groups_of(setting, case):

        def work(
            ranks: RankGroup, group: list[int] = group
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return run_rank(setting, case, group, ranks)

        found += run_ranks(dealt.ranks, work, dealt.seed, setting.device)
    rows = torch.cat([out for out, _ in found], dim=1)
    lses = torch.cat([lse for _, lse in found])
    whole = whole_call(dealt, setting.device)
    expect_right(setting, whole, (rows, lses), is_joined=True)


UNFIT_HEADS = {
    "heads that do not divide": (8, 2, 3, 0),
    "kv heads that do not divide": (12, 4, 6, 0),
    "a rank that does not exist": (8, 2, 2, 2),
}
UNFIT_GROUPS = {
    "a group with several kv heads": (2, 4, 4),
    "a group without ranks": (2, 4, 0),
}


@law(
    "get_tp_heads", "get_dcp_groups", cases=[*UNFIT_HEADS, *UNFIT_GROUPS],
    claim="rejects shapes",
)  # fmt: skip
def heads_that_do_not_fit_the_ranks_are_rejected(setting: Setting, what: str) -> None:
    twin = setting.candidate
    if what in UNFIT_HEADS:
        expect_rejection(what, lambda: twin.get_tp_heads(*UNFIT_HEADS[what]))
    else:
        expect_rejection(what, lambda: twin.get_dcp_groups(*UNFIT_GROUPS[what]))

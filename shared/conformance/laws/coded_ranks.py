"""Laws of attention on several ranks over cache formats whose scales are measured.

Each rank has codes and scales of its own. Slots that it does not use have scales of NaN.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...contract.attention_options import OPTION_NAMES, AttentionOptions
from ...contract.cache_formats import CacheFormat, head_size_of
from ...contract.parallel import KeySplits
from ...engine.rank_group import RankGroup
from ..candidates.calls.calling import expect_right, run_call
from ..candidates.calls.ranks import run_ranks
from ..candidates.setting import Setting
from ..cases.batches import NAN
from ..cases.options import Call
from ..checks.coded_caches import CODED, PACKED, coded_call
from .cache_formats import name_of
from .dcp_attention import Dealt
from .law import law
from .parallel_step import Shared, new_tokens, prepare, whole_call, without_new_tokens

SCALES = ("k_scale", "v_scale", "k_global_scale", "v_global_scale")


@law(
    "dcp_attention",
    cases=[
        Dealt((1, 2), (40, 21), 2, 2, needles=(30, -1), seed=4),
        Dealt((3, 1), (33, 7), 3, 1, "sinks", (-1, 5), seed=1),
    ],
)
def a_rank_attends_to_the_codes_that_it_stores(setting: Setting, dealt: Dealt) -> None:
    for form in CODED:
        whole = dealt.whole(setting.device)
        whole_codes = coded_call(whole, form, dealt.seed)
        for rank in range(dealt.ranks):
            call = coded_call(dealt.share(whole, rank), form, dealt.seed)
            answer = dealt.answer_of(whole_codes, rank)
            expect_right(setting, call, run_call(setting, call), answer)


STEPS = [
    Shared(Dealt((2, 1), (37, 20), 2, 2, "plain", (20, -1), seed=1)),
    Shared(
        Dealt((1, 0, 4), (40, 3, 5), 3, 1, "sinks", group=3, seed=2), "reduce_scatter"
    ),
    Shared(Dealt((1, 3), (50, 19), 2, 2, "plain", (-1, 7), seed=3), splits=(4, 2)),
    Shared(Dealt((2,), (37,), 1, 1, "cap", (20,), padding=1, seed=5), splits=(8, 1)),
]


@law("DecodeContextParallel", cases=STEPS)
def ranks_write_and_read_codes_of_their_own(setting: Setting, shared: Shared) -> None:
    """The cache of a rank holds codes before the step, and the step writes its new tokens."""
    dealt = shared.dealt
    for form in CODED:
        whole = whole_call(dealt, setting.device)

        def work(
            ranks: RankGroup, form: CacheFormat = form, whole: Call = whole
        ) -> tuple[Tensor, Tensor]:
            return step_over_codes(setting, shared, whole, form, ranks)

        found = run_ranks(dealt.ranks, work, shared.order, setting.device)
        out = torch.cat([out_of_rank for out_of_rank, _ in found], dim=1)
        lse = torch.cat([lse_of_rank for _, lse_of_rank in found])
        coded = coded_call(whole, form, dealt.seed)
        expect_right(setting, coded, (out, lse), is_joined=True)


def step_over_codes(
    setting: Setting, shared: Shared, whole: Call, form: CacheFormat, ranks: RankGroup
) -> tuple[Tensor, Tensor]:
    """Return the rows of a rank's heads and their log-sum-exps.

    With fixed splits, codes and scales are in contiguous tensors.
    """
    dealt, rank = shared.dealt, ranks.rank
    heads = whole.query.shape[1] // dealt.ranks
    own = slice(rank * heads, (rank + 1) * heads)
    call = without_new_tokens(dealt, dealt.share(whole, rank), rank)
    order = None if shared.splits is None else PACKED
    given = coded_call(call, form, dealt.seed, order).arguments
    query, caches = given["query"][:, own], (given["key_cache"], given["value_cache"])
    step = setting.candidate.DecodeContextParallel(
        ranks,
        num_query_heads=heads,
        head_size=query.shape[-1],
        max_num_tokens=len(query),
        interleave_size=dealt.in_a_row,
        exchange=shared.exchange,
        splits=None if shared.splits is None else KeySplits(*shared.splits),
        value_head_size=head_size_of(caches[1]),
        dtype=query.dtype,
        device=setting.device,
    )
    batch = prepare(step, given)
    scales = {name: given[name] for name in SCALES if name in given}
    new = new_tokens(whole, len(query))
    step.write(*new, *caches, batch, **scales, **name_of(form))
    options = {name: given[name] for name in OPTION_NAMES if name in given}
    options |= {"causal": None}
    if "sinks" in options:
        options["sinks"] = options["sinks"][own]
    lse = torch.full((heads, len(query)), NAN, device=setting.device)
    out = step.attend(
        query, *caches, batch, scale=given.get("scale"), lse=lse,
        options=replace(AttentionOptions(), **options),
    )  # fmt: skip
    return out, lse

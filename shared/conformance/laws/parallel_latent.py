"""Laws of latent attention (MLA) on several ranks that share each sequence's latents.

A latent cache has one KV head, and its values are the first elements of its keys. All ranks would
store the same latents under tensor parallelism. Decode context parallelism gives each a share.
"""

import torch
from torch import Tensor

from ...contract.parallel import KeySplits
from ...engine.rank_group import RankGroup
from ..candidates.calls.calling import expect_right
from ..candidates.calls.ranks import run_ranks
from ..candidates.setting import Setting
from ..cases.batches import NAN
from ..cases.options import Call
from ..checks.expect import expect_same
from .dcp_attention import Dealt
from .law import law
from .parallel_step import Shared, new_tokens, prepare, whole_call, without_new_tokens

VALUE_SIZE = 8
LATENTS = [
    Shared(Dealt((1, 1, 0), (37, 20, 3), 2, 1, needles=(36, 0, -1), group=4, seed=4)),
    Shared(
        Dealt((2, 1), (37, 9), 4, 4, needles=(-1, 8), group=8, padding=1, seed=6),
        "reduce_scatter",
    ),
    Shared(
        Dealt((1, 3), (40, 17), 2, 2, dtype=torch.bfloat16, group=4, seed=2),
        splits=(8, 1),
    ),
]


def latent_call(dealt: Dealt, device: torch.device) -> Call:
    """Return attention over the whole sequences, whose values are parts of the keys."""
    call = whole_call(dealt, device)
    values = call.arguments["key_cache"][..., :VALUE_SIZE]
    return call.changed(value_cache=values)


def run_rank(
    setting: Setting, shared: Shared, whole: Call, ranks: RankGroup
) -> tuple[Tensor, Tensor]:
    """Return rows and log-sum-exps of a rank, which writes its own new latents."""
    dealt, twin = shared.dealt, setting.candidate
    full = dealt.share(whole, ranks.rank)
    given = without_new_tokens(dealt, full, ranks.rank).arguments
    cache = given["key_cache"][:, :, 0]
    heads = whole.query.shape[1] // dealt.ranks
    query = whole.query[:, ranks.rank * heads :][:, :heads]
    step = twin.DecodeContextParallel(
        ranks,
        num_query_heads=heads,
        head_size=cache.shape[-1],
        max_num_tokens=len(query),
        interleave_size=dealt.in_a_row,
        exchange=shared.exchange,
        splits=None if shared.splits is None else KeySplits(*shared.splits),
        value_head_size=VALUE_SIZE,
        dtype=query.dtype,
        device=setting.device,
    )
    keys, values = cache[:, :, None], cache[:, :, None, :VALUE_SIZE]
    batch = prepare(step, given | {"key_cache": keys})
    latents = new_tokens(whole, len(query))[0][:, 0]
    twin.concat_and_cache_mla(
        latents[:, :VALUE_SIZE], latents[:, VALUE_SIZE:], cache, batch.slot_mapping
    )
    expect_same("the rank's latents", keys, full.arguments["key_cache"])
    lse = torch.full(
        (heads, len(query)), NAN, dtype=torch.float32, device=setting.device
    )
    out = step.attend(query, keys, values, batch, lse=lse, scale=given.get("scale"))
    return out, lse


@law("DecodeContextParallel", "concat_and_cache_mla", cases=LATENTS)
def latents_on_several_ranks_are_attention_over_all_of_them(
    setting: Setting, shared: Shared
) -> None:
    """Each rank writes its own new latents, and attends with the heads of all ranks."""
    whole = latent_call(shared.dealt, setting.device)
    found = run_ranks(
        shared.dealt.ranks,
        lambda ranks: run_rank(setting, shared, whole, ranks),
        shared.order,
        setting.device,
    )
    out = torch.cat([out_of_rank for out_of_rank, _ in found], dim=1)
    lse = torch.cat([lse_of_rank for _, lse_of_rank in found])
    expect_right(setting, whole, (out, lse), is_joined=True)

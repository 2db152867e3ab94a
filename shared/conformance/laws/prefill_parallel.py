"""Laws of prefill context parallelism: ranks compute chunks of each prompt.

All ranks run in this process, in an order that is drawn (`candidates/calls/ranks.py`). A rank gets
the tokens that it lists itself, and the law checks that every token is listed once.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...engine.rank_group import RankGroup
from ..candidates.calls.calling import expect_right
from ..candidates.calls.ranks import run_ranks
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, NAN, BatchPlan
from ..cases.options import Call, paged_call, slopes
from ..checks.expect import Disagreement, expect_rejection, expect_same
from .law import law


@dataclass(frozen=True)
class Prompts:
    """Prompts that ranks compute together.

    Args:
        lens: Tokens of each prompt.
        ranks: Number of ranks.
        kind: The option that is set.
        needles: Index of the key that outweighs all others, per prompt. If -1, there is none.
        block_size: Slots in a block of the gathered keys.
        order: Seed of the order in which the ranks run.
        operation: What computes them.
    """

    lens: tuple[int, ...]
    ranks: int
    kind: str = "plain"
    needles: tuple[int, ...] = ()
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    order: int = 0
    operation: str = "PrefillContextParallel"

    def call(self, device: torch.device) -> Call:
        """Return attention over the prompts on one rank."""
        plan = BatchPlan(self.lens, self.lens, dtype=self.dtype, seed=self.order)
        needles = [(req, key) for req, key in enumerate(self.needles) if key >= 0]
        call = paged_call(plan, device, needles)
        options: dict[str, dict[str, Any]] = {
            "window": {"sliding_window": 5},
            "slopes": {"alibi_slopes": slopes(call.query.shape[1], 0.5)},
            "cap": {"logits_soft_cap": 3.0},
            "sinks": {"sinks": slopes(call.query.shape[1], 1.0)},
            "invariant": {"batch_invariant": True},
        }
        call = call.changed(**options.get(self.kind, {}))
        return replace(call, wants_lse=True, out_dtype=call.dtype)


def run_rank(
    setting: Setting, prompts: Prompts, call: Call, ranks: RankGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, their rows and their log-sum-exps."""
    keys, values = (
        torch.cat([getattr(request, name) for request in call.requests()])
        .to(call.dtype)
        .to(setting.device)
        for name in ("key", "value")
    )
    names = ("sliding_window", "alibi_slopes", "logits_soft_cap", "sinks",
             "batch_invariant")  # fmt: skip
    given = {name: call.arguments[name] for name in names if name in call.arguments}
    options = replace(DEFAULT_OPTIONS, **given)
    make = getattr(setting.candidate, prompts.operation)
    prefill = make(ranks, block_size=prompts.block_size, device=setting.device)
    share = prefill.prepare(list(prompts.lens))
    own = share.tokens
    lse = torch.full(
        (call.query.shape[1], len(own)),
        NAN,
        dtype=torch.float32,
        device=setting.device,
    )
    args = (call.query[own], keys[own], values[own], share)
    # the buffers are used again
    prefill.attend(args[0] + 1, args[1] * 2, args[2] - 1, share, options=options)
    scale = call.arguments.get("scale")
    return own, prefill.attend(*args, scale=scale, lse=lse, options=options), lse


def in_order(found: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return rows and log-sum-exps of all ranks' tokens, in the order of the batch."""
    tokens = torch.cat([tokens_of_rank for tokens_of_rank, _, _ in found])
    expect_same(
        "tokens of all ranks", tokens.sort().values.cpu(), torch.arange(len(tokens))
    )
    place = tokens.argsort()
    out = torch.cat([out_of_rank for _, out_of_rank, _ in found])[place]
    return out, torch.cat([lse_of_rank for _, _, lse_of_rank in found], dim=1)[:, place]


def joined_rows(
    setting: Setting, prompts: Prompts, call: Call
) -> tuple[Tensor, Tensor]:
    """Return rows and log-sum-exps of all tokens, in the order of the batch."""
    found = run_ranks(
        prompts.ranks,
        lambda ranks: run_rank(setting, prompts, call, ranks),
        prompts.order,
        setting.device,
    )
    expect_same(
        "rows of all ranks", sum(len(tokens) for tokens, _, _ in found), len(call.query)
    )
    return in_order(found)


@st.composite
def prompt_batches(draw: st.DrawFn) -> Prompts:
    """Return some prompts on one to four ranks, drawn from one seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    lens = tuple(
        pick.choice([0, 1, 2, 7, 16, 17, 33]) for _ in range(pick.randint(1, 3))
    )
    return Prompts(
        lens,
        ranks=pick.choice([1, 2, 2, 3, 4]),
        kind=pick.choice(["plain", "window", "slopes", "cap", "sinks"]),
        needles=tuple(
            min(pick.choice([-1, 0, length // 4, length // 2]), length - 1)
            for length in lens
        ),
        block_size=pick.choice([16, 16, 1, 3]),
        dtype=pick.choice(DTYPES),
        order=pick.randrange(2**16),
    )


@law("PrefillContextParallel", cases=prompt_batches())
def chunks_on_several_ranks_are_attention_over_the_whole_prompts(
    setting: Setting, prompts: Prompts
) -> None:
    """Every token is computed on one rank."""
    call = prompts.call(setting.device)
    expect_right(setting, call, joined_rows(setting, prompts, call))


SAME = [Prompts((37, 5), 2, "invariant", (20, 4)), Prompts((40,), 4, "invariant")]


@law("PrefillContextParallel", "paged_attention", cases=SAME, claim="batch_invariant")
def chunks_have_the_bits_of_whole_prompts_on_one_rank(
    setting: Setting, prompts: Prompts
) -> None:
    call = prompts.call(setting.device)
    out, lse = joined_rows(setting, prompts, call)
    right, right_lse = torch.empty_like(out), torch.empty_like(lse)
    setting.candidate.paged_attention(**call.keywords, out=right, lse=right_lse)
    for name, found, expected in (("rows", out, right), ("lse", lse, right_lse)):
        expect_same(
            name,
            found.contiguous().view(torch.uint8),
            expected.contiguous().view(torch.uint8),
        )


@law("PrefillContextParallel", cases=[2, 3, 8])
def ranks_have_equal_work(setting: Setting, world_size: int) -> None:
    """The pairs of query and key of a long prompt differ by less than 1 % among the ranks."""
    length = 4096

    def work(ranks: RankGroup) -> int:
        prefill = setting.candidate.PrefillContextParallel(ranks, device=setting.device)
        return int((prefill.prepare([length]).tokens + 1).sum())

    pairs = run_ranks(world_size, work, 1, setting.device)
    if max(pairs) > 1.01 * min(pairs):
        raise Disagreement("pairs of query and key", "per rank", pairs, "equal")


UNFIT_PREFILLS = ("a negative length", "blocks without slots", "another rank's tokens",
                  "a mask per request", "no causal mask")  # fmt: skip


@law("PrefillContextParallel", cases=UNFIT_PREFILLS, claim="rejects shapes")
def invalid_prompts_of_a_rank_are_rejected(setting: Setting, what: str) -> None:
    make = setting.candidate.PrefillContextParallel
    if what == "blocks without slots":
        expect_rejection(what, lambda: make(RankGroup(), block_size=0))
        return
    prefill = make(RankGroup(), device=setting.device)
    if what == "a negative length":
        expect_rejection(what, lambda: prefill.prepare([3, -1]))
        return
    share = prefill.prepare([3])
    tokens = 4 if what == "another rank's tokens" else 3
    ones = torch.ones(tokens, 2, 16, dtype=torch.float32, device=setting.device)
    causal = torch.ones(1, dtype=torch.bool, device=setting.device)
    masks: dict[str, bool | Tensor] = {
        "a mask per request": causal,
        "no causal mask": False,
    }
    options = AttentionOptions(causal=masks.get(what))
    expect_rejection(
        what, lambda: prefill.attend(ones, ones, ones, share, options=options)
    )

"""Laws of ring prefill: shares of keys pass from rank to rank.

All ranks run in this process, in an order that is drawn (`candidates/calls/ranks.py`). A share is
exchanged at the latest moment, when it is waited for, and holds NaN until then. So a share that is
changed before it is sent, or read before it has arrived, gives wrong rows.
"""

from dataclasses import replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.parallel import RingShare
from ...engine.rank_group import RankGroup
from ..candidates.calls.calling import expect_right
from ..candidates.calls.ranks import run_ranks
from ..candidates.setting import Setting
from ..cases.batches import DTYPES
from ..checks.expect import Disagreement, expect_rejection, expect_same
from .law import law
from .parallel_step import bits
from .prefill_parallel import Prompts, joined_rows

RING = "RingContextParallel"


@st.composite
def ring_batches(draw: st.DrawFn) -> Prompts:
    """Return some prompts on one to four ranks, drawn from one seed.

    A prompt of fewer tokens than two per rank has empty chunks, so ranks have no key of it.
    """
    pick = Random(draw(st.integers(0, 2**20)))
    lens = tuple(
        pick.choice([0, 1, 2, 3, 7, 16, 17, 33]) for _ in range(pick.randint(1, 3))
    )
    return Prompts(
        lens,
        ranks=pick.choice([1, 2, 2, 3, 4]),
        kind=pick.choice(["plain", "cap", "sinks"]),
        needles=tuple(
            min(pick.choice([-1, 0, length // 4, length // 2, length - 1]), length - 1)
            for length in lens
        ),
        block_size=pick.choice([16, 16, 1, 3]),
        dtype=pick.choice(DTYPES),
        order=pick.randrange(2**16),
        operation=RING,
    )


@law(RING, cases=ring_batches())
def rounds_of_a_ring_are_attention_over_the_whole_prompts(
    setting: Setting, prompts: Prompts
) -> None:
    """Every token is computed on one rank, over the shares of all ranks."""
    call = prompts.call(setting.device)
    found = joined_rows(setting, prompts, call)
    expect_right(setting, call, found, is_joined=True)


ORDERS = [
    Prompts((33, 5), 4, "sinks", (8, 4), operation=RING),
    Prompts((3, 40), 3, "plain", (-1, 39), 3, torch.bfloat16, operation=RING),
]


@law(RING, cases=ORDERS)
def a_late_rank_of_a_ring_changes_no_bit(setting: Setting, prompts: Prompts) -> None:
    """Rounds are merged in their order, whichever share arrives first."""
    call = prompts.call(setting.device)
    first, first_lse = joined_rows(setting, prompts, call)
    for order in (1, 2):
        later = replace(prompts, order=order)
        out, lse = joined_rows(setting, later, call)
        expect_same(f"rows in order {order}", bits(out), bits(first))
        expect_same(f"log-sum-exps in order {order}", bits(lse), bits(first_lse))


def pairs_of_rounds(share: RingShare) -> list[int]:
    """Return the pairs of query and key that a rank computes in each round."""
    query_lens = share.query_start_loc.diff().tolist()
    found = []
    for current in share.rounds:
        pairs = 0
        for query_len, keys in zip(query_lens, current.seq_lens.tolist(), strict=True):
            masked = query_len * (query_len - 1) // 2 if current.causal else 0
            pairs += query_len * keys - masked
        found.append(pairs)
    return found


@law(RING, cases=[(2, 4096), (8, 4096), (3, 7), (4, 5)])
def rounds_have_each_pair_of_query_and_key_once(
    setting: Setting, case: tuple[int, int]
) -> None:
    """Keys after a chunk are left out. Of a long prompt, ranks have equal work in each round."""
    world_size, length = case

    def work(ranks: RankGroup) -> list[int]:
        ring = getattr(setting.candidate, RING)(ranks, device=setting.device)
        return pairs_of_rounds(ring.prepare([length]))

    found = run_ranks(world_size, work, 1, setting.device)
    expect_same("pairs", sum(map(sum, found)), length * (length + 1) // 2)
    if length < 1000:
        return
    for number, pairs in enumerate(zip(*found, strict=True)):
        if max(pairs) > 1.01 * min(pairs):
            raise Disagreement(
                "pairs of query and key", f"per rank, round {number}", pairs, "equal"
            )


UNFIT_RINGS: dict[str, dict[str, Any]] = {
    "a negative length": {},
    "blocks without slots": {},
    "another rank's tokens": {},
    "a window": {"options": AttentionOptions(sliding_window=8)},
    "slopes": {"options": AttentionOptions(alibi_slopes=torch.ones(2))},
    "batch invariance": {"options": AttentionOptions(batch_invariant=True)},
    "no causal mask": {"options": AttentionOptions(causal=False)},
    "sinks for other heads": {"options": AttentionOptions(sinks=torch.ones(5))},
    "an output of another shape": {"out": torch.zeros(3, 4, 5)},
    "an output of integers": {"out": torch.zeros(3, 2, 16).int()},
    "an expanded log-sum-exp": {"lse": torch.zeros(2, 1).expand(2, 3)},
    "keys of another size": {"key": torch.ones(3, 2, 8)},
    "heads that do not divide": {"key": torch.ones(3, 3, 16)},
}


@law(RING, cases=[*UNFIT_RINGS], claim="rejects shapes")
def invalid_prompts_of_a_ring_are_rejected(setting: Setting, what: str) -> None:
    """Nothing has been sent then: another rank would wait for it."""
    make = getattr(setting.candidate, RING)
    if what == "blocks without slots":
        expect_rejection(what, lambda: make(RankGroup(), block_size=0))
        return
    ring = make(RankGroup(), device=setting.device)
    if what == "a negative length":
        expect_rejection(what, lambda: ring.prepare([3, -1]))
        return
    share = ring.prepare([3])
    tokens = 4 if what == "another rank's tokens" else 3
    ones = torch.ones(tokens, 2, 16, dtype=torch.float32, device=setting.device)
    given = {"query": ones, "key": ones, "value": ones, "options": DEFAULT_OPTIONS}
    if what == "heads that do not divide":
        given["value"] = torch.ones(3, 3, 16)
    given |= UNFIT_RINGS[what]
    expect_rejection(what, lambda: ring.attend(**given, share=share))


@law(RING, cases=["query_lens", "key_dtype", "block_size"], claim="rejects contents")
def ranks_of_a_ring_that_differ_are_rejected(setting: Setting, what: str) -> None:
    """Every rank raises, before anything is sent. Contents are validated."""

    def work(ranks: RankGroup) -> str:
        is_other = ranks.rank == 1
        make = getattr(setting.candidate, RING)
        try:
            ring = make(ranks, 16 + (is_other and what == "block_size"), setting.device)
            share = ring.prepare([9, 5 + (is_other and what == "query_lens")])
            dtype = torch.float16 if is_other and what == "key_dtype" else torch.float32
            ones = torch.ones(
                len(share.tokens), 2, 16, dtype=dtype, device=setting.device
            )
            ring.attend(ones, ones, ones, share)
        except RuntimeError as error:
            return str(error)
        return ""

    found = run_ranks(2, work, 0, setting.device)
    for rank, message in enumerate(found):
        if f"rank {rank}" not in message or what not in message:
            raise Disagreement(
                "error", f"of rank {rank}", message, f"rank {rank} ... {what}"
            )

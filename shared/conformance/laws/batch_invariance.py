"""Which laws hold for attention that claims the same bits in any company?

What a request gets then depends on its own tokens alone: not on its neighbours, its place among
them and the bounds they bring, not on how its prompt is cut into steps, not on where its pages lie.
All of it bit by bit, since a sampler may turn the last bit into another token. It is a claim that
not every right kernel makes, so it has to be declared (`Support.batch_invariant`), or asked for by
an argument of that name.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import strategies as st

from ..generators.batches import DTYPES, LAYOUTS, BatchPlan
from ..generators.options import Call, build_call, paged_call
from ..generators.rearranging import moved_pages, of_parts, only, rows_of
from ..harness.asking import Result, ask
from ..harness.candidate import BATCH_INVARIANT, Support
from ..harness.expect import expect_same
from ..harness.law import Setting, law
from .attention import Drawn, drawn_calls
from .invariance import WHOLE

Part = tuple[int, int, int]
"""A request, and first and end of its new tokens."""


def claimed(setting: Setting) -> Setting:
    """Return the setting with the candidate as it keeps its claim."""
    candidate = setting.candidate.batch_invariant()
    assert candidate is not None
    return replace(setting, candidate=candidate)


def expect_bits(
    what: str, found: Result, its: list[int], right: Result, rows: list[int]
) -> None:
    """Refuse rows of one result that are not, bit by bit, those of another.

    Args:
        what: the difference between the two calls, in words.
        found, its: a result, and its rows.
        right, rows: what it is held against.
    """
    expect_same(f"output {what}", found[0][its].cpu(), right[0][rows].cpu())
    if found[1] is not None and right[1] is not None:
        one, other = found[1][:, its].cpu(), right[1][:, rows].cpu()
        expect_same(f"log-sum-exp {what}", one, other)


def wider(call: Call, queries: int, keys: int) -> Call:
    """Return a call with larger bounds, as far as its table goes."""
    given = call.arguments
    room = given["block_table"].shape[1] * given["key_cache"].shape[1]
    return call.changed(
        max_query_len=given["max_query_len"] + queries,
        max_seq_len=max(given["max_seq_len"], min(room, given["max_seq_len"] + keys)),
    )


def expect_alone_as_in_company(setting: Setting, call: Call, pick: Random) -> None:
    """Each request alone, some of them in another order, one twice; pages moved, bounds larger."""
    whole = ask(setting, call)
    reqs = list(range(len(call.query_lens)))
    for req in reqs:
        rows = rows_of(call, [req])
        one = only(call, [req])
        for what, other in (
            ("alone", one),
            ("alone, under larger bounds", wider(one, 40, 1000)),
            ("alone, its pages elsewhere", moved_pages(one, pick)),
        ):
            own = list(range(len(rows)))
            expect_bits(
                f"of request {req} {what}", ask(setting, other), own, whole, rows
            )
    pick.shuffle(reqs)
    some = [*reqs[: pick.randint(1, len(reqs))], reqs[0]]
    part = only(call, some)
    expect_bits(
        f"of requests {some}",
        ask(setting, part),
        list(range(len(rows_of(call, some)))),
        whole,
        rows_of(call, some),
    )


@law("paged_attention", cases=drawn_calls(), claim=BATCH_INVARIANT)
def a_request_keeps_its_claimed_bits_in_any_batch(
    setting: Setting, case: Drawn
) -> None:
    """Under any options, among prompts, decodes and drafts."""
    call = build_call(*case, setting.device)
    expect_alone_as_in_company(claimed(setting), call, Random(case[1]))


def cuts_of(query_lens: tuple[int, ...], pick: Random) -> dict[str, list[Part]]:
    """Return ways to cut prompts into steps: a few pieces, and token by token."""
    pieces: list[Part] = []
    for req, length in enumerate(query_lens):
        edges = sorted({0, length, *(pick.randint(0, length) for _ in range(2))})
        pieces += [(req, *edge) for edge in pairwise(edges)]
    tokens = [
        (req, own, own + 1)
        for req, length in enumerate(query_lens)
        for own in range(length)
    ]
    return {"in pieces": pieces, "token by token": tokens}


def expect_cut_as_whole(setting: Setting, call: Call, pick: Random) -> None:
    """Pieces in one batch, in any order, or each by itself."""
    whole = ask(setting, call)
    for what, parts in cuts_of(call.query_lens, pick).items():
        pick.shuffle(parts)
        few = parts[:4] + parts[-1:]  # each a step of its own takes long
        for steps in ([parts], [[part] for part in few]):
            for batch in steps:
                rows = [
                    rows_of(call, [req])[own]
                    for req, begin, end in batch
                    for own in range(begin, end)
                ]
                found = ask(setting, of_parts(call, batch))
                expect_bits(what, found, list(range(len(rows))), whole, rows)


@law("paged_attention", cases=drawn_calls(fixed=WHOLE), claim=BATCH_INVARIANT)
def a_prompt_keeps_its_claimed_bits_however_it_is_cut(
    setting: Setting, case: Drawn
) -> None:
    """A prefill, its chunks and its decodes come to the same."""
    call = build_call(*case, setting.device)
    expect_cut_as_whole(claimed(setting), call, Random(case[1]))


@dataclass(frozen=True)
class Company:
    """A request with so many keys that kernels may split them, and who is beside it.

    Args:
        query_len, key_len: of the request.
        before, behind: keys of the requests on both sides, which decode.
        window: how far a query sees; None: everything. Keys may be split where it ends, too.
    """

    query_len: int
    key_len: int
    before: tuple[int, ...]
    behind: tuple[int, ...]
    block_size: int
    layout: str
    seed: int
    window: int | None = None

    def within(self, support: Support) -> "Company":
        """Return a request that brings no more tokens than are taken; the rest fits the plan.

        Where no window is declared, there is none.
        """
        longest, taken = support.max_query_len or self.query_len, support.options
        is_taken = taken is None or "sliding_window" in taken
        return replace(
            self,
            query_len=min(self.query_len, longest),
            window=self.window if is_taken else None,
        )

    def plan(self) -> BatchPlan:
        """Return the batch."""
        before, behind = (1,) * len(self.before), (1,) * len(self.behind)
        return BatchPlan(
            (*before, self.query_len, *behind),
            (*self.before, self.key_len, *self.behind),
            block_size=self.block_size,
            kv_heads=1,
            dtype=DTYPES[self.seed % 3],
            layout=self.layout,
            spare_blocks=self.seed % 3,
            padding=self.seed % 2,
            seed=self.seed,
        )


@st.composite
def companies(draw: st.DrawFn) -> Company:
    """Return long requests among short ones, short ones among long ones, and crowds."""
    pick = Random(draw(st.integers(0, 2**20)))
    key_len = pick.choice([17, 63, 64, 65, 128, 257, 520])
    query_len = pick.choice([1, 1, 3, 5, 17])
    others = [1, 16, 64, 300, 600]
    sides = [
        tuple(pick.choice(others) for _ in range(pick.choice([0, 1, 2, 5])))
        for _ in range(2)
    ]
    # the rows' windows begin on both sides of where a kernel may cut the keys
    begin = pick.choice([32, 64, 128, 256]) * pick.randint(1, 3)
    begin += pick.randint(0, max(query_len - 2, 0))
    return Company(
        query_len,
        key_len,
        sides[0],
        sides[1],
        block_size=pick.choice([16, 16, 3, 24]),
        layout=pick.choice(LAYOUTS),
        seed=pick.randrange(2**16),
        window=key_len - begin if key_len > begin and pick.random() < 0.7 else None,
    )


@law("paged_attention", cases=companies(), claim=BATCH_INVARIANT)
def a_long_row_keeps_its_claimed_bits_in_any_large_batch(
    setting: Setting, company: Company
) -> None:
    """How many rows there are, and how long the longest, decides nothing about another."""
    setting = claimed(setting)
    options: dict[str, Any] = {}
    if company.window is not None:
        options["sliding_window"] = company.window
    call = paged_call(setting.fit(company.plan()), setting.device, **options)
    req = len(company.before)
    rows = rows_of(call, [req])
    whole = ask(setting, call)
    one = only(call, [req])
    own = list(range(len(rows)))
    expect_bits("alone", ask(setting, one), own, whole, rows)
    bounds = ask(setting, wider(one, 7, 4000))
    expect_bits("alone, under larger bounds", bounds, own, whole, rows)
    last = of_parts(call, [(req, len(rows) - 1, len(rows))])
    expect_bits("of the last token", ask(setting, last), [0], whole, rows[-1:])
    crowd = only(call, [req] * 4 + list(range(len(call.query_lens))))
    expect_bits("in a larger crowd", ask(setting, crowd), own, whole, rows)

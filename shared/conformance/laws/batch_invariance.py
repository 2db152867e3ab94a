"""Laws of batch-invariant attention: a request's result is bitwise equal in any batch.

The result of a request then depends on its own tokens alone. It does not depend on the other
requests, on its index among them, on the length bounds of the batch, on how its prompt is divided
into steps, or on where its pages are stored. All comparisons are bitwise, since a sampler may turn
the last bit into another token. Not every correct kernel is batch-invariant, so the property has to
be declared (`Support.batch_invariant`), or requested by an argument of that name.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import strategies as st

from ..base.support import Support, nearest_length
from ..candidates.calls.calling import Result, expect_right, run_call
from ..candidates.candidate import BATCH_INVARIANT
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, LAYOUTS, BatchPlan
from ..cases.choice_calls import build_call
from ..cases.options import Call, paged_call, slopes
from ..cases.rearranging import moved_pages, of_parts, only, rows_of
from ..cases.reuse import compiled
from ..checks.expect import expect_same
from .attention import Drawn, drawn_calls
from .invariance import WHOLE
from .law import law

Part = tuple[int, int, int]
"""A request, and the first and end index of some of its new tokens."""


def claimed(setting: Setting) -> Setting:
    """Return the setting with the candidate in its batch-invariant form."""
    candidate = setting.candidate.batch_invariant()
    assert candidate is not None
    return replace(setting, candidate=candidate)


def expect_bits(
    what: str, found: Result, its: list[int], right: Result, rows: list[int]
) -> None:
    """Raise Disagreement if rows of one result are not bitwise equal to rows of another.

    Args:
        what: the difference between the two calls, in words.
        found, its: a result, and its rows to compare.
        right, rows: the expected result, and its rows to compare.
    """
    expect_same(f"output {what}", found[0][its].cpu(), right[0][rows].cpu())
    if found[1] is not None and right[1] is not None:
        one, other = found[1][:, its].cpu(), right[1][:, rows].cpu()
        expect_same(f"log-sum-exp {what}", one, other)


def wider(call: Call, queries: int, keys: int) -> Call:
    """Return a call with larger length bounds, limited by the width of its block table."""
    given = call.arguments
    room = given["block_table"].shape[1] * given["key_cache"].shape[1]
    return call.changed(
        max_query_len=given["max_query_len"] + queries,
        max_seq_len=max(given["max_seq_len"], min(room, given["max_seq_len"] + keys)),
    )


def expect_same_alone(setting: Setting, call: Call, pick: Random) -> None:
    """Compare the batch with each request alone and with a shuffled subset of the requests.

    A request alone runs again with larger bounds and with moved pages. One request of the subset
    occurs twice.
    """
    whole = run_call(setting, call)
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
                f"of request {req} {what}", run_call(setting, other), own, whole, rows
            )
    pick.shuffle(reqs)
    some = [*reqs[: pick.randint(1, len(reqs))], reqs[0]]
    part = only(call, some)
    expect_bits(
        f"of requests {some}",
        run_call(setting, part),
        list(range(len(rows_of(call, some)))),
        whole,
        rows_of(call, some),
    )


@law("paged_attention", cases=drawn_calls(), claim=BATCH_INVARIANT)
def a_request_is_bitwise_equal_in_any_batch_if_that_is_claimed(
    setting: Setting, case: Drawn
) -> None:
    """Under any options, in batches of prefill, decode and speculative requests."""
    call = build_call(*case, setting.device)
    expect_same_alone(claimed(setting), call, Random(case[1]))


def cuts_of(query_lens: tuple[int, ...], pick: Random) -> dict[str, list[Part]]:
    """Return ways to divide prompts into steps: a few chunks, and token by token."""
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
    """Compare whole prompts with chunks, which run in one shuffled batch or one per step."""
    whole = run_call(setting, call)
    for what, parts in cuts_of(call.query_lens, pick).items():
        pick.shuffle(parts)
        few = parts[:4] + parts[-1:]  # one step per chunk takes long
        for steps in ([parts], [[part] for part in few]):
            for batch in steps:
                rows = [
                    rows_of(call, [req])[own]
                    for req, begin, end in batch
                    for own in range(begin, end)
                ]
                found = run_call(setting, of_parts(call, batch))
                expect_bits(what, found, list(range(len(rows))), whole, rows)


@law("paged_attention", cases=drawn_calls(fixed=WHOLE), claim=BATCH_INVARIANT)
def a_prompt_is_bitwise_equal_however_it_is_chunked_if_that_is_claimed(
    setting: Setting, case: Drawn
) -> None:
    """A whole prefill, a chunked prefill and token-by-token decodes are bitwise equal."""
    call = build_call(*case, setting.device)
    expect_cut_as_whole(claimed(setting), call, Random(case[1]))


@dataclass(frozen=True)
class DecodesAround:
    """A request with so many keys that kernels may split them, and the rest of its batch.

    Args:
        query_len, key_len: new tokens and keys of the request.
        before, after: keys of the decode requests on both sides of it.
        window: sliding window. Optional. If None, all keys are visible. Kernels may split the keys
            at the edge of the window too.
    """

    query_len: int
    key_len: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    block_size: int
    layout: str
    seed: int
    window: int | None = None

    def within(self, support: Support) -> "DecodesAround":
        """Return the case with no more new tokens than are supported; the plan is fitted later.

        The window is removed if the candidate does not support it.
        """
        window = {} if self.window is None else {"sliding_window": self.window}
        return replace(
            self,
            query_len=nearest_length(self.query_len, support.query_lens),
            window=None if support.why_not_options(window) else self.window,
        )

    def plan(self) -> BatchPlan:
        """Return the batch."""
        before, after = (1,) * len(self.before), (1,) * len(self.after)
        return BatchPlan(
            (*before, self.query_len, *after),
            (*self.before, self.key_len, *self.after),
            block_size=self.block_size,
            kv_heads=1,
            dtype=DTYPES[self.seed % 3],
            layout=self.layout,
            spare_blocks=self.seed % 3,
            padding=self.seed % 2,
            seed=self.seed,
        )


@st.composite
def decodes_around(draw: st.DrawFn) -> DecodesAround:
    """Return long requests among short ones, short ones among long ones, and large batches."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    key_len = pick.choice([17, 63, 64, 65, 128, 257, 520])
    query_len = pick.choice([1, 1, 3, 5, 17])
    others = [1, 16, 64, 300, 600]
    sides = [
        tuple(pick.choice(others) for _ in range(pick.choice([0, 1, 2, 5])))
        for _ in range(2)
    ]
    # the windows begin on both sides of positions at which a kernel may split the keys
    begin = pick.choice([32, 64, 128, 256]) * pick.randint(1, 3)
    begin += pick.randint(0, max(query_len - 2, 0))
    return DecodesAround(
        query_len,
        key_len,
        sides[0],
        sides[1],
        block_size=kernel.choice([16, 16, 3, 24]),
        layout=kernel.choice(LAYOUTS),
        seed=3 * pick.randrange(2**14) + kernel.randrange(3),
        window=key_len - begin if key_len > begin and pick.random() < 0.7 else None,
    )


@law("paged_attention", cases=decodes_around(), claim=BATCH_INVARIANT)
def a_long_row_is_bitwise_equal_in_any_large_batch_if_that_is_claimed(
    setting: Setting, case: DecodesAround
) -> None:
    """The number of rows and the length of the longest do not change any other row.

    The results are also right, with sinks and without, however many splits a row's keys take.
    """
    setting = claimed(setting)
    plan = setting.fit(case.plan())
    options: dict[str, Any] = {}
    if case.window is not None:
        options["sliding_window"] = case.window
    sinks = {"sinks": slopes(plan.kv_heads * plan.group, 3.0)}
    if case.seed % 2 and not setting.candidate.support.why_not_options(sinks):
        options.update(sinks)
    call = paged_call(plan, setting.device, **options)
    req = len(case.before)
    rows = rows_of(call, [req])
    whole = run_call(setting, call)
    expect_right(setting, call, whole)
    one = only(call, [req])
    own = list(range(len(rows)))
    expect_bits("alone", run_call(setting, one), own, whole, rows)
    bounds = run_call(setting, wider(one, 7, 4000))
    expect_bits("alone, under larger bounds", bounds, own, whole, rows)
    last = of_parts(call, [(req, len(rows) - 1, len(rows))])
    expect_bits("of the last token", run_call(setting, last), [0], whole, rows[-1:])
    larger = only(call, [req] * 4 + list(range(len(call.query_lens))))
    expect_bits("in a larger batch", run_call(setting, larger), own, whole, rows)

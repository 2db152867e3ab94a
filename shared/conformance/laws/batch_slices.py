"""Laws of micro-batches: slices of the metadata of a step.

A micro-batch is the step without all other tokens. The expected value of every field is computed
here token by token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.metadata_classes import CommonAttentionMetadata, UBatchSlice
from ..candidates.setting import Setting
from ..cases.steps import (
    CROWD,
    LONG,
    LONGEST_ENCODER,
    MANY,
    MOST_LOGITS,
    PROMPT,
    Requests,
    Runs,
    bare_step,
    counts,
    draw_requests,
    encoder_slots,
    flags_of,
    logits_of,
    several,
    whole_step,
)
from ..checks.expect import Disagreement, expect_rejection, expect_same
from ..checks.metadata import (
    expect_fields,
    expect_numbers,
    expect_unchanged,
    remember,
    seen_by,
)
from .law import law

WHOLE_REQUESTS_ONLY = ("tree_mask", "dcp_local_seq_lens", "dcp_local_seq_lens_cpu")
"""Fields that are set only if no request of the step is cut."""


@dataclass(frozen=True)
class Cut:
    """A step that is cut into micro-batches.

    Args:
        step: the requests.
        cuts: token indices at which it is cut, from 0 to the number of tokens.
        padding: tokens after the last request. They belong to the last micro-batch.
        idle: micro-batch of requests without tokens at a cut: the one "before" the cut, the one
            after it ("after"), or "nowhere".
        flag: `causal` of the whole step. Optional. If None, there is one flag per request.
    """

    step: Requests
    cuts: tuple[int, ...]
    padding: int = 0
    idle: str = "nowhere"
    flag: bool | None = None

    @property
    def is_clean(self) -> bool:
        """Whether no request is cut."""
        return set(self.cuts) <= set(self.step.starts)

    def slices(self) -> list[UBatchSlice]:
        """Return the micro-batches."""
        owners, reqs = self.step.owners(), len(self.step.new)
        found = []
        for begin, end in pairwise(self.cuts):
            first, last = owners[begin], owners[end - 1] + 1
            is_whole = end == self.step.starts[last]
            while self.idle == "before" and is_whole and self._is_idle(last):
                last += 1
            is_whole = begin == self.step.starts[first]
            while self.idle == "after" and is_whole and self._is_idle(first - 1):
                first -= 1
            if end == self.cuts[-1] and self.padding:
                last, end = reqs, end + self.padding
            found.append(UBatchSlice(slice(first, last), slice(begin, end)))
        return found

    def simpler(self) -> Iterator["Cut"]:
        """Yield cuts of a step with fewer requests, tokens or cuts; the others stay at theirs."""
        new, computed = self.step.new, self.step.computed
        reqs = len(new)
        size = reqs // 2
        while size:
            for first in range(0, reqs, size):
                gone = range(first, first + size)
                yield self._with({req: None for req in gone if req < reqs}, {})
            size //= 2
        for req in range(reqs):
            for fewer in sorted({1, new[req] // 2, new[req] - 1}):
                if 0 <= fewer < new[req]:
                    yield self._with({req: fewer}, {})
            for fewer in sorted({0, computed[req] // 2, computed[req] - 1}):
                if 0 <= fewer < computed[req]:
                    yield self._with({}, {req: fewer})
        owners, starts = self.step.owners(), self.step.starts
        for cut in self.cuts[1:-1]:
            others = set(self.cuts) - {cut}
            yield replace(self, cuts=tuple(sorted(others)))
            if cut > (second := starts[owners[cut]] + 1):  # the request's second token
                yield replace(self, cuts=tuple(sorted(others | {second})))
        plain = Cut(self.step, self.cuts, flag=True)
        for name in ("padding", "idle", "flag"):
            if getattr(self, name) != getattr(plain, name):
                yield replace(self, **{name: getattr(plain, name)})

    def _with(self, new: dict[int, int | None], computed: dict[int, int]) -> "Cut":
        """Return the cuts of a step in which some requests have fewer tokens.

        Args:
            new: New tokens by request; None removes it.
            computed: Tokens in the cache by request.
        """
        step, starts = self.step, self.step.starts
        kept = [new.get(req, count) for req, count in enumerate(step.new)]
        moved = {
            sum(
                min(max(0, cut - start), count)
                for start, count in zip(starts[:-1], kept, strict=True)
                if count is not None
            )
            for cut in self.cuts
        }
        reqs = [req for req, count in enumerate(kept) if count is not None]
        return replace(
            self,
            step=replace(
                step,
                new=tuple(count for count in kept if count is not None),
                computed=tuple(computed.get(req, step.computed[req]) for req in reqs),
            ),
            cuts=tuple(sorted(moved)),
        )

    def _is_idle(self, req: int) -> bool:
        return 0 <= req < len(self.step.new) and not self.step.new[req]

    def metadata(self, device: torch.device) -> CommonAttentionMetadata:
        """Return the step with a value in every field that it may have."""
        without = () if self.is_clean else WHOLE_REQUESTS_ONLY
        whole = whole_step(self.step, device, without)
        pad = torch.full((self.padding,), -1, dtype=torch.int64, device=device)
        if self.flag is not None:
            whole = whole.replace(causal=self.flag)
        assert whole.positions is not None
        return whole.replace(
            slot_mapping=torch.cat([whole.slot_mapping, pad]),
            positions=torch.cat([whole.positions, pad]),
        )


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Return steps cut between requests, inside of them, and twice inside of one."""
    pick = Random(draw(st.integers(0, 2**20)))
    step = draw_requests(pick, most=5, fewest=1)
    if not sum(step.new):
        step = replace(step, new=(*step.new[:-1], 5))
    total = sum(step.new)
    is_clean = pick.random() < 0.35
    boundaries = sorted(set(step.starts)) if is_clean else list(range(total + 1))
    chosen = {pick.choice(boundaries) for _ in range(pick.choice([0, 1, 2, 4]))}
    return Cut(
        step,
        tuple(sorted({0, *chosen, total})),
        pick.choice([0, 0, 2]),
        pick.choice(["nowhere", "before", "after"]),
        pick.choice([None, True, False]),
    )


def rows_of(tensor: Any, part: UBatchSlice) -> Any:
    """Return the rows of a micro-batch's requests."""
    return tensor[part.request_slice] if isinstance(tensor, Tensor) else tensor


def expected(
    cut: Cut, whole: CommonAttentionMetadata, part: UBatchSlice
) -> dict[str, Any]:
    """Return the expected fields of a micro-batch, computed from its tokens."""
    step, tokens = cut.step, part.token_slice
    owners, positions = step.owners(), step.positions()
    begin, end = tokens.start, min(tokens.stop, sum(step.new))
    reqs = range(part.request_slice.start, part.request_slice.stop)
    own: dict[int, list[int]] = {req: [] for req in reqs}
    for token in range(begin, end):
        own[owners[token]].append(token)
    new = [len(own[req]) for req in reqs]
    computed = [
        positions[own[req][0]] if own[req] else step.computed[req] for req in reqs
    ]
    lens = [a + b for a, b in zip(new, computed, strict=True)]
    starts = counts([0, *accumulate(new)])
    # an encoder's tokens are in the micro-batch of the first token of their request
    slots = encoder_slots(step)
    causal, prefilling = flags_of(step, 1), flags_of(step, 2)
    brought = [
        slots[req] if not own[req] or own[req][0] == step.starts[req] else []
        for req in reqs
    ]
    encoder_starts = counts([0, *accumulate(map(len, brought))])
    wanted = [token - begin for token in logits_of(step) if begin <= token < end]
    images = whole.mm_req_doc_ranges or {}
    right = {
        name: rows_of(getattr(whole, name), part)
        for name in (
            "block_table_tensor",
            "encoder_seq_lens",
            "encoder_seq_lens_cpu",
            "cross_block_table_tensor",
            *WHOLE_REQUESTS_ONLY,
        )
    }
    return right | {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": counts(lens),
        "seq_lens_cpu": counts(lens),
        "num_computed_tokens_cpu": counts(computed),
        "num_reqs": len(reqs),
        "num_actual_tokens": max(0, end - begin),
        "max_query_len": max(new),
        "max_seq_len": max(lens),
        "slot_mapping": whole.slot_mapping[tokens],
        "positions": whole.positions[tokens] if whole.positions is not None else None,
        "causal": torch.tensor([causal[req] for req in reqs])
        if cut.flag is None
        else cut.flag,
        "is_prefilling": torch.tensor([prefilling[req] for req in reqs]),
        "logits_indices_padded": torch.tensor(wanted, dtype=torch.int64),
        "num_logits_indices": len(wanted),
        "max_logits_per_req": MOST_LOGITS,
        "max_encoder_seq_len": LONGEST_ENCODER,
        "encoder_query_start_loc": encoder_starts,
        "encoder_query_start_loc_cpu": encoder_starts,
        "cross_slot_mapping": torch.tensor(
            [slot for slots in brought for slot in slots], dtype=torch.int64
        ),
        "mm_req_doc_ranges": {
            req - reqs.start: images[req] for req in reqs if req in images
        },
    }


LARGE_CUTS = [
    Cut(MANY, (0, 150, 298, 400, 570, 599), padding=300),
    Cut(MANY, (0, 298, 598, 599), idle="before", flag=True),
    Cut(LONG, (0, 1, 2, 3), padding=2),
    Cut(LONG, (0, 1, 3)),
]
"""Cuts, requests and lengths that do not fit 8 and 16 bits."""
FAR_CUTS = [
    *LARGE_CUTS,
    Cut(PROMPT, (0, 65_540, 65_600, 65_601), padding=65_600, flag=True),
]


@law(
    "split_attn_metadata",
    cases=several(cuts()),
    edges=[[cut] for cut in FAR_CUTS],
)
def a_micro_batch_is_the_step_of_its_own_tokens(
    setting: Setting, cases: list[Cut]
) -> None:
    """Requests cut once, twice or not at all, with padding requests and padding tokens."""
    for cut in cases:
        whole = cut.metadata(setting.device)
        before = remember(whole)
        parts = setting.candidate.split_attn_metadata(cut.slices(), whole)
        expect_unchanged("the step", whole, before)
        expect_same("micro-batches", len(parts), len(cut.cuts) - 1)
        for part, found in zip(cut.slices(), parts, strict=True):
            right = expected(cut, whole, part)
            expect_fields(f"micro-batch {part}", found, right, setting.device)


@law(
    "make_metadata_with_slice",
    cases=several(cuts()),
    edges=[[cut] for cut in FAR_CUTS],
)
def one_micro_batch_alone_is_the_step_of_its_own_tokens(
    setting: Setting, cases: list[Cut]
) -> None:
    for cut in cases:
        whole = cut.metadata(setting.device)
        before = remember(whole)
        for part in cut.slices():
            found = setting.candidate.make_metadata_with_slice(part, whole)
            right = expected(cut, whole, part)
            expect_fields(f"micro-batch {part}", found, right, setting.device)
        expect_unchanged("the step", whole, before)


@law(
    "split_attn_metadata",
    cases=several(cuts()),
    edges=[[cut] for cut in LARGE_CUTS],
)
def micro_batches_together_are_the_step(setting: Setting, cases: list[Cut]) -> None:
    """In any order, each token is in one of them, and attends to the same slots as before."""
    for cut in cases:
        step = cut.step
        whole = bare_step(step, setting.device)
        plain = replace(cut, padding=0)
        order = list(range(len(cut.cuts) - 1))
        Random(step.seed).shuffle(order)
        slices = plain.slices()
        parts = setting.candidate.split_attn_metadata([slices[i] for i in order], whole)
        found = dict(zip(order, parts, strict=True))
        for copy in (0, 1):
            seen = [
                slots
                for index in range(len(slices))
                for slots in seen_by(found[index], step.block_size)[copy]
            ]
            expect_numbers("the visible slots of each token", seen, step.seen())
        written = torch.cat([found[index].slot_mapping for index in range(len(slices))])
        expect_same("the slots that are written", written.tolist(), step.slots())


@law(
    "make_metadata_with_slice",
    cases=several(cuts()),
    edges=[[cut] for cut in (*FAR_CUTS, Cut(CROWD, (0, 1, 2)))],
)
def a_slice_of_a_slice_is_the_slice_of_the_step(
    setting: Setting, cases: list[Cut]
) -> None:
    """The last part of a step is cut again."""
    for cut in cases:
        step, total = cut.step, sum(cut.step.new)
        whole = bare_step(step, setting.device)
        middle = cut.cuts[len(cut.cuts) // 2 - 1]
        make = setting.candidate.make_metadata_with_slice
        (rest,) = Cut(step, (middle, total)).slices()
        rest_found = make(rest, whole)
        first = rest.request_slice.start
        for part in Cut(step, tuple(t for t in cut.cuts if t >= middle)).slices():
            requests, tokens = part.request_slice, part.token_slice
            found = make(
                UBatchSlice(
                    slice(requests.start - first, requests.stop - first),
                    slice(tokens.start - middle, tokens.stop - middle),
                ),
                rest_found,
            )
            right = {
                name: value
                for name, value in vars(make(part, whole)).items()
                if name[0] != "_"
            }
            expect_fields(f"micro-batch {part}", found, right, setting.device)


@dataclass(frozen=True)
class Starts:
    """Query start locations, and a slice of the requests.

    Args:
        new: new tokens of each request.
        first, last: the slice of requests. `last` is exclusive.
    """

    new: tuple[int, ...]
    first: int
    last: int


@st.composite
def starts_of(draw: st.DrawFn) -> Starts:
    """Return requests and a slice of them: some, none, or more than there are."""
    pick = Random(draw(st.integers(0, 2**20)))
    reqs = pick.choice([0, 1, 3, 6])
    first = pick.randint(0, reqs)
    last = first + pick.choice([0, 1, 2, 9])
    return Starts(tuple(pick.choice([0, 1, 5]) for _ in range(reqs)), first, last)


@law(
    "slice_query_start_locs",
    cases=several(starts_of()),
    edges=[
        [Starts(Runs((1, 290), (300, 10), (65_600, 2)), 270, 302)],
        [Starts(Runs((1, 65_600), (7, 9)), 65_590, 65_700)],
    ],
)
def sliced_starts_count_from_the_first_and_are_a_new_tensor(
    setting: Setting, cases: list[Starts]
) -> None:
    for case in cases:
        starts = counts([0, *accumulate(case.new)], setting.device)
        before = starts.clone()
        found = setting.candidate.slice_query_start_locs(
            starts, slice(case.first, case.last)
        )
        own = case.new[case.first : case.last]
        expect_same("starts", found, counts([0, *accumulate(own)]))
        found += 1
        expect_same("the step's starts afterwards", starts, before)


@dataclass(frozen=True)
class BadSlice:
    """An invalid micro-batch.

    Args:
        requests, tokens: start and stop of the slices. The stop is exclusive.
        what: the reason why it is invalid.
        given: the field of the step that makes it invalid, if any.
    """

    requests: tuple[int | None, int | None]
    tokens: tuple[int | None, int | None]
    what: str
    given: str = ""


REJECTED = [
    BadSlice((0, 0), (0, 0), "no request"),
    BadSlice((0, 1), (2, 2), "no token"),
    BadSlice((0, 4), (0, 9), "more requests than there are"),
    BadSlice((0, 3), (0, 10), "more tokens than there are"),
    BadSlice((-1, 3), (0, 9), "a request before the first"),
    BadSlice((None, 3), (0, 9), "a slice without start"),
    BadSlice((0, 3), (0, None), "a slice without stop"),
    BadSlice((0, 2), (3, 5), "tokens that begin after the first request"),
    BadSlice((1, 2), (2, 5), "tokens that begin before the first request"),
    BadSlice((0, 2), (0, 6), "tokens that end after the last request"),
    BadSlice((0, 2), (0, 3), "tokens that end before the last request"),
    BadSlice((0, 2), (1, 5), "a tree whose first request is cut", "tree_mask"),
    BadSlice((0, 2), (0, 4), "a tree whose last request is cut", "tree_mask"),
    BadSlice((0, 2), (0, 4), "a rank's share of a cut", "dcp_local_seq_lens"),
    BadSlice((0, 2), (0, 4), "a rank's share of a cut", "dcp_local_seq_lens_cpu"),
    BadSlice((0, 1), (0, 3), "slots of encoders without starts", "cross_slot_mapping"),
]


def call_of(
    operation: Callable[..., Any], invalid: BadSlice, whole: CommonAttentionMetadata
) -> Callable[[], Any]:
    part = UBatchSlice(slice(*invalid.requests), slice(*invalid.tokens))
    return lambda: operation(part, whole)


@law("make_metadata_with_slice", cases=REJECTED, claim="rejects shapes")
def tokens_of_other_requests_are_rejected(setting: Setting, invalid: BadSlice) -> None:
    step = Requests((3, 2, 4), (0, 4, 5))
    whole = bare_step(step, setting.device)
    if invalid.given:
        full = whole_step(step, setting.device)
        whole = whole.replace(**{invalid.given: getattr(full, invalid.given)})
    make = setting.candidate.make_metadata_with_slice
    expect_rejection(invalid.what, call_of(make, invalid, whole))


@law(
    "slice_query_start_locs",
    cases=[
        BadSlice((None, 2), (0, 0), "a slice without start"),
        BadSlice((0, None), (0, 0), "a slice without stop"),
        BadSlice((-1, 2), (0, 0), "a request before the first"),
        BadSlice((2, 1), (0, 0), "a slice that ends before it begins"),
        BadSlice((4, 5), (0, 0), "requests after the last"),
    ],
)
def slices_of_requests_outside_of_the_batch_are_rejected(
    setting: Setting, invalid: BadSlice
) -> None:
    starts = counts([0, 3, 5, 9], setting.device)
    found = setting.candidate.slice_query_start_locs
    expect_rejection(invalid.what, lambda: found(starts, slice(*invalid.requests)))


@law("split_attn_metadata", cases=[Requests((3, 2), (0, 4))])
def no_slices_give_no_micro_batches(setting: Setting, step: Requests) -> None:
    found = setting.candidate.split_attn_metadata([], bare_step(step, setting.device))
    if found != []:
        raise Disagreement("micro-batches", "as a whole", found, [])

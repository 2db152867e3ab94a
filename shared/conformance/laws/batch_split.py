"""Laws of the order of a batch and of the boundaries between decodes, extends and prefills.

Every result is a list of numbers. The expected one is computed here request by request.
"""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st

from ..candidates.setting import Setting
from ..cases.steps import Requests, Runs, bare_step, counts, several
from ..checks.expect import Disagreement, expect_rejection, expect_same
from .law import law


@dataclass(frozen=True)
class UnsortedBatch:
    """A batch to be reordered.

    Args:
        new, computed, prompts: new tokens, computed tokens and prompt tokens of each request.
        regions: number of regions. It is 2, 3 or 4, depending on the counts that are given.
        threshold: the largest number of new tokens of a decode.
    """

    new: tuple[int, ...]
    computed: tuple[int, ...]
    prompts: tuple[int, ...]
    regions: int
    threshold: int

    def region(self, req: int) -> int:
        """Return the index of a request's region in the order of the batch."""
        new, computed = self.new[req], self.computed[req]
        is_short, is_fresh = new <= self.threshold, computed == 0
        if self.regions == 2:
            return 0 if is_short else 1
        if self.regions == 3:
            if is_short:
                return 0
            return 2 if is_fresh else 1
        if is_fresh:
            return 3
        if not is_short:
            return 2
        return 1 if computed < self.prompts[req] else 0


@st.composite
def batches(draw: st.DrawFn) -> UnsortedBatch:
    """Return a batch with requests on both sides of every boundary, in any order."""
    pick = Random(draw(st.integers(0, 2**20)))
    threshold = pick.choice([0, 1, 1, 2, 5])
    # 256 is 0 in eight bits
    edges = [0, 1, 2, threshold, threshold + 1, pick.choice([9, 256, 257])]
    reqs = pick.choice([0, 1, 2, 3, 5, 8, 12])
    old = [0, 0, 1, 5, pick.choice([6, 256, 512])]
    computed = tuple(pick.choice(old) for _ in range(reqs))
    return UnsortedBatch(
        tuple(pick.choice(edges) for _ in range(reqs)),
        computed,
        tuple(max(1, count + pick.choice([-1, 0, 1, 4])) for count in computed),
        pick.choice([2, 3, 4]),
        threshold,
    )


EXAMPLES = [
    UnsortedBatch((6, 1, 7, 1), (0, 5, 8, 5), (6, 5, 15, 5), 2, 1),
    UnsortedBatch((6, 1, 7, 1), (0, 5, 8, 0), (6, 5, 15, 1), 4, 1),
]


MIXED = Runs((1, 150), (301, 2), (300, 150), (65_600, 1), (65_537, 2), (1, 9), (256, 3))
OLD = Runs((300, 150), (0, 5), (256, 150), (65_536, 5), (65_600, 7))
LARGE_BATCHES = [
    UnsortedBatch(MIXED, OLD, Runs((300, 160), (65_600, 157)), regions, threshold)
    for regions, threshold in ((2, 1), (2, 300), (3, 300), (4, 65_536))
] + [
    UnsortedBatch(
        Runs((2, 3), (1, 65_600), (2, 2)),
        Runs((0, 65_604), (5, 1)),
        Runs((1, 65_605)),
        regions,
        1,
    )
    for regions in (2, 4)
]
"""Counts, thresholds and numbers of requests that do not fit 8 and 16 bits."""


@law(
    "reorder_batch_to_split_decodes_and_prefills",
    cases=several(batches()),
    edges=[[batch] for batch in LARGE_BATCHES],
)
def the_regions_of_a_batch_come_in_order_and_requests_stay_whole(
    setting: Setting, cases: list[UnsortedBatch]
) -> None:
    """State moves with its request: every request occurs in the order exactly once."""
    for batch in cases:
        given = [list(batch.new), list(batch.computed), list(batch.prompts)]
        more = [
            None if batch.regions <= 2 + region else given[1 + region]
            for region in (0, 1)
        ]
        order = setting.candidate.reorder_batch_to_split_decodes_and_prefills(
            given[0], batch.threshold, *more
        )
        right = [list(batch.new), list(batch.computed), list(batch.prompts)]
        expect_same("counts afterwards", given, right)
        state = [object() for _ in batch.new]
        moved = [state[int(req)] for req in order]
        expect_same("the requests", sorted(map(id, moved)), sorted(map(id, state)))
        regions = [batch.region(int(req)) for req in order]
        expect_same("regions in the order", regions, sorted(regions))
        own = [batch.region(req) for req in range(len(batch.new))]
        for index, req in enumerate(order):
            if own[index] == regions[index] and req != index:
                raise Disagreement("the order", f"at {index}", req, f"request {index}")
        if batch.regions == 2:
            # rows are moved by swaps, and with two regions each request needs at most one
            back = [int(order[int(req)]) for req in order]
            expect_same("the order of the order", back, list(range(len(order))))


@law("reorder_batch_to_split_decodes_and_prefills", cases=EXAMPLES)
def the_order_of_a_batch_moves_as_few_requests_as_possible(
    setting: Setting, batch: UnsortedBatch
) -> None:
    more = (batch.computed, batch.prompts) if batch.regions == 4 else ()
    order = setting.candidate.reorder_batch_to_split_decodes_and_prefills(
        batch.new, batch.threshold, *more
    )
    right = [3, 1, 2, 0] if batch.regions == 2 else [1, 2, 0, 3]
    expect_same("the order", list(order), right)


@dataclass(frozen=True)
class Boundary:
    """A batch in any order, which is divided into decodes and other requests.

    Args:
        step: its requests.
        threshold: the largest number of new tokens of a decode.
        uniform: whether all decodes must have the same number of new tokens.
        in_prompt: whether each request is still in its prompt. Optional. If None, this is ignored.
        spare: padding tokens after the last request.
    """

    step: Requests
    threshold: int
    uniform: bool
    in_prompt: tuple[bool, ...] | None
    spare: int


@st.composite
def boundaries(draw: st.DrawFn) -> Boundary:
    """Return ordered and unordered batches, with padding requests between the others."""
    pick = Random(draw(st.integers(0, 2**20)))
    threshold = pick.choice([0, 1, 2, 3, 3, 5])
    reqs = pick.choice([0, 1, 2, 4, 6, 6])
    usual = pick.choice([1, threshold, 2])
    alike = [usual] * 6 + [0, threshold, threshold + 1]
    long = pick.choice([6, 256, 257])
    edges = pick.choice([alike, [0, 1, 1, 2, threshold, threshold + 1, long]])
    new = [pick.choice(edges) for _ in range(reqs)]
    computed = [pick.choice([0, 0, 1, 4]) for _ in range(reqs)]
    if pick.random() < 0.6:  # as an engine orders them
        kinds = sorted(
            zip(new, computed, strict=True),
            key=lambda kind: (kind[0] > threshold, kind[1] == 0),
        )
        new, computed = [kind[0] for kind in kinds], [kind[1] for kind in kinds]
    flags = tuple(pick.random() < 0.3 for _ in range(reqs))
    return Boundary(
        Requests(tuple(new), tuple(computed), 4, pick.randrange(100)),
        threshold,
        pick.choice([True, False]),
        pick.choice([None, flags]),
        pick.choice([0, 0, 3]),
    )


LARGE_BOUNDARIES = [
    Boundary(
        Requests(Runs((1, 298), (300, 2)), Runs((3, 299), (0, 1))), 1, True, None, 300
    ),
    Boundary(
        Requests(Runs((1, 290), (2, 10)), Runs((3, 299), (0, 1))),
        2,
        False,
        (False,) * 280 + (True,) * 20,
        0,
    ),
    Boundary(Requests((300, 300, 301, 1), (0, 5, 0, 0)), 300, True, None, 0),
    Boundary(Requests((1, 257, 257), (0, 5, 0)), 256, True, None, 0),
    Boundary(Requests((1, 65_537), (300, 0), 16), 65_536, True, None, 1),
    Boundary(Requests((65_600,) * 2 + (65_601,), (9, 7, 0), 16), 65_600, True, None, 1),
    Boundary(
        Requests(Runs((1, 65_600), (2, 1), (3, 1)), Runs((3, 65_601), (0, 1)), 16),
        1,
        True,
        None,
        65_600,
    ),
]
"""Requests, tokens, thresholds and padding that do not fit 8 and 16 bits."""


@law(
    "split_decodes_and_prefills",
    cases=several(boundaries()),
    edges=[[boundary] for boundary in LARGE_BOUNDARIES],
)
def the_decodes_end_before_the_first_other_request(
    setting: Setting, cases: list[Boundary]
) -> None:
    for boundary in cases:
        step, in_prompt = boundary.step, boundary.in_prompt
        common = bare_step(step, setting.device)
        # flags that have to be ignored are set to the opposite of what is expected
        flags = [not count for count in step.new] if in_prompt is None else in_prompt
        common = common.replace(
            num_actual_tokens=common.num_actual_tokens + boundary.spare,
            is_prefilling=torch.tensor(flags, dtype=torch.bool),
        )
        found = setting.candidate.split_decodes_and_prefills(
            common, boundary.threshold, boundary.uniform, in_prompt is None
        )
        with_tokens = [count for count in step.new if count]
        decodes = 0
        while decodes < len(step.new):
            new = step.new[decodes]
            if new > boundary.threshold or (in_prompt and in_prompt[decodes]):
                break
            if boundary.uniform and new and new != with_tokens[0]:
                break
            decodes += 1
        total = sum(step.new) + boundary.spare
        tokens = sum(step.new[:decodes]) if decodes < len(step.new) else total
        right = (decodes, len(step.new) - decodes, tokens, total - tokens)
        expect_same("decodes, prefills and their tokens", tuple(found), right)
        expect_same("their kinds", [type(number) for number in found], [int] * 4)


@law(
    "split_decodes_prefills_and_extends",
    cases=several(boundaries()),
    edges=[[boundary] for boundary in LARGE_BOUNDARIES],
)
def extends_come_between_decodes_and_prefills(
    setting: Setting, cases: list[Boundary]
) -> None:
    for boundary in cases:
        step, reqs = boundary.step, len(boundary.step.new)
        common = bare_step(step, setting.device)
        total = sum(step.new) + boundary.spare
        found = setting.candidate.split_decodes_prefills_and_extends(
            common.replace(num_actual_tokens=total), boundary.threshold
        )
        long = [req for req in range(reqs) if step.new[req] > boundary.threshold]
        fresh = [req for req in long if step.computed[req] == 0]
        extend = long[0] if long else reqs
        prefill = fresh[0] if fresh else reqs
        bounds = [
            total if bound == reqs else sum(step.new[:bound])
            for bound in (extend, prefill)
        ]
        right = [extend, prefill - extend, reqs - prefill]
        right += [bounds[0], bounds[1] - bounds[0], total - bounds[1]]
        expect_same("decodes, extends, prefills and tokens", list(found), right)
        expect_same("their kinds", [type(number) for number in found], [int] * 6)


@dataclass(frozen=True)
class Workspace:
    """Sequences that are processed together, as far as they fit into a workspace.

    Args:
        seq_lens: tokens of each sequence.
        size: capacity of the workspace in tokens.
        offset: index of the first request.
    """

    seq_lens: tuple[int, ...]
    size: int
    offset: int


@st.composite
def workspaces(draw: st.DrawFn) -> Workspace:
    """Return sequences that fill a workspace exactly, or all of it except one token."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 5, 10])
    lens = [0, 1, size // 2, size - size // 2, size - 1, size]
    return Workspace(
        tuple(pick.choice(lens) for _ in range(pick.choice([0, 1, 2, 4, 7]))),
        size,
        pick.choice([0, 0, 3]),
    )


LARGE_WORKSPACES = [
    Workspace((300, 256, 44, 300, 1), 300, 300),
    Workspace((65_600, 65_536, 64, 65_600, 1), 65_600, 65_600),
    Workspace(Runs((1, 700)), 300, 1),
    Workspace(Runs((1, 65_600), (2, 2), (0, 3)), 65_601, 0),
]


@law(
    "split_prefill_chunks",
    cases=several(workspaces()),
    edges=[[work] for work in LARGE_WORKSPACES],
)
def a_chunk_of_requests_is_as_long_as_the_workspace_allows(
    setting: Setting, cases: list[Workspace]
) -> None:
    for work in cases:
        lens = counts(work.seq_lens)
        found = setting.candidate.split_prefill_chunks(lens, work.size, work.offset)
        right: list[tuple[int, int]] = []
        first, held = 0, 0
        for req, length in enumerate(work.seq_lens):
            if held + length > work.size:
                right.append((work.offset + first, work.offset + req))
                first, held = req, 0
            held += length
        if work.seq_lens:
            right.append((work.offset + first, work.offset + len(work.seq_lens)))
        expect_same("runs", [tuple(run) for run in found], right)
        expect_same("lengths afterwards", lens, counts(work.seq_lens))


@dataclass(frozen=True)
class BadCounts:
    """An invalid call.

    Args:
        operation: the operation that is called.
        what: the reason why the call is invalid.
    """

    operation: str
    what: str


@law(
    "reorder_batch_to_split_decodes_and_prefills",
    cases=[
        BadCounts("reorder", "a negative threshold"),
        BadCounts("reorder", "computed tokens of fewer requests"),
        BadCounts("reorder", "prompts of more requests"),
        BadCounts("reorder", "prompts without computed tokens"),
    ],
)
def counts_that_do_not_belong_together_are_not_sorted(
    setting: Setting, invalid: BadCounts
) -> None:
    reorder = setting.candidate.reorder_batch_to_split_decodes_and_prefills
    arguments: dict[str, tuple[object, ...]] = {
        "a negative threshold": ([1, 2], -1),
        "computed tokens of fewer requests": ([1, 2], 1, [3]),
        "prompts of more requests": ([1, 2], 1, [3, 4], [5, 6, 7]),
        "prompts without computed tokens": ([1, 2], 1, None, [5, 6]),
    }
    expect_rejection(invalid.what, lambda: reorder(*arguments[invalid.what]))


@law(
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_prefill_chunks",
    cases=[
        BadCounts("split_decodes_and_prefills", "a negative threshold"),
        BadCounts("split_decodes_and_prefills", "no flags of prompts"),
        BadCounts("split_decodes_prefills_and_extends", "a negative threshold"),
        BadCounts("split_prefill_chunks", "a sequence larger than the workspace"),
        BadCounts("split_prefill_chunks", "a workspace of no token"),
    ],
    claim="rejects shapes",
)
def boundaries_that_cannot_be_found_are_rejected(
    setting: Setting, invalid: BadCounts
) -> None:
    common = bare_step(Requests((1, 3), (4, 0)), setting.device)
    arguments: dict[str, tuple[object, ...]] = {
        "a negative threshold": (common, -1),
        "no flags of prompts": (common, 1, False, False),
        "a sequence larger than the workspace": (counts([3, 6, 2]), 5),
        "a workspace of no token": (counts([0]), 0),
    }
    operation = getattr(setting.candidate, invalid.operation)
    expect_rejection(invalid.what, lambda: operation(*arguments[invalid.what]))

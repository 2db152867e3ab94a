"""Laws of masking: causal masks, windows, chunks, query ranges, trees and encoder keys.

The cases use needles: a key that outweighs all others of its sequence. The needle is at the edge of
a window, chunk, tile, block, tree or range, or one position next to it. An implementation whose
visible range is one key too long or too short has an error of the size of a value.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..base.support import Support, nearest_length
from ..candidates.calls.calling import expect_right, expect_same_results, run_call
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, BatchPlan
from ..cases.options import Call, bias_table, paged_call, ragged_call, slopes, tree_of
from ..cases.rearranging import given_away
from ..cases.reuse import compiled
from .law import law

KINDS = (
    "causal",
    "not causal",
    "flags",
    "window",
    "window to both sides",
    "chunks",
    "window and chunks",
    "range",
    "tree",
    "window in a tree",
)

ALIKE = (KINDS[:3], KINDS[3:7], KINDS[7:8], KINDS[8:])
"""Groups of kinds: each group is tested by one law."""
TREE = (-1, 0, 0, 1)
"""Parents of four new tokens: the third one is the sibling of an ancestor of the fourth."""


@dataclass(frozen=True)
class MaskCase:
    """One request, the mask of its keys, and the position of a needle.

    Args:
        query_len, key_len: Number of new tokens and of keys.
        kind: Kind of mask: one of KINDS.
        size: Size of the window or the chunk.
        own: Index of one query among the new tokens.
        needle: Index of the key that outweighs all others. It is near an edge of the visible
            range of that query. -1 if there is none.
        first, last: First and last position of the query range, which is also visible to that
            query; -1 without a query range.
        parents: Parent of each new token in a tree; -1 for a root. Empty without a tree.
        flag: Whether the request is causal, for the kind in which each request has a flag.
        is_paged: Whether the keys are in a paged cache. Otherwise they are ragged.
        block_size: Slots per block.
        seed: Seed of the batch.
    """

    query_len: int
    key_len: int
    kind: str
    size: int
    own: int
    needle: int
    first: int = -1
    last: int = -1
    parents: tuple[int, ...] = ()
    flag: bool = True
    is_paged: bool = True
    block_size: int = 16
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return the options of the call."""
        options: dict[str, Any] = {}
        if self.kind in ("not causal", "window to both sides"):
            options["causal"] = False
        if self.kind == "flags":
            options["causal"] = torch.tensor([self.flag])
        if "window" in self.kind or self.kind == "range":
            options["sliding_window"] = self.size
        if "chunks" in self.kind:
            options["attention_chunk_size"] = max(self.size, 1)
        if self.kind == "window and chunks":
            options["attention_chunk_size"] = 2 * self.size + 1
        if self.kind == "range":
            ranges = torch.full((self.query_len, 2), -1, dtype=torch.int32)
            ranges[self.own] = torch.tensor([self.first, self.last])
            options["query_ranges"] = ranges
        if "tree" in self.kind:
            parents = [None if parent < 0 else parent for parent in self.parents]
            options["tree_mask"] = tree_of(parents, len(parents) + self.seed % 2)[None]
        return options

    def within(self, support: Support) -> "MaskCase":
        """Return the nearest case that the declared support includes.

        If the request has too many new tokens, the query becomes its last one. The position of the
        query does not change, so the needle is as near to the edge as before. If the kind of mask
        is not declared, a declared kind of the same law replaces it where there is one.
        """
        longest = nearest_length(self.query_len, support.query_lens)
        position = self.key_len - self.query_len + self.own
        is_cut = longest < self.query_len
        key_len = position + 1 if is_cut else self.key_len
        kind = self.kind

        def is_declared(kind: str) -> bool:
            options = {} if kind == "causal" else replace(self, kind=kind).options()
            return support.why_not_options(options) is None

        if not is_declared(kind):
            alike = next(group for group in ALIKE if kind in group)
            others = [
                kind_of_mask for kind_of_mask in alike if is_declared(kind_of_mask)
            ]
            kind = others[self.seed % len(others)] if others else kind
        return replace(
            self,
            query_len=longest,
            key_len=max(key_len, longest),
            kind=kind,
            own=longest - 1 if is_cut else self.own,
            needle=min(self.needle, key_len - 1),
            first=min(self.first, key_len - 1),
            last=min(self.last, key_len - 1),
            parents=self.parents[:longest],
        )

    def call(self, setting: Setting) -> Call:
        """Return the call, on paged or on ragged keys."""
        plan = BatchPlan(
            (self.query_len,),
            (self.key_len,),
            block_size=self.block_size,
            kv_heads=1,
            group=1 + self.seed % 3,
            dtype=DTYPES[self.seed % 3],
            spare_blocks=self.seed % 2,
            seed=self.seed,
        )
        plan = setting.fit(plan)
        needles = [(0, self.needle)] if self.needle >= 0 else []
        call = paged_call(plan, setting.device, needles, **self.options())
        return call if self.is_paged else ragged_call(call)


def draw_case(pick: Random, kinds: tuple[str, ...], is_paged: bool) -> MaskCase:
    """Return a needle near an edge of the visible range of one query of a request."""
    kernel = compiled(pick)
    kind = kernel.choice(kinds)
    query_len = pick.choice([1, 1, 3, 5, 20, 33])
    if "tree" in kind:
        query_len = pick.choice([2, 3, 5, 7, 7, 40, 70])
    if kind == "range":
        query_len = pick.choice([1, 3, 20, 33, 40, 40])
    context = pick.choice([0, 1, 15, 16, 31, 50, 63, 64, 65, 100, 130])
    key_len = query_len + context
    own = pick.choice([0, query_len - 1, pick.randrange(query_len)])
    position = context + own
    size = kernel.choice([1, 2, 7, 16, 17, 33, 64])
    first = min(
        max(0, pick.choice([0, position - 20, *[position + 1] * 3, position - 3])),
        key_len - 1,
    )
    # a range may extend past the end of the sequence
    last = first + pick.choice([0, 3, 20, 40, 40])
    chunk = 2 * size + 1 if kind == "window and chunks" else size
    edges = [
        0,
        position,
        context - 1,
        context,
        key_len - 1,
        position - size,
        position - size + 1,
        position + size,
        position // chunk * chunk,
        (position // chunk + 1) * chunk,
        position // 16 * 16,
        position // 32 * 32,
        position // 64 * 64,
        first,
        last,
        pick.randrange(key_len),
    ]
    if kind == "range":
        edges = [first, last]
    if "tree" in kind:
        edges = [*range(context, key_len), context - 1, 0]
    needle = pick.choice(edges) + pick.choice([-1, 0, 0, 1])
    needle = min(max(needle, 0), key_len - 1)
    if kind == "range" and last >= key_len and pick.random() < 0.5:
        # a needle would hide keys past the end, whose scores are 0
        needle = -1
    parents = [-1] if pick.random() < 0.8 else [-1, -1]
    parents += [pick.randrange(token) for token in range(len(parents), query_len)]
    return MaskCase(
        query_len,
        key_len,
        kind,
        size,
        own,
        needle,
        first if kind == "range" else -1,
        last if kind == "range" else -1,
        tuple(parents[:query_len]) if "tree" in kind else (),
        pick.random() < 0.5,
        is_paged,
        kernel.choice([16, 16, 1, 3, 24]),
        3 * pick.randrange(2**14) + kernel.randrange(3),
    )


@st.composite
def mask_cases(
    draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, is_paged: bool = True
) -> MaskCase:
    """Return a needle near an edge. The whole case is drawn from one seed."""
    return draw_case(Random(draw(st.integers(0, 2**20))), kinds, is_paged)


def expect_right_case(setting: Setting, case: MaskCase) -> None:
    call = case.call(setting)
    expect_right(setting, call, run_call(setting, call))


EDGES = [
    # the query has position 38, unless new tokens follow it or its keys are fewer
    *(MaskCase(3, 40, "causal", 7, 1, needle) for needle in (0, 38, 39)),
    MaskCase(3, 40, "not causal", 7, 1, 39),
    *(MaskCase(3, 40, "flags", 7, 1, 39, flag=flag) for flag in (False, True)),
    *(MaskCase(3, 40, "window", 7, 1, needle) for needle in (31, 32)),
    *(MaskCase(20, 40, "window to both sides", 7, 9, needle) for needle in (22, 23, 35, 36)),
    *(MaskCase(3, 40, "chunks", 16, 1, needle) for needle in (31, 32)),
    *(MaskCase(3, 35, "window and chunks", 7, 1, needle) for needle in (29, 30)),
    *(MaskCase(3, 40, "range", 7, 1, needle, 10, 20) for needle in (9, 10, 20, 21)),
    MaskCase(3, 40, "range", 7, 0, 39, 39, 39),
    *(MaskCase(4, 24, "tree", 7, 3, needle, parents=TREE) for needle in (20, 21, 22)),
    *(
        MaskCase(4, 24, "window in a tree", 3, 3, needle, parents=TREE)
        for needle in (19, 20, 22)
    ),
]  # fmt: skip
"""Cases with a needle on each side of an edge of each kind of mask."""


def edges_of(kinds: tuple[str, ...], is_paged: bool = True) -> list[MaskCase]:
    """Return the cases of EDGES of some kinds, on paged or on ragged keys."""
    return [replace(case, is_paged=is_paged) for case in EDGES if case.kind in kinds]


@law("paged_attention", cases=mask_cases(ALIKE[0]), edges=edges_of(ALIKE[0]))
def a_query_attends_to_all_keys_up_to_itself_and_none_after(
    setting: Setting, case: MaskCase
) -> None:
    """If the request is not causal, every query attends to all keys."""
    expect_right_case(setting, case)


@law("paged_attention", cases=mask_cases(ALIKE[1]), edges=edges_of(ALIKE[1]))
def a_query_attends_to_no_key_outside_of_its_window_or_chunk(
    setting: Setting, case: MaskCase
) -> None:
    expect_right_case(setting, case)


@law("paged_attention", cases=mask_cases(ALIKE[2]), edges=edges_of(ALIKE[2]))
def a_query_attends_to_its_multimodal_range_whatever_else_masks_it(
    setting: Setting, case: MaskCase
) -> None:
    """All positions from first to last are visible, also before the window or after the query."""
    expect_right_case(setting, case)


@law("paged_attention", cases=mask_cases(ALIKE[3]), edges=edges_of(ALIKE[3]))
def a_new_token_of_a_tree_attends_to_its_ancestors_and_no_sibling(
    setting: Setting, case: MaskCase
) -> None:
    """A window counts from its position: the context length plus its number of ancestors."""
    expect_right_case(setting, case)


@law(
    "encoder_attention",
    cases=mask_cases(KINDS[:8], is_paged=False),
    edges=edges_of(KINDS[:8], is_paged=False),
)
def ragged_keys_are_masked_as_paged_keys_are(setting: Setting, case: MaskCase) -> None:
    expect_right_case(setting, case)


TILES = [
    MaskCase(query_len, key_len, "causal", 1, own, needle, seed=needle)
    for query_len, key_len, own in ((1, 300, 0), (4, 300, 1), (20, 300, 7))
    for edge in (32, 64, 128, 256)
    for needle in (edge - 1, edge)
]
SPLITS = [
    MaskCase(1, 1100, "causal", 1, 0, needle, seed=needle)
    for edge in (512, 550, 1024)
    for needle in (edge - 1, edge)
]


@law("paged_attention", cases=[*TILES, *SPLITS])
def no_key_is_lost_between_two_tiles_or_splits(
    setting: Setting, case: MaskCase
) -> None:
    expect_right_case(setting, case)


LONG_WINDOWS = [
    MaskCase(
        query_len, context + query_len, "window", size, own,
        context + own - size, seed=3 * own,
    )
    for query_len, context, size, own in (
        (40, 110, 64, 31), (40, 125, 100, 39), (40, 144, 64, 20), (200, 430, 300, 127),
    )
]  # fmt: skip


@law("paged_attention", cases=LONG_WINDOWS)
def a_key_before_the_window_of_a_later_row_of_a_tile_is_masked(
    setting: Setting, case: MaskCase
) -> None:
    """The window is longer than a tile, and the key is in the windows of earlier rows."""
    expect_right_case(setting, case)


@law("encoder_attention", cases=[replace(case, is_paged=False) for case in TILES])
def no_ragged_key_is_lost_between_two_tiles(setting: Setting, case: MaskCase) -> None:
    expect_right_case(setting, case)


@dataclass(frozen=True)
class Across:
    """Cross-attention: queries of a decoder on the keys of an encoder.

    Args:
        query_lens, key_lens: [reqs] number of queries and of keys of each request. Either may be
            the larger one.
        needles: [reqs] index of the key that outweighs all others; -1 for a request without keys.
        is_paged: Whether the keys are in a paged cache. Otherwise they are ragged.
        seed: Seed of the batch.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    needles: tuple[int, ...]
    is_paged: bool
    seed: int


@st.composite
def crossings(draw: st.DrawFn, is_paged: bool = True) -> Across:
    """Return ragged queries on ragged keys, with the needle at the first or the last key."""
    pick = Random(draw(st.integers(0, 2**20)))
    reqs = pick.randint(1, 3)
    query_lens = tuple(pick.choice([0, 1, 1, 5, 20]) for _ in range(reqs))
    key_lens = tuple(pick.choice([0, 1, 3, 16, 17, 33, 65]) for _ in range(reqs))
    needles = tuple(pick.choice([0, count - 1]) if count else -1 for count in key_lens)
    return Across(query_lens, key_lens, needles, is_paged, pick.randrange(2**16))


def expect_right_across(setting: Setting, across: Across) -> None:
    plan = BatchPlan(across.query_lens, across.key_lens, seed=across.seed, padding=1)
    plan = setting.fit(plan)
    needles = [(req, key) for req, key in enumerate(across.needles) if key >= 0]
    call = paged_call(plan, setting.device, needles, causal=False)
    call = call if across.is_paged else ragged_call(call)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=crossings())
def a_decoder_attends_to_all_keys_of_its_own_encoder(
    setting: Setting, across: Across
) -> None:
    """For any ratio of queries to keys. Keys of other requests are masked."""
    expect_right_across(setting, across)


@law("encoder_attention", cases=crossings(is_paged=False))
def a_decoder_attends_to_all_ragged_keys_of_its_own_encoder(
    setting: Setting, across: Across
) -> None:
    expect_right_across(setting, across)


@law(
    "paged_attention",
    cases=[
        (name, lens)
        for name in ("sliding_window", "attention_chunk_size")
        for lens in ((200, 170), (133, 141), (90, 75), (500, 67))
    ],
)
def keys_before_every_window_and_chunk_are_never_read(
    setting: Setting, case: tuple[str, tuple[int, int]]
) -> None:
    """Their blocks may have been reallocated by then, so they may hold any value."""
    name, key_lens = case
    plan = setting.fit(BatchPlan((1, 3), key_lens, kv_heads=1))
    call = paged_call(plan, setting.device).changed(**{name: 16})
    found = run_call(setting, call)
    expect_right(setting, call, found)
    again = run_call(setting, given_away(call))
    expect_same_results("with NaN before what is seen", again, found)


def distances(reach: int) -> dict[str, Tensor]:
    """Return the options that add a bias to the scores by distance."""
    return {"alibi_slopes": slopes(4), "position_bias": bias_table(4, reach)}


@law(
    "paged_attention",
    cases=[
        (name, reach, lens)
        for name in ("alibi_slopes", "position_bias")
        for reach in (0, 1, 7, 40)
        for lens in (((1, 20), (45, 33)), ((17, 1), (17, 1)))
        if name == "position_bias" or reach == 1
    ],
)
def a_position_bias_depends_on_the_distance_of_query_and_key(
    setting: Setting,
    case: tuple[str, int, tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    """In both directions. Distances past the end of the table use its last entry."""
    name, reach, (query_lens, key_lens) = case
    for causal in (True, False):
        plan = setting.fit(BatchPlan(query_lens, key_lens))
        call = paged_call(plan, setting.device, causal=causal)
        call = call.changed(**{name: distances(reach)[name]})
        expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[0, 1, 2])
def entries_of_distances_that_do_not_occur_are_never_read(
    setting: Setting, seed: int
) -> None:
    """The keys are 0 to 11 positions before their queries. All other entries are NaN."""
    plan = setting.fit(BatchPlan((3, 12), (10, 12), seed=seed))
    call = paged_call(plan, setting.device)
    table = bias_table(4, 20)
    table[:, :9] = table[:, 21:] = float("nan")
    call = call.changed(position_bias=table)
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[(5, 8), (1, 1), (12, 12), (12, 6), (9, 8)])
def a_tree_that_is_a_chain_is_causal(setting: Setting, case: tuple[int, int]) -> None:
    """A request with more new tokens than the width of the mask is causal, whatever the mask."""
    query_len, width = case
    plan = setting.fit(BatchPlan((query_len, 1), (30, 18)))
    query_len = plan.query_lens[0]
    causal = paged_call(plan, setting.device)
    chain = torch.ones(2, width, width, dtype=torch.bool).tril()
    if query_len > width:
        chain[0] = False
    found = run_call(setting, causal.changed(tree_mask=chain))
    expect_right(setting, causal, found)

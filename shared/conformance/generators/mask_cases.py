"""Batches with masks: the visible keys of each query, and a needle at their edges."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ..harness.law import Setting
from ..harness.support import Support, nearest_length
from .batches import DTYPES, BatchPlan
from .options import Call, paged_call, ragged_call, tree_of

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


@dataclass(frozen=True)
class MaskCase:
    """One request, the mask of its keys, and the position of a needle.

    Args:
        query_len, key_len: Number of new tokens and of keys.
        kind: Kind of mask: one of KINDS.
        size: Size of the window or the chunk.
        own: Index of one query among the new tokens.
        needle: Index of the key that outweighs all others. It is near an edge of the visible
            range of that query.
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
            parents = [None if each < 0 else each for each in self.parents]
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
            others = [each for each in alike if is_declared(each)]
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
        needles = [(0, self.needle)]
        call = paged_call(plan, setting.device, needles, **self.options())
        return call if self.is_paged else ragged_call(call)


def draw_case(pick: Random, kinds: tuple[str, ...], is_paged: bool) -> MaskCase:
    """Return a needle near an edge of the visible range of one query of a request."""
    kind = pick.choice(kinds)
    query_len = pick.choice([1, 1, 3, 5, 20, 33])
    if "tree" in kind:
        query_len = pick.choice([2, 3, 5, 7, 7, 40, 70])
    if kind == "range":
        query_len = pick.choice([1, 3, 20, 33, 40, 40])
    context = pick.choice([0, 1, 15, 16, 31, 50, 63, 64, 65, 100, 130])
    key_len = query_len + context
    own = pick.choice([0, query_len - 1, pick.randrange(query_len)])
    position = context + own
    size = pick.choice([1, 2, 7, 16, 17, 33, 64])
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
    parents = [-1] if pick.random() < 0.8 else [-1, -1]
    parents += [pick.randrange(each) for each in range(len(parents), query_len)]
    return MaskCase(
        query_len,
        key_len,
        kind,
        size,
        own,
        min(max(needle, 0), key_len - 1),
        first if kind == "range" else -1,
        last if kind == "range" else -1,
        tuple(parents[:query_len]) if "tree" in kind else (),
        pick.random() < 0.5,
        is_paged,
        pick.choice([16, 16, 1, 3, 24]),
        pick.randrange(2**16),
    )


@st.composite
def mask_cases(
    draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, is_paged: bool = True
) -> MaskCase:
    """Return a needle near an edge. The whole case is drawn from one seed."""
    return draw_case(Random(draw(st.integers(0, 2**20))), kinds, is_paged)

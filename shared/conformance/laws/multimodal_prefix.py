"""Laws of multimodal prefixes: ranges of image tokens with bidirectional attention.

The expected ranges are computed token by token: whether a token is part of an image, and the first
and last position of the run of image tokens that contains it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ...contract.multimodal_features import MultiModalFeature
from ..candidates.setting import Setting
from ..cases.steps import (
    CROWD,
    LONG,
    MANY,
    Requests,
    Runs,
    counts,
    draw_requests,
    several,
)
from ..checks.expect import expect_rejection, expect_same
from .law import law


@dataclass(frozen=True)
class ImagePrompts:
    """The multimodal features of each prompt, and the arguments for their ranges.

    Args:
        features: [reqs] features of each prompt.
        window: Optional. Number of visible keys. If None, all keys are visible.
        clamp: Whether ranges longer than the window are kept.
        modulus: If 0, a range is a run of embeddings. Otherwise it is a whole feature without its
            leading padding, which ends before the first position that is one less than a
            multiple of this number.
    """

    features: tuple[tuple[MultiModalFeature, ...], ...]
    window: int | None
    clamp: bool
    modulus: int


@st.composite
def prompts(draw: st.DrawFn) -> ImagePrompts:
    """Return prompts with images that masks divide, audio between them, and empty features."""
    pick = Random(draw(st.integers(0, 2**20)))
    rows = []
    for _ in range(pick.choice([0, 1, 2, 3])):
        offset, row = 0, []
        for _ in range(pick.choice([0, 1, 2, 3])):
            offset += pick.choice([0, 0, 1, 5])
            length = pick.choice([0, 1, 2, 5, 9])
            flags = [pick.random() < 0.7 for _ in range(length)]
            mask = pick.choice([None, flags, flags, [True] * length, [False] * length])
            kind = pick.choice(["image", "image", "video", "audio"])
            row.append(MultiModalFeature(kind, offset, length, mask))
            offset += length
        rows.append(tuple(row))
    return ImagePrompts(
        tuple(rows),
        pick.choice([None, None, 0, 1, 2, 3, 5]),
        pick.choice([True, False]),
        pick.choice([0, 0, 0, 1, 2, 4, 8]),
    )


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last position of each run of consecutive positions."""
    known = set(positions)
    firsts = [position for position in positions if position - 1 not in known]
    lasts = [position for position in positions if position + 1 not in known]
    return list(zip(firsts, lasts, strict=True))


def ranges_of(
    feature: MultiModalFeature, prompts: ImagePrompts
) -> list[tuple[int, int]]:
    """Return the ranges of a feature, computed token by token."""
    if feature.modality not in ("image", "video"):
        return []
    positions = list(range(feature.offset, feature.offset + feature.length))
    if prompts.modulus:
        while positions and positions[0] % prompts.modulus != prompts.modulus - 1:
            positions.pop(0)
    elif feature.is_embed is not None:
        flags = list(feature.is_embed)
        positions = [
            position for position in positions if flags[position - feature.offset]
        ]
    return [
        (first, last)
        for first, last in runs_of(positions)
        if prompts.clamp
        or prompts.window is None
        or len(range(first, last + 1)) <= prompts.window
    ]


LARGE_PROMPTS = [
    ImagePrompts(
        (
            (
                MultiModalFeature(
                    "image", 65_600, 600, Runs((True, 299), (False, 1), (True, 300))
                ),
                MultiModalFeature("image", 70_000, 65_600, None),
            ),
        ),
        window,
        window is None,
        modulus,
    )
    for window, modulus in (
        (None, 0),
        (299, 0),
        (300, 256),
        (65_600, 0),
        (None, 65_536),
    )
] + [
    ImagePrompts(
        Runs(((), 299), ((MultiModalFeature("image", 0, 2, None),) * 260, 1)),
        None,
        True,
        0,
    )
]
"""Positions, lengths, windows, prompts and images that do not fit 8 and 16 bits."""


@law(
    "compute_mm_prefix_ranges",
    cases=several(prompts()),
    edges=[[prompts] for prompts in LARGE_PROMPTS],
)
def ranges_are_the_runs_of_an_images_tokens(
    setting: Setting, cases: list[ImagePrompts]
) -> None:
    """The masks may be lists or tensors."""
    for prompts in cases:
        right = {
            req: [span for feature in row for span in ranges_of(feature, prompts)]
            for req, row in enumerate(prompts.features)
        }
        as_tensors = [
            [
                MultiModalFeature(
                    feature.modality,
                    feature.offset,
                    feature.length,
                    None
                    if feature.is_embed is None
                    else torch.tensor(feature.is_embed, dtype=torch.bool),
                )
                for feature in row
            ]
            for row in prompts.features
        ]
        for features in (prompts.features, as_tensors):
            found = setting.candidate.compute_mm_prefix_ranges(
                features, prompts.window, prompts.clamp, prompts.modulus
            )
            as_lists = {
                req: [(int(first), int(last)) for first, last in ranges]
                for req, ranges in found.items()
            }
            expect_same("ranges", as_lists, right)


Ranges = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True)
class Images:
    """A step whose prompts contain images.

    Args:
        step: The requests.
        ranges: Optional. Pairs of a request and its ranges, in any order of requests. If None,
            no ranges are given.
        spare: Number of buffer rows after the last new token.
        window: Optional. Number of visible keys. If None, all keys are visible.
        clamp: Whether a range begins at the earliest in the window of its token.
    """

    step: Requests
    ranges: Ranges | None
    spare: int
    window: int | None = None
    clamp: bool = False

    def mapping(self) -> dict[int, list[tuple[int, int]]] | None:
        """Return the ranges as the argument of the operations."""
        if self.ranges is None:
            return None
        return {req: list(ranges) for req, ranges in self.ranges}


@st.composite
def images(draw: st.DrawFn) -> Images:
    """Return images before, among and after the new tokens, some of one token, some at 0."""
    pick = Random(draw(st.integers(0, 2**20)))
    step = draw_requests(pick)
    ranges = []
    for req in pick.sample(range(len(step.new)), pick.randint(0, len(step.new))):
        own, first = [], pick.choice([0, 0, step.computed[req], 3])
        for _ in range(pick.choice([0, 1, 1, 2])):
            last = first + pick.choice([0, 1, 2, 6])
            own.append((first, last))
            first = last + pick.choice([1, 2, 4])
        ranges.append((req, tuple(own)))
    return Images(
        step,
        pick.choice([None, *[tuple(ranges)] * 5]),
        pick.choice([0, 0, 3]),
        pick.choice([None, 1, 2, 3, 7]),
        pick.choice([False, True]),
    )


LARGE_IMAGES = [
    Images(MANY, ((299, ((3, 4),)), (298, ((260, 290), (300, 560)))), spare=300),
    Images(LONG, ((1, ((0, 9), (69_990, 70_001))), (0, ((65_590, 131_200),))), 0),
    Images(
        Requests((5,), (1190,)),
        ((0, tuple((4 * index, 4 * index + 2) for index in range(300))),),
        0,
    ),
    Images(CROWD, ((65_599, ((3, 9),)),), spare=3),
    Images(LONG, ((0, ((65_590, 131_200),)),), 0, window=300, clamp=True),
    Images(LONG, ((0, ((65_590, 131_200),)),), 0, window=300),
    Images(LONG, ((0, ((65_590, 131_200),)),), 0, window=70_000, clamp=True),
]
"""Requests, positions and images per request that do not fit 8 and 16 bits."""


@law(
    "compute_mm_prefix_range_tensor",
    cases=several(images()),
    edges=[[images] for images in LARGE_IMAGES],
)
def ranges_are_padded_with_ranges_of_one_token(
    setting: Setting, cases: list[Images]
) -> None:
    for images in cases:
        reqs = len(images.step.new)
        ranges = images.mapping()
        found = setting.candidate.compute_mm_prefix_range_tensor(
            ranges, reqs, setting.device
        )
        expect_same("the ranges afterwards", ranges, images.mapping())
        own: Mapping[int, Any] = ranges or {}
        rows = [list(own.get(req, [])) for req in range(reqs)]
        if not any(row and row != [(0, 0)] for row in rows):
            expect_same("ranges that say nothing", found, None)
            continue
        longest = max(map(len, rows))
        flat = [
            number
            for row in rows
            for span in [*row, *[(0, 0)] * (longest - len(row))]
            for number in span
        ]
        expect_same("ranges", found, counts(flat).view(reqs, longest, 2))
        expect_same("where they lie", found.device.type, setting.device.type)


UNTOUCHED = -99


@law(
    "fill_mm_prefix_query_ranges",
    cases=several(images()),
    edges=[[images] for images in LARGE_IMAGES],
)
def every_new_token_gets_the_range_that_holds_it(
    setting: Setting, cases: list[Images]
) -> None:
    """Rows after the new tokens are not written. Without an image, no row is written.

    A range that a window clamps begins where the window of its token does. Then a key is visible if
    it is in the window and (causal or in the range), as in Gemma 4.
    """
    for images in cases:
        step, total = images.step, sum(images.step.new)
        out = torch.full((total + images.spare, 2), UNTOUCHED, dtype=torch.int32)
        starts, lens = counts(step.starts), counts(step.seq_lens)
        ranges = images.mapping()
        windows = {} if images.window is None else {"sliding_window": images.window}
        written = setting.candidate.fill_mm_prefix_query_ranges(
            out, ranges, starts, lens, **windows, clamp_sliding_window=images.clamp
        )
        expect_same("the ranges afterwards", ranges, images.mapping())
        expect_same("the lengths afterwards", lens, counts(step.seq_lens))
        own: Mapping[int, Any] = ranges or {}
        right, is_any = [], False
        for req, position in zip(step.owners(), step.positions(), strict=True):
            inside = [
                span
                for span in own.get(req, [])
                if span[0] <= position <= span[1] and span[0] != span[1]
            ]
            is_any = is_any or bool(inside)
            if inside and images.clamp and images.window is not None:
                in_window = range(position - images.window + 1, position + 1)
                earlier, last = inside[0]
                inside = [(max(earlier, in_window[0]), last)]
            right.append(inside[0] if inside else (-1, -1))
        if not is_any:
            right = [(UNTOUCHED, UNTOUCHED)] * total
        right += [(UNTOUCHED, UNTOUCHED)] * images.spare
        expect_same("rows that were written", written, total if is_any else 0)
        flat = counts([number for span in right for number in span])
        expect_same("ranges of the new tokens", out, flat.view(-1, 2))


@dataclass(frozen=True)
class BadImages:
    """An invalid call.

    Args:
        operation: Name of the operation.
        arguments: Arguments of the call.
        what: The reason why it is invalid.
    """

    operation: str
    arguments: tuple[Any, ...]
    what: str


REJECTED = [
    BadImages("compute_mm_prefix_ranges", ([], -1), "a negative window"),
    BadImages("compute_mm_prefix_ranges", ([], None, False, -1), "a negative modulus"),
    BadImages(
        "compute_mm_prefix_ranges",
        ([[MultiModalFeature("image", 0, 3, [True])]],),
        "a mask shorter than its feature",
    ),
    BadImages(
        "compute_mm_prefix_ranges",
        ([[MultiModalFeature("image", -1, 3)]],),
        "a feature before its prompt",
    ),
    BadImages(
        "compute_mm_prefix_ranges",
        ([[MultiModalFeature("image", 1, -3)]],),
        "a negative length",
    ),
    BadImages(
        "compute_mm_prefix_range_tensor", ({2: [(0, 3)]}, 2), "a request too many"
    ),
    BadImages(
        "compute_mm_prefix_range_tensor", ({-1: [(0, 3)]}, 2), "a negative request"
    ),
    BadImages(
        "fill_mm_prefix_query_ranges", (3, {0: [(0, 3)]}, (0, 4), (4,)), "too few rows"
    ),
    BadImages(
        "fill_mm_prefix_query_ranges",
        (4, {1: [(0, 3)]}, (0, 4), (4,)),
        "a request too many",
    ),
    BadImages(
        "fill_mm_prefix_query_ranges",
        (4, {0: [(0, 3)]}, (0, 4), (3,)),
        "more new tokens than tokens",
    ),
    BadImages(
        "fill_mm_prefix_query_ranges",
        (4, {0: [(0, 3)]}, (0, 4), (4,), 0, True),
        "a window without a key",
    ),
]


@law(
    "compute_mm_prefix_ranges",
    "compute_mm_prefix_range_tensor",
    "fill_mm_prefix_query_ranges",
    cases=REJECTED,
    claim="rejects shapes",
)
def impossible_images_are_rejected(setting: Setting, invalid: BadImages) -> None:
    operation, given = (
        getattr(setting.candidate, invalid.operation),
        invalid.arguments,
    )
    out = None
    if invalid.operation == "fill_mm_prefix_query_ranges":
        rows, ranges, starts, lens, *window = given
        out = torch.full((rows, 2), UNTOUCHED, dtype=torch.int32)
        given = (out, ranges, counts(starts), counts(lens), *window)
    expect_rejection(
        invalid.what,
        lambda: operation(*given),
        {} if out is None else {"the rows": out},
    )

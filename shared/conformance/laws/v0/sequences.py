"""Laws of sequence-group metadata: a step built from groups of prompts and decodes.

The expected slots, block-table rows and lengths are computed sequence by sequence and token by
token.
"""

import builtins
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ....contract.kinds import PAD_SLOT_ID
from ....contract.v0.sequence_classes import (
    IndexMap,
    MultiModalPlaceholderMap,
    SequenceAttentionMetadata,
    SequenceGroup,
    SequenceInput,
)
from ...candidates.setting import Setting
from ...cases.steps import counts, padded, several
from ...checks.expect import expect_rejection, expect_same, expect_untimely
from ...checks.metadata import expect_fields
from ..law import law

range = builtins.range
"""The builtin: a report recreates a case among the names of torch, which has a `range` too."""
FAR = 10**6
"""A block id past the end of a row, which is not read."""


@dataclass(frozen=True)
class StepOfGroups:
    """A step made of groups.

    Args:
        groups: Groups of prompts, followed by groups of decodes.
        block_size: Slots per block.
        window: Optional. Number of visible keys. If None, all keys are visible.
        chunked: Whether prompts may come in chunks.
        padding: Number of padding sequences of a captured graph, or -1 if no graph is replayed.
        spare: Optional. Columns of the block table after the end of the longest row. If None, the
            width is not given.
    """

    groups: tuple[SequenceGroup, ...]
    block_size: int
    window: int | None
    chunked: bool
    padding: int = -1
    spare: int | None = None

    def sequences(self) -> list[tuple[SequenceGroup, SequenceInput]]:
        """Return every sequence with its group."""
        return [
            (group, sequence) for group in self.groups for sequence in group.sequences
        ]

    def row(self, group: SequenceGroup, sequence: SequenceInput) -> list[int]:
        """Return the block-table row that attention reads."""
        has_cache = any(row is not None for row in (group.block_tables or {}).values())
        is_read = (
            not group.is_prompt
            or self.chunked
            or group.prefix_cache_hit
            or sequence.context_len
        )
        if not has_cache or not is_read:
            return []
        return list(group.row(sequence))[self.dropped(group, sequence) :]

    def dropped(self, group: SequenceGroup, sequence: SequenceInput) -> int:
        """Return the number of blocks before the window of a decode."""
        kept = sequence.curr_sliding_window_block
        if group.is_prompt or not kept or not group.row(sequence):
            return 0
        used = len(range(0, sequence.context_len + sequence.query_len, self.block_size))
        return max(0, used - kept)

    def seq_lens(self) -> list[int]:
        """Return the number of tokens of each sequence that attention may read."""
        return [
            sequence.context_len
            + sequence.query_len
            - self.dropped(group, sequence) * self.block_size
            for group, sequence in self.sequences()
        ]

    def slots(self) -> list[int]:
        """Return the slot of every new token, or PAD_SLOT_ID if no later token attends to it."""
        found = []
        for group, sequence in self.sequences():
            row, length = (
                list(group.row(sequence)),
                sequence.context_len + sequence.query_len,
            )
            for position in range(sequence.context_len, length):
                is_seen = not group.is_prompt or self.window is None
                is_seen = is_seen or length - position <= (self.window or 0)
                block = row[position // self.block_size] if row else 0
                slot = block * self.block_size + position % self.block_size
                found.append(slot if row and is_seen else PAD_SLOT_ID)
        return found

    def placeholders(self) -> dict[str, IndexMap]:
        """Return, per modality, which embedding row replaces which token of the step."""
        src: dict[str, list[int]] = {}
        dest: dict[str, list[int]] = {}
        rows: dict[str, int] = {}
        token = 0
        for group in self.groups:
            if not group.is_prompt:
                continue
            for modality, placeholder_map in group.multi_modal_placeholder_maps.items():
                before = rows.get(modality, 0)
                for index in range(len(group.sequences)):
                    first = token + index * placeholder_map.dest_len
                    src.setdefault(modality, []).extend(
                        before + row
                        for span in placeholder_map.src_ranges
                        for row in span
                    )
                    dest.setdefault(modality, []).extend(
                        first + own
                        for span in placeholder_map.dest_ranges
                        for own in span
                    )
                rows[modality] = before + placeholder_map.src_len
            token += sum(sequence.query_len for sequence in group.sequences)
        return {name: IndexMap(src[name], dest[name]) for name in src}


def draw_group(
    pick: Random, first_id: int, size: int, is_prompt: bool
) -> SequenceGroup:
    """Return a group of one to three sequences. Some have no cache, some rows are longer."""
    edges = [0, 0, 1, size - 1, size, size + 1, 2 * size, 3 * size + 1]
    query_len = pick.choice([0, 1, *edges[3:]]) if is_prompt else 1
    context = pick.choice(edges)
    ids = range(first_id, first_id + pick.choice([1, 1, 2, 3]))
    kept = 0 if is_prompt else pick.choice([0, 0, 1, 2, 3])
    rows = {}
    for seq_id in ids:
        count = len(range(0, context + query_len, size))
        blocks = [pick.randint(0, 99) for _ in range(count)]
        rows[seq_id] = [*blocks, *[FAR] * pick.choice([0, 0, 2])]
    has_cache = pick.random() < 0.8
    empty = pick.choice([None, dict.fromkeys(ids)])
    maps = {}
    for modality in pick.sample(["image", "audio"], pick.choice([0, 0, 1, 2])):
        edges = sorted(pick.randint(0, query_len) for _ in range(2))
        count = edges[1] - edges[0]
        skipped = pick.choice([0, 2])
        maps[modality] = MultiModalPlaceholderMap(
            src_ranges=(range(skipped, skipped + count),),
            src_len=skipped + count + pick.choice([0, 1]),
            dest_ranges=(range(edges[0], edges[1]),),
            dest_len=query_len,
        )
    return SequenceGroup(
        is_prompt=is_prompt,
        sequences=tuple(
            SequenceInput(
                seq_id=seq_id,
                query_len=query_len,
                context_len=context,
                curr_sliding_window_block=kept,
            )
            for seq_id in ids
        ),
        block_tables=rows if has_cache else empty,
        prefix_cache_hit=is_prompt and has_cache and pick.random() < 0.3,
        multi_modal_placeholder_maps=maps if is_prompt else {},
    )


@st.composite
def groups(draw: st.DrawFn) -> StepOfGroups:
    """Return a step of prompts, decodes, or both. Steps of decodes may replay a graph."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 4, 5, 16])
    kinds = sorted(pick.choice([0, 1]) for _ in range(pick.choice([1, 2, 3])))
    made = [
        draw_group(pick, 10 * index, size, kind == 0)
        for index, kind in enumerate(kinds)
    ]
    if not any(sequence.query_len for group in made for sequence in group.sequences):
        made.append(draw_group(pick, 90, size, False))
    is_decode = not any(group.is_prompt for group in made)
    padding = pick.choice([-1, 0, 2]) if is_decode else -1
    return StepOfGroups(
        tuple(made),
        size,
        pick.choice([None, None, 0, 1, size, size + 1, 9]),
        pick.choice([True, False]),
        padding,
        pick.choice([0, 2]) if padding >= 0 else pick.choice([None, 0, 2]),
    )


def begin(setting: Setting, step: StepOfGroups) -> Any:
    """Return the candidate's builder after the start of a step."""
    builder = setting.candidate.CommonMetadataBuilder(
        block_size=step.block_size,
        sliding_window=step.window,
        chunked_prefill_enabled=step.chunked,
        device=setting.device,
    )
    builder.prepare()
    return builder


def build(builder: Any, step: StepOfGroups) -> SequenceAttentionMetadata:
    """Return the metadata that the candidate builds from the groups that were added."""
    lens = [sequence.query_len for _, sequence in step.sequences()]
    rows = [step.row(group, sequence) for group, sequence in step.sequences()]
    width = None if step.spare is None else max(map(len, rows)) + step.spare
    found: SequenceAttentionMetadata = builder.build(
        [*step.seq_lens(), *[1] * max(step.padding, 0)],
        lens,
        step.padding,
        len(lens) + step.padding if step.padding >= 0 else None,
        width,
    )
    return found


def expected(step: StepOfGroups) -> dict[str, Any]:
    """Return the expected fields of the step's metadata."""
    padding = max(step.padding, 0)
    both = step.sequences()
    rows = [*[step.row(*pair) for pair in both], *[[]] * padding]
    width = max(map(len, rows)) + (step.spare or 0)
    lens = [*step.seq_lens(), *[1] * padding]
    new = [*[sequence.query_len for _, sequence in both], *[1] * padding]
    prompts = [sequence for group, sequence in both if group.is_prompt]
    decodes = [
        length
        for (group, _), length in zip(both, step.seq_lens(), strict=True)
        if not group.is_prompt
    ]
    slots = [*step.slots(), *[PAD_SLOT_ID] * padding]
    return {
        "num_prefills": len(prompts),
        "num_prefill_tokens": sum(sequence.query_len for sequence in prompts),
        "num_decode_tokens": len(decodes) + padding,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "multi_modal_placeholder_index_maps": step.placeholders(),
        "enable_kv_scales_calculation": True,
        "seq_lens": lens,
        "seq_lens_tensor": counts(lens),
        "max_prefill_seq_len": max(
            (sequence.context_len + sequence.query_len for sequence in prompts),
            default=0,
        ),
        "max_decode_seq_len": max(decodes, default=0),
        "max_query_len": max(new),
        "query_start_loc": counts([0, *accumulate(new)]),
        "seq_start_loc": counts([0, *accumulate(lens)]),
        "context_lens_tensor": counts(
            [*[sequence.context_len for _, sequence in both], *[0] * padding]
        ),
        "block_tables": counts([e for row in rows for e in padded(row, width, 0)]).view(
            len(rows), width
        ),
        "use_cuda_graph": step.padding >= 0,
    }


def large_group(reqs: int, query_len: int, context: int, size: int) -> SequenceGroup:
    """Return a group of prompts or decodes with rows of blocks past 16 bits."""
    blocks = range(70_000, 70_000 + len(range(0, context + query_len, size)))
    return SequenceGroup(
        is_prompt=query_len > 1,
        sequences=tuple(
            SequenceInput(seq_id=index, query_len=query_len, context_len=context)
            for index in range(reqs)
        ),
        block_tables={index: [*blocks[:-1], 80_000 + index] for index in range(reqs)},
        prefix_cache_hit=False,
    )


@dataclass(frozen=True)
class LargeStep:
    """A step of one group.

    Args:
        reqs: Number of sequences.
        query_len, context: New tokens, and tokens in the cache, of each of them.
        size: Slots per block.
        window: Optional. Number of visible keys. If None, all keys are visible.
        padding: As in `StepOfGroups`.
    """

    reqs: int
    query_len: int
    context: int
    size: int
    window: int | None = None
    padding: int = -1


@law(
    "CommonMetadataBuilder",
    cases=[
        LargeStep(300, 1, 3, 2, padding=270),
        LargeStep(2, 300, 65_600, 512),
        LargeStep(1, 65_600, 300, 300, window=65_550),
        LargeStep(280, 2, 0, 1),
    ],
)
def fields_of_a_large_step_follow_from_its_groups(
    setting: Setting, case: LargeStep
) -> None:
    """Sequences, tokens, blocks and windows that do not fit 8 and 16 bits."""
    group = large_group(case.reqs, case.query_len, case.context, case.size)
    spare = 0 if case.padding >= 0 else None
    step = StepOfGroups((group,), case.size, case.window, True, case.padding, spare)
    builder = begin(setting, step)
    builder.add_seq_group(group)
    found = build(builder, step)
    expect_fields("metadata", found, expected(step), setting.device)


@law("CommonMetadataBuilder", cases=several(groups()))
def every_field_of_a_step_follows_from_its_groups(
    setting: Setting, cases: list[StepOfGroups]
) -> None:
    """Two calls of `build` give the same metadata. The groups are not modified."""
    for step in cases:
        builder = begin(setting, step)
        before = deepcopy(step)
        for group in step.groups:
            builder.add_seq_group(group)
        right = expected(step)
        for _ in range(2):
            found = build(builder, step)
            expect_fields("metadata", found, right, setting.device)
        expect_same("the groups afterwards", step, before)


@dataclass(frozen=True)
class Steps:
    """Two steps of one builder.

    Args:
        first, second: The steps. Both have the same settings.
    """

    first: StepOfGroups
    second: StepOfGroups


@st.composite
def two_steps(draw: st.DrawFn) -> Steps:
    """Return two steps of one builder."""
    first, second = draw(groups()), draw(groups())
    size = first.block_size
    pick = Random(draw(st.integers(0, 2**20)))
    again = tuple(
        draw_group(pick, 10 * index, size, group.is_prompt)
        for index, group in enumerate(second.groups)
    )
    if not any(sequence.query_len for group in again for sequence in group.sequences):
        again += (draw_group(pick, 90, size, False),)
    is_decode = not any(group.is_prompt for group in again)
    return Steps(
        first,
        replace(
            first,
            groups=again,
            padding=1 if is_decode else -1,
            spare=1 if is_decode else second.spare,
        ),
    )


@law("CommonMetadataBuilder", cases=several(two_steps()))
def a_step_of_groups_does_not_depend_on_the_step_before(
    setting: Setting, cases: list[Steps]
) -> None:
    """It does not modify the metadata of that step."""
    for steps in cases:
        builder = begin(setting, steps.first)
        for group in steps.first.groups:
            builder.add_seq_group(group)
        first = build(builder, steps.first)
        builder.prepare()
        for group in steps.second.groups:
            builder.add_seq_group(group)
        second = build(builder, steps.second)
        expect_fields("the second step", second, expected(steps.second), setting.device)
        expect_fields("the first step", first, expected(steps.first), setting.device)


@dataclass(frozen=True)
class BadGroup:
    """The description of a group that a builder rejects.

    Args:
        what: Key in REJECTED_GROUPS.
    """

    what: str


def group_of(
    query_len: int, context: int, row: list[int] | None, is_prompt: bool = True
) -> SequenceGroup:
    """Return a group of one sequence."""
    own = SequenceInput(seq_id=7, query_len=query_len, context_len=context)
    tables = {7: row}
    return SequenceGroup(is_prompt=is_prompt, sequences=(own,), block_tables=tables)


GOOD = group_of(3, 2, [4, 9])
DECODE = group_of(1, 5, [4, 9], is_prompt=False)
TWO = (SequenceInput(seq_id=7, query_len=1), SequenceInput(seq_id=8, query_len=1))
IMAGE = MultiModalPlaceholderMap(
    src_ranges=(range(2),), src_len=2, dest_ranges=(range(2),), dest_len=2
)
REJECTED_GROUPS = {
    "a group without sequences": replace(GOOD, sequences=()),
    "a prompt after a decode": GOOD,
    "a decode of two tokens": replace(DECODE, sequences=group_of(2, 0, [1]).sequences),
    "a sequence longer than its row": group_of(3, 6, [4, 9]),
    "a sequence without a row": replace(GOOD, block_tables={8: [4, 9]}),
    "a row that is None beside one that is not": replace(
        GOOD, sequences=TWO, block_tables={7: [4], 8: None}
    ),
    "a hit without a cache": replace(GOOD, block_tables=None, prefix_cache_hit=True),
    "a negative count": group_of(-1, 4, [4, 9]),
    "a negative context": group_of(2, -1, [4, 9]),
    "placeholders of another length": replace(
        GOOD, multi_modal_placeholder_maps={"image": IMAGE}
    ),
}


@law(
    "CommonMetadataBuilder",
    cases=[BadGroup(what) for what in REJECTED_GROUPS],
    claim="rejects shapes",
)
def a_rejected_group_leaves_the_step_unchanged(
    setting: Setting, invalid: BadGroup
) -> None:
    bad, step = REJECTED_GROUPS[invalid.what], StepOfGroups((GOOD,), 4, None, False)
    if invalid.what in ("a prompt after a decode", "a decode of two tokens"):
        step = replace(step, groups=(GOOD, DECODE))
        bad = replace(bad, is_prompt=invalid.what == "a prompt after a decode")
    builder = begin(setting, step)
    for group in step.groups:
        builder.add_seq_group(group)
    expect_rejection(invalid.what, lambda: builder.add_seq_group(bad))
    found = build(builder, step)
    expect_fields("the step afterwards", found, expected(step), setting.device)


@law("CommonMetadataBuilder", cases=[StepOfGroups((GOOD, DECODE), 4, None, True)])
def a_builder_accepts_groups_between_prepare_and_build(
    setting: Setting, step: StepOfGroups
) -> None:
    """A group added too late would be lost. One added too early would be in another step."""
    new = setting.candidate.CommonMetadataBuilder(block_size=4)
    expect_untimely("a group before the beginning", lambda: new.add_seq_group(GOOD))
    expect_untimely("an end before the beginning", lambda: new.build([5], [3]))
    builder = begin(setting, step)
    expect_rejection("a step without groups", lambda: builder.build([], []))
    for group in step.groups:
        builder.add_seq_group(group)
    right = step.seq_lens()
    late: list[tuple[str, tuple[Any, ...]]] = [
        ("other lengths", ([right[0], right[1] + 1], [3, 1])),
        ("lengths of fewer sequences", (right[:1], [3])),
        ("other new tokens", (right, [2, 1])),
        ("padding that does not exist", (right, [3, 1], -2)),
        ("a prompt in a graph", ([*right, 1], [3, 1], 1, 3, 4)),
        ("a row longer than the table", (right, [3, 1], -1, None, 1)),
    ]
    for what, arguments in late:
        expect_rejection(what, partial(builder.build, *arguments))
    build(builder, step)
    expect_untimely("a group after the end", lambda: builder.add_seq_group(DECODE))
    builder.prepare()
    builder.add_seq_group(DECODE)
    graphs: list[tuple[str, tuple[Any, ...]]] = [
        ("a graph of another size", ([6, 1], [1], 1, 3, 4)),
        ("a graph of an open width", ([6, 1], [1], 1, 2)),
        ("padding whose length is not 1", ([6, 0], [1], 1, 2, 4)),
    ]
    for what, arguments in graphs:
        expect_rejection(what, partial(builder.build, *arguments))
    make = setting.candidate.CommonMetadataBuilder
    for sizes in ({"block_size": 0}, {"block_size": 4, "sliding_window": -1}):
        expect_rejection(repr(sizes), partial(make, **sizes))


@law(
    "CommonMetadataBuilder",
    cases=[
        StepOfGroups(
            (GOOD, replace(GOOD, block_tables={7: [1, 2]}), DECODE), 4, 3, False
        )
    ],
)
def what_a_step_has_collected_can_be_read(setting: Setting, step: StepOfGroups) -> None:
    """Under the names that engines use."""
    builder = begin(setting, step)
    for group in step.groups:
        builder.add_seq_group(group)
    both = step.sequences()
    prompts = [sequence for group, sequence in both if group.is_prompt]
    for name, right in {
        "slot_mapping": step.slots(),
        "context_lens": [sequence.context_len for _, sequence in both],
        "block_tables": [step.row(*pair) for pair in both],
        "prefill_seq_lens": [sequence.orig_seq_len for sequence in prompts],
        "curr_seq_lens": step.seq_lens()[len(prompts) :],
        "num_prefills": len(prompts),
        "num_prefill_tokens": sum(sequence.query_len for sequence in prompts),
        "num_decode_tokens": len(both) - len(prompts),
    }.items():
        expect_same(name, getattr(builder, name), right)

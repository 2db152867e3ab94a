"""Laws of attention metadata: the fields of a step, layer groups and default arguments.

Every field is compared exactly. The expected values are computed token by token, from the requests
alone.
"""

from dataclasses import dataclass
from inspect import isclass, isfunction, signature
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.operations import CONCEPTS
from ...engine.backend_interface import AttentionMetadataBuilder
from ..candidates.candidate import OutsideSupport
from ..candidates.setting import Setting
from ..cases.batches import GARBAGE
from ..cases.steps import (
    CROWD,
    LONG,
    MANY,
    PROMPT,
    Requests,
    counts,
    draw_requests,
    requests,
    several,
    table_of,
)
from ..checks.expect import Disagreement, expect_rejection, expect_same
from ..checks.metadata import (
    expect_fields,
    expect_numbers,
    expect_rows,
    seen_by,
    values_of,
)
from .law import law


def build(setting: Setting, step: Requests) -> CommonAttentionMetadata:
    """Return the metadata that the candidate builds for a step."""
    found: CommonAttentionMetadata = setting.candidate.build_common_attn_metadata(
        list(step.new),
        list(step.computed),
        step.rows(),
        step.block_size,
        setting.device,
    )
    return found


@law(
    "build_common_attn_metadata",
    cases=several(requests(most=5)),
    edges=[[MANY, LONG], [PROMPT]],
)
def every_field_of_a_step_follows_from_its_requests(
    setting: Setting, cases: list[Requests]
) -> None:
    for step in cases:
        found = build(setting, step)
        starts, lens = counts(step.starts), counts(step.seq_lens)
        rows = step.rows()
        expect_rows("block_table_tensor", found.block_table_tensor.cpu(), rows)
        width = max(map(len, rows), default=0)
        expect_same("its width", found.block_table_tensor.shape[1], width)
        expect_fields(
            "metadata",
            found,
            {
                "query_start_loc": starts,
                "query_start_loc_cpu": starts,
                "seq_lens": lens,
                "seq_lens_cpu": lens,
                "num_computed_tokens_cpu": counts(step.computed),
                "num_reqs": len(step.new),
                "num_actual_tokens": sum(step.new),
                "max_query_len": max(step.new, default=0),
                "max_seq_len": max(step.seq_lens, default=0),
                "block_table_tensor": found.block_table_tensor,
                "slot_mapping": torch.tensor(step.slots(), dtype=torch.int64),
            },
            setting.device,
        )


@law(
    "build_common_attn_metadata",
    cases=several(requests(most=5, fewest=1)),
    edges=[[MANY, LONG]],
)
def a_token_is_written_where_it_is_read(
    setting: Setting, cases: list[Requests]
) -> None:
    """A new token has the slot of the last key visible to it, by both copies of the lengths."""
    for step in cases:
        found = build(setting, step)
        for copy in seen_by(found, step.block_size):
            expect_numbers("the visible slots of each token", copy, step.seen())
            own = [slots[-1] for slots in copy]
            expect_same("the slots that are written", found.slot_mapping.tolist(), own)


@law("build_common_attn_metadata", cases=several(requests(fewest=1)))
def building_a_step_does_not_modify_its_lists(
    setting: Setting, cases: list[Requests]
) -> None:
    for step in cases:
        new, computed, rows = list(step.new), list(step.computed), step.rows()
        build_step = setting.candidate.build_common_attn_metadata
        first = build_step(new, computed, rows, step.block_size, setting.device)
        expect_same("the lists", [new, computed], [list(step.new), list(step.computed)])
        expect_same("the rows", rows, step.rows())
        before = {name: value for name, value in values_of(first).items()}
        copies = {k: v.clone() for k, v in before.items() if isinstance(v, Tensor)}
        build_step([1], [0], [[7]], step.block_size, setting.device)
        for name, copy in copies.items():
            expect_same(f"{name} after the next step is built", before[name], copy)


@dataclass(frozen=True)
class BadStep:
    """Numbers that do not describe a valid step.

    Args:
        what: The reason why they are invalid.
    """

    what: str


REJECTED_STEPS = {
    "a sequence longer than its row": ([1, 5], [0, 4], [[1], [2, 3]], 4),
    "a context longer than its row": ([1], [8], [[1, 2]], 4),
    "a negative count": ([-1], [4], [[1]], 4),
    "a negative context": ([2], [-1], [[1]], 4),
    "a negative block id": ([5], [0], [[1, -1]], 4),
    "more requests than contexts": ([1, 1], [0], [[1], [2]], 4),
    "more requests than rows": ([1, 1], [0, 0], [[1]], 4),
    "a block of no slots": ([1], [0], [[1]], 0),
}


@law(
    "build_common_attn_metadata",
    cases=[BadStep(what) for what in REJECTED_STEPS],
    claim="rejects shapes",
)
def an_invalid_step_is_rejected(setting: Setting, invalid: BadStep) -> None:
    new, computed, rows, size = REJECTED_STEPS[invalid.what]
    expect_rejection(
        invalid.what,
        lambda: setting.candidate.build_common_attn_metadata(
            new, computed, rows, size, setting.device
        ),
    )


class RecordingBuilder(AttentionMetadataBuilder):
    """A builder that returns the common metadata unchanged and records the prefix lengths."""

    prefix_lens: list[int]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        self.prefix_lens = [*getattr(self, "prefix_lens", []), common_prefix_len]
        return common_attn_metadata


@dataclass(frozen=True)
class LayerGroups:
    """A step whose layers have several block tables.

    Args:
        step: The requests. The block table and slots of group g use the seed `step.seed` + g.
        groups: Number of layers of each group.
        spare: Number of buffer entries after the end of the batch. All of them hold garbage.
        padding: Number of padding tokens after the last request.
        counted: Whether the padding counts as tokens. If not, it is passed apart.
    """

    step: Requests
    groups: tuple[int, ...]
    spare: int
    padding: int = 0
    counted: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(self.step.new) + self.padding * self.counted

    def of(self, group: int) -> Requests:
        """Return the step with the block ids of one group."""
        step = self.step
        return Requests(step.new, step.computed, step.block_size, step.seed + group)


@st.composite
def groups(draw: st.DrawFn) -> LayerGroups:
    """Return a step of one to three groups, in buffers that may be longer than the step."""
    pick = Random(draw(st.integers(0, 2**20)))
    return LayerGroups(
        draw_requests(pick, fewest=1),
        tuple(pick.choice([0, 1, 2, 3]) for _ in range(pick.choice([1, 1, 2, 3]))),
        pick.choice([0, 1, 3]),
        pick.choice([0, 0, 2]),
        pick.choice([True, False]),
    )


def longer(tensor: Tensor, spare: int) -> Tensor:
    """Return a tensor with `spare` entries of garbage appended."""
    garbage = torch.tensor(GARBAGE, dtype=tensor.dtype, device=tensor.device)[:spare]
    if tensor.dim() == 2:
        garbage = garbage[:, None].expand(-1, tensor.shape[1])
    return torch.cat([tensor, garbage])


def attn_arguments(case: LayerGroups, device: torch.device) -> dict[str, Any]:
    """Return all arguments of `build_attn_metadata` except the builders."""
    step, spare = case.step, case.spare
    starts, lens = (counts(numbers) for numbers in (step.starts, step.seq_lens))
    pad = [-1] * case.padding
    every = range(len(case.groups))
    return {
        "num_reqs": len(step.new),
        "num_tokens": case.num_tokens,
        "query_start_loc": longer(starts, spare).to(device),
        "query_start_loc_cpu": longer(starts, spare),
        "seq_lens": longer(lens, spare).to(device),
        "seq_lens_cpu": longer(lens, spare),
        "num_computed_tokens_cpu": longer(counts(step.computed), spare),
        "block_tables": [
            longer(table_of(case.of(group).rows(), device), spare) for group in every
        ],
        "slot_mappings": [
            longer(torch.tensor([*case.of(group).slots(), *pad]), spare).to(device)
            for group in every
        ],
        "layer_names": [
            [f"layer {group} {index}" for index in range(case.groups[group])]
            for group in every
        ],
        **({} if case.counted else {"num_tokens_padded": sum(step.new) + case.padding}),
    }


LARGE_GROUPS = [
    LayerGroups(MANY, (2, 300), spare=3, padding=300),
    LayerGroups(LONG, (1,), spare=1, padding=65_600),
    LayerGroups(PROMPT, (1,), spare=1, padding=2, counted=False),
    LayerGroups(CROWD, (1,), spare=3),
    LayerGroups(Requests((1,), (2,)), (1,) * 260, spare=0),
]


@law(
    "build_attn_metadata",
    cases=several(groups()),
    edges=[[case] for case in LARGE_GROUPS],
)
def every_group_of_layers_is_built_from_its_own_table(
    setting: Setting, cases: list[LayerGroups]
) -> None:
    """Buffer entries after the end of the batch do not appear in the metadata."""
    for case in cases:
        step, device = case.step, setting.device
        given = attn_arguments(case, device)
        builders = [RecordingBuilder(None, [], device) for _ in case.groups]
        before = attn_arguments(case, device)
        found = setting.candidate.build_attn_metadata(builders, **given)
        for name, value in before.items():
            expect_same(f"{name} afterwards", given[name], value)
        names = [name for own in given["layer_names"] for name in own]
        expect_same("layers", sorted(found), sorted(names))
        starts, lens = counts(step.starts), counts(step.seq_lens)
        for group, own in enumerate(given["layer_names"]):
            if any(found[name] is not found[own[0]] for name in own):
                raise Disagreement(
                    "metadata of a group", "as a whole", "several", "one"
                )
            if own:
                expect_same("prefix that all share", builders[group].prefix_lens, [0])
            for name in own[:1]:
                expect_fields(
                    f"metadata of group {group}",
                    found[name],
                    {
                        "query_start_loc": starts,
                        "query_start_loc_cpu": starts,
                        "seq_lens": lens,
                        "seq_lens_cpu": lens,
                        "num_computed_tokens_cpu": counts(step.computed),
                        "num_reqs": len(step.new),
                        "num_actual_tokens": case.num_tokens,
                        "max_query_len": max(step.new),
                        "max_seq_len": max(step.seq_lens),
                        "block_table_tensor": table_of(case.of(group).rows(), device),
                        "slot_mapping": torch.tensor(
                            [*case.of(group).slots(), *[-1] * case.padding]
                        ),
                    },
                    device,
                )


class Spoiler(RecordingBuilder):
    """A builder that changes its own metadata. Other groups must not receive the changes."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        return common_attn_metadata.replace(max_query_len=10**6, num_reqs=0)


@law("build_attn_metadata", cases=several(groups()))
def no_group_changes_the_step_of_another(
    setting: Setting, cases: list[LayerGroups]
) -> None:
    for case in cases:
        given = attn_arguments(case, setting.device)
        alone = [RecordingBuilder(None, [], setting.device) for _ in case.groups]
        right = setting.candidate.build_attn_metadata(alone, **given)
        builders = [
            (Spoiler if group % 2 == 0 else RecordingBuilder)(None, [], setting.device)
            for group in range(len(case.groups))
        ]
        found = setting.candidate.build_attn_metadata(builders, **given)
        for group, own in enumerate(given["layer_names"]):
            for name in own if group % 2 else []:
                values = values_of(right[name])
                expect_fields(
                    f"metadata of {name}", found[name], values, setting.device
                )


REJECTED_GROUPS = (
    "no request",
    "starts shorter than the batch",
    "lengths shorter than the batch",
    "computed tokens shorter than the batch",
    "a table shorter than the batch",
    "slots shorter than the batch",
    "a group without a table",
    "a group without slots",
    "a group without a builder",
    "fewer padded tokens than tokens",
    "slots shorter than the padded batch",
)


@law(
    "build_attn_metadata",
    cases=[BadStep(what) for what in REJECTED_GROUPS],
    claim="rejects shapes",
)
def buffers_shorter_than_the_batch_are_rejected(
    setting: Setting, invalid: BadStep
) -> None:
    case = LayerGroups(Requests((1, 3), (4, 0)), (1, 1), 0)
    given = attn_arguments(case, setting.device)
    builders = [RecordingBuilder(None, [], setting.device) for _ in case.groups]
    tables, slots = given["block_tables"], given["slot_mappings"]
    changes: dict[str, dict[str, Any]] = {
        "no request": {"num_reqs": 0, "num_tokens": 0},
        "starts shorter than the batch": {
            "query_start_loc_cpu": given["query_start_loc_cpu"][:2]
        },
        "lengths shorter than the batch": {"seq_lens": given["seq_lens"][:1]},
        "computed tokens shorter than the batch": {
            "num_computed_tokens_cpu": given["num_computed_tokens_cpu"][:1]
        },
        "a table shorter than the batch": {"block_tables": [tables[0], tables[1][:1]]},
        "slots shorter than the batch": {"slot_mappings": [slots[0][:3], slots[1]]},
        "a group without a table": {"block_tables": tables[:1]},
        "a group without slots": {"slot_mappings": slots[:1]},
        "a group without a builder": {},
        "fewer padded tokens than tokens": {"num_tokens_padded": 3},
        "slots shorter than the padded batch": {"num_tokens_padded": 5},
    }
    if invalid.what == "a group without a builder":
        builders.pop()
    given |= changes[invalid.what]
    expect_rejection(
        invalid.what, lambda: setting.candidate.build_attn_metadata(builders, **given)
    )


@dataclass(frozen=True)
class Operation:
    """An operation that can be called without some of its arguments.

    Args:
        name: Name of the operation.
    """

    name: str


COUNTING = (
    "batch_split",
    "metadata",
    "step_buffers",
    "batch_slices",
    "sequence_metadata",
    "encoder_decoder",
    "local_attention",
    "fast_prefill",
    "spec_decode",
    "causal_conv",
    "layer_parameters",
    "multimodal_prefix",
    "graph_state",
)


@law(
    cases=[
        Operation(name)
        for concept in CONCEPTS
        if concept.name in COUNTING
        for name in concept.operations
    ]
)
def an_omitted_argument_has_the_default_of_the_reference(
    setting: Setting, operation: Operation
) -> None:
    """Also in every public method. A candidate may have fewer or additional arguments."""
    if setting.candidate.missing([operation.name]):
        raise OutsideSupport(f"there is no {operation.name}")
    own = getattr(setting.candidate, operation.name)
    right = getattr(setting.truth, operation.name)
    pairs: list[tuple[str, Any, Any]] = [(operation.name, own, right)]
    if isclass(right):
        pairs += [
            (f"{operation.name}.{name}", getattr(own, name, None), method)
            for name, method in vars(right).items()
            if isfunction(method) and name[0] != "_"
        ]
    for name, one, other in pairs:
        taken = signature(one).parameters if callable(one) else {}
        for parameter in signature(other).parameters.values():
            if parameter.default is not parameter.empty and parameter.name in taken:
                found = taken[parameter.name].default
                expect_same(f"{parameter.name} of {name}", found, parameter.default)


@law("build_common_attn_metadata", cases=several(requests()))
def a_step_is_planned_on_the_host_whatever_the_default_device_is(
    setting: Setting, cases: list[Requests]
) -> None:
    for step in cases:
        right = values_of(build(setting, step))
        with torch.device("meta"):
            found = build(setting, step)
        expect_fields("metadata", found, right, setting.device)

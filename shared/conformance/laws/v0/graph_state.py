"""Laws of steps that are captured once and replayed on other requests (CUDA graphs).

The expected result of a replay is the result of the function itself, called on the batch alone.
"""

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....contract.graph_support import AttentionCGSupport, GroupSupport
from ....contract.v0.sequence_classes import SequenceAttentionMetadata
from ...candidates.setting import Setting
from ...cases.steps import Runs, counts, several
from ...cases.v0.graph_histories import (
    HARMLESS,
    LONGEST,
    DecodeBatch,
    GraphHistory,
    histories,
    mixed,
    names_of,
)
from ...checks.expect import expect_rejection, expect_same, expect_untimely
from ...checks.metadata import expect_fields, expect_unchanged, packed, remember
from ..law import law
from .graph_rejections import state_of

POISON = -77


@dataclass(frozen=True)
class Levels:
    """CUDA graph support levels of groups of layers.

    Args:
        groups: Level, backend and layers of each group of layers, by cache group.
        considered: Optional. The layers to consider. If None, all layers are considered.
    """

    groups: tuple[tuple[tuple[int, str, tuple[str, ...]], ...], ...]
    considered: tuple[str, ...] | None


@st.composite
def levels(draw: st.DrawFn) -> Levels:
    """Return groups with ties; some of their layers are not considered."""
    pick = Random(draw(st.integers(0, 2**20)))
    names = iter("abcdefghijkl")
    made = tuple(
        tuple(
            (
                pick.choice([0, 1, 2, 3, 3]),
                f"backend {next(names)}",
                tuple(pick.sample("xyzw", pick.choice([1, 1, 2]))),
            )
            for _ in range(pick.choice([0, 1, 2, 3]))
        )
        for _ in range(pick.choice([0, 1, 2, 3]))
    )
    considered = tuple(pick.sample("xyzw", pick.choice([0, 1, 2])))
    return Levels(made, pick.choice([None, considered]))


@law("get_attn_cg_support", cases=several(levels()))
def the_graph_support_of_a_step_is_that_of_its_weakest_group(
    setting: Setting, cases: list[Levels]
) -> None:
    """The first of several weakest backends is named; without a limit, none is."""
    for levels in cases:
        found = setting.candidate.get_attn_cg_support(
            [
                [
                    GroupSupport(AttentionCGSupport(level), backend, layers)
                    for level, backend, layers in group
                ]
                for group in levels.groups
            ],
            None if levels.considered is None else set(levels.considered),
        )
        weakest: tuple[int, str | None] = (3, None)
        for group in levels.groups:
            for level, backend, layers in group:
                is_considered = levels.considered is None or any(
                    x in levels.considered for x in layers
                )
                if is_considered and level < weakest[0]:
                    weakest = (level, backend)
        expect_same("the level", found.min_cg_support, AttentionCGSupport(weakest[0]))
        expect_same("the weakest backend", found.min_cg_attn_backend, weakest[1])


MANY_DECODES = [
    GraphHistory(
        (300, 260),
        2,
        True,
        (
            DecodeBatch(Runs((5, 299), (LONGEST, 1)), 2),
            DecodeBatch(Runs((300, 258)), 1),
        ),
    ),
    GraphHistory((2, 3), 300, True, (DecodeBatch((7, LONGEST), 290, 260),)),
]
"""Decodes and blocks of a row that do not fit eight bits."""


@law("CommonAttentionState", cases=several(histories()), edges=[MANY_DECODES])
def a_captured_step_has_harmless_values_in_all_rows(
    setting: Setting, cases: list[GraphHistory]
) -> None:
    """Steps of all sizes use the first rows of the same buffers."""
    for history in cases:
        state, most = state_of(setting, history), max(history.sizes)
        expect_same("capturing before", state.is_graph_capturing, False)
        with state.graph_capture(most):
            expect_same("capturing", state.is_graph_capturing, True)
            found = [
                state.graph_capture_get_metadata_for_batch(size)
                for size in history.sizes
            ]
            clone = state.graph_clone(history.sizes[0])
        expect_same("capturing afterwards", state.is_graph_capturing, False)
        for size, metadata in zip(history.sizes, found, strict=True):
            right: dict[str, Any] = {
                "num_decode_tokens": size,
                "max_decode_seq_len": LONGEST,
                "max_query_len": 1,
                "max_decode_query_len": 1,
                "query_start_loc": counts(range(size + 1)),
                "use_cuda_graph": True,
            }
            if history.has_encoder:
                right |= {
                    "encoder_seq_lens": [1] * size,
                    "max_encoder_seq_len": LONGEST,
                    "num_encoder_tokens": 0,
                }
            for name in names_of(history):
                dtype = torch.int64 if name.endswith("slot_mapping") else torch.int32
                shape = (size, history.max_blocks) if "tables" in name else (size,)
                shape = (0,) if name == "cross_slot_mapping" else shape
                right[name] = torch.full(shape, HARMLESS[name], dtype=dtype)
                address = getattr(metadata, name).data_ptr()
                expect_same(
                    f"address of {name}", address, getattr(found[0], name).data_ptr()
                )
            expect_fields(f"a step of {size}", metadata, right, setting.device)
            buffers = state.get_graph_input_buffers(metadata).present()
            expect_same("buffers", sorted(buffers), sorted(names_of(history)))
            for name, buffer in buffers.items():
                same = buffer is getattr(metadata, name)
                expect_same(f"identity of {name}", same, True)
        settings = (
            clone.max_blocks,
            clone.max_seq_len_to_capture,
            clone.device,
            clone.is_encoder_decoder_model,
        )
        own = (history.max_blocks, LONGEST, setting.device, history.has_encoder)
        expect_same("settings of a clone", settings, own)
        expect_same("another object", clone is state, False)
        expect_same("captured by a clone", clone.captured_batch_sizes, [])


@law("CommonAttentionState", cases=several(histories()), edges=[MANY_DECODES])
def a_refill_overwrites_all_values_of_an_older_batch(
    setting: Setting, cases: list[GraphHistory]
) -> None:
    """Buffers keep their memory, whatever it held; the batch is not modified."""
    for history in cases:
        state, most = state_of(setting, history), max(history.sizes)
        with state.graph_capture(most):
            captured = state.graph_capture_get_metadata_for_batch(most)
        buffers = state.get_graph_input_buffers(captured)
        for number, batch in enumerate(history.batches):
            if number % 2:
                for buffer in buffers.present().values():
                    buffer.fill_(POISON)
            metadata = batch.metadata(setting.device, history.has_encoder)
            before = remember(metadata)
            state.prepare_graph_input_buffers(buffers, metadata)
            expect_unchanged("the batch", metadata, before)
            for name in names_of(history):
                right = batch.refilled(name, most, history.max_blocks)
                expect_same(
                    f"{name} of the captured step", getattr(captured, name), right
                )
        starts = counts(range(most + 1))
        expect_same("starts of the captured step", captured.query_start_loc, starts)


@law("CommonAttentionState", cases=several(histories()), edges=[MANY_DECODES])
def a_replay_equals_the_function_called_on_the_batch_alone(
    setting: Setting, cases: list[GraphHistory]
) -> None:
    """The smallest step that fits is replayed, in whichever order steps were captured."""
    for history in cases:
        state, most = state_of(setting, history), max(history.sizes)
        sizes_run: list[int] = []
        step = partial(mixed, sizes_run)
        device = setting.device
        try:
            with state.graph_capture(most):
                for size in history.sizes:
                    state.capture(step, size, torch.ones(size, 2, device=device).long())
        except NotImplementedError:
            continue  # graphs are not supported there
        expect_same("sizes", state.captured_batch_sizes, sorted(history.sizes))
        for batch in history.batches:
            reqs = len(batch.lens)
            x = torch.arange(2 * reqs, device=device).view(reqs, 2) + 3
            before = x.clone()
            sizes_run.clear()
            metadata = batch.metadata(device, history.has_encoder)
            found = state.replay(metadata, x)
            expect_same("the input afterwards", x, before)
            if sizes_run:  # a replayed graph does not call the function
                smallest = min(size for size in history.sizes if size >= reqs)
                expect_same("requests of the step that ran", sizes_run, [smallest])
            table = batch.refilled("block_tables", reqs, history.max_blocks)
            slots = batch.refilled("slot_mapping", reqs, 0)
            right = x.cpu() * counts(batch.lens)[:, None] + slots[:, None]
            right += 7 * table.sum(1)[:, None]
            if history.has_encoder:
                crossed = batch.refilled("cross_block_tables", reqs, history.max_blocks)
                right += crossed.sum(1)[:, None]
            expect_same("the result", packed(found), right)


def summed(metadata: SequenceAttentionMetadata, x: Tensor) -> Tensor:
    """Return for each request a sum over all rows, padding rows included."""
    lens, tables = metadata.seq_lens_tensor, metadata.block_tables
    assert lens is not None and tables is not None
    total = x.sum(0) + 3 * lens.sum() + 5 * metadata.slot_mapping.sum() + tables.sum()
    return x * 0 + total


@law("CommonAttentionState", cases=several(histories()), edges=[MANY_DECODES])
def a_replay_does_not_depend_on_older_replays(
    setting: Setting, cases: list[GraphHistory]
) -> None:
    """Even if the step sums over all its rows. The example input is not modified."""
    for history in cases:
        device, most = setting.device, max(history.sizes)
        last = history.batches[-1]
        results = []
        for batches in (history.batches, (last,)):
            state = state_of(setting, history)
            example = torch.full((most, 2), 9, device=device)
            try:
                with state.graph_capture(most):
                    state.capture(summed, most, example)
            except NotImplementedError:
                return  # graphs are not supported there
            for batch in batches:
                reqs = len(batch.lens)
                x = torch.arange(2 * reqs, device=device).view(reqs, 2) + 3
                metadata = batch.metadata(device, history.has_encoder)
                results.append(packed(state.replay(metadata, x)).cpu())
            right = torch.full((most, 2), 9)
            expect_same("what it was captured with", example.cpu(), right)
        expect_same("the result alone", results[-1], results[-2])


@law(
    "CommonAttentionState",
    cases=[GraphHistory((2, 4), 3, False, (DecodeBatch((5, 9), 2),))],
)
def capture_is_possible_only_within_its_block(
    setting: Setting, history: GraphHistory
) -> None:
    """Also after an exception, which discards what its block captured."""
    state, device = state_of(setting, history), setting.device
    for name, call in (
        ("metadata", lambda: state.graph_capture_get_metadata_for_batch(1)),
        ("a clone", lambda: state.graph_clone(1)),
        ("a capture", lambda: state.capture(lambda step: step.seq_lens_tensor, 1)),
    ):
        expect_untimely(f"{name} outside of a block", call)
    batch = history.batches[0].metadata(device, False)
    expect_rejection("a replay of nothing", lambda: state.replay(batch))
    expect_rejection("a block of no request", lambda: state.graph_capture(0))
    expect_same("capturing after a rejection", state.is_graph_capturing, False)
    with state.graph_capture(4):
        expect_untimely("a block in a block", lambda: state.graph_capture(4))
        for size in (0, 5):
            expect_rejection(
                f"a step of {size}",
                partial(state.graph_capture_get_metadata_for_batch, size),
            )
            expect_rejection(f"a clone of {size}", partial(state.graph_clone, size))
    try:
        with state.graph_capture(4):
            first = state.graph_capture_get_metadata_for_batch(4)
            raise KeyError
    except KeyError:
        pass
    expect_same("capturing after an exception", state.is_graph_capturing, False)
    with state.graph_capture(4):
        second = state.graph_capture_get_metadata_for_batch(4)
    state.prepare_graph_input_buffers(state.get_graph_input_buffers(second), batch)
    right = history.batches[0].refilled("seq_lens_tensor", 4, 0)
    expect_same("lengths of the later block", second.seq_lens_tensor, right)
    expect_same("lengths of the earlier", first.seq_lens_tensor, counts([1] * 4))
    make = setting.candidate.CommonAttentionState
    for sizes in ((0, 5), (5, 0), (-1, 5)):
        expect_rejection(f"a state of {sizes}", partial(make, *sizes))


@law(
    "CommonAttentionState",
    cases=[GraphHistory((1, 3), 2, False, (DecodeBatch((7,), 1),))],
)
def an_exception_discards_only_the_steps_of_its_own_block(
    setting: Setting, history: GraphHistory
) -> None:
    state = state_of(setting, history)

    def step(metadata: Any) -> Any:
        return metadata.seq_lens_tensor * 10

    try:
        with state.graph_capture(3):
            state.capture(step, 1)
    except NotImplementedError:
        expect_same("sizes", state.captured_batch_sizes, [])
        return  # graphs are not supported there
    try:
        with state.graph_capture(3):
            state.capture(step, 3)
            raise KeyError
    except KeyError:
        pass
    expect_same("sizes", state.captured_batch_sizes, [1])
    found = state.replay(history.batches[0].metadata(setting.device, False))
    expect_same("the result", packed(found), counts([70]))
    long = DecodeBatch((1, 2), 1).metadata(setting.device, False)
    expect_rejection("a batch larger than all steps", lambda: state.replay(long))
    with state.graph_capture(3):
        state.capture(lambda metadata: metadata.seq_lens_tensor * 3, 1)
        for what, function, inputs in (
            ("a step of fewer rows", lambda step: step.seq_lens_tensor[:1], ()),
            ("a step of no tensor", lambda step: None, ()),
            ("inputs of fewer rows", lambda step, x: x, (torch.ones(2, 1),)),
        ):
            expect_rejection(what, partial(state.capture, function, 3, *inputs))
    expect_same("sizes", state.captured_batch_sizes, [1])
    found = state.replay(history.batches[0].metadata(setting.device, False))
    expect_same("the result of the later capture", packed(found), counts([21]))

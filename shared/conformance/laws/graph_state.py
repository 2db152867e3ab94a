"""Laws of steps that are captured once and replayed on other requests (CUDA graphs).

A history is a sequence of refills: batches shrink and grow, and block tables get narrower. The
expected contents of the buffers are written out number by number. The expected result of a replay
is the result of the function itself, called on the batch alone.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.graph_classes import AttentionCGSupport, GroupSupport
from ...contract.kinds import PAD_SLOT_ID
from ...contract.sequence_classes import SequenceAttentionMetadata
from ..generators.steps import (
    counts,
    expect_fields,
    expect_unchanged,
    packed,
    remember,
    several,
)
from ..harness.canaries import checked_values
from ..harness.expect import expect_refusal, expect_same, expect_untimely
from ..harness.law import Setting, law

LONGEST = 24
HARMLESS = {
    "slot_mapping": PAD_SLOT_ID,
    "seq_lens_tensor": 1,
    "block_tables": 0,
    "encoder_seq_lens_tensor": 1,
    "cross_slot_mapping": PAD_SLOT_ID,
    "cross_block_tables": 1,
}
"""Values of padding rows: they write to no slot and read one key, in a block that exists."""
POISON = -77


@dataclass(frozen=True)
class Levels:
    """CUDA graph support levels of groups of layers.

    Args:
        groups: Level, backend and layers of each group of layers, by cache group.
        asked: Optional. The layers to consider. If None, all layers are considered.
    """

    groups: tuple[tuple[tuple[int, str, tuple[str, ...]], ...], ...]
    asked: tuple[str, ...] | None


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
    asked = tuple(pick.sample("xyzw", pick.choice([0, 1, 2])))
    return Levels(made, pick.choice([None, asked]))


@law("get_attn_cg_support", cases=several(levels()))
def a_step_captures_what_its_weakest_group_does(
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
            None if levels.asked is None else set(levels.asked),
        )
        weakest: tuple[int, str | None] = (3, None)
        for group in levels.groups:
            for level, backend, layers in group:
                is_asked = levels.asked is None or any(
                    x in levels.asked for x in layers
                )
                if is_asked and level < weakest[0]:
                    weakest = (level, backend)
        expect_same("the level", found.min_cg_support, AttentionCGSupport(weakest[0]))
        expect_same("who is to blame", found.min_cg_attn_backend, weakest[1])


@dataclass(frozen=True)
class DecodeBatch:
    """A batch of decodes.

    Args:
        lens: The number of tokens of each sequence.
        width: The width of the block table.
        cross_width: The width of the encoders' block table.
    """

    lens: tuple[int, ...]
    width: int
    cross_width: int = 1

    def metadata(
        self, device: torch.device, has_encoder: bool
    ) -> SequenceAttentionMetadata:
        """Return the metadata of the batch, with different numbers in every field."""
        reqs = len(self.lens)
        crossed: dict[str, Any] = {
            "encoder_seq_lens": [each // 2 + 1 for each in self.lens],
            "encoder_seq_lens_tensor": counts(
                [each // 2 + 1 for each in self.lens], device
            ),
            "max_encoder_seq_len": max(self.lens) // 2 + 1,
            "num_encoder_tokens": 0,
            "cross_slot_mapping": torch.zeros(0, dtype=torch.int64, device=device),
            "cross_block_tables": counts(
                range(500, 500 + reqs * self.cross_width), device
            ).view(reqs, self.cross_width),
        }
        return SequenceAttentionMetadata(
            num_decode_tokens=reqs,
            slot_mapping=torch.tensor(
                [100 * each + req for req, each in enumerate(self.lens)], device=device
            ),
            seq_lens_tensor=counts(self.lens, device),
            max_decode_seq_len=max(self.lens),
            block_tables=counts(range(30, 30 + reqs * self.width), device).view(
                reqs, self.width
            ),
            **(crossed if has_encoder else {}),
        )

    def refilled(self, name: str, size: int, width: int) -> Tensor:
        """Return the expected contents of a buffer of that size after a refill."""
        source = getattr(self.metadata(torch.device("cpu"), True), name)
        shape = (size, width) if source.dim() == 2 else (size,)
        shape = (0,) if name == "cross_slot_mapping" else shape
        right = torch.full(shape, HARMLESS[name], dtype=source.dtype)
        for place, value in enumerate(source.tolist()):
            for column, each in enumerate(value if source.dim() == 2 else [value]):
                if source.dim() == 2:
                    right[place, column] = each
                else:
                    right[place] = each
        return right


@dataclass(frozen=True)
class GraphHistory:
    """Captured steps, and the batches that are replayed in them.

    Args:
        sizes: The number of requests of each captured step, in the order of capture.
        max_blocks: The width of the block tables.
        has_encoder: Whether the steps also read an encoder's keys.
        batches: The batches, in the order of their replays.
    """

    sizes: tuple[int, ...]
    max_blocks: int
    has_encoder: bool
    batches: tuple[DecodeBatch, ...]


@st.composite
def histories(draw: st.DrawFn) -> GraphHistory:
    """Return batches that fill a step, have one request, or follow longer batches."""
    pick = Random(draw(st.integers(0, 2**20)))
    sizes = pick.sample(range(1, 8), pick.choice([1, 2, 3]))
    most, width = max(sizes), pick.choice([1, 2, 4])
    made = []
    for _ in range(pick.choice([1, 3, 4])):
        reqs = pick.choice([most, 1, pick.randint(1, most), pick.choice(sizes)])
        made.append(
            DecodeBatch(
                tuple(pick.choice([1, LONGEST, 5]) for _ in range(reqs)),
                pick.choice([width, 1, pick.randint(0, width)]),
                pick.choice([width, 1]),
            )
        )
    return GraphHistory(tuple(sizes), width, pick.choice([True, False]), tuple(made))


def state_of(setting: Setting, history: GraphHistory) -> Any:
    """Return a new state of the candidate."""
    return setting.candidate.CommonAttentionState(
        history.max_blocks, LONGEST, setting.device, history.has_encoder
    )


def names_of(history: GraphHistory) -> tuple[str, ...]:
    """Return the fields that a captured step reads."""
    return tuple(HARMLESS)[: 6 if history.has_encoder else 3]


@law("CommonAttentionState", cases=several(histories()))
def a_step_is_captured_with_numbers_that_do_no_harm(
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
                place = getattr(metadata, name).data_ptr()
                expect_same(
                    f"address of {name}", place, getattr(found[0], name).data_ptr()
                )
            expect_fields(f"a step of {size}", metadata, right, setting.device)
            buffers = state.get_graph_input_buffers(metadata).present()
            expect_same("buffers", sorted(buffers), sorted(names_of(history)))
            for name, buffer in buffers.items():
                same = buffer is getattr(metadata, name)
                expect_same(f"the very tensor of {name}", same, True)
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


@law("CommonAttentionState", cases=several(histories()))
def a_refill_leaves_nothing_of_an_older_batch(
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


def mixed(
    sizes_run: list[int], metadata: SequenceAttentionMetadata, x: Tensor
) -> Tensor:
    """Return a result that depends on all inputs of a step; record its request count."""
    sizes_run.append(metadata.num_decode_tokens)
    assert metadata.seq_lens_tensor is not None and metadata.block_tables is not None
    found = x * metadata.seq_lens_tensor[:, None] + metadata.slot_mapping[:, None]
    if metadata.cross_block_tables is not None:
        found = found + metadata.cross_block_tables.sum(1)[:, None]
    return found + 7 * metadata.block_tables.sum(1)[:, None]


@law("CommonAttentionState", cases=several(histories()))
def a_replay_is_the_function_of_the_batch_alone(
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


@law("CommonAttentionState", cases=several(histories()))
def a_replay_depends_on_no_older_one(
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


@dataclass(frozen=True)
class BadCapture:
    """An invalid refill of a state with two rows of three blocks.

    Args:
        what: The reason why it is invalid.
        has_encoder: Whether the steps read an encoder's keys.
    """

    what: str
    has_encoder: bool = False


CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "more requests than were captured": lambda batch: {"num_decode_tokens": 3},
    "no request": lambda batch: {"num_decode_tokens": 0},
    "a prompt": lambda batch: {"num_prefills": 1, "num_prefill_tokens": 1},
    "a wider table": lambda batch: {"block_tables": counts(range(8)).view(2, 4)},
    "a table of fewer requests": lambda batch: {"block_tables": batch.block_tables[:1]},
    "a longer sequence": lambda batch: {"max_decode_seq_len": LONGEST + 1},
    "slots of another dtype": lambda batch: {"slot_mapping": batch.slot_mapping.int()},
    "lengths of another dtype": lambda batch: {
        "seq_lens_tensor": batch.seq_lens_tensor.long()
    },
    "no slots": lambda batch: {"slot_mapping": None},
    "no table": lambda batch: {"block_tables": None},
    "fewer slots than requests": lambda batch: {"slot_mapping": batch.slot_mapping[:1]},
    "fewer lengths than requests": lambda batch: {
        "seq_lens_tensor": batch.seq_lens_tensor[:1]
    },
    "a longer encoder": lambda batch: {"max_encoder_seq_len": LONGEST + 1},
    "encoder tokens to write": lambda batch: {"cross_slot_mapping": batch.slot_mapping},
    "no encoder lengths": lambda batch: {"encoder_seq_lens_tensor": None},
    "a wider cross table": lambda batch: {
        "cross_block_tables": counts(range(8)).view(2, 4)
    },
}
REFUSED = [BadCapture(what) for what in list(CHANGES)[:12]] + [
    BadCapture(what, True) for what in CHANGES
]


@law("CommonAttentionState", cases=REFUSED, claim="refuses shapes")
def a_batch_that_does_not_fit_is_rejected_before_anything_is_written(
    setting: Setting, nonsense: BadCapture
) -> None:
    history = GraphHistory((2,), 3, nonsense.has_encoder, ())
    state = state_of(setting, history)
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
    buffers = state.get_graph_input_buffers(captured)
    good = DecodeBatch((5, 9), 2, 3).metadata(setting.device, nonsense.has_encoder)
    state.prepare_graph_input_buffers(buffers, good)
    other = DecodeBatch((7, 3), 2, 3).metadata(setting.device, nonsense.has_encoder)
    values = {**vars(other), **CHANGES[nonsense.what](other)}
    bad = SequenceAttentionMetadata(**values)
    expect_refusal(
        nonsense.what,
        lambda: state.prepare_graph_input_buffers(buffers, bad),
        buffers.present(),
    )


LENGTHS = [
    (name, lens)
    for name in ("seq_lens_tensor", "encoder_seq_lens_tensor")
    for lens in ((0, 5), (5, -1), (5, LONGEST + 1))
]


@law("CommonAttentionState", cases=LENGTHS, claim="refuses contents")
def lengths_that_no_step_was_captured_for_are_rejected_if_contents_are_checked(
    setting: Setting, case: tuple[str, tuple[int, int]]
) -> None:
    """Applies to sequences and encoders; the longest captured length is accepted."""
    name, lens = case
    state = state_of(setting, GraphHistory((2,), 3, True, ()))
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
    buffers = state.get_graph_input_buffers(captured)
    good = DecodeBatch((LONGEST, 1), 2, 3).metadata(setting.device, True)
    fits: dict[str, Any] = {name: counts((LONGEST, 1), setting.device)}
    fits_not: dict[str, Any] = {name: counts(lens, setting.device)}
    good, bad = replace(good, **fits), replace(good, **fits_not)
    with checked_values():
        state.prepare_graph_input_buffers(buffers, good)
        expect_same(name, getattr(captured, name), counts((LONGEST, 1)))
        expect_refusal(
            f"{name} of {lens}",
            lambda: state.prepare_graph_input_buffers(buffers, bad),
            buffers.present(),
        )


@law(
    "CommonAttentionState",
    cases=[BadCapture(name) for name in list(HARMLESS)[:3]]
    + [BadCapture(name, True) for name in HARMLESS],
    claim="refuses shapes",
)
def metadata_without_a_buffer_is_of_no_captured_step(
    setting: Setting, nonsense: BadCapture
) -> None:
    """A step without an encoder does not need the encoder's buffers."""
    state = state_of(setting, GraphHistory((2,), 3, nonsense.has_encoder, ()))
    with state.graph_capture(2):
        whole = state.graph_capture_get_metadata_for_batch(2)
    for other in (None, [1, 2]):
        lacking = replace(whole, **{nonsense.what: other})
        expect_refusal(
            f"{nonsense.what} = {other}",
            partial(state.get_graph_input_buffers, lacking),
        )
    if not nonsense.has_encoder:
        cross: dict[str, Any] = dict.fromkeys(list(HARMLESS)[3:])
        found = state.get_graph_input_buffers(replace(whole, **cross)).present()
        expect_same("buffers", sorted(found), sorted(list(HARMLESS)[:3]))


INPUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "no input": lambda x: (),
    "one input more": lambda x: (x, x),
    "an input of fewer rows": lambda x: (x[:1],),
    "an input of more rows": lambda x: (torch.cat([x, x[:1]]),),
    "an input of other columns": lambda x: (x[:, :1],),
    "an input of one axis": lambda x: (x[:, 0],),
    "an input without an axis": lambda x: (x[0, 0],),
    "an input of another dtype": lambda x: (x.float(),),
}
"""Invalid inputs for a step that was captured with one input [2, 2] of integers."""
REPLAYED = [
    BadCapture(what, has_encoder)
    for what in (*CHANGES, *INPUTS)
    for has_encoder in (False, True)
    if has_encoder or what not in list(CHANGES)[12:]
]


@law("CommonAttentionState", cases=REPLAYED, claim="refuses shapes")
def a_rejected_replay_leaves_its_step_as_it_was(
    setting: Setting, nonsense: BadCapture
) -> None:
    """The batch or the inputs do not fit; the next replay is correct again."""
    history = GraphHistory((2,), 3, nonsense.has_encoder, ())
    state, device = state_of(setting, history), setting.device
    seen: list[SequenceAttentionMetadata] = []

    def step(metadata: SequenceAttentionMetadata, x: Tensor) -> Tensor:
        seen.append(metadata)
        return mixed([], metadata, x)

    x = torch.tensor([[3, 4], [5, 6]], device=device)
    good = DecodeBatch((5, 9), 2, 3).metadata(device, nonsense.has_encoder)
    try:
        with state.graph_capture(2):
            state.capture(step, 2, x + 1)
    except NotImplementedError:
        # graphs are not supported there, so there is nothing to replay
        expect_refusal(nonsense.what, lambda: state.replay(good, x))
        return
    right = packed(state.replay(good, x)).cpu()
    buffers = state.get_graph_input_buffers(seen[0]).present()
    other = DecodeBatch((7, 3), 2, 3).metadata(device, nonsense.has_encoder)
    inputs: tuple[Tensor, ...] = (x + 2,)
    if nonsense.what in INPUTS:
        inputs = INPUTS[nonsense.what](x + 2)
    else:
        other = replace(other, **CHANGES[nonsense.what](other))
    expect_refusal(nonsense.what, lambda: state.replay(other, *inputs), buffers)
    expect_same("the next result", packed(state.replay(good, x)), right)


CAPTURED: dict[str, tuple[Callable[..., Any], int, tuple[Tensor, ...]]] = {
    "no request": (lambda step, x: x, 0, (torch.ones(0, 1),)),
    "more requests than there is room for": (
        lambda step, x: x,
        4,
        (torch.ones(4, 1),),
    ),
    "a result of fewer rows": (lambda step: step.seq_lens_tensor[:1], 2, ()),
    "a result of more rows": (
        lambda step: step.seq_lens_tensor.repeat(2),
        2,
        (),
    ),
    "a result without an axis": (lambda step: step.seq_lens_tensor.sum(), 2, ()),
    "no result": (lambda step: None, 2, ()),
    "a list of results": (lambda step: [1, 2], 2, ()),
    "inputs of fewer rows": (lambda step, x: x, 2, (torch.ones(1, 1),)),
    "inputs of more rows": (lambda step, x: x[:2], 2, (torch.ones(3, 1),)),
    "an input without an axis": (
        lambda step, x: step.seq_lens_tensor,
        2,
        (torch.tensor(1),),
    ),
}


@law("CommonAttentionState", cases=[*CAPTURED], claim="refuses shapes")
def a_rejected_capture_leaves_the_steps_captured_before(
    setting: Setting, what: str
) -> None:
    """This includes a step of the same size."""
    function, size, inputs = CAPTURED[what]
    inputs = tuple(each.to(setting.device) for each in inputs)
    state = state_of(setting, GraphHistory((2,), 3, False, ()))
    with state.graph_capture(3):
        with suppress(NotImplementedError):
            # without graph support this capture raises too, and no size is captured
            state.capture(lambda metadata: metadata.seq_lens_tensor * 3, 2)
        before = state.captured_batch_sizes
        expect_refusal(what, partial(state.capture, function, size, *inputs))
        expect_same("sizes", state.captured_batch_sizes, before)
    if before:
        batch = DecodeBatch((5, 9), 2).metadata(setting.device, False)
        expect_same("the result", packed(state.replay(batch)), counts([15, 27]))


@law(
    "CommonAttentionState",
    cases=[GraphHistory((2, 4), 3, False, (DecodeBatch((5, 9), 2),))],
)
def buffers_are_there_within_their_block_and_no_longer(
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
    expect_refusal("a replay of nothing", lambda: state.replay(batch))
    expect_refusal("a block of no request", lambda: state.graph_capture(0))
    expect_same("capturing after a refusal", state.is_graph_capturing, False)
    with state.graph_capture(4):
        expect_untimely("a block in a block", lambda: state.graph_capture(4))
        for size in (0, 5):
            expect_refusal(
                f"a step of {size}",
                partial(state.graph_capture_get_metadata_for_batch, size),
            )
            expect_refusal(f"a clone of {size}", partial(state.graph_clone, size))
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
        expect_refusal(f"a state of {sizes}", partial(make, *sizes))


@law(
    "CommonAttentionState",
    cases=[GraphHistory((1, 3), 2, False, (DecodeBatch((7,), 1),))],
)
def an_exception_forgets_only_what_its_own_block_captured(
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
    expect_refusal("a batch larger than all steps", lambda: state.replay(long))
    with state.graph_capture(3):
        state.capture(lambda metadata: metadata.seq_lens_tensor * 3, 1)
        for what, function, inputs in (
            ("a step of fewer rows", lambda step: step.seq_lens_tensor[:1], ()),
            ("a step of no tensor", lambda step: None, ()),
            ("inputs of fewer rows", lambda step, x: x, (torch.ones(2, 1),)),
        ):
            expect_refusal(what, partial(state.capture, function, 3, *inputs))
    expect_same("sizes", state.captured_batch_sizes, [1])
    found = state.replay(history.batches[0].metadata(setting.device, False))
    expect_same("the result of the later capture", packed(found), counts([21]))

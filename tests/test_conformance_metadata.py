"""Do the laws of a step's metadata hold for both twins, and does each break where a fault is?"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance.generators.steps import Requests, expect_fields, whole_step
from pagetwin.conformance.harness.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.harness.expect import Disagreement
from pagetwin.conformance.harness.law import Law, Setting
from pagetwin.conformance.harness.report import Status
from pagetwin.conformance.harness.trial import make_case, make_setting, try_law
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.contract.metadata_classes import CommonAttentionMetadata
from pagetwin.contract.operations import CONCEPTS, load_implementation
from pagetwin.engine.backend_interface import AttentionBackend
from torch import Tensor

AREAS = (
    "batch_split",
    "metadata",
    "batch_slices",
    "step_buffers",
    "local_attention",
    "fast_prefill",
    "counting",
    "multimodal_prefix",
    "sequences",
    "encoder_decoder",
    "graph_state",
    "backends",
)
OPERATIONS_OF = (
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
LAWS = [law for law in ALL_LAWS if law.area in AREAS]
RIGHT = load_candidate("reference")


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_both_twins_hold_it(law: Law, device: torch.device) -> None:
    for name in ("reference", "optimized"):
        setting = make_setting(load_candidate(name), str(device))
        result = try_law(law, setting, seed_of_cases=3, examples=4)
        assert result.status == Status.HELD, (name, result)
        assert result.cases and not result.refused


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_case_can_be_made_again_from_what_a_report_shows(law: Law) -> None:
    shown: list[str] = []
    nothing = Law(law.name, law.area, (), law.cases, lambda setting, case: None)
    setting = make_setting(RIGHT, "cpu")
    try_law(nothing, setting, seed_of_cases=5, examples=6, at=shown.append)
    assert shown
    for case in shown:
        assert repr(make_case(law, case)) == case


def test_every_operation_of_a_step_has_a_law() -> None:
    operations = {
        operation
        for concept in CONCEPTS
        if concept.name in OPERATIONS_OF
        for operation in concept.operations
    }
    operations |= {"get_dcp_ranks", "get_dcp_local_seq_lens"}
    assert operations | {"BACKENDS"} == {need for law in LAWS for need in law.needs}


def test_a_whole_step_has_something_in_every_field() -> None:
    """A field that is added later must be filled, or no law would see that it is lost."""
    step = whole_step(Requests((3, 2), (0, 4)), torch.device("cpu"))
    assert all(getattr(step, each.name) is not None for each in fields(step))


@pytest.mark.parametrize(
    "name", [each.name for each in fields(CommonAttentionMetadata)]
)
def test_no_field_of_metadata_is_overlooked(name: str) -> None:
    device = torch.device("cpu")
    right = whole_step(Requests((3, 2), (0, 4)), device)
    values = {each.name: getattr(right, each.name) for each in fields(right)}
    expect_fields("the step", right, values, device)
    for other in (None, others_of(values[name])):
        with pytest.raises(Disagreement, match=name):
            expect_fields("the step", replace(right, **{name: other}), values, device)


def others_of(value: Any) -> Any:
    """Return another value, as like it as possible."""
    if isinstance(value, Tensor):
        other = value.clone()
        flat = other.view(-1)
        flat[-1] = flat[-1].logical_not() if other.dtype == torch.bool else flat[-1] + 1
        return other
    return {7: [(0, 1)]} if isinstance(value, dict) else value + 1


def first_failure(law: Law, setting: Setting) -> BaseException | None:
    """Return what breaks a law, without looking for a smaller case."""
    options = settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        if isinstance(law.cases, SearchStrategy):
            options(given(law.cases)(lambda case: law.body(setting, case)))()
        else:
            for case in law.cases:
                law.body(setting, case)
    except Exception as error:
        return error
    return None


def breaks(operation: str, broken: Any, law: str) -> None:
    """Assert that one law is broken by the reference with one operation exchanged."""
    candidate = Candidate("broken", {**RIGHT.operations, operation: broken}, Support())
    (found,) = [each for each in LAWS if each.name == law]
    assert first_failure(found, make_setting(candidate, "cpu")) is not None


# ---- faults: the reference's answers, changed a little


def changed(operation: str, change: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation whose answer is changed; the change sees the arguments too."""
    right = RIGHT.operations[operation]

    def broken(*given: Any, **named: Any) -> Any:
        return change(right(*given, **named), *given, **named)

    return broken


def asked(operation: str, change: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that is asked something else."""
    right = RIGHT.operations[operation]

    def broken(*given: Any, **named: Any) -> Any:
        return right(*change(*given, **named))

    return broken


def in_place(step: Any, *_: Any, **__: Any) -> Any:
    return step


def shifted_starts(ubatch: Any, step: Any) -> Any:
    """The starts of all groups are counted from this one's."""
    found = RIGHT.make_metadata_with_slice(ubatch, step)
    step.query_start_loc_cpu[1:] += 0 if ubatch.token_slice.start == 0 else 1
    return found


def without_advance(found: Any, ubatch: Any, step: Any) -> Any:
    """The second part of a request keeps the computed tokens of the first."""
    return found.replace(
        num_computed_tokens_cpu=step.num_computed_tokens_cpu[ubatch.request_slice]
    )


def total_as_longest(found: Any, *_: Any) -> Any:
    return found.replace(max_query_len=found.num_actual_tokens)


FAULTS: list[tuple[str, Any, str]] = [
    (
        "reorder_batch_to_split_decodes_and_prefills",
        changed(
            "reorder_batch_to_split_decodes_and_prefills",
            lambda order, new, *_: sorted(range(len(new)), key=new.__getitem__),
        ),
        "the regions of a batch come in order and requests stay whole",
    ),
    (
        "reorder_batch_to_split_decodes_and_prefills",
        changed(
            "reorder_batch_to_split_decodes_and_prefills",
            lambda order, *_: [*order[:-1], *order[:1]],
        ),
        "the regions of a batch come in order and requests stay whole",
    ),
    (
        "split_decodes_and_prefills",
        asked(
            "split_decodes_and_prefills",
            lambda step, limit=1, *rest: (step, limit + 1, *rest),
        ),
        "the decodes end before the first request that is none",
    ),
    (
        "split_decodes_and_prefills",
        asked(
            "split_decodes_and_prefills",
            lambda step, limit=1, uniform=False, short=True: (
                step,
                limit,
                False,
                short,
            ),
        ),
        "the decodes end before the first request that is none",
    ),
    (
        "split_decodes_prefills_and_extends",
        changed(
            "split_decodes_prefills_and_extends",
            lambda found, step, *_: (
                (*found[:5], int(step.query_start_loc_cpu[-1]) - sum(found[3:5]))
            ),
        ),
        "extends lie between decodes and requests with nothing cached",
    ),
    (
        "split_prefill_chunks",
        asked(
            "split_prefill_chunks",
            lambda lens, size, offset=0: (lens, size + 1, offset),
        ),
        "a run takes requests as long as they fit",
    ),
    (
        "build_common_attn_metadata",
        changed("build_common_attn_metadata", total_as_longest),
        "every field of a step says what its requests say",
    ),
    (
        "build_common_attn_metadata",
        changed(
            "build_common_attn_metadata",
            lambda found, *_: found.replace(
                seq_lens=found.seq_lens - found.query_start_loc.diff()
            ),
        ),
        "a token is written where it is read",
    ),
    (
        "build_common_attn_metadata",
        changed(
            "build_common_attn_metadata",
            lambda found, *_: found.replace(
                query_start_loc=found.query_start_loc.long()
            ),
        ),
        "every field of a step says what its requests say",
    ),
    (
        "build_attn_metadata",
        lambda builders, **given: RIGHT.build_attn_metadata(
            builders,
            **given | {"block_tables": [given["block_tables"][0]] * 9},
        ),
        "every group of layers is built from its own table",
    ),
    (
        "make_metadata_with_slice",
        changed("make_metadata_with_slice", without_advance),
        "one micro batch alone is the step of its own tokens",
    ),
    (
        "make_metadata_with_slice",
        changed(
            "make_metadata_with_slice",
            lambda found, *_: found.replace(causal=True),
        ),
        "one micro batch alone is the step of its own tokens",
    ),
    (
        "make_metadata_with_slice",
        shifted_starts,
        "one micro batch alone is the step of its own tokens",
    ),
    (
        "split_attn_metadata",
        lambda slices, step: [
            RIGHT.make_metadata_with_slice(each, step).replace(
                seq_lens=step.seq_lens[each.request_slice]
            )
            for each in slices
        ],
        "micro batches together are the step",
    ),
    (
        "slice_query_start_locs",
        lambda starts, part: starts[part.start : part.stop + 1].sub_(
            starts[part.start].clone()
        ),
        "sliced starts count from the first and are a new tensor",
    ),
    (
        "make_local_attention_virtual_batches",
        asked(
            "make_local_attention_virtual_batches",
            lambda chunk, step, size: (chunk + size, step, size),
        ),
        "a token of a virtual request sees its own chunk",
    ),
    (
        "make_local_attention_virtual_batches",
        changed(
            "make_local_attention_virtual_batches",
            lambda found, chunk, step, size: found.replace(causal=step.causal),
        ),
        "every chunk with new tokens is a request",
    ),
    (
        "make_kv_sharing_fast_prefill_common_attn_metadata",
        changed(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            lambda found, step: (
                found
                if found is step
                else found.replace(max_query_len=step.max_logits_per_req)
            ),
        ),
        "only the wanted tokens of a prompt go on",
    ),
    (
        "create_fast_prefill_custom_backend",
        RIGHT.operations["subclass_attention_backend"],
        "such a layer gets the wanted tokens and knows of the whole step",
    ),
    (
        "create_fast_prefill_custom_backend",
        lambda prefix, backend: backend,
        "a derived backend differs in its builder alone",
    ),
    (
        "subclass_attention_metadata",
        changed(
            "subclass_attention_metadata",
            lambda found, prefix, base, added: type(found.__name__, (base,), {}),
        ),
        "derived metadata has some more fields",
    ),
    (
        "reshape_query_for_spec_decode",
        lambda query, reqs: query.view(-1, reqs, *query.shape[1:]).transpose(0, 1),
        "drafts get an axis of their own and lose it without a copy",
    ),
    (
        "reshape_attn_output_for_spec_decode",
        lambda output: output.reshape(-1, *output.shape[-2:]).clone(),
        "drafts get an axis of their own and lose it without a copy",
    ),
    (
        "compute_causal_conv1d_metadata",
        lambda starts, device="cpu": RIGHT.compute_causal_conv1d_metadata(
            starts // 8 * 8, device
        ),
        "every chunk of every prompt has its program",
    ),
    (
        "get_dcp_local_seq_lens",
        lambda lens, ranks=1, rank=None, row=1: RIGHT.get_dcp_local_seq_lens(
            lens, ranks, rank, 1
        ),
        "every token is counted on one rank",
    ),
    (
        "get_dcp_ranks",
        lambda places, ranks, row=1: (
            places % (ranks * row) // row if row > 1 else places.int() % ranks
        ),
        "positions are dealt out to ranks in turn",
    ),
    (
        "infer_global_hyperparameters",
        changed(
            "infer_global_hyperparameters",
            lambda found, layers: replace(
                found, has_same_all_params=found.has_same_window_lefts
            ),
        ),
        "a plan knows in what its layers differ",
    ),
    (
        "get_per_layer_parameters",
        changed(
            "get_per_layer_parameters",
            lambda found, *_: {
                name: replace(each, window_left=each.window_left or -1)
                for name, each in found.items()
            },
        ),
        "a plan knows in what its layers differ",
    ),
    (
        "compute_mm_prefix_ranges",
        lambda rows, window=None, clamp=False, pad=0: RIGHT.compute_mm_prefix_ranges(
            rows, window and window + 1, clamp, pad
        ),
        "ranges are the runs of an images tokens",
    ),
    (
        "compute_mm_prefix_range_tensor",
        changed(
            "compute_mm_prefix_range_tensor",
            lambda found, *_: found if found is None else found.long(),
        ),
        "ranges stand in one tensor with ranges of one token behind",
    ),
    (
        "fill_mm_prefix_query_ranges",
        lambda out, ranges, starts, lens: RIGHT.fill_mm_prefix_query_ranges(
            out.fill_(-1), ranges, starts, lens
        ),
        "every new token gets the range it stands in",
    ),
    (
        "get_seq_len_block_table_args",
        lambda step, prompt, kind: RIGHT.get_seq_len_block_table_args(step, True, kind),
        "each kind of attention reads its own lengths and table",
    ),
    (
        "get_num_prefill_decode_query_kv_tokens",
        lambda step, kind: RIGHT.get_num_prefill_decode_query_kv_tokens(
            step, "decoder"
        ),
        "each kind of attention counts its own tokens",
    ),
    (
        "is_all_cross_attn_metadata_set",
        lambda step: (
            bool(step.encoder_seq_lens) and step.cross_block_tables is not None
        ),
        "metadata is complete if no field of its side is missing",
    ),
    (
        "is_block_tables_empty",
        lambda tables: not tables or all(not row for row in tables.values()),
        "there is no cache if no sequence has a row",
    ),
    (
        "make_tensor_with_pad",
        lambda rows, pad, *rest: RIGHT.make_tensor_with_pad(rows, 0, *rest),
        "rows stand in one tensor with padding behind",
    ),
    (
        "get_attn_cg_support",
        lambda groups, names=None: RIGHT.get_attn_cg_support(
            [group[::-1] for group in groups], names
        ),
        "a step captures what its weakest group does",
    ),
]


@pytest.mark.parametrize(
    "operation, broken, law",
    FAULTS,
    ids=[f"{operation} {number}" for number, (operation, _, _) in enumerate(FAULTS)],
)
def test_a_fault_breaks_its_law(operation: str, broken: Any, law: str) -> None:
    breaks(operation, broken, law)


RightBuffers: Any = RIGHT.operations["StepBuffers"]
RightState: Any = RIGHT.operations["CommonAttentionState"]
RightGroups: Any = RIGHT.operations["CommonMetadataBuilder"]


class KeepsSlots(RightBuffers):
    """Padding tokens keep the slots of an older step."""

    def build(self, new: Any, computed: Any, *rest: Any) -> Any:
        kept = self._slot_mapping.clone()
        found = super().build(new, computed, *rest)
        found.slot_mapping[sum(new) :] = kept[sum(new) : len(found.slot_mapping)]
        return found


class KeepsLengths(RightBuffers):
    """Padding requests keep the length of an older one."""

    def build(self, new: Any, computed: Any, *rest: Any) -> Any:
        kept = self._seq_lens.clone()
        found = super().build(new, computed, *rest)
        found.seq_lens[len(new) :] = kept[len(new) : len(found.seq_lens)]
        return found


class MakesTensors(RightBuffers):
    """Every step gets memory of its own."""

    def build(self, *given: Any) -> Any:
        found = super().build(*given)
        return found.replace(seq_lens=found.seq_lens.clone())


class KeepsHostCopies(RightBuffers):
    """The host's copies of all steps are one tensor."""

    def build(self, *given: Any) -> Any:
        found = super().build(*given)
        self.lens = getattr(self, "lens", torch.zeros(99, dtype=torch.int32))
        own = self.lens[: len(found.seq_lens)].copy_(found.seq_lens_cpu)
        return found.replace(seq_lens_cpu=own)


class AppendsBehindClearedRows(RightBuffers):
    """A row that changes its owner keeps the blocks of the former one."""

    def clear_rows(self, rows: Any) -> None:
        super().clear_rows([row for row in rows if row % 2])


class WritesBeforeItRefuses(RightBuffers):
    """Rows gain blocks one by one."""

    def append_blocks(self, rows: Any, blocks: Any) -> None:
        if len(rows) != len(blocks) or len(set(rows)) != len(rows):
            raise ValueError
        for row, own in zip(rows, blocks, strict=True):
            super().append_blocks([row], [own])


class IgnoresTheOrder(RightBuffers):
    """The table of a step is always that of its rows."""

    def build(self, *given: Any) -> Any:
        found = super().build(*given)
        return found.replace(block_table_tensor=self._block_table[: found.num_reqs])


class KeepsOlderBatches(RightState):
    """Nothing is written behind the live batch."""

    def prepare_graph_input_buffers(self, buffers: Any, batch: Any) -> None:
        live = batch.num_decode_tokens
        kept = {name: each[live:].clone() for name, each in buffers.present().items()}
        super().prepare_graph_input_buffers(buffers, batch)
        for name, each in kept.items():
            getattr(buffers, name)[live:] = each


class KeepsWideRows(RightState):
    """What stood behind a narrower row stays there."""

    def prepare_graph_input_buffers(self, buffers: Any, batch: Any) -> None:
        live, width = batch.block_tables.shape
        kept = buffers.block_tables[:live, width:].clone()
        super().prepare_graph_input_buffers(buffers, batch)
        buffers.block_tables[:live, width:] = kept


class RunsTheLargestStep(RightState):
    """Every batch runs in the largest step."""

    def replay(self, batch: Any, *inputs: Tensor) -> Tensor:
        steps = self._steps
        largest = max(steps, default=0)
        self._steps = {largest: steps[largest]} if steps else {}
        try:
            return super().replay(batch, *inputs)
        finally:
            self._steps = steps


class KeepsItsBlockOpen(RightState):
    """After an exception the buffers are still there."""

    def _capturing(self, buffers: Any) -> Any:
        state = self

        class Block:
            def __enter__(self) -> None:
                state._buffers = buffers

            def __exit__(self, kind: Any, *_: Any) -> None:
                if kind is None:
                    state._buffers = None

        return Block()


class KeepsGroups(RightGroups):
    """A step begins with the slots of the one before."""

    def prepare(self) -> None:
        slots = getattr(self, "slot_mapping", [])
        super().prepare()
        self.slot_mapping = slots[:1]


class CountsFromTheWindow(RightGroups):
    """A decode under a window stores its token relative to what it may read."""

    def _slots(self, group: Any, sequence: Any) -> Any:
        kept = sequence.curr_sliding_window_block
        rows = {k: v and v[-kept:] for k, v in (group.block_tables or {}).items()}
        return super()._slots(
            group if group.is_prompt or not kept else replace(group, block_tables=rows),
            sequence,
        )


CLASSES: list[tuple[str, type, str]] = [
    (
        "StepBuffers",
        each,
        law,
    )
    for each, law in (
        (KeepsSlots, "every step in the buffers is its own and no older one"),
        (KeepsSlots, "a captured size shows no request and no slot behind the batch"),
        (KeepsLengths, "every step in the buffers is its own and no older one"),
        (MakesTensors, "the tensors of a step stay where a graph saw them"),
        (KeepsHostCopies, "the tensors of a step stay where a graph saw them"),
        (
            AppendsBehindClearedRows,
            "every step in the buffers is its own and no older one",
        ),
        (WritesBeforeItRefuses, "what the buffers refuse leaves them as they are"),
        (IgnoresTheOrder, "every step in the buffers is its own and no older one"),
    )
] + [
    ("CommonAttentionState", each, law)
    for each, law in (
        (KeepsOlderBatches, "a refill leaves nothing of an older batch"),
        (KeepsWideRows, "a refill leaves nothing of an older batch"),
        (RunsTheLargestStep, "a replay is the function of the batch alone"),
        (KeepsItsBlockOpen, "buffers are there within their block and no longer"),
    )
]
CLASSES += [
    (
        "CommonMetadataBuilder",
        KeepsGroups,
        "a step of groups knows nothing of the one before",
    ),
    (
        "CommonMetadataBuilder",
        CountsFromTheWindow,
        "every field of a step says what its groups say",
    ),
]


@pytest.mark.parametrize(
    "operation, broken, law",
    CLASSES,
    ids=[f"{e.__name__} {n}" for n, (_, e, _) in enumerate(CLASSES)],
)
def test_a_class_with_a_fault_breaks_its_law(
    operation: str, broken: type, law: str
) -> None:
    breaks(operation, broken, law)


RightBackend: Any = load_implementation("reference").backends[0]
RightImpl: Any = RightBackend.get_impl_cls()
RightBuilder: Any = RightBackend.get_builder_cls()


class AttendsFirst(RightImpl):
    """The new keys are written after attention."""

    def forward(
        self, layer: Any, q: Any, k: Any, v: Any, cache: Any, *rest: Any
    ) -> Any:
        after = cache.clone()
        out = rest[1]
        super().forward(layer, q, k, v, after, *rest)
        if rest[0] is not None and k is not None:
            super().forward(
                layer, q, torch.zeros_like(k), torch.zeros_like(v), cache, *rest
            )
        cache.copy_(after)
        return out


class WritesAlways(RightImpl):
    """A layer that shares a cache writes to it."""

    def slots(self, metadata: Any, key: Any, value: Any) -> Any:
        found = metadata.cross_slot_mapping if self.crosses else metadata.slot_mapping
        return None if key is None else found


class CrossesCausally(RightImpl):
    """Cross-attention sees no further than its own position."""

    def forward(self, *given: Any) -> Any:
        metadata = given[5]
        if self.crosses and metadata is not None:
            crossed = replace(metadata.cross_metadata, causal=True)
            metadata.__dict__["cross_metadata"] = crossed
        return super().forward(*given)


class DropsTheTree(RightBuilder):
    """One field of the step is forgotten."""

    def build(self, *given: Any) -> Any:
        return replace(super().build(*given), tree_mask=None)


class CountsInPlace(RightBuilder):
    """The starts that all groups share are changed."""

    def build(self, prefix: int, step: Any, *rest: Any) -> Any:
        found = super().build(prefix, step, *rest)
        step.query_start_loc_cpu.add_(1)
        return found


@pytest.mark.parametrize(
    "method, broken, law",
    [
        ("get_impl_cls", AttendsFirst, "a layer writes its keys and then attends"),
        ("get_impl_cls", WritesAlways, "a layer writes its keys and then attends"),
        (
            "get_impl_cls",
            CrossesCausally,
            "an encoders keys are written once and read by every later step",
        ),
        (
            "get_builder_cls",
            DropsTheTree,
            "every field of a layers metadata says what the step says",
        ),
        (
            "get_builder_cls",
            CountsInPlace,
            "every field of a layers metadata says what the step says",
        ),
    ],
)
def test_a_backend_with_a_fault_breaks_its_law(
    method: str, broken: type, law: str
) -> None:
    backend: type[AttentionBackend] = type(
        "Broken", (RightBackend,), {method: staticmethod(lambda: broken)}
    )
    breaks("BACKENDS", (backend,), law)

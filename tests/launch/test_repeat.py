"""Repeated calls: what is equal is recorded, what differs is checked at each call."""

import inspect
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.dispatch import dispatch, pipeline
from pagetwin.optimized.dispatch.cascade import CascadePlan
from pagetwin.optimized.dispatch.choice import AttentionPlan
from pagetwin.optimized.kernels.kv_cache import CacheHalf, NewTokens
from pagetwin.optimized.runtime import workspace
from pagetwin.optimized.runtime.attention_call import AttentionCall, round_key_bound
from pagetwin.optimized.runtime.direct_launch import DirectLaunch
from pagetwin.optimized.runtime.launcher import RECORDING, LaunchNote
from pagetwin.optimized.runtime.plan_cache import PlanCache, SignatureCache
from pagetwin.optimized.runtime.repeat import (
    calls,
    recording,
    repeated_call,
    signatures,
)
from pagetwin.optimized.runtime.repeat import writes as repeated_write
from pagetwin.optimized.runtime.repeat.repeated_call import RepeatedCall
from pagetwin.optimized.runtime.repeat.writes import RepeatedWrite
from pagetwin.optimized.runtime.workspace import WorkspaceNote
from torch import Tensor

NAMES = (
    "query",
    "key",
    "value",
    "block_table",
    "query_start_loc",
    "lengths",
    "out",
    "lse",
)
GPU = torch.device("cuda", 0)


class Machine:
    """A pretended GPU that keeps the arguments of each launch.

    Attributes:
        launched: grid, stream, function and arguments of each launch.
        counters, numbers: the workspace that requests find.
        asked: counters and numbers of the latest request.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.asked: tuple[int, ...] = ()
        self.device, self.stream, self.profiled = 0, 5, False
        self.counters = torch.zeros(64, dtype=torch.int32)
        self.numbers = torch.zeros(4096)

    def find(self, device: Any, index: int, stream: int, *sizes: int) -> Any:
        assert (device, index, stream) == (GPU, 0, self.stream)
        self.asked = sizes
        kept = self.counters, self.numbers
        return kept, (kept[0].data_ptr(), kept[1].data_ptr())

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)


def make_maps(*addresses: int) -> tuple[Any, ...]:
    return ("maps", *addresses)


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, unchecked_values: None
) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(signatures, "INTERPRETED", False)
    monkeypatch.setattr(repeated_call, "current_device", lambda: made.device)
    monkeypatch.setattr(repeated_call, "current_stream", lambda index: made.stream)
    monkeypatch.setattr(repeated_call, "is_profiled", lambda: made.profiled)
    monkeypatch.setattr(recording, "find_addresses", made.find)
    yield made


def make_tensors(**changes: Any) -> dict[str, Any]:
    """Return the tensors of a call, which have memory of their own."""
    query = torch.zeros(4, 4, 64, dtype=torch.float16)
    cache = torch.zeros(2, 9, 16, 2, 64, dtype=torch.float16)
    found = {
        "query": query,
        "key": cache[0],
        "value": cache[1],
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2, 4]).int(),
        "lengths": torch.tensor([20, 30]).int(),
        "out": torch.zeros_like(query),
        "lse": torch.zeros(4, 4),
    }
    return found | changes


def record(
    machine: Machine,
    tensors: dict[str, Any],
    options: AttentionOptions,
    packs: bool = True,
) -> RepeatedCall | None:
    """Return a call that requested workspace and made two launches."""
    addresses = [
        0 if tensors[name] is None else tensors[name].data_ptr() for name in NAMES
    ]
    numbers = machine.numbers.data_ptr()
    in_workspace = (numbers + 640, numbers, machine.counters.data_ptr() + 128)
    direct = DirectLaunch(machine.launch, ("fixed",), packs, 0)
    notes = [
        WorkspaceNote(GPU, 0, 64, 4096, machine.counters, machine.numbers),
        LaunchNote(
            direct, (8, 2, 1), None, (), (*addresses, *in_workspace),
            (options.sinks, 2.5, None), ("strides", 16), True,
        ),
        LaunchNote(
            direct, (132, 1, 1), make_maps, (), (addresses[6], 0, addresses[5]),
            (options.sinks, 0.25), (7,), False,
        ),
    ]  # fmt: skip
    return recording.record(notes, make_call(tensors, options), tensors["out"])


def make_call(
    tensors: dict[str, Any], options: AttentionOptions, **changes: Any
) -> AttentionCall:
    numbers: dict[str, Any] = {"max_query_len": 2, "max_key_len": 30, "scale": None}
    return AttentionCall(**(tensors | numbers | changes), options=options)


def launch(
    repeated: RepeatedCall, tensors: dict[str, Any], options: AttentionOptions
) -> bool:
    return repeated.launch(make_call(tensors, options), tensors["out"])


PLAIN = AttentionOptions(causal=True)


@pytest.mark.parametrize("packs", [True, False])
def test_a_repeated_call_passes_the_addresses_of_its_own_tensors(
    packs: bool, machine: Machine
) -> None:
    repeated = record(machine, make_tensors(), PLAIN, packs)
    assert repeated is not None and repeated.out_shape == (4, 4, 64)
    other = make_tensors()
    machine.stream = 9
    machine.counters, machine.numbers = torch.zeros(64).int(), torch.zeros(4096)
    assert launch(repeated, other, PLAIN)
    at = {name: 0 if other[name] is None else other[name].data_ptr() for name in NAMES}
    numbers = machine.numbers.data_ptr()
    pointers = (*at.values(), numbers + 640, numbers, machine.counters.data_ptr() + 128)
    first = (pointers, (None, 2.5, None), "strides", 16)
    maps = [at[name] for name in ("query", "key", "value", "out")]
    second = ("maps", *maps, at["out"], 0, at["lengths"], None, 0.25, 7)
    expected = [(8, 2, 1, 9, "fixed"), (132, 1, 1, 9, "fixed")]
    for found, head, arguments in zip(
        machine.launched, expected, (first, second), strict=True
    ):
        assert found == ((*head, arguments) if packs else (*head, *arguments))


@pytest.mark.parametrize("name", NAMES)
def test_an_address_that_is_not_a_multiple_of_16_is_not_passed_to_the_recorded_kernel(
    name: str, machine: Machine
) -> None:
    """The kernel is specialized for multiples of 16 and would read from the wrong place."""
    tensors = make_tensors()
    repeated = record(machine, tensors, PLAIN)
    assert repeated is not None
    whole = tensors[name]
    size = whole.element_size()
    shifted = torch.zeros(whole.numel() + 16 // size, dtype=whole.dtype)[1:]
    shifted = shifted[: whole.numel()].view(whole.shape)
    assert shifted.data_ptr() % 16 == size
    assert not launch(repeated, tensors | {name: shifted}, PLAIN)
    assert not machine.launched
    # and a call with such an address is not recorded
    assert record(machine, tensors | {name: shifted}, PLAIN) is None


def test_tensors_that_shared_an_address_must_share_one_again(machine: Machine) -> None:
    """Starts and lengths of self-attention are one tensor; other calls pass two."""
    starts = torch.tensor([0, 2]).int()
    shared = make_tensors(query_start_loc=starts, lengths=starts, block_table=None)
    repeated = record(machine, shared, PLAIN)
    assert repeated is not None
    assert not launch(repeated, shared | {"lengths": starts.clone()}, PLAIN)
    assert launch(repeated, shared, PLAIN)
    apart = record(machine, make_tensors(), PLAIN)
    assert apart is not None
    machine.launched.clear()
    same = torch.tensor([0, 2, 4]).int()
    assert launch(apart, make_tensors(query_start_loc=same, lengths=same), PLAIN)
    assert machine.launched[0][-1][0][4:6] == (same.data_ptr(), same.data_ptr())


def test_tensor_maps_are_made_once_per_combination_of_addresses_and_not_all_are_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []
    monkeypatch.setitem(
        globals(), "make_maps", lambda *four: made.append(four) or ("maps", *four)
    )
    monkeypatch.setattr(recording, "MAX_MAPS", 2)
    calls = [make_tensors() for _ in range(3)]
    repeated = record(machine, calls[0], PLAIN)
    assert repeated is not None
    for tensors in (*calls[:2], *calls[:2], *calls):
        assert launch(repeated, tensors, PLAIN)
        four = [tensors[name].data_ptr() for name in ("query", "key", "value", "out")]
        assert machine.launched[-1][-1][:5] == ("maps", *four)
    assert len(made) == 3
    assert launch(repeated, calls[0], PLAIN) and len(made) == 4


def test_a_plan_is_repeatable_if_all_its_parts_say_so() -> None:
    """A kernel that is launched without `Launcher` would be missing in a repeated call."""
    told, silent = (SimpleNamespace(is_repeatable=answer) for answer in (True, False))
    kinds = ("preferred", "every", "decodes", "prefills")
    for kind in kinds:
        for plans, expected in (((told, told), True), ((told, silent), False)):
            given: Any = dict.fromkeys(kinds, (told,)) | {kind: plans}
            others: Any = {"layer": None, "short_rows": 0, "is_packed": True}
            others["upcasts_output"] = False
            assert AttentionPlan(**given, **others).is_repeatable == expected
    assert CascadePlan((told,), None, None, True, False).is_repeatable  # type: ignore[arg-type]
    assert not CascadePlan((silent, told), None, None, True, False).is_repeatable  # type: ignore[arg-type]


def test_another_device_or_a_profiler_leaves_the_call_to_triton(
    machine: Machine,
) -> None:
    tensors = make_tensors()
    repeated = record(machine, tensors, PLAIN)
    assert repeated is not None
    machine.profiled = True
    assert not launch(repeated, tensors, PLAIN)
    machine.profiled, machine.device = False, 1
    assert not launch(repeated, tensors, PLAIN)
    machine.device = 0
    assert launch(repeated, tensors, PLAIN)


def test_options_that_are_tensors_are_passed_anew(machine: Machine) -> None:
    options = AttentionOptions(causal=True, sinks=torch.zeros(4))
    repeated = record(machine, make_tensors(), options)
    assert repeated is not None
    other = AttentionOptions(causal=True, sinks=torch.zeros(4))
    assert other.sinks is not None
    assert launch(repeated, make_tensors(), other)
    assert machine.launched[0][-1][1] == (other.sinks.data_ptr(), 2.5, None)
    assert machine.launched[1][-1][8] == other.sinks.data_ptr()
    shifted = AttentionOptions(causal=True, sinks=torch.zeros(5)[1:])
    assert not launch(repeated, make_tensors(), shifted)


def test_a_call_with_a_pointer_of_unknown_origin_is_not_repeated(
    machine: Machine,
) -> None:
    tensors = make_tensors()
    direct = DirectLaunch(machine.launch, (), True, 0)

    def note(pointer: int, option: Any = None) -> LaunchNote:
        return LaunchNote(direct, (1, 1, 1), None, (), (pointer,), (option,), (), True)

    def repeated(*notes: Any) -> Any:
        return recording.record(notes, make_call(tensors, PLAIN), tensors["out"])

    at = tensors["query"].data_ptr()
    assert repeated(note(at)) is not None
    assert repeated() is None
    # inside a tensor, a launch through Triton, and a copy of an option
    assert repeated(note(at), note(at + 16)) is None
    assert repeated(note(at), None) is None
    assert repeated(note(at, torch.zeros(4))) is None
    # past the end of the workspace that was requested
    small = WorkspaceNote(GPU, 0, 4, 8, machine.counters, machine.numbers)
    assert repeated(small, note(machine.numbers.data_ptr() + 28)) is not None
    assert repeated(small, note(machine.numbers.data_ptr() + 32)) is None


def sign(tensors: dict[str, Any], **changes: Any) -> Any:
    given = {"options": PLAIN, "more": ()} | changes
    more = given.pop("more")
    call = make_call(tensors, given.pop("options"), **given)
    return signatures.sign_numbers(call, more)


def test_a_signature_has_all_numbers_and_options(machine: Machine) -> None:
    tensors = make_tensors()
    assert sign(tensors) == sign(make_tensors())
    changed: list[dict[str, Any]] = [
        {"max_query_len": 3}, {"max_key_len": 2}, {"scale": 0.5}, {"more": (16,)},
        {"options": AttentionOptions(causal=False)},
    ]  # fmt: skip
    for sinks in (torch.zeros(4), torch.zeros(8)[::2], torch.zeros(4).double()):
        changed.append({"options": AttentionOptions(causal=True, sinks=sinks)})
    found = [sign(tensors), *(sign(tensors, **change) for change in changed)]
    for name in ("block_table", "out", "lse"):
        found.append(sign(tensors | {name: None}))
    assert None not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_with_other_sizes_strides_dtype_or_device_does_not_fit(
    name: str,
    has_guards: bool,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch compares in C. A version of torch may not have that, or make it in another way."""
    if not has_guards:
        monkeypatch.setattr(signatures, "TensorGuards", lambda *tensors: None)
    tensors = make_tensors()
    repeated = record(machine, tensors, PLAIN)
    assert repeated is not None
    assert (type(repeated.fits).__name__ == "function") != has_guards

    def fits(**changes: Any) -> bool:
        chosen = repeated.choose(make_call(make_tensors() | changes, PLAIN))
        return repeated.fits(*chosen)

    whole = tensors[name]
    wide = torch.zeros(*whole.shape[:-1], 2 * whole.shape[-1], dtype=whole.dtype)
    assert fits() and fits(**{name: torch.empty_like(whole)})
    for other in (
        whole[1:],
        wide[..., ::2],
        whole.double(),
        whole[None],
        torch.empty_like(whole, device="meta"),
    ):
        assert not fits(**{name: other})


def test_starts_that_were_one_tensor_have_to_be_one_tensor_again(
    machine: Machine,
) -> None:
    """Torch's comparison rejects a tensor that is given twice."""
    starts = torch.tensor([0, 2, 4]).int()
    one = make_tensors(query_start_loc=starts, lengths=starts, block_table=None)
    two = make_tensors(query_start_loc=starts, lengths=starts.clone(), block_table=None)
    for tensors, other in ((one, two), (two, one)):
        repeated = record(machine, tensors, PLAIN)
        assert repeated is not None
        assert repeated.fits(*repeated.choose(make_call(tensors, PLAIN)))
        assert not repeated.fits(*repeated.choose(make_call(other, PLAIN)))
    repeated = record(machine, one, PLAIN)
    assert repeated is not None and repeated.fits.__qualname__.startswith("_compare")
    again = torch.tensor([0, 1, 4]).int()
    other = make_tensors(query_start_loc=again, lengths=again, block_table=None)
    for changes, expected in (
        ({}, True),
        ({"query": other["query"][1:]}, False),
        ({"lse": other["lse"].double()}, False),
        ({"lengths": again[:2]}, False),
    ):
        call = make_call(other | changes, PLAIN)
        assert repeated.fits(*repeated.choose(call)) == expected


def test_calls_that_differ_in_their_caches_alone_are_repeated_each_as_it_was_recorded(
    machine: Machine,
) -> None:
    """The signature has the shape of the queries, and not that of the cache."""
    known: SignatureCache[Any] = SignatureCache(8)
    sizes = [9, 10, 11, 12, 13]
    caches = [torch.zeros(2, n, 16, 2, 64, dtype=torch.float16) for n in sizes]
    planned: list[int] = []

    def anew(call: AttentionCall) -> Tensor:
        size, at = len(call.key), call.query.data_ptr()
        planned.append(size)
        assert RECORDING.notes is not None
        direct = DirectLaunch(machine.launch, (size,), True, 0)
        RECORDING.notes.append(
            LaunchNote(direct, (1, 1, 1), None, (), (at,), (), (), True)
        )
        result: Tensor = call.out
        return result

    def attend(cache: Tensor) -> None:
        tensors = make_tensors(key=cache[0], value=cache[1])
        call = make_call(tensors, PLAIN)
        found = calls.repeat(call, (), known)
        if isinstance(found, calls.Anew):
            with found:
                found.out = anew(call)

    # a signature that occurs for the first time is not recorded
    known.put(signatures.sign_numbers(make_call(make_tensors(), PLAIN)), ())
    for _ in range(3):
        for cache in caches[:4]:
            attend(cache)
    assert planned == sizes[:4]
    assert [launched[4] for launched in machine.launched] == 2 * sizes[:4]
    # four are kept; the one that was recorded first gives way
    attend(caches[4])
    attend(caches[3])
    assert planned == sizes
    attend(caches[0])
    assert planned == [*sizes, sizes[0]]


def test_calls_with_another_scale_or_flags_per_request_are_not_repeated(
    machine: Machine,
) -> None:
    changes: list[dict[str, Any]] = [
        {"scale": 1},
        {"options": AttentionOptions(causal=torch.ones(2, dtype=torch.bool))},
    ]
    for change in changes:
        assert sign(make_tensors(), **change) is None


def test_the_third_call_is_repeated_and_validation_of_contents_is_not_skipped(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[bool] = []
    is_wrong = False

    def attend_anew(given: Any, call: AttentionCall, *_: Any) -> Tensor:
        planned.append(RECORDING.notes is not None)
        if is_wrong:
            raise IndexError("wrong")
        if RECORDING.notes is not None:
            pointers = tuple(tensor.data_ptr() for tensor in call[:3])
            direct = DirectLaunch(machine.launch, (), True, 0)
            RECORDING.notes.append(
                LaunchNote(direct, (1, 1, 1), None, (), pointers, (), (), True)
            )
        return torch.zeros(4, 4, 64) if call.out is None else call.out

    monkeypatch.setattr(dispatch.PIPELINE, "plans", PlanCache(8))
    monkeypatch.setattr(pipeline, "_attend_anew", attend_anew)

    def attend(**changes: Any) -> Tensor:
        call = make_call(make_tensors(**changes), PLAIN)
        return pipeline.attend(dispatch.PIPELINE, call, lambda *_: None)

    for _ in range(5):
        attend()
    assert planned == [False, True]
    assert len(machine.launched) == 3
    # a call without an output gets one of its own
    planned.clear()
    outs = [attend(out=None) for _ in range(4)]
    assert planned == [False, True]
    assert outs[2].shape == outs[3].shape == (4, 4, 64)
    assert outs[2].data_ptr() != outs[3].data_ptr()
    planned.clear()
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "1")
    attend()
    assert planned == [True]
    is_wrong = True
    with pytest.raises(IndexError, match="wrong"):
        attend()
    assert RECORDING.notes is None


def test_on_one_stream_no_launch_of_another_thread_is_between_two_of_a_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch of a call reads what the first one wrote to the stream's workspace."""
    order: list[int] = []

    def launch_slowly(*arguments: Any) -> None:
        order.append(threading.get_ident())
        time.sleep(0.002)

    monkeypatch.setattr(machine, "launch", launch_slowly)
    tensors = make_tensors()
    repeated = record(machine, tensors, PLAIN)
    assert repeated is not None
    both = threading.Barrier(2, timeout=20)

    def run() -> None:
        both.wait()
        for _ in range(5):
            assert launch(repeated, tensors, PLAIN)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(run) for _ in range(2)]:
            future.result()
    assert len(set(order)) == 2 and order[::2] == order[1::2]


def test_a_thread_records_its_own_launches_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the notes of another thread a repeated call would launch its kernels too."""
    both = threading.Barrier(2, timeout=20)

    def attend_anew(given: Any, call: AttentionCall, *_: Any) -> Tensor:
        if RECORDING.notes is None:
            return torch.empty(0)
        both.wait()
        direct = DirectLaunch(machine.launch, (call.max_query_len,), True, 0)
        at = call.query.data_ptr()
        RECORDING.notes.append(
            LaunchNote(direct, (1, 1, 1), None, (), (at,), (), (), True)
        )
        both.wait()
        result: Tensor = call.out
        return result

    monkeypatch.setattr(dispatch.PIPELINE, "plans", PlanCache(8))
    monkeypatch.setattr(pipeline, "_attend_anew", attend_anew)
    calls = [make_call(make_tensors(), PLAIN, max_query_len=size) for size in (3, 5)]

    def attend(call: AttentionCall) -> Tensor:
        return pipeline.attend(dispatch.PIPELINE, call, lambda *_: None)

    for call in calls:
        attend(call)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(attend, calls))
    for call in calls:
        machine.launched.clear()
        attend(call)
        expected = (1, 1, 1, 5, call.max_query_len, ((call.query.data_ptr(),), ()))
        assert machine.launched == [expected]


def test_tensor_maps_and_options_in_the_workspace_follow_it(machine: Machine) -> None:
    """A converted FP8 cache is in the workspace, and so are its scales."""
    tensors = make_tensors()
    q, out = tensors["query"].data_ptr(), tensors["out"].data_ptr()
    at = machine.numbers.data_ptr()
    direct = DirectLaunch(machine.launch, (), True, 0)
    workspace_note = WorkspaceNote(GPU, 0, 4, 4096, machine.counters, machine.numbers)
    of_maps, scale = (q, at + 64, at + 128, out), machine.numbers[64:]
    notes = [
        workspace_note,
        LaunchNote(direct, (1, 1, 1), make_maps, of_maps, (q,), (scale,), (), False),
    ]
    call = make_call(tensors, PLAIN)
    repeated = recording.record(notes, call, tensors["out"])
    assert repeated is not None
    machine.numbers = torch.zeros(4096)
    at = machine.numbers.data_ptr()
    assert repeated.launch(call, tensors["out"])
    expected = ("maps", q, at + 64, at + 128, out, q, at + 256)
    assert machine.launched[0][-1] == expected
    # a map of other memory is not made again
    elsewhere = torch.zeros(8)
    notes[1] = LaunchNote(
        direct,
        (1, 1, 1),
        make_maps,
        (q, elsewhere.data_ptr(), q, out),
        (q,),
        (),
        (),
        False,
    )
    assert recording.record(notes, call, tensors["out"]) is None


def test_requests_for_workspace_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.zeros(4, dtype=torch.int32), torch.zeros(8)
    monkeypatch.setattr(workspace, "current_stream", lambda index: 3)
    monkeypatch.setattr(workspace, "find_on_stream", lambda *arguments: found)
    monkeypatch.setattr(RECORDING, "notes", [])
    assert workspace.find_workspace(GPU, 4, 8) is found
    assert RECORDING.notes == [WorkspaceNote(GPU, 0, 4, 8, *found)]


OF_HEADS = {
    name: torch.ones(shape)
    for name, shape in {
        "alibi_slopes": (4,),
        "position_bias": (4, 9),
        "sinks": (4,),
        "k_scale": (2,),
        "v_scale": (2,),
    }.items()
}
"""Options that are tensors."""
CHANGING = (*NAMES, *OF_HEADS, "stream", "workspace")
"""What calls that are repeated may differ in."""


class Repeats:
    """A call on a pretended GPU, with every tensor, that is made again with other ones.

    Attributes:
        tensors, options: the arguments of the next call.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tensors, self.options = make_tensors(), dict(OF_HEADS)
        self._known: SignatureCache[Any] = SignatureCache(8)
        self._kept: list[Any] = []

    def change(self, *names: str) -> None:
        """Replace arguments, the current stream or its workspace."""
        # no address is used again
        self._kept += [self.tensors, self.options, self.machine.numbers]
        fresh, machine = make_tensors(), self.machine
        self._kept.append(fresh)
        for name in names:
            if name in NAMES:
                self.tensors = self.tensors | {name: fresh[name]}
            elif name in OF_HEADS:
                self.options = self.options | {name: OF_HEADS[name].clone()}
            elif name == "stream":
                machine.stream += 1
            else:
                machine.counters = torch.zeros_like(machine.counters)
                machine.numbers = torch.zeros_like(machine.numbers)

    def addresses(self) -> tuple[tuple[int, ...], ...]:
        """Return the addresses of tensors, in the workspace, of options, and in tensor maps."""
        machine, given = self.machine, self.tensors
        own = tuple(given[name].data_ptr() for name in NAMES)
        counters, numbers = machine.counters.data_ptr(), machine.numbers.data_ptr()
        options = tuple(option.data_ptr() for option in self.options.values())
        return own, (counters + 64, numbers), options, (*own[:3], own[6])

    def attend(self) -> bool:
        """Make the call, and return whether its launches were repeated, with its addresses."""
        machine, launched = self.machine, len(self.machine.launched)
        options = AttentionOptions(causal=True, **self.options)
        direct = DirectLaunch(machine.launch, ("fixed",), True, 0)
        own, inside, of_options, in_maps = self.addresses()
        numbers = machine.numbers.data_ptr()

        def anew(call: AttentionCall) -> Tensor:
            if RECORDING.notes is not None:
                tensors = tuple(self.options.values())
                RECORDING.notes += [
                    WorkspaceNote(GPU, 0, 32, 8, machine.counters, machine.numbers),
                    LaunchNote(
                        direct, (8, 2, 1), None, (), (*own, *inside), tensors, (), True
                    ),
                    WorkspaceNote(GPU, 0, 8, 700, machine.counters, machine.numbers),
                    LaunchNote(
                        direct, (9, 1, 1), make_maps, (), (numbers + 640, *own),
                        tensors[::-1], (), False,
                    ),
                    WorkspaceNote(GPU, 0, 1, 1, machine.counters, machine.numbers),
                ]  # fmt: skip
            return call.out

        call = make_call(self.tensors, options)
        found = calls.repeat(call, (), self._known)
        if isinstance(found, calls.Anew):
            with found:
                found.out = anew(call)
            found = found.out
        assert found is self.tensors["out"]
        if len(machine.launched) == launched:
            return False
        # the largest of all requests
        assert machine.asked == (32, 700)
        head = machine.stream, "fixed"
        assert machine.launched[launched:] == [
            (8, 2, 1, *head, ((*own, *inside), of_options)),
            (
                9,
                1,
                1,
                *head,
                ("maps", *in_maps, numbers + 640, *own, *of_options[::-1]),
            ),
        ]
        return True


@pytest.mark.parametrize("name", CHANGING)
def test_calls_that_differ_in_one_or_two_arguments_alone_are_repeated_with_their_own(
    name: str, machine: Machine
) -> None:
    """The second call wrote into the first one's output, if the outputs alone differed."""
    repeats = Repeats(machine)
    assert [repeats.attend() for _ in range(3)] == [False, False, True]
    for other in CHANGING:
        before = repeats.tensors, repeats.options
        repeats.change(name, other)
        assert repeats.attend()
        # and back
        repeats.tensors, repeats.options = before
        assert repeats.attend()


def test_a_call_that_shares_an_address_with_none_is_not_repeated_for_one_that_does(
    machine: Machine,
) -> None:
    """Of every two tensors: pointers of one address cannot be told apart when it is recorded.

    An output at the address of what is read is validated each time.
    """
    for pair in combinations(("query", "key", "value", "out"), 2):
        like = make_tensors()["key"]
        tensors = make_tensors(query=like, out=torch.zeros_like(like))
        one = tensors[pair[0]]
        repeated = record(machine, tensors | {pair[1]: one.view(one.shape)}, PLAIN)
        assert repeated is not None
        assert not launch(repeated, tensors | {pair[1]: one.clone()}, PLAIN), pair
        both = one.clone()
        launched = launch(repeated, tensors | dict.fromkeys(pair, both), PLAIN)
        assert launched == ("out" not in pair), pair


OPERATIONS = {
    "paged_attention": {"key_cache": "key", "value_cache": "value"},
    "encoder_attention": {"key_start_loc": "lengths"},
    "cascade_attention": {"key_cache": "key", "value_cache": "value"},
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_argument_of_an_operation_tells_its_repeated_calls_apart(
    operation: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an operation passes on, it is in the signature or read at each call."""
    names = OPERATIONS[operation]
    seen: list[Any] = []

    def capture(call: AttentionCall, more: Any, known: Any) -> Tensor:
        tensors = [argument for argument in call if isinstance(argument, Tensor)]
        seen.append(
            (
                signatures.sign_numbers(call, more),
                [tensor.data_ptr() for tensor in tensors],
            )
        )
        result: Tensor = call.out
        return result

    monkeypatch.setattr(pipeline, "repeat", capture)
    attend = getattr(load_implementation("optimized"), operation)
    given = make_tensors(
        max_query_len=2, max_seq_len=30, max_key_len=30, scale=0.5, common_prefix_len=16,
        seq_lens=torch.tensor([20, 30]).int(), options=PLAIN,
    )  # fmt: skip
    if operation == "encoder_attention":
        rows = torch.zeros(2, 50, 2, 64, dtype=torch.float16)
        given |= {
            "key": rows[0],
            "value": rows[1],
            "lengths": torch.tensor([0, 20, 50]),
        }
    arguments = {
        name: given[names.get(name, name)]
        for name in inspect.signature(attend).parameters
        # no other one is accepted
        if name != "compute_dtype"
    }
    others = {
        "max_query_len": 3, "max_seq_len": 1, "max_key_len": 31, "scale": 0.25,
        "common_prefix_len": 32, "options": AttentionOptions(causal=False),
    }  # fmt: skip
    attend(**arguments)
    for name, value in arguments.items():
        other = value.clone() if isinstance(value, Tensor) else others[name]
        attend(**(arguments | {name: other}))
        assert seen[-1] != seen[0], name


# ---- cache writes


WRITE = {
    "tokens_per_program": 4,
    "programs_per_token": 2,
    "new_sizes": ((128, 1), (64, 1)),
    "cache_sizes": ((16, 1), (8, 1)),
    "remainders": ((0, 0), (0, 0)),
    "rest": ("strides", "constant"),
}


@pytest.fixture
def writes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Writes are launched on the pretended GPU too."""
    monkeypatch.setattr(repeated_write, "INTERPRETED", False)
    monkeypatch.setattr(repeated_write, "current_device", lambda: machine.device)
    monkeypatch.setattr(repeated_write, "current_stream", lambda index: machine.stream)
    monkeypatch.setattr(repeated_write, "is_profiled", lambda: machine.profiled)
    return machine


@pytest.mark.parametrize(
    "shifted", [None, "key", "value_cache", "slot_mapping", "scale"]
)
def test_a_repeated_write_takes_addresses_as_they_were_recorded_only(
    shifted: str | None, writes: Machine
) -> None:
    direct = DirectLaunch(writes.launch, ("fixed",), True, 0)
    write = RepeatedWrite(direct=direct, **WRITE)

    def make(name: str, dtype: torch.dtype) -> Tensor:
        return torch.zeros(20, dtype=dtype)[1 if name == shifted else 0 :][:19]

    key, value, key_cache, value_cache = (
        make(name, torch.float16)
        for name in ("key", "value", "key_cache", "value_cache")
    )
    slots, scale = make("slot_mapping", torch.int64), make("scale", torch.float32)
    given = (key, value), (key_cache, value_cache), slots, (scale, 2)
    assert write.launch(*given) == (shifted is None)
    writes.profiled = True
    assert not write.launch(*given)
    writes.profiled, writes.device = False, 1
    assert not write.launch(*given)
    tensors = (key, value, key_cache, value_cache, slots)
    k, v, of_k, of_v, at = (tensor.data_ptr() for tensor in tensors)
    arguments = (
        (k, 128, 1),
        (v, 64, 1),
        (of_k, scale.data_ptr(), 16, 1),
        (of_v, 2.0, 8, 1),
        at,
        19,
        "strides",
        "constant",
    )
    expected = [] if shifted else [(5, 2, 1, 5, "fixed", arguments)]
    assert writes.launched == expected
    # a cache in a page begins after a scale, and one that does not is another launch
    if shifted == "value_cache":
        writes.device, write = 0, replace(write, remainders=((0, 0), (2, 0)))
        assert write.launch(*given)
        assert not write.launch(given[0], (key_cache, key_cache), *given[2:])


def test_a_repeated_write_to_one_address_is_validated_again(writes: Machine) -> None:
    """Scales that are given may be one tensor; those that the write measures may not."""
    direct = DirectLaunch(writes.launch, ("fixed",), True, 0)
    new, slots = (torch.zeros(8), torch.zeros(8)), torch.zeros(8, dtype=torch.int64)
    caches = torch.zeros(64), torch.zeros(64)
    scales = torch.ones(1, 2, 1), torch.ones(1, 2, 1)
    for measures in (False, True):
        write = RepeatedWrite(direct=direct, measures_scales=measures, **WRITE)
        for one_cache in (False, True):
            for one_scale in (False, True):
                launched = write.launch(
                    new,
                    (caches[0], caches[not one_cache]),
                    slots,
                    (scales[0], scales[not one_scale]),
                )
                assert launched == (not one_cache and not (measures and one_scale))


def test_a_repeated_write_has_the_programs_of_its_own_tokens(writes: Machine) -> None:
    """Without slots, or with fewer new tokens than slots, it is validated and launched anew."""
    direct = DirectLaunch(writes.launch, ("fixed",), True, 0)
    write = RepeatedWrite(direct=direct, **WRITE)
    caches = torch.zeros(64), torch.zeros(64)
    slots = torch.zeros(32, dtype=torch.int64)
    for tokens, others, stored, programs in (
        (9, 9, 9, 3),
        (9, 9, 4, 1),
        (4, 4, 5, None),
        (9, 8, 8, None),
        (9, 9, 0, None),
    ):
        writes.launched.clear()
        new = torch.zeros(tokens), torch.zeros(others)
        given = new, caches, slots[:stored], (None, None)
        assert write.launch(*given) == (programs is not None)
        found = [(launched[0], launched[-1][5]) for launched in writes.launched]
        assert found == ([] if programs is None else [(programs, stored)])


def test_a_signature_of_a_write_has_all_but_its_addresses_and_tokens(
    writes: Machine,
) -> None:
    key, cache = torch.zeros(5, 2, 8), torch.zeros(3, 16, 2, 8)
    slots, scale = torch.zeros(5, dtype=torch.int64), torch.ones(1)

    def sign(**changes: Any) -> Any:
        given = {"key": key, "value": key, "k": cache, "v": cache, "slots": slots}
        given |= {"k_scale": scale, "v_scale": 2.0} | changes
        new, caches = (given["key"], given["value"]), (given["k"], given["v"])
        scales = given["k_scale"], given["v_scale"]
        return repeated_write.sign_write(new, caches, given["slots"], scales)

    assert sign() == sign(key=key[:3], value=key.clone(), slots=slots[:1])
    changed: list[dict[str, Any]] = []
    for name in ("key", "value"):
        for other in (key[:, :1], key.double(), torch.zeros(5, 2, 16)[..., ::2]):
            changed.append({name: other})
    for name in ("k", "v"):
        changed += [{name: other} for other in (cache[:2], cache[:, :8], cache.half())]
    changed += [{"slots": torch.zeros(10).long()[::2]}, {"slots": slots.int()}]
    changed += [{"k_scale": None}, {"k_scale": scale.double()}, {"v_scale": 1.0}]
    found = [sign(), *(sign(**change) for change in changed)]
    assert None not in found
    assert len(set(found)) == len(found)


def test_a_write_is_recorded_with_what_its_kernel_takes(
    writes: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: SignatureCache[RepeatedWrite] = SignatureCache(4)
    direct = DirectLaunch(writes.launch, ("fixed",), True, 0)
    monkeypatch.setattr(repeated_write, "WRITES", known)
    monkeypatch.setattr(repeated_write, "find_direct_launch", lambda *_: direct)
    key, cache, slots = torch.zeros(8, 4), torch.zeros(64), torch.zeros(8).long()
    arguments = (
        NewTokens(key, 128, 64, 1),
        NewTokens(key, 64, 32, 1),
        CacheHalf(cache, None, None, 512, 16, 8, 1),
        slots,
        8,
        "strides",
    )
    repeated_write.record_write(("a",), "compiled", 4, 2, arguments)
    write = known.get(("a",))
    assert write is not None
    assert (write.tokens_per_program, write.programs_per_token) == (4, 2)
    assert write.new_sizes == ((128, 64, 1), (64, 32, 1))
    assert write.cache_sizes == ((None, 512, 16, 8, 1),)
    assert write.remainders == ((0, 0),)
    assert write.rest == ("strides",)
    at = torch.zeros(9).long()[1:]
    assert at.data_ptr() % 16
    for number, given in enumerate(
        [
            (None, "compiled", 4, 2, arguments),
            (("b",), None, 4, 2, arguments),
            (("c",), "compiled", 4, 2, (*arguments[:3], at, 8)),
        ]
    ):
        repeated_write.record_write(*given)
        assert known.get(("abc"[number],)) is (write if number == 0 else None)


def test_bounds_of_keys_are_rounded_up_as_far_as_the_block_table_allows(
    machine: Machine,
) -> None:
    """The launches of a decode are those of the decode before it, which had one key less."""
    table = torch.zeros(2, 12, dtype=torch.int32)  # 192 keys
    tensors = make_tensors(block_table=table)

    def bound(given: int, **changes: Any) -> int:
        found = make_call(tensors | changes, PLAIN, max_key_len=given)
        return round_key_bound(found)

    keys = (3, 63, 64, 65, 128, 129, 190, 192)
    assert [bound(key) for key in keys] == [64, 64, 64, 128, 128, 192, 192, 192]
    assert [bound(key, block_table=table[:, :5]) for key in (60, 65)] == [64, 80]
    # new tokens alone, more keys than the table has, ragged keys
    assert [bound(key) for key in (1, 2, 193)] == [1, 2, 193]
    assert bound(65, block_table=None) == 65
    assert sign(tensors, max_key_len=65) == sign(tensors, max_key_len=128)
    assert sign(tensors, max_key_len=64) != sign(tensors, max_key_len=65)

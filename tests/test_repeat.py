"""Repeated calls: what is equal is recorded, what differs is checked at each call."""

from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.launch import dispatch, workspace
from pagetwin.optimized.launch.launcher import RECORDING, DirectLaunch, LaunchNote
from pagetwin.optimized.launch.plan_cache import PlanCache
from pagetwin.optimized.launch.repeat import calls as repeat
from pagetwin.optimized.launch.repeat import writes as repeated_write
from pagetwin.optimized.launch.repeat.calls import (
    RepeatedCall,
    sign_exactly,
)
from pagetwin.optimized.launch.repeat.writes import RepeatedWrite
from pagetwin.optimized.launch.workspace import WorkspaceNote
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
    """

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.device, self.stream, self.profiled = 0, 5, False
        self.counters = torch.zeros(64, dtype=torch.int32)
        self.numbers = torch.zeros(4096)

    def find(self, device: Any, index: int, stream: int, *sizes: int) -> Any:
        assert (device, index, stream) == (GPU, 0, self.stream)
        return self.counters, self.numbers

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)


def make_maps(*addresses: int) -> tuple[Any, ...]:
    return ("maps", *addresses)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(repeat, "INTERPRETED", False)
    monkeypatch.setattr(repeat, "DIRECT_LAUNCH", True)
    monkeypatch.setattr(repeat, "current_device", lambda: made.device)
    monkeypatch.setattr(repeat, "current_stream", lambda index: made.stream)
    monkeypatch.setattr(repeat, "is_profiled", lambda: made.profiled)
    monkeypatch.setattr(repeat, "find_on_stream", made.find)
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
            direct, (8, 2, 1), None, (*addresses, *in_workspace),
            (options.sinks, 2.5, None), ("strides", 16), True,
        ),
        LaunchNote(
            direct, (132, 1, 1), make_maps, (addresses[6], 0, addresses[5]),
            (options.sinks, 0.25), (7,), False,
        ),
    ]  # fmt: skip
    return repeat.repeat(notes, [tensors[name] for name in NAMES], options)


def launch(
    repeated: RepeatedCall, tensors: dict[str, Any], options: AttentionOptions
) -> bool:
    return repeated.launch(*(tensors[name] for name in NAMES), options)


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
    monkeypatch.setattr(repeat, "MAX_MAPS", 2)
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
    told, silent = SimpleNamespace(is_repeatable=True), SimpleNamespace()
    for parts, expected in (
        ((told, (told,), (told,), (told,)), True),
        ((told, (silent, told), (), ()), False),
        ((told, (told,), (silent,), ()), False),
        ((told, (told,), (), (silent,)), False),
        ((silent, (told,), (), ()), False),
    ):
        kinds = ("portable", "prefills", "complete", "appends")
        given: Any = dict(zip(kinds, parts, strict=True))
        names = [each.name for each in fields(dispatch.LaunchPlan)]
        others = {name: None for name in names if name not in given}
        assert dispatch.LaunchPlan(**given, **others).is_repeatable == expected


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
    listed = [tensors[name] for name in NAMES]
    direct = DirectLaunch(machine.launch, (), True, 0)

    def note(pointer: int, option: Any = None) -> LaunchNote:
        return LaunchNote(direct, (1, 1, 1), None, (pointer,), (option,), (), True)

    def repeated(*notes: Any) -> Any:
        return repeat.repeat(notes, listed, PLAIN)

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
    numbers: dict[str, Any] = {
        "max_query_len": 2,
        "max_key_len": 30,
        "scale": None,
        "options": PLAIN,
    }
    return sign_exactly(**(tensors | numbers | changes))


def test_an_exact_signature_leaves_out_addresses_alone(machine: Machine) -> None:
    tensors = make_tensors()
    assert sign(tensors) == sign(make_tensors())
    wide = {
        name: torch.zeros(*each.shape[:-1], 2 * each.shape[-1], dtype=each.dtype)
        for name, each in tensors.items()
    }
    changed: list[dict[str, Any]] = []
    for name, each in tensors.items():
        strided = wide[name][..., ::2]
        assert strided.shape == each.shape
        changed += [{name: each[1:]}, {name: strided}, {name: each.double()}]
    changed += [{"block_table": None}, {"out": None}, {"lse": None}]
    changed += [{"max_query_len": 3}, {"max_key_len": 29}, {"scale": 0.5}]
    changed.append({"options": AttentionOptions(causal=False)})
    for sinks in (torch.zeros(4), torch.zeros(8)[::2], torch.zeros(4).double()):
        changed.append({"options": AttentionOptions(causal=True, sinks=sinks)})
    found = [sign(tensors), *(sign(tensors, **each) for each in changed)]
    assert None not in found
    assert len(set(found)) == len(found)


def test_calls_with_numbers_of_other_types_are_not_repeated(machine: Machine) -> None:
    changes: list[dict[str, Any]] = [
        {"max_query_len": torch.tensor(2)},
        {"max_key_len": True},
        {"scale": [1.0]},
        {"options": AttentionOptions(causal=torch.ones(2, dtype=torch.bool))},
    ]
    for each in changes:
        assert sign(make_tensors(), **each) is None


def test_the_third_call_is_repeated_and_validation_of_contents_is_not_skipped(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[bool] = []
    is_wrong = False

    def attend_anew(*arguments: Any) -> Tensor:
        planned.append(RECORDING.notes is not None)
        if is_wrong:
            raise IndexError("wrong")
        if RECORDING.notes is not None:
            pointers = tuple(each.data_ptr() for each in arguments[:3])
            direct = DirectLaunch(machine.launch, (), True, 0)
            RECORDING.notes.append(
                LaunchNote(direct, (1, 1, 1), None, pointers, (), (), True)
            )
        return torch.zeros(4, 4, 64) if arguments[9] is None else arguments[9]

    monkeypatch.setattr(dispatch, "PLANS", PlanCache(8))
    monkeypatch.setattr(dispatch, "attend_anew", attend_anew)

    def attend(**changes: Any) -> Tensor:
        tensors = make_tensors(**changes)
        given = [tensors[name] for name in NAMES]
        return dispatch.attend(
            *given[:6], 2, 30, None, *given[6:], PLAIN, lambda contents: None
        )

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


def test_requests_for_workspace_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.zeros(4, dtype=torch.int32), torch.zeros(8)
    monkeypatch.setattr(workspace, "current_stream", lambda index: 3)
    monkeypatch.setattr(workspace, "find_on_stream", lambda *arguments: found)
    monkeypatch.setattr(RECORDING, "notes", [])
    assert workspace.find_workspace(GPU, 4, 8) is found
    assert RECORDING.notes == [WorkspaceNote(GPU, 0, 4, 8, *found)]


# ---- cache writes


@pytest.mark.parametrize(
    "shifted", [None, "key", "value_cache", "slot_mapping", "scale"]
)
def test_a_repeated_write_takes_aligned_addresses_only(
    shifted: str | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_write, "current_device", lambda: machine.device)
    monkeypatch.setattr(repeated_write, "current_stream", lambda index: machine.stream)
    monkeypatch.setattr(repeated_write, "is_profiled", lambda: machine.profiled)
    write = RepeatedWrite(
        direct=DirectLaunch(machine.launch, ("fixed",), True, 0),
        grid=(3, 2, 1),
        sizes=((128, 1), (64, 1), (None, 16, 1), (None, 8, 1)),
        rest=(10, "constant"),
    )

    def make(name: str, dtype: torch.dtype) -> Tensor:
        return torch.zeros(20, dtype=dtype)[1 if name == shifted else 0 :]

    key, value, key_cache, value_cache = (
        make(name, torch.float16)
        for name in ("key", "value", "key_cache", "value_cache")
    )
    slots, scale = make("slot_mapping", torch.int64), make("scale", torch.float32)
    tensors = (key, value, key_cache, value_cache, slots)
    assert write.launch(*tensors, scale, 2) == (shifted is None)
    machine.profiled = True
    assert not write.launch(*tensors, scale, 2)
    machine.profiled, machine.device = False, 1
    assert not write.launch(*tensors, scale, 2)
    k, v, of_k, of_v, at = (each.data_ptr() for each in tensors)
    arguments = (
        (k, 128, 1),
        (v, 64, 1),
        (of_k, scale.data_ptr(), None, 16, 1),
        (of_v, 2.0, None, 8, 1),
        at,
        10,
        "constant",
    )
    expected = [] if shifted else [(3, 2, 1, 5, "fixed", arguments)]
    assert machine.launched == expected

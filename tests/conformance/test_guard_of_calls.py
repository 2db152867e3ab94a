"""The guard around judged calls: calls inside of calls, what it watches, what it leaves."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.judged_call import JUDGED_CALL
from pagetwin.conformance.candidates.guard import interference
from pagetwin.conformance.candidates.guard.interference import (
    GUARD,
    SHARED,
    SUITE,
    WATCHED,
    Guard,
    guard_operations,
    guarded,
)
from pagetwin.conformance.candidates.guard.namespaces import Namespaces
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.contract.operations import load_implementation

REFERENCE = load_implementation("reference")
ATTENTION = "paged_attention"
ENCODER = "encoder_attention"


@pytest.fixture(autouse=True)
def watching(guarded_calls: None) -> Iterator[None]:
    """Guard the calls of this file, and leave nothing noted."""
    GUARD.start()
    GUARD.hook()
    yield
    GUARD.expect_unchanged()
    assert JUDGED_CALL.depth == 0


def note(*words: str) -> None:
    for word in words:
        JUDGED_CALL.note(word)


def test_what_a_call_inside_of_a_call_did_is_said_of_both() -> None:
    """The reference stays closed until the outer call has returned."""
    closed = []

    def outer() -> None:
        note("one")
        with pytest.raises(Disagreement, match="one; two"):
            guarded(ENCODER, lambda: note("two"))()
        closed.append(bool(GUARD._closed))

    with pytest.raises(Disagreement, match="one; two"):
        guarded(ATTENTION, outer)()
    assert closed == [True] and not GUARD._closed
    guarded(ATTENTION, lambda: None)()  # and of no later one


def test_the_error_of_a_call_is_the_cause_of_its_interference() -> None:
    def kernel() -> None:
        note("it did something")
        raise KeyError("own")

    with pytest.raises(Disagreement) as raised:
        guarded(ATTENTION, kernel)()
    assert isinstance(raised.value.__cause__, KeyError)


def test_arguments_and_result_pass_the_guard() -> None:
    found = guarded(ATTENTION, lambda *args, **given: (args, given))(1, two=2)
    assert found == ((1,), {"two": 2})


def test_each_operation_closes_its_own_reference_and_finds_it_once() -> None:
    codes = {}

    def look(name: str) -> Any:
        return lambda: codes.update({name: list(GUARD._closed)})

    for name in (ATTENTION, ENCODER):
        guarded(name, look(name))()
    names = {name: {closed[0].__name__ for closed in codes[name]} for name in codes}
    assert ATTENTION in names[ATTENTION] and ENCODER in names[ENCODER]
    assert ENCODER not in names[ATTENTION]
    first = GUARD._forbidden[ATTENTION]
    guarded(ATTENTION, look(ATTENTION))()
    assert GUARD._forbidden[ATTENTION] is first
    # a name that is not an operation of the reference closes nothing
    guarded("no_operation", look("none"))()
    assert codes["none"] == []


def test_what_the_reference_imports_stays_open() -> None:
    """Functions of other modules and other operations are not closed."""
    for name in (ATTENTION, "reshape_and_cache"):
        for function, _, _ in interference._forbidden_for(name):
            is_own = function.__module__.startswith(f"{SUITE}.reference")
            assert is_own or function.__name__ == name
            assert (
                function.__name__ == name or function.__name__ not in interference.NAMES
            )


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let all code be that of a candidate."""
    with monkeypatch.context() as patch:
        patch.setattr(interference, "is_foreign", lambda file: True)
        yield


def audited(event: str, own: Guard, depth: int = 1) -> bool:
    """Return whether an event is noted, at a depth of calls."""
    JUDGED_CALL.found.clear()
    JUDGED_CALL.depth += depth
    try:
        own._audit(event, ())
        return f"it called {event}" in JUDGED_CALL.found
    finally:
        JUDGED_CALL.depth -= depth
        JUDGED_CALL.found.clear()


@pytest.mark.parametrize(
    "event",
    [
        *(f"gc.get_{kind}" for kind in ("objects", "referents", "referrers")),
        *("sys._current_frames", "sys._getframe"),
    ],
)
def test_events_count_inside_of_a_call_alone(event: str, foreign: None) -> None:
    own = Guard()
    assert not audited(event, own, depth=0)
    assert audited(event, own) and audited(event, own)
    own._is_auditing = True  # reading the frames raises such an event itself
    assert not audited(event, own)
    assert event in WATCHED and not audited("open", Guard())


def test_a_guard_is_hooked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    own = Guard()
    own.hook()
    own.hook()
    assert hooks == [own._audit]


def test_the_functions_are_those_from_before_the_first_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Guard()
    monkeypatch.setenv("PAGETWIN_GUARD_CALLS", "0")
    own.start()
    assert not own._comparators and not own._others
    monkeypatch.setenv("PAGETWIN_GUARD_CALLS", "1")
    own.start()
    judges, comparators, others = own._judges, own._comparators, own._others
    watched = {
        (getattr(owner, "__name__", ""), name) for owner, name, *_ in comparators
    }
    assert ("torch", "equal") in watched and ("time", "perf_counter") in watched
    named = {function.name for function in judges._functions.values()}
    assert any(judge.endswith(".expect_same") for judge in named)
    assert any(judge.startswith(f"{SUITE}.conformance.oracles.") for judge in named)
    others_of = {owner.__name__ for owner, *_ in others}
    assert {f"{SUITE}.validation", f"{SUITE}.contract.budgets"} & others_of
    own.start()
    assert own._judges is judges and own._others is others
    assert own._comparators is comparators


@pytest.mark.parametrize("name", ["_comparators", "_others"])
def test_functions_of_both_lists_are_compared_at_the_end(name: str) -> None:
    module = ModuleType("own")
    module.function = before = lambda: 1  # type: ignore[attr-defined]
    own = Guard()
    setattr(own, name, list(interference._functions_in([module])))
    own.expect_unchanged()
    del module.function
    with pytest.raises(Disagreement, match=r"it replaced own\.function"):
        own.expect_unchanged()
    assert module.function is before
    code = before.__code__
    before.__code__ = (lambda: 2).__code__
    with pytest.raises(Disagreement, match=r"it replaced own\.function"):
        own.expect_unchanged()
    assert before.__code__ is code and before() == 1


def test_a_name_that_judges_is_compared_at_the_end() -> None:
    module = ModuleType("own")
    module.number = 1  # type: ignore[attr-defined]
    own = Guard()
    own._judges = Namespaces([module], "own")
    own.expect_unchanged()
    module.number = 2  # type: ignore[attr-defined]
    with pytest.raises(Disagreement, match=r"it replaced own\.number"):
        own.expect_unchanged()
    assert module.number == 1


def test_a_function_that_a_call_replaces_is_found_after_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("own")
    module.function = before = lambda: 1  # type: ignore[attr-defined]
    monkeypatch.setattr(GUARD, "_judges", Namespaces([module], "own"))

    def kernel() -> None:
        module.function = len  # type: ignore[attr-defined]

    with pytest.raises(Disagreement, match=r"it replaced own\.function"):
        guarded(ATTENTION, kernel)()
    assert module.function is before


def test_code_of_comparators_in_python_is_compared() -> None:
    found = {
        (owner, name): code for owner, name, _, code in interference._comparators()
    }
    assert found[torch.cuda, "synchronize"] is torch.cuda.synchronize.__code__
    assert found[torch, "equal"] is None


def test_modules_are_those_of_a_package_and_not_of_a_similar_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("own_a", "own_a.part", "own_ab"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found = [
        module_found.__name__ for module_found in interference._modules(("own_a",))
    ]
    assert sorted(found) == ["own_a", "own_a.part"]
    module = ModuleType("own")
    module.Class, module.value = Guard, 3  # type: ignore[attr-defined]
    assert list(interference._functions_in([module])) == []


def test_functions_of_a_candidate_are_guarded_and_what_it_imports_is_not() -> None:
    shared = "get_kv_cache_shape"
    assert shared in SHARED
    imported = getattr(REFERENCE, shared)

    def own(*args: Any) -> None:
        """An operation that the candidate has written."""

    attention = REFERENCE.paged_attention
    given = {shared: imported, ATTENTION: attention, ENCODER: own, "BACKENDS": own}
    found = guard_operations(given)
    assert found[shared] is imported and found["BACKENDS"] is own
    assert found[ATTENTION] is not attention and found[ENCODER] is not own
    assert guard_operations({shared: own})[shared] is not own
    assert guard_operations({ATTENTION: 3}) == {ATTENTION: 3}
    assert guard_operations({ATTENTION: Guard}) == {ATTENTION: Guard}

"""Every argument of every operation, with wrong values: both twins treat them alike.

The valid calls are those of the worked examples and of MORE. Before each of them is made, it is
tried with one argument after the other replaced: by values of other types, and by tensors of
another shape, dtype, device or contents. A wrong value may be accepted, for example a NumPy integer
for an integer, which then gives the same result. What raises names the argument. A law demands that
it has changed nothing.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.conformance.candidates.calls.wrong_calls import COMPUTED, copied
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.checks.expect import INPUT_ERRORS
from pagetwin.conformance.checks.state import state_of
from pagetwin.conformance.laws.raised_errors import try_operation
from pagetwin.conformance.running.trial import make_setting
from pagetwin.contract.argument_kinds import ArgumentKind, kind_of
from pagetwin.contract.argument_types import typed
from pagetwin.contract.operations import CONCEPTS, load_implementation
from pagetwin.engine.backend_interface import AttentionMetadataBuilder
from pagetwin.examples import EXAMPLES, Example, example_names, run_example
from pagetwin.reference import OutOfBlocks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
    ),
]

OPERATIONS = {name for concept in CONCEPTS for name in concept.operations}
MORE: dict[str, str] = {
    "BlockManager": "manager.num_blocks_of('d')",
    "Scheduler": """
scheduler.finish_requests(['b'])
scheduler.reset_prefix_cache(True)
""",
    "BlockTable": "table.swap_row(0, 1)",
    "StepBuffers": "buffers.clear_rows([0])",
    "CommonAttentionState": """
with state.graph_capture(max_batch_size=4):
    state.graph_clone(2)
    state.capture(lambda metadata, x: x, 2, torch.ones(2, 3))
state.replay(batch, torch.ones(2, 3))
""",
}
"""Calls of the methods that no worked example calls, by class."""

ON_A_GPU = ("CommonAttentionState.capture", "CommonAttentionState.replay")
"""Methods that the optimized twin has on a GPU alone."""

WRONG: dict[str, Any] = {
    "list": [1],
    "rows": [[1]],
    "NumPy integer": np.int64(3),
    "NumPy float": np.float32(0.5),
    "NumPy bool": np.bool_(True),
    "NumPy array": np.array([1, 3]),
    "NumPy array of floats": np.array([0.5]),
    "float": 3.0,
    "bool": True,
    "str": "nothing",
    "bytes": b"nothing",
    "dict": {},
    "set": {1},
    "None": None,
    "object": object(),
    "tensor": torch.tensor(3),
    "2**31": 2**31,
    "-2**31 - 1": -(2**31) - 1,
    "2**70": 2**70,
}
LEFT_OUT = (*COMPUTED, "run")
"""What options compute once per object, and the function of a captured step."""

TAKES_TOO_MUCH_MEMORY = {("BlockManager.__init__", "num_blocks", "2**31")}
"""Right calls that are not made."""

EXPLAINED = r"expected|; |is not a multiple of|has no"
IN_SEQUENCES = ("list", "NumPy float", "float", "bool", "str", "None", "object")
NUMBERS_IN_SEQUENCES = ("2**31", "-2**31 - 1", "2**70")


def values_for(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values to try in the place of a valid one, with their names."""
    if type(value) is int:
        yield "the same as a NumPy integer", np.int64(value)
    elif type(value) is bool:
        yield "the same as a NumPy bool", np.bool_(value)
    elif type(value) is float:
        yield "the same as a NumPy float", np.float64(value)
    elif isinstance(value, list) and value and type(value[0]) is int:
        yield "the same as a NumPy array", np.array(value)
        yield "the same in NumPy integers", [np.int32(element) for element in value]
        for name in IN_SEQUENCES + NUMBERS_IN_SEQUENCES:
            yield f"a list with {name}", [*value[:-1], WRONG[name]]
    elif is_rows(value):
        yield "the same as NumPy arrays", [np.array(element, int) for element in value]
        for name in IN_SEQUENCES + NUMBERS_IN_SEQUENCES:
            yield f"rows with {name}", [*value[:-1], [*value[-1], WRONG[name]]]
            yield f"a list with {name}", [*value[:-1], WRONG[name]]
    elif isinstance(value, torch.Tensor):
        yield from wrong_tensors(value)
    yield from WRONG.items()


def wrong_tensors(value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Yield tensors of another shape, dtype or device than a valid one, and other contents."""
    is_float = value.is_floating_point()
    yield "another dtype", value.to(torch.int32 if is_float else torch.int16)
    yield "one more axis", value[None].clone()
    yield "another device", value.to("meta")
    if value.numel():
        yield "one row less", value[:-1].clone()
    if value.numel() and not is_float and value.dtype != torch.bool:
        for number in (100, -7):
            changed = value.clone()
            changed.view(-1)[-1] = number
            yield f"{number} at its end", changed


def is_rows(value: Any) -> bool:
    """Return whether a value is a list of lists of integers."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(row, list) for row in value)
        and {type(entry) for row in value for entry in row} == {int}
    )


@dataclass
class Tries:
    """What the calls with wrong values did.

    Args:
        outcomes: By operation, argument and value: "raises" and the error, or "returns".
        valid: The operations and methods that were called.
    """

    outcomes: dict[tuple[str, str, str], str] = field(default_factory=dict)
    valid: set[str] = field(default_factory=set)
    is_inside: bool = False

    def watched(self, name: str, function: Any) -> Any:
        """Return an operation, or a class, whose calls are tried with wrong values first."""
        if not inspect.isclass(function):
            return self._watched_function(name, function)
        methods = {
            method_name: self._watched_function(f"{name}.{method_name}", method)
            for method_name, method in methods_of(function).items()
        }
        return type(function.__name__, (function,), methods)

    def _watched_function(self, name: str, function: Any) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_inside:
                self.is_inside = True
                try:
                    given = signature.bind(*args, **kwargs)
                    given.apply_defaults()
                    self._try_all(name, function, signature, given.arguments)
                finally:
                    self.is_inside = False
            return function(*args, **kwargs)

        return call

    def _try_all(
        self,
        name: str,
        function: Any,
        signature: inspect.Signature,
        given: dict[str, Any],
    ) -> None:
        is_first = name not in self.valid
        self.valid.add(name)
        failure, right = outcome(function, signature, copied(given))
        if isinstance(failure, NotImplementedError):
            return  # a graph is not recorded on the host
        for argument, value in given.items():
            if argument == "self" or not is_first:
                continue
            parameter = signature.parameters[argument]
            for words, wrong in values_for(value):
                if (name, argument, words) in TAKES_TOO_MUCH_MEMORY:
                    continue
                state = copied(given)
                is_many = parameter.kind is parameter.VAR_POSITIONAL
                state[argument] = (wrong,) if is_many else wrong
                kind = kind_of(parameter.annotation)
                error, found = outcome(function, signature, state)
                what = f"{name}, {argument} = {wrong!r:.60} ({words})"
                key = name, argument, words
                self.outcomes[key] = "returns" if error is None else repr(error)
                if error is None:
                    if "the same" in words:
                        assert found == right, what
                    continue
                assert isinstance(error, (*INPUT_ERRORS, OutOfBlocks)), (
                    f"{what}: {error!r}"
                )
                is_bool = words == "the same as a NumPy bool"
                assert is_bool or "the same" not in words, f"{what}: {error!r}"
                if is_of(kind, wrong) or "2**" in words:
                    assert re.search(EXPLAINED, str(error)), f"{what}: {error!r}"
                else:
                    assert argument in str(error), f"{what}: {error!r}"


def methods_of(owner: type) -> dict[str, Any]:
    """Return the constructor and the public methods that take arguments."""
    return {
        name: method
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        if name == "__init__" or name[0] != "_"
        if len(inspect.signature(method).parameters) > 1
    }


def is_of(kind: ArgumentKind, value: Any) -> bool:
    """Return whether a value has the right type."""
    try:
        kind.convert("value", value)
    except (TypeError, ValueError):
        return False
    return True


def outcome(
    function: Any, signature: inspect.Signature, state: dict[str, Any]
) -> tuple[Exception | None, Any]:
    """Return the error of a call, or None and the state of its result and its arguments."""
    bound = inspect.BoundArguments(signature, state)  # type: ignore[arg-type]
    try:
        result = function(*bound.args, **bound.kwargs)
    except Exception as error:
        return error, None
    return None, state_of((result, state.get("self")), LEFT_OUT)


def try_example(example: Example, twin: str) -> Tries:
    """Run an example, and try each of its calls with wrong values before."""
    tries = Tries()
    implementation = load_implementation(twin)
    names = example_names(implementation)
    names[example.operation] = tries.watched(
        example.operation, names[example.operation]
    )
    list(run_example(example, names))
    if more := MORE.get(example.operation):
        with suppress(NotImplementedError):
            exec(more, names)
    return tries


@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if example.operation in OPERATIONS],
    ids=lambda example: example.operation,
)
def test_a_value_of_another_type_raises_or_means_the_same(
    example: Example, checked_values: None
) -> None:
    tries = [try_example(example, twin) for twin in ("reference", "optimized")]
    reference, optimized = (tried.outcomes for tried in tries)
    for key, found in reference.items():
        if key[0] not in ON_A_GPU:
            assert optimized[key] == found, key
    assert {*optimized} <= {*reference}


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_argument_of_every_function_has_a_wrong_value(operation: str) -> None:
    setting = make_setting(load_candidate("reference"), "cpu")
    left = try_operation(setting, operation)
    assert not left, "expected a law that calls them, and values that must be rejected"


def test_the_methods_of_an_object_are_looked_for_in_each_one() -> None:
    """The first one of its class was remembered as right, so another one was taken."""

    @typed
    def build(builder: AttentionMetadataBuilder) -> None:
        """Take anything that builds."""

    build(SimpleNamespace(build=len))
    with pytest.raises(TypeError, match=r"builder = .*expected an AttentionMetadata"):
        build(SimpleNamespace())

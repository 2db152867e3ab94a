"""States of objects: what makes two of them equal."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.conformance.checks.state import state_of

NAN = float("nan")


class Colour(Enum):
    RED = 1


@dataclass
class Held:
    """An object with attributes."""

    name: str = "a"
    parts: list[Any] = field(default_factory=list)


class Slotted:
    """An object with slots."""

    __slots__ = ("left", "right")

    def __init__(self, left: Any) -> None:
        self.left = left


EQUAL = [
    lambda: NAN,
    lambda: [1, (2.0, None), deque("ab")],
    lambda: {"a": {1, 2}, "b": Colour.RED},
    lambda: torch.tensor([NAN, -0.0]),
    lambda: torch.arange(6).view(2, 3).T,
    lambda: torch.zeros(3, dtype=torch.bfloat16),
    lambda: torch.zeros(3, device="meta"),
    lambda: np.array([[1, 2]]),
    lambda: Held(parts=[Held("b")]),
    lambda: Slotted([1]),
    lambda: slice(1, None),
]
"""Objects whose copies have the same state."""


@pytest.mark.parametrize("make", EQUAL)
def test_equal_objects_have_equal_states(make: Any) -> None:
    assert state_of(make()) == state_of(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        ([1, 2], [1, 3]),
        ([1], (1,)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, device="meta"), torch.zeros(3, device="meta")),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (Held("a"), Held("b")),
        (Held(parts=[1]), Held(parts=[2])),
        (Slotted(1), Slotted(2)),
        (slice(1), slice(2)),
    ],
)
def test_objects_that_differ_have_other_states(one: Any, other: Any) -> None:
    assert state_of(one) != state_of(other)


def test_it_matters_which_objects_are_shared() -> None:
    first, second = [1], [1]
    assert state_of([first, first]) != state_of([first, second])
    assert state_of([first, second, first]) != state_of([first, second, second])


def test_an_object_may_hold_itself() -> None:
    one = Held()
    one.parts.append(one)
    other = Held()
    other.parts.append(other)
    assert state_of(one) == state_of(other)


def test_attributes_are_left_out_wherever_they_are() -> None:
    one, other = Held(parts=[Held("b")]), Held(parts=[Held("c")])
    assert state_of(one, ("name",)) == state_of(other, ("name",))
    assert state_of(one, ("parts",)) == state_of(other, ("parts",))
    assert state_of(one) != state_of(other)


def test_a_temporary_object_does_not_give_its_number_to_the_next_one() -> None:
    class Made:
        """An object that makes what it holds."""

        __slots__ = ("count",)

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    class Several(list):  # type: ignore[type-arg]
        """A list whose elements are made when they are read."""

        def __iter__(self) -> Any:
            return iter([[n] for n in range(50)].pop(k) for k in [0] * 50)

    states = state_of(Several([0]))
    assert "again" not in str(states)


def test_the_memory_around_a_view_counts_if_it_is_compared() -> None:
    one, other = torch.zeros(6), torch.zeros(6)
    other[0] = 1
    assert state_of(one[2:4]) == state_of(other[2:4])
    assert state_of(one[2:4], whole=True) != state_of(other[2:4], whole=True)
    assert state_of(one[2:4], whole=True) != state_of(one[3:5], whole=True)
    shared, apart = [one[:2], one[2:]], [one[:2], one.clone()[2:]]
    assert state_of(shared, whole=True) != state_of(apart, whole=True)

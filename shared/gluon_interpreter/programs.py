"""Global memory that several programs of a launch use: who has stored what, and who knows of it.

Programs run one after another here, so each of them finds what earlier ones have stored. On a GPU
it does so only if the other program's release and its own acquire are ordered, by an atomic
addition to one counter. As in accesses.py each program has a clock, and each counter has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .accesses import Clock
from .values import InterpreterError


@dataclass
class Elements:
    """The floating-point numbers of one storage.

    Attributes:
        owners: number plus 1 of the program that has stored to each one; 0 if none has.
        times: that program's clock when it stored.
    """

    owners: torch.Tensor
    times: torch.Tensor


@dataclass
class LaunchMemory:
    """What the programs of one launch have done.

    Args:
        num_programs: of the launch.

    Attributes:
        elements: by address and element size of a storage.
        counters: clocks, by address.
    """

    num_programs: int
    elements: dict[tuple[int, int], Elements] = field(default_factory=dict)
    counters: dict[int, Clock] = field(default_factory=dict)


class Program:
    """One program's accesses to global memory.

    Args:
        launch: its launch.
        number: its index in the launch.
    """

    def __init__(self, launch: LaunchMemory, number: int) -> None:
        self._launch, self._number = launch, number
        self._clock = Clock(launch.num_programs, number)

    def note_store(self, tensor: torch.Tensor, places: torch.Tensor) -> None:
        """Note that this program stores to elements of a tensor of floating-point numbers.

        Args:
            places: of the elements after the tensor's first.

        Raises:
            InterpreterError: another program of the launch has stored to one of them.
        """
        if not tensor.is_floating_point():
            return
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor.itemsize
        if key not in self._launch.elements:
            owners = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=torch.int32)
            self._launch.elements[key] = Elements(owners, owners.clone())
        elements = self._launch.elements[key]
        places = places + int(tensor.storage_offset())
        others = elements.owners[places]
        if bool(((others != 0) & (others != self._number + 1)).any()):
            raise InterpreterError(
                "two programs store to one element of a tensor", "race"
            )
        elements.owners[places] = self._number + 1
        elements.times[places] = self._clock.times[self._number]

    def note_load(self, tensor: torch.Tensor, places: torch.Tensor) -> None:
        """Note that this program loads elements of a tensor.

        Args:
            places: as in `note_store`.

        Raises:
            InterpreterError: another program has stored to one of them, and no counter says that
                it has.
        """
        key = tensor.untyped_storage().data_ptr(), tensor.itemsize
        elements = self._launch.elements.get(key)
        if elements is None or not tensor.is_floating_point():
            return
        places = places + int(tensor.storage_offset())
        others = elements.owners[places] - 1
        known = self._clock.times[others.clamp(min=0)]
        is_race = (others >= 0) & (others != self._number)
        if bool((is_race & (elements.times[places] > known)).any()):
            raise InterpreterError(
                "a program loads what another program has stored: expected that one to release,"
                " and this one to acquire, at a counter between",
                "race",
            )

    def add_to_counter(self, address: int, sem: str, scope: str) -> None:
        """Note an atomic addition.

        Args:
            address: of the counter.
            sem: memory semantics; Triton's default is "acq_rel".
            scope: the threads that see them; Triton's default is "gpu".
        """
        if scope == "cta":
            return
        counter = self._launch.counters.setdefault(
            address, Clock(self._launch.num_programs)
        )
        if sem in ("", "acq_rel", "acquire"):
            self._clock.join(counter)
        if sem in ("", "acq_rel", "release"):
            self._clock.release(counter)

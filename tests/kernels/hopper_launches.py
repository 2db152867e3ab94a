"""Launches of Hopper's kernels that are recorded instead of made, and kinds of calls."""

from typing import Any, NamedTuple

import pytest
import torch
from pagetwin.optimized.runtime.launcher import Launcher

Launches = list[tuple[Any, dict[str, Any]]]


def record_launches(family: Any, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return a list that gets the grid and the arguments by name of each launch of a family.

    Nothing is launched. The device is a Hopper with 16 processors.
    """
    found: Launches = []

    def note(
        launcher: Launcher, grid: Any, pointers: Any, options: Any, numbers: Any,
        tensors: Any, maps: Any = (), make_maps: Any = None, map_addresses: Any = (),
    ) -> None:  # fmt: skip
        values = (*maps, *pointers, *options, *numbers)
        names = launcher._kernel.arg_names
        assert names[len(values)] == "config" and len(names) == len(values) + 1
        lowered = launcher._lower(*tensors)
        assert len(lowered) + len(options) + len(numbers) == len(values)
        found.append((grid, dict(zip(names[:-1], values, strict=True))))

    monkeypatch.setattr(family, "is_hopper", lambda device: True)
    monkeypatch.setattr(family, "count_processors", lambda device: 16)
    monkeypatch.setattr(Launcher, "__call__", note)
    monkeypatch.setattr(Launcher, "is_ready", True)
    monkeypatch.setattr(Launcher, "encode", lambda self, index, descriptor: [index])
    return found


class Way(NamedTuple):
    """A kind of call."""

    head_size: int
    dtype: torch.dtype
    group: int
    block_size: int
    options: dict[str, Any]

    def __str__(self) -> str:
        dtype = str(self.dtype).rpartition(".")[2]
        words = (self.head_size, dtype, self.group, self.block_size, *self.options)
        return " ".join(map(str, words))

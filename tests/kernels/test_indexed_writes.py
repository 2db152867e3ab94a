"""Indexed writes: an operation of torch writes each element of a tensor at most once.

With a duplicate index, `scatter_` and its relatives write in any order on a GPU, and in that of the
indices on a CPU. So what is wrong on a GPU is right here.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pagetwin.conformance.api.check import (
    load_candidate,
    make_setting,
    try_law,
)
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAWS = [law for law in ALL_LAWS if "StepBuffers" in law.needs]

WRITES = {"scatter_", "index_copy_", "index_put_", "_index_put_impl_", "put_"}
"""Operations that overwrite. Those that add may have duplicate indices."""


def element_numbers(name: str, target: Tensor, args: Sequence[Any]) -> Tensor:
    """Return the number of every element that an operation writes."""
    numbers = torch.arange(target.numel()).view(target.shape)
    if name == "put_":
        return numbers.take(args[0])
    if name in ("scatter_", "index_copy_"):
        dim, index = args[:2]
        select = torch.gather if name == "scatter_" else torch.index_select
        return select(numbers, dim, index)
    return numbers[tuple(slice(None) if index is None else index for index in args[0])]


class WriteOnce(TorchDispatchMode):
    """Note each operation that writes an element twice."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self.twice: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WRITES and not any(isinstance(argument, bool) for argument in args):
            self.num_writes += 1
            written = element_numbers(name, args[0], args[1:]).flatten()
            if len(written.unique()) < len(written):
                self.twice.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "write",
    [
        lambda zeros: zeros.scatter_(0, torch.tensor([1, 1]), torch.ones(2)),
        lambda zeros: zeros.index_copy_(0, torch.tensor([1, 1]), torch.ones(2)),
        lambda zeros: zeros.put_(torch.tensor([1, 1]), torch.ones(2)),
        lambda zeros: zeros.__setitem__(torch.tensor([1, 1]), torch.ones(2)),
    ],
)
def test_a_duplicate_index_is_noticed(write):
    with WriteOnce() as noted:
        write(torch.zeros(3))
    assert noted.twice


@pytest.mark.extended
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)
def test_new_blocks_are_written_to_the_table_once() -> None:
    setting = make_setting(load_candidate("optimized"), "cpu")
    for law in LAWS:
        with WriteOnce() as noted:
            result = try_law(law, setting, seed_of_cases=1, examples=5)
        assert (result.status, noted.twice) == ("held", []), law.name
        if "older steps" in law.name:
            assert noted.num_writes

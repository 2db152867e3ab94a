"""Triton's interpreter with its slow parts replaced: same results, same errors."""

import pytest
import torch
import triton
import triton.language as tl
from pagetwin.conformance.running.interpreter import speed_up
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels are compiled"
)


@triton.jit
def scale_row(row, factor):
    return row * factor


@triton.jit
def scale_kernel(rows, factors, out, SIZE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, SIZE)
    factor = tl.load(factors + row)
    scaled = scale_row(tl.load(rows + row * SIZE + column), factor)
    tl.store(out + row * SIZE + column, scaled)


def scale(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return each row times its factor, by a kernel that calls another function."""
    out = torch.empty_like(rows)
    scale_kernel[(len(rows),)](rows, factors, out, SIZE=rows.shape[1])
    return out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_results_are_those_of_torch(dtype: torch.dtype) -> None:
    assert speed_up()
    rows = torch.arange(12, dtype=dtype).view(3, 4)
    factors = torch.tensor([2, -3, 5], dtype=dtype)
    assert torch.equal(scale(rows, factors), rows * factors[:, None])


def test_an_integer_that_does_not_fit_its_type_is_an_error() -> None:
    assert speed_up()
    rows = torch.full((1, 4), 2**20, dtype=torch.int32)
    factor = torch.tensor([2**10], dtype=torch.int32)
    assert scale(rows, factor)[0, 0] == 2**30
    with pytest.raises(InterpreterError, match="overflow detected for operation mul"):
        scale(rows, 2 * factor)
    # the error has restored the builtins: the next launch works
    assert scale(rows, factor)[0, 0] == 2**30


def test_outside_of_a_launch_the_language_is_as_it_was() -> None:
    before = tl.load, tl.core.tensor.__add__
    scale(torch.ones(1, 4), torch.ones(1))
    assert (tl.load, tl.core.tensor.__add__) == before

"""Guard pages on the CPU: a read past the end ends the process, one before it does not."""

import subprocess
import sys
import textwrap

import pytest
import torch
from pagetwin.conformance.candidates.guard import guard_pages
from pagetwin.conformance.candidates.guard.guard_pages import (
    PAGE,
    guarded,
    guarded_rows,
)

pytestmark = pytest.mark.long

SEGMENTATION_FAULT = -11


def run(code: str) -> int:
    """Return the exit code of a process that reads or writes guarded memory."""
    start = """
        import ctypes, sys, torch
        from pagetwin.conformance.candidates.guard.guard_pages import PAGE, guarded, guarded_rows

        def byte(tensor, offset):
            return ctypes.string_at(tensor.data_ptr() + offset, 1)
        """
    source = textwrap.dedent(start) + textwrap.dedent(code) + "\nsys.exit(7)\n"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, check=False
    )
    return done.returncode


@pytest.mark.parametrize("count", [1, 5, PAGE // 4, PAGE // 4 + 1])
def test_a_guarded_tensor_has_the_numbers_and_ends_at_a_page(count: int) -> None:
    tensor = torch.arange(float(count))
    copy = guarded(tensor)
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
    assert (copy.data_ptr() + copy.nbytes) % PAGE == 0


def test_shapes_and_dtypes_are_kept_and_strides_are_packed() -> None:
    tensor = torch.arange(12, dtype=torch.int16).view(3, 4).T
    copy = guarded(tensor)
    assert torch.equal(copy, tensor) and copy.is_contiguous()
    assert copy.dtype == torch.int16


def test_what_cannot_be_guarded_is_returned_as_it_is() -> None:
    for tensor in (torch.zeros(0, 3), torch.zeros(2, device="meta")):
        assert guarded(tensor) is tensor


@pytest.mark.parametrize("count", [3, 5000])
def test_the_byte_after_a_guarded_tensor_ends_the_process(count: int) -> None:
    make = f"copy = guarded(torch.ones({count}, dtype=torch.uint8))\n"
    assert run(f"{make}byte(copy, 0); byte(copy, {count - 1})") == 7
    assert run(f"{make}byte(copy, {count})") == SEGMENTATION_FAULT
    assert run(f"{make}byte(copy, {count} + PAGE - 1)") == SEGMENTATION_FAULT


def test_a_write_after_a_guarded_tensor_ends_the_process() -> None:
    code = "copy = guarded(torch.ones(3, dtype=torch.uint8))\n"
    assert run(code + "ctypes.memset(copy.data_ptr() + 3, 0, 1)") == SEGMENTATION_FAULT


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("used", [1, 3])
def test_guarded_rows_have_their_first_entries(used: int, dtype: torch.dtype) -> None:
    rows = torch.arange(15, dtype=dtype).view(3, 5)
    table = guarded_rows(rows, used)
    assert table.shape == rows.shape and table.stride(1) == 1
    assert torch.equal(table[:, :used], rows[:, :used])
    for row in range(3):
        assert (table[row].data_ptr() + used * dtype.itemsize) % PAGE == 0


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_entry_after_the_used_ones_of_a_row_ends_the_process(row: int) -> None:
    make = "table = guarded_rows(torch.arange(15, dtype=torch.int32).view(3, 5), 2)\n"
    assert run(f"{make}table[{row}, 1].item()") == 7
    assert run(f"{make}table[{row}, 2].item()") == SEGMENTATION_FAULT


def test_rows_longer_than_a_page_are_rejected() -> None:
    assert guarded_rows(torch.zeros(1, PAGE // 4, dtype=torch.int32), 1).shape[1] > 999
    with pytest.raises(ValueError, match=f"columns = {PAGE // 4 + 1}"):
        guarded_rows(torch.zeros(1, PAGE // 4 + 1, dtype=torch.int32), 1)


def test_an_error_of_the_cuda_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """A driver whose only function returns its argument."""

        @staticmethod
        def cuMemMap(code: int) -> int:
            return code

    monkeypatch.setattr(guard_pages, "_driver", Driver)
    guard_pages._call("cuMemMap", 0)
    with pytest.raises(
        RuntimeError, match="cuMemMap of the CUDA driver returned error 2"
    ):
        guard_pages._call("cuMemMap", 2)

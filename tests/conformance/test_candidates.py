"""Candidates: what is loaded as one, which errors are fatal, and laws as tests of pytest."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.api.pytest_support import LawToTry
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.fatal import (
    fatal_status,
    is_context_lost,
    message_of,
)
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.limits import check_needs_no_gpu

REFERENCE = load_candidate("reference")
CUDA = torch.device("cuda")


# loading


def test_what_is_not_a_candidate_is_named(write_module: Callable[[str], str]) -> None:
    for name, error, words in (
        (write_module("x = 1\n"), ValueError, "has none of the operations"),
        (
            write_module("SUPPORT = {}\ndef blocks_needed(n, size): ...\n"),
            ValueError,
            "expected a pagetwin.conformance.Support",
        ),
        ("missing.py", ModuleNotFoundError, "the file does not exist"),
        (
            "no_such_kernels",
            ModuleNotFoundError,
            "module no_such_kernels was not found",
        ),
    ):
        with pytest.raises(error, match=words):
            load_candidate(name)


def test_an_import_that_is_missing_in_a_module_is_not_the_module(
    write_module: Callable[[str], str],
) -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"^No module named 'no_such_library'"
    ):
        load_candidate(write_module("import no_such_library\n"))


def test_operations_that_are_not_declared_are_left_out(
    write_module: Callable[[str], str], guarded_calls: None
) -> None:
    name = write_module(
        "from pagetwin.conformance import Support\n"
        "SUPPORT = Support(operations=['blocks_needed'])\n"
        "def blocks_needed(n, size): return 7\n"
        "def paged_attention(*given): return 8\n"
    )
    candidate = load_candidate(f"{name}.py")
    assert set(candidate.operations) == {"blocks_needed"} and candidate.is_guarded
    assert candidate.blocks_needed(5, 4) == 7 and candidate.calls == 1
    assert not REFERENCE.is_guarded


# fatal errors


def test_failed_allocations_are_fatal_and_other_errors_are_not() -> None:
    for error in (MemoryError("full"), torch.OutOfMemoryError("full")):
        assert fatal_status(error, None) == Status.OUT_OF_MEMORY
    assert fatal_status(ValueError("rows"), torch.device("cpu")) is None


def test_an_error_after_which_no_call_succeeds_is_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert is_context_lost(CUDA) and not is_context_lost(torch.device("cpu"))
    assert not is_context_lost(None)
    assert fatal_status(ValueError("rows"), CUDA) == Status.CRASHED


def test_an_error_is_one_line() -> None:
    assert message_of(KeyError("a")) == "KeyError: 'a'"
    assert message_of(ValueError("first\nsecond")) == "ValueError: first"
    assert len(message_of(ValueError("x" * 900))) == 500


# a kernel that needs a GPU, and laws as tests


def result(status: Status, **given: Any) -> Result:
    return Result("a law", "area", status, **given)


def test_a_kernel_that_needs_a_gpu_is_not_judged_on_a_cpu() -> None:
    def worker_of(own: Result) -> Any:
        return SimpleNamespace(try_law=lambda job, area: own, implementation="own")

    for own in (
        result(Status.HELD),
        result(Status.BROKEN, message="ValueError: rows"),
        result(Status.HELD, message="cuda"),
    ):
        check_needs_no_gpu(worker_of(own))
    gpu = result(Status.BROKEN, message="RuntimeError: no NVIDIA driver")
    with pytest.raises(ValueError, match="own needs a GPU"):
        check_needs_no_gpu(worker_of(gpu))


def try_as_test(own: Result, reason: str | None = None) -> Result:
    """Return the result of a law that pytest runs."""
    worker: Any = SimpleNamespace(
        try_law=lambda job, area: own, device="cpu", implementation="own"
    )
    law = Law("a law", "area", (), (1,), lambda setting, case: None)
    return LawToTry(law, worker, 0, 5, reason)()


@pytest.mark.parametrize("status", Status)
def test_the_test_of_a_law_fails_is_skipped_or_passes(status: Status) -> None:
    if status == Status.HELD:
        assert try_as_test(result(status)).status == status
    elif status == Status.OUTSIDE:
        with pytest.raises(pytest.skip.Exception, match="outside of what is declared"):
            try_as_test(result(status))
    elif status == Status.KNOWN:
        with pytest.raises(pytest.xfail.Exception):
            try_as_test(result(Status.BROKEN), "why")
    else:
        with pytest.raises(pytest.fail.Exception, match=f"a law: {status}"):
            try_as_test(result(status))

"""Candidates: what is loaded as one, what is fatal, and verdicts on batches of a signature."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.api import check as runner
from pagetwin.conformance.api.check import check_implementation, with_known
from pagetwin.conformance.api.pytest_support import LawToTry
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.candidates.fatal import (
    fatal_status,
    is_context_lost,
    message_of,
)
from pagetwin.conformance.cases.signatures import SMALL, draw_signature
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.screening import screen
from pagetwin.conformance.running.trial import find_law, make_setting
from pagetwin.contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from torch import Tensor

REFERENCE = load_candidate("reference")
PAGED = "paged attention is right for every batch of a signature"
SLOTS = "every new token gets the slot of its block table row"
RIGHT = REFERENCE.operations["paged_attention"]
CUDA = torch.device("cuda")
SEED = next(
    seed
    for seed in range(999)
    if draw_signature(seed, SMALL, "paged_attention").choice["out"] == "made"
)
"""A signature whose outputs have the dtype of the queries."""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that writes a module in the current folder, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(text: str) -> str:
        number = len(list(tmp_path.iterdir()))
        name = f"loaded_{tmp_path.name}_{number}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write_module


# loading


def test_what_is_not_a_candidate_is_named(write: Callable[[str], str]) -> None:
    for name, error, words in (
        (write("x = 1\n"), ValueError, "has none of the operations"),
        (
            write("SUPPORT = {}\ndef blocks_needed(n, size): ...\n"),
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
    write: Callable[[str], str],
) -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"^No module named 'no_such_library'"
    ):
        load_candidate(write("import no_such_library\n"))


def test_operations_that_are_not_declared_are_left_out(
    write: Callable[[str], str], guarded_calls: None
) -> None:
    name = write(
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


# known failures and numbers


def result(status: Status, **given: Any) -> Result:
    return Result("a law", "area", status, **given)


def test_a_known_failure_is_known_until_it_holds() -> None:
    for status, changed in (
        (Status.BROKEN, Status.KNOWN),
        (Status.CRASHED, Status.KNOWN),
        (Status.HELD, Status.UNEXPECTED),
        (Status.OUTSIDE, Status.UNEXPECTED),
        (Status.UNFINISHED, Status.UNFINISHED),
    ):
        assert with_known(result(status), "why").status == changed
        assert with_known(result(status), None).status == status
    assert with_known(result(Status.BROKEN), "why").reason == "why"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"examples": 0}, "examples = 0: expected at least 1"),
        ({"signatures": -1}, "signatures = -1: expected 0 for any"),
        ({"workers": 2, "isolated": False}, "workers = 2 with isolated = False"),
        ({"known_failures": {"no law": "-"}}, "expected sentences of laws"),
    ],
)
def test_numbers_of_a_check_are_in_range(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_implementation("reference", SLOTS, device="cpu", **given)


def test_a_kernel_that_needs_a_gpu_is_not_judged_on_a_cpu() -> None:
    def worker_of(own: Result) -> Any:
        return SimpleNamespace(try_law=lambda job, area: own, implementation="own")

    for own in (
        result(Status.HELD),
        result(Status.BROKEN, message="ValueError: rows"),
        result(Status.HELD, message="cuda"),
    ):
        runner._check_needs_no_gpu(worker_of(own))
    gpu = result(Status.BROKEN, message="RuntimeError: no NVIDIA driver")
    with pytest.raises(ValueError, match="own needs a GPU"):
        runner._check_needs_no_gpu(worker_of(gpu))


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


# batches of a signature


def changed(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return attention whose right output a function changes."""

    def attend(*, options: AttentionOptions = DEFAULT_OPTIONS, **given: Any) -> Any:
        return change(RIGHT(options=options, **given))

    return attend


def screened(attention: Callable[..., Any], count: int = 3, **given: Any) -> Result:
    """Return the result of some batches of one signature."""
    support = given.pop("support", Support())
    operations = {"paged_attention": attention} if attention is not None else {}
    setting = make_setting(Candidate("own", operations, support), "cpu")
    return screen(find_law(PAGED), setting, SEED, 0, count, **given)


def test_batches_that_are_right_hold() -> None:
    found = screened(RIGHT)
    assert (found.status, found.cases, found.skipped) == (Status.HELD, 3, 0)
    assert found.details["counts"]["requests"] > 0


def test_a_missing_operation_has_no_batch() -> None:
    nothing: Any = None
    assert screened(nothing).status == Status.MISSING
    other = Support(operations=["blocks_needed"])
    assert screened(nothing, support=other).status == Status.OUTSIDE


def test_a_wrong_batch_is_judged_by_its_law() -> None:
    found = screened(changed(lambda out: out.add_(0.1)))
    assert (found.status, found.what) == (Status.BROKEN, "output")
    assert found.case.startswith("SignedBatch(")
    assert found.cases >= 1 and "signature" in found.details


def test_nan_and_errors_are_wrong_batches() -> None:
    def error(**given: Any) -> Any:
        raise ValueError("rows")

    found = screened(changed(lambda out: out.mul_(torch.nan)))
    assert (found.status, found.found) == (Status.BROKEN, "nan")
    found = screened(error)
    assert found.status == Status.BROKEN and found.message == "ValueError: rows"


def test_a_batch_that_is_wrong_once_depends_on_the_calls_before_it() -> None:
    calls: list[int] = []

    def wrong_once(out: Tensor) -> Tensor:
        calls.append(1)
        return out.add_(1.0 * (len(calls) == 2))

    found = screened(changed(wrong_once))
    assert found.status == Status.BROKEN
    assert "the result depends on earlier calls or on timing" in found.message


def test_a_failed_allocation_names_its_batch() -> None:
    def full(**given: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    found = screened(full)
    assert found.status == Status.OUT_OF_MEMORY and found.case.startswith(
        "SignedBatch("
    )


def test_the_first_batch_is_tried_though_the_time_is_over() -> None:
    found = screened(RIGHT, seconds=0.0)
    assert (found.status, found.cases) == (Status.UNFINISHED, 1)

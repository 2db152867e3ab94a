"""Screening: which batches are tried, and which calls are not judged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import (
    Candidate,
    OutsideSupport,
    Support,
)
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.cases.rank_signatures import (
    draw_rank_batch,
    draw_rank_signature,
)
from pagetwin.conformance.cases.ranks import GATHER, RING, STEP
from pagetwin.conformance.cases.signatures import (
    LARGE,
    SMALL,
    draw_batch,
    draw_signature,
)
from pagetwin.conformance.running import screening
from pagetwin.conformance.running.screening import (
    MOST_RESERVED,
    ContextLostError,
    screen,
    signature_of,
)
from screened_calls import FIRST, LAW, break_alone, failing, setting_of

CUDA = torch.device("cuda")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Make the law alone break on each batch, and return how it was asked."""
    return break_alone(monkeypatch)


# the device


@pytest.mark.parametrize(
    ("device", "reserved", "count"),
    [("cuda", MOST_RESERVED + 1, 1), ("cuda", MOST_RESERVED, 0), ("cpu", 2**40, 0)],
)
def test_much_memory_that_the_allocator_of_a_gpu_keeps_is_returned(
    monkeypatch: pytest.MonkeyPatch, device: str, reserved: int, count: int
) -> None:
    emptied = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    screening.release_memory(torch.device(device))
    assert len(emptied) == count


def test_memory_is_returned_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = []
    monkeypatch.setattr(screening, "release_memory", lambda device: events.append(""))
    screen(LAW, setting_of(), 0, 0, 1, at=lambda case, held: events.append(case))
    assert events == ["", repr(FIRST)]


def test_kernels_of_a_gpu_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    screening.wait_for_kernels(torch.device("cpu"))
    assert not waits
    screening.wait_for_kernels(CUDA)
    assert len(waits) == 1


@pytest.mark.parametrize(("waits_for_each", "waits"), [(False, 0), (True, 3)])
def test_calls_do_not_wait_for_their_kernels_unless_each_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, waits_for_each: bool, waits: int
) -> None:
    count = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: count.append(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    setting = setting_of()
    setting = replace(setting, candidate=setting.candidate.on(CUDA))
    found = screen(LAW, setting, 0, 0, 3, waits_for_each=waits_for_each)
    assert found.status == Status.HELD and len(count) == waits


# what is drawn


def test_signatures_of_a_gpu_are_larger_and_those_of_ranks_have_ranks() -> None:
    own = setting_of()
    assert signature_of(LAW, own, 3) == draw_signature(3, SMALL)
    assert signature_of(LAW, replace(own, device=CUDA), 3) == draw_signature(3, LARGE)
    one_size = setting_of(support=Support(block_sizes=[48]))
    assert signature_of(LAW, one_size, 3).block_size == 48
    for operation in (STEP, GATHER, RING):
        found = signature_of(replace(LAW, needs=(operation,)), own, 3)
        assert found == draw_rank_signature(3, SMALL, operation)


def test_batches_begin_with_the_first_index() -> None:
    for signature, draw in (
        (draw_signature(0, SMALL), draw_batch),
        (draw_rank_signature(0, SMALL, GATHER), draw_rank_batch),
    ):
        found = list(screening._until(torch.inf, signature, 7, 2))
        assert found == [draw(signature, 7), draw(signature, 8)]
    prompts = draw_rank_signature(0, SMALL, GATHER)
    assert draw_batch(prompts, 7) != draw_rank_batch(prompts, 7)


def test_batches_are_fitted_to_the_support_and_told_as_they_are_called() -> None:
    own = setting_of(support=Support(query_lens=range(1, 3)))
    told: list[str] = []
    screen(LAW, own, 2, 0, 8, at=lambda case, held: told.append(case))
    signature = signature_of(LAW, own, 2)
    drawn = [draw_batch(signature, index) for index in range(8)]
    assert told == [repr(screening._fitted(batch, own)) for batch in drawn]
    assert told != [repr(batch) for batch in drawn]


def test_held_batches_are_told_after_their_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(screening, "CALLS_AT_ONCE", 2)
    told: list[int] = []
    screen(LAW, setting_of(), 0, 0, 5, at=lambda case, held: told.append(held))
    assert told == [0, 0, 2, 2, 4]


def test_a_group_has_64_calls_without_their_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = []

    def shares(setting: Setting, ran: list[Any]) -> torch.Tensor:
        groups.append(ran)
        return torch.zeros(len(ran))

    monkeypatch.setattr(screening, "_shares", shares)
    screen(LAW, setting_of(), 0, 0, 65)
    assert [len(group) for group in groups] == [64, 1]
    names = {name for _, built, _ in groups[0] for name in built.call.arguments}
    assert "block_table" in names and not names & {"key_cache", "value_cache"}


# calls that are not judged


def test_an_operation_that_is_missing_is_named_and_nothing_is_tried() -> None:
    law = replace(LAW, needs=(*LAW.needs, "other", "third"))
    found = screen(law, setting_of(), 0, 0, 3)
    assert (found.status, found.cases) == (Status.MISSING, 0)
    assert found.reason == "own has no other, third"
    undeclared = Candidate("own", {}, Support(operations=["blocks_needed"]))
    setting = replace(setting_of(), candidate=undeclared)
    assert screen(LAW, setting, 0, 0, 3).status == Status.OUTSIDE


def test_the_first_batch_is_tried_though_the_time_is_over() -> None:
    found = screen(LAW, setting_of(), 0, 0, 3, seconds=0.0)
    assert (found.status, found.cases) == (Status.UNFINISHED, 1)


def test_skipped_batches_are_counted_and_three_reasons_are_given() -> None:
    every = [OutsideSupport(f"needs {word}") for word in "edcba"]
    found = screen(LAW, setting_of(failing(every)), 0, 0, 5)
    assert (found.status, found.cases, found.skipped) == (Status.OUTSIDE, 5, 5)
    assert found.reason == "needs a; needs b; needs c"
    some = failing([None, OutsideSupport("needs more"), None])
    found = screen(LAW, setting_of(some), 0, 0, 3)
    assert (found.status, found.cases, found.skipped) == (Status.HELD, 3, 1)
    assert found.reason == "needs more"


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_error_after_which_the_context_is_lost_is_a_crash_of_its_batch(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr(screening, "is_context_lost", lambda device: is_lost)
    attend = failing([None, None, RuntimeError("CUDA error\nmore"), None, None])
    setting = setting_of(attend, Support(query_lens=range(1, 3)))
    told: list[str] = []
    found = screen(LAW, setting, 7, 0, 5, at=lambda case, held: told.append(case))
    # a group ends with the error, so no call comes after it
    assert found.cases == 3 == len(told) and found.case == told[-1]
    assert found.status == (Status.CRASHED if is_lost else Status.BROKEN)
    if is_lost:
        assert found.message == "RuntimeError: CUDA error"


def test_an_error_of_the_oracle_is_a_crash_only_if_the_context_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shares(*given: Any) -> Any:
        raise RuntimeError("of a kernel")

    monkeypatch.setattr(screening, "_shares", shares)
    with pytest.raises(RuntimeError, match="of a kernel"):
        screen(LAW, setting_of(), 0, 0, 2)
    monkeypatch.setattr(screening, "is_context_lost", lambda device: True)
    found = screen(LAW, setting_of(), 0, 0, 2)
    assert found.status == Status.CRASHED
    assert found.case == repr(draw_batch(draw_signature(0, SMALL), 1))


def test_the_message_of_a_lost_context_is_short() -> None:
    assert len(str(ContextLostError("case", ValueError("x" * 999)))) == 500

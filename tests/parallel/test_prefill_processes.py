"""Prefills on process groups, gathered and in a ring: gloo, also with killed processes."""

import os
import pickle
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from pagetwin.conformance.laws.parallel_step import bits
from pagetwin.conformance.laws.prefill_parallel import Prompts, in_order, run_rank
from pagetwin.engine.rank_group import RankError, RankGroup
from support.rank_processes import (
    LIMIT_S,
    RankProcesses,
    assert_others_name_rank_1,
    end_this_process,
    setting_of,
)

GATHER, RING = "PrefillContextParallel", "RingContextParallel"


def prefill_of_a_rank(
    ranks: RankGroup, twin: str, prompts: Prompts, late: int = -1
) -> bytes:
    """Return the tokens, rows and log-sum-exps of a rank.

    Args:
        late: The rank that begins half a second after the others. -1: none.
    """
    if ranks.rank == late:
        time.sleep(0.5)
    setting = setting_of(twin)
    call = prompts.call(setting.device)
    found = run_rank(setting, prompts, call, ranks)
    return pickle.dumps(tuple(tensor.cpu() for tensor in found))


def joined(found: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and log-sum-exps of all tokens."""
    errors = [result for result in found if isinstance(result, Exception)]
    assert not errors, errors[0]
    return in_order([pickle.loads(result) for result in found])


@pytest.mark.extended
@pytest.mark.parametrize("operation", [GATHER, RING])
@pytest.mark.parametrize("name", ["reference", "optimized"])
def test_prefills_of_several_processes_are_those_of_one(
    processes: RankProcesses, name: str, operation: str
) -> None:
    for ranks in (1, 2, 4, 8) if operation == RING else (2, 8):
        prompts = Prompts((37, 3, 20), ranks, "sinks", (20, 2, 0), operation=operation)
        answer = prompts.call(torch.device("cpu")).answer()
        out, lse = joined(processes.run(ranks, prefill_of_a_rank, name, prompts))
        torch.testing.assert_close(out.double(), answer.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), answer.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("operation", [GATHER, RING])
def test_a_process_that_is_late_changes_no_bit_of_a_prefill(
    processes: RankProcesses, operation: str
) -> None:
    prompts = Prompts((37, 3, 20), 4, "plain", (20, 2, 0), operation=operation)
    seen = [
        joined(processes.run(4, prefill_of_a_rank, "reference", prompts, late))
        for late in (-1, 0, 3)
    ]
    for out, lse in seen[1:]:
        assert torch.equal(bits(out), bits(seen[0][0]))
        assert torch.equal(bits(lse), bits(seen[0][1]))


def shift_before_the_other(ranks: RankGroup) -> list[float]:
    """Start a shift, on rank 1 only after rank 0 has started its own. Return what arrives."""
    own, other = torch.full((4,), float(ranks.rank)), torch.zeros(4)
    if ranks.rank == 1:
        ranks.store.wait(["started"], timedelta(seconds=40))
    finish = ranks.start_shift(own, other)
    ranks.store.set("started", "1")
    return finish().tolist()


@pytest.mark.extended
def test_a_rank_computes_while_its_share_is_on_the_way(
    processes: RankProcesses,
) -> None:
    """A start that waited for the other rank would not return before that rank's time is over."""
    assert processes.run(2, shift_before_the_other) == [[1.0] * 4, [0.0] * 4]


def prefill_with_a_failing_rank(
    ranks: RankGroup, twin: str, failure: str
) -> tuple[RankError | None, float]:
    """Make three steps; return the error of one of them, and after how many seconds it was raised.

    Rank 1 fails in the second one, after the ranks have agreed on it.

    Args:
        failure: "killed", "late" or "another dtype".
    """
    # the optimized twin compares shapes only if contents are validated
    os.environ["PAGETWIN_CHECK_VALUES"] = "1"
    setting = setting_of(twin)
    ring: Any = getattr(setting.candidate, RING)(ranks, device=setting.device)
    for number in range(3):
        share = ring.prepare([24, 9])
        is_failing = ranks.rank == 1 and number == 1
        dtype = torch.float32
        if number == 1:
            ranks.timeout = LIMIT_S
        if is_failing and failure == "killed":
            end_this_process()
        if is_failing and failure == "late":
            time.sleep(3 * LIMIT_S)
        if is_failing and failure == "another dtype":
            dtype = torch.float16
        ones = torch.ones(len(share.tokens), 2, 16, dtype=dtype, device=setting.device)
        begin = time.monotonic()
        try:
            ring.attend(ones, ones, ones, share)
        except RankError as error:
            return error, time.monotonic() - begin
    return None, 0.0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "failure"),
    [("reference", "killed"), ("optimized", "killed"), ("reference", "late")],
)
def test_all_ranks_of_a_ring_raise_within_the_time_limit_if_one_does_not_answer(
    three: RankProcesses, name: str, failure: str
) -> None:
    found = three.run(3, prefill_with_a_failing_rank, name, failure)
    assert_others_name_rank_1(found, 2)
    if failure == "killed":
        assert found[1] is None
    else:
        assert isinstance(found[1][0], RankError)


def end_during_a_round(ranks: RankGroup) -> tuple[RankError | None, float]:
    """Shift twice; rank 1 ends while the second one is on the way."""
    ranks.begin_step()
    held, other = torch.ones(1 << 16), torch.zeros(1 << 16)
    held, other = ranks.start_shift(held, other)(), held
    ranks.timeout = LIMIT_S
    if ranks.rank == 1:
        end_this_process()
    begin = time.monotonic()
    try:
        # what rank 2 has to pass on is that of rank 1
        for _ in range(2):
            held, other = ranks.start_shift(held, other)(), held
    except RankError as error:
        return error, time.monotonic() - begin
    return None, 0.0


@pytest.mark.extended
def test_a_rank_that_ends_between_two_rounds_is_named_by_all_others(
    three: RankProcesses,
) -> None:
    found = three.run(3, end_during_a_round)
    assert_others_name_rank_1(found, 1)
    assert "send to rank 1, receive from 2" in str(found[0][0])
    assert "send to rank 0, receive from 1" in str(found[2][0])


@pytest.mark.extended
@pytest.mark.parametrize("name", ["reference", "optimized"])
def test_ranks_of_a_ring_with_other_dtypes_all_raise_and_name_them(
    three: RankProcesses, name: str
) -> None:
    found = three.run(3, prefill_with_a_failing_rank, name, "another dtype")
    for rank, (error, _) in enumerate(found):
        assert isinstance(error, RankError), error
        assert f"rank {rank} of 3" in str(error)
        assert "key_dtype = 'torch.float16' on rank 1" in str(error)

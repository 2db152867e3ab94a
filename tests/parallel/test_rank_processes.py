"""The parallel step on process groups: gloo, one to eight processes, also killed ones."""

import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.candidates.calls.calling import expect_right
from pagetwin.conformance.candidates.calls.ranks import run_ranks
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.laws.dcp_attention import Dealt
from pagetwin.conformance.laws.parallel_step import (
    BITS,
    Found,
    Shared,
    bits,
    prepare,
    run_all,
    run_rank,
    whole_call,
)
from pagetwin.contract.operations import load_implementation
from pagetwin.contract.parallel import KeySplits
from pagetwin.engine.rank_group import RankError, RankGroup
from support.rank_processes import (
    LIMIT_S,
    RankProcesses,
    assert_others_name_rank_1,
    end_this_process,
    setting_of,
)

BATCH = Dealt(
    (1, 2, 0, 1), (37, 20, 3, 1), 1, 2, "sinks", (36, 0, -1, 0), group=8, padding=1
)


def step_of_a_rank(
    ranks: RankGroup, twin: str, shared: Shared, late: int = -1
) -> bytes:
    """Return the rows and log-sum-exps of a rank.

    Args:
        late: The rank that begins half a second after the others. -1: none.
    """
    if ranks.rank == late:
        time.sleep(0.5)
    setting = setting_of(twin)
    whole = whole_call(shared.dealt, setting.device)
    found: Found = run_rank(setting, shared, whole, ranks)
    return pickle.dumps((found.out.cpu(), found.lse.cpu()))


def joined(found: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and log-sum-exps of all ranks' heads."""
    for result in found:
        if isinstance(result, Exception):
            raise result
    parts = [pickle.loads(result) for result in found]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat(
        [lse for _, lse in parts]
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    "exchange",
    ["all_to_all", pytest.param("reduce_scatter", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("name", ["reference", "optimized"])
def test_ranks_of_a_process_group_compute_what_one_rank_computes(
    processes: RankProcesses, name: str, exchange: str
) -> None:
    whole = whole_call(BATCH, torch.device("cpu"))
    answer = whole.answer()
    for ranks in (1, 2, 4, 8):
        shared = Shared(replace(BATCH, ranks=ranks), exchange)
        out, lse = joined(processes.run(ranks, step_of_a_rank, name, shared))
        torch.testing.assert_close(out.double(), answer.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), answer.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["reference", "optimized"])
def test_fixed_splits_give_the_bits_of_one_process_on_two_to_eight(
    processes: RankProcesses, name: str
) -> None:
    seen = []
    for ranks, in_a_row in ((1, 1), (2, 4), (4, 2), (8, 1)):
        dealt = replace(BITS[0], ranks=ranks, in_a_row=in_a_row)
        shared = Shared(dealt, splits=(8, 1))
        out, lse = joined(processes.run(ranks, step_of_a_rank, name, shared))
        seen.append((bits(out), bits(lse)))
    for out, lse in seen:
        assert torch.equal(out, seen[0][0])
        assert torch.equal(lse, seen[0][1])


@pytest.mark.long
def test_a_process_that_is_late_changes_no_bit_of_a_step(
    processes: RankProcesses,
) -> None:
    shared = Shared(replace(BATCH, ranks=4))
    seen = [
        joined(processes.run(4, step_of_a_rank, "reference", shared, late))
        for late in (-1, 0, 3)
    ]
    for out, lse in seen[1:]:
        assert torch.equal(bits(out), bits(seen[0][0]))
        assert torch.equal(bits(lse), bits(seen[0][1]))


def step_with_a_failing_rank(
    ranks: RankGroup, twin: str, failure: str
) -> tuple[RankError | None, float]:
    """Make three steps; return the error of one of them, and after how many seconds it was raised.

    Rank 1 fails in the second one.

    Args:
        failure: "killed", "late", "absent", "another batch", "another cache", "another exchange" or
            "another torch".
    """
    # the optimized twin compares batches only if contents are validated
    os.environ["PAGETWIN_CHECK_VALUES"] = "1"
    setting = setting_of(twin)
    dealt = replace(BATCH, ranks=3, group=3, kind="plain")
    whole = whole_call(dealt, setting.device)
    given = dealt.share(whole, ranks.rank).arguments
    heads = whole.query.shape[1] // 3
    is_failing = ranks.rank == 1
    exchange = "all_to_all"
    if is_failing and failure == "another exchange":
        exchange = "reduce_scatter"
    if is_failing and failure == "another torch":
        vars(torch)["__version__"] = "0.1+cpu"
    step = setting.candidate.DecodeContextParallel(
        ranks, num_query_heads=heads, head_size=16, max_num_tokens=9,
        interleave_size=2, exchange=exchange, device=setting.device,
    )  # fmt: skip
    for number in range(3):
        changes: dict[str, Any] = {}
        if number == 1:
            ranks.timeout = LIMIT_S
        if is_failing and number == 1:
            if failure == "killed":
                end_this_process()
            if failure == "late":
                time.sleep(3 * LIMIT_S)
            if failure == "absent":
                # it goes on with its next step when the others have given up
                time.sleep(3 * LIMIT_S)
                continue
            if failure == "another batch":
                changes["seq_lens"] = given["seq_lens"] - 1
                changes["query_start_loc"] = given["query_start_loc"] * 0
            if failure == "another cache":
                changes["key_cache"] = given["key_cache"].repeat(1, 1, 2, 1)
        begin = time.monotonic()
        try:
            batch = prepare(step, given, **changes)
            query = whole.query[:, ranks.rank * heads :][:, :heads]
            step.attend(query, given["key_cache"], given["value_cache"], batch)
        except RankError as error:
            return error, time.monotonic() - begin
    return None, 0.0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("reference", "killed"),
        ("optimized", "killed"),
        pytest.param("reference", "late", marks=pytest.mark.long),
        pytest.param("reference", "absent", marks=pytest.mark.long),
        pytest.param("optimized", "absent", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_does_not_answer_is_named_by_all_others_within_the_time_limit(
    three: RankProcesses, name: str, failure: str
) -> None:
    found = three.run(3, step_with_a_failing_rank, name, failure)
    assert_others_name_rank_1(found, 2, "no report from rank 1")
    if failure == "killed":
        assert found[1] is None
    else:
        assert isinstance(found[1][0], RankError)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "failure", "differs"),
    [
        ("reference", "another exchange", "exchange = "),
        ("reference", "another torch", "torch = '0.1'"),
        ("optimized", "another batch", "query_start_loc"),
        ("optimized", "another cache", "block_shape = "),
    ],
)
def test_ranks_that_differ_all_raise_and_name_what_differs(
    three: RankProcesses, name: str, failure: str, differs: str
) -> None:
    found = three.run(3, step_with_a_failing_rank, name, failure)
    for rank, answer in enumerate(found):
        # the constructor raises if its arguments differ
        error = answer if isinstance(answer, Exception) else answer[0]
        assert isinstance(error, RankError), error
        assert f"rank {rank} of 3" in str(error) and differs in str(error)
        assert "on rank 1" in str(error)


def laws_of_several_gpus(ranks: RankGroup, twin: str) -> dict[str, Any]:
    """Return what `tests/gpu/parallel.py` says about a twin."""
    sys.path.append(str(Path(__file__).parents[1] / "gpu"))
    from parallel_job import Job
    from parallel_laws import hold_all

    job = Job({"gloo": ranks})
    hold_all(job, twin, "gloo", laws="")
    return job.found


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_laws_of_several_gpus_hold_on_processes_too(
    processes: RankProcesses, ranks: int
) -> None:
    for found in processes.run(ranks, laws_of_several_gpus, "reference"):
        assert "law: reference gloo heads" in found
        assert not [told for told in found.values() if "FAILED" in told["text"]]


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, 5, 6, 7, 8])
def test_the_steps_of_several_gpus_fit_any_number_of_them(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    from parallel_laws import steps_of

    setting = setting_of("reference")
    for shared in steps_of(ranks):
        whole = whole_call(shared.dealt, setting.device)
        found = run_all(setting, shared, whole)
        out = torch.cat([rank.out for rank in found], dim=1)
        lse = torch.cat([rank.lse for rank in found])
        expect_right(setting, whole, (out, lse), is_joined=True)


@pytest.mark.parametrize(
    "operation",
    ["DecodeContextParallel", "PrefillContextParallel", "RingContextParallel"],
)
def test_ranks_of_different_implementations_raise_before_they_exchange_anything(
    operation: str,
) -> None:
    """They exchange rows in other layouts, or make other collectives."""

    def work(ranks: RankGroup) -> str:
        twin = load_implementation(["reference", "optimized"][ranks.rank])
        sizes = (2, 16, 4) if operation == "DecodeContextParallel" else ()
        with pytest.raises(RankError) as raised:
            getattr(twin, operation)(ranks, *sizes)
        return str(raised.value)

    for rank, message in enumerate(run_ranks(2, work)):
        assert f"rank {rank} of 2" in message
        assert "implementation = 'pagetwin.optimized" in message


@pytest.mark.long
def test_a_group_that_has_failed_stays_unusable(three: RankProcesses) -> None:
    three.run(3, step_with_a_failing_rank, "reference", "another batch")
    for error in three.run(3, step_with_a_failing_rank, "reference", "none"):
        assert isinstance(error, RankError) and "unusable" in str(error)


def test_fixed_splits_whose_keys_are_on_several_ranks_are_rejected() -> None:
    twin = load_candidate("reference")
    ranks = RankGroup()
    ranks.world_size = 3
    with pytest.raises(ValueError, match=r"splits.count \* splits.run = 8"):
        twin.DecodeContextParallel(ranks, 1, 16, 1, splits=KeySplits(8))

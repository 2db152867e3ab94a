"""Tests of the Hopper latent decode kernel: supported calls, compiled code, combination."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compile_latent_sm90 import CASES, Case, make_call
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.latent import family as latent_family
from pagetwin.optimized.kernels.sm90.latent.combine import ROWS, latent_combine_kernel
from pagetwin.optimized.kernels.sm90.latent.config import RANK
from pagetwin.optimized.launch.attention_call import AttentionCall

SCRIPT = Path(__file__).parent / "compile_latent_sm90.py"
NAN = float("nan")


@pytest.mark.compile
def test_the_assembler_neither_spills_nor_serializes_wgmma(
    report_lines: Callable[..., None],
) -> None:
    """Each consumer carries 128 accumulator registers, so a spill would be in its mainloop."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(CASES)
    for line in lines:
        report_lines(
            f"sm_90   latent decode {line['case']:<60} {line['registers']:>3} registers"
            f" {line['spilled']:>4} bytes spilled {line['shared']:>7} bytes shared"
        )
        assert not line["warnings"], line
        assert line["shared"] <= 232448, line
        # the producer of four row boxes per tile may spill one register
        assert line["spilled"] <= 4, line


def _plan_is_made(call: AttentionCall) -> bool:
    try:
        latent_family.plan(call)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latent_decodes_are_planned(case: Case) -> None:
    """The kernel takes slices of a wider cache too."""
    assert _plan_is_made(make_call(case))
    call = make_call(case, 640)
    assert latent_family.plan(call).takes(call)
    assert latent_family.plan(call).kv_stride == 640


def test_what_the_kernel_does_not_compute_has_no_plan() -> None:
    """Other head sizes, more kv heads, values of another width, FP8, options."""
    call = make_call(CASES[0])
    key = call.key
    assert not _plan_is_made(call._replace(value=key[..., :256]))
    assert not _plan_is_made(call._replace(query=call.query[..., :512]))
    assert not _plan_is_made(call._replace(key=key.repeat(1, 1, 2, 1)))
    assert not _plan_is_made(call._replace(key=key.float(), value=key[..., :512]))
    assert not _plan_is_made(call._replace(key=key[:, :40], value=key[:, :40, :, :512]))
    for options in (
        AttentionOptions(causal=False),
        AttentionOptions(causal=True, sliding_window=8),
        AttentionOptions(causal=True, batch_invariant=True),
    ):
        assert not _plan_is_made(call._replace(options=options))


def test_a_plan_takes_only_values_that_are_the_first_columns_of_the_keys() -> None:
    """Addresses and lengths are not part of a signature."""
    call = make_call(CASES[0])
    plan = latent_family.plan(call)
    assert plan.takes(call)
    assert not plan.takes(call._replace(value=call.key[..., 64:]))
    assert not plan.takes(call._replace(scale=-1.0))
    assert not plan.takes(call._replace(max_query_len=9))


def test_partial_results_are_combined_by_their_log_sum_exp(
    device: torch.device,
) -> None:
    """Requests in one segment keep their rows; rows of no request are cleared."""
    torch.manual_seed(0)
    heads, lengths = 6, [1, 2, 1, 0, 3]
    # the third request is whole, the fourth has no queries and no span
    spans = [(0, 1), (1, 11), (11, 11), (7, 3), (12, 13)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens, rows = int(starts[-1]) + 2, 3 * heads
    partial = torch.full((14, 2, rows, RANK.value), NAN)
    partial_lse = torch.full((14, 2, rows), NAN)
    out = torch.full((tokens, heads, RANK.value), 7.0)
    lse = torch.full((heads, tokens), 7.0)
    expected, expected_lse = out.clone(), lse.clone()
    expected[starts[-1] :] = 0
    expected_lse[:, starts[-1] :] = -torch.inf
    for start, length, (first, last) in zip(starts, lengths, spans, strict=False):
        if not length or first == last:
            continue
        segment = torch.arange(first, last + 1)
        own = (segment, (segment == first).long(), slice(0, length * heads))
        values = torch.randn(len(segment), length * heads, RANK.value)
        sums = 3 * torch.randn(len(segment), length * heads)
        sums[0, 0] = -torch.inf  # a part whose keys are all masked
        partial[own], partial_lse[own] = values, sums
        sums = sums * math.log(2)
        mean = (values * sums.softmax(0)[..., None]).sum(0)
        expected[start : start + length] = mean.view(length, heads, -1)
        expected_lse[:, start : start + length] = (
            sums.logsumexp(0).view(length, heads).T
        )
    found, found_lse = out.to(device), lse.to(device)
    latent_combine_kernel[(len(lengths) + 1, -(-rows // ROWS.value), 1)](
        found, found_lse, partial.to(device), partial_lse.to(device),
        torch.tensor(spans, dtype=torch.int32, device=device),
        starts.int().to(device), len(lengths), heads, tokens, rows,
        *out.stride()[:2], *lse.stride(),
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(found_lse.cpu(), expected_lse)

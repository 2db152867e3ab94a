"""Portable latent attention, compiled: latents of 512 + 64 elements on a GPU.

The Hopper kernel is not used, so a Hopper chip runs what other chips run.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pagetwin.conformance.api.check import load_candidate, make_setting
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.conformance.laws import latents as laws
from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.dispatch.dispatch import PIPELINE
from pagetwin.optimized.kernels.portable.host.latent import FAMILY, PortableLatentPlan
from pagetwin.optimized.kernels.sm90.latent import family as sm90
from pagetwin.optimized.runtime.attention_call import AttentionCall
from pagetwin.optimized.runtime.family import Task
from support import sm90_calls
from support.latent_batches import BATCHES, LATENTS, assert_right, make_batch
from support.sm90_calls import check_captured, launched, planned
from support.twins import Twin
from torch import Tensor

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs compiled kernels"),
]
NAN = float("nan")
SEVERAL_REQUESTS = BatchPlan((1, 1, 2, 1), (900, 300, 1300, 64), needle="first")


def to_call(batch: BatchTensors, out: Tensor, lse: Tensor | None) -> AttentionCall:
    """Return the call that computes a batch, with the batch's own bound on keys."""
    call = sm90_calls.to_call(batch, out, lse)
    return call._replace(max_key_len=batch.max_seq_len)


def run(batch: BatchTensors) -> tuple[Tensor, Tensor]:
    """Launch the kernels into an output and a log-sum-exp full of NaN."""
    out, lse = batch.fresh()
    call = to_call(batch, out, lse)
    return launched(partial(planned(FAMILY, call).launch, call), out, lse)


@pytest.mark.parametrize("heads", [1, 8, 16, 40, 64, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_within_its_error_budget(
    name: str, heads: int, reference: Twin
) -> None:
    """Blocks that no request has, and the ends of last blocks, hold NaN."""
    batch = make_batch(replace(BATCHES[name], group=heads, dtype=torch.bfloat16))
    assert_right(batch, *run(batch), reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [16, 128])
def test_rows_of_other_dtypes_are_within_their_error_budgets(
    heads: int, dtype: torch.dtype, reference: Twin
) -> None:
    plan = replace(BATCHES["one to four query tokens"], group=heads, dtype=dtype)
    batch = make_batch(plan)
    assert_right(batch, *run(batch), reference)


@pytest.mark.parametrize("heads", [8, 64, 128])
def test_many_launches_in_a_row_give_the_same_bits(heads: int) -> None:
    """With the log-sum-exp and without it. The notes of split tiles are those of each launch."""
    plan = BATCHES["many splits of four tokens"]
    batch = make_batch(replace(plan, group=heads, dtype=torch.bfloat16))
    few = make_batch(replace(SEVERAL_REQUESTS, group=heads, dtype=torch.bfloat16))
    expected, expected_lse = run(batch)
    for has_lse in (True, False):
        out, lse = batch.fresh()
        call = to_call(batch, out, lse if has_lse else None)
        launch_plan = planned(FAMILY, call)
        for _ in range(20):
            out.fill_(NAN)
            launch_plan.launch(call)
            assert same_bits(out, expected)
            run(few)
        assert not has_lse or same_bits(lse, expected_lse)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_one_captured_launch_serves_other_lengths(heads: int, reference: Twin) -> None:
    plan = replace(SEVERAL_REQUESTS, group=heads, dtype=torch.bfloat16)
    batch = make_batch(plan)
    out, lse = run(batch)  # compiles
    call = to_call(batch, out, lse)
    launch = partial(planned(FAMILY, call).launch, call)
    launch()
    check = partial(assert_right, batch, out, lse, reference)
    check_captured(launch, batch, out, lse, check)


def test_repeated_calls_go_to_the_kernel_of_their_addresses(reference: Twin) -> None:
    """A call that differs in addresses alone repeats the recorded launches of an earlier one."""
    plan = replace(SEVERAL_REQUESTS, group=16, dtype=torch.bfloat16)
    batch = make_batch(plan)
    attend = load_implementation("optimized").paged_attention
    apart = batch.value_cache.clone(memory_format=torch.contiguous_format)
    wide = torch.cat([apart, batch.key_cache[..., 512:]], dim=3)[..., :512]
    for values in (batch.value_cache, wide) * 4:
        given = batch.arguments() | {"value_cache": values}
        expected = reference.paged_attention(**given)
        torch.testing.assert_close(attend(**given), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("needle", ["none", "first", "last", "tile edge"])
@pytest.mark.parametrize("heads", [3, 64, 128])
@pytest.mark.parametrize(
    "cache_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_the_laws_on_latents_hold_for_the_widths_of_models(
    cache_dtype: torch.dtype | None,
    heads: int,
    needle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The laws draw smaller widths."""
    made = []
    launch = PortableLatentPlan.launch

    def count(self: PortableLatentPlan, call: AttentionCall, *task: Task) -> None:
        made.append(call)
        launch(self, call, *task)

    monkeypatch.setattr(PortableLatentPlan, "launch", count)
    monkeypatch.setattr(sm90, "is_hopper", lambda device: False)
    PIPELINE.plans.clear()  # a call that was repeated would not be planned
    setting = make_setting(load_candidate("optimized"), "cuda")
    given: dict[str, Any] = {"heads": heads, "needle": needle}
    plan = replace(LATENTS, cache_dtype=cache_dtype, **given)
    for is_rope in (False, True):
        laws.a_needle_among_latents_is_found(
            setting, ("latent_decode_attention", replace(plan, is_rope=is_rope))
        )
    PIPELINE.plans.clear()
    assert len(made) == 2

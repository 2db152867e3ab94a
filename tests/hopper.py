"""Runs the kernels for Hopper in the Gluon interpreter, one launch plan at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from gluon_interpreter import interpret_gluon
from gluon_interpreter.kernels import Launches
from pagetwin.conformance.generators.batches import BatchPlan, BatchTensors, build
from pagetwin.conformance.oracles.dense import judge_attention, judge_lse
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90 import family as prefill
from pagetwin.optimized.kernels.sm90.append import family as append
from pagetwin.optimized.kernels.sm90.invariant import family as invariant
from pagetwin.optimized.kernels.sm90.latent import family as latent
from pagetwin.optimized.launch import cascade, dispatch, workspace
from pagetwin.optimized.launch.attention_call import AttentionCall
from torch import Tensor

FOLDERS = ("", "append.", "cascade.", "fp8_prefill.", "invariant.", "latent.")
FAMILIES = {
    "prefill": prefill,
    "append": append,
    "invariant": invariant,
    "latent": latent,
}
NAN = float("nan")


@contextmanager
def pretend_hopper(
    patch: pytest.MonkeyPatch, seed: int = 0, **options: float
) -> Iterator[Launches]:
    """Select the kernels for Hopper on the CPU, and interpret them.

    Args:
        seed, options: those of `interpret_gluon`.
    """
    for name in FOLDERS:
        module = import_module(f"pagetwin.optimized.kernels.sm90.{name}family")
        patch.setattr(module, "is_hopper", lambda device: True)
    # launches run one after another
    patch.setattr(triton.language.extra.cuda, "gdc_wait", lambda: None)
    _forget_plans()
    with interpret_gluon(seed, **options) as launches:
        yield launches
    _forget_plans()


def _forget_plans() -> None:
    """Forget launch plans and workspaces, which depend on the device."""
    dispatch.PLANS.clear()
    cascade.PLANS.clear()
    workspace.release_workspace()


class Case(NamedTuple):
    """A call of one family.

    Args:
        family: one of FAMILIES.
        plan: the batch. Head size 192 is that of queries and keys, with values of 128. A latent
            batch has queries and keys of 576 and values of 512.
        options: of the call; sinks are True or absent.
        has_lse: whether the log-sum-exp is wanted.
    """

    family: str
    plan: BatchPlan
    options: dict[str, Any] = {}  # noqa: RUF012 (it is never changed)
    has_lse: bool = True


def make_batch(case: Case) -> BatchTensors:
    """Return the tensors of a case."""
    plan = case.plan
    if case.family == "latent":
        plan = replace(
            plan, kv_heads=1, head_size=576, fused=False, layout="separate"
        )
    batch = build(plan)
    values = {576: 512, 192: 128}.get(plan.head_size)
    if values is None:
        return batch
    cache = batch.key_cache if case.family == "latent" else batch.value_cache
    return replace(batch, value_cache=cache[..., :values])


def make_options(case: Case, num_heads: int) -> AttentionOptions:
    """Return the options of a case, without batch invariance."""
    given = {"causal": True, **case.options}
    if "sinks" in given:
        given["sinks"] = torch.linspace(-3.0, 4.0, num_heads)
    return AttentionOptions(**given)


def launch(case: Case, batch: BatchTensors) -> tuple[Tensor, Tensor]:
    """Launch a case's kernels into an output and a log-sum-exp full of NaN."""
    tokens, heads, _ = batch.query.shape
    out = batch.query.new_full((tokens, heads, batch.value_cache.shape[-1]), NAN)
    lse = torch.full((heads, tokens), NAN)
    options = make_options(case, heads)
    if case.family == "invariant":
        options = replace(options, batch_invariant=True)
    plan = batch.plan
    call = AttentionCall(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.max_query_len,
        batch.max_seq_len,
        batch.query.shape[-1] ** -0.5 if plan.scale is None else plan.scale,
        out,
        lse if case.has_lse else None,
        options,
    )
    family = FAMILIES[case.family]
    assert family.supports(call)
    planned = family.plan(call)
    assert planned.takes(call)
    if case.family == "prefill":
        planned.launch_prefill(call, 0)
    else:
        planned.launch(call)
    return out, lse


def check(case: Case, reference: Any) -> tuple[Tensor, Tensor]:
    """Launch a case, and compare each row with float64 within its error budget.

    Raises:
        AssertionError: a row is not within its budget, or padding was not written as it should be.
    """
    batch = make_batch(case)
    out, lse = launch(case, batch)
    options = make_options(case, batch.query.shape[1])
    attend = partial(reference.paged_attention, options=options)
    if case.family == "prefill":
        # it leaves padding as it is
        assert bool(out[batch.tokens :].isnan().all())
        out[batch.tokens :], lse[:, batch.tokens :] = 0, -torch.inf
    verdict, exact_lse = judge_attention(
        batch, out, SimpleNamespace(paged_attention=attend)
    )
    assert verdict.ok, verdict
    if case.has_lse:
        share = judge_lse(batch, lse, exact_lse)
        assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"
        assert bool((lse[:, batch.tokens :] == -torch.inf).all())
    assert bool((out[batch.tokens :] == 0).all())
    return out, lse

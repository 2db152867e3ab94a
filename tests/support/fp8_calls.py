"""Calls of the FP8 kernels for Hopper on test batches, and the check of their rows."""

from dataclasses import replace
from typing import Any

import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, build
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.runtime.attention_call import AttentionCall
from torch import Tensor

from support import sm90_calls
from support.compile_fp8_decode_sm90 import E4M3
from support.sm90_calls import assert_rows_right
from support.twins import Twin


def make_batch(
    plan: BatchPlan, dtype: torch.dtype = E4M3, device: str = "cuda"
) -> BatchTensors:
    """Return a batch whose cache is in FP8: the numbers of the plan's own cache, rounded."""
    batch = build(replace(plan, layout="separate", value_layout=None), "cpu")
    caches = [cache.to(dtype) for cache in (batch.key_cache, batch.value_cache)]
    if "interleaved" in plan.layout:
        caches = list(torch.stack(caches, 1).unbind(1))
    if "hnd" in plan.layout:
        caches = [
            cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches
        ]
    moved = [_move(cache, device) for cache in caches]
    batch = batch.to(torch.device(device))
    return replace(batch, key_cache=moved[0], value_cache=moved[1])


def _move(cache: Tensor, device: str) -> Tensor:
    """Return FP8 numbers on a device, with the same strides and NaN between them."""
    extent = 1 + sum(
        (n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True)
    )
    base = torch.full((extent,), 0x7F, dtype=torch.uint8, device=device)
    moved = base.as_strided(cache.shape, cache.stride())
    moved.copy_(cache.view(torch.uint8))
    return moved.view(cache.dtype)


def make_options(batch: BatchTensors, **given: Any) -> AttentionOptions:
    """Return options with a scale per head, other ones for keys than for values.

    Args:
        given: of the options; `sinks` is the largest of the heads, or True for a usual one.
    """
    device, heads = batch.query.device, batch.plan.kv_heads
    if "sinks" in given:
        largest = 4.0 if given["sinks"] is True else given["sinks"]
        given["sinks"] = torch.linspace(
            -3.0, largest, batch.query.shape[1], device=device
        )
    scales = {
        "k_scale": torch.linspace(0.5, 1.25, heads, device=device),
        "v_scale": torch.linspace(3.0, 0.3, heads, device=device),
    }
    return AttentionOptions(**{"causal": True, **scales, **given})


def assert_right(
    batch: BatchTensors,
    out: Tensor,
    lse: Tensor,
    reference: Twin,
    options: AttentionOptions,
) -> None:
    """Assert that the rows of each token and head are within their error budgets."""
    values = batch.value_cache.view(torch.uint8)
    sizes = (values & 0x7F).view(batch.value_cache.dtype)
    assert_rows_right(batch, out, lse, reference, options, sizes)


def to_call(
    batch: BatchTensors, options: AttentionOptions, out: Tensor, lse: Tensor | None
) -> AttentionCall:
    """Return the call that computes a batch, with the batch's own bound on keys."""
    call = sm90_calls.to_call(batch, out, lse, options)
    return call._replace(max_key_len=batch.max_seq_len)

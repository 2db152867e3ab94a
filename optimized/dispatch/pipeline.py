"""The pipeline from a call to its launches: validate, plan, launch.

The first two steps happen once per signature: calls that differ only in what changes from step to
step share a launch plan. Nothing is read from the device, so every call can be captured in a CUDA
graph. Calls that differ in nothing but addresses, as those of a model's layers in one step, repeat
the recorded launches of one of them (runtime/repeat/calls.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...contract.cache_formats import head_size_of
from ...validation import values_checked
from ..kernels.portable.host.tuning import max_head_size
from ..runtime.attention_call import AttentionCall, round_key_bound, sign, sizes_fit
from ..runtime.launcher import RECORDING, check_launch
from ..runtime.plan_cache import PlanCache
from ..runtime.repeat.calls import Anew, repeat

Check: TypeAlias = Callable[[AttentionCall, int, bool], None]
"""Raises if a call or the prefix that its requests share is wrong. It validates contents too if it
is given True."""


@dataclass
class Pipeline:
    """How calls of one kind are planned and launched.

    Args:
        plans: launch plans by signature. A plan has the attributes `is_packed`, `upcasts_output`
            and `is_repeatable` of `AttentionPlan`.
        make_plan: returns the launch plan of all calls with a call's signature.
        launch: launches a call with its plan; the last argument is the length of the prefix.
    """

    plans: PlanCache[Any]
    make_plan: Callable[[AttentionCall], Any]
    launch: Callable[[Any, AttentionCall, int], None]

    def forget_plans(self) -> None:
        """Drop all plans. What a thread is planning meanwhile is not kept."""
        self.plans = self.plans.renewed()


def attend(
    pipeline: Pipeline, call: AttentionCall, check: Check, prefix_len: int = 0
) -> Tensor:
    """Validate and launch one attention call, and return its output.

    A call that differs from two earlier ones in addresses alone is launched at once, see
    runtime/repeat/calls.py.

    Args:
        pipeline: how the call is planned and launched.
        call: the call. Its `scale` and `out` may be None.
        check: raises if the call is wrong. It is called unless a call with the same signature has
            passed it and the sizes fit.
        prefix_len: keys that all sequences begin with; 0 for calls without a shared prefix.
    """
    more = (prefix_len,) if prefix_len else ()
    found = repeat(call, more, pipeline.plans.repeats)
    if type(found) is not Anew:
        return found
    with found:
        found.out = _attend_anew(pipeline, call, check, prefix_len)
    return found.out


def _attend_anew(
    pipeline: Pipeline, call: AttentionCall, check: Check, prefix_len: int
) -> Tensor:
    """Validate, plan and launch one call; the arguments are those of `attend`."""
    plans, launch = pipeline.plans, pipeline.launch
    query, query_start_loc, lengths = call.query, call.query_start_loc, call.lengths
    out, lse, scale = call.out, call.lse, call.scale
    signature = sign(call)
    plan = None if signature is None else plans.get(signature)
    contents = values_checked(query)
    # whether autograd would record the call
    is_graded = torch.is_grad_enabled() and (
        query.requires_grad
        or call.key.requires_grad
        or call.value.requires_grad
        or (out is not None and out.requires_grad)
        or (lse is not None and lse.requires_grad)
    )
    if (
        plan is None
        or contents
        or not sizes_fit(call)
        or (prefix_len and not _prefix_fits(call, prefix_len))
        or is_graded
    ):
        check(call, prefix_len, contents)
        check_launch(query)
        check_supported(query, call.value)
    bound = round_key_bound(call)
    if out is None or type(scale) is not float or bound != call.max_key_len:
        if out is None:
            out = query.new_empty(*query.shape[:2], head_size_of(call.value))
        # an integer would be compiled into the kernel as a constant
        scale = query.shape[2] ** -0.5 if scale is None else float(scale)
        call = call._replace(scale=scale, out=out, max_key_len=bound)
    if not query.numel() or query_start_loc.shape[0] < 2:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out
    if plan is None:
        plan = pipeline.make_plan(call)
        if signature is not None:
            plans.put(signature, plan)
    if RECORDING.notes is not None and not plan.is_repeatable:
        RECORDING.notes.append(None)
    if not plan.is_packed:
        # kernels read both with a stride of 1
        call = call._replace(
            query_start_loc=query_start_loc.contiguous(), lengths=lengths.contiguous()
        )
    if plan.upcasts_output:
        # the interpreter's stores to this dtype truncate, and torch rounds
        call = call._replace(out=torch.zeros_like(out, dtype=torch.float32))
        launch(plan, call, prefix_len)
        return out.copy_(call.out)
    launch(plan, call, prefix_len)
    return out


def _prefix_fits(call: AttentionCall, prefix_len: int) -> bool:
    """Return whether a prefix has whole blocks, and not more than the block table."""
    block_size = call.value.shape[1]
    assert call.block_table is not None
    most = call.block_table.shape[1] * block_size
    return 0 < prefix_len <= most and not prefix_len % block_size


def check_supported(query: Tensor, value: Tensor) -> None:
    """Reject what no kernel computes.

    Raises:
        NotImplementedError: a head larger than a tile that fits the chip, or float64 inputs; the
            reference takes them.
    """
    if query.dtype == torch.float64:
        raise NotImplementedError(
            "query is torch.float64: expected float16, bfloat16 or float32; the reference"
            " takes float64"
        )
    largest = max_head_size(query.dtype, query.device)
    for name, size in (
        ("head_size", query.shape[-1]),
        ("value_head_size", value.shape[-1]),
    ):
        if size > largest:
            raise NotImplementedError(
                f"{name} = {size} is more than this kernel takes in {query.dtype} on"
                f" {query.device} ({largest}); the reference takes any"
            )

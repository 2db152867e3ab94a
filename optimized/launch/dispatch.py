"""Dispatch of attention calls: launch plans and their cache.

A call is validated, planned and launched. The first two steps happen once per signature: calls
that differ only in what changes from step to step share a launch plan. Nothing is read from the
device, so every call can be captured in a CUDA graph. Calls that differ in nothing but addresses,
as those of a model's layers in one step, repeat the recorded launches of one of them
(repeat/calls.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...validation import values_checked
from . import portable
from .attention_call import AttentionCall, round_key_bound, sign, sizes_fit
from .cost_layer import Layer
from .cost_model import choose_path
from .families import (
    APPEND_FAMILIES,
    COMPLETE_FAMILIES,
    KERNEL_FAMILIES,
    AppendPlan,
    CompletePlan,
    PrefillPlan,
)
from .launcher import RECORDING, check_launch
from .plan_cache import PlanCache
from .repeat.calls import repeat_or_record
from .tuning import max_head_size

Check: TypeAlias = Callable[[AttentionCall, bool], None]
"""Raises if a call is wrong. It validates contents too if it is given True."""

MAX_PLANS = 512
"""Plans that are kept. A model needs one per kind of layer and step; a plan is a few KiB of host
memory, and making one takes 0.1 to 0.3 ms."""

TOKENS_PER_SHORT_REQ = 1024
"""With so many tokens per short request, a prefill launch computes the short requests too. Each has
a query tile of 128 to 192 rows of its own, so there are at most an eighth more tiles."""

PLAIN = {causal: AttentionOptions(causal=causal) for causal in (True, False)}
"""Options of calls that set none."""
_CAUSAL_MEMOS = {True: "_causal", False: "_not_causal"}


@dataclass(frozen=True)
class LaunchPlan:
    """The launches of all calls with one signature.

    Args:
        portable: the plan of the portable family. It also computes the short requests.
        prefills: plans for the long requests, in order of preference; the last takes every call.
        complete: plans for all requests, in order of preference. The others serve calls that none
            of these takes.
        appends: plans for all requests, with split keys, if the cost model selects them.
        short_rows: the most rows of a short request; 0 if the portable kernel has no decode launch.
        has_decode: whether the portable kernel has a decode launch.
        group_size: query heads per kv head.
        layer: Optional. What the cost model needs to know. If None, requests that do not fit a
            decode tile are never split: batch-invariant rows.
        is_packed: whether `query_start_loc` and `lengths` are contiguous.
        upcasts_output: whether the output is written in float32 first.
    """

    portable: portable.PortablePlan
    prefills: tuple[PrefillPlan, ...]
    complete: tuple[CompletePlan, ...]
    appends: tuple[AppendPlan, ...]
    short_rows: int
    has_decode: bool
    group_size: int
    layer: Layer | None
    is_packed: bool
    upcasts_output: bool

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether all plans do nothing on the device that a recording does not note."""
        plans = (self.portable, *self.prefills, *self.complete, *self.appends)
        return all(getattr(each, "is_repeatable", False) for each in plans)


PLANS: PlanCache[LaunchPlan] = PlanCache(MAX_PLANS)


def choose_options(options: AttentionOptions, causal: bool) -> AttentionOptions:
    """Return the options of a call with `causal` set.

    The result is kept in the options' own dictionary, so a layer that passes
    the same options in every step gets the same object.

    Args:
        options: as the caller gave them.
        causal: the operation's default.
    """
    if options is DEFAULT_OPTIONS:
        return PLAIN[causal]
    if options.causal is not None:
        return options
    memo, name = options.__dict__, _CAUSAL_MEMOS[causal]
    if name not in memo:
        memo[name] = options.with_causal(causal)
    found: AttentionOptions = memo[name]
    return found


def attend(call: AttentionCall, check: Check) -> Tensor:
    """Validate and launch one attention call, and return its output.

    A call that differs from two earlier ones in addresses alone is launched at once, see
    repeat/calls.py.

    Args:
        call: the call. Its `scale` and `out` may be None.
        check: raises if the call is wrong. It validates contents too if it is given True. It is
            called unless a call with the same signature has passed it and the sizes fit.
    """
    return repeat_or_record(call, (), PLANS.repeats, attend_anew, check)


def attend_anew(call: AttentionCall, check: Check) -> Tensor:
    """Validate, plan and launch one attention call; the arguments are those of `attend`."""
    query, query_start_loc, lengths = call.query, call.query_start_loc, call.lengths
    out, lse, scale = call.out, call.lse, call.scale
    signature = sign(call)
    plan = None if signature is None else PLANS.get(signature)
    contents = values_checked()
    if plan is None or contents or not sizes_fit(call):
        check(call, contents)
        check_launch(query)
        check_supported(query, call.value)
    bound = round_key_bound(call)
    if out is None or type(scale) is not float or bound != call.max_key_len:
        if out is None:
            out = query.new_empty(*query.shape[:2], call.value.shape[-1])
        # an integer would be compiled into the kernel as a constant
        scale = query.shape[2] ** -0.5 if scale is None else float(scale)
        call = call._replace(scale=scale, out=out, max_key_len=bound)
    if not query.numel() or query_start_loc.shape[0] < 2:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out
    if plan is None:
        plan = make_plan(call)
        if signature is not None:
            PLANS.put(signature, plan)
    if RECORDING.notes is not None and not plan.is_repeatable:
        RECORDING.notes.append(None)
    if plan.upcasts_output:
        call = call._replace(out=torch.zeros_like(out, dtype=torch.float32))
    if not plan.is_packed:
        # kernels read both with a stride of 1
        call = call._replace(
            query_start_loc=query_start_loc.contiguous(), lengths=lengths.contiguous()
        )
    for complete in plan.complete:
        if complete.takes(call):
            complete.launch(call)
            return out
    if call.max_query_len * plan.group_size > plan.short_rows or not plan.has_decode:
        launch_long(plan, call)
    else:
        plan.portable.launch_decode(call)
    return out.copy_(call.out) if plan.upcasts_output else out


def launch_long(plan: LaunchPlan, call: AttentionCall) -> None:
    """Launch a batch whose longest request does not fit a decode tile."""
    if plan.layer is not None:
        choice = choose_path(
            plan.layer, call.query_start_loc.shape[0] - 1, call.query.shape[0],
            call.max_query_len, call.max_key_len,
        )  # fmt: skip
        if choice.path == "append":
            for append in plan.appends:
                if append.takes(call):
                    append.launch(call, choice.segments)
                    return
        if choice.path in ("append", "split"):
            plan.portable.launch_append(call, choice.block_m)
            return
    prefill = next(each for each in plan.prefills if each.takes(call))
    short_rows = plan.short_rows
    if prefill.clears_padding and is_all_long(call, short_rows // plan.group_size):
        short_rows = 0
    elif plan.has_decode:
        plan.portable.launch_decode(call)
    prefill.launch_prefill(call, short_rows)


def is_all_long(call: AttentionCall, short_len: int) -> bool:
    """Return whether a batch has no short requests, or few over few keys.

    The lengths are on the device. The host knows their maximum and their sum, which bound the
    number of short requests if every token belongs to a request. With padding there may be more.
    The prefill launch computes them right, and over many keys slower than a decode launch would.
    So if there are many keys, the lengths have to be equal, or that of one request.

    Args:
        call: the call.
        short_len: tokens of a short request, at most.

    Example:
        Two requests of at most 50 tokens, 99 tokens in all, short up to 8: a short request would
        leave 91 tokens for the other. So both are long.
    """
    tokens, reqs = call.query.shape[0], call.query_start_loc.shape[0] - 1
    longest = min(call.max_query_len, tokens)
    if longest <= short_len:
        return False
    if reqs == 1 or reqs * longest == tokens:
        return True
    short_reqs = max(0, reqs * longest - tokens) // (longest - short_len)
    return call.max_key_len <= longest and short_reqs * TOKENS_PER_SHORT_REQ <= tokens


def make_plan(call: AttentionCall) -> LaunchPlan:
    """Return the launch plan of all calls with this call's signature."""
    base = portable.plan(call)
    prefills: list[PrefillPlan] = []
    # without a decode launch the prefill launch also clears the rows of no request
    for family in KERNEL_FAMILIES if base.has_decode else ():
        if family.supports(call):
            prefills.append(family.plan(call))
    starts, lengths = call.query_start_loc, call.lengths
    appends = tuple(each.plan(call) for each in APPEND_FAMILIES if each.supports(call))
    return LaunchPlan(
        portable=base,
        prefills=(*prefills, base),
        complete=tuple(
            each.plan(call) for each in COMPLETE_FAMILIES if each.supports(call)
        ),
        appends=appends,
        short_rows=base.short_rows,
        has_decode=base.has_decode,
        group_size=base.group_size,
        layer=None
        if call.options.batch_invariant
        else portable.describe_layer(
            base.launches,
            call,
            bool(prefills),
            appends[0].row_tiles if appends else (),
            bool(prefills) and prefills[0].packs_heads,
        ),
        is_packed=starts.stride(0) == 1 and lengths.stride(0) == 1,
        upcasts_output=base.upcasts_output,
    )


def check_compute_dtype(compute_dtype: torch.dtype) -> None:
    """Reject a dtype of the arithmetic that these kernels do not have.

    Raises:
        NotImplementedError: a dtype other than float32; the reference takes any.
    """
    if compute_dtype != torch.float32:
        raise NotImplementedError(
            f"compute_dtype = {compute_dtype}: expected torch.float32, in which the kernels"
            " accumulate; the reference takes any"
        )


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

"""Launches of cascade attention: one over the shared prefix, and one over the rest that merges.

The launch plan is made once per call signature, as for other calls. Per step the host chooses the
rows of the query tiles and fills in pointers and sizes; it makes no tensor but the output. Nothing
is read from the device, so a CUDA graph can capture the call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...validation import values_checked
from ..kernels.cascade import cascade_prefix_kernel
from ..kernels.options.score import lower_tensors
from ..kernels.sm90.cascade import family as sm90_cascade
from .attention_call import AttentionCall, round_key_bound, sign, sizes_fit
from .cascade_grids import Grid, choose_rest, round_up
from .cost_layer import Layer
from .cost_model import choose_row_tile
from .dispatch import check_supported
from .launcher import check_launch
from .launches import Launches
from .plan_cache import PlanCache
from .portable import describe_layer
from .prepare import prepare
from .repeat.calls import repeat_or_record
from .workspace import find_workspace

Check: TypeAlias = Callable[[AttentionCall, int, bool], None]
"""Raises if a call or its prefix is wrong. It validates contents too if it is given True."""

PLANS: "PlanCache[CascadePlan]" = PlanCache(64)


@dataclass(frozen=True)
class CascadePlan:
    """The launches of all cascades with one signature.

    Args:
        prefix, rest: launches over the prefix, and over the keys after it.
        hopper: Optional. Launches over the prefix on Hopper chips. If None, they do not take calls
            with this signature.
        layer: what the cost model needs to know.
        is_packed: whether `query_start_loc` and `lengths` are contiguous.
    """

    prefix: Launches
    rest: Launches
    hopper: sm90_cascade.PrefixPlan | None
    layer: Layer
    is_packed: bool


def choose_row_tiles(
    plan: CascadePlan, call: AttentionCall, prefix_len: int
) -> tuple[int, int]:
    """Return the rows of the query tiles over the prefix, and over the rest.

    Args:
        plan, call, prefix_len: as in `launch_cascade`.
    """
    tokens, num_reqs = call.query.shape[0], call.query_start_loc.shape[0] - 1
    rest_len = max(call.max_key_len - prefix_len, 1)
    return _cover(plan.layer, tokens * plan.rest.group_size), choose_row_tile(
        plan.layer, num_reqs, tokens, call.max_query_len, rest_len
    )


def launch_cascade(
    plan: CascadePlan, call: AttentionCall, prefix_len: int, row_tiles: tuple[int, int]
) -> None:
    """Compute all requests, and clear the rows of no request.

    Args:
        plan: the plan of the call.
        call: the call; `max_key_len` includes the prefix.
        prefix_len: keys of the prefix, at least 1.
        row_tiles: rows of the query tiles of both launches.
    """
    rest = plan.rest
    tokens, num_heads, _ = call.query.shape
    rest_len = max(call.max_key_len - prefix_len, 1)
    hopper = plan.hopper if plan.hopper and plan.hopper.takes(call) else None
    second = choose_rest(
        rest, call, row_tiles[1], rest_len, hopper is not None and hopper.is_overlapped
    )
    counters, partials, split_len = second.splits, second.partials, prefix_len
    if hopper is not None:
        split_len = hopper.split_len(call, prefix_len)
    else:
        rows, block_m = tokens * rest.group_size, row_tiles[0]
        first = Grid.choose(
            plan.prefix, cascade_prefix_kernel, 1, block_m, rows, prefix_len,
            -(-rows // block_m),
        )  # fmt: skip
        counters = max(first.splits, counters)
        partials = max(first.partials, partials)
    splits = -(-prefix_len // split_len)
    # each begins at a multiple of 16 bytes
    heads = round_up(splits * tokens * num_heads)
    begins = [heads, round_up(heads * (1 + rest.value_size))]
    begins.append(begins[1] + partials)
    arrivals, workspace = find_workspace(
        call.query.device,
        max(counters * rest.kv_heads, 1),
        # short rests have no partial results, but pointers to them, which a repeated call must find
        begins[2] + max(partials * rest.value_size, 1),
    )
    # step: attend to the shared prefix, all queries as one request
    if hopper is not None:
        hopper.launch_prefix(call, prefix_len, split_len, heads, workspace)
    else:
        over_prefix = lower_tensors(options_over_prefix(call.options))
        first.start(call, prefix_len, 1, over_prefix, workspace, begins, arrivals)
    # step: attend to the rest of each sequence
    # step: merge both results by their log-sum-exp
    over_rest = lower_tensors(call.options)
    second.start(call, prefix_len, splits, over_rest, workspace, begins, arrivals)


def attend_cascade(call: AttentionCall, prefix_len: int, check: Check) -> Tensor:
    """Validate and launch one cascade, and return its output.

    A cascade that differs from two earlier ones in addresses alone is launched at once, see
    repeat/calls.py.

    Args:
        call: the call, as `dispatch.attend` receives it: `scale` and `out` may be None.
        prefix_len: keys that all sequences begin with, at least 1. There is a request at least.
        check: raises if the call or the prefix is wrong. It validates contents too if it is given
            True. It is called unless a call with the same signature has passed it and the sizes
            fit.
    """
    return repeat_or_record(
        call, (prefix_len,), PLANS.repeats, attend_cascade_anew, prefix_len, check
    )


def attend_cascade_anew(call: AttentionCall, prefix_len: int, check: Check) -> Tensor:
    """Validate, plan and launch one cascade; the arguments are those of `attend_cascade`."""
    query, value, block_table = call.query, call.value, call.block_table
    assert block_table is not None
    signature = sign(call)
    plan = None if signature is None else PLANS.get(signature)
    contents, block_size = values_checked(), value.shape[1]
    if (
        plan is None
        or contents
        or not sizes_fit(call)
        or prefix_len % block_size
        or prefix_len > block_table.shape[1] * block_size
    ):
        check(call, prefix_len, contents)
        check_launch(query)
        check_supported(query, value)
    out = call.out
    if out is None:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
    scale = query.shape[2] ** -0.5 if call.scale is None else float(call.scale)
    call = call._replace(out=out, scale=scale, max_key_len=round_key_bound(call))
    if not query.numel():
        out.zero_()
        if call.lse is not None:
            call.lse.fill_(-torch.inf)
        return out
    if plan is None:
        plan = make_plan(call)
        if signature is not None:
            PLANS.put(signature, plan)
    if plan.rest.upcasts_output:
        call = call._replace(out=torch.zeros_like(out, dtype=torch.float32))
    if not plan.is_packed:
        # kernels read both with a stride of 1
        call = call._replace(
            query_start_loc=call.query_start_loc.contiguous(),
            lengths=call.lengths.contiguous(),
        )
    row_tiles = choose_row_tiles(plan, call, prefix_len)
    launch_cascade(plan, call, prefix_len, row_tiles)
    return out.copy_(call.out) if plan.rest.upcasts_output else out


def make_plan(call: AttentionCall) -> CascadePlan:
    """Return the launch plan of all cascades with this call's signature."""
    tensors = (
        call.query, call.key, call.value, call.block_table, call.query_start_loc,
        call.out,
    )  # fmt: skip
    rest = prepare(*tensors, call.options)
    over_prefix = call._replace(options=options_over_prefix(call.options))
    return CascadePlan(
        prefix=prepare(*tensors, over_prefix.options),
        rest=rest,
        hopper=sm90_cascade.plan(over_prefix)
        if sm90_cascade.supports(over_prefix)
        else None,
        layer=describe_layer(rest, call, has_hopper=False),
        is_packed=call.query_start_loc.stride(0) == 1 and call.lengths.stride(0) == 1,
    )


def options_over_prefix(options: AttentionOptions) -> AttentionOptions:
    """Return the options of the launch over the prefix, which every query attends to.

    Sinks are counted once, with the rest. The result is kept in the options' own dictionary.
    """
    found: AttentionOptions | None = options.__dict__.get("_over_prefix")
    if found is None:
        found = replace(options, causal=False, tree_mask=None, sinks=None)
        options.__dict__["_over_prefix"] = found
    return found


def _cover(layer: Layer, rows: int) -> int:
    """Return the rows of the smallest tile that takes `rows` rows, or of the largest tile."""
    *smaller, largest = layer.row_tiles
    return next((each for each in smaller if each >= rows), largest)

"""Launches of cascade attention: one over the shared prefix, and one over the rest that merges.

The launch plan is made once per call signature, as for other calls. Per step the host chooses the
rows of the query tiles and fills in pointers and sizes; it makes no tensor but the output. Nothing
is read from the device, so a CUDA graph can capture the call.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...contract.attention_options import AttentionOptions
from ..kernels.portable.host.cascade import choose_rest, round_up
from ..kernels.portable.host.cost import choose_row_tile
from ..kernels.portable.host.launches import Launches
from ..kernels.portable.host.make_launches import make_launches
from ..kernels.portable.options.score import lower_tensors
from ..runtime.attention_call import AttentionCall
from ..runtime.cost_layer import BatchBounds, Layer, describe_layer
from ..runtime.family import CascadePrefix, Role, Task
from ..runtime.launcher import must_widen
from ..runtime.plan_cache import PlanCache
from ..runtime.planning import planning
from ..runtime.workspace import find_workspace
from .choice import first_taking, plan_role
from .pipeline import Pipeline


@dataclass(frozen=True)
class CascadePlan:
    """The launches of all cascades with one signature.

    Args:
        prefixes: plans over the prefix, in order of preference. The last one takes every call.
        rest: launches over the keys after the prefix.
        layer: what the estimates need to know.
        is_packed, upcasts_output: as in `AttentionPlan`.
    """

    prefixes: tuple[Any, ...]
    rest: Launches
    layer: Layer
    is_packed: bool
    upcasts_output: bool

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether all plans do nothing on the device that a recording does not note."""
        return all(plan.is_repeatable for plan in self.prefixes)

    @cached_property
    def row_tiles(self) -> tuple[int, ...]:
        """Rows of each query tile over the rest, fewest first."""
        return tuple(tiles.block_m for tiles in self.rest.row_tiles)


def make_cascade_plan(call: AttentionCall) -> CascadePlan:
    """Return the launch plan of all cascades with this call's signature."""
    with planning():
        prefixes = plan_role(over_prefix(call), Role.PREFIX)
    return CascadePlan(
        prefixes=prefixes,
        rest=make_launches(call),
        layer=describe_layer(call),
        is_packed=call.query_start_loc.stride(0) == 1 and call.lengths.stride(0) == 1,
        upcasts_output=must_widen(call.out.dtype),
    )


def launch_cascade(
    plan: CascadePlan,
    call: AttentionCall,
    prefix_len: int,
    row_tiles: tuple[int, int] | None = None,
) -> None:
    """Compute all requests, and clear the rows of no request.

    Args:
        plan: the plan of the call.
        call: the call; `max_key_len` includes the prefix.
        prefix_len: keys of the prefix, at least 1.
        row_tiles: Optional. Rows of the query tiles over the prefix and over the rest. If None,
            those that are estimated to take least.
    """
    rest = plan.rest
    tokens, num_heads, _ = call.query.shape
    rest_len = max(call.max_key_len - prefix_len, 1)
    of_prefix, of_rest = row_tiles or (0, choose_rest_tile(plan, call, rest_len))
    call_over_prefix = over_prefix(call)
    prefix = first_taking(plan.prefixes, call_over_prefix)
    work = prefix.divide(call_over_prefix, prefix_len, of_prefix)
    second = choose_rest(rest, call, of_rest, rest_len, prefix.is_overlapped)
    counters = max(work.counters, second.splits)
    partials = max(work.partials, second.partials)
    splits = -(-prefix_len // work.split_len)
    # each begins at a multiple of 16 bytes
    heads = round_up(splits * tokens * num_heads)
    other_lse = round_up(heads * (1 + rest.value_size))
    other_values = other_lse + partials
    semaphores, workspace = find_workspace(
        call.query.device,
        max(counters * rest.kv_heads, 1),
        # short rests have no partial results, but pointers to them, which a repeated call must find
        other_values + max(partials * rest.value_size, 1),
    )
    begins = (heads, other_lse, other_values)
    shared = CascadePrefix(prefix_len, work.split_len, begins, workspace, semaphores)
    # step: attend to the shared prefix, all queries as one request
    prefix.launch(call_over_prefix, Task(division=of_prefix, prefix=shared))
    # step: attend to the rest of each sequence
    # step: merge both results by their log-sum-exp
    second.start(call, shared, lower_tensors(call.options))


def choose_rest_tile(plan: CascadePlan, call: AttentionCall, rest_len: int) -> int:
    """Return the rows of the query tiles over the rest.

    Args:
        rest_len: keys after the prefix, at most.
    """
    batch = BatchBounds(
        call.query_start_loc.shape[0] - 1, call.query.shape[0], call.max_query_len,
        rest_len,
    )  # fmt: skip
    return choose_row_tile(plan.layer, batch, plan.row_tiles, plan.rest.tables.rates)


def over_prefix(call: AttentionCall) -> AttentionCall:
    """Return the call over the prefix, which every query attends to.

    Sinks are counted once, with the rest.
    """
    return call._replace(options=_options_over_prefix(call.options))


def _options_over_prefix(options: AttentionOptions) -> AttentionOptions:
    """Return the options over the prefix, which are kept in the options' own dictionary."""
    found: AttentionOptions | None = options.__dict__.get("_over_prefix")
    if found is None:
        found = replace(options, causal=False, tree_mask=None, sinks=None)
        options.__dict__["_over_prefix"] = found
    return found


PIPELINE = Pipeline(PlanCache(64), make_cascade_plan, launch_cascade)
"""Calls of cascade attention with a prefix."""

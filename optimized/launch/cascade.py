"""Launches of cascade attention: one over the shared prefix, and one over the rest that merges.

The launch plan is made once per call signature, as for other calls. Per step the host chooses the
rows of the query tiles and fills in pointers and sizes; it makes no tensor but the output. Nothing
is read from the device, so a CUDA graph can capture the call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...validation import values_checked
from ..kernels.cascade import (
    CascadeTensors,
    cascade_prefix_kernel,
    cascade_rest_kernel,
    cascade_short_rest_kernel,
)
from ..kernels.options.score import lower_tensors
from ..kernels.sm90.cascade import family as sm90_cascade
from .attention_call import AttentionCall, sign, sizes_fit
from .cost_model import Layer, choose_row_tile
from .dispatch import check_supported
from .launcher import Launcher, check_launch
from .plan_cache import PlanCache
from .portable import describe_layer
from .prepare import Launches, as_bits, prepare
from .workspace import find_workspace

SHORT_REST = 1024
SHORT_PROGRAMS = 2
SHORT_TILES = (64, 4, 3)
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


@dataclass(frozen=True)
class _Grid:
    """One launch of a cascade: its kernel, and how its work is split.

    Args:
        launcher: the kernel with its constants.
        kv_heads, splits, reqs: programs along the axes of the grid.
        split_rows: rows that the workspace reserves per partial result.
    """

    launcher: Launcher
    kv_heads: int
    splits: int
    split_rows: int
    reqs: int = 1

    @property
    def partials(self) -> int:
        """Rows of partial results, of which each program has two at most."""
        return _round_up(2 * self.splits * self.kv_heads * self.split_rows)

    @classmethod
    def choose(
        cls,
        launches: Launches,
        kernel: Any,
        num_reqs: int,
        block_m: int,
        rows: int,
        keys: int,
        query_tiles: int,
        is_dependent: bool = False,
    ) -> "_Grid":
        """Return the launch over at most `keys` keys of `num_reqs` requests.

        Args:
            rows: rows of a request, at most.
            query_tiles: query tiles of all requests, at most.
            is_dependent: as in `Launcher`.
        """
        launcher, block_n, most = launches.append(
            num_reqs, block_m, kernel, _lower, CascadeTensors, is_dependent
        )
        splits = min(most, query_tiles * -(-keys // block_n))
        return cls(launcher, launches.kv_heads, splits, min(block_m, rows))

    def start(
        self,
        call: AttentionCall,
        prefix_len: int,
        prefix_splits: int,
        options: Any,
        workspace: Tensor,
        begins: list[int],
        arrivals: Tensor,
    ) -> None:
        """Launch the kernel.

        Args:
            prefix_splits: splits of the prefix.
            workspace: float32 log-sum-exps over the prefix, their values, log-sum-exps of partial
                results, and their values.
            begins: index at which each of these begins, without the first.
            arrivals: int32 counters of finished splits, all 0.
        """
        query, key, value, block_table, starts, lengths, *_ = call
        assert block_table is not None
        out, lse, at = call.out, call.lse, workspace.data_ptr()
        pointers = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), block_table.data_ptr(),
            starts.data_ptr(), lengths.data_ptr(), out.data_ptr(),
            0 if lse is None else lse.data_ptr(), at + 4 * begins[2],
            at + 4 * begins[1], arrivals.data_ptr(), at + 4 * begins[0], at,
        )  # fmt: skip
        numbers = (
            query.shape[0],
            starts.shape[0] - 1,
            prefix_len,
            prefix_splits,
            self.split_rows,
            call.scale,
            block_table.stride(0),
            *((0, 0) if lse is None else lse.stride()),
        )
        tensors = (
            query, key, value, block_table, starts, lengths, out, lse, workspace,
            begins, arrivals,
        )  # fmt: skip
        grid = (self.kv_heads, self.splits, self.reqs)
        self.launcher(grid, pointers, options, numbers, tensors)


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


def _choose_rest(
    plan: CascadePlan,
    call: AttentionCall,
    block_m: int,
    rest_len: int,
    is_dependent: bool,
) -> _Grid:
    """Return the launch over the rest: a program per query tile if the rests are short and many.

    Args:
        block_m: rows of a query tile.
        rest_len: keys after the prefix, at most.
        is_dependent: as in `Launcher`.
    """
    rest, num_reqs = plan.rest, call.query_start_loc.shape[0] - 1
    rows = call.max_query_len * rest.group_size
    query_tiles = -(-rows // block_m)
    programs = num_reqs * query_tiles * rest.kv_heads
    smallest = rest.row_tiles[0]
    if (
        rest_len <= SHORT_REST
        and block_m == smallest.block_m
        and programs >= SHORT_PROGRAMS * rest.processors
    ):
        block_n, warps, stages = SHORT_TILES
        tiles = replace(
            smallest,
            block_n=min(block_n, smallest.block_n),
            num_warps=warps,
            num_stages=stages,
        )
        launcher, _, _ = rest.append(
            num_reqs, block_m, cascade_short_rest_kernel, _lower, CascadeTensors,
            is_dependent, tiles,
        )  # fmt: skip
        return _Grid(launcher, rest.kv_heads, query_tiles, 0, num_reqs)
    return _Grid.choose(
        rest, cascade_rest_kernel, num_reqs, block_m, rows, rest_len,
        call.query.shape[0] * rest.group_size // block_m + num_reqs, is_dependent,
    )  # fmt: skip


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
    second = _choose_rest(
        plan, call, row_tiles[1], rest_len, hopper is not None and hopper.is_overlapped
    )
    counters, partials, split_len = second.splits, second.partials, prefix_len
    if hopper is not None:
        split_len = hopper.split_len(call, prefix_len)
    else:
        rows, block_m = tokens * rest.group_size, row_tiles[0]
        first = _Grid.choose(
            plan.prefix, cascade_prefix_kernel, 1, block_m, rows, prefix_len,
            -(-rows // block_m),
        )  # fmt: skip
        counters = max(first.splits, counters)
        partials = max(first.partials, partials)
    splits = -(-prefix_len // split_len)
    # each begins at a multiple of 16 bytes
    heads = _round_up(splits * tokens * num_heads)
    begins = [heads, _round_up(heads * (1 + rest.value_size))]
    begins.append(begins[1] + partials)
    arrivals, workspace = find_workspace(
        call.query.device,
        counters * rest.kv_heads,
        begins[2] + partials * rest.value_size,
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


def attend_cascade(
    call: AttentionCall, prefix_len: int, check: Callable[[bool], None]
) -> Tensor:
    """Validate, plan and launch one cascade, and return its output.

    Args:
        call: the call, as `dispatch.attend` receives it: `scale` and `out` may be None.
        prefix_len: keys that all sequences begin with, at least 1. There is a request at least.
        check: raises if these arguments are wrong. It validates their contents too if it is
            given True. It is called unless a call with the same signature has passed it and the
            sizes fit.
    """
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
        check(contents)
        check_launch(query)
        check_supported(query, value)
    out = call.out
    if out is None:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
    scale = query.shape[2] ** -0.5 if call.scale is None else float(call.scale)
    call = call._replace(out=out, scale=scale)
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


def _round_up(number: int) -> int:
    """Return the smallest multiple of 4, which is 16 bytes, that is at least `number`."""
    return -(-number // 4) * 4


def _lower(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    begins: list[int],
    semaphores: Tensor,
) -> CascadeTensors:
    """Return the tensors of a launch."""
    return CascadeTensors(
        q=query,
        k=as_bits(key),
        v=as_bits(value),
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=lengths,
        out=out,
        lse=lse,
        partial_out=workspace[begins[2] :],
        partial_lse=workspace[begins[1] :],
        semaphores=semaphores,
        prefix_out=workspace[begins[0] :],
        prefix_lse=workspace,
    )

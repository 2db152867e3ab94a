"""Kernel family of the portable Triton kernels: decode and prefill launches on any CUDA device.

A batch may mix requests of any length. Requests whose rows (queries times the query heads that
share a kv head) fit one decode tile are computed by the decode launch, in split-KV form. All
others are computed by the prefill launch, one program per tile of rows. Each launch skips the
requests of the other one, so nothing has to be read from the device to separate them. If the cost
model finds a split faster, one append launch computes all requests instead.
"""

import math
from typing import NamedTuple

from torch import Tensor

from ..kernels.arguments import Tensors
from ..kernels.options.score import lower_tensors
from ..kernels.sm90.fp8_decode.family import is_aligned
from .attention_call import AttentionCall
from .cost_layer import Layer
from .launcher import Launcher
from .launches import Launches
from .prepare import MAX_WORKSPACE, prepare
from .workspace import find_workspace


def supports(call: AttentionCall) -> bool:
    """Return True: `check_supported` has rejected what this kernel does not compute."""
    return True


def plan(call: AttentionCall) -> "PortablePlan":
    """Return the launch plan of all calls with this call's signature."""
    launches = prepare(
        call.query,
        call.key,
        call.value,
        call.block_table,
        call.query_start_loc,
        call.out,
        call.options,
    )
    values = lower_tensors(call.options)
    return PortablePlan(launches, any(each is not None for each in values))


class DecodeLaunch(NamedTuple):
    """A decode launch and its workspace; the fields are arguments of `PortablePlan._start`."""

    launcher: Launcher
    grid: tuple[int, int, int]
    split_rows: int
    workspace: Tensor
    partials: int
    arrivals: Tensor


class PortablePlan:
    """Launches of the portable kernel for calls with one signature.

    Args:
        launches: the launchers, and how they partition a batch.
        has_values: whether some options are tensors or scales, which the kernel receives anew at
            each call.

    Attributes:
        launches: as given.
        short_rows: the most rows of a request that the decode launch computes; 0 if there is no
            decode launch.
        group_size: query heads per kv head.
        upcasts_output: whether the kernel writes a float32 output that torch rounds (in the
            interpreter, whose stores to bfloat16 truncate).
    """

    is_repeatable = True
    clears_padding = False
    packs_heads = False

    def __init__(self, launches: Launches, has_values: bool) -> None:
        self.launches = launches
        self._has_values = has_values
        self.has_decode = launches.has_decode
        self.short_rows = launches.short_rows
        self.group_size = launches.group_size
        self.upcasts_output = launches.upcasts_output

    def takes(self, call: AttentionCall) -> bool:
        """Return True: this kernel takes any address and any scale."""
        return True

    def launch_decode(self, call: AttentionCall) -> None:
        """Compute the short requests of a batch, and clear the rows of no request."""
        launcher, grid, split_rows, workspace, partials, arrivals = self.plan_decode(
            call
        )
        self._start(launcher, grid, call, split_rows, workspace, partials, arrivals)

    def plan_decode(self, call: AttentionCall) -> DecodeLaunch:
        """Return the decode launch of a call, with its workspace.

        The key tiles of all requests are divided evenly among the programs, so a request may be
        split over several. The workspace holds two partial results per program. Few requests have
        a kernel of their own, with a number of programs per request.

        Args:
            call: the call.
        """
        launches = self.launches
        num_reqs, kv_heads = call.query_start_loc.shape[0] - 1, launches.kv_heads
        split_rows = min(launches.short_rows, call.max_query_len * launches.group_size)
        if launches.is_short(num_reqs, call.max_key_len):
            launcher = launches.short_decode(split_rows)
            splits = launches.short_splits(num_reqs, call.max_key_len)
            grid, counters = (kv_heads, splits, num_reqs), num_reqs * kv_heads
        else:
            launcher, block_n, max_splits = launches.decode(
                num_reqs, split_rows, call.max_query_len, call.max_key_len,
                is_aligned(call.key, call.value),
            )  # fmt: skip
            max_keys = launches.bound_keys(call.max_key_len, block_n)
            splits = min(max_splits, num_reqs * max(1, -(-max_keys // block_n)))
            grid, counters = (kv_heads, splits, 1), splits * kv_heads
        # the values begin at a multiple of 16 bytes, after the log-sum-exps
        partials = -(-2 * math.prod(grid) * split_rows // 4) * 4
        arrivals, workspace = find_workspace(
            call.query.device,
            counters,
            partials * (launches.value_size + 1),
        )
        return DecodeLaunch(launcher, grid, split_rows, workspace, partials, arrivals)

    def launch_append(self, call: AttentionCall, block_m: int) -> None:
        """Compute all requests, split over their keys, and clear the rows of no request.

        Args:
            call: the call.
            block_m: rows of a query tile, one of the layer's `row_tiles`.
        """
        launches = self.launches
        num_reqs = call.query_start_loc.shape[0] - 1
        append, block_n, max_splits = launches.append(num_reqs, block_m)
        rows = call.query.shape[0] * launches.group_size
        # each request has at most the tiles that its rows fill, and one that is not full
        query_tiles = rows // block_m + num_reqs
        splits = min(max_splits, query_tiles * max(1, -(-call.max_key_len // block_n)))
        split_rows = min(block_m, call.max_query_len * launches.group_size)
        counters = splits * launches.kv_heads
        # the values begin at a multiple of 16 bytes, after the log-sum-exps
        partials = -(-2 * counters * split_rows // 4) * 4
        arrivals, workspace = find_workspace(
            call.query.device,
            counters,
            partials * (launches.value_size + 1),
        )
        grid = (launches.kv_heads, splits, 1)
        self._start(append, grid, call, split_rows, workspace, partials, arrivals)

    def prefill_lens(self, least: int, most: int) -> list[int]:
        """Return longest requests whose prefill has a kernel of its own: they have one."""
        return [most]

    def launch_prefill(self, call: AttentionCall, short_rows: int) -> None:
        """Compute all requests of more than `short_rows` rows."""
        launches = self.launches
        num_reqs = call.query_start_loc.shape[0] - 1
        # each request has at most the tiles that its rows fill, and one that is not full
        rows = call.query.shape[0] * launches.group_size
        tiles = rows // launches.block_m + num_reqs
        alone, spread = launches.prefills
        if launches.split_size:
            # if the tiles do not fill the chip, their splits get programs of their own
            splits = -(-call.max_key_len // launches.split_size)
            counters = tiles * launches.kv_heads
            split_rows = min(launches.block_m, call.max_query_len * launches.group_size)
            partials = -(-counters * splits * split_rows // 4) * 4
            numbers = partials * (launches.value_size + 1)
            if (
                splits > 1
                and counters < launches.processors
                and numbers <= MAX_WORKSPACE
            ):
                arrivals, workspace = find_workspace(
                    call.query.device, counters, numbers
                )
                grid = (tiles, launches.kv_heads, splits)
                self._start(
                    spread, grid, call, split_rows, workspace, partials, arrivals
                )
                return
        grid = (tiles, launches.kv_heads, 1)
        self._start(alone, grid, call, 0, None, 0, None)

    def _start(
        self,
        launcher: Launcher,
        grid: tuple[int, int, int],
        call: AttentionCall,
        split_rows: int,
        workspace: Tensor | None,
        partials: int,
        arrivals: Tensor | None,
    ) -> None:
        """Launch the portable kernel.

        Args:
            launcher: the kernel with its constants.
            grid: programs along each axis.
            call: the call.
            split_rows: rows that the workspace reserves per partial result; 0 without splits.
            workspace: float32 log-sum-exps of all partial results, then their values. None without
                splits.
            partials: number of those log-sum-exps.
            arrivals: int32 counters of finished splits, all 0. None without splits.
        """
        (
            query,
            key,
            value,
            block_table,
            query_start_loc,
            lengths,
            _,
            _,
            scale,
            out,
            lse,
            _,
        ) = call
        at = 0 if workspace is None else workspace.data_ptr()
        pointers = Tensors(
            q=query.data_ptr(),
            k=key.data_ptr(),
            v=value.data_ptr(),
            block_table=0 if block_table is None else block_table.data_ptr(),
            query_start_loc=query_start_loc.data_ptr(),
            seq_lens=lengths.data_ptr(),
            out=out.data_ptr(),
            lse=0 if lse is None else lse.data_ptr(),
            partial_out=at + 4 * partials,
            partial_lse=at,
            semaphores=0 if arrivals is None else arrivals.data_ptr(),
        )
        num_reqs = query_start_loc.shape[0] - 1
        # the kernels' arguments from `num_tokens` to `lse_stride_token`
        numbers = (
            query.shape[0],
            num_reqs,
            num_reqs.bit_length(),
            split_rows,
            scale,
            0 if block_table is None else block_table.stride(0),
            *((0, 0) if lse is None else lse.stride()),
        )
        tensors = (
            query, key, value, block_table, query_start_loc, lengths, out, lse,
            workspace, partials, arrivals,
        )  # fmt: skip
        values = lower_tensors(call.options) if self._has_values else None
        launcher(grid, pointers, values, numbers, tensors)


def describe_layer(
    launches: Launches,
    call: AttentionCall,
    has_hopper: bool,
    append_rows: tuple[int, ...] = (),
    packs_heads: bool = False,
) -> Layer:
    """Return what the cost model needs to know of all calls with one signature.

    Args:
        launches: the launches of the signature.
        call: one of the calls.
        has_hopper: whether the prefill kernel of Hopper chips takes them.
        append_rows: rows of each query tile of the append kernel of Hopper chips; empty if it does
            not take them.
        packs_heads: that of the prefill kernel of Hopper chips.
    """
    options = call.options
    numbers = call.query.shape[-1] + launches.value_size
    visible = None
    if options.tree_mask is None and options.query_ranges is None:
        sides = 1 if options.causal is True else 2
        window, chunk = options.sliding_window, options.attention_chunk_size
        limits = [*([sides * window] if window else []), *([chunk] if chunk else [])]
        visible = min(limits, default=None)
    return Layer(
        group_size=launches.group_size,
        kv_heads=launches.kv_heads,
        numbers=numbers,
        key_bytes=numbers * call.key.dtype.itemsize,
        short_rows=launches.short_rows,
        row_tiles=tuple(each.block_m for each in launches.row_tiles),
        prefill_rows=launches.block_m,
        has_hopper=has_hopper,
        append_rows=append_rows,
        packs_heads=packs_heads,
        causal=options.causal is True,
        max_visible_keys=visible,
        processors=launches.processors,
        # one byte per number is read, and two are written
        converted_bytes=(
            3 * numbers if has_hopper and launches.config.CACHE_FP8 else 0
        ),
    )

"""Grids of a cascade's portable launches: how the work over the prefix and the rest is split."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.cascade import (
    CascadeTensors,
    cascade_rest_kernel,
    cascade_short_rest_kernel,
)
from .attention_call import AttentionCall
from .launcher import Launcher
from .launches import Launches
from .lowering import as_bits
from .tuning import SHORT_REST_KEYS, SHORT_REST_PROGRAMS, choose_short_rest_tiles


@dataclass(frozen=True)
class Grid:
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
        return round_up(2 * self.splits * self.kv_heads * self.split_rows)

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
    ) -> "Grid":
        """Return the launch over at most `keys` keys of `num_reqs` requests.

        Args:
            rows: rows of a request, at most.
            query_tiles: query tiles of all requests, at most.
        """
        launcher, block_n, most = launches.append(
            num_reqs, block_m, kernel, lower_cascade, CascadeTensors
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


def choose_rest(
    rest: Launches,
    call: AttentionCall,
    block_m: int,
    rest_len: int,
    is_dependent: bool,
) -> Grid:
    """Return the launch over the rest: a program per query tile if the rests are short and many.

    Args:
        rest: launches over the rest.
        call: the call; `max_key_len` includes the prefix.
        block_m: rows of a query tile.
        rest_len: keys after the prefix, at most.
        is_dependent: whether the launch may begin before the one over the prefix has ended. A
            stream-K partition does not: with 32 requests it took 94 us and not 91.
    """
    num_reqs = call.query_start_loc.shape[0] - 1
    rows = call.max_query_len * rest.group_size
    query_tiles = -(-rows // block_m)
    programs = num_reqs * query_tiles * rest.kv_heads
    tiles = choose_short_rest_tiles(rest.row_tiles, call.query.dtype, block_m)
    if (
        tiles is not None
        and rest_len <= SHORT_REST_KEYS
        and programs >= SHORT_REST_PROGRAMS * rest.processors
    ):
        launcher, _, _ = rest.append(
            # the kernel is the same for any number of requests
            1, block_m, cascade_short_rest_kernel, lower_cascade, CascadeTensors,
            is_dependent, tiles,
        )  # fmt: skip
        return Grid(launcher, rest.kv_heads, query_tiles, 0, num_reqs)
    return Grid.choose(
        rest, cascade_rest_kernel, num_reqs, block_m, rows, rest_len,
        call.query.shape[0] * rest.group_size // block_m + num_reqs,
    )  # fmt: skip


def round_up(number: int) -> int:
    """Return the smallest multiple of 4, which is 16 bytes, that is at least `number`."""
    return -(-number // 4) * 4


def lower_cascade(
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

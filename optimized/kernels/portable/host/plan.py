"""What the plans of the portable kernels have in common: a launch of one kernel."""

from typing import NamedTuple

from torch import Tensor

from ....runtime.attention_call import AttentionCall
from ....runtime.launcher import Launcher
from ....runtime.workspace import find_workspace
from ..arguments import Tensors
from ..options.score import lower_tensors
from .launches import Launches
from .make_launches import make_launches


class Partials(NamedTuple):
    """Workspace of a launch that splits keys.

    Args:
        rows: rows that the workspace reserves per partial result.
        numbers: float32 log-sum-exps of all partial results, then their values.
        num_lse: number of those log-sum-exps.
        semaphores: int32 counters of finished splits, all 0; of latents, which tiles are split.
    """

    rows: int
    numbers: Tensor
    num_lse: int
    semaphores: Tensor


class PortablePlan:
    """Launches of a portable kernel for calls with one signature.

    Args:
        call: a call with the signature.

    Attributes:
        launches: the launchers, and how they partition a batch.
    """

    is_repeatable = True

    def __init__(self, call: AttentionCall) -> None:
        self.launches: Launches = make_launches(call)
        # options that are tensors or scales, which the kernel receives anew at each call
        values = lower_tensors(call.options)
        self._has_values = any(value is not None for value in values)

    def takes(self, call: AttentionCall) -> bool:
        """Return True: this kernel takes any address and any scale."""
        return True

    def find_partials(
        self, call: AttentionCall, counters: int, partials: int, rows: int
    ) -> Partials:
        """Return the workspace of a launch.

        Args:
            counters: counters of finished splits.
            partials: partial results.
            rows: rows of each, at most.
        """
        # the values begin at a multiple of 16 bytes, after the log-sum-exps
        num_lse = -(-partials * rows // 4) * 4
        numbers = num_lse * (self.launches.value_size + 1)
        semaphores, workspace = find_workspace(call.query.device, counters, numbers)
        return Partials(rows, workspace, num_lse, semaphores)

    def start(
        self,
        launcher: Launcher,
        grid: tuple[int, int, int],
        call: AttentionCall,
        partials: Partials | None,
    ) -> None:
        """Launch a kernel.

        Args:
            launcher: the kernel with its constants.
            grid: programs along each axis.
            call: the call.
            partials: Optional. Workspace of the partial results. None without splits.
        """
        query, key, value, block_table, query_start_loc, lengths = call[:6]
        out, lse = call.out, call.lse
        split_rows, workspace, num_lse, semaphores = partials or (0, None, 0, None)
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
            partial_out=at + 4 * num_lse,
            partial_lse=at,
            semaphores=0 if semaphores is None else semaphores.data_ptr(),
        )
        num_reqs = query_start_loc.shape[0] - 1
        # the kernels' arguments from `num_tokens` to `lse_stride_token`
        numbers = (
            query.shape[0],
            num_reqs,
            num_reqs.bit_length(),
            split_rows,
            call.scale,
            0 if block_table is None else block_table.stride(0),
            *((0, 0) if lse is None else lse.stride()),
        )
        tensors = (
            query, key, value, block_table, query_start_loc, lengths, out, lse,
            workspace, num_lse, semaphores,
        )  # fmt: skip
        values = lower_tensors(call.options) if self._has_values else None
        launcher(grid, pointers, values, numbers, tensors)

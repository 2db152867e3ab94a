"""Launchers of the portable kernels, and the tensors of a call as these kernels take them."""

from typing import Any

import torch
from torch import Tensor

from .....contract.cache_formats import TENSOR_SCALE_DTYPES
from ....runtime.launcher import Launcher
from ..arguments import Tensors
from ..options.score import OptionTensors
from .tuning import Tiles


def make_launcher(
    kernel: Any,
    fixed: dict[str, Any],
    tiles: Tiles,
    inputs: tuple[Any, Any] | None = None,
    is_dependent: bool = False,
    registers: int | None = None,
    **constants: Any,
) -> Launcher:
    """Return a launcher of a kernel.

    Args:
        inputs: Optional. What converts the tensors of a launch, and the NamedTuple in which the
            kernel takes its pointers. If None, those of a call to paged attention.
        is_dependent, registers: as in `Launcher`.
    """
    lower, tensors = inputs or (lower_call, Tensors)
    return Launcher(
        kernel,
        lower,
        fixed | constants,
        tiles.num_warps,
        tiles.num_stages,
        groups=(tensors, OptionTensors),
        is_dependent=is_dependent,
        registers=registers,
    )


def lower_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    partials: int,
    semaphores: Tensor | None,
) -> Tensors:
    """Return the tensors of a launch.

    Args:
        workspace: Optional. Log-sum-exps of all partial results, then their values.
        partials: number of those log-sum-exps.
    """
    return Tensors(
        q=query,
        k=as_bits(key),
        v=as_bits(value),
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=lengths,
        out=as_bits(out),
        lse=lse,
        partial_out=None if workspace is None else workspace[partials:],
        partial_lse=workspace,
        semaphores=semaphores,
    )


def as_bits(tensor: Tensor) -> Tensor:
    """Return FP8 numbers as bytes, which the kernels decode themselves."""
    return tensor.view(torch.uint8) if tensor.dtype in TENSOR_SCALE_DTYPES else tensor

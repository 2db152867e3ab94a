"""Calls that the Hopper kernels support, and their tensors as planes of rows, which TMA addresses.

The rows of a plane have one stride. Another head begins at another row or column.
"""

from collections.abc import Collection
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

import torch

from .....contract.attention_options import AttentionOptions
from ....runtime.attention_call import AttentionCall
from ....runtime.launcher import next_power_of_2
from .config import SWIZZLE_ROWS, WARPGROUP_M

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = range(8, 257, 8)
"""Head sizes of queries and keys, and of values: TMA takes strides of multiples of 16 bytes."""
READ_OPTIONS = (
    "causal",
    "batch_invariant",
    "sliding_window",
    "attention_chunk_size",
    "logits_soft_cap",
    "sinks",
)
MAX_COORDINATE = 2**31 - 1
"""The largest row or column that TMA addresses."""
BOX_MARGIN = 1024
"""Rows past a tensor's last row at which a box may begin. TMA fills such rows with zeros."""


def other_options(read: Collection[str]) -> list[str]:
    """Return the names of the options that are not among those that a kernel reads."""
    return [
        option.name for option in fields(AttentionOptions) if option.name not in read
    ]


OTHER_OPTIONS = other_options(READ_OPTIONS)
"""Options that these kernels do not support: each must be None."""
get_other_options = attrgetter(*OTHER_OPTIONS)


def unsupported(kernel: str) -> NotImplementedError:
    """Return the error of a call that a kernel does not support."""
    return NotImplementedError(
        f"the {kernel} does not support this call: expected one for which supports(call) is True;"
        " use the portable kernel"
    )


def takes_scale_and_lse(call: AttentionCall) -> bool:
    """Return whether kernels take a call's scale, and the dtype and strides of its log-sum-exp.

    The scale must be positive because the running maximum is taken before it.
    """
    lse = call.lse
    if not 1e-20 < call.scale < 1e20:
        return False
    return lse is None or (
        lse.dtype == torch.float32 and max(lse.stride()) <= MAX_COORDINATE
    )


class Plane(NamedTuple):
    """A tensor of heads as a plane of rows, which is how TMA addresses it.

    Args:
        rows, width: of the whole tensor, from its first element on.
        stride: elements from row to row.
        block_rows: rows from block to block; 0 without blocks.
        head_rows, head_columns: rows and columns from head to head; one of them is 0.
    """

    rows: int
    width: int
    stride: int
    block_rows: int
    head_rows: int
    head_columns: int


def find_planes(call: AttentionCall) -> tuple[Plane, Plane, Plane, Plane] | None:
    """Return the planes of a call's tensors, or None if the kernel does not support the call."""
    query, key, value, block_table = call[:4]
    if type(call.options.causal) is not bool:
        return None
    if any(option is not None for option in get_other_options(call.options)):
        return None
    dtype, head_size = query.dtype, query.shape[-1]
    if dtype not in DTYPES or not dtype == key.dtype == value.dtype:
        return None
    if call.out.dtype not in (dtype, torch.float32):
        return None
    if head_size not in HEAD_SIZES or value.shape[-1] not in HEAD_SIZES:
        return None
    block_size = 0 if block_table is None else key.shape[1]
    if block_size % SWIZZLE_ROWS.value or (
        block_table is not None and block_table.stride(1) != 1
    ):
        return None
    q_plane, k_plane, v_plane, out_plane = (
        find_plane(tensor.shape, tensor.stride())
        for tensor in (query, key, value, call.out)
    )
    if q_plane is None or k_plane is None or v_plane is None or out_plane is None:
        return None
    return q_plane, k_plane, v_plane, out_plane


def takes_groups(call: AttentionCall) -> bool:
    """Return whether query tiles with all query heads of a KV head can compute a call.

    They are causal and read pages. Other calls, and outputs of float32, have not run on a GPU yet.
    """
    if find_planes(call) is None or call.block_table is None or not call.options.causal:
        return False
    group_size = call.query.shape[1] // call.value.shape[-2]
    return (
        call.out.dtype == call.query.dtype
        and next_power_of_2(group_size) <= WARPGROUP_M.value
    )


def find_plane(shape: tuple[int, ...], strides: tuple[int, ...]) -> Plane | None:
    """Return a tensor as a plane, or None if TMA cannot address it.

    Example:
        Keys [100 blocks, 16 slots, 8 heads, 128], contiguous: a row is a slot, and rows are 1,024
        elements apart. The next block begins 16 rows further, the next head 128 columns further.
        With the heads before the slots in memory, rows are 128 elements apart. The next block
        begins 128 rows further, the next head 16 rows further.
    """
    *_, rows, heads, head_size = shape
    stride, head_stride = strides[-3:-1]
    block_rows = blocks = 0
    if 0 in shape or strides[-1] != 1 or min(strides) < 0 or stride < head_size:
        return None
    if any(step % 8 for step in strides[:-1]) or max(strides) > MAX_COORDINATE:
        return None
    if len(shape) == 4:
        blocks = shape[0] - 1
        block_rows, rest = divmod(strides[0], stride)
        if rest and blocks:
            return None
    head_rows, rest = divmod(head_stride, stride)
    head_columns = 0
    if rest or not head_rows:
        head_rows, head_columns = 0, head_stride
    rows += blocks * block_rows + (heads - 1) * head_rows
    width = head_size + (heads - 1) * head_columns
    # a box may begin a tile past the last row
    if rows + BOX_MARGIN > MAX_COORDINATE or width > MAX_COORDINATE:
        return None
    return Plane(rows, width, stride, block_rows, head_rows, head_columns)

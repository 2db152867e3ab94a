"""Host side of the Hopper prefill kernel: which calls it supports, launch plans, tensor maps.

A launch plan holds what follows from a call's dtypes, shapes and strides. It is made once per call
signature. The kernel reads and writes tensors through the tensor memory accelerator (TMA), which
needs a tensor map of each: address, rows and their stride, and the box that one load brings. A map
changes with the address and the number of tokens only, so the maps of a KV cache are made once.
"""

import math
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....contract.attention_options import AttentionOptions
from ...launch.launcher import INTERPRETED, Launcher
from ...launch.tuning import count_processors, is_hopper
from ...launch.workspace import find_workspace
from .config import BLOCK_N, BOX_COLUMNS, SWIZZLED, WARPGROUP_M, count_consumers
from .kernel import prefill_kernel

LOG2_E = math.log2(math.e)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128)
SUPPORTED_OPTIONS = ("causal", "batch_invariant")
OTHER_OPTIONS = [
    each.name for each in fields(AttentionOptions) if each.name not in SUPPORTED_OPTIONS
]
"""Options that this kernel does not support: each must be None."""
get_other_options = attrgetter(*OTHER_OPTIONS)
MAX_COORDINATE = 2**31 - 1
"""The largest row or column that TMA addresses."""
BOX_MARGIN = 1024
"""Rows past a tensor's last row at which a box may begin. TMA fills such rows with zeros."""
MAX_TENSOR_MAPS = 64
"""Tensor maps that a plan keeps. Queries and outputs alternate between a few addresses."""

Box: TypeAlias = tuple[int, int]


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


class Address(NamedTuple):
    """An address that `TensorDescriptor` takes for a tensor, and that keeps no memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


@dataclass
class PrefillPlan:
    """How the kernel is launched for all calls of one signature.

    Args:
        dtype: dtype of the queries, keys, values and the output.
        planes: the planes of those four, with the number of tokens of the first call.
        boxes: the TMA box of each.
        tokens: new tokens of the first call.
        key_tokens: ragged keys of the first call, or the blocks of the cache.
        num_heads, group_size: query heads, and query heads per KV head.
        tile_rows: BLOCK_M, the query rows of a work item.
        strides: the kernel's arguments from `q_head_rows` to `out_stride_head`.
        constants: the kernel's constexpr arguments.
    """

    dtype: torch.dtype
    planes: tuple[Plane, Plane, Plane, Plane]
    boxes: tuple[Box, Box, Box, Box]
    tokens: int
    key_tokens: int
    num_heads: int
    group_size: int
    tile_rows: int
    strides: tuple[int, ...]
    constants: dict[str, Any]
    launcher: Launcher = field(init=False)
    _tensor_maps: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the launcher."""
        self.launcher = Launcher(
            prefill_kernel, self.lower, self.constants, num_warps=4, num_stages=1
        )

    def tensor_maps(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """Return the encoded tensor maps of the queries, keys, values and the output."""
        if len(self._tensor_maps) > MAX_TENSOR_MAPS:
            self._tensor_maps.clear()
        rows = self.extra_rows(tensors[0], tensors[1])
        maps = []
        for index, (tensor, extra_rows) in enumerate(zip(tensors, rows, strict=True)):
            key = (index, tensor.data_ptr(), extra_rows)
            cached = self._tensor_maps.get(key)
            if cached is None:
                descriptor = self.describe(index, tensor, extra_rows)
                cached = self.launcher.encode(index, descriptor)
                self._tensor_maps[key] = cached
            maps += cached
        return maps

    def extra_rows(self, query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
        """Return the rows that each tensor has beyond those of its plane; may be negative.

        Calls of one signature differ in their tokens, and in their keys if these are ragged. A
        cache has the same number of blocks in all of them.
        """
        new_tokens = query.shape[0] - self.tokens
        new_keys = key.shape[0] - self.key_tokens
        return new_tokens, new_keys, new_keys, new_tokens

    def describe(self, index: int, tensor: Tensor, extra_rows: int) -> TensorDescriptor:
        """Return the TMA descriptor of a tensor.

        Args:
            index: index of the tensor's plane in `planes`.
            tensor: the tensor.
            extra_rows: rows that it has beyond those of the plane; may be negative.
        """
        plane = self.planes[index]
        return TensorDescriptor(
            Address(tensor.data_ptr(), self.dtype),
            [plane.rows + extra_rows, plane.width],
            [plane.stride, 1],
            list(self.boxes[index]),
            SWIZZLED.value,
        )

    def lower(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        *others: Tensor | None,
    ) -> tuple[Any, ...]:
        """Return a call's descriptors and tensors in the order of the kernel's arguments."""
        tensors = (query, key, value, out)
        rows = self.extra_rows(query, key)
        descriptors = map(self.describe, range(4), tensors, rows)
        return (*descriptors, out, *others)


def supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    options: AttentionOptions,
) -> bool:
    """Return whether the kernel can run calls of this signature on the query's device.

    Args:
        query, key, value, block_table, out: as in `launch`.
        options: attention options of the call.
    """
    if INTERPRETED or query.device.type != "cuda" or not is_hopper(query.device):
        return False
    return _find_planes(query, key, value, block_table, out, options) is not None


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    options: AttentionOptions,
) -> PrefillPlan:
    """Return the launch plan of a call signature, for any device.

    Args:
        query, key, value, block_table, out, options: as in `supports`.
    Raises:
        NotImplementedError: the kernel does not support the signature on any device.
    Example:
        Keys [100 blocks, 16 slots, 8 heads, 128], contiguous: a row is a slot, and rows are 1,024
        elements apart. The next block begins 16 rows further, the next head 128 columns further.
        With the heads before the slots in memory, rows are 128 elements apart. The next block
        begins 128 rows further, the next head 16 rows further.
    """
    planes = _find_planes(query, key, value, block_table, out, options)
    if planes is None:
        raise NotImplementedError(
            "the Hopper prefill kernel does not support this call: expected one for which"
            " supports() is True; use the portable kernel"
        )
    q_plane, k_plane, v_plane, out_plane = planes
    _, num_heads, head_size = query.shape
    block_size = 0 if block_table is None else key.shape[1]
    q_box = (WARPGROUP_M.value, head_size)
    kv_box = (math.gcd(block_size, BLOCK_N.value), BOX_COLUMNS.value)
    return PrefillPlan(
        dtype=query.dtype,
        planes=planes,
        boxes=(q_box, kv_box, kv_box, q_box),
        tokens=query.shape[0],
        key_tokens=key.shape[0],
        num_heads=num_heads,
        group_size=num_heads // key.shape[-2],
        tile_rows=WARPGROUP_M.value * count_consumers(head_size),
        strides=(
            *q_plane[4:],
            *k_plane[3:],
            *v_plane[3:],
            *out_plane[4:],
            *out.stride()[:2],
        ),
        constants={
            "HEAD_DIM": head_size,
            "BLOCK_SIZE": block_size,
            "CAUSAL": options.causal,
        },
    )


def accepts(
    plan: PrefillPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
) -> bool:
    """Return whether `launch` can run this call of the plan's signature.

    A signature does not hold addresses, the number of tokens and the scale.

    Args:
        plan: the launch plan.
        query, key, value, block_table, out, lse: as in `launch`.
        scale: must be positive, because the running maximum is taken before it is applied.
    """
    if not 1e-20 < scale < 1e20:
        return False
    if (query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr()) % 16:
        return False
    if lse is not None and (
        lse.dtype != torch.float32 or max(lse.stride()) > MAX_COORDINATE
    ):
        return False
    if block_table is not None and block_table.stride(0) > MAX_COORDINATE:
        return False
    rows = max(
        plane.rows + extra_rows
        for plane, extra_rows in zip(
            plan.planes, plan.extra_rows(query, key), strict=True
        )
    )
    return rows + BOX_MARGIN <= MAX_COORDINATE


def launch(
    plan: PrefillPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    max_decode_rows: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attend with every request of more than `max_decode_rows` rows.

    The outputs of the other requests are not written. A query without a visible key gets the
    output 0 and the log-sum-exp -inf.

    Args:
        plan: the launch plan; it accepts the call.
        query: [tokens, query_heads, head_size].
        key, value: [num_blocks, block_size, kv_heads, head_size] with a block table, or
            [key_tokens, kv_heads, head_size].
        block_table: [reqs, max_blocks]. Optional. If None, the keys of all requests are
            concatenated. Entries past a sequence's last block are never read.
        query_start_loc: [reqs + 1].
        kv_lens: [reqs] keys of each request; without a block table [reqs + 1], where they start.
        max_query_len: an upper bound of the queries per request.
        max_decode_rows: a request with at most so many rows (queries times query heads per KV
            head) is skipped.
        scale: factor of the dot products.
        out: [tokens, query_heads, head_size], modified in place.
        lse: [query_heads, tokens] log-sum-exp in base e, modified in place. Optional. If None, it
            is not computed.
    """
    if max_query_len * plan.group_size <= max_decode_rows:
        return
    num_reqs = query_start_loc.shape[0] - 1
    # a request has at most the tiles that its tokens fill, and one that is not full
    num_items = (query.shape[0] // plan.tile_rows + num_reqs) * plan.num_heads
    grid = (min(num_items, count_processors(query.device)), 1, 1)
    work_counter = find_workspace(query.device, 2, 0)[0]
    others = (lse, block_table, query_start_loc, kv_lens, work_counter)
    pointers = (
        out.data_ptr(),
        *(0 if each is None else each.data_ptr() for each in others),
    )
    numbers = (
        num_reqs,
        plan.num_heads,
        plan.group_size,
        max_decode_rows,
        *plan.strides,
        *((0, 0) if lse is None else lse.stride()),
        0 if block_table is None else block_table.stride(0),
    )
    tensors = (query, key, value, out)
    plan.launcher(
        grid,
        pointers,
        (scale * LOG2_E,),
        numbers,
        (*tensors, *others),
        plan.tensor_maps(tensors) if plan.launcher.is_ready else (),
    )


def _find_planes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    options: AttentionOptions,
) -> tuple[Plane, Plane, Plane, Plane] | None:
    """Return the planes of a call's tensors, or None if the kernel does not support the call."""
    # this kernel is not batch-invariant: it and the decode kernel add up in different orders
    if type(options.causal) is not bool or options.batch_invariant:
        return None
    if get_other_options(options).count(None) < len(OTHER_OPTIONS):
        return None
    dtype, head_size = query.dtype, query.shape[-1]
    if dtype not in DTYPES or not dtype == key.dtype == value.dtype == out.dtype:
        return None
    if head_size not in HEAD_SIZES or value.shape[-1] != head_size:
        return None
    # a box of 16 rows or more never crosses a block
    block_size = 0 if block_table is None else key.shape[1]
    if block_size % 16 or (block_table is not None and block_table.stride(1) != 1):
        return None
    q_plane, k_plane, v_plane, out_plane = (
        _find_plane(each.shape, each.stride()) for each in (query, key, value, out)
    )
    if q_plane is None or k_plane is None or v_plane is None or out_plane is None:
        return None
    return q_plane, k_plane, v_plane, out_plane


def _find_plane(shape: tuple[int, ...], strides: tuple[int, ...]) -> Plane | None:
    """Return a tensor as a plane, or None if TMA cannot address it."""
    *_, rows, heads, head_size = shape
    stride, head_stride = strides[-3:-1]
    block_rows = blocks = 0
    if 0 in shape or strides[-1] != 1 or min(strides) < 0 or stride < head_size:
        return None
    if any(each % 8 for each in strides[:-1]) or max(strides) > MAX_COORDINATE:
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

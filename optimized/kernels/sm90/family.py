"""Kernel family of Hopper chips (compute capability 9.0): supported calls, plans, tensor maps.

A launch plan holds what follows from a call's dtypes, shapes and strides. It is made once per call
signature. The kernel reads and writes tensors through the tensor memory accelerator (TMA), which
needs a tensor map of each: address, rows and their stride, and the box that one load brings. A map
changes with the address and the number of tokens only, so the maps of a KV cache are made once.
"""

import math
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....contract.attention_options import AttentionOptions
from ...launch.attention_call import AttentionCall
from ...launch.launcher import Launcher
from ...launch.tuning import count_processors, is_hopper
from ...launch.workspace import find_workspace
from .config import (
    BOX_COLUMNS,
    LOG2_E,
    SWIZZLED,
    SWIZZLED_3D,
    WARPGROUP_M,
    Config,
    choose_block_n,
    choose_consumers,
    choose_group,
    choose_stages,
    pad_head_size,
)
from .kernel import prefill_kernel

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 80, 96, 112, 128, 256)
"""Head sizes of queries, keys and values that are alike."""
TAIL_DIMS = {(192, 128): 64}
"""Other head sizes, of queries and keys and of values, with the columns that values lack."""
READ_OPTIONS = (
    "causal",
    "batch_invariant",
    "sliding_window",
    "attention_chunk_size",
    "logits_soft_cap",
    "sinks",
)
OTHER_OPTIONS = [
    each.name for each in fields(AttentionOptions) if each.name not in READ_OPTIONS
]
"""Options that this kernel does not support: each must be None."""
get_other_options = attrgetter(*OTHER_OPTIONS)
MAX_COORDINATE = 2**31 - 1
"""The largest row or column that TMA addresses."""
BOX_MARGIN = 1024
"""Rows past a tensor's last row at which a box may begin. TMA fills such rows with zeros."""
MAX_TENSOR_MAPS = 512
"""Tensor maps that a plan keeps, 256 KiB of host memory. Each layer has a map of its keys and one
of its values, which all steps share; queries and outputs alternate between a few addresses."""

Box: TypeAlias = tuple[int, ...]


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


def supports(call: AttentionCall) -> bool:
    """Return whether the kernel computes long requests of calls with this signature.

    The kernel is not batch-invariant: it and the portable decode kernel add up in different
    orders. `invariant/` has kernels for such calls.
    """
    return (
        is_hopper(call.query.device)
        and not call.options.batch_invariant
        and find_planes(call) is not None
    )


def plan(call: AttentionCall) -> "Sm90Plan":
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernel does not support.
    """
    planes = find_planes(call)
    if planes is None:
        raise NotImplementedError(
            "the Hopper prefill kernel does not support this call: expected one for which"
            " supports(call) is True; use the portable kernel"
        )
    q_plane, k_plane, v_plane, out_plane = planes
    options: Any = call.options
    num_heads, head_size = call.query.shape[1], call.value.shape[-1]
    tail_dim = TAIL_DIMS.get((call.query.shape[-1], head_size), 0)
    block_size = 0 if call.block_table is None else call.key.shape[1]
    head_dim = pad_head_size(head_size)
    window, chunk_size = options.sliding_window or 0, options.attention_chunk_size or 0
    block_n = choose_block_n(head_dim, window, chunk_size)
    group_size = num_heads // call.key.shape[-2]
    config = Config(
        HEAD_SIZE=head_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        STAGES=choose_stages(head_dim, block_n),
        CAUSAL=options.causal,
        WINDOW=window,
        CHUNK_SIZE=chunk_size,
        SOFT_CAP=float(options.logits_soft_cap or 0.0),
        # a log-sum-exp is float32, and its budget is smaller
        FAST_TANH=options.logits_soft_cap is not None
        and call.query.dtype == torch.bfloat16
        and call.lse is None,
        TAIL_DIM=tail_dim,
        CONSUMERS=choose_consumers(head_size, options.batch_invariant),
    )
    out_box: Box = (WARPGROUP_M.value, head_dim)
    # a box of tokens, heads and columns needs a step from head to head
    if not tail_dim and call.query.stride(1) > 0:
        config = config._replace(GROUP=choose_group(group_size))
        if config.GROUP > 1 or head_size < head_dim:
            out_box = (WARPGROUP_M.value // config.GROUP, config.GROUP, head_dim)
    q_box = (WARPGROUP_M.value, BOX_COLUMNS.value) if tail_dim else out_box
    # a box has at least 16 rows and does not cross a block
    kv_rows = math.gcd(block_size, block_n)
    kv_box: Box = (kv_rows, BOX_COLUMNS.value)
    head_strides = call.key.stride(-2), call.value.stride(-2)
    if head_size < head_dim and not tail_dim and min(head_strides) > 0:
        # a box of rows, heads and columns: its map has the rows of one head
        kv_box = (kv_rows, 1, BOX_COLUMNS.value)
        k_plane, v_plane = (each._replace(head_rows=0) for each in (k_plane, v_plane))
    return Sm90Plan(
        dtype=call.query.dtype,
        planes=planes,
        boxes=(q_box, kv_box, kv_box, out_box),
        tokens=call.query.shape[0],
        keys=call.key.shape[0],
        num_heads=num_heads,
        group_size=group_size,
        tile_rows=WARPGROUP_M.value * config.CONSUMERS,
        strides=(
            *q_plane[4:],
            *k_plane[3:],
            *v_plane[3:],
            *out_plane[4:],
            *call.out.stride()[:2],
        ),
        constants={"config": config},
    )


@dataclass
class Sm90Plan:
    """Launches of the Hopper prefill kernel for all calls with one signature.

    Args:
        dtype: dtype of the queries, keys and values. The output has it too, or float32, which
            TMA does not store.
        planes: the planes of those four, with the sizes of the first call.
        boxes: the TMA box of each: rows and columns, or tokens, query heads and columns.
        tokens: new tokens of the first call.
        keys: ragged keys of the first call, or the blocks of the cache.
        num_heads, group_size: query heads, and query heads per KV head.
        tile_rows: the query rows of a work item.
        strides: the kernel's arguments from `q_head_rows` to `out_stride_head`.
        constants: the kernel's constexpr arguments.
    """

    dtype: torch.dtype
    planes: tuple[Plane, Plane, Plane, Plane]
    boxes: tuple[Box, Box, Box, Box]
    tokens: int
    keys: int
    num_heads: int
    group_size: int
    tile_rows: int
    strides: tuple[int, ...]
    constants: dict[str, Any]
    launcher: Launcher = field(init=False)
    _tensor_maps: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)
    is_repeatable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Create the launcher."""
        self.launcher = Launcher(
            prefill_kernel, self.lower, self.constants, num_warps=4, num_stages=1
        )

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out.

        That is addresses that are multiples of 16, a positive scale, and sizes and strides within
        32 bits. The scale must be positive because the running maximum is taken before it.
        """
        query, key, value, block_table = call[:4]
        out, lse = call.out, call.lse
        if not 1e-20 < call.scale < 1e20:
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
            plane.rows + extra
            for plane, extra in zip(
                self.planes, self.extra_rows(query, key), strict=True
            )
        )
        return rows + BOX_MARGIN <= MAX_COORDINATE

    def launch_prefill(
        self,
        call: AttentionCall,
        short_rows: int,
        scales: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Compute all requests of more than `short_rows` rows (queries times group size).

        The outputs of the other requests are not written. A query without a visible key gets the
        output 0 and the log-sum-exp -inf.

        Args:
            call: one that the plan takes; its `out` and `lse` are modified in place.
            short_rows: rows of the largest request that the decode kernel computes.
            scales: Optional. [num_heads] float32 factors of the keys, and of the values, of each
                query head, the same for those of a KV head: both or none in all launches of a
                plan. If None, they are 1.
        """
        query, key, value, block_table = call[:4]
        out, lse = call.out, call.lse
        sinks = call.options.sinks
        if call.max_query_len * self.group_size <= short_rows:
            return
        num_reqs = call.query_start_loc.shape[0] - 1
        # a request has at most the tiles that its tokens fill, and one that is not full
        group = self.constants["config"].GROUP
        num_heads = self.num_heads // group
        num_items = (query.shape[0] // (self.tile_rows // group) + num_reqs) * num_heads
        grid = (min(num_items, count_processors(query.device)), 1, 1)
        work_counter = find_workspace(query.device, 2, 0)[0]
        others = (lse, block_table, call.query_start_loc, call.lengths, work_counter)
        pointers = (
            out.data_ptr(),
            *(0 if each is None else each.data_ptr() for each in others),
        )
        # with all query heads of a KV head in a tile, the kernel counts tokens and KV heads
        numbers = (
            num_reqs,
            num_heads,
            self.group_size // group,
            short_rows // group,
            *self.strides,
            *((0, 0) if lse is None else lse.stride()),
            0 if block_table is None else block_table.stride(0),
        )
        tensors = (query, key, value, out)
        extra_rows = self.extra_rows(query, key)

        def make_maps(*addresses: int) -> list[Any]:
            return self.tensor_maps(addresses, extra_rows)

        map_addresses = [each.data_ptr() for each in tensors]
        maps = make_maps(*map_addresses) if self.launcher.is_ready else []
        self.launcher(
            grid,
            pointers,
            (
                None if sinks is None else sinks.contiguous(),
                *scales,
                call.scale * LOG2_E.value,
            ),
            numbers,
            (*tensors, *others),
            maps,
            make_maps,
            map_addresses,
        )

    def tensor_maps(
        self, addresses: tuple[int, ...], extra_rows: tuple[int, ...]
    ) -> list[Any]:
        """Return the encoded tensor maps of the queries, keys, values and the output.

        Args:
            addresses: of these four, or of the first of them.
            extra_rows: what the method of this name returns, for as many.
        """
        if len(self._tensor_maps) > MAX_TENSOR_MAPS:
            self._tensor_maps.clear()
        maps = []
        for key in zip(range(len(addresses)), addresses, extra_rows, strict=True):
            cached = self._tensor_maps.get(key)
            if cached is None:
                index, address, extra = key
                descriptor = self.describe(index, Address(address, self.dtype), extra)
                cached = self.launcher.encode(index, descriptor)
                self._tensor_maps[key] = cached
            maps += cached
        return maps

    def extra_rows(self, query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
        """Return how many rows each tensor has beyond those of its plane; may be negative.

        Calls of one signature differ in their tokens, and in their keys if these are ragged. A
        cache has the same blocks in all of them, unless it was converted for the call.
        """
        tokens = query.shape[0] - self.tokens
        keys = (key.shape[0] - self.keys) * (self.planes[1].block_rows or 1)
        return tokens, keys, keys, tokens

    def describe(
        self, index: int, tensor: Tensor | Address, extra_rows: int
    ) -> TensorDescriptor:
        """Return the TMA descriptor of a tensor.

        Args:
            index: index of the tensor's plane in `planes`.
            tensor: the tensor.
            extra_rows: rows that it has beyond those of the plane; may be negative.
        """
        plane, box = self.planes[index], list(self.boxes[index])
        address = Address(tensor.data_ptr(), self.dtype)
        if len(box) == 2:
            shape, strides = [plane.rows + extra_rows, plane.width], [plane.stride, 1]
            return TensorDescriptor(address, shape, strides, box, SWIZZLED.value)
        config: Config = self.constants["config"]
        # the first are the queries, the last the output
        head_size = config.HEAD_SIZE + (config.TAIL_DIM if index == 0 else 0)
        head_stride = plane.head_columns + plane.head_rows * plane.stride
        # keys and values are the second and the third
        heads = self.num_heads // (self.group_size if index in (1, 2) else 1)
        # those of one head
        rows = plane.rows - (heads - 1) * plane.head_rows + extra_rows
        return TensorDescriptor(
            address,
            [rows, heads, head_size],
            [plane.stride, head_stride, 1],
            box,
            SWIZZLED_3D.value,
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
        descriptors = map(self.describe, range(4), tensors, self.extra_rows(query, key))
        return (*descriptors, out, *others)


def find_planes(call: AttentionCall) -> tuple[Plane, Plane, Plane, Plane] | None:
    """Return the planes of a call's tensors, or None if the kernel does not support the call."""
    query, key, value, block_table = call[:4]
    if type(call.options.causal) is not bool:
        return None
    if get_other_options(call.options).count(None) < len(OTHER_OPTIONS):
        return None
    has_lower_bound = (
        call.options.sliding_window is not None
        or call.options.attention_chunk_size is not None
    )
    if has_lower_bound and not call.options.causal:
        return None
    dtype, head_size = query.dtype, query.shape[-1]
    if dtype not in DTYPES or not dtype == key.dtype == value.dtype:
        return None
    if call.out.dtype not in (dtype, torch.float32):
        return None
    value_size = value.shape[-1]
    is_alike = head_size == value_size and head_size in HEAD_SIZES
    if not is_alike and (head_size, value_size) not in TAIL_DIMS:
        return None
    block_size = 0 if block_table is None else key.shape[1]
    if block_size % 16 or (block_table is not None and block_table.stride(1) != 1):
        return None
    q_plane, k_plane, v_plane, out_plane = (
        _find_plane(each.shape, each.stride()) for each in (query, key, value, call.out)
    )
    if q_plane is None or k_plane is None or v_plane is None or out_plane is None:
        return None
    return q_plane, k_plane, v_plane, out_plane


def _find_plane(shape: tuple[int, ...], strides: tuple[int, ...]) -> Plane | None:
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

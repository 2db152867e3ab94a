"""What the launch plans of the kernels for Hopper have in common: tensor maps, and a launch.

A kernel reads and writes tensors through the tensor memory accelerator (TMA), which needs a
tensor map of each: address, rows and their stride, and the box that one load brings. A map changes
with the address and the number of tokens only, so the maps of a KV cache are made once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....runtime.attention_call import AttentionCall
from ....runtime.launcher import Launcher
from .config import LOG2_E, SWIZZLED, SWIZZLED_3D, WARPGROUP_M, Sm90Config
from .entry import find_ends, find_order
from .planes import BOX_MARGIN, MAX_COORDINATE, Plane, takes_scale_and_lse

MAX_TENSOR_MAPS = 512
"""Tensor maps that a plan keeps, 256 KiB of host memory. Each layer has a map of its keys and one
of its values, which all steps share; queries and outputs alternate between a few addresses."""

Box: TypeAlias = tuple[int, ...]
PlanType = TypeVar("PlanType", bound="Sm90Plan")


class Address(NamedTuple):
    """An address that `TensorDescriptor` takes for a tensor, and that keeps no memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


@dataclass
class Sm90Plan:
    """Launches of a kernel for all calls with one signature.

    Args:
        dtype: dtype of the queries, keys and values. The output has it too, or float32, which
            TMA does not store.
        planes: the planes of those four, with the sizes of the first call.
        boxes: the TMA box of each: rows and columns, or tokens, query heads and columns.
        tokens: new tokens of the first call.
        keys: ragged keys of the first call, or the blocks of the cache.
        num_heads, group_size: query heads, and query heads per KV head.
        tile_rows: the query rows of a work item.
        strides: by name, the kernel's arguments that are strides or rows of a plane.
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
    strides: Mapping[str, int]
    constants: dict[str, Any]
    launcher: Launcher = field(init=False)
    _tensor_maps: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)
    is_repeatable: ClassVar[bool] = True
    kernel: ClassVar[Any]
    arguments: ClassVar[Any]
    """NamedTuple of the kernel's arguments. Queries, keys and values have tensor maps; the output
    has one in some kernels."""
    encodes_maps: ClassVar[bool] = False
    """Whether `Launcher` encodes the tensor maps, and not Triton."""

    def __post_init__(self) -> None:
        """Create the launcher."""
        self.launcher = Launcher(
            self.kernel,
            self.lower,
            self.constants,
            num_warps=4,
            num_stages=1,
            encodes_maps=self.encodes_maps,
        )

    @classmethod
    def derive(
        cls: type[PlanType],
        base: "Sm90Plan",
        config: Sm90Config,
        boxes: tuple[Box, Box, Box, Box],
    ) -> PlanType:
        """Return a plan for the calls of another plan, of a kernel with other work items.

        Args:
            base: the other plan.
            config, boxes: those of the new plan.
        """
        names = cls.arguments._fields
        return cls(
            dtype=base.dtype,
            planes=base.planes,
            boxes=boxes,
            tokens=base.tokens,
            keys=base.keys,
            num_heads=base.num_heads,
            group_size=base.group_size,
            tile_rows=WARPGROUP_M.value * config.CONSUMERS,
            strides={
                name: base.strides[name] for name in names if name in base.strides
            },
            constants={"config": config},
        )

    @property
    def config(self) -> Sm90Config:
        """The kernel's constants."""
        config: Sm90Config = self.constants["config"]
        return config

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out.

        That is addresses that are multiples of 16, a positive scale, and sizes and strides within
        32 bits. The scale must be positive because the running maximum is taken before it.
        """
        query, key, value, block_table = call[:4]
        out = call.out
        if not takes_scale_and_lse(call):
            return False
        if (query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr()) % 16:
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

    def name_arguments(self, call: AttentionCall) -> dict[str, Any]:
        """Return the arguments by name that several kernels have in common."""
        block_table, lse, sinks = call.block_table, call.lse, call.options.sinks
        lse_stride_head, lse_stride_token = (0, 0) if lse is None else lse.stride()
        return {
            "q_desc": call.query,
            "k_desc": call.key,
            "v_desc": call.value,
            "out_desc": call.out,
            "out": call.out,
            "lse": lse,
            "block_table": block_table,
            "query_start_loc": call.query_start_loc,
            "kv_lens": call.lengths,
            "sinks": None if sinks is None else sinks.contiguous(),
            "scale_log2": call.scale * LOG2_E.value,
            "num_reqs": call.query_start_loc.shape[0] - 1,
            "num_tokens": call.query.shape[0],
            "num_heads": self.num_heads,
            "group_size": self.group_size,
            **self.strides,
            "lse_stride_head": lse_stride_head,
            "lse_stride_token": lse_stride_token,
            "block_table_stride": 0 if block_table is None else block_table.stride(0),
        }

    def launch_with_maps(
        self,
        call: AttentionCall,
        grid: tuple[int, int, int],
        given: Mapping[str, Any],
        may_be_converted: bool = False,
    ) -> None:
        """Launch the kernel.

        Args:
            call: one that the plan takes.
            grid: programs along each axis.
            given: the kernel's arguments by name; for a tensor map the tensor.
            may_be_converted: whether keys and values may be a converted cache, and not those of the
                call that is repeated.
        """
        maps, pointers, options = find_ends(self.arguments)
        arguments = find_order(self.arguments)(given)
        tensors = arguments[:pointers]
        extra_rows = self.extra_rows(call.query, call.key)[:maps]

        def make_maps(*addresses: int) -> list[Any]:
            return self.tensor_maps(addresses[:maps], extra_rows)

        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.launcher(
            grid,
            addresses[maps:],
            arguments[pointers:options],
            arguments[options:],
            tensors,
            make_maps(*addresses) if self.launcher.is_ready else [],
            make_maps,
            addresses[:maps] if may_be_converted else (),
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
        tokens = (query.shape[0] - self.tokens) * self.config.ROWS_PER_TOKEN
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
        config = self.config
        # queries, keys, values, output
        head_size = config.KEY_SIZE if index < 2 else config.HEAD_SIZE
        head_stride = plane.head_columns + plane.head_rows * plane.stride
        # keys and values are the second and the third
        in_row = self.group_size if index in (1, 2) else config.ROWS_PER_TOKEN
        heads = self.num_heads // in_row
        # those of one head
        rows = plane.rows - (heads - 1) * plane.head_rows + extra_rows
        return TensorDescriptor(
            address,
            [rows, heads, head_size],
            [plane.stride, head_stride, 1],
            box,
            SWIZZLED_3D.value,
        )

    def lower(self, query: Tensor, key: Tensor, *others: Any) -> tuple[Any, ...]:
        """Return a launch's descriptors and pointers in the order of the kernel's arguments.

        Args:
            query, key, others: tensors of the maps and of the pointers, in this order.
        """
        tensors = (query, key, *others)
        maps = find_ends(self.arguments).maps
        extra_rows = self.extra_rows(query, key)
        descriptors = map(self.describe, range(maps), tensors, extra_rows)
        return (*descriptors, *tensors[maps:])

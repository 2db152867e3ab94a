"""How is the kernel for prompts on a Hopper chip launched?

The kernel (`_prefill_sm90_kernel.py`) reads through the tensor memory accelerator (TMA), which is
told of each tensor by a map: where it begins, its rows and their distance, and the box that it
brings at once. What a call's shapes and strides decide is worked out once for calls of one kind. A
map changes with the address and the number of tokens only, so those of the cache are made once.
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
from .prefill_kernel import GROUP_ROWS, HALF, KEYS, SWIZZLED, attend_tiles

LOG2_E = math.log2(math.e)
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# options that this kernel does not know
KNOWN = ("causal", "batch_invariant")
OPTIONS = [each.name for each in fields(AttentionOptions) if each.name not in KNOWN]
GIVEN = attrgetter(*OPTIONS)
MOST = 2**31 - 1
"""What a coordinate holds."""
MARGIN = 1024
"""Rows past a tensor's last one at which a box may begin."""
MOST_MAPS = 64
"""Maps that are kept for calls of one kind; queries and outputs lie at a few addresses."""

Box: TypeAlias = tuple[int, int]


class Plane(NamedTuple):
    """A tensor of heads as rows of elements, which is how TMA addresses it.

    Args:
        rows, width: of the whole tensor, which starts at its first element.
        stride: elements from row to row.
        block_rows: rows from block to block; 0 without blocks.
        head_rows, head_columns: how far on the next head lies; one of them is 0.
    """

    rows: int
    width: int
    stride: int
    block_rows: int
    head_rows: int
    head_columns: int


class Place(NamedTuple):
    """An address in a tensor's stead: what is remembered must keep no memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


@dataclass
class Prompts:
    """What calls of one kind have in common, and how the kernel is launched for them.

    Args:
        dtype: of the queries, keys, values and the output.
        planes: those four, with as many tokens as the first call has.
        boxes: what TMA brings or takes at once, of each.
        tokens: new tokens of the first call.
        key_tokens: ragged keys of the first call, or the blocks of the cache.
        num_heads, group_size: query heads, of all and of a kv head.
        tile_rows: tokens of a tile.
        steps: the arguments of the kernel that say how far things lie apart.
        fixed: its constants.
    """

    dtype: torch.dtype
    planes: tuple[Plane, Plane, Plane, Plane]
    boxes: tuple[Box, Box, Box, Box]
    tokens: int
    key_tokens: int
    num_heads: int
    group_size: int
    tile_rows: int
    steps: tuple[int, ...]
    fixed: dict[str, Any]
    launcher: Launcher = field(init=False)
    _maps: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make ready to launch the kernel."""
        self.launcher = Launcher(
            attend_tiles, self.lower, self.fixed, num_warps=4, num_stages=1
        )

    def maps(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """Return what the kernel is told of the queries, keys, values and the output."""
        if len(self._maps) > MOST_MAPS:
            self._maps.clear()
        more_rows = self.more_rows(tensors[0], tensors[1])
        found = []
        for number, (tensor, more) in enumerate(zip(tensors, more_rows, strict=True)):
            key = (number, tensor.data_ptr(), more)
            known = self._maps.get(key)
            if known is None:
                map_ = self.launcher.encode(number, self.describe(number, tensor, more))
                known = self._maps[key] = map_
            found += known
        return found

    def more_rows(self, query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
        """Return how many rows each tensor has beyond those of its plane.

        Calls of one signature differ in their tokens, and in their keys if these are ragged. A
        cache has the same blocks in all of them.
        """
        new_tokens = query.shape[0] - self.tokens
        new_keys = key.shape[0] - self.key_tokens
        return new_tokens, new_keys, new_keys, new_tokens

    def describe(self, number: int, tensor: Tensor, more: int) -> TensorDescriptor:
        """Return what TMA is told of a tensor.

        Args:
            number: which of `planes` it is.
            tensor: the tensor.
            more: how many rows it has beyond those of the plane.
        """
        plane = self.planes[number]
        return TensorDescriptor(
            Place(tensor.data_ptr(), self.dtype),
            [plane.rows + more, plane.width],
            [plane.stride, 1],
            list(self.boxes[number]),
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
        """Return the tensors of a call as the kernel takes them, in its order."""
        tensors = (query, key, value, out)
        more_rows = self.more_rows(query, key)
        described = map(self.describe, range(4), tensors, more_rows)
        return (*described, out, *others)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    options: AttentionOptions,
) -> Prompts | None:
    """Return what calls of this kind have in common; None: another kernel has to attend.

    Args:
        query, key, value, block_table, out, options: as in `attend`.
    """
    if INTERPRETED or query.device.type != "cuda" or not is_hopper(query.device):
        return None
    return lay_out(query, key, value, block_table, out, options)


def lay_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    options: AttentionOptions,
) -> Prompts | None:
    """Return what `prepare` does, on whatever chip.

    Example:
        Keys [100 blocks, 16 slots, 8 heads, 128], contiguous: rows are slots, 1,024 elements
        apart, the next block lies 16 rows on, the next head 128 columns on. With the heads before
        the slots in memory rows are 128 apart, the next block lies 128 rows on, the next head 16.
    """
    if type(options.causal) is not bool or options.batch_invariant:
        # what attends with short requests adds up otherwise
        return None
    if GIVEN(options).count(None) < len(OPTIONS):
        return None
    dtype = query.dtype
    if dtype not in SIXTEEN_BITS or not dtype == key.dtype == value.dtype == out.dtype:
        return None
    tokens, num_heads, head_size = query.shape
    if head_size not in (64, 128) or value.shape[-1] != head_size:
        return None
    block_size = 0 if block_table is None else key.shape[1]
    if block_size % 16 or (block_table is not None and block_table.stride(1) != 1):
        return None
    planes = [_plane(each.shape, each.stride()) for each in (query, key, value, out)]
    of_query, of_key, of_value, of_out = planes
    if of_query is None or of_key is None or of_value is None or of_out is None:
        return None
    rows, box_rows = GROUP_ROWS.value, math.gcd(block_size, KEYS.value)
    box, kv_box = (rows, head_size), (box_rows, HALF.value)
    return Prompts(
        dtype=dtype,
        planes=(of_query, of_key, of_value, of_out),
        boxes=(box, kv_box, kv_box, box),
        tokens=tokens,
        key_tokens=key.shape[0],
        num_heads=num_heads,
        group_size=num_heads // key.shape[-2],
        tile_rows=rows * (3 if head_size == 64 else 2),
        steps=(
            *of_query[4:],
            *of_key[3:],
            *of_value[3:],
            *of_out[4:],
            *out.stride()[:2],
        ),
        fixed={
            "HEAD_SIZE": head_size,
            "BLOCK_SIZE": block_size,
            "CAUSAL": options.causal,
        },
    )


def takes(
    prompts: Prompts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
) -> bool:
    """Tell whether `launch` computes this call, one of a kind that it computes.

    Args:
        prompts: what `prepare` returned for calls of this kind.
        query, key, value, block_table, out, lse: as in `attend`.
        scale: of the scores; it must be positive, as the largest score is sought before it
            is applied.
    """
    if not 1e-20 < scale < 1e20:
        return False
    if (query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr()) % 16:
        return False
    if lse is not None and (lse.dtype != torch.float32 or max(lse.stride()) > MOST):
        return False
    if block_table is not None and block_table.stride(0) > MOST:
        return False
    rows = max(
        plane.rows + more
        for plane, more in zip(
            prompts.planes, prompts.more_rows(query, key), strict=True
        )
    )
    return rows + MARGIN <= MOST


def launch(
    prompts: Prompts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    max_query_len: int,
    short_rows: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attend with every request of more than `short_rows` rows; change nothing of the others.

    A query that sees no key gets the output 0 and the log-sum-exp -inf.

    Args:
        prompts: what `prepare` returned for calls of this kind, of which `takes` takes this one.
        query: [tokens, query_heads, head_size].
        key, value: [num_blocks, block_size, kv_heads, head_size] with a block table, or
            [key_tokens, kv_heads, head_size].
        block_table: [reqs, max_blocks]; None: keys lie request after request. Entries past a
            sequence's last block are never read.
        query_start_loc: [reqs + 1].
        lengths: [reqs] keys of each request; without a block table [reqs + 1], where they start.
        max_query_len: an upper bound.
        short_rows: a request of so many rows (queries times heads that share a kv head) or
            fewer is skipped.
        scale: of the scores.
        out: [tokens, query_heads, head_size], changed.
        lse: None, or [query_heads, tokens] in base e, changed.
    """
    if max_query_len * prompts.group_size <= short_rows:
        return
    num_reqs = query_start_loc.shape[0] - 1
    # no request has more tiles than its tokens fill, plus one that is not full
    num_tiles = (query.shape[0] // prompts.tile_rows + num_reqs) * prompts.num_heads
    grid = (min(num_tiles, count_processors(query.device)), 1, 1)
    counter = find_workspace(query.device, 2, 0)[0]
    others = (lse, block_table, query_start_loc, lengths, counter)
    pointers = (
        out.data_ptr(),
        *(0 if each is None else each.data_ptr() for each in others),
    )
    numbers = (
        num_reqs,
        prompts.num_heads,
        prompts.group_size,
        short_rows,
        *prompts.steps,
        *((0, 0) if lse is None else lse.stride()),
        0 if block_table is None else block_table.stride(0),
    )
    tensors = (query, key, value, out)
    prompts.launcher(
        grid,
        pointers,
        (scale * LOG2_E,),
        numbers,
        (*tensors, *others),
        prompts.maps(tensors) if prompts.launcher.is_ready else (),
    )


def _plane(shape: tuple[int, ...], strides: tuple[int, ...]) -> Plane | None:
    """Return a tensor as a plane, or None if it is none that TMA can address."""
    *_, rows, heads, head_size = shape
    stride, head_stride = strides[-3:-1]
    block_rows = blocks = 0
    if 0 in shape or strides[-1] != 1 or min(strides) < 0 or stride < head_size:
        return None
    if any(each % 8 for each in strides[:-1]) or max(strides) > MOST:
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
    if rows + MARGIN > MOST or width > MOST:
        return None
    return Plane(rows, width, stride, block_rows, head_rows, head_columns)

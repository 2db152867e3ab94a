"""Launch plan of latent decodes on Hopper chips: tensor maps, and both launches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....runtime.attention_call import AttentionCall
from ....runtime.chip import count_processors
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import ALWAYS, EVERYTHING, BatchLimits, Estimate, Task, Warm
from ....runtime.launcher import Launcher
from ....runtime.workspace import find_workspace
from ..common.config import LOG2_E, SWIZZLED
from ..common.entry import find_ends, find_order
from ..common.plan import MAX_TENSOR_MAPS, Address
from ..common.planes import BOX_MARGIN, MAX_COORDINATE, takes_scale_and_lse
from ..common.warm import warm_every
from .combination import Combination, lower_splits
from .combine import MAX_SEGMENTS
from .config import BLOCK_M, BLOCK_N, BOX_COLUMNS, RANK, WIDTH
from .kernel import (
    CopiedLatentArguments,
    LatentArguments,
    copied_latent_decode_kernel,
    latent_decode_kernel,
)
from .segments import choose_segments

SMALL_Q_ROWS = 16
"""Rows of the query box if a tile has no more; otherwise the box has BLOCK_M rows."""


@dataclass
class LatentDecodePlan:
    """Launches of the Hopper latent decode kernel for all calls with one signature.

    Args:
        dtype: dtype of the queries, the cache and the output.
        num_heads: query heads.
        block_size: tokens per cache block.
        num_blocks: blocks of the cache.
        kv_stride, kv_block_stride: elements from slot to slot, and from block to block.
        is_causal: whether later keys are masked.
        is_copied: whether the cache is copied row by row instead of read by TMA.
    """

    dtype: torch.dtype
    num_heads: int
    block_size: int
    num_blocks: int
    kv_stride: int
    kv_block_stride: int
    is_causal: bool
    is_copied: bool
    _launchers: dict[int, Launcher] = field(default_factory=dict)
    _combination: Combination = field(default_factory=Combination)
    _tensor_maps: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict)
    is_repeatable: ClassVar[bool] = True
    takes_all_bounds: ClassVar[bool] = True

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out.

        That is values that are the cache's first columns, addresses that are multiples of 16, a
        positive scale, and sizes within 32 bits.
        """
        query, key, value, block_table = call[:4]
        if key.data_ptr() != value.data_ptr() or not takes_scale_and_lse(call):
            return False
        if (query.data_ptr() | key.data_ptr() | call.out.data_ptr()) % 16:
            return False
        if not query.is_contiguous() or block_table is None:
            return False
        rows = query.shape[0] * self.num_heads
        return max(rows, block_table.stride(0)) + BOX_MARGIN <= MAX_COORDINATE

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return ALWAYS: the kernel reads each latent once, as key and value."""
        return ALWAYS

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield one request of each number of tokens, and many requests."""
        return warm_every(self, limits)

    def launch(self, call: AttentionCall, task: Task = EVERYTHING) -> None:
        """Compute all requests, and clear the rows of no request.

        Args:
            call: one that the plan takes; its `out` and `lse` are modified in place.
            task: not used.
        """
        query, key, _, block_table = call[:4]
        out, lse, starts = call.out, call.lse, call.query_start_loc
        assert block_table is not None
        num_reqs = starts.shape[0] - 1
        # without new tokens there may be rows of no request
        request_rows = max(1, call.max_query_len) * self.num_heads
        max_row_tiles = -(-request_rows // BLOCK_M.value)
        kv_tiles = -(-call.max_key_len // BLOCK_N.value)
        partial_rows = min(request_rows, BLOCK_M.value)
        most = min(count_processors(query.device), MAX_SEGMENTS.value)
        segments = choose_segments(
            num_reqs, max_row_tiles, kv_tiles, partial_rows, most
        )
        # partial results begin at a multiple of 16 bytes
        partials, splits = -(-segments * 2 * partial_rows // 4) * 4, 4 * segments
        size = splits + partials * (RANK.value + 1)
        numbers = find_workspace(query.device, 0, size)[1]
        partial_lse, partial_out = numbers[splits:], numbers[splits + partials :]
        q_rows = SMALL_Q_ROWS if request_rows <= SMALL_Q_ROWS else BLOCK_M.value
        launcher = self.launcher(q_rows)
        lse_stride_head, lse_stride_token = (0, 0) if lse is None else lse.stride()
        # both launches have them
        common = {
            "out": out,
            "lse": lse,
            "partial_out": partial_out,
            "partial_lse": partial_lse,
            "splits": numbers,
            "query_start_loc": starts,
            "num_reqs": num_reqs,
            "num_heads": self.num_heads,
            "partial_rows": partial_rows,
            "out_stride_token": out.stride(0),
            "out_stride_head": out.stride(1),
            "lse_stride_head": lse_stride_head,
            "lse_stride_token": lse_stride_token,
        }
        given = {
            "q_desc": query,
            "kv_desc": key,
            "cache": key,
            "block_table": block_table,
            "seq_lens": call.lengths,
            "scale_log2": call.scale * LOG2_E.value,
            "kv_block_rows": 0 if self.is_copied else self.kv_block_rows,
            "kv_block_stride": self.kv_block_stride,
            "kv_slot_stride": self.kv_stride,
            "block_table_stride": block_table.stride(0),
            **common,
        }
        num_maps, pointers, options = find_ends(self.arguments)
        arguments = find_order(self.arguments)(given)
        tensors, tokens = arguments[:pointers], query.shape[0]

        def make_maps(q: int, k: int, *_: int) -> list[Any]:
            return self.tensor_maps(launcher, q_rows, tokens, q, k)

        maps: list[Any] = []
        if launcher.is_ready:
            maps = make_maps(query.data_ptr(), key.data_ptr())
        launcher(
            (segments, 1, 1),
            [
                0 if tensor is None else tensor.data_ptr()
                for tensor in tensors[num_maps:]
            ],
            arguments[pointers:options],
            arguments[options:],
            tensors,
            maps,
            make_maps,
        )
        self._combination.launch(
            {
                "num_tokens": tokens,
                "num_segments": segments,
                **common,
            },
            min(segments, num_reqs * max_row_tiles),
        )

    @property
    def arguments(self) -> Any:
        """The NamedTuple of the first kernel's arguments."""
        return CopiedLatentArguments if self.is_copied else LatentArguments

    @property
    def kv_block_rows(self) -> int:
        """Rows from block to block of a cache that TMA reads."""
        return self.kv_block_stride // self.kv_stride

    def launcher(self, q_rows: int) -> Launcher:
        """Return the launcher of the first kernel for a query box of `q_rows` rows."""
        launcher = self._launchers.get(q_rows)
        if launcher is None:

            def lower(query: Tensor, cache: Tensor, *others: Any) -> tuple[Any, ...]:
                of_query = self.describe_query(query.data_ptr(), query.shape[0], q_rows)
                of_cache = (
                    cache if self.is_copied else self.describe_cache(cache.data_ptr())
                )
                return lower_splits(self.arguments, (of_query, of_cache, *others))

            launcher = Launcher(
                copied_latent_decode_kernel if self.is_copied else latent_decode_kernel,
                lower,
                {"BLOCK_SIZE": self.block_size, "CAUSAL": self.is_causal},
                num_warps=4,
                num_stages=1,
                is_dependent=True,
            )
            self._launchers[q_rows] = launcher
        return launcher

    def tensor_maps(
        self, launcher: Launcher, q_rows: int, tokens: int, query: int, cache: int
    ) -> list[Any]:
        """Return the encoded tensor maps of the queries and, if TMA reads it, the cache.

        Args:
            launcher: the launcher for a query box of `q_rows` rows.
            q_rows: rows of the query box.
            tokens: new tokens.
            query, cache: addresses.
        """
        if len(self._tensor_maps) > MAX_TENSOR_MAPS:
            self._tensor_maps.clear()
        of_query = (q_rows, query, tokens)
        query_map = self._tensor_maps.get(of_query)
        if query_map is None:
            descriptor = self.describe_query(query, tokens, q_rows)
            query_map = launcher.encode(0, descriptor)
            self._tensor_maps[of_query] = query_map
        if self.is_copied:
            return query_map
        of_cache = (0, cache, 0)
        cache_map = self._tensor_maps.get(of_cache)
        if cache_map is None:
            cache_map = launcher.encode(1, self.describe_cache(cache))
            self._tensor_maps[of_cache] = cache_map
        return query_map + cache_map

    def describe_query(self, query: int, tokens: int, q_rows: int) -> TensorDescriptor:
        """Return the TMA descriptor of queries at an address, as rows of WIDTH elements."""
        return TensorDescriptor(
            Address(query, self.dtype),
            [tokens * self.num_heads, WIDTH.value],
            [WIDTH.value, 1],
            [q_rows, BOX_COLUMNS.value],
            SWIZZLED.value,
        )

    def describe_cache(self, cache: int) -> TensorDescriptor:
        """Return the TMA descriptor of the cache at an address, as rows of WIDTH elements."""
        # a box has at least 16 rows and does not cross a block
        box_rows = math.gcd(self.block_size, BLOCK_N.value)
        return TensorDescriptor(
            Address(cache, self.dtype),
            [
                (self.num_blocks - 1) * self.kv_block_rows + self.block_size,
                WIDTH.value,
            ],
            [self.kv_stride, 1],
            [box_rows, BOX_COLUMNS.value],
            SWIZZLED.value,
        )

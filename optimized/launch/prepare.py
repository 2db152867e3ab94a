"""What follows from the kind of a call of attention?

Calls are of one kind if their strides, dtypes and options are the same, whatever their sizes. For
each kind it is worked out once which kernels attend, how large their tiles are, and how a batch is
cut for them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.kinds import FP8_DTYPES
from ..kernels.attention_kernel import attend_kernel
from ..kernels.fp8 import has_native_fp8, scale_arguments
from .launcher import INTERPRETED, Launcher, must_widen, next_power_of_2
from .tuning import PROGRAMS, Tiles, choose_tiles, count_processors

# CAUSAL in the kernel: 0 no, 1 yes, and this
FLAG_OF_EACH_REQUEST = 2
COUNTED = (8, 32, 64) if INTERPRETED else (32, 128, 1024)
"""Requests that a program counts at once: no more than a warp has lanes, in a batch so small."""
MIN_SPAN = 32 if INTERPRETED else 512
"""Keys of a span at least: shorter ones are not worth a join."""
BRIEF = 2048
"""Keys of sequences that are short enough for the size of the kernel's code to matter."""
JOINED_AT_ONCE = 8192
"""Numbers of parts that a program holds while it joins them."""
FIXED_SPAN = 64 if INTERPRETED else 4096
"""Keys of a part where rows have to be the same in any batch. With 2,048 one decode over 131,072
keys takes 184 us instead of 168, and the other batches in docs/benchmark.md lose up to 4.5 %."""
MOST_ROOM = 1 << 26
"""Numbers of parts, 256 MiB, that are worth to be kept for them."""


@dataclass
class Launches:
    """What follows from a call's signature: the kernels, and how a batch is cut for them.

    Args:
        fixed: arguments of all launches.
        decode_tiles, lone_tiles: of short requests; of those too few to fill the chip.
        decodes: their launches, as they come up.
        prefills: the launch for long requests; and the one that gives each part of their keys a
            program of its own, where rows have parts.
        group_size: query heads of a kv head.
        kv_heads, value_size: of the cache.
        has_decode: whether there are short requests: one token's rows fit their tile, and rows are
            not asked to be the same in any batch.
        short_rows: rows of a short request, at most; 0 without them.
        rows: of a prefill tile.
        span: keys of a part of long requests' rows; 0: they have no parts.
        most_seen: keys that the rows of a short request see, at most; None: all there are.
        one_loop: whether a decode masks every tile of keys, or has loops with and without masks.
        lone_reqs: fewer requests than that do not fill the chip.
        processors: multiprocessors of the chip.
        widens: whether the output is written in float32 first.
    """

    fixed: dict[str, Any]
    decode_tiles: Tiles
    lone_tiles: Tiles
    prefills: tuple[Launcher, Launcher]
    group_size: int
    kv_heads: int
    value_size: int
    has_decode: bool
    short_rows: int
    rows: int
    span: int
    most_seen: int | None
    one_loop: bool
    lone_reqs: int
    processors: int
    widens: bool
    decodes: dict[tuple[int, int, bool, bool, bool], tuple[Launcher, int, int]] = field(
        default_factory=dict
    )

    def decode(
        self, num_reqs: int, part_rows: int, max_query_len: int, max_key_len: int
    ) -> tuple[Launcher, int, int]:
        """Return the launch for short requests, the keys of its tiles, and its most spans."""
        join_rows = next_power_of_2(max(part_rows, 1))
        width = next((each for each in COUNTED if num_reqs <= each), COUNTED[-1])
        is_lone = num_reqs < self.lone_reqs
        # the code of a second loop costs short sequences more than its masks
        one_loop = self.one_loop or max_query_len > 1 or max_key_len <= BRIEF
        key = (join_rows, width, num_reqs > width, is_lone, one_loop)
        known = self.decodes.get(key)
        if known is None:
            tiles = self.lone_tiles if is_lone else self.decode_tiles
            programs = self.processors * (1 if is_lone else PROGRAMS)
            place = join_rows * self.fixed["VALUE_TILE"]
            own = {
                "ROWS": self.short_rows,
                "KEYS": tiles.keys,
                "SHORT": True,
                "CLEAR": True,
                "MIN_TILES": max(1, MIN_SPAN // tiles.keys),
                "WIDTH": width,
                "MANY": num_reqs > width,
                "ONE_LOOP": one_loop,
                "JOIN_ROWS": join_rows,
                "JOIN_PARTS": max(1, min(16, JOINED_AT_ONCE // place)),
                "SPAN": 0,
                "IS_SPREAD": False,
            }
            known = self.decodes[key] = (
                Launcher(
                    attend_kernel,
                    _lower_tensors,
                    self.fixed | own,
                    tiles.num_warps,
                    tiles.num_stages,
                ),
                tiles.keys,
                max(1, programs // self.kv_heads),
            )
        return known


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    out: Tensor,
    options: AttentionOptions,
) -> Launches:
    """Work out what follows from the kind of a call."""
    widens = must_widen(out.dtype)
    if widens:
        # as what is written in its place, which need not lie as it does
        out = torch.zeros_like(out, dtype=torch.float32)
    _, query_heads, head_size = query.shape
    kv_heads, value_size = value.shape[-2:]
    group_size = query_heads // kv_heads
    head_tile = max(16, next_power_of_2(head_size))
    value_tile = max(16, next_power_of_2(value_size))
    is_cut = bool(options.sliding_window or options.attention_chunk_size)
    lowered = _lower_options(options, query, key, out.dtype, query_start_loc)
    decode, lone, prefill = choose_tiles(
        max(head_tile, value_tile),
        query.dtype,
        query.device,
        has_window=is_cut,
        has_bias=options.position_bias is not None,
        has_tree=options.tree_mask is not None,
        has_bit_decoding=lowered["CACHE_FP8"] > 0 and not lowered["NATIVE_FP8"],
        has_native_fp8=lowered["NATIVE_FP8"],
        is_paged=block_table is not None,
        has_parts=options.batch_invariant,
    )
    # a request is short if its rows fit one decode tile
    short_rows = min(64, max(decode.rows, next_power_of_2(group_size)))
    has_decode = group_size <= short_rows and not options.batch_invariant
    if not has_decode:
        short_rows = 0
    processors = count_processors(query.device)
    fixed = {
        **lowered,
        "short_rows": short_rows,
        **_strides("query_stride", query, ("token", "head", "element")),
        **_strides("key_stride", key, ("block", "slot", "head", "element")),
        **_strides("value_stride", value, ("block", "slot", "head", "element")),
        "table_stride_entry": 0 if block_table is None else block_table.stride(1),
        **_strides("out_stride", out, ("token", "head", "element")),
        "GROUP_SIZE": group_size,
        "HEAD_SIZE": head_size,
        "HEAD_TILE": head_tile,
        "VALUE_SIZE": value_size,
        "VALUE_TILE": value_tile,
        "BLOCK_SIZE": 0 if block_table is None else key.shape[1],
        "WIDEN": must_widen(query.dtype),
        "SUMS": INTERPRETED and options.batch_invariant,
        "WIDE": INTERPRETED or max(_reach(key), _reach(value)) >= 2**31,
    }
    of_prefill = {
        "ROWS": prefill.rows,
        "KEYS": prefill.keys,
        "SHORT": False,
        "CLEAR": not has_decode,
        "MIN_TILES": 1,
        "WIDTH": 1,
        "MANY": False,
        # with one loop a key is weighed by the same instructions in every tile
        "ONE_LOOP": options.batch_invariant,
        "JOIN_ROWS": min(16, prefill.rows),
        "JOIN_PARTS": 1,
        "SPAN": FIXED_SPAN if options.batch_invariant else 0,
    }

    def launch_prefill(own: dict[str, Any]) -> Launcher:
        constants = fixed | of_prefill | own
        stages = prefill.num_stages
        return Launcher(
            attend_kernel, _lower_tensors, constants, prefill.num_warps, stages
        )

    return Launches(
        fixed=fixed,
        decode_tiles=decode,
        lone_tiles=lone,
        prefills=(
            launch_prefill({"IS_SPREAD": False}),
            launch_prefill({"IS_SPREAD": True}),
        ),
        group_size=group_size,
        kv_heads=kv_heads,
        value_size=value_size,
        has_decode=has_decode,
        short_rows=short_rows,
        rows=prefill.rows,
        span=of_prefill["SPAN"],
        most_seen=_most_seen(short_rows, options),
        one_loop=is_cut
        or options.tree_mask is not None
        or options.query_ranges is not None,
        lone_reqs=processors // kv_heads + 1,
        processors=processors,
        widens=widens,
    )


def _reach(tensor: Tensor) -> int:
    """Return how many elements lie between a tensor's first and its last one, or more."""
    return sum(
        size * abs(stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _most_seen(short_rows: int, options: AttentionOptions) -> int | None:
    """Return at least how many keys the rows of a short request see; None: all there are."""
    if options.query_ranges is not None or options.tree_mask is not None:
        return None
    limits = []
    if options.sliding_window is not None:
        sides = 1 if options.causal is True else 2
        limits.append(sides * options.sliding_window + short_rows)
    if options.attention_chunk_size is not None:
        limits.append(options.attention_chunk_size + short_rows)
    return min(limits, default=None)


def _strides(name: str, tensor: Tensor | None, axes: tuple[str, ...]) -> dict[str, int]:
    """Return a tensor's strides by argument; 0 for leading axes that it has not."""
    strides = () if tensor is None else tensor.stride()
    strides = (0,) * (len(axes) - len(strides)) + strides
    return {f"{name}_{axis}": each for axis, each in zip(axes, strides, strict=True)}


def _lower_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor | None,
    room: Tensor | None,
    parts: int,
    arrivals: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the tensors of a call as the kernel takes them, in its order."""
    part_out = None if room is None else room[parts:]
    key, value, out = _as_bits(key), _as_bits(value), _as_bits(out)
    starts = (query_start_loc, lengths)
    return query, key, value, block_table, *starts, out, lse, part_out, room, arrivals


def _as_bits(tensor: Tensor) -> Tensor:
    """Return FP8 numbers as bytes, which kernels decode themselves."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def _fp8_kind(dtype: torch.dtype) -> int:
    """Return 0 for a dtype that is not FP8, else its place in FP8_DTYPES from 1."""
    return FP8_DTYPES.index(dtype) + 1 if dtype in FP8_DTYPES else 0


def _lower_options(
    options: AttentionOptions,
    query: Tensor,
    key: Tensor,
    out_dtype: torch.dtype,
    query_start_loc: Tensor,
) -> dict[str, Any]:
    """Return the options as arguments of the kernel; what is not asked for is None or 0."""
    bias, ranges = options.position_bias, options.query_ranges
    flags = options.causal if isinstance(options.causal, Tensor) else None
    cache_fp8 = _fp8_kind(key.dtype)
    out_fp8 = _fp8_kind(out_dtype)
    arguments = {
        "k_scale_stride": scale_arguments(options.k_scale)[1],
        "v_scale_stride": scale_arguments(options.v_scale)[1],
        "out_scale_stride": scale_arguments(options.out_scale)[1],
        "causal": None if flags is None else flags.view(torch.uint8),
        "causal_stride": 0 if flags is None else flags.stride(0),
        "bias_reach": 0 if bias is None else bias.shape[1] // 2,
        **_strides("bias_stride", bias, ("head", "entry")),
        "query_ranges": ranges,
        **_strides("ranges_stride", ranges, ("token", "entry")),
        "CAUSAL": int(options.causal) if flags is None else FLAG_OF_EACH_REQUEST,
        "SLIDING_WINDOW": options.sliding_window or 0,
        "CHUNK_SIZE": options.attention_chunk_size or 0,
        "SOFT_CAP": options.logits_soft_cap or 0.0,
        "CACHE_FP8": cache_fp8,
        "OUT_FP8": out_fp8,
        "NATIVE_FP8": cache_fp8 > 0 and has_native_fp8(query.device),
    }
    return arguments | _lower_tree(options, query_start_loc)


def _lower_tree(options: AttentionOptions, query_start_loc: Tensor) -> dict[str, Any]:
    """Return the tree as arguments of the kernel: who sees whom, and how deep each stands."""
    mask = options.tree_mask
    depth = None
    if mask is not None and options.counting_positions:
        # mask entries past a request's own tokens may hold anything
        own = torch.arange(mask.shape[2], device=mask.device)
        own = own < query_start_loc.diff()[:, None]
        depth = (mask & own[:, None, :]).sum(2, dtype=torch.int32) - 1
    return {
        "tree_mask": None if mask is None else mask.view(torch.uint8),
        "tree_depth": depth,
        "tree_width": 0 if mask is None else mask.shape[1],
        **_strides("tree_stride", mask, ("req", "query", "key")),
    }

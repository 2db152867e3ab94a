"""How is a call of attention launched?

What attends is one kernel (`_attend_kernel.py`), launched for the short requests of a batch and
again for the long ones, which a Hopper chip has another one for (`_prefill_sm90.py`). Nothing is
read from the device, so that a call can be captured.

Most calls are like an earlier one: the same strides, dtypes and options, other sizes. What follows
from the former is worked out once and kept (`Launches`), and then a call costs little more than
filling in pointers and sizes.
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..shared.attention_options import AttentionOptions
from ..shared.kinds import FP8_DTYPES
from . import _prefill_sm90
from ._attend_kernel import attend_kernel
from ._fp8 import has_native_fp8, scale_arguments
from ._launch import INTERPRETED, Launcher, must_widen, next_power_of_2
from ._tuning import (
    PROGRAMS,
    Tiles,
    choose_tiles,
    count_processors,
    is_hopper,
    max_head_size,
)
from ._workspace import find_workspace

# CAUSAL in the kernel: 0 no, 1 yes, and this
FLAG_OF_EACH_REQUEST = 2
PLAIN = {causal: AttentionOptions(causal=causal) for causal in (True, False)}
"""Options of calls that ask for nothing else; they are told by their identity."""
OPTION_NAMES = tuple(field.name for field in fields(AttentionOptions))
NO_OPTIONS: tuple[Any, ...] = (None,) * 6

Signature: TypeAlias = tuple[Any, ...]

KNOWN: dict[Signature, "Launches"] = {}
"""What calls of each kind need; an entry for each, so a few in a program's life."""
COUNTED = (8, 32, 64) if INTERPRETED else (32, 128, 1024)
"""Requests that a program counts at once: no more than a warp has lanes, in a batch so small."""
MIN_SPAN = 32 if INTERPRETED else 512
"""Keys of a span at least: shorter ones are not worth a join."""
BRIEF = 2048
"""Keys of sequences that are short enough for the size of the kernel's code to matter."""
JOINED_AT_ONCE = 8192
"""Numbers of parts that a program holds while it joins them."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    max_query_len: int,
    max_key_len: int,
    scale: float | None,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    signature: Signature | None = None,
    launches: "Launches | None" = None,
) -> Tensor:
    """Launch what attends, and return the output.

    Args:
        query: [tokens, query_heads, head_size].
        key, value: [num_blocks, block_size, kv_heads, head_size] with a block table, or
            [key_tokens, kv_heads, head_size].
        block_table: [reqs, max_blocks]; None: keys lie request after request.
        query_start_loc: [reqs + 1].
        lengths: [reqs] keys of each request; without a block table [reqs + 1], where they start.
        max_query_len, max_key_len: upper bounds.
        scale, out, lse: as in `paged_attention`.
        options: the rest.
        signature: what `sign` returned for these; None: they are like no other call's.
        launches: what is known of such calls; None: nothing.
    """
    num_tokens, query_heads, head_size = query.shape
    # a whole number would be a constant of the compiled kernel
    scale = head_size**-0.5 if scale is None else float(scale)
    if out is None:
        out = query.new_empty(num_tokens, query_heads, value.shape[-1])
    num_reqs = query_start_loc.shape[0] - 1
    if not query.numel() or num_reqs < 1:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return out
    if launches is None:
        launches = _prepare(
            query, key, value, block_table, query_start_loc, out, options
        )
        if signature is not None:
            KNOWN[signature] = launches
    target = out
    if launches.widens:
        target = torch.zeros_like(out, dtype=torch.float32)
    # kernels step from request to request, and from head to head, by one element
    if query_start_loc.stride(0) != 1:
        query_start_loc = query_start_loc.contiguous()
    if lengths.stride(0) != 1:
        lengths = lengths.contiguous()
    options_given = NO_OPTIONS
    if options is not PLAIN[True] and options is not PLAIN[False]:
        options_given = _option_values(options)
    call = Call(
        query,
        key,
        value,
        block_table,
        query_start_loc,
        lengths,
        max_query_len,
        max_key_len,
        scale,
        target,
        lse,
        options,
        options_given,
        launches,
    )
    has_long = max_query_len * launches.group_size > launches.short_rows
    is_for_sm90 = (
        has_long
        and launches.is_for_sm90
        and _prefill_sm90.takes(
            query, key, value, block_table, target, lse, options, scale
        )
    )
    if launches.has_decode:
        _start_decode(call)
    if is_for_sm90:
        _start_sm90(call)
    elif has_long or not launches.has_decode:
        _start_prefill(call)
    return out.copy_(target) if launches.widens else out


class Call(NamedTuple):
    """What one call launches kernels on."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_table: Tensor | None
    query_start_loc: Tensor
    lengths: Tensor
    max_query_len: int
    max_key_len: int
    scale: float
    out: Tensor
    lse: Tensor | None
    options: AttentionOptions
    options_given: tuple[Any, ...]
    launches: "Launches"


def _start_decode(call: Call) -> None:
    """Launch what attends with short requests, whose keys are cut into spans."""
    launches = call.launches
    num_reqs = call.query_start_loc.shape[0] - 1
    part_rows = min(launches.short_rows, call.max_query_len * launches.group_size)
    decode, keys, most_spans = launches.decode(
        num_reqs, part_rows, call.max_query_len, call.max_key_len
    )
    most_keys = call.max_key_len
    if launches.most_seen is not None:
        # a window's first key lies anywhere in its tile
        most_keys = min(most_keys, launches.most_seen + keys)
    tiles = num_reqs * max(1, -(-most_keys // keys))
    spans = min(most_spans, tiles)
    counters = spans * launches.kv_heads
    # a multiple of 16 bytes, at which their values begin
    parts = -(-2 * counters * part_rows // 4) * 4
    arrivals, room = find_workspace(
        call.query.device, counters, parts * (launches.value_size + 1)
    )
    grid = (launches.kv_heads, spans, 1)
    _start(decode, grid, call, part_rows, room, parts, arrivals)


def _start_prefill(call: Call) -> None:
    """Launch what attends with long requests, whose rows are cut into tiles."""
    launches = call.launches
    num_reqs = call.query_start_loc.shape[0] - 1
    # no request has more tiles than its rows fill, plus one that is not full
    rows = call.query.shape[0] * launches.group_size
    grid = (-(-rows // launches.rows) + num_reqs, launches.kv_heads, 1)
    _start(launches.prefill, grid, call, 0, None, 0, None)


def _start(
    launcher: Launcher,
    grid: tuple[int, int, int],
    call: Call,
    part_rows: int,
    room: Tensor | None,
    parts: int,
    arrivals: Tensor | None,
) -> None:
    """Launch the portable kernel, with room for parts of `part_rows` rows if any are joined."""
    query, key, value, block_table, query_start_loc, lengths = call[:6]
    out, lse = call.out, call.lse
    at = 0 if room is None else room.data_ptr()
    pointers = (
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        0 if block_table is None else block_table.data_ptr(),
        query_start_loc.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        at + 4 * parts,
        at,
        0 if arrivals is None else arrivals.data_ptr(),
    )
    num_reqs = query_start_loc.shape[0] - 1
    numbers = (
        query.shape[0],
        num_reqs,
        num_reqs.bit_length(),
        part_rows,
        call.scale,
        0 if block_table is None else block_table.stride(0),
        *((0, 0) if lse is None else lse.stride()),
    )
    tensors = (*call[:6], out, lse, room, parts, arrivals)
    launcher(grid, pointers, call.options_given, numbers, tensors)


def _start_sm90(call: Call) -> None:
    """Launch what attends with long requests on a Hopper chip."""
    _prefill_sm90.launch(
        *call[:6],
        call.max_query_len,
        call.launches.short_rows,
        call.scale,
        call.out,
        call.lse,
        call.options.causal is True,
    )


def sign(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
) -> Signature | None:
    """Return what makes a call like another one; None: it is like no other.

    Of what it leaves out, the sizes of the batch, `sizes_fit` makes sure.
    """
    if INTERPRETED:
        return None
    own = _sign_options(options)
    if own is None:
        return None
    return (
        query.shape[1:],
        query.stride(),
        query.dtype,
        query.get_device(),
        key.shape,
        key.stride(),
        key.dtype,
        key.get_device(),
        value.shape,
        value.stride(),
        value.dtype,
        value.get_device(),
        None
        if block_table is None
        else (block_table.stride()[1:], block_table.dtype, block_table.get_device()),
        query_start_loc.stride(),
        query_start_loc.dtype,
        query_start_loc.get_device(),
        lengths.stride(),
        lengths.dtype,
        lengths.get_device(),
        None if out is None else (out.stride(), out.dtype, out.get_device()),
        None if lse is None else (lse.dtype, lse.get_device()),
        own,
    )


def sizes_fit(
    query: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    max_query_len: int,
    max_key_len: int,
    out: Tensor | None,
    lse: Tensor | None,
) -> bool:
    """Tell whether the sizes of a call whose signature was not refused fit each other."""
    tokens, query_heads, _ = query.shape
    reqs = query_start_loc.shape[0] - 1
    if block_table is None:
        fits = lengths.shape[0] == reqs + 1
    else:
        rows, max_blocks = block_table.shape
        most = max_blocks * value.shape[1]
        fits = rows == reqs == lengths.shape[0] and max_key_len <= most
    return (
        fits
        and max_query_len >= 0
        and max_key_len >= 0
        and (out is None or out.shape == (tokens, query_heads, value.shape[-1]))
        and (lse is None or lse.shape == (query_heads, tokens))
    )


def _sign_options(options: AttentionOptions) -> Signature | None:
    """Return options as something that can be compared; None: some belong to this batch alone."""
    if options is PLAIN[True] or options is PLAIN[False]:
        return (options.causal,)
    of_batch = (options.tree_mask, options.query_ranges)
    if isinstance(options.causal, Tensor) or of_batch != (None, None):
        return None
    return tuple(
        (each.shape, each.stride(), each.dtype, each.get_device())
        if isinstance(each, Tensor)
        else each
        for each in (getattr(options, name) for name in OPTION_NAMES)
    )


def _option_values(options: AttentionOptions) -> tuple[Any, ...]:
    """Return the options that a kernel is given anew at each call, in its order."""
    return (
        None if options.alibi_slopes is None else options.alibi_slopes.contiguous(),
        None if options.sinks is None else options.sinks.contiguous(),
        options.position_bias,
        scale_arguments(options.k_scale)[0],
        scale_arguments(options.v_scale)[0],
        scale_arguments(options.out_scale)[0],
    )


@dataclass
class Launches:
    """What follows from a call's signature: the kernels, and how a batch is cut for them.

    Args:
        fixed: arguments of all launches.
        decode_tiles, lone_tiles: of short requests; of those too few to fill the chip.
        decodes: their launches, as they come up.
        prefill: the launch for long requests.
        group_size: query heads of a kv head.
        kv_heads, value_size: of the cache.
        has_decode: whether there are short requests: one token's rows fit their tile, and rows are
            not asked to be the same in any batch.
        short_rows: rows of a short request, at most; 0 without them.
        rows: of a prefill tile.
        most_seen: keys that the rows of a short request see, at most; None: all there are.
        one_loop: whether a decode masks every tile of keys, or has loops with and without masks.
        lone_reqs: fewer requests than that do not fill the chip.
        processors: multiprocessors of the chip.
        is_for_sm90: whether long requests may be `_prefill_sm90`'s.
        widens: whether the output is written in float32 first.
    """

    fixed: dict[str, Any]
    decode_tiles: Tiles
    lone_tiles: Tiles
    prefill: Launcher
    group_size: int
    kv_heads: int
    value_size: int
    has_decode: bool
    short_rows: int
    rows: int
    most_seen: int | None
    one_loop: bool
    lone_reqs: int
    processors: int
    is_for_sm90: bool
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


def _prepare(
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
        "JOIN_ROWS": 1,
        "JOIN_PARTS": 1,
    }
    return Launches(
        fixed=fixed,
        decode_tiles=decode,
        lone_tiles=lone,
        prefill=Launcher(
            attend_kernel,
            _lower_tensors,
            fixed | of_prefill,
            prefill.num_warps,
            prefill.num_stages,
        ),
        group_size=group_size,
        kv_heads=kv_heads,
        value_size=value_size,
        has_decode=has_decode,
        short_rows=short_rows,
        rows=prefill.rows,
        most_seen=_most_seen(short_rows, options),
        one_loop=is_cut
        or options.tree_mask is not None
        or options.query_ranges is not None,
        lone_reqs=processors // kv_heads + 1,
        processors=processors,
        # what no request owns is cleared by the launch for short ones
        is_for_sm90=has_decode and is_hopper(query.device),
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


def check_compute_dtype(compute_dtype: torch.dtype) -> None:
    """Refuse arithmetic that these kernels have not.

    Raises:
        NotImplementedError: another dtype than float32; the reference takes it.
    """
    if compute_dtype != torch.float32:
        raise NotImplementedError(
            f"compute_dtype = {compute_dtype}: expected torch.float32, in which the kernels"
            " add up; the reference takes any"
        )


def check_supported(query: Tensor, value: Tensor) -> None:
    """Refuse what these kernels do not compute.

    Raises:
        NotImplementedError: a head larger than a tile that fits the chip, or float64 inputs; the
            reference takes them.
    """
    if query.dtype == torch.float64:
        raise NotImplementedError(
            "query is torch.float64: expected float16, bfloat16 or float32; the reference"
            " takes float64"
        )
    largest = max_head_size(query.dtype, query.device)
    for name, size in (
        ("head_size", query.shape[-1]),
        ("value_head_size", value.shape[-1]),
    ):
        if size > largest:
            raise NotImplementedError(
                f"{name} = {size} is more than this kernel takes in {query.dtype} on"
                f" {query.device} ({largest}); the reference takes any"
            )


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

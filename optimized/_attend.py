"""How does a kernel attend, whatever was asked for?

One kernel, launched for two classes of requests. A program takes one kv head and a tile of its
rows, a row being one query of one token: all query heads that share the kv head lie side by side,
so that keys and values are read once for the group. Requests whose rows fit one small tile
(decodes, short verifications) are cut along their keys into parts that run side by side, and a
second kernel joins the parts by their log-sum-exp; all others are cut along their rows. Each launch
skips the other's requests, so any mixture is right and nothing is read by the host. The softmax
runs over tiles of keys as they come, in base 2, with sums in float32. Addresses are 64-bit.

Options are constants or absent pointers, so what a call does not use is compiled away. A row sees
an interval of positions. `_sight` says which, for each row and, as the interval only moves forward
from row to row, for a tile's first and last row: keys that no row sees are not read, those that all
see need no mask. Trees and ranges see more than an interval: they widen what is read, and have a
mask of their own.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shared.attention_options import AttentionOptions
from ..shared.kinds import FP8_DTYPES
from ._fp8 import decode_fp8, has_native_fp8, load_scale, scale_arguments
from ._launch import must_widen
from ._rows import (
    LOG2_E,
    find_tile,
    finish_rows,
    join_kernel,
    part_place,
    start_rows,
    store_rows,
    tanh,
)
from ._tuning import Tiles, choose_tiles, max_head_size, split_rule

# what changes from step to step makes no kernel of its own
CHANGING = [
    "num_reqs",
    "num_halvings",
    "num_splits",
    "part_rows",
    "table_stride_req",
    "lse_stride_head",
    "lse_stride_token",
    "tree_stride_req",
    "tree_width",
]
# CAUSAL in the kernel: 0 no, 1 yes, and this
FLAG_OF_EACH_REQUEST = 2


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
    """
    # kernels step from head to head by one element
    options = replace(
        options,
        alibi_slopes=_packed(options.alibi_slopes),
        sinks=_packed(options.sinks),
    )
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if out is None:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    if not query.numel() or query_start_loc.shape[0] < 2:
        return out
    target = out
    if must_widen(out.dtype):
        target = torch.zeros_like(out, dtype=torch.float32)
    elif out.dtype in FP8_DTYPES:
        target = out.view(torch.uint8)
    batch = (query_start_loc.contiguous(), lengths.contiguous())
    bounds = (max_query_len, max_key_len)
    _launch(
        query,
        key,
        value,
        block_table,
        batch,
        bounds,
        scale,
        target,
        out.dtype,
        lse,
        options,
    )
    return out.copy_(target) if must_widen(out.dtype) else out


def check_supported(query: Tensor, value: Tensor, compute_dtype: torch.dtype) -> None:
    """Refuse what these kernels do not compute.

    Raises:
        NotImplementedError: another `compute_dtype` than float32, a head larger than a tile
            that fits the chip, or float64 inputs; the reference takes them.
    """
    if compute_dtype != torch.float32:
        raise NotImplementedError(
            f"compute_dtype = {compute_dtype}: expected torch.float32, in which the kernels"
            " add up; the reference takes any"
        )
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


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    batch: tuple[Tensor, Tensor],
    bounds: tuple[int, int],
    scale: float,
    out: Tensor,
    out_dtype: torch.dtype,
    lse: Tensor | None,
    options: AttentionOptions,
) -> None:
    num_tokens, query_heads, head_size = query.shape
    kv_heads, value_size = value.shape[-2:]
    num_reqs = batch[0].shape[0] - 1
    max_query_len, max_key_len = bounds
    group_size = query_heads // kv_heads
    head_tile = max(16, triton.next_power_of_2(head_size))
    value_tile = max(16, triton.next_power_of_2(value_size))
    is_cut = bool(options.sliding_window or options.attention_chunk_size)
    lowered = _lower_options(options, query, key, out_dtype, batch[0])
    decode, prefill = choose_tiles(
        max(head_tile, value_tile),
        query.dtype,
        query.device,
        has_window=is_cut,
        has_bias=options.position_bias is not None,
        has_tree=options.tree_mask is not None,
        has_bit_decoding=lowered["CACHE_FP8"] > 0 and not lowered["NATIVE_FP8"],
    )
    # a request is short if its rows fit one decode tile
    short_rows = min(64, max(decode.rows, triton.next_power_of_2(group_size)))
    longest_rows = max_query_len * group_size
    most_keys = _most_keys(max_key_len, short_rows, options)
    num_splits = _choose_splits(num_reqs * kv_heads, most_keys, query.device)
    part_rows = min(short_rows, longest_rows)
    parts = (num_reqs, kv_heads, num_splits, part_rows)
    part_out = part_lse = out  # never written
    if num_splits > 1:
        part_out = out.new_empty(*parts, value_size, dtype=torch.float32)
        part_lse = out.new_empty(parts, dtype=torch.float32)
    sizes = {
        "GROUP_SIZE": group_size,
        "VALUE_SIZE": value_size,
        "VALUE_TILE": value_tile,
    }
    is_paged = block_table is not None
    arguments = {
        "query": query,
        "key": _as_bits(key),
        "value": _as_bits(value),
        "block_table": block_table,
        "query_start_loc": batch[0],
        "lengths": batch[1],
        "out": out,
        "lse": lse,
        "part_out": part_out,
        "part_lse": part_lse,
        "num_reqs": num_reqs,
        "num_halvings": num_reqs.bit_length(),
        "short_rows": short_rows,
        "part_rows": part_rows,
        "scale": scale,
        **_strides("query_stride", query, ("token", "head", "element")),
        **_strides("key_stride", key, ("block", "slot", "head", "element")),
        **_strides("value_stride", value, ("block", "slot", "head", "element")),
        **_strides("table_stride", block_table, ("req", "entry")),
        **_strides("out_stride", out, ("token", "head", "element")),
        **_strides("lse_stride", lse, ("head", "token")),
    }

    def start(tiles: Tiles, grid: tuple[int, int, int], short: bool) -> None:
        _attend_kernel[grid](
            **arguments,
            **lowered,
            **sizes,
            HEAD_SIZE=head_size,
            HEAD_TILE=head_tile,
            BLOCK_SIZE=key.shape[1] if is_paged else 0,
            ROWS=short_rows if short else tiles.rows,
            KEYS=tiles.keys,
            SHORT=short,
            SPLIT=short and num_splits > 1,
            WIDEN=must_widen(query.dtype),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

    if group_size <= short_rows:
        start(decode, (num_reqs, kv_heads, num_splits), short=True)
    if group_size <= short_rows and num_splits > 1:
        join_kernel[(num_reqs, kv_heads)](
            batch[0],
            out,
            lse,
            part_out,
            part_lse,
            options.sinks,
            lowered["out_scale"],
            lowered["out_scale_stride"],
            num_splits,
            short_rows,
            part_rows,
            *out.stride(),
            *((0, 0) if lse is None else lse.stride()),
            **sizes,
            OUT_FP8=lowered["OUT_FP8"],
            ROWS=short_rows,
        )
    if longest_rows > short_rows:
        # no request has more tiles than its rows fill, plus one that is not full
        num_tiles = triton.cdiv(num_tokens * group_size, prefill.rows) + num_reqs
        start(prefill, (num_tiles, kv_heads, 1), short=False)


def _strides(name: str, tensor: Tensor | None, axes: tuple[str, ...]) -> dict[str, int]:
    """Return a tensor's strides by argument; 0 for leading axes that it has not."""
    strides = () if tensor is None else tensor.stride()
    strides = (0,) * (len(axes) - len(strides)) + strides
    return {f"{name}_{axis}": each for axis, each in zip(axes, strides, strict=True)}


def _scale(name: str, scale: Tensor | float | None) -> dict[str, Any]:
    """Return a scale and its stride by argument."""
    given, stride = scale_arguments(scale)
    return {name: given, f"{name}_stride": stride}


def _packed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _as_bits(tensor: Tensor) -> Tensor:
    """Return FP8 numbers as bytes, which kernels decode themselves."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def _fp8_kind(dtype: torch.dtype) -> int:
    """Return 0 for a dtype that is not FP8, else its place in FP8_DTYPES from 1."""
    return FP8_DTYPES.index(dtype) + 1 if dtype in FP8_DTYPES else 0


def _most_keys(max_key_len: int, short_rows: int, options: AttentionOptions) -> int:
    """Return at least how many keys the rows of a short request are cut from."""
    most = max_key_len
    if options.query_ranges is not None:
        return most
    if options.sliding_window is not None:
        sides = 1 if options.causal is True else 2
        most = min(most, sides * options.sliding_window + short_rows)
    if options.attention_chunk_size is not None:
        most = min(most, options.attention_chunk_size + short_rows)
    return most


def _choose_splits(programs: int, max_seq_len: int, device: torch.device) -> int:
    """Return into how many parts each short row's keys are cut; a power of two."""
    rule = split_rule(device)
    wanted = min(
        rule.programs // max(programs, 1),
        max_seq_len // rule.min_keys,
        rule.max_splits,
    )
    return 1 << max(wanted, 1).bit_length() - 1


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
        "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks,
        **_scale("k_scale", options.k_scale),
        **_scale("v_scale", options.v_scale),
        **_scale("out_scale", options.out_scale),
        "causal": None if flags is None else flags.view(torch.uint8),
        "causal_stride": 0 if flags is None else flags.stride(0),
        "position_bias": bias,
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


@triton.jit
def _sight(
    position,
    seq_len,
    is_causal,
    CAUSAL: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    """Return the first key that a query at `position` sees, and the one behind the last."""
    first = position * 0
    end = first + seq_len
    if SLIDING_WINDOW > 0:
        first = tl.maximum(position - SLIDING_WINDOW + 1, 0)
        end = tl.minimum(position + SLIDING_WINDOW, seq_len)
    if CHUNK_SIZE > 0:
        begins = position // CHUNK_SIZE * CHUNK_SIZE
        first = tl.maximum(first, begins)
        end = tl.minimum(end, begins + CHUNK_SIZE)
    if CAUSAL == 1:
        end = tl.minimum(position + 1, seq_len)
    elif CAUSAL == 2:
        end = tl.where(is_causal, tl.minimum(position + 1, end), end)
    return first, end


@triton.jit(do_not_specialize=CHANGING)
def _attend_kernel(
    query,
    key,
    value,
    block_table,
    query_start_loc,
    lengths,
    out,
    lse,
    part_out,
    part_lse,
    alibi_slopes,
    sinks,
    position_bias,
    causal,
    tree_mask,
    tree_depth,
    query_ranges,
    k_scale,
    v_scale,
    out_scale,
    num_reqs,
    num_halvings,
    short_rows,
    part_rows,
    scale,
    bias_reach,
    tree_width,
    query_stride_token,
    query_stride_head,
    query_stride_element,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    key_stride_element,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    value_stride_element,
    table_stride_req,
    table_stride_entry,
    out_stride_token,
    out_stride_head,
    out_stride_element,
    lse_stride_head,
    lse_stride_token,
    bias_stride_head,
    bias_stride_entry,
    causal_stride,
    tree_stride_req,
    tree_stride_query,
    tree_stride_key,
    ranges_stride_token,
    ranges_stride_entry,
    k_scale_stride,
    v_scale_stride,
    out_scale_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    CACHE_FP8: tl.constexpr,
    OUT_FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if SHORT:
        req = tl.program_id(0)
        first_row = 0
    else:
        # the longest tiles, which come last in a causal request, start first
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        req, first_row = find_tile(
            query_start_loc, tile, num_reqs, num_halvings, GROUP_SIZE, ROWS
        )
        if req >= num_reqs:
            return
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    num_rows = query_len * GROUP_SIZE
    is_short = num_rows <= short_rows
    if is_short != SHORT or first_row >= num_rows:
        return
    keys = key + kv_head.to(tl.int64) * key_stride_head
    values = value + kv_head.to(tl.int64) * value_stride_head
    if BLOCK_SIZE > 0:
        seq_len = tl.load(lengths + req)
        entries = block_table + req.to(tl.int64) * table_stride_req
    else:
        key_start = tl.load(lengths + req)
        seq_len = tl.load(lengths + req + 1) - key_start
        keys += key_start.to(tl.int64) * key_stride_slot
        values += key_start.to(tl.int64) * value_stride_slot
        entries = None

    # a row is one query head of one token
    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    element = tl.arange(0, HEAD_TILE)
    is_row = row < num_rows
    question = tl.load(
        query
        + ((start + token).to(tl.int64) * query_stride_token)[:, None]
        + (head * query_stride_head)[:, None]
        + (element * query_stride_element)[None, :],
        mask=is_row[:, None] & (element < HEAD_SIZE)[None, :],
        other=0.0,
    )
    if WIDEN:
        question = question.to(tl.float32)
    if CACHE_FP8:
        scale *= load_scale(k_scale, k_scale_stride, kv_head, True)

    # token j of q stands at position seq_len - q + j
    context = seq_len - query_len
    position = context + token
    is_causal = True
    if CAUSAL == 2:
        is_causal = tl.load(causal + req * causal_stride) != 0
    is_tree = False
    tree = None
    depths = None
    if tree_mask is not None:
        is_tree = query_len <= tree_width
        tree = tree_mask + req.to(tl.int64) * tree_stride_req
        in_tree = is_row & is_tree
        tree += tl.where(in_tree, token, 0).to(tl.int64) * tree_stride_query
        if tree_depth is not None:
            # siblings stand at the same position: as deep as they have ancestors
            depths = tree_depth + req * tree_width
            depth = tl.load(depths + token, mask=in_tree, other=0)
            position = tl.where(in_tree, context + depth, position)
    row_first, row_end = _sight(
        position, seq_len, is_causal, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE
    )
    # keys before `first_seen` and from `last_seen` on nobody sees; from `low` to `high`,
    # whole tiles, everybody sees all
    first_token = first_row // GROUP_SIZE
    last_token = tl.minimum((first_row + ROWS - 1) // GROUP_SIZE, query_len - 1)
    first_seen, high = _sight(
        context + first_token, seq_len, is_causal, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE
    )
    low, last_seen = _sight(
        context + last_token, seq_len, is_causal, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE
    )
    if tree_mask is not None:
        # in a tree the mask says what is seen, and positions need not rise from row to row
        tree_first, tree_end = _sight(
            position, seq_len, False, 2, SLIDING_WINDOW, CHUNK_SIZE
        )
        row_first = tl.where(in_tree, tree_first, row_first)
        row_end = tl.where(in_tree, tree_end, row_end)
        if is_tree:
            lowest = tl.min(tl.where(is_row, row_first, seq_len), 0)
            first_seen = tl.minimum(lowest, context)
            low = tl.max(tl.where(is_row, row_first, 0), 0)
            high = context
            last_seen = seq_len
    range_first = None
    range_last = None
    if query_ranges is not None:
        ranges = query_ranges + (start + token).to(tl.int64) * ranges_stride_token
        range_first = tl.load(ranges, mask=is_row, other=-1)
        range_last = tl.load(ranges + ranges_stride_entry, mask=is_row, other=-1)
        has_range = range_first >= 0
        range_last = tl.where(has_range, range_last, -1)
        lowest = tl.min(tl.where(has_range, range_first, seq_len), 0)
        first_seen = tl.minimum(first_seen, lowest)
        furthest = tl.minimum(tl.max(range_last, 0) + 1, seq_len)
        last_seen = tl.maximum(last_seen, furthest)
    # this program's share of the keys, cut at whole tiles
    first = first_seen // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(last_seen - first, tl.num_programs(2)), KEYS) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, last_seen)
    low = tl.cdiv(low, KEYS) * KEYS
    low = tl.minimum(tl.maximum(low, begin), tl.maximum(end, begin))
    high = tl.maximum(high, 0) // KEYS * KEYS
    high = tl.maximum(tl.minimum(high, end), low)

    total = tl.zeros([ROWS, VALUE_TILE], dtype=tl.float32)
    row_sum, row_max = start_rows(None if SPLIT else sinks, head, is_row, ROWS)
    slope = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head, mask=is_row, other=0.0)
    bias = None
    if position_bias is not None:
        bias = position_bias + head.to(tl.int64) * bias_stride_head
    if SLIDING_WINDOW > 0 or CHUNK_SIZE > 0:
        # the tiles where some row's sight begins
        total, row_sum, row_max = _attend_keys(
            total, row_sum, row_max, question, begin, low,
            position, row_first, row_end, first_seen, last_seen, scale,
            slope, bias, bias_reach, bias_stride_entry,
            context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
            keys, values, entries, table_stride_entry,
            key_stride_block, key_stride_slot, key_stride_element,
            value_stride_block, value_stride_slot, value_stride_element,
            HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
            CACHE_FP8, NATIVE_FP8, KEYS, True, True, WIDEN,
        )  # fmt: skip
    # the tiles that every row sees whole
    total, row_sum, row_max = _attend_keys(
        total, row_sum, row_max, question, low, high,
        position, row_first, row_end, first_seen, last_seen, scale,
        slope, bias, bias_reach, bias_stride_entry,
        context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
        keys, values, entries, table_stride_entry,
        key_stride_block, key_stride_slot, key_stride_element,
        value_stride_block, value_stride_slot, value_stride_element,
        HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
        CACHE_FP8, NATIVE_FP8, KEYS, False, False, WIDEN,
    )  # fmt: skip
    # the tiles where some row's sight ends
    total, row_sum, row_max = _attend_keys(
        total, row_sum, row_max, question, high, end,
        position, row_first, row_end, first_seen, last_seen, scale,
        slope, bias, bias_reach, bias_stride_entry,
        context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
        keys, values, entries, table_stride_entry,
        key_stride_block, key_stride_slot, key_stride_element,
        value_stride_block, value_stride_slot, value_stride_element,
        HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
        CACHE_FP8, NATIVE_FP8, KEYS, True, SLIDING_WINDOW > 0 or CHUNK_SIZE > 0, WIDEN,
    )  # fmt: skip

    result, row_lse = finish_rows(total, row_sum, row_max)
    if CACHE_FP8:
        result *= load_scale(v_scale, v_scale_stride, kv_head, True)
    element = tl.arange(0, VALUE_TILE)
    if SPLIT:
        place = part_place(req, kv_head, split, tl.num_programs(2), part_rows) + row
        tl.store(part_lse + place, row_lse, mask=is_row)
        tl.store(
            part_out + place[:, None] * VALUE_SIZE + element[None, :],
            result,
            mask=is_row[:, None] & (element < VALUE_SIZE)[None, :],
        )
    else:
        store_rows(
            out, lse, out_scale, out_scale_stride, result, row_lse, start + token, head,
            element, is_row,
            out_stride_token, out_stride_head, out_stride_element,
            lse_stride_head, lse_stride_token, VALUE_SIZE, OUT_FP8,
        )  # fmt: skip


@triton.jit
def _attend_keys(
    total,
    row_sum,
    row_max,
    question,
    begin,
    end,
    position,
    row_first,
    row_end,
    first_seen,
    last_seen,
    scale,
    slope,
    bias,
    bias_reach,
    bias_stride,
    context,
    is_tree,
    tree,
    tree_stride,
    depths,
    range_first,
    range_last,
    keys,
    values,
    entries,
    entry_stride,
    key_stride_block,
    key_stride_slot,
    key_stride_element,
    value_stride_block,
    value_stride_slot,
    value_stride_element,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    CACHE_FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    KEYS: tl.constexpr,
    EDGE: tl.constexpr,
    CUT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return the running sums of a tile of rows after the keys from `begin` to `end`.

    EDGE: some row does not see some of them. CUT: some row's sight begins after the first key.
    """
    element = tl.arange(0, HEAD_TILE)
    value_element = tl.arange(0, VALUE_TILE)
    is_element = (element < HEAD_SIZE)[None, :]
    is_value_element = (value_element < VALUE_SIZE)[None, :]
    for first in range(begin, end, KEYS):
        # step: gather the sequence's keys and values
        place = first + tl.arange(0, KEYS)
        loaded = is_element
        value_loaded = is_value_element
        if EDGE:
            # what nobody sees may hold anything, and 0 * NaN is no 0
            is_key = place < last_seen
            if CUT:
                is_key &= place >= first_seen
            loaded = is_key[:, None] & is_element
            value_loaded = is_key[:, None] & is_value_element
        if BLOCK_SIZE > 0:
            entry = entries + (place // BLOCK_SIZE) * entry_stride
            if EDGE:
                block_id = tl.load(entry, mask=is_key, other=0).to(tl.int64)
            else:
                block_id = tl.load(entry).to(tl.int64)
            offset = (place % BLOCK_SIZE).to(tl.int64)
            key_place = block_id * key_stride_block + offset * key_stride_slot
            value_place = block_id * value_stride_block + offset * value_stride_slot
        else:
            key_place = place.to(tl.int64) * key_stride_slot
            value_place = place.to(tl.int64) * value_stride_slot
        key = tl.load(
            keys + key_place[:, None] + (element * key_stride_element)[None, :],
            mask=loaded,
            other=0,
        )
        value = tl.load(
            values
            + value_place[:, None]
            + (value_element * value_stride_element)[None, :],
            mask=value_loaded,
            other=0,
        )
        if CACHE_FP8:
            key = decode_fp8(key, CACHE_FP8 == 2, NATIVE_FP8).to(question.dtype)
            value = decode_fp8(value, CACHE_FP8 == 2, NATIVE_FP8).to(question.dtype)
        elif WIDEN:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        # siblings of a tree stand at the same position
        key_position = place
        if EDGE and tree is not None:
            new = place - context
            of_tree = (new >= 0) & is_key & is_tree
            if depths is not None:
                depth = tl.load(depths + new, mask=of_tree, other=0)
                key_position = tl.where(of_tree, context + depth, place)
        # step: compare each query with every key
        scores = tl.dot(question, tl.trans(key), input_precision="ieee")
        if SOFT_CAP > 0:
            scores = SOFT_CAP * tanh(scores * scale / SOFT_CAP)
        elif slope is not None or bias is not None:
            scores = scores * scale
        if slope is not None or bias is not None:
            distance = key_position[None, :] - position[:, None]
            if slope is not None:
                scores += slope[:, None] * distance
            if bias is not None:
                reached = tl.minimum(tl.maximum(distance, -bias_reach), bias_reach)
                reached = (reached + bias_reach) * bias_stride
                scores += tl.load(bias[:, None] + reached)
        is_scaled: tl.constexpr = SOFT_CAP > 0 or slope is not None or bias is not None
        scores = scores * (LOG2_E if is_scaled else scale * LOG2_E)
        # step: hide the keys that a query does not see
        if EDGE:
            seen = key_position[None, :] < row_end[:, None]
            if CUT:
                seen &= key_position[None, :] >= row_first[:, None]
            if tree is not None:
                named = tl.load(
                    tree[:, None] + (new * tree_stride)[None, :],
                    mask=of_tree[None, :],
                    other=1,
                )
                seen &= named != 0
            if range_first is not None:
                in_range = key_position[None, :] >= range_first[:, None]
                in_range &= key_position[None, :] <= range_last[:, None]
                seen |= in_range & is_key[None, :]
            scores = tl.where(seen, scores, -float("inf"))
        # step: turn scores into weights
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # a row that has seen no key yet has the maximum -inf, and -inf - -inf is no number
        shift = tl.where(new_max == -float("inf"), 0.0, new_max) if EDGE else new_max
        fade = tl.exp2(row_max - shift)
        weights = tl.exp2(scores - shift[:, None])
        row_sum = row_sum * fade + tl.sum(weights, 1)
        row_max = new_max
        # step: average the values by them
        total = total * fade[:, None]
        total = tl.dot(weights.to(value.dtype), value, total, input_precision="ieee")
    return total, row_sum, row_max

"""Which keys does a query see, and what do they make of it?

One kernel, launched for two classes of requests. A program takes one kv head and tiles of its rows,
a row being one query of one token: all query heads that share the kv head lie side by side, so that
keys and values are read once for the group. Requests whose rows fit one small tile (SHORT: decodes,
short verifications) are shared out by their keys, as `_spans.py` tells; all others by their rows.
Each launch skips the other's requests, so any mixture is right and nothing is read by the host. The
softmax runs over tiles of keys as they come, in base 2, with sums in float32. Addresses have 64
bits; within keys and values 32 do, where these hold no more.

Options are constants or absent pointers, so what a call does not use is compiled away. A row sees
an interval of positions. `sight` says which, for each row and, as the interval only moves forward
from row to row, for a tile's first and last row: keys that no row sees are not read, those that all
see need no mask. Trees and ranges see more than an interval: they widen what is read, and have a
mask of their own.
"""

import triton
import triton.language as tl

from .fp8 import decode_fp8, decode_values, load_scale
from .rows import (
    LOG2_E,
    clear_tokens,
    find_tile,
    finish_rows,
    fold_part,
    start_rows,
    store_rows,
    tanh,
)
from .split_kv import count_tiles, join_parts, own_span, part_place, sight

# what changes from step to step makes no kernel of its own
CHANGING = [
    "num_tokens",
    "num_reqs",
    "num_halvings",
    "part_rows",
    "table_stride_req",
    "lse_stride_head",
    "lse_stride_token",
    "tree_stride_req",
    "tree_width",
]


@triton.jit(do_not_specialize=CHANGING)
def attend_kernel(
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
    arrivals,
    alibi_slopes,
    sinks,
    position_bias,
    k_scale,
    v_scale,
    out_scale,
    num_tokens,
    num_reqs,
    num_halvings,
    part_rows,
    scale,
    table_stride_req,
    lse_stride_head,
    lse_stride_token,
    causal,
    tree_mask,
    tree_depth,
    query_ranges,
    short_rows,
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
    table_stride_entry,
    out_stride_token,
    out_stride_head,
    out_stride_element,
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
    CLEAR: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    WIDE: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    JOIN_PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    WIDEN: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Attend with all short requests of a batch, or with all long ones.

    ROWS, KEYS: of a tile. SHORT: whether short requests are meant; of them MIN_TILES, WIDTH and
    MANY are those of `own_span`, JOIN_ROWS and JOIN_PARTS the rows and parts joined at once.
    SPAN: of long ones, keys of a part of each row, a multiple of KEYS; 0: rows have no parts.
    IS_SPREAD: whether each part has a program of its own, and JOIN_ROWS rows are joined at once.
    CLEAR: whether this launch writes what tokens of no request have. ONE_LOOP: whether all tiles
    are masked. WIDE: whether places in keys and values need 64 bits. WIDEN: whether 16-bit numbers
    are computed with in float32. SUMS: see `_attend_keys`.
    """
    IS_CUT: tl.constexpr = SLIDING_WINDOW > 0 or CHUNK_SIZE > 0
    if SHORT:
        # the kv heads of a span run side by side, as their keys lie in the same blocks
        kv_head = tl.program_id(0)
        num_kv_heads = tl.num_programs(0)
        place = tl.program_id(1)
        first_row = 0
        WIDENED: tl.constexpr = tree_mask is not None or query_ranges is not None
        first_req, end_req, line, span_begin, span_end, span = own_span(
            place, tl.num_programs(1), query_start_loc, lengths, causal, causal_stride,
            num_reqs, short_rows, GROUP_SIZE, BLOCK_SIZE, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE,
            WIDENED, KEYS, MIN_TILES, WIDTH, MANY,
        )  # fmt: skip
    else:
        kv_head = tl.program_id(1)
        num_kv_heads = tl.num_programs(1)
        place = tl.program_id(0)
        # the longest tiles, which come last in a causal request, start first
        first_req, first_row = find_tile(
            query_start_loc, tl.num_programs(0) - 1 - place, num_reqs, num_halvings,
            GROUP_SIZE, ROWS,
        )  # fmt: skip
        end_req = tl.minimum(first_req + 1, num_reqs)
        line = 0
    if CLEAR:
        clear_tokens(
            out, lse, tl.load(query_start_loc + num_reqs) + place, num_tokens,
            tl.num_programs(1) if SHORT else tl.num_programs(0), kv_head,
            out_stride_token, out_stride_head, out_stride_element,
            lse_stride_head, lse_stride_token, GROUP_SIZE, VALUE_SIZE, VALUE_TILE, 16,
        )  # fmt: skip
    for req in range(first_req, end_req):
        start = tl.load(query_start_loc + req)
        query_len = tl.load(query_start_loc + req + 1) - start
        num_rows = query_len * GROUP_SIZE
        if ((num_rows <= short_rows) == SHORT) & (first_row < num_rows):
            keys = key + kv_head.to(tl.int64) * key_stride_head
            values = value + kv_head.to(tl.int64) * value_stride_head
            if BLOCK_SIZE > 0:
                seq_len = tl.load(lengths + req)
                entries = block_table + tl.cast(req, tl.int64) * table_stride_req
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
                + (head.to(tl.int64) * query_stride_head)[:, None]
                + (element * query_stride_element)[None, :],
                mask=is_row[:, None] & (element < HEAD_SIZE)[None, :],
                other=0.0,
            )
            if WIDEN:
                question = question.to(tl.float32)
            row_scale = scale
            if CACHE_FP8:
                row_scale *= load_scale(k_scale, k_scale_stride, kv_head, True)
                if NATIVE_FP8 and question.dtype != tl.float32:
                    question, power = _fit_float16(question)
                    row_scale *= power

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
                tree = tree_mask + tl.cast(req, tl.int64) * tree_stride_req
                in_tree = is_row & is_tree
                tree += tl.where(in_tree, token, 0).to(tl.int64) * tree_stride_query
                if tree_depth is not None:
                    # siblings stand at the same position: as deep as they have ancestors
                    depths = tree_depth + req * tree_width
                    depth = tl.load(depths + token, mask=in_tree, other=0)
                    position = tl.where(in_tree, context + depth, position)
            row_first, row_end = sight(
                position, seq_len, is_causal, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE
            )
            # keys before `first_seen` and from `last_seen` on nobody sees; from `low` to `high`,
            # whole tiles, everybody sees all
            first_token = first_row // GROUP_SIZE
            last_token = tl.minimum((first_row + ROWS - 1) // GROUP_SIZE, query_len - 1)
            first_seen, high = sight(
                context + first_token,
                seq_len,
                is_causal,
                CAUSAL,
                SLIDING_WINDOW,
                CHUNK_SIZE,
            )
            low, last_seen = sight(
                context + last_token,
                seq_len,
                is_causal,
                CAUSAL,
                SLIDING_WINDOW,
                CHUNK_SIZE,
            )
            if tree_mask is not None:
                # in a tree the mask says what is seen, and positions need not rise from row to row
                tree_first, tree_end = sight(
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
                ranges = (
                    query_ranges + (start + token).to(tl.int64) * ranges_stride_token
                )
                range_first = tl.load(ranges, mask=is_row, other=-1)
                range_last = tl.load(
                    ranges + ranges_stride_entry, mask=is_row, other=-1
                )
                has_range = range_first >= 0
                range_last = tl.where(has_range, range_last, -1)
                lowest = tl.min(tl.where(has_range, range_first, seq_len), 0)
                first_seen = tl.minimum(first_seen, lowest)
                furthest = tl.minimum(tl.max(range_last, 0) + 1, seq_len)
                last_seen = tl.maximum(last_seen, furthest)
            # the keys of this program, whole tiles but for the last
            begin = first_seen // KEYS * KEYS
            end = last_seen
            whole = True
            if SHORT:
                first_tile, tiles = count_tiles(
                    req, True, query_start_loc, lengths, causal, causal_stride, short_rows,
                    GROUP_SIZE, BLOCK_SIZE, CAUSAL, SLIDING_WINDOW, CHUNK_SIZE, WIDENED, KEYS,
                )  # fmt: skip
                whole = (line >= span_begin) & (line + tiles <= span_end)
                own = (first_tile + tl.maximum(span_begin - line, 0)) * KEYS
                begin = tl.maximum(begin, own)
                end = tl.minimum(end, (first_tile + span_end - line) * KEYS)
            low = tl.cdiv(low, KEYS) * KEYS
            low = tl.minimum(tl.maximum(low, begin), tl.maximum(end, begin))
            high = tl.maximum(high, 0) // KEYS * KEYS
            high = tl.maximum(tl.minimum(high, end), low)

            slope = None
            if alibi_slopes is not None:
                slope = tl.load(alibi_slopes + head, mask=is_row, other=0.0)
            bias = None
            if position_bias is not None:
                bias = position_bias + head.to(tl.int64) * bias_stride_head
            if SPAN > 0:
                # parts begin at the same keys whoever computes them, and are joined in order
                first_part = begin // SPAN
                parts = tl.maximum(tl.cdiv(end, SPAN) - first_part, 1)
                own_part = 0
                own_end = parts
                if IS_SPREAD:
                    own_part = tl.program_id(2)
                    last_part = tl.num_programs(2) - 1
                    # a sequence longer than it was said to be is right too: the last one takes more
                    own_end = tl.where(own_part < last_part, own_part + 1, parts)
                    own_end = tl.minimum(own_end, parts)
                    parts = tl.minimum(parts, last_part + 1)
                    whole = (parts == 1) & (own_part == 0)
            total = tl.zeros([ROWS, VALUE_TILE], dtype=tl.float32)
            row_sum, row_max = start_rows(sinks, head, is_row, whole, ROWS)
            if SPAN > 0:
                for part in range(own_part, own_end):
                    part_begin = (first_part + part) * SPAN
                    part_total = tl.zeros([ROWS, VALUE_TILE], dtype=tl.float32)
                    part_sum, part_max = start_rows(None, head, is_row, True, ROWS)
                    part_total, part_sum, part_max = _attend_keys(
                        part_total, part_sum, part_max, question,
                        tl.maximum(begin, part_begin), tl.minimum(end, part_begin + SPAN),
                        position, row_first, row_end, first_seen, last_seen, row_scale,
                        slope, bias, bias_reach, bias_stride_entry,
                        context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
                        keys, values, entries, table_stride_entry,
                        key_stride_block, key_stride_slot, key_stride_element,
                        value_stride_block, value_stride_slot, value_stride_element,
                        HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
                        CACHE_FP8, NATIVE_FP8, WIDE, SHORT, KEYS, True, IS_CUT, WIDEN, SUMS,
                    )  # fmt: skip
                    mean, mean_lse = finish_rows(part_total, part_sum, part_max)
                    if CACHE_FP8:
                        mean *= load_scale(v_scale, v_scale_stride, kv_head, True)
                    total, row_sum, row_max = fold_part(
                        total, row_sum, row_max, mean, mean_lse
                    )
            elif ONE_LOOP:
                # a program waits for memory, not for its masks: one loop, which is never drained
                total, row_sum, row_max = _attend_keys(
                    total, row_sum, row_max, question, begin, end,
                    position, row_first, row_end, first_seen, last_seen, row_scale,
                    slope, bias, bias_reach, bias_stride_entry,
                    context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
                    keys, values, entries, table_stride_entry,
                    key_stride_block, key_stride_slot, key_stride_element,
                    value_stride_block, value_stride_slot, value_stride_element,
                    HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
                    CACHE_FP8, NATIVE_FP8, WIDE, SHORT, KEYS, True, IS_CUT, WIDEN, SUMS,
                )  # fmt: skip
            else:
                if IS_CUT:
                    # the tiles where some row's sight begins
                    total, row_sum, row_max = _attend_keys(
                        total, row_sum, row_max, question, begin, low,
                        position, row_first, row_end, first_seen, last_seen, row_scale,
                        slope, bias, bias_reach, bias_stride_entry,
                        context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
                        keys, values, entries, table_stride_entry,
                        key_stride_block, key_stride_slot, key_stride_element,
                        value_stride_block, value_stride_slot, value_stride_element,
                        HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
                        CACHE_FP8, NATIVE_FP8, WIDE, SHORT, KEYS, True, True, WIDEN, SUMS,
                    )  # fmt: skip
                # the tiles that every row sees whole
                total, row_sum, row_max = _attend_keys(
                    total, row_sum, row_max, question, low, high,
                    position, row_first, row_end, first_seen, last_seen, row_scale,
                    slope, bias, bias_reach, bias_stride_entry,
                    context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
                    keys, values, entries, table_stride_entry,
                    key_stride_block, key_stride_slot, key_stride_element,
                    value_stride_block, value_stride_slot, value_stride_element,
                    HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
                    CACHE_FP8, NATIVE_FP8, WIDE, SHORT, KEYS, False, False, WIDEN, SUMS,
                )  # fmt: skip
                # the tiles where some row's sight ends
                total, row_sum, row_max = _attend_keys(
                    total, row_sum, row_max, question, high, end,
                    position, row_first, row_end, first_seen, last_seen, row_scale,
                    slope, bias, bias_reach, bias_stride_entry,
                    context, is_tree, tree, tree_stride_key, depths, range_first, range_last,
                    keys, values, entries, table_stride_entry,
                    key_stride_block, key_stride_slot, key_stride_element,
                    value_stride_block, value_stride_slot, value_stride_element,
                    HEAD_SIZE, HEAD_TILE, VALUE_SIZE, VALUE_TILE, BLOCK_SIZE, SOFT_CAP,
                    CACHE_FP8, NATIVE_FP8, WIDE, SHORT, KEYS, True, IS_CUT, WIDEN, SUMS,
                )  # fmt: skip

            result, row_lse = finish_rows(total, row_sum, row_max)
            if CACHE_FP8 and SPAN == 0:
                result *= load_scale(v_scale, v_scale_stride, kv_head, True)
            element = tl.arange(0, VALUE_TILE)
            if whole:
                store_rows(
                    out, lse, out_scale, out_scale_stride, result, row_lse, start + token,
                    head, element, is_row,
                    out_stride_token, out_stride_head, out_stride_element,
                    lse_stride_head, lse_stride_token, VALUE_SIZE, OUT_FP8,
                )  # fmt: skip
            elif SHORT:
                begins_here = line >= span_begin
                at = part_place(
                    place, begins_here.to(tl.int32), kv_head, num_kv_heads, part_rows
                )
                _store_part(part_out, part_lse, at, result, row_lse, is_row, VALUE_SIZE)
                # join the parts, if this is the last one to arrive
                first_span = line // span
                last_span = (line + tiles - 1) // span
                counter = arrivals + first_span * num_kv_heads + kv_head
                # all threads have stored before one of them says so
                tl.debug_barrier()
                before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if before == last_span - first_span:
                    tl.store(counter, 0)
                    _join_request(
                        out, lse, sinks, out_scale, out_scale_stride, part_out, part_lse,
                        first_span, last_span, kv_head, num_kv_heads, part_rows, start,
                        num_rows, out_stride_token, out_stride_head, out_stride_element,
                        lse_stride_head, lse_stride_token, GROUP_SIZE, VALUE_SIZE, VALUE_TILE,
                        OUT_FP8, JOIN_ROWS, JOIN_PARTS,
                    )  # fmt: skip
            elif IS_SPREAD:  # noqa: SIM102 (a constant, which leaves the rest out)
                if own_part < parts:
                    at = _span_place(place, kv_head, num_kv_heads, own_part, part_rows)
                    _store_part(
                        part_out, part_lse, at, result, row_lse, is_row, VALUE_SIZE
                    )
                    # join the parts, if this is the last one to arrive
                    counter = arrivals + place * num_kv_heads + kv_head
                    tl.debug_barrier()
                    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                    if before == parts - 1:
                        tl.store(counter, 0)
                        _join_spans(
                            out, lse, sinks, out_scale, out_scale_stride, part_out, part_lse,
                            place, parts, kv_head, num_kv_heads, part_rows, start,
                            first_row, num_rows,
                            out_stride_token, out_stride_head, out_stride_element,
                            lse_stride_head, lse_stride_token, GROUP_SIZE, VALUE_SIZE,
                            VALUE_TILE, OUT_FP8, ROWS, JOIN_ROWS,
                        )  # fmt: skip
            if SHORT:
                line += tiles


@triton.jit
def _span_place(place, kv_head, num_kv_heads, part, part_rows):
    """Return where a part's first row lies in [tiles, kv_heads, parts, part_rows]."""
    tile = tl.cast(place, tl.int64) * num_kv_heads + kv_head
    return (tile * tl.num_programs(2) + part) * part_rows


@triton.jit
def _store_part(
    part_out, part_lse, at, result, row_lse, is_row, VALUE_SIZE: tl.constexpr
):
    """Leave a part of a tile's rows where the last one to arrive will look for it."""
    place = at + tl.arange(0, result.shape[0])
    element = tl.arange(0, result.shape[1])
    tl.store(part_lse + place, row_lse, mask=is_row)
    tl.store(
        part_out + place[:, None] * VALUE_SIZE + element[None, :],
        result,
        mask=is_row[:, None] & (element < VALUE_SIZE)[None, :],
    )


@triton.jit
def _join_spans(
    out,
    lse,
    sinks,
    out_scale,
    out_scale_stride,
    part_out,
    part_lse,
    place,
    parts,
    kv_head,
    num_kv_heads,
    part_rows,
    start,
    first_row,
    num_rows,
    out_stride_token,
    out_stride_head,
    out_stride_element,
    lse_stride_head,
    lse_stride_token,
    GROUP_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    OUT_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
):
    """Write a tile's rows, some at a time, each joined from its parts in order of their keys."""
    element = tl.arange(0, VALUE_TILE)
    for first in range(0, tl.minimum(num_rows - first_row, ROWS), JOIN_ROWS):
        own = first + tl.arange(0, JOIN_ROWS)
        row = first_row + own
        is_row = row < num_rows
        head = kv_head * GROUP_SIZE + row % GROUP_SIZE
        total = tl.zeros([JOIN_ROWS, VALUE_TILE], dtype=tl.float32)
        row_sum, row_max = start_rows(sinks, head, is_row, True, JOIN_ROWS)
        for part in range(parts):
            at = own + _span_place(place, kv_head, num_kv_heads, part, part_rows)
            # other programs wrote these: not from this one's own cache
            its_lse = tl.load(
                part_lse + at,
                mask=is_row,
                other=-float("inf"),
                cache_modifier=".cg",
            )
            value = tl.load(
                part_out + at[:, None] * VALUE_SIZE + element[None, :],
                mask=is_row[:, None] & (element < VALUE_SIZE)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            total, row_sum, row_max = fold_part(total, row_sum, row_max, value, its_lse)
        result, row_lse = finish_rows(total, row_sum, row_max)
        store_rows(
            out, lse, out_scale, out_scale_stride, result, row_lse, start + row // GROUP_SIZE,
            head, element, is_row,
            out_stride_token, out_stride_head, out_stride_element,
            lse_stride_head, lse_stride_token, VALUE_SIZE, OUT_FP8,
        )  # fmt: skip


@triton.jit
def _join_request(
    out,
    lse,
    sinks,
    out_scale,
    out_scale_stride,
    part_out,
    part_lse,
    first_span,
    last_span,
    kv_head,
    num_kv_heads,
    part_rows,
    start,
    num_rows,
    out_stride_token,
    out_stride_head,
    out_stride_element,
    lse_stride_head,
    lse_stride_token,
    GROUP_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    OUT_FP8: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    JOIN_PARTS: tl.constexpr,
):
    """Write a short request's rows, each part weighted by its share of the sum."""
    row = tl.arange(0, JOIN_ROWS)
    element = tl.arange(0, VALUE_TILE)
    is_row = row < num_rows
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    total = tl.zeros([JOIN_ROWS, VALUE_TILE], dtype=tl.float32)
    row_sum, row_max = start_rows(sinks, head, is_row, True, JOIN_ROWS)
    total, row_sum, row_max = join_parts(
        total, row_sum, row_max, part_out, part_lse, first_span, last_span,
        kv_head, num_kv_heads, part_rows, row, element, is_row, VALUE_SIZE, JOIN_PARTS,
    )  # fmt: skip
    result, row_lse = finish_rows(total, row_sum, row_max)
    store_rows(
        out, lse, out_scale, out_scale_stride, result, row_lse, start + row // GROUP_SIZE,
        head, element, is_row,
        out_stride_token, out_stride_head, out_stride_element,
        lse_stride_head, lse_stride_token, VALUE_SIZE, OUT_FP8,
    )  # fmt: skip


@triton.jit
def _fit_float16(question):
    """Return queries in float16, and the power of two by which each row was divided to fit it.

    FP8 keys are exact in float16, which a product with bfloat16 queries would round.
    """
    largest = tl.max(tl.abs(question.to(tl.float32)), 1)
    power = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 2.0**-100))))
    return (question.to(tl.float32) / power[:, None]).to(tl.float16), power


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
    row_scale,
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
    WIDE: tl.constexpr,
    SHORT: tl.constexpr,
    KEYS: tl.constexpr,
    EDGE: tl.constexpr,
    CUT: tl.constexpr,
    WIDEN: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Return the running sums of a tile of rows after the keys from `begin` to `end`.

    SUMS: products are added up one by one. In the interpreter they are numpy's, whose rounding
    depends on a row's place in its tile; a chip's does not.
    EDGE: some row does not see some of them. CUT: some row's sight begins after the first key.
    """
    # one factor, or with FP8 queries one a row
    spread = row_scale
    if row_scale.type.is_block():
        spread = row_scale[:, None]
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
            block_id = tl.load(entry, mask=is_key, other=0) if EDGE else tl.load(entry)
            # tiles begin at multiples of their size
            in_tile = tl.arange(0, KEYS)
            offset = (in_tile if KEYS % BLOCK_SIZE == 0 else place) % BLOCK_SIZE
            if WIDE:
                block_id = block_id.to(tl.int64)
                offset = offset.to(tl.int64)
            key_place = block_id * key_stride_block + offset * key_stride_slot
            value_place = block_id * value_stride_block + offset * value_stride_slot
        else:
            slot = place.to(tl.int64) if WIDE else place
            key_place = slot * key_stride_slot
            value_place = slot * value_stride_slot
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
            if SHORT:
                value = decode_values(value, CACHE_FP8 == 2, NATIVE_FP8)
            else:
                value = decode_fp8(value, CACHE_FP8 == 2, NATIVE_FP8)
            value = value.to(question.dtype)
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
        if SUMS:
            wide = key.to(tl.float32)
            scores = tl.sum(question.to(tl.float32)[:, None, :] * wide[None, :, :], 2)
        else:
            scores = tl.dot(question, tl.trans(key), input_precision="ieee")
        if SOFT_CAP > 0:
            scores = SOFT_CAP * tanh(scores * (spread / SOFT_CAP))
        elif slope is not None or bias is not None:
            scores = scores * spread
        if slope is not None or bias is not None:
            distance = key_position[None, :] - position[:, None]
            if slope is not None:
                scores += slope[:, None] * distance
            if bias is not None:
                reached = tl.minimum(tl.maximum(distance, -bias_reach), bias_reach)
                reached = (reached + bias_reach) * bias_stride
                scores += tl.load(bias[:, None] + reached)
        is_scaled: tl.constexpr = SOFT_CAP > 0 or slope is not None or bias is not None
        scores = scores * (LOG2_E if is_scaled else spread * LOG2_E)
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
        weights = weights.to(value.dtype)
        if SUMS:
            wide = value.to(tl.float32)
            total += tl.sum(weights.to(tl.float32)[:, :, None] * wide[None, :, :], 1)
        else:
            total = tl.dot(weights, value, total, input_precision="ieee")
    return total, row_sum, row_max

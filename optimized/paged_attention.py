"""What does each new token see of its sequence?

One kernel, launched for two classes of requests. A program takes one kv head and a tile of its
rows, a row being one query of one token: all query heads that share the kv head lie side by side,
so that keys and values are read once for the group. Requests whose rows fit one small tile
(decodes, short verifications) are cut along their keys into parts that run side by side, and a
second kernel joins the parts by their log-sum-exp; all others are cut along their rows. Each launch
skips the other's requests, so any mixture is right and nothing is read by the host. The softmax
runs over tiles of keys as they come, in base 2, with sums in float32. Addresses are 64-bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shared.refusals import check_paged_attention, values_checked
from ..shared.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    PerHead,
    Query,
    StartLoc,
    TokenCounts,
    ValueCache,
)
from ._launch import check_launch, must_widen
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
]


def paged_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: PerHead | None = None,
    sinks: PerHead | None = None,
) -> Output:
    """Return causal attention of each new token over its sequence in the paged cache.

    Raises:
        NotImplementedError: another `compute_dtype` than float32, a head of more than 1,024
            elements, or a float64 cache; the reference takes them.
    """
    check_paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        out,
        lse,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        contents=values_checked(),
    )
    check_launch(query)
    _check_supported(query, compute_dtype)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    if not query.numel() or not block_table.numel():
        return out
    widen = must_widen(query.dtype)
    target = torch.zeros_like(out, dtype=torch.float32) if widen else out
    _launch(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        scale,
        target,
        lse,
        sliding_window,
        logits_soft_cap,
        alibi_slopes,
        sinks,
        widen,
    )
    return out.copy_(target) if widen else out


def _check_supported(query: Tensor, compute_dtype: torch.dtype) -> None:
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
    if query.shape[-1] > largest:
        raise NotImplementedError(
            f"head_size = {query.shape[-1]} is more than this kernel takes in"
            f" {query.dtype} on {query.device} ({largest}); the reference takes any"
        )


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    widen: bool,
) -> None:
    num_tokens, query_heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    num_reqs = block_table.shape[0]
    group_size = query_heads // kv_heads
    head_tile = max(16, triton.next_power_of_2(head_size))
    has_window = sliding_window is not None
    decode, prefill = choose_tiles(head_tile, query.dtype, query.device, has_window)
    # a request is short if its rows fit one decode tile
    short_rows = min(64, max(decode.rows, triton.next_power_of_2(group_size)))
    longest_rows = max_query_len * group_size
    most_keys = max_seq_len
    if sliding_window is not None:
        most_keys = min(max_seq_len, sliding_window + short_rows)
    num_splits = _choose_splits(num_reqs * kv_heads, most_keys, query.device)
    part_rows = min(short_rows, longest_rows)
    parts = (num_reqs, kv_heads, num_splits, part_rows)
    if num_splits > 1:
        part_out = out.new_empty(*parts, head_size, dtype=torch.float32)
        part_lse = out.new_empty(parts, dtype=torch.float32)
    else:
        part_out = part_lse = out  # never written
    lse_strides = (0, 0) if lse is None else lse.stride()
    tensors = (
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc.contiguous(),
        seq_lens.contiguous(),
        out,
        lse,
        part_out,
        part_lse,
        alibi_slopes,
        sinks,
    )
    numbers = (num_reqs, num_reqs.bit_length(), short_rows, part_rows, scale)
    strides = (
        *query.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        *block_table.stride(),
        *out.stride(),
        *lse_strides,
    )
    constants = {
        "GROUP_SIZE": group_size,
        "HEAD_SIZE": head_size,
        "HEAD_TILE": head_tile,
    }

    def attend(tiles: Tiles, grid: tuple[int, int, int], short: bool) -> None:
        _attend_kernel[grid](
            *tensors,
            *numbers,
            *strides,
            **constants,
            BLOCK_SIZE=block_size,
            SLIDING_WINDOW=sliding_window or 0,
            SOFT_CAP=logits_soft_cap or 0.0,
            ROWS=short_rows if short else tiles.rows,
            KEYS=tiles.keys,
            SHORT=short,
            SPLIT=short and num_splits > 1,
            WIDEN=widen,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

    attend(decode, (num_reqs, kv_heads, num_splits), short=True)
    if num_splits > 1:
        join_kernel[(num_reqs, kv_heads)](
            query_start_loc.contiguous(),
            out,
            lse,
            part_out,
            part_lse,
            sinks,
            num_splits,
            short_rows,
            part_rows,
            *out.stride(),
            *lse_strides,
            **constants,
            ROWS=short_rows,
        )
    if longest_rows > short_rows:
        # no request has more tiles than its rows fill, plus one that is not full
        num_tiles = triton.cdiv(num_tokens * group_size, prefill.rows) + num_reqs
        attend(prefill, (num_tiles, kv_heads, 1), short=False)


def _choose_splits(programs: int, max_seq_len: int, device: torch.device) -> int:
    """Return into how many parts each short row's keys are cut; a power of two."""
    rule = split_rule(device)
    wanted = min(
        rule.programs // max(programs, 1),
        max_seq_len // rule.min_keys,
        rule.max_splits,
    )
    return 1 << max(wanted, 1).bit_length() - 1


@triton.jit(do_not_specialize=CHANGING)
def _attend_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    out,
    lse,
    part_out,
    part_lse,
    alibi_slopes,
    sinks,
    num_reqs,
    num_halvings,
    short_rows,
    part_rows,
    scale,
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
    GROUP_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
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
    seq_len = tl.load(seq_lens + req)
    num_rows = query_len * GROUP_SIZE
    is_short = num_rows <= short_rows
    if is_short != SHORT or first_row >= num_rows:
        return

    # a row is one query head of one token
    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    element = tl.arange(0, HEAD_TILE)
    is_row = row < num_rows
    is_element = element < HEAD_SIZE
    question = tl.load(
        query
        + ((start + token).to(tl.int64) * query_stride_token)[:, None]
        + (head * query_stride_head)[:, None]
        + (element * query_stride_element)[None, :],
        mask=is_row[:, None] & is_element[None, :],
        other=0.0,
    )
    if WIDEN:
        question = question.to(tl.float32)
    # token j of q stands at the end of the first seq_len - q + j + 1 keys
    context = seq_len - query_len
    num_seen = tl.minimum(context + token + 1, seq_len)
    first_token = first_row // GROUP_SIZE
    last_token = tl.minimum((first_row + ROWS - 1) // GROUP_SIZE, query_len - 1)
    seen_by_any = tl.minimum(context + last_token + 1, seq_len)
    # keys before `first` nobody sees; from `low` to `high`, whole tiles, everybody sees all
    high = tl.maximum(context + first_token + 1, 0) // KEYS * KEYS
    if SLIDING_WINDOW > 0:
        first_seen = tl.maximum(context + first_token + 1 - SLIDING_WINDOW, 0)
        first = first_seen // KEYS * KEYS
        low = tl.maximum(context + last_token + 1 - SLIDING_WINDOW, 0)
        low = tl.cdiv(low, KEYS) * KEYS
    else:
        first_seen = 0
        first = 0
        low = 0
    # this program's share of the keys, cut at whole tiles
    share = tl.cdiv(tl.cdiv(seen_by_any - first, tl.num_programs(2)), KEYS) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, seen_by_any)
    low = tl.minimum(tl.maximum(low, begin), tl.maximum(end, begin))
    high = tl.maximum(tl.minimum(high, end), low)

    total = tl.zeros([ROWS, HEAD_TILE], dtype=tl.float32)
    row_sum, row_max = start_rows(None if SPLIT else sinks, head, is_row, ROWS)
    slope = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head, mask=is_row, other=0.0)
    keys = key_cache + kv_head.to(tl.int64) * key_stride_head
    values = value_cache + kv_head.to(tl.int64) * value_stride_head
    entries = block_table + req.to(tl.int64) * table_stride_req
    if SLIDING_WINDOW > 0:
        # the tiles where the window of some row begins
        total, row_sum, row_max = _attend_keys(
            total, row_sum, row_max, question, num_seen, slope, begin, low, first_seen,
            seq_len, scale, keys, values, entries, table_stride_entry,
            key_stride_block, key_stride_slot, key_stride_element,
            value_stride_block, value_stride_slot, value_stride_element,
            HEAD_SIZE, HEAD_TILE, BLOCK_SIZE, SLIDING_WINDOW, SOFT_CAP, KEYS, True, WIDEN,
        )  # fmt: skip
    # the tiles that every row sees whole
    total, row_sum, row_max = _attend_keys(
        total, row_sum, row_max, question, num_seen, slope, low, high, first_seen,
        seq_len, scale, keys, values, entries, table_stride_entry,
        key_stride_block, key_stride_slot, key_stride_element,
        value_stride_block, value_stride_slot, value_stride_element,
        HEAD_SIZE, HEAD_TILE, BLOCK_SIZE, SLIDING_WINDOW, SOFT_CAP, KEYS, False, WIDEN,
    )  # fmt: skip
    # the tiles where some row's sight ends
    total, row_sum, row_max = _attend_keys(
        total, row_sum, row_max, question, num_seen, slope, high, end, first_seen,
        seq_len, scale, keys, values, entries, table_stride_entry,
        key_stride_block, key_stride_slot, key_stride_element,
        value_stride_block, value_stride_slot, value_stride_element,
        HEAD_SIZE, HEAD_TILE, BLOCK_SIZE, SLIDING_WINDOW, SOFT_CAP, KEYS, True, WIDEN,
    )  # fmt: skip

    result, row_lse = finish_rows(total, row_sum, row_max)
    if SPLIT:
        place = part_place(req, kv_head, split, tl.num_programs(2), part_rows) + row
        tl.store(part_lse + place, row_lse, mask=is_row)
        tl.store(
            part_out + place[:, None] * HEAD_SIZE + element[None, :],
            result,
            mask=is_row[:, None] & is_element[None, :],
        )
    else:
        store_rows(
            out, lse, result, row_lse, start + token, head, element, is_row,
            out_stride_token, out_stride_head, out_stride_element,
            lse_stride_head, lse_stride_token, HEAD_SIZE,
        )  # fmt: skip


@triton.jit
def _attend_keys(
    total,
    row_sum,
    row_max,
    question,
    num_seen,
    slope,
    begin,
    end,
    first_seen,
    seq_len,
    scale,
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
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KEYS: tl.constexpr,
    EDGE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return the running sums of a tile of rows after the keys from `begin` to `end`."""
    element = tl.arange(0, HEAD_TILE)
    is_element = (element < HEAD_SIZE)[None, :]
    for first in range(begin, end, KEYS):
        # step: gather the sequence's keys and values
        position = first + tl.arange(0, KEYS)
        if EDGE:
            # what nobody sees may hold anything, and 0 * NaN is no 0
            is_key = position < seq_len
            if SLIDING_WINDOW > 0:
                is_key &= position >= first_seen
            block_id = tl.load(
                entries + (position // BLOCK_SIZE) * entry_stride, mask=is_key, other=0
            ).to(tl.int64)
            loaded = is_key[:, None] & is_element
        else:
            block_id = tl.load(entries + (position // BLOCK_SIZE) * entry_stride).to(
                tl.int64
            )
            loaded = is_element
        offset = (position % BLOCK_SIZE).to(tl.int64)
        key_place = block_id * key_stride_block + offset * key_stride_slot
        key = tl.load(
            keys + key_place[:, None] + (element * key_stride_element)[None, :],
            mask=loaded,
            other=0.0,
        )
        value_place = block_id * value_stride_block + offset * value_stride_slot
        value = tl.load(
            values + value_place[:, None] + (element * value_stride_element)[None, :],
            mask=loaded,
            other=0.0,
        )
        if WIDEN:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        # step: compare each query with every key
        scores = tl.dot(question, tl.trans(key), input_precision="ieee")
        if SOFT_CAP > 0:
            scores = SOFT_CAP * tanh(scores * scale / SOFT_CAP)
        elif slope is not None:
            scores = scores * scale
        if slope is not None:
            distance = position[None, :] - (num_seen - 1)[:, None]
            scores += slope[:, None] * distance
        in_base_2 = LOG2_E if SOFT_CAP > 0 or slope is not None else scale * LOG2_E
        scores = scores * in_base_2
        # step: hide the keys that a query does not see
        if EDGE:
            seen = position[None, :] < num_seen[:, None]
            if SLIDING_WINDOW > 0:
                seen &= position[None, :] >= (num_seen - SLIDING_WINDOW)[:, None]
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

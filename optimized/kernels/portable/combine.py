"""Combination of partial results by their log-sum-exp, and the workspace they are stored in.

Programs that share a row's keys each store a partial result: the normalized average of their keys'
values, and its log-sum-exp in base 2. An arrival counter tells which program is the last one. It
combines all of them in the order of their keys, so the result does not depend on which program was
the last.
"""

import triton
import triton.language as tl

from ..softmax import finite, normalize, start_softmax
from .epilogue import store_rows
from .load_q import QueryRows
from .options.sinks import start_with_sinks


@triton.jit
def store_partial(call, offset, result, lse, is_row, config: tl.constexpr):
    """Store a partial result, as many of its rows as the workspace has room for.

    A request has more rows than that only if the call's `max_query_len` is too small.

    Args:
        offset: of its first row in the workspace.
        result: [BLOCK_M, BLOCK_DV]; lse: [BLOCK_M] in base 2.
        is_row: [BLOCK_M].
    """
    in_tile = tl.arange(0, config.BLOCK_M)  # [BLOCK_M]
    dv = tl.arange(0, config.BLOCK_DV)
    store_partial_columns(call, offset, result, lse, is_row, in_tile, dv, config)


@triton.jit
def store_partial_columns(
    call, offset, result, lse, is_row, in_tile, dv, config: tl.constexpr
):
    """Store a partial result, computed in the register layouts of `in_tile` and `dv`.

    The other arguments are those of `store_partial`.

    Args:
        in_tile, dv: [BLOCK_M] rows of the tile, [BLOCK_DV] columns.
    """
    is_row &= in_tile < call.partial_rows
    row = offset + in_tile
    tl.store(call.tensors.partial_lse + row, lse, mask=is_row)
    tl.store(
        call.tensors.partial_out + row[:, None] * config.V_HEAD_DIM + dv[None, :],
        result,
        mask=is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :],
    )


@triton.jit
def arrive(semaphore, num_splits):
    """Count this program's arrival, and return whether it is the last of `num_splits`."""
    # all threads have stored before one of them arrives
    tl.debug_barrier()
    return tl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu") == num_splits - 1


@triton.jit
def fold_partial(acc, l_i, m_i, result, lse):
    """Return the running values of rows with one more partial result.

    The same roundings are made wherever this is compiled: each sum fuses one product, named here.

    Args:
        acc, result: [BLOCK_M, BLOCK_DV]; l_i, m_i, lse: [BLOCK_M].
    """
    m_new = tl.maximum(m_i, lse)
    shift = finite(m_new)
    alpha = tl.exp2(m_i - shift)
    weight = tl.exp2(lse - shift)
    acc = tl.fma(
        acc, tl.broadcast_to(alpha[:, None], acc.shape), result * weight[:, None]
    )
    return acc, tl.fma(l_i, alpha, weight), m_new


@triton.jit
def fold_partials(acc, l_i, m_i, results, lse, SPLITS: tl.constexpr):
    """Return the running values of rows with SPLITS more partial results.

    Args:
        acc: [ROWS, BLOCK_DV]; l_i, m_i: [ROWS].
        results, lse: tuples of SPLITS tensors: [ROWS, BLOCK_DV], [ROWS].
    """
    m_new = m_i
    for i in tl.static_range(SPLITS):
        m_new = tl.maximum(m_new, lse[i])
    shift = finite(m_new)
    alpha = tl.exp2(m_i - shift)
    acc = acc * alpha[:, None]
    l_i = l_i * alpha
    for i in tl.static_range(SPLITS):
        weight = tl.exp2(lse[i] - shift)
        acc += results[i] * weight[:, None]
        l_i += weight
    return acc, l_i, m_new


@triton.jit
def segment_offset(segment, begins_here, kv_head, num_kv_heads, partial_rows):
    """Return the offset of a partial result's first row in [segments, 2, kv_heads, partial_rows].

    A segment has two partial results at most: one of a request that began in an earlier segment
    (0), and the first one of a request that ends in a later segment (1).
    """
    partial = (segment * 2 + begins_here) * num_kv_heads + kv_head
    return partial.to(tl.int64) * partial_rows


@triton.jit
def load_partials(
    call, first, first_segment, last_segment, in_tile, is_row, kv_head, num_kv_heads,
    config: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the partial results of rows in SPLITS segments, as `fold_partials` takes them.

    Each is a tensor of its own, so that a segment takes one offset. 12 decodes over 3,000 keys, of
    10 segments each, take 26.3 us on an H200, and 32.8 if those loaded at once are one tensor.

    Args:
        first: segment of the first one. Those after the last segment get a log-sum-exp of -inf.
        in_tile, is_row: [ROWS] indices of the rows in the tile, and whether they exist.
    """
    dv = tl.arange(0, config.BLOCK_DV)
    in_partial = in_tile[:, None] * config.V_HEAD_DIM + dv[None, :]
    is_value = is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :]
    results = ()
    lse = ()
    for i in tl.static_range(SPLITS):
        segment = first + i
        is_split = segment <= last_segment
        begins_here = (segment == first_segment).to(tl.int32)
        offset = segment_offset(
            segment, begins_here, kv_head, num_kv_heads, call.partial_rows
        )
        # other programs stored these, so they are not loaded from this one's L1 cache
        lse += (  # type: ignore[assignment]
            tl.load(
                call.tensors.partial_lse + offset + in_tile,
                mask=is_row & is_split,
                other=-float("inf"),
                cache_modifier=".cg",
            ),
        )
        results += (  # type: ignore[assignment]
            tl.load(
                call.tensors.partial_out + offset * config.V_HEAD_DIM + in_partial,
                mask=is_value & is_split,
                other=0.0,
                cache_modifier=".cg",
            ),
        )
    return results, lse


@triton.jit
def fold_segments(
    call, start, query_len, first_row, in_tile, first_segment, last_segment, kv_head,
    num_kv_heads, config: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return rows of a query tile, combined from the segments they are split over.

    Args:
        start, query_len: first token of the request in the batch, and how many it has.
        first_row: the tile's first row in the request.
        in_tile: [ROWS] indices of the rows in the tile.
        ROWS, SPLITS: rows, and partial results that are loaded at once.

    Returns:
        [ROWS, BLOCK_DV]; [ROWS] log-sum-exp in base 2; their QueryRows.
    """
    row = first_row + in_tile  # [ROWS]
    num_rows = query_len * config.GROUP_SIZE
    is_row = in_tile < tl.minimum(num_rows - first_row, call.partial_rows)
    head = kv_head * config.GROUP_SIZE + row % config.GROUP_SIZE
    acc, l_i, m_i = start_softmax(ROWS, config.BLOCK_DV)
    l_i, m_i = start_with_sinks(l_i, m_i, call.option_tensors.sinks, head, is_row, True)
    for first in tl.range(first_segment, last_segment + 1, SPLITS, num_stages=1):
        results, lse = load_partials(
            call, first, first_segment, last_segment, in_tile, is_row, kv_head,
            num_kv_heads, config, SPLITS,
        )  # fmt: skip
        acc, l_i, m_i = fold_partials(acc, l_i, m_i, results, lse, SPLITS)
    result, lse = normalize(acc, l_i, m_i)
    token = row // config.GROUP_SIZE
    rows = QueryRows(query_len, first_row, num_rows, token, start + token, head, is_row)
    return result, lse, rows


@triton.jit
def combine_segments(
    call, start, query_len, first_segment, last_segment, kv_head, num_kv_heads,
    config: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a decode request's rows, combined from the segments they are split over."""
    result, lse, rows = fold_segments(
        call, start, query_len, 0, tl.arange(0, ROWS), first_segment, last_segment,
        kv_head, num_kv_heads, config, ROWS, SPLITS,
    )  # fmt: skip
    store_rows(call, result, lse, rows, config)


@triton.jit
def split_offset(tile, kv_head, num_kv_heads, split, num_splits, partial_rows):
    """Return the offset of a partial result's first row in [tiles, kv_heads, splits, rows]."""
    tile = tl.cast(tile, tl.int64) * num_kv_heads + kv_head
    return (tile * num_splits + split) * partial_rows


@triton.jit
def combine_splits(
    call, start, query_len, first_row, tile, num_splits, kv_head, num_kv_heads,
    config: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store a query tile's rows, combined from their splits in order, ROWS rows at a time."""
    dv = tl.arange(0, config.BLOCK_DV)
    num_rows = query_len * config.GROUP_SIZE
    rows_in_tile = tl.minimum(num_rows - first_row, call.partial_rows)
    for first in range(0, rows_in_tile, ROWS):
        in_tile = first + tl.arange(0, ROWS)  # [ROWS]
        row = first_row + in_tile
        is_row = in_tile < rows_in_tile
        head = kv_head * config.GROUP_SIZE + row % config.GROUP_SIZE
        acc, l_i, m_i = start_softmax(ROWS, config.BLOCK_DV)
        l_i, m_i = start_with_sinks(
            l_i, m_i, call.option_tensors.sinks, head, is_row, True
        )
        for split in range(num_splits):
            offset = in_tile + split_offset(
                tile, kv_head, num_kv_heads, split, tl.num_programs(2), call.partial_rows
            )  # fmt: skip
            # other programs stored these, so they are not loaded from this one's L1 cache
            lse = tl.load(
                call.tensors.partial_lse + offset,
                mask=is_row,
                other=-float("inf"),
                cache_modifier=".cg",
            )
            result = tl.load(
                call.tensors.partial_out
                + offset[:, None] * config.V_HEAD_DIM
                + dv[None, :],
                mask=is_row[:, None] & (dv < config.V_HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc, l_i, m_i = fold_partial(acc, l_i, m_i, result, lse)
        result, lse = normalize(acc, l_i, m_i)
        token = row // config.GROUP_SIZE
        rows = QueryRows(
            query_len, first_row, num_rows, token, start + token, head, is_row
        )
        store_rows(call, result, lse, rows, config)

"""Operands of the products of the Hopper FP8 decode kernel: loads of K and V, FP8 decoding, Q."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...fp8 import load_scale
from ...portable.formats.fp8 import fit_float16
from .config import PAGE, WARP_SIZE

DECODE_E4M3 = gl.constexpr("cvt.rn.f16x2.e4m3x2")
DECODE_E5M2 = gl.constexpr("cvt.rn.f16x2.e5m2x2")


class Words(NamedTuple):
    """Keys or values of one kv head of one request, as words of 4 numbers.

    Args:
        base: int32 pointer to the head.
        block_table: pointer to the request's row.
        block, slot: strides in words.
        entry: stride of the block table.
        begin, end: of the keys that may be loaded.
    """

    base: Any
    block_table: Any
    block: Any
    slot: Any
    entry: Any
    begin: Any
    end: Any


@gluon.constexpr_function
def k_code(instruction):
    """Return PTX that decodes a word, $4, to its four numbers in float16, $0 to $3."""
    return f"""{{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {{a, b}}, $4;
        {instruction} x, a; {instruction} y, b;
        mov.b32 {{$0, $1}}, x; mov.b32 {{$2, $3}}, y; }}"""


@gluon.constexpr_function
def v_code(instruction):
    """Return PTX that decodes the words of two keys, $8 and $9, to pairs of the same column.

    $0 and $1 are column 0 of both keys, $2 and $3 column 1, and so on.
    """
    return f"""{{ .reg .b16 a, b; .reg .b32 p, q, x, y;
        prmt.b32 p, $8, $9, 0x5140; prmt.b32 q, $8, $9, 0x7362;
        mov.b32 {{a, b}}, p; {instruction} x, a; {instruction} y, b;
        mov.b32 {{$0, $1}}, x; mov.b32 {{$2, $3}}, y;
        mov.b32 {{a, b}}, q; {instruction} x, a; {instruction} y, b;
        mov.b32 {{$4, $5}}, x; mov.b32 {{$6, $7}}, y; }}"""


@gluon.jit
def make_words(head, block_table, block, slot, entry, begin, end):
    """Return the `Words` of one head.

    Args:
        head: uint8 pointer to the head.
        block_table, entry: the request's row, and the stride of its entries.
        block, slot: strides in bytes, multiples of 16.
        begin, end: of the keys that may be loaded.
    """
    return Words(
        head.to(gl.pointer_type(gl.int32), bitcast=True),
        block_table,
        gl.multiple_of(block // 4, 4),
        gl.multiple_of(slot // 4, 4),
        entry,
        begin,
        end,
    )


@gluon.jit
def _locate_pages(words, start_n, layout: gl.constexpr, shape: gl.constexpr):
    """Return the index in the sequence of each page of a tile: [PAGES, threads].

    A page without a key that may be loaded is replaced by the nearest one that has some.
    """
    of_pages: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    page = gl.arange(0, shape[0], gl.SliceLayout(1, of_pages))
    warp = gl.arange(0, shape[2], gl.SliceLayout(0, of_pages)) // WARP_SIZE
    page = start_n // PAGE + page[:, None] + warp[None, :] * shape[0]
    last = (words.end - 1) // PAGE
    return gl.maximum(gl.minimum(page, last), words.begin // PAGE)


@gluon.jit
def load_blocks(
    words, start_n, layout: gl.constexpr, shape: gl.constexpr, config: gl.constexpr
):
    """Return the cache block of each page of the tile at `start_n`: [PAGES, threads].

    Past the last tile nothing is loaded.
    """
    page = _locate_pages(words, start_n, layout, shape)
    index = page // (config.BLOCK_SIZE // PAGE)
    if config.INDEX_64:
        index = index.to(gl.int64)
    entry = words.block_table + index * words.entry
    return gl.load(entry, mask=(page >= 0) & (start_n < words.end), other=0)


@gluon.jit
def load_words(
    words, blocks, start_n, IS_KEY: gl.constexpr, layout: gl.constexpr,
    shape: gl.constexpr, config: gl.constexpr,
):  # fmt: skip
    """Return the words of the tile at `start_n`: [PAGES, pieces, threads, words] int32.

    Keys outside those of `words` are replaced by the nearest of them, so that nothing else is
    multiplied. Their weights are 0.

    Args:
        blocks: what `load_blocks` returned for this tile.
    """
    of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, layout))
    of_words: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, layout))
    )
    lane = gl.arange(0, shape[2], gl.SliceLayout(0, of_rows)) % WARP_SIZE
    piece = gl.arange(0, shape[1], gl.SliceLayout(1, of_rows))
    word = gl.arange(0, shape[3], of_words)
    if IS_KEY:
        PARTS: gl.constexpr = shape[1] // 2
        of_lane, of_piece = lane // 4, piece // PARTS * 8
        column, step = lane % 4 * 4, piece % PARTS * 16
    else:
        of_lane, of_piece = lane % 4 * 2, piece // 2 * 8 + piece % 2
        column, step = lane // 4 * shape[3], piece * 0
    in_page = of_piece[:, None] + of_lane[None, :]  # [pieces, threads]
    page = _locate_pages(words, start_n, layout, shape)
    key = (page * PAGE)[:, None, :] + in_page[None, :, :]
    key = gl.maximum(gl.minimum(key, words.end - 1), words.begin)
    slot = key % config.BLOCK_SIZE
    if config.INDEX_64:
        blocks = blocks.to(gl.int64)
        slot = slot.to(gl.int64)
    offset = (blocks * words.block)[:, None, :] + slot * words.slot
    offset += (step[:, None] + column[None, :])[None, :, :]
    # a piece begins at a multiple of its size
    SIZE: gl.constexpr = shape[3]
    offset = gl.multiple_of(offset, [SIZE, SIZE, SIZE])
    offset = offset[:, :, :, None] + word[None, None, None, :]
    return gl.load(words.base + offset)


@gluon.jit
def k_operand(words, operand: gl.constexpr, WARPS: gl.constexpr, E5M2: gl.constexpr):
    """Return the keys of a tile as right operand of Q @ K: [WARPS, D, KEYS] float16.

    The elements of the head are numbered as in `load_q`.

    Args:
        words: [PAGES, pieces, threads, 4] int32.
        operand: register layout.
    """
    CODE: gl.constexpr = k_code(DECODE_E5M2 if E5M2 else DECODE_E4M3)
    PAGES: gl.constexpr = words.shape[0]
    PARTS: gl.constexpr = words.shape[1] // 2
    k_0, k_1, k_2, k_3 = gl.inline_asm_elementwise(
        CODE,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16,) * 4,
        is_pure=True,
        pack=1,
    )
    k = gl.join(gl.join(k_0, k_2), gl.join(k_1, k_3))
    # page, upper rows, part of 64, warp, g, t, word, upper pair, odd element
    k = k.reshape([PAGES, 2, PARTS, WARPS, 8, 4, 4, 2, 2])
    k = k.permute([3, 2, 6, 7, 5, 8, 0, 1, 4])
    k = k.reshape([WARPS, 64 * PARTS, PAGES * PAGE])
    return gl.convert_layout(k, operand, assert_trivial=True)


@gluon.jit
def v_operand(words, operand: gl.constexpr, WARPS: gl.constexpr, E5M2: gl.constexpr):
    """Return the values of a tile as right operand of P @ V: [WARPS, KEYS, DV] float16.

    Column 8 j + g of the result is column g DV / 8 + j of the values.

    Args:
        words: [PAGES, 4, threads, words] int32.
        operand: register layout.
    """
    CODE: gl.constexpr = v_code(DECODE_E5M2 if E5M2 else DECODE_E4M3)
    PAGES: gl.constexpr = words.shape[0]
    SIZE: gl.constexpr = words.shape[3]
    pairs = words.reshape([PAGES, 2, 2, words.shape[2], SIZE])
    even, odd = gl.split(pairs.permute([0, 1, 3, 4, 2]))
    v_00, v_01, v_10, v_11, v_20, v_21, v_30, v_31 = gl.inline_asm_elementwise(
        CODE,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [even, odd],
        dtype=(gl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    v_even = gl.join(gl.join(v_00, v_20), gl.join(v_10, v_30))
    v_odd = gl.join(gl.join(v_01, v_21), gl.join(v_11, v_31))
    v = gl.join(v_even, v_odd)
    # page, upper rows, warp, g, t, word, upper pair, odd column, odd key
    v = v.reshape([PAGES, 2, WARPS, 8, 4, SIZE, 2, 2, 2])
    v = v.permute([2, 0, 1, 4, 8, 5, 6, 7, 3])
    v = v.reshape([WARPS, PAGES * PAGE, 32 * SIZE])
    return gl.convert_layout(v, operand, assert_trivial=True)


@gluon.jit
def order_columns(rows, DV: gl.constexpr):
    """Return rows of the output with their columns in the order of the values: [BLOCK_M, DV]."""
    BLOCK_M: gl.constexpr = rows.shape[0]
    rows = rows.reshape([BLOCK_M, DV // 8, 8]).permute([0, 2, 1])
    return rows.reshape([BLOCK_M, DV])


@gluon.jit
def load_q(
    call, rows, kv_head, operand: gl.constexpr, WARPS: gl.constexpr, D: gl.constexpr
):
    """Return the queries of a tile, and the scale of their dot products.

    Element 64 e + 16 w + 8 u + 2 t + o of the result is element 64 e + 16 t + 4 w + 2 u + o of the
    head. portable/load_q.py has the division by a power of two.

    Args:
        rows: QueryRows, in the layout of the operand's rows.
        operand: register layout of a left operand of Q @ K.

    Returns:
        [WARPS, BLOCK_M, D] float16; [BLOCK_M].
    """
    strides = call.strides
    of_tile: gl.constexpr = gl.SliceLayout(0, operand)
    index = gl.arange(0, D, gl.SliceLayout(0, of_tile))
    d = index // 64 * 64 + index % 8 // 2 * 16 + index % 64 // 16 * 4
    d += index % 16 // 8 * 2 + index % 2
    q = gl.load(
        call.tensors.q
        + (rows.token_index.to(gl.int64) * strides.q_token)[:, None]
        + (rows.head.to(gl.int64) * strides.q_head)[:, None]
        + (d * strides.q_element)[None, :],
        mask=rows.is_row[:, None] & (d >= 0)[None, :],
        other=0.0,
    )
    q, power = fit_float16(q)
    k_scale = load_scale(
        call.option_tensors.k_scale, call.scale_strides.k, kv_head, True
    )
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, operand)))
    # the same in each warp
    q, _ = gl.broadcast(q[None, :, :], (warp * 0)[:, None, None].to(gl.float16))
    return q, power * (call.scale * k_scale)

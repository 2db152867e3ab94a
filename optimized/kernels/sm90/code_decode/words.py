"""Loads of the words of keys and values, of their scales, and the operands that they become."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .codes import k_code, v_code
from .config import PAGE, WARP_SIZE, codes_of_word, keys_layout, words_at_once


class Words(NamedTuple):
    """Keys or values of one kv head of one request, as words of 4 bytes.

    Args:
        base: int32 pointer to the head.
        block_table: pointer to the request's row.
        block, slot: strides in words.
        entry: stride of the block table.
        begin, end: of the keys that may be loaded.
        scale: pointer to the scales of the head; () if they are given.
        scale_block, scale_slot: strides of scales; () as well.
    """

    base: Any
    block_table: Any
    block: Any
    slot: Any
    entry: Any
    begin: Any
    end: Any
    scale: Any
    scale_block: Any
    scale_slot: Any


@gluon.jit
def make_words(
    head, block_table, block, slot, entry, begin, end, scale, scale_strides, kv_head,
    config: gl.constexpr, IS_KEY: gl.constexpr, MEASURED: gl.constexpr,
):  # fmt: skip
    """Return the `Words` of one head.

    Args:
        head: pointer to the first byte of the head.
        block_table, entry: the request's row, and the stride of its entries.
        block, slot: strides in bytes, multiples of `config.ALIGNMENT`, which is at least 4.
        begin, end: of the keys that may be loaded.
        scale, scale_strides: [num_blocks, block_size, kv_heads] and its SlotStrides if MEASURED.
    """
    VECTOR: gl.constexpr = config.ALIGNMENT // 4
    first, scale_block, scale_slot = (), (), ()
    if MEASURED:
        first = scale + kv_head.to(gl.int64) * scale_strides.head
        scale_block, scale_slot = scale_strides.block, scale_strides.slot
    BYTES: gl.constexpr = 4 * words_at_once(4, config.ALIGNMENT, IS_KEY)
    return Words(
        gl.multiple_of(head.to(gl.pointer_type(gl.int32), bitcast=True), [BYTES]),
        block_table,
        gl.multiple_of(block // 4, VECTOR),
        gl.multiple_of(slot // 4, VECTOR),
        entry,
        begin,
        end,
        first,
        scale_block,
        scale_slot,
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
def _locate_rows(
    words, start_n, IS_KEY: gl.constexpr, layout: gl.constexpr, shape: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Return the slot of each row of a thread: [PAGES, pieces, threads].

    Keys outside those of `words` are replaced by the nearest of them, so that nothing else is
    multiplied. Their weights are 0.
    """
    of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, layout))
    lane = gl.arange(0, shape[2], gl.SliceLayout(0, of_rows)) % WARP_SIZE
    piece = gl.arange(0, shape[1], gl.SliceLayout(1, of_rows))
    if IS_KEY:
        of_lane, of_piece = lane // 4, piece // (shape[1] // 2) * 8
    else:
        of_lane, of_piece = lane % 4 * 2, piece // 2 * 8 + piece % 2
    in_page = of_piece[:, None] + of_lane[None, :]  # [pieces, threads]
    page = _locate_pages(words, start_n, layout, shape)
    key = (page * PAGE)[:, None, :] + in_page[None, :, :]
    key = gl.maximum(gl.minimum(key, words.end - 1), words.begin)
    slot = key % config.BLOCK_SIZE
    if config.INDEX_64:
        slot = slot.to(gl.int64)
    return slot


@gluon.jit
def load_words(
    words, blocks, start_n, IS_KEY: gl.constexpr, layout: gl.constexpr,
    shape: gl.constexpr, config: gl.constexpr,
):  # fmt: skip
    """Return the words of the tile at `start_n`: [PAGES, pieces, threads, words] int32.

    Args:
        blocks: what `load_blocks` returned for this tile.
    """
    SIZE: gl.constexpr = shape[3]
    of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, layout))
    of_words: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, layout))
    )
    lane = gl.arange(0, shape[2], gl.SliceLayout(0, of_rows)) % WARP_SIZE
    piece = gl.arange(0, shape[1], gl.SliceLayout(1, of_rows))
    word = gl.arange(0, SIZE, of_words)
    LANES: gl.constexpr = 4 if IS_KEY else 8
    VEC: gl.constexpr = words_at_once(SIZE, config.ALIGNMENT, IS_KEY)
    if IS_KEY:
        of_lane, step = lane % 4, piece % (shape[1] // 2) * (4 * SIZE)
    else:
        of_lane, step = lane // 4, piece * 0
    column = of_lane * VEC
    word = word // VEC * (LANES * VEC) + word % VEC
    slot = _locate_rows(words, start_n, IS_KEY, layout, shape, config)
    if config.INDEX_64:
        blocks = blocks.to(gl.int64)
    offset = (blocks * words.block)[:, None, :] + slot * words.slot
    offset += (step[:, None] + column[None, :])[None, :, :]
    # what is loaded at once begins at a multiple of its size
    offset = gl.multiple_of(offset, [VEC, VEC, VEC])
    offset = offset[:, :, :, None] + word[None, None, None, :]
    return gl.load(words.base + offset)


@gluon.jit
def _locate_keys(words, start_n, layout: gl.constexpr, config: gl.constexpr):
    """Return the index in the sequence of each key of a tile: [WARPS, KEYS].

    Keys outside those of `words` are replaced by the nearest of them.
    """
    KEYS: gl.constexpr = config.BLOCK_N // gl.num_warps()
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, layout))
    in_warp = gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    key = start_n + warp[:, None] * KEYS + in_warp[None, :]
    return gl.maximum(gl.minimum(key, words.end - 1), words.begin)


@gluon.jit
def load_scale_blocks(words, start_n, layout: gl.constexpr, config: gl.constexpr):
    """Return the cache block of each key of the tile at `start_n`: [WARPS, KEYS].

    Past the last tile nothing is loaded.
    """
    key = _locate_keys(words, start_n, layout, config)
    index = key // config.BLOCK_SIZE
    if config.INDEX_64:
        index = index.to(gl.int64)
    entry = words.block_table + index * words.entry
    return gl.load(entry, mask=(key >= 0) & (start_n < words.end), other=0)


@gluon.jit
def load_scales(words, blocks, start_n, layout: gl.constexpr, config: gl.constexpr):
    """Return the scales of the keys or values of the tile at `start_n`: [WARPS, KEYS].

    Args:
        blocks: what `load_scale_blocks` returned for this tile.
        layout: register layout of [WARPS, KEYS].
    """
    slot = _locate_keys(words, start_n, layout, config) % config.BLOCK_SIZE
    if config.INDEX_64:
        blocks, slot = blocks.to(gl.int64), slot.to(gl.int64)
    return gl.load(words.scale + blocks * words.scale_block + slot * words.scale_slot)


@gluon.jit
def zero_points(scale, layout: gl.constexpr, shape: gl.constexpr):
    """Return the zero point of each row of values, in both halves: [PAGES, 4, threads] int32.

    Args:
        scale: [WARPS, KEYS] with the zero points in their last bits.
        layout, shape: of the words of values.
    """
    WARPS: gl.constexpr = scale.shape[0]
    PAGES: gl.constexpr = shape[0]
    of_threads: gl.constexpr = keys_layout(WARPS, 32)
    index = gl.arange(0, PAGES * 4 * 32, gl.SliceLayout(0, of_threads))
    lane, row, page = index % 32, index // 32 % 4, index // 128
    in_page = row // 2 * 8 + row % 2 + lane % 4 * 2
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, of_threads))
    key = (warp * 0)[:, None] + (page * PAGE + in_page)[None, :]
    bits = gl.gather(scale, key, 1).to(gl.int32, bitcast=True) & 15
    bits = (bits | (bits << 16)).reshape([WARPS, PAGES, 4, 32])
    bits = bits.permute([1, 2, 0, 3]).reshape([PAGES, 4, WARPS * 32])
    return gl.convert_layout(bits, gl.SliceLayout(3, layout), assert_trivial=True)


@gluon.jit
def k_operand(words, operand: gl.constexpr, WARPS: gl.constexpr, FORMAT: gl.constexpr):
    """Return the keys of a tile as left operand of K @ Q: [WARPS, KEYS, D] float16.

    The elements of the head are in the order of the queries (queries.py), and integer codes are
    levels (codes.py).

    Args:
        words: [PAGES, pieces, threads, SIZE] int32.
        operand: register layout.
    """
    CODE: gl.constexpr = k_code(FORMAT)
    PAGES: gl.constexpr = words.shape[0]
    PARTS: gl.constexpr = words.shape[1] // 2
    SIZE: gl.constexpr = words.shape[3]
    if codes_of_word(FORMAT) == 4:
        k_0, k_1, k_2, k_3 = gl.inline_asm_elementwise(
            CODE,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(gl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
        k = gl.join(gl.join(k_0, k_2), gl.join(k_1, k_3))
        # page, upper rows, part, warp, g, t, word, upper pair, odd element
        k = k.reshape([PAGES, 2, PARTS, WARPS, 8, 4, SIZE, 2, 2])
        k = k.permute([3, 0, 1, 4, 2, 6, 7, 5, 8])
        k = k.reshape([WARPS, PAGES * PAGE, PARTS * SIZE * 16])
    else:
        k_0, k_4, k_1, k_5, k_2, k_6, k_3, k_7 = gl.inline_asm_elementwise(
            CODE,
            "=h,=h,=h,=h,=h,=h,=h,=h,r",
            [words],
            dtype=(gl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
        even = gl.join(gl.join(k_0, k_2), gl.join(k_1, k_3))
        odd = gl.join(gl.join(k_4, k_6), gl.join(k_5, k_7))
        k = gl.join(even, odd)
        # page, upper rows, part, warp, g, t, word, upper step, upper pair, odd element
        k = k.reshape([PAGES, 2, PARTS, WARPS, 8, 4, SIZE, 2, 2, 2])
        k = k.permute([3, 0, 1, 4, 2, 6, 7, 8, 5, 9])
        k = k.reshape([WARPS, PAGES * PAGE, PARTS * SIZE * 32])
    return gl.convert_layout(k, operand, assert_trivial=True)


@gluon.jit
def v_operand(
    words, zeros, operand: gl.constexpr, WARPS: gl.constexpr, FORMAT: gl.constexpr
):
    """Return the values of a tile as left operand of V @ P: [WARPS, DV, KEYS] float16.

    `order_columns` says which column of the values a row is.

    Args:
        words: [PAGES, 4, threads, SIZE] int32.
        zeros: [PAGES, 4, threads] zero points in both halves; () in formats without them.
        operand: register layout.
    """
    CODE: gl.constexpr = v_code(FORMAT)
    PAGES: gl.constexpr = words.shape[0]
    THREADS: gl.constexpr = words.shape[2]
    SIZE: gl.constexpr = words.shape[3]
    pairs = words.reshape([PAGES, 2, 2, THREADS, SIZE])
    even, odd = gl.split(pairs.permute([0, 1, 3, 4, 2]))
    if codes_of_word(FORMAT) == 4:
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
        # page, upper rows, warp, g, t, word, odd column, upper pair, odd key
        v = v.reshape([PAGES, 2, WARPS, 8, 4, SIZE, 2, 2, 2])
        v = v.permute([2, 5, 6, 7, 3, 0, 1, 4, 8])
        v = v.reshape([WARPS, 32 * SIZE, PAGES * PAGE])
    else:
        zeros = zeros.reshape([PAGES, 2, 2, THREADS]).permute([0, 1, 3, 2])
        zero_even, zero_odd = gl.split(zeros)
        both = (zero_even & 0xFFFF) | (zero_odd & -0x10000)
        both = gl.convert_layout(both, gl.SliceLayout(3, even.type.layout))
        even, both = gl.broadcast(even, both[:, :, :, None])
        (
            v_00, v_01, v_10, v_11, v_20, v_21, v_30, v_31,
            v_40, v_41, v_50, v_51, v_60, v_61, v_70, v_71,
        ) = gl.inline_asm_elementwise(
            CODE,
            "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [even, odd, both],
            dtype=(gl.float16,) * 16,
            is_pure=True,
            pack=1,
        )  # fmt: skip
        even_0 = gl.join(gl.join(v_00, v_40), gl.join(v_20, v_60))
        even_1 = gl.join(gl.join(v_10, v_50), gl.join(v_30, v_70))
        odd_0 = gl.join(gl.join(v_01, v_41), gl.join(v_21, v_61))
        odd_1 = gl.join(gl.join(v_11, v_51), gl.join(v_31, v_71))
        v = gl.join(gl.join(even_0, even_1), gl.join(odd_0, odd_1))
        # page, upper rows, warp, g, t, word, 4 columns, 2 columns, odd column, odd key
        v = v.reshape([PAGES, 2, WARPS, 8, 4, SIZE, 2, 2, 2, 2])
        v = v.permute([2, 5, 6, 7, 8, 3, 0, 1, 4, 9])
        v = v.reshape([WARPS, 64 * SIZE, PAGES * PAGE])
    return gl.convert_layout(v, operand, assert_trivial=True)


@gluon.jit
def order_columns(acc, config: gl.constexpr):
    """Return what `v_operand` gave with its rows in the order of the values' columns: [DV, ROWS].

    Row 8 j + g is code j of lane g, counted over the words that it loaded.
    """
    DV: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    CODES: gl.constexpr = codes_of_word(config.CACHE_FORMAT)
    SIZE: gl.constexpr = DV // (8 * CODES)
    VEC: gl.constexpr = words_at_once(SIZE, config.ALIGNMENT, False)
    # words apart, word and code, lane
    acc = acc.reshape([SIZE // VEC, VEC * CODES, 8, ROWS])
    return acc.permute([0, 2, 1, 3]).reshape([DV, ROWS])

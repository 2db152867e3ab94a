"""How does a Hopper chip attend when many queries are new?

One program an SM draws tiles of one query head's rows until none is left, and splits its warps by
task. One warp draws the next tile, says which it is, and sends for its queries and keys; another
sends for the values; two or three groups of four warps, 64 rows each, compute. Everything that is
sent for comes through the tensor memory accelerator (TMA), straight into shared memory, one box of
rows at a time: a box never crosses a block, so a tile of 128 keys may lie in eight blocks. Tensor
cores read queries, keys and values where they lie, and the weights from registers.

A group works on two tiles of keys at a time: it starts the products for a tile's scores and for the
last tile's values together, and, with heads of 128, turns the scores into weights while the values
are still being averaged. The other groups keep the tensor cores busy meanwhile. Keys are walked
from the last to the first, so that the tiles that need a mask come first. Values past a sequence's
end may hold anything, even NaN, which a weight of 0 does not silence: the warp that sends for the
values clears them in shared memory before anyone sees them.

A request with few rows is another kernel's: it gets no tile here. Tiles are drawn from a counter,
so no program waits for another, however ragged the batch; the longest of a request are drawn first.
The result does not depend on who draws what.
Source: FlashAttention-3 (Shah et al. 2024) for the tasks of the warps and the overlap of softmax
with products; FlashAttention-4 for the exponential on plain units.
"""

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(128)  # keys of a tile
GROUP_ROWS = gl.constexpr(64)  # rows of a group of four warps
HALF = gl.constexpr(64)  # elements of a box's row: 128 bytes, the widest swizzle
CHUNK = gl.constexpr(8)  # rows after which the swizzle repeats
REQS = gl.constexpr(32)  # requests that the drawing warp looks at together
FACTS = gl.constexpr(8)  # what is said of a tile, in numbers
LANES = gl.constexpr(32)
LAST = gl.constexpr(-1)  # said instead of a number of key tiles: there is no tile left
LN_2 = gl.constexpr(math.log(2.0))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))

# what changes from call to call makes no kernel of its own
CHANGING = [
    "num_reqs",
    "num_heads",
    "group_size",
    "short_rows",
    "query_head_rows",
    "query_head_columns",
    "key_block_rows",
    "key_head_rows",
    "key_head_columns",
    "value_block_rows",
    "value_head_rows",
    "value_head_columns",
    "out_head_rows",
    "out_head_columns",
    "out_stride_token",
    "out_stride_head",
    "lse_stride_head",
    "lse_stride_token",
    "table_stride_req",
]
POINTERS = ["out", "lse", "block_table", "query_start_loc", "lengths", "counter"]


def _exponentials() -> str:
    """Return PTX for 2**x of eight numbers x <= 0: seven by the unit for it, one without.

    That unit is slow, and the softmax waits for it. So one in eight is a sum: x is rounded down
    by adding 1.5 * 2**23, which leaves the whole part in the low bits, ready to be shifted to
    where exponents are; the fraction f goes through 1 + c1 f + c2 f^2 + c3 f^3, the cubic whose
    largest relative error on [0, 1] is smallest among those that are 1 at 0: 8.6e-5, a thirtieth
    of what rounding the weight to bfloat16 costs, a sixth of float16's.
    """
    # 0.07706563, 0.22764654, 0.69511644, 1.0 and -127.0 and 1.5 * 2**23
    cubic = ("0f3D9DD496", "0f3E691C2D", "0f3F31F327", "0f3F800000")
    by_unit = [f"ex2.approx.ftz.f32 ${each}, ${each + 8};" for each in range(7)]
    by_sum = [
        "max.ftz.f32 x, $15, 0fC2FE0000;",
        "add.rm.ftz.f32 down, x, 0f4B400000;",
        "sub.rn.ftz.f32 whole, down, 0f4B400000;",
        "sub.rn.ftz.f32 x, x, whole;",
        f"fma.rn.ftz.f32 power, x, {cubic[0]}, {cubic[1]};",
        f"fma.rn.ftz.f32 power, power, x, {cubic[2]};",
        f"fma.rn.ftz.f32 power, power, x, {cubic[3]};",
        "mov.b32 exponent, down;",
        "shl.b32 exponent, exponent, 23;",
        "mov.b32 bits, power;",
        "add.s32 bits, bits, exponent;",
        "mov.b32 $7, bits;",
    ]
    registers = [".reg .f32 x, down, whole, power;", ".reg .b32 exponent, bits;"]
    return "\n".join(["{", *registers, *by_unit, *by_sum, "}"])


EXPONENTIALS = gl.constexpr(_exponentials())
EIGHT_TO_EIGHT = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))


ROUND_PAIR_TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
ROUND_PAIR_TO_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
SPLIT_PAIR = gl.constexpr("mov.b32 {$0, $1}, $2;")


# a barrier for each of three groups: 128 threads wait at it, 128 of the group before it do not
FIRST_TURN = gl.constexpr(13)  # the last three of 16; triton numbers its own from 0
TAKE_TURN = gl.constexpr("bar.sync $1, 256; mov.b32 $0, $1;")
PASS_TURN = gl.constexpr("bar.arrive $1, 256; mov.b32 $0, $1;")


class Batch(NamedTuple):
    """Where a batch's sequences lie."""

    block_table: Any
    table_stride_req: Any
    query_start_loc: Any
    lengths: Any
    num_reqs: Any
    num_heads: Any
    group_size: Any
    short_rows: Any


class Heads(NamedTuple):
    """A tensor as the kernel gets it: for TMA, and how far on the next block and head lie."""

    desc: Any
    block_rows: Any
    head_rows: Any
    head_columns: Any


class Results(NamedTuple):
    """Where finished rows and their log-sum-exp go."""

    heads: Any
    out: Any
    lse: Any
    out_stride_token: Any
    out_stride_head: Any
    lse_stride_token: Any
    lse_stride_head: Any


class Shared(NamedTuple):
    """What the warps of a program share: tiles, what is said of them, and barriers.

    Args:
        questions: [2 * groups, 64, head_size] the queries of this tile of rows and the next;
            finished rows leave from there.
        key_boxes, value_boxes: [.., box rows, 64] the stages as TMA fills them.
        facts: [2, 32 * 8] what each lane of a warp says of this tile and the next.
        question_full, question_free: of this tile's queries and of the next's.
        keys_full, values_full: of each stage; one more of the values', for a tile whose end
            must be cleared before it is shown.
        pair_free: turn i of the keys and turn i - 1 of the values are no longer read.
        told, heard: of what is said.
        never: is never arrived at.
    """

    questions: Any
    key_boxes: Any
    value_boxes: Any
    facts: Any
    question_full: Any
    question_free: Any
    keys_full: Any
    values_full: Any
    pair_free: Any
    told: Any
    heard: Any
    never: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _count_tiles(batch, first, num_rows: gl.constexpr):
    """Return how many tiles each of 32 requests has, counted from the batch's last request on."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    req = batch.num_reqs - 1 - first - gl.arange(0, REQS, lane)
    start = gl.load(batch.query_start_loc + req, mask=req >= 0, other=0)
    end = gl.load(batch.query_start_loc + req + 1, mask=req >= 0, other=0)
    query_len = (end - start).to(gl.int32)
    is_long = query_len * batch.group_size > batch.short_rows
    return (
        gl.where(is_long, (query_len + num_rows - 1) // num_rows, 0) * batch.num_heads
    )


@gluon.jit
def _find_request(batch, ticket, first, passed, num_rows):
    """Return the request that a tile belongs to, the tickets of its tiles, and where it was found.

    Tiles are numbered from the batch's last request on. The request is negative if none is left.

    Args:
        ticket: the tile's number in the batch.
        first, passed: requests that need not be looked at, and their tiles.
    """
    count = _count_tiles(batch, first, num_rows)
    total = gl.sum(count, 0)
    while (ticket >= passed + total) & (first + REQS < batch.num_reqs):
        first += REQS
        passed += total
        count = _count_tiles(batch, first, num_rows)
        total = gl.sum(count, 0)
    ends = passed + gl.associative_scan(count, 0, _add)
    behind = ends <= ticket
    req = batch.num_reqs - 1 - first - gl.sum(behind.to(gl.int32), 0)
    begin = gl.max(gl.where(behind, ends, passed), 0)
    end = gl.min(gl.where(behind, passed + total, ends), 0)
    req = gl.where(ticket < passed + total, req, -1)
    return req, begin, end, first, passed


@gluon.jit
def _count_up(counter):
    """Add one to a counter; the first of the 32 numbers returned is what it was before."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 32, layout)
    one = gl.full([32], 1, gl.int32, layout)
    return gl.atomic_add(counter + lane, one, mask=lane == 0)


@gluon.jit
def _first(numbers):
    """Return the first of 32 numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(gl.where(gl.arange(0, 32, layout) == 0, numbers, 0), 0)


@gluon.jit
def _tell(
    shared, turn, req, head, token, num_tokens, position, seq_len, key_start, num_tiles
):
    """Say what the tile of a turn is, once the one before the last has been heard by all.

    Each lane writes to a place of its own, and what lane 0 wrote is read, which also arrives for
    its warp. So what is read is in order with the arrival by itself.
    """
    layout: gl.constexpr = gl.BlockedLayout([FACTS], [LANES], [gl.num_warps()], [0])
    place = gl.arange(0, LANES * FACTS, layout) % FACTS
    facts = gl.where(place == 0, req, num_tiles)
    facts = gl.where(place == 1, head, facts)
    facts = gl.where(place == 2, token, facts)
    facts = gl.where(place == 3, num_tokens, facts)
    facts = gl.where(place == 4, position, facts)
    facts = gl.where(place == 5, seq_len, facts)
    facts = gl.where(place == 6, key_start, facts)
    mbarrier.wait(shared.heard.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    shared.facts.index(turn & 1).store(facts)
    mbarrier.arrive(shared.told.index(turn & 1), count=1)


@gluon.jit
def _hear(shared, turn, place: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(shared.facts.index(turn & 1).slice(place, 1).load(one), 0)


@gluon.jit
def _hear_tile(shared, turn):
    """Return what the drawing warp says of the tile of a turn.

    That is its request, head, first token, how many tokens the request has from there on, the
    position of the first, the sequence's length, the row of its first key without a block table,
    and how many tiles of keys are seen.
    """
    mbarrier.wait(shared.told.index(turn & 1), (turn >> 1) & 1)
    req = _hear(shared, turn, 0)
    head = _hear(shared, turn, 1)
    token = _hear(shared, turn, 2)
    num_tokens = _hear(shared, turn, 3)
    position = _hear(shared, turn, 4)
    seq_len = _hear(shared, turn, 5)
    key_start = _hear(shared, turn, 6)
    num_tiles = _hear(shared, turn, 7)
    mbarrier.arrive(shared.heard.index(turn & 1), count=1)
    return req, head, token, num_tokens, position, seq_len, key_start, num_tiles


@gluon.jit
def _measure(batch, req, BLOCK_SIZE: gl.constexpr):
    """Return a request's first token, its tokens, its keys, and the row of the first (paged: 0)."""
    is_req = req >= 0
    start = gl.load(batch.query_start_loc + req, mask=is_req, other=0).to(gl.int32)
    end = gl.load(batch.query_start_loc + req + 1, mask=is_req, other=0).to(gl.int32)
    length = gl.load(batch.lengths + req, mask=is_req, other=0).to(gl.int32)
    key_start = length * 0
    if BLOCK_SIZE == 0:
        key_start = length
        length = gl.load(batch.lengths + req + 1, mask=is_req, other=0).to(gl.int32)
        length -= key_start
    return start, end - start, length, key_start


@gluon.jit
def _box_rows(
    batch,
    req,
    tile,
    seq_len,
    begin,
    block_rows,
    BOXES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Return the rows at which the boxes of a tile of keys begin in the plane."""
    rows = ()
    # here and elsewhere a block id and a row are 32 bits wide: `takes` has seen to it
    if BLOCK_SIZE > 0:
        entries = batch.block_table + req.to(gl.int64) * batch.table_stride_req
        last_entry = (seq_len - 1) // BLOCK_SIZE
        for box in gl.static_range(BOXES):
            slot = tile * KEYS + box * (KEYS // BOXES)
            # entries past the last block are never read; what lies there is hidden
            entry = gl.minimum(slot // BLOCK_SIZE, last_entry)
            block = gl.load(entries + entry).to(gl.int32)
            row = begin + block * block_rows + slot % BLOCK_SIZE
            # the compiler knows no other way to lengthen a tuple
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        for box in gl.static_range(BOXES):
            row = begin + tile * KEYS + box * (KEYS // BOXES)
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _send_for(
    desc, boxes, stage, full, rows, column, BOXES: gl.constexpr, HALVES: gl.constexpr
):
    """Let TMA fill a stage, box by box, and arrive at `full` when it is done."""
    mbarrier.expect(full, KEYS * HALVES * HALF * 2)
    for box in gl.static_range(BOXES):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc,
                [rows[box], column + half * HALF],
                full,
                boxes.index((stage * HALVES + half) * BOXES + box),
            )


@gluon.jit
def _draw_and_load_keys(
    shared,
    batch,
    queries,
    keys,
    counter,
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Draw tiles, say which, and send for their queries and keys."""
    STAGES: gl.constexpr = shared.keys_full.shape[0]
    HALVES: gl.constexpr = HEAD_SIZE // HALF
    BOXES: gl.constexpr = KEYS // keys.desc.block_type.shape[0]
    num_rows = GROUPS * GROUP_ROWS
    ticket = gl.program_id(0)
    turn = 0
    key_turn = 0
    question_turn = 0
    first = 0
    passed = 0
    req, begin_ticket, end_ticket, first, passed = _find_request(
        batch, ticket, first, passed, num_rows
    )
    start, query_len, seq_len, key_start = _measure(batch, req, BLOCK_SIZE)
    while req >= 0:
        # the next ticket is drawn now, and looked at after this tile's keys
        drawn = _count_up(counter)
        # find the tile's rows; a request's last come first
        number = ticket - begin_ticket
        head = number % batch.num_heads
        tiles_left = number // batch.num_heads
        first_row = ((query_len + num_rows - 1) // num_rows - 1 - tiles_left) * num_rows
        position = seq_len - query_len + first_row
        # count the tiles of keys that its rows see
        end = seq_len
        if CAUSAL:
            end = gl.minimum(gl.maximum(position + num_rows, 0), seq_len)
        num_tiles = (end + KEYS - 1) // KEYS
        _tell(
            shared, turn, req, head, start + first_row, query_len - first_row,
            position, seq_len, key_start, num_tiles,
        )  # fmt: skip
        turn += 1
        if num_tiles > 0:
            # send for the queries
            place = question_turn & 1
            mbarrier.wait(
                shared.question_free.index(place), ((question_turn >> 1) & 1) ^ 1
            )
            full = shared.question_full.index(place)
            begin = start + first_row + head * queries.head_rows
            mbarrier.expect(full, GROUPS * GROUP_ROWS * HEAD_SIZE * 2)
            for group in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    queries.desc,
                    [
                        begin + group * GROUP_ROWS,
                        head * queries.head_columns,
                    ],
                    full,
                    shared.questions.index(place * GROUPS + group),
                )
            question_turn += 1
            # send for the keys, from the last tile to the first
            kv_head = head // batch.group_size
            column = kv_head * keys.head_columns
            begin = key_start + kv_head * keys.head_rows
            rows = _box_rows(
                batch, req, num_tiles - 1, seq_len, begin, keys.block_rows,
                BOXES, BLOCK_SIZE,
            )  # fmt: skip
            for i in range(num_tiles):
                # the next tile's block ids travel while this one waits for its stage
                next_tile = gl.maximum(num_tiles - 2 - i, 0)
                next_rows = _box_rows(
                    batch, req, next_tile, seq_len, begin, keys.block_rows,
                    BOXES, BLOCK_SIZE,
                )  # fmt: skip
                stage = key_turn % STAGES
                mbarrier.wait(
                    shared.pair_free.index(stage), ((key_turn // STAGES) & 1) ^ 1
                )
                _send_for(
                    keys.desc,
                    shared.key_boxes,
                    stage,
                    shared.keys_full.index(stage),
                    rows,
                    column,
                    BOXES,
                    HALVES,
                )
                key_turn += 1
                rows = next_rows
        # draw the next tile
        ticket = gl.num_programs(0) + _first(drawn)
        if ticket >= end_ticket:
            req, begin_ticket, end_ticket, first, passed = _find_request(
                batch, ticket, first, passed, num_rows
            )
            start, query_len, seq_len, key_start = _measure(batch, req, BLOCK_SIZE)
    # say that there is none
    _tell(shared, turn, 0, 0, 0, 0, 0, 0, 0, LAST)
    # the last program to draw none leaves the counter as it was
    if _first(_count_up(counter + 1)) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _clear_end(boxes, stage, valid, HALVES: gl.constexpr):
    """Set the rows of a stage to zero from row `valid` on.

    Two elements are handled as one word, in pieces of eight rows, after which the swizzle repeats.
    """
    CHUNKS: gl.constexpr = KEYS // CHUNK
    ROWS: gl.constexpr = boxes.shape[0] * boxes.shape[1]
    WORDS: gl.constexpr = HALF // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = boxes._reinterpret(gl.int32, [ROWS // CHUNK, CHUNK, WORDS], SWIZZLED_WORDS)
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    for chunk in range(valid // CHUNK, CHUNKS):
        is_own = chunk * CHUNK + row < valid
        for half in gl.static_range(HALVES):
            piece = chunks.index((stage * HALVES + half) * CHUNKS + chunk)
            piece.store(gl.where(is_own[:, None], piece.load(layout), 0))


@gluon.jit
def _load_values(
    shared,
    batch,
    values,
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Send for the values of the tiles that are drawn, and clear what lies past a sequence.

    Nobody races for the cleared rows. A stage is free when this warp sends for it: the groups have
    arrived at `pair_free`. TMA reports the stage to this warp alone, which waits for it, writes
    zeros, fences them off for the tensor cores, and only then arrives at the barrier that the
    groups wait for. TMA fills the stage again after the groups have read it, so after the fence.
    """
    STAGES: gl.constexpr = shared.keys_full.shape[0]
    HALVES: gl.constexpr = HEAD_SIZE // HALF
    BOXES: gl.constexpr = KEYS // values.desc.block_type.shape[0]
    turn = 0
    value_turn = 0
    clear_turn = 0
    req, head, _, _, _, seq_len, key_start, num_tiles = _hear_tile(shared, turn)
    while num_tiles != LAST:
        if num_tiles > 0:
            kv_head = head // batch.group_size
            column = kv_head * values.head_columns
            begin = key_start + kv_head * values.head_rows
            valid = seq_len - (num_tiles - 1) * KEYS
            rows = _box_rows(
                batch, req, num_tiles - 1, seq_len, begin, values.block_rows,
                BOXES, BLOCK_SIZE,
            )  # fmt: skip
            for i in range(num_tiles):
                next_tile = gl.maximum(num_tiles - 2 - i, 0)
                next_rows = _box_rows(
                    batch, req, next_tile, seq_len, begin, values.block_rows,
                    BOXES, BLOCK_SIZE,
                )  # fmt: skip
                stage = value_turn % STAGES
                # freed together with the keys of the turn after
                pair = value_turn + 1
                mbarrier.wait(
                    shared.pair_free.index(pair % STAGES), ((pair // STAGES) & 1) ^ 1
                )
                # only the last tile of keys, which comes first, can hold the sequence's end
                is_end = (i == 0) & (valid < KEYS)
                _send_for(
                    values.desc,
                    shared.value_boxes,
                    stage,
                    shared.values_full.index(gl.where(is_end, STAGES, stage)),
                    rows,
                    column,
                    BOXES,
                    HALVES,
                )
                if is_end:
                    # clear what lies past the end, before anyone sees it
                    mbarrier.wait(shared.values_full.index(STAGES), clear_turn & 1)
                    clear_turn += 1
                    _clear_end(shared.value_boxes, stage, valid, HALVES)
                    # tensor cores read by another way than these writes went
                    fence_async_shared()
                    mbarrier.arrive(shared.values_full.index(stage), count=1)
                value_turn += 1
                rows = next_rows
        turn += 1
        req, head, _, _, _, seq_len, key_start, num_tiles = _hear_tile(shared, turn)


@gluon.jit
def _over_keys(scores, TAKE_MAX: gl.constexpr):
    """Return [64, 4]: each thread's own share of a row's maximum or sum.

    A row of scores lies in four threads, two neighbours every eight columns. What no thread needs
    of another is taken first, as a tree.
    """
    scores = gl.reshape(scores, [GROUP_ROWS, 4, KEYS // 32, 4, 2])
    if TAKE_MAX:
        return gl.max(gl.max(gl.max(scores, 4), 2), 1)
    return gl.sum(gl.sum(gl.sum(scores, 4), 2), 1)


@gluon.jit
def _turn_into_weights(
    scores,
    row_max,
    row_sum,
    scale_log2,
    tile,
    position,
    seq_len,
    CAUSAL: gl.constexpr,
    FIRST: gl.constexpr,
    EDGE: gl.constexpr,
    BLEND: gl.constexpr,
    OF_SCORES: gl.constexpr,
):
    """Return the weights, how far older ones fade, and the rows' maxima and sums.

    Args:
        scores: [64, 128] before the scale.
        row_max: [64] before the scale.
        row_sum: [64, 4] each thread's share.
        tile: number of the tile of keys.
        position: of the group's first row.
        FIRST: whether these are the rows' first scores.
        EDGE: whether keys are hidden from some rows.
        BLEND: whether one exponential in eight is computed on plain units.
    """
    of_rows: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    # hide the keys that a query does not see
    if EDGE:
        key = gl.arange(0, KEYS, gl.SliceLayout(0, OF_SCORES))
        end = gl.full([GROUP_ROWS], seq_len, gl.int32, of_rows)
        if CAUSAL:
            row = position + gl.arange(0, GROUP_ROWS, of_rows)
            end = gl.minimum(row + 1, seq_len)
        # numbers of keys within the tile are constants
        end -= tile * KEYS
        scores = gl.where(key[None, :] < end[:, None], scores, -float("inf"))
    # turn scores into weights
    new_max = gl.max(_over_keys(scores, True), 1)
    new_max = gl.convert_layout(new_max, of_rows, assert_trivial=True)
    new_max = gl.maximum(row_max, new_max)
    # a row that has seen no key yet has the maximum -inf, and -inf - -inf is no number
    shift = gl.where(new_max == -float("inf"), 0.0, new_max) if EDGE else new_max
    fade = gl.exp2((row_max - shift) * scale_log2)
    scores = scores * scale_log2 - (shift * scale_log2)[:, None]
    if BLEND:
        weights = gl.inline_asm_elementwise(
            EXPONENTIALS,
            EIGHT_TO_EIGHT,
            [scores],
            dtype=gl.float32,
            is_pure=True,
            pack=8,
        )
    else:
        weights = gl.exp2(scores)
    new_sum = _over_keys(weights, False)
    if not FIRST:
        of_sums: gl.constexpr = gl.SliceLayout(1, new_sum.type.layout)
        faded = gl.convert_layout(fade, of_sums, assert_trivial=True)
        new_sum = row_sum * gl.expand_dims(faded, 1) + new_sum
    return weights, fade, new_max, new_sum


@gluon.jit
def _fade(total, fade, OF_TOTAL: gl.constexpr):
    return total * gl.convert_layout(fade, gl.SliceLayout(1, OF_TOTAL))[:, None]


@gluon.jit
def _round_pairs(weights, dtype: gl.constexpr):
    """Return [64, 64] words of two neighbouring weights each, rounded to `dtype`.

    A loop that carries 16-bit numbers takes every word apart and puts it together again.
    """
    left, right = gl.split(gl.reshape(weights, [GROUP_ROWS, KEYS // 2, 2]))
    return gl.inline_asm_elementwise(
        ROUND_PAIR_TO_BF16 if dtype == gl.bfloat16 else ROUND_PAIR_TO_FP16,
        "=r,f,f",
        [left, right],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _split_pairs(words, dtype: gl.constexpr, OF_WEIGHTS: gl.constexpr):
    """Return the [64, 128] weights of `_round_pairs`."""
    left, right = gl.inline_asm_elementwise(
        SPLIT_PAIR,
        "=h,=h,r",
        [words],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    weights = gl.reshape(gl.join(left, right), [GROUP_ROWS, KEYS])
    return gl.convert_layout(weights.to(dtype, bitcast=True), OF_WEIGHTS)


@gluon.jit
def _in_turn(CODE: gl.constexpr, GROUP: gl.constexpr):
    """Wait for a group's turn at the tensor cores, or give it the turn.

    Every group takes as many turns as the others: a tile's groups see equally many tiles of keys.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # one number in each thread, so the code runs once there
    gl.inline_asm_elementwise(
        CODE,
        "=r,r",
        [gl.full([32 * gl.num_warps()], FIRST_TURN + GROUP, gl.int32, layout)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _next_tile(
    shared,
    question,
    keys,
    values,
    total,
    weights,
    fade,
    row_max,
    row_sum,
    key_turn,
    scale_log2,
    tile,
    position,
    seq_len,
    CAUSAL: gl.constexpr,
    EDGE: gl.constexpr,
    NARROW: gl.constexpr,
    OF_SCORES: gl.constexpr,
    OF_TOTAL: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Multiply this tile's scores and average by the last tile's weights, both at once.

    A narrow head's weights arrive rounded, its total faded; a wide head has the registers to do
    both here, once the tensor cores are busy.

    A narrow head's groups take turns: each starts once the group before it has its scores. Left
    alone they start together, and then all want tensor cores and after that all exponentials.
    Turns and a third stage save 3.6 % of the time of one prompt of 8,192 tokens, and 8 % of that of
    32 x 1,500 tokens which all see each other. The two groups of a wide head lose 6 % by it.
    """
    OF_WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OF_TOTAL, k_width=2)
    dtype: gl.constexpr = question.dtype
    STAGES: gl.constexpr = shared.keys_full.shape[0]
    value_turn = key_turn - 1
    key_stage = key_turn % STAGES
    value_stage = value_turn % STAGES
    # start on the scores
    mbarrier.wait(shared.keys_full.index(key_stage), (key_turn // STAGES) & 1)
    if NARROW:
        _in_turn(TAKE_TURN, GROUP)
    scores = warpgroup_mma(
        question,
        keys.index(key_stage).permute((1, 0)),
        gl.zeros([GROUP_ROWS, KEYS], gl.float32, OF_SCORES),
        use_acc=False,
        is_async=True,
    )
    # start on the last tile's values
    mbarrier.wait(shared.values_full.index(value_stage), (value_turn // STAGES) & 1)
    if not NARROW:
        total = _fade(total, fade, OF_TOTAL)
        rounded = gl.convert_layout(weights.to(dtype), OF_WEIGHTS)
    else:
        rounded = _split_pairs(weights, dtype, OF_WEIGHTS)
    total = warpgroup_mma(rounded, values.index(value_stage), total, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if NARROW:
        _in_turn(PASS_TURN, (GROUP + 1) % GROUPS)
    weights, fade, row_max, row_sum = _turn_into_weights(
        scores, row_max, row_sum, scale_log2, tile, position, seq_len,
        CAUSAL, False, EDGE, not EDGE and not NARROW, OF_SCORES,
    )  # fmt: skip
    if not NARROW:
        # a wait that is over at once, but begins a block of code: without it the assembler moves
        # the wait for the products before the softmax, and nothing overlaps; a narrow head, whose
        # groups overlap with each other, loses 6 % by it
        mbarrier.wait(shared.never, 1)
    total, rounded = warpgroup_mma_wait(0, deps=[total, rounded])
    mbarrier.arrive(shared.pair_free.index(key_stage), count=1)
    if NARROW:
        total = _fade(total, fade, OF_TOTAL)
        weights = _round_pairs(weights, dtype)
    return total, weights, fade, row_max, row_sum, key_turn + 1


@gluon.jit
def _attend(
    shared,
    results,
    scale_log2,
    HEAD_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute one group's rows of the tiles that are drawn."""
    NARROW: gl.constexpr = HEAD_SIZE == 64
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OF_TOTAL: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, HEAD_SIZE, 16]
    )
    OF_WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OF_TOTAL, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, OF_TOTAL)
    STAGES: gl.constexpr = shared.keys_full.shape[0]
    dtype: gl.constexpr = shared.questions.dtype
    keys = shared.key_boxes._reinterpret(dtype, [STAGES, KEYS, HEAD_SIZE], SWIZZLED)
    values = shared.value_boxes._reinterpret(dtype, [STAGES, KEYS, HEAD_SIZE], SWIZZLED)
    element = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, OF_TOTAL))
    row = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, of_rows)
    if NARROW and GROUP == GROUPS - 1:
        # the first group begins
        _in_turn(PASS_TURN, 0)
    turn = 0
    key_turn = 0
    question_turn = 0
    _, head, token, num_tokens, position, seq_len, _, num_tiles = _hear_tile(
        shared, turn
    )
    while num_tiles != LAST:
        total = gl.zeros([GROUP_ROWS, HEAD_SIZE], gl.float32, OF_TOTAL)
        row_lse = gl.full([GROUP_ROWS], -float("inf"), gl.float32, of_rows)
        question = shared.questions.index((question_turn & 1) * GROUPS + GROUP)
        if num_tiles > 0:
            own_position = position + GROUP * GROUP_ROWS
            # tiles before this one hide no key from any row
            num_whole = seq_len // KEYS
            if CAUSAL:
                num_whole = gl.maximum(position + 1, 0) // KEYS
            num_whole = gl.minimum(num_whole, num_tiles - 1)
            # multiply the first scores
            mbarrier.wait(
                shared.question_full.index(question_turn & 1), (question_turn >> 1) & 1
            )
            key_stage = key_turn % STAGES
            mbarrier.wait(shared.keys_full.index(key_stage), (key_turn // STAGES) & 1)
            scores = warpgroup_mma(
                question,
                keys.index(key_stage).permute((1, 0)),
                gl.zeros([GROUP_ROWS, KEYS], gl.float32, OF_SCORES),
                use_acc=False,
                is_async=True,
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(shared.pair_free.index(key_stage), count=1)
            key_turn += 1
            if question_turn > 0:
                # the last tile's rows have left, so its place is free for the next queries
                tma.store_wait(0)
                mbarrier.arrive(
                    shared.question_free.index((question_turn - 1) & 1), count=1
                )
            row_max = gl.full(
                [GROUP_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, OF_SCORES)
            )
            weights, fade, row_max, row_sum = _turn_into_weights(
                scores, row_max, 0, scale_log2, num_tiles - 1, own_position, seq_len,
                CAUSAL, True, True, False, OF_SCORES,
            )  # fmt: skip
            if NARROW:
                weights = _round_pairs(weights, dtype)
            # go on from tile to tile, first where keys are hidden, then where none are
            for i in range(num_tiles - 1 - num_whole):
                total, weights, fade, row_max, row_sum, key_turn = _next_tile(
                    shared, question, keys, values,
                    total, weights, fade, row_max, row_sum, key_turn,
                    scale_log2, num_tiles - 2 - i, own_position, seq_len,
                    CAUSAL, True, NARROW, OF_SCORES, OF_TOTAL, GROUPS, GROUP,
                )  # fmt: skip
            for i in range(num_whole):
                total, weights, fade, row_max, row_sum, key_turn = _next_tile(
                    shared, question, keys, values,
                    total, weights, fade, row_max, row_sum, key_turn,
                    scale_log2, num_whole - 1 - i, own_position, seq_len,
                    CAUSAL, False, NARROW, OF_SCORES, OF_TOTAL, GROUPS, GROUP,
                )  # fmt: skip
            # average the last values; they are freed with the next keys
            if not NARROW:
                total = _fade(total, fade, OF_TOTAL)
                rounded = gl.convert_layout(weights.to(dtype), OF_WEIGHTS)
            else:
                rounded = _split_pairs(weights, dtype, OF_WEIGHTS)
            value_turn = key_turn - 1
            value_stage = value_turn % STAGES
            mbarrier.wait(
                shared.values_full.index(value_stage), (value_turn // STAGES) & 1
            )
            total = warpgroup_mma(
                rounded, values.index(value_stage), total, is_async=True
            )
            total, rounded = warpgroup_mma_wait(0, deps=[total, rounded])
            # finish the rows; one that saw nothing has the sum 0
            divisor = gl.convert_layout(gl.sum(row_sum, 1), of_rows)
            divisor = gl.where(divisor > 0, divisor, 1.0)
            total = total * (1.0 / divisor)[:, None]
            row_lse = gl.convert_layout(row_max, of_rows) * scale_log2
            row_lse = (row_lse + gl.log2(divisor)) * LN_2
            question_turn += 1
        # store them
        is_row = row < num_tokens
        if (num_tiles > 0) & (num_tokens >= (GROUP + 1) * GROUP_ROWS):
            question.store(total.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                results.heads.desc,
                [
                    token + GROUP * GROUP_ROWS + head * results.heads.head_rows,
                    head * results.heads.head_columns,
                ],
                question,
            )
        else:
            place = (token + row).to(gl.int64) * results.out_stride_token
            place += head.to(gl.int64) * results.out_stride_head
            gl.store(
                results.out + place[:, None] + element[None, :],
                total.to(dtype),
                mask=is_row[:, None] & (element >= 0)[None, :],
            )
        if results.lse is not None:
            place = (token + row).to(gl.int64) * results.lse_stride_token
            place += head.to(gl.int64) * results.lse_stride_head
            gl.store(results.lse + place, row_lse, mask=is_row)
        turn += 1
        _, head, token, num_tokens, position, seq_len, _, num_tiles = _hear_tile(
            shared, turn
        )
    if NARROW and GROUP == 0:
        # leave no turn behind that nobody took
        _in_turn(TAKE_TURN, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=POINTERS)
def attend_tiles(
    query_desc,
    key_desc,
    value_desc,
    out_desc,
    out,
    lse,
    block_table,
    query_start_loc,
    lengths,
    counter,
    scale_log2,
    num_reqs,
    num_heads,
    group_size,
    short_rows,
    query_head_rows,
    query_head_columns,
    key_block_rows,
    key_head_rows,
    key_head_columns,
    value_block_rows,
    value_head_rows,
    value_head_columns,
    out_head_rows,
    out_head_columns,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    table_stride_req,
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Split a program's warps by task; what each does stands in the function it runs."""
    GROUPS: gl.constexpr = 3 if HEAD_SIZE == 64 else 2
    # tiles of keys, and of values, in flight; groups that take turns hold them longer
    STAGES: gl.constexpr = 3 if HEAD_SIZE == 64 else 2
    KEY_BOX: gl.constexpr = key_desc.block_type.shape[0]
    dtype: gl.constexpr = key_desc.dtype
    boxes: gl.constexpr = STAGES * (KEYS // KEY_BOX) * (HEAD_SIZE // HALF)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(dtype, [2 * GROUPS, GROUP_ROWS, HEAD_SIZE], SWIZZLED),
        gl.allocate_shared_memory(dtype, [boxes, KEY_BOX, HALF], SWIZZLED),
        gl.allocate_shared_memory(dtype, [boxes, KEY_BOX, HALF], SWIZZLED),
        gl.allocate_shared_memory(gl.int32, [2, LANES * FACTS], LINE),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
    )
    for i in gl.static_range(2):
        mbarrier.init(shared.question_full.index(i), count=1)
        mbarrier.init(shared.question_free.index(i), count=GROUPS)
        mbarrier.init(shared.told.index(i), count=1)
        # the groups, and the warp that sends for the values
        mbarrier.init(shared.heard.index(i), count=GROUPS + 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.keys_full.index(i), count=1)
        mbarrier.init(shared.pair_free.index(i), count=GROUPS)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(shared.values_full.index(i), count=1)
    mbarrier.init(shared.never, count=1)
    fence_async_shared()
    batch = Batch(
        block_table,
        table_stride_req,
        query_start_loc,
        lengths,
        num_reqs,
        num_heads,
        group_size,
        short_rows,
    )
    queries = Heads(query_desc, 0, query_head_rows, query_head_columns)
    keys = Heads(key_desc, key_block_rows, key_head_rows, key_head_columns)
    values = Heads(value_desc, value_block_rows, value_head_rows, value_head_columns)
    results = Results(
        Heads(out_desc, 0, out_head_rows, out_head_columns),
        out,
        lse,
        out_stride_token,
        out_stride_head,
        lse_stride_token,
        lse_stride_head,
    )
    # registers are dealt out anew: the groups need most, the two other warps next to none
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (shared, results, scale_log2, HEAD_SIZE, CAUSAL, 2, 0)),
                (_attend, (shared, results, scale_log2, HEAD_SIZE, CAUSAL, 2, 1)),
                (
                    _draw_and_load_keys,
                    (
                        shared,
                        batch,
                        queries,
                        keys,
                        counter,
                        HEAD_SIZE,
                        BLOCK_SIZE,
                        CAUSAL,
                        2,
                    ),
                ),
                (_load_values, (shared, batch, values, HEAD_SIZE, BLOCK_SIZE)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (shared, results, scale_log2, HEAD_SIZE, CAUSAL, 3, 0)),
                (_attend, (shared, results, scale_log2, HEAD_SIZE, CAUSAL, 3, 1)),
                (_attend, (shared, results, scale_log2, HEAD_SIZE, CAUSAL, 3, 2)),
                (
                    _draw_and_load_keys,
                    (
                        shared,
                        batch,
                        queries,
                        keys,
                        counter,
                        HEAD_SIZE,
                        BLOCK_SIZE,
                        CAUSAL,
                        3,
                    ),
                ),
                (_load_values, (shared, batch, values, HEAD_SIZE, BLOCK_SIZE)),
            ],
            [4, 4, 1, 1],
            [160, 160, 24, 24],
        )

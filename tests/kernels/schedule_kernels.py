"""Gluon kernels that keep what the schedulers of the Hopper kernels find, in the interpreter."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from pagetwin.gluon_interpreter import interpret_gluon
from pagetwin.gluon_interpreter.values import lift
from pagetwin.optimized.kernels.sm90.append.segments import (
    find_segment,
    produce_segment,
)
from pagetwin.optimized.kernels.sm90.cascade.scheduler import (
    count_items,
    locate_item,
)
from pagetwin.optimized.kernels.sm90.common.config import Sm90Config
from pagetwin.optimized.kernels.sm90.common.scheduler import (
    BatchArgs,
    ItemRange,
    RequestBounds,
    locate_work,
)
from pagetwin.optimized.kernels.sm90.common.tile_range import (
    OwnTiles,
    find_tiles,
    first_kv_tile,
    first_visible_key,
)
from pagetwin.optimized.kernels.sm90.common.traits import count_tokens
from pagetwin.optimized.kernels.sm90.common.work_item import WorkItem
from pagetwin.optimized.kernels.sm90.invariant.scheduler import find_split, locate_split
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SIZE = gl.constexpr(1024)
"""Work items whose tiles are found at once, and positions."""
MAX_TILES = gl.constexpr(12)
"""KV tiles of a sequence, at most, where rows are split."""


class FoundItem(NamedTuple):
    """What the schedulers find of a work item.

    Args:
        query_len, kv_len, num_splits: of its request.
        work: the `WorkItem`.
        first_tile: index of its first KV tile.
        tiles: `OwnTiles` of each warpgroup.
        splits: `OwnTiles` in the split of each KV tile of a sequence, by warpgroup; empty if rows
            are not split.
    """

    query_len: int
    kv_len: int
    num_splits: int
    work: WorkItem
    first_tile: int
    tiles: list[OwnTiles]
    splits: list[list[OwnTiles]]


@gluon.jit
def items_kernel(
    query_len, kv_len, num_splits, keep: gl.constexpr, config: gl.constexpr
):
    """Keep the work item of each program."""
    item = gl.program_id(0)
    request = RequestBounds(0, query_len, kv_len, 0)
    batch = BatchArgs(None, 0, None, None, 1, num_splits, 1, 0, num_splits)
    items = ItemRange(0, 0, 0, 0, 0)
    tile_tokens = config.CONSUMERS * count_tokens(config)
    if config.SPLIT_TILES == 0:
        keep(item, locate_work(batch, item, items, request, config, tile_tokens))
    else:
        keep(item, locate_split(batch, item, items, request, config, tile_tokens))


@gluon.jit
def tiles_kernel(works, keep: gl.constexpr, config: gl.constexpr):
    """Keep the tiles of all work items, and the first key that each position attends to."""
    index = gl.arange(0, SIZE, LAYOUT)
    work = WorkItem(
        table_row=0,
        head=0,
        query_start=0,
        split=gl.load(works + 3 * SIZE + index),
        position=gl.load(works + 4 * SIZE + index),
        seq_len=gl.load(works + 5 * SIZE + index),
        kv_start=0,
        num_kv_tiles=gl.load(works + 7 * SIZE + index),
    )
    keep(first_visible_key(index, config))
    keep(first_kv_tile(work, config))
    for consumer in gl.static_range(config.CONSUMERS):
        position = work.position + consumer * count_tokens(config)
        own = find_tiles(work, position, config)
        keep(*own)
        if config.SPLIT_TILES > 0:
            for last in gl.static_range(MAX_TILES):
                keep(*find_split(own, last, config))


def find_items(
    config: Sm90Config, shapes: Sequence[tuple[int, int]], splits: Sequence[int] = (1,)
) -> tuple[list[FoundItem], list[int]]:
    """Return the work items of some requests, and the first key that each position attends to.

    Args:
        shapes: new tokens and keys of the requests.
        splits: numbers of splits, of which each request has one after another.
    """
    tokens = config.CONSUMERS * count_tokens.fn(config)
    found: list[tuple[tuple[int, int, int], WorkItem]] = []
    kept: list[list[tuple[int, ...]]] = []

    def keep(*tiles: Any) -> None:
        numbers = (lift(tile).tensor.expand(SIZE.value).tolist() for tile in tiles)
        kept.append(list(zip(*numbers, strict=True)))

    with interpret_gluon():
        for (query_len, kv_len), count in itertools.product(shapes, splits):
            works: dict[int, WorkItem] = {}
            items_kernel[(-(-query_len // tokens) * count,)](
                query_len, kv_len, count,
                lambda item, work, works=works: works.update(
                    {int(item): WorkItem(*map(int, work))}
                ),
                config,
            )  # fmt: skip
            case = query_len, kv_len, count
            found += [(case, works[item]) for item in sorted(works)]
        given = torch.zeros(len(WorkItem._fields), SIZE.value, dtype=torch.int32)
        given[:, : len(found)] = torch.tensor([work for _, work in found]).T
        tiles_kernel[(1,)](given, keep, config)
    begins, firsts, *tiles = kept
    step = 1 + MAX_TILES.value if config.SPLIT_TILES else 1
    items = []
    for row, (case, work) in enumerate(found):
        own = [OwnTiles(*group[row]) for group in tiles]
        parts = [own[i + 1 : i + step] for i in range(0, len(own), step)]
        items.append(FoundItem(*case, work, firsts[row][0], own[::step], parts))
    return items, [begin for (begin,) in begins]


class PrefixSizes(NamedTuple):
    """What the work items over a shared prefix depend on; see `PrefixArguments`."""

    num_tokens: Any
    prefix_len: Any
    split_len: Any
    num_heads: Any


@gluon.jit
def prefix_kernel(prefix, keep: gl.constexpr, config: gl.constexpr):
    """Keep all work items over a shared prefix."""
    tile_tokens = config.CONSUMERS * count_tokens(config)
    for item in range(count_items(prefix, tile_tokens)):
        keep(locate_item(prefix, item, config, tile_tokens))


class SegmentItem(NamedTuple):
    """A work item, and the segment whose program has it."""

    segment: int
    work: WorkItem


class SegmentLoads(NamedTuple):
    """What the producer of a segment is given."""

    batch: Any
    segment: Any


@gluon.jit
def segments_kernel(query_start_loc, kv_lens, num_reqs, config: gl.constexpr):
    """Produce the work items of one segment per program."""
    batch = BatchArgs(None, 0, query_start_loc, kv_lens, num_reqs, 1, 1, 0)
    index = gl.program_id(1)
    tile_tokens = config.CONSUMERS * count_tokens(config)
    segment = find_segment(batch, index, gl.num_programs(1), config, tile_tokens)
    produce_segment(None, SegmentLoads(batch, index), segment, config)


def run_segments(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_segments: int,
    config: Sm90Config,
) -> list[SegmentItem]:
    """Return all work items of a KV head, segment by segment."""
    found: list[SegmentItem] = []

    def load_item(shared: Any, loads: Any, states: Any, work: Any, config: Any) -> Any:
        found.append(SegmentItem(int(loads.segment), WorkItem(*map(int, work))))
        return states

    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    names = {
        "load_item": load_item,
        "start_loads": lambda config: SimpleNamespace(work=None),
        "publish_end": lambda *_: None,
    }
    with interpret_gluon(names=names):
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        segments_kernel[(1, num_segments)](starts, lens, len(lens), config)
    return sorted(found, key=lambda item: item.segment)

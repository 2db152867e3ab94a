"""KV tiles of the Hopper prefill kernel: the tiles and masks of every warpgroup, interpreted."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from kernel_faults import changed_kernels
from pagetwin.optimized.kernels.sm90.common.config import Sm90Config, choose_consumers
from pagetwin.optimized.kernels.sm90.common.traits import (
    MASK_BEGIN,
    MASK_END,
    choose_masks,
    count_tokens,
    has_lower_bound,
)
from schedule_kernels import FoundItem, find_items


def check_tiles(config: Sm90Config, found: FoundItem) -> None:
    """Assert that every warpgroup computes the KV tiles of its rows, with the masks they need."""
    tokens, block_n = count_tokens.fn(config), config.BLOCK_N
    work, kv_len = found.work, found.kv_len
    masks = choose_masks.fn(config)
    keys = np.arange(-(-kv_len // block_n) * block_n)
    end_tile = found.first_tile + work.num_kv_tiles
    for consumer, own in enumerate(found.tiles):
        position = work.position + consumer * tokens
        # the same tiles pass through the pipeline for every warpgroup
        assert own.after >= 0 and own.before >= 0
        assert own.last + 1 + own.after == end_tile
        assert own.first - own.before == found.first_tile
        assert own.first <= own.full_begin <= own.full_end <= own.last

        rows = np.arange(max(position, 0), min(position + tokens, kv_len))[:, None]
        ends = np.minimum(end_keys(config, rows), kv_len)
        is_after, is_before = keys >= ends, keys < first_keys(config, rows)
        visible, after, before = (
            in_tile.any(0).reshape(-1, block_n).any(1)
            for in_tile in (~is_after & ~is_before, is_after, is_before)
        )
        if not visible.any():
            continue
        tiles = np.flatnonzero(visible)
        assert own.first <= tiles[0] and tiles[-1] <= own.last
        if has_lower_bound.fn(config):
            assert (own.first, own.last) == (tiles[0], tiles[-1])
        for tile in range(own.first, own.last + 1):
            mask = 0
            if tile == own.last or tile >= own.full_end:
                mask = masks[0]
            elif tile < own.full_begin:
                mask = masks[1]
            assert mask & MASK_END.value or not after[tile]
            assert mask & MASK_BEGIN.value or not before[tile]


def first_keys(config: Sm90Config, rows: np.ndarray) -> np.ndarray:
    """Return the first key that queries at these positions attend to."""
    begins = rows * 0
    if config.WINDOW:
        begins = np.maximum(begins, rows - config.WINDOW + 1)
    if config.CHUNK_SIZE:
        begins = np.maximum(begins, rows - rows % config.CHUNK_SIZE)
    return begins


def end_keys(config: Sm90Config, rows: np.ndarray) -> np.ndarray:
    """Return one more than the last key that queries at these positions may attend to."""
    if config.CAUSAL:
        return rows + 1
    ends = rows * 0 + 10**9
    if config.WINDOW:
        ends = np.minimum(ends, rows + config.WINDOW)
    if config.CHUNK_SIZE:
        ends = np.minimum(ends, rows - rows % config.CHUNK_SIZE + config.CHUNK_SIZE)
    return ends


def check_all_tiles() -> None:
    """Run `check_tiles` for windows and chunks around the sizes of tiles and warpgroups."""
    limits = [(0, 0), (40, 150), (200, 64)]
    limits += [
        (window, 0) for window in (1, 63, 64, 65, 66, 128, 130, 191, 192, 193, 330)
    ]
    limits += [(0, chunk) for chunk in (64, 100, 127, 128, 300)]
    shapes = [(1, 1), (64, 64), (200, 200), (300, 700), (129, 514), (400, 300)]
    tiles = [(64, 64, 1), (64, 128, 1), (128, 128, 1), (256, 64, 1)]
    tiles += [(64, 64, 8), (128, 128, 4), (256, 64, 64)]
    for (head_dim, block_n, group), (window, chunk_size) in itertools.product(
        tiles, limits
    ):
        for causal in (True, False):
            config = Sm90Config(
                *[head_dim] * 4, 16, block_n, 2, causal, window, chunk_size,
                GROUP=group, CONSUMERS=choose_consumers(head_dim, head_dim, False),
            )  # fmt: skip
            # a query tile of one or two tokens has the tiles of a few
            few = [(1, 1), (64, 64), (33, 514), (40, 30)]
            found, begins = find_items(config, shapes if group < 64 else few)
            assert begins == first_keys(config, np.arange(len(begins))).tolist()
            for item in found:
                if item.work.num_kv_tiles > 0:
                    check_tiles(config, item)


def test_a_warpgroup_computes_its_kv_tiles_with_the_masks_that_they_need() -> None:
    check_all_tiles()


WRONG_TILES = {
    "a window of one key more": (
        "position - (config.WINDOW - 1)",
        "position - config.WINDOW",
    ),
    "a window of one key less": (
        "position - (config.WINDOW - 1)",
        "position - (config.WINDOW - 2)",
    ),
    "a chunk that begins late": (
        "position // config.CHUNK_SIZE * config.CHUNK_SIZE",
        "position // config.CHUNK_SIZE * config.CHUNK_SIZE + 1",
    ),
    "the last row is of another warpgroup": (
        "last_row = position + count_tokens(config) - 1",
        "last_row = position + count_tokens(config)",
    ),
    "the first row stands for the last": (
        "last_row = position + count_tokens(config) - 1",
        "last_row = position",
    ),
    "the tile with the last key is skipped": (
        "(end_of_visible_keys(last_row, config) - 1) // BLOCK_N",
        "(end_of_visible_keys(last_row, config) - 2) // BLOCK_N",
    ),
    "no tile after the last is skipped": ("last = own_last", "pass"),
    "the tile with the first key is skipped": (
        "gl.minimum(first_visible_key(position, config) // BLOCK_N, last)",
        "gl.minimum((first_visible_key(position, config) + BLOCK_N - 1) // BLOCK_N, last)",
    ),
    "the first tile is of the last row": (
        "gl.minimum(first_visible_key(position, config) // BLOCK_N, last)",
        "gl.minimum(first_visible_key(last_row, config) // BLOCK_N, last)",
    ),
    "no tile before the first is skipped": ("first = own_first", "pass"),
    "skipped tiles are not counted": ("before = own_first - first", "before = 0"),
    "no mask at the begin of the last row's window": (
        "(first_visible_key(last_row, config) + BLOCK_N - 1) // BLOCK_N",
        "first_visible_key(last_row, config) // BLOCK_N",
    ),
    "no mask at the begin of the first row's window only": (
        "(first_visible_key(last_row, config) + BLOCK_N - 1) // BLOCK_N",
        "(first_visible_key(position, config) + BLOCK_N - 1) // BLOCK_N",
    ),
    "no mask on the diagonal": (
        "gl.maximum(end_of_visible_keys(position, config), 0)",
        "gl.maximum(end_of_visible_keys(last_row, config), 0)",
    ),
    "a window to the right of one key less": (
        "return position + config.WINDOW",
        "return position + config.WINDOW - 1",
    ),
    "a chunk that ends early": (
        "(position + config.CHUNK_SIZE) // config.CHUNK_SIZE * config.CHUNK_SIZE",
        "position // config.CHUNK_SIZE * config.CHUNK_SIZE",
    ),
    "no mask on the diagonal of a work item": (
        "gl.maximum(end_of_visible_keys(work.position, config), 0)",
        "work.seq_len",
    ),
    "a work item without its last tile": (
        "num_kv_tiles = (kv_end + BLOCK_N - 1) // BLOCK_N",
        "num_kv_tiles = kv_end // BLOCK_N",
    ),
    "a work item with tiles of another window": (
        "num_kv_tiles -= first_visible_key(position, config) // BLOCK_N",
        "num_kv_tiles -= first_visible_key(position + TILE_TOKENS, config) // BLOCK_N",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WRONG_TILES)
def test_a_wrong_bound_of_the_kv_tiles_is_found(name: str, tmp_path: Path) -> None:
    files = "sm90/common/tile_range.py", "sm90/common/scheduler.py"
    with (
        changed_kernels(tmp_path, *WRONG_TILES[name], *files),
        pytest.raises(AssertionError),
    ):
        check_all_tiles()

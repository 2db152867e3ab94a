"""Launches of a call's signature: tiles, constants and fixed arguments.

Calls have the same signature if their strides, dtypes and options are the same, whatever their
sizes. What the portable kernels need for each signature is determined once. The tiles themselves
are in tuning.py, and the launches of a batch in launches.py.
"""

from typing import Any

import torch
from torch import Tensor

from .....contract.attention_options import AttentionOptions
from .....contract.cache_formats import (
    FORMATS,
    TENSOR_SCALE_DTYPES,
    find_format,
    head_size_of,
)
from ....runtime.attention_call import AttentionCall
from ....runtime.chip import count_processors
from ....runtime.launcher import INTERPRETED, Launcher, must_widen, next_power_of_2
from ....runtime.planning import once_per_planning
from ...fp8 import has_native_fp8, scale_strides
from ..arguments import Config, Strides
from ..options.score import ScoreConstants, lower_scores
from ..options.visible_range import MaskConstants, lower_masks
from ..prefill import prefill_kernel
from ..split_kv import split_kv_kernel, split_rows_kernel
from ..tables.active_tables import find_tables
from ..tables.kernel_tables import KernelTables, TileKey
from .decode_sizes import choose_short_rows, limit_stages
from .launches import Launches
from .make_launcher import make_launcher
from .tuning import Tiles, choose_row_tiles, choose_tiles

SPLIT_SIZE = 64 if INTERPRETED else 4096
"""Keys per split of batch-invariant rows. With 2,048 one decode over 131,072 keys takes 184 us
instead of 168, and the other batches in docs/benchmark.md lose up to 4.5 %."""
MAX_WORKSPACE = 1 << 26
"""Numbers of partial results, 256 MiB, for which a workspace is worth its memory."""
LEAST_COLUMNS, LEAST_PACKED = 16, 32
"""Columns of a tile of keys or values, at least; and if a byte has two codes.

Tensor cores multiply 16 columns. With 16 columns of packed codes the products of triton 3.6 are
wrong on an H200."""


@once_per_planning
def make_launches(call: AttentionCall) -> Launches:
    """Return the launches of calls with this one's signature."""
    query, key, value, block_table = call[:4]
    out, options = call.out, call.options
    if must_widen(out.dtype):
        # the float32 output need not have the strides of the given one
        out = torch.zeros_like(out, dtype=torch.float32)
    kv_heads, value_size = value.shape[-2], head_size_of(value)
    group_size = query.shape[1] // kv_heads
    masks, mask_constants = lower_masks(options, call.query_start_loc)
    scores, score_constants = lower_scores(options)
    config = _make_config(
        query, key, value, block_table, out, options, mask_constants, score_constants
    )
    decode, small_batch, prefill = _choose_tiles(query, config, options)
    row_tiles = choose_row_tiles(decode, prefill, block_table is not None)
    of_chip, sizes = (query.dtype, query.device), (config.BLOCK_D, config.BLOCK_DV)
    short_rows = 0
    if not options.batch_invariant:
        short_rows = choose_short_rows(group_size, decode, sum(sizes), *of_chip)
    has_decode = short_rows > 0
    small_batch = limit_stages(small_batch, decode, short_rows, sizes, *of_chip)
    tables = find_tables(query.device, options.batch_invariant)
    tile_key = _make_key(query, config, options)
    if has_decode:
        decode, small_batch = (
            tables.find(tile_key._replace(role=role, rows=short_rows), tiles)
            for role, tiles in (("decode", decode), ("small batch", small_batch))
        )
    row_tiles = _replace_row_tiles(tables, tile_key, row_tiles)
    prefill = tables.find(tile_key, prefill)
    tree = options.tree_mask
    fixed = {
        "strides": _strides(query, key, value, block_table, out),
        "masks": masks,
        "scores": scores,
        "scale_strides": scale_strides(options),
        "tree_stride_req": 0 if tree is None else tree.stride(0),
        "tree_width": 0 if tree is None else tree.shape[1],
        "decode_rows": short_rows,
    }
    processors = count_processors(query.device)
    config = config._replace(
        BLOCK_M=prefill.block_m,
        BLOCK_N=prefill.block_n,
        CLEAR_PADDING=not has_decode,
        # with one loop each key is weighted by the same instructions in every tile
        MASK_ALL_TILES=options.batch_invariant,
    )
    return Launches(
        fixed=fixed,
        config=config,
        decode_tiles=decode,
        small_batch_tiles=small_batch,
        row_tiles=row_tiles,
        prefills=_prefill_launchers(fixed, prefill, config, options),
        group_size=group_size,
        kv_heads=kv_heads,
        value_size=value_size,
        has_decode=has_decode,
        short_rows=short_rows,
        prefill_tiles=prefill,
        tile_key=tile_key,
        split_size=SPLIT_SIZE if options.batch_invariant else 0,
        max_visible_keys=_max_visible_keys(short_rows, options),
        masks_all_tiles=(
            _has_window(options) or tree is not None or options.query_ranges is not None
        ),
        full_reqs=processors // kv_heads + 1,
        processors=processors,
        tables=tables,
    )


def _make_key(query: Tensor, config: Config, options: AttentionOptions) -> TileKey:
    """Return the key of the tiles of prefills."""
    has = {
        "bias": options.position_bias is not None,
        "tree": options.tree_mask is not None,
        "window": _has_window(options),
    }
    return TileKey(
        role="prefill",
        rows=0,
        head_size=config.BLOCK_D,
        value_size=config.BLOCK_DV,
        query_bytes=query.dtype.itemsize,
        cache_format=config.CACHE_FORMAT,
        is_paged=config.BLOCK_SIZE > 0,
        options=tuple(name for name, is_given in has.items() if is_given),
    )


def _replace_row_tiles(
    tables: KernelTables, key: TileKey, row_tiles: tuple[Tiles, ...]
) -> tuple[Tiles, ...]:
    """Return the tiles of split requests; those with fewest rows stay those of the default."""
    first, *others = row_tiles
    return (
        first,
        *(
            tables.find(key._replace(role="append", rows=tiles.block_m), tiles)
            for tiles in others
        ),
    )


def _choose_tiles(
    query: Tensor, config: Config, options: AttentionOptions
) -> tuple[Tiles, Tiles, Tiles]:
    """Return the tiles of decodes, of decodes in a small batch, and of prefills."""
    is_quantised = FORMATS[config.CACHE_FORMAT].is_quantised
    return choose_tiles(
        max(config.BLOCK_D, config.BLOCK_DV),
        query.dtype,
        query.device,
        has_window=_has_window(options),
        has_bias=options.position_bias is not None,
        has_tree=options.tree_mask is not None,
        has_bit_decoding=is_quantised and not config.NATIVE_FP8,
        has_native_fp8=config.NATIVE_FP8,
        is_paged=config.BLOCK_SIZE > 0,
        has_splits=options.batch_invariant,
    )


def _has_window(options: AttentionOptions) -> bool:
    """Return whether there is a sliding window or a chunk."""
    return bool(options.sliding_window or options.attention_chunk_size)


def _prefill_launchers(
    fixed: dict[str, Any], tiles: Tiles, config: Config, options: AttentionOptions
) -> tuple[Launcher, Launcher]:
    """Return the launchers with one program per query tile, and per split of its keys."""
    if not options.batch_invariant:
        alone = make_launcher(prefill_kernel, fixed, tiles, config=config)
        return alone, alone
    size, rows = SPLIT_SIZE, min(16, tiles.block_m)
    return (
        make_launcher(split_rows_kernel, fixed, tiles, config=config, SPLIT_SIZE=size),
        make_launcher(
            split_kv_kernel, fixed, tiles, config=config, SPLIT_SIZE=size,
            COMBINE_ROWS=rows,
        ),
    )  # fmt: skip


def _make_config(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    options: AttentionOptions,
    masks: MaskConstants,
    scores: ScoreConstants,
) -> Config:
    """Return the constants of all launches; those of tiles are replaced for each kernel."""
    head_size, value_size = query.shape[-1], head_size_of(value)
    form = find_format(key.dtype, options.k_scale)
    has_fp8_codes = form.dtype in TENSOR_SCALE_DTYPES
    least = LEAST_PACKED if form.codes_per_element > 1 else LEAST_COLUMNS
    return Config(
        GROUP_SIZE=query.shape[1] // value.shape[-2],
        HEAD_DIM=head_size,
        BLOCK_D=max(least, next_power_of_2(head_size)),
        V_HEAD_DIM=value_size,
        BLOCK_DV=max(least, next_power_of_2(value_size)),
        ROPE_DIM=0,
        BLOCK_ROPE=0,
        BLOCK_SIZE=0 if block_table is None else key.shape[1],
        masks=masks,
        scores=scores,
        CACHE_FORMAT=form.name,
        OUT_FORMAT=find_format(out.dtype).name,
        NATIVE_FP8=has_fp8_codes and has_native_fp8(query.device),
        PIN_FP8_V=False,
        ALIGNMENT=find_alignment(key, value),
        BLOCK_M=0,
        BLOCK_N=0,
        MASK_ALL_TILES=False,
        CLEAR_PADDING=False,
        INDEX_64=(
            INTERPRETED
            or max(map(_extent, (key, value, *_slot_scales(options)))) >= 2**31
            # the number of entries is not in the signature: any stride may pass 2**31
            or (block_table is not None and block_table.stride(1) > 1)
        ),
        UPCAST=must_widen(query.dtype),
        ROW_SUMS=INTERPRETED and options.batch_invariant,
    )


def find_alignment(*caches: Tensor) -> int:
    """Return the largest of 16, 8, 4 and 1 bytes that divides the distances of all rows."""
    steps = [
        stride * cache.itemsize for cache in caches for stride in cache.stride()[:-1]
    ]
    return next(
        size for size in (16, 8, 4, 1) if not any(step % size for step in steps)
    )


def _slot_scales(options: AttentionOptions) -> list[Tensor]:
    """Return the scales that have numbers for each slot and head."""
    scales = (options.k_scale, options.v_scale)
    return [scale for scale in scales if isinstance(scale, Tensor) and scale.dim() > 1]


def _extent(tensor: Tensor) -> int:
    """Return an upper bound of the elements between a tensor's first and its last one."""
    return sum(
        size * abs(stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _max_visible_keys(short_rows: int, options: AttentionOptions) -> int | None:
    """Return an upper bound of the keys that a decode request attends to. None: all keys."""
    if options.query_ranges is not None or options.tree_mask is not None:
        return None
    limits = []
    if options.sliding_window is not None:
        sides = 1 if options.causal is True else 2
        limits.append(sides * options.sliding_window + short_rows)
    if options.attention_chunk_size is not None:
        limits.append(options.attention_chunk_size + short_rows)
    return min(limits, default=None)


def _strides(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None, out: Tensor
) -> Strides:
    """Return the strides of a call; the stride of blocks is 0 without a block table."""
    k_block = (0,) if key.dim() == 3 else ()
    v_block = (0,) if value.dim() == 3 else ()
    table_entry = 0 if block_table is None else block_table.stride(1)
    return Strides(  # type: ignore[call-arg]
        *query.stride(),
        *k_block,
        *key.stride(),
        *v_block,
        *value.stride(),
        table_entry,
        *out.stride(),
    )

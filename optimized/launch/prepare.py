"""Launches of the portable kernels: tiles, constants and fixed arguments of a call's signature.

Calls have the same signature if their strides, dtypes and options are the same, whatever their
sizes. For each signature it is determined once which kernels are launched, how large their tiles
are, and how a batch is split. The tiles themselves are in tuning.py.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.kinds import FP8_DTYPES
from ..kernels.append import append_kernel
from ..kernels.arguments import Config, ShortDecode, StreamK, Strides, Tensors
from ..kernels.decode import decode_kernel
from ..kernels.fp8 import has_native_fp8, scale_strides
from ..kernels.options.score import OptionTensors, ScoreConstants, lower_scores
from ..kernels.options.visible_range import MaskConstants, lower_masks
from ..kernels.prefill import prefill_kernel
from ..kernels.short_decode import short_decode_kernel
from ..kernels.sm90.fp8_decode import family as sm90_fp8
from ..kernels.split_kv import split_kv_kernel, split_rows_kernel
from .launcher import INTERPRETED, Launcher, must_widen, next_power_of_2
from .tuning import (
    PROGRAMS,
    Tiles,
    choose_row_tiles,
    choose_short_tiles,
    choose_tiles,
    count_processors,
    max_short_keys,
)

REQS_PER_PASS = (8, 32, 64) if INTERPRETED else (32, 128, 1024)
"""Requests whose tiles a decode program counts at once: for a small batch, the lanes of a warp."""
MIN_SEGMENT = 32 if INTERPRETED else 512
"""Keys of a stream-K segment, at least: shorter ones are not worth a combination."""
BRIEF = 2048
"""Keys of sequences that are so short that the size of the kernel's code matters."""
COMBINED_AT_ONCE = 8192
"""Numbers of partial results that a program holds while it combines them."""
SPLIT_SIZE = 64 if INTERPRETED else 4096
"""Keys per split of batch-invariant rows. With 2,048 one decode over 131,072 keys takes 184 us
instead of 168, and the other batches in docs/benchmark.md lose up to 4.5 %."""
MAX_WORKSPACE = 1 << 26
"""Numbers of partial results, 256 MiB, for which a workspace is worth its memory."""


@dataclass
class Launches:
    """The kernels of a call's signature, and how a batch is split for them.

    Args:
        fixed: arguments of all launches, by name.
        config: constants of all launches; those of tiles are the prefill's.
        decode_tiles, small_batch_tiles: tiles of decodes, and of decodes too few to fill the chip.
        short_tiles: tiles of few decodes over short sequences.
        row_tiles: tiles of split requests of any number of rows, fewest rows first.
        decodes: launches of the decode kernel, made when they are first needed.
        short_decodes: launches of the kernel for short decodes, as well.
        appends: launches of the kernels for split requests of any number of rows, as well.
        prefills: launches for all other requests: one program per query tile, and one per split
            of its keys. The second one is launched only for batch-invariant rows.
        group_size: query heads per kv head.
        kv_heads, value_size: of the cache.
        has_fp8_decode: whether the FP8 decode kernel of Hopper chips takes the place of the decode
            kernel, for keys and values that begin at multiples of 16 bytes.
        has_decode: whether the decode kernel is used: the rows of one token fit its tile, and rows
            need not be batch-invariant.
        short_rows: rows of a decode request, at most; 0 if the decode kernel is not used.
        block_m: rows of a prefill tile.
        split_size: keys per split of batch-invariant rows; 0 if rows are not split.
        max_visible_keys: Optional. Keys that the rows of a decode request attend to, at most. If
            None, the options do not limit them.
        masks_all_tiles: whether a decode masks every KV tile.
        full_reqs: fewer requests than that are a small batch, which does not fill the chip.
        processors: multiprocessors of the chip.
        upcasts_output: whether the output is written in float32 first.
    """

    fixed: dict[str, Any]
    config: Config
    decode_tiles: Tiles
    small_batch_tiles: Tiles
    short_tiles: Tiles
    row_tiles: tuple[Tiles, ...]
    prefills: tuple[Launcher, Launcher]
    group_size: int
    kv_heads: int
    value_size: int
    has_fp8_decode: bool
    has_decode: bool
    short_rows: int
    block_m: int
    split_size: int
    max_visible_keys: int | None
    masks_all_tiles: bool
    full_reqs: int
    processors: int
    upcasts_output: bool
    decodes: dict[
        tuple[int, int, bool, bool, bool, bool], tuple[Launcher, int, int]
    ] = field(default_factory=dict)
    short_decodes: dict[int, Launcher] = field(default_factory=dict)
    appends: dict[tuple[Any, ...], tuple[Launcher, int, int]] = field(
        default_factory=dict
    )

    def bound_keys(self, max_key_len: int, block_n: int) -> int:
        """Return an upper bound of the keys in the KV tiles of a decode request.

        Args:
            max_key_len: of the call.
            block_n: keys of a KV tile.
        """
        if self.max_visible_keys is None:
            return max_key_len
        # a window may begin anywhere within its first tile
        return min(max_key_len, self.max_visible_keys + block_n)

    def decode(
        self,
        num_reqs: int,
        partial_rows: int,
        max_query_len: int,
        max_key_len: int,
        is_aligned: bool = True,
    ) -> tuple[Launcher, int, int]:
        """Return the launch of the decode kernel, the keys of its tiles, and its most segments.

        Args:
            num_reqs, max_query_len, max_key_len: bounds of the batch.
            partial_rows: rows of a request, at most.
            is_aligned: whether keys and values begin at multiples of 16 bytes.
        """
        is_fp8_decode = self.has_fp8_decode and is_aligned
        combine_rows = next_power_of_2(max(partial_rows, 1))
        per_pass = _reqs_per_pass(num_reqs)
        is_small_batch = num_reqs < self.full_reqs
        # the code of a second loop costs short sequences more than the masks of one
        masks_all_tiles = (
            self.masks_all_tiles
            or is_fp8_decode
            or max_query_len > 1
            or max_key_len <= BRIEF
        )
        has_many_reqs = num_reqs > per_pass
        key = (
            combine_rows, per_pass, has_many_reqs, is_small_batch, masks_all_tiles,
            is_fp8_decode,
        )  # fmt: skip
        known = self.decodes.get(key)
        if known is None:
            kernel = decode_kernel
            tiles = self.small_batch_tiles if is_small_batch else self.decode_tiles
            programs = self.processors * (1 if is_small_batch else PROGRAMS)
            if is_fp8_decode:
                kernel, tiles = sm90_fp8.fp8_decode_kernel, sm90_fp8.TILES
                programs = self.processors * PROGRAMS
            numbers = combine_rows * self.config.BLOCK_DV
            config = self.config._replace(
                BLOCK_M=self.short_rows,
                BLOCK_N=tiles.block_n,
                PIN_FP8_V=True,
                CLEAR_PADDING=True,
                MASK_ALL_TILES=masks_all_tiles,
            )
            plan = StreamK(
                MIN_TILES=max(1, MIN_SEGMENT // tiles.block_n),
                QUERY_TILES=False,
                REQS_PER_PASS=per_pass,
                MANY_REQS=has_many_reqs,
                COMBINE_ROWS=combine_rows,
                COMBINE_SPLITS=max(1, min(16, COMBINED_AT_ONCE // numbers)),
            )
            launcher = _launcher(kernel, self.fixed, tiles, config=config, plan=plan)
            known = (launcher, tiles.block_n, max(1, programs // self.kv_heads))
            self.decodes[key] = known
        return known

    def is_short(self, num_reqs: int, max_key_len: int) -> bool:
        """Return whether a batch has few requests over short sequences."""
        block_n = self.short_tiles.block_n
        limit = max_short_keys(num_reqs, self.kv_heads, block_n, self.processors)
        return 0 < self.bound_keys(max_key_len, block_n) <= limit

    def short_decode(self, partial_rows: int) -> tuple[Launcher, int]:
        """Return the launch of the kernel for short decodes, and the keys of its tiles.

        Args:
            partial_rows: rows of a request, at most.
        """
        combine_rows = next_power_of_2(max(partial_rows, 1))
        launcher = self.short_decodes.get(combine_rows)
        if launcher is None:
            tiles, numbers = self.short_tiles, combine_rows * self.config.BLOCK_DV
            config = self.config._replace(
                BLOCK_M=self.short_rows,
                BLOCK_N=tiles.block_n,
                PIN_FP8_V=True,
                CLEAR_PADDING=True,
                MASK_ALL_TILES=True,
            )
            plan = ShortDecode(
                COMBINE_ROWS=combine_rows,
                COMBINE_SPLITS=max(1, min(16, COMBINED_AT_ONCE // numbers)),
            )
            launcher = _launcher(
                short_decode_kernel, self.fixed, tiles, config=config, plan=plan
            )
            self.short_decodes[combine_rows] = launcher
        return launcher, self.short_tiles.block_n

    def append(
        self,
        num_reqs: int,
        block_m: int,
        kernel: Any = append_kernel,
        lower: Any = None,
        tensors: Any = Tensors,
        is_dependent: bool = False,
        tiles: Tiles | None = None,
    ) -> tuple[Launcher, int, int]:
        """Return the launch of a kernel for split requests of any number of rows.

        Args:
            num_reqs: requests of the batch.
            block_m: rows of a query tile, those of one of `row_tiles`.
            kernel: `append_kernel`, or one with its constants.
            lower: Optional. Converts the tensors of a launch to the kernel's. If None, those of a
                call to paged attention.
            tensors: NamedTuple in which the kernel takes its pointers.
            is_dependent: as in `Launcher`. The kernel has a constant IS_DEPENDENT then.
            tiles: Optional. Tiles of `block_m` rows. If None, those of `row_tiles`.

        Returns:
            the launcher, the keys of a tile, and the most segments.
        """
        per_pass = _reqs_per_pass(num_reqs)
        key = (block_m, per_pass, num_reqs > per_pass, is_dependent, tiles)
        known = self.appends.get(key)
        if known is None:
            if tiles is None:
                tiles = next(each for each in self.row_tiles if each.block_m == block_m)
            rows = min(16, block_m)
            config = self.config._replace(
                BLOCK_M=block_m,
                BLOCK_N=tiles.block_n,
                PIN_FP8_V=block_m < 64,
                CLEAR_PADDING=True,
                # the products of few rows take less time than the keys, masked or not
                MASK_ALL_TILES=self.masks_all_tiles or block_m < 64,
            )
            plan = StreamK(
                MIN_TILES=max(1, MIN_SEGMENT // tiles.block_n),
                QUERY_TILES=True,
                REQS_PER_PASS=per_pass,
                MANY_REQS=num_reqs > per_pass,
                COMBINE_ROWS=rows,
                COMBINE_SPLITS=max(
                    1, min(16, COMBINED_AT_ONCE // (rows * config.BLOCK_DV))
                ),
            )
            launcher = _launcher(
                kernel, self.fixed, tiles, (lower or _lower_tensors, tensors),
                is_dependent, config=config, plan=plan, IS_DEPENDENT=is_dependent,
            )  # fmt: skip
            programs = self.processors * (PROGRAMS if tiles.num_warps <= 4 else 1)
            known = (launcher, tiles.block_n, max(1, programs // self.kv_heads))
            self.appends[key] = known
        return known


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    out: Tensor,
    options: AttentionOptions,
) -> Launches:
    """Return the launches of calls with this one's signature."""
    upcasts_output = must_widen(out.dtype)
    if upcasts_output:
        # the float32 output need not have the strides of the given one
        out = torch.zeros_like(out, dtype=torch.float32)
    kv_heads, value_size = value.shape[-2:]
    group_size = query.shape[1] // kv_heads
    masks, mask_constants = lower_masks(options, query_start_loc)
    scores, score_constants = lower_scores(options)
    config = _make_config(
        query, key, value, block_table, out, options, mask_constants, score_constants
    )
    decode, small_batch, prefill = _choose_tiles(query, config, options)
    row_tiles = choose_row_tiles(decode, prefill, block_table is not None)
    # the rows of a decode request fit one decode tile
    short_rows = min(64, max(decode.block_m, next_power_of_2(group_size)))
    has_decode = group_size <= short_rows and not options.batch_invariant
    if not has_decode:
        short_rows = 0
    tree = options.tree_mask
    strides = _strides(query, key, value, block_table, out)
    fixed = {
        "strides": strides,
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
        short_tiles=choose_short_tiles(decode, query.dtype, block_table is not None),
        row_tiles=row_tiles,
        prefills=_prefill_launchers(fixed, prefill, config, options),
        group_size=group_size,
        kv_heads=kv_heads,
        value_size=value_size,
        has_fp8_decode=sm90_fp8.supports(
            query, key, strides, config, options, short_rows
        ),
        has_decode=has_decode,
        short_rows=short_rows,
        block_m=prefill.block_m,
        split_size=SPLIT_SIZE if options.batch_invariant else 0,
        max_visible_keys=_max_visible_keys(short_rows, options),
        masks_all_tiles=(
            _has_window(options) or tree is not None or options.query_ranges is not None
        ),
        full_reqs=processors // kv_heads + 1,
        processors=processors,
        upcasts_output=upcasts_output,
    )


def _choose_tiles(
    query: Tensor, config: Config, options: AttentionOptions
) -> tuple[Tiles, Tiles, Tiles]:
    """Return the tiles of decodes, of decodes in a small batch, and of prefills."""
    return choose_tiles(
        max(config.BLOCK_D, config.BLOCK_DV),
        query.dtype,
        query.device,
        has_window=_has_window(options),
        has_bias=options.position_bias is not None,
        has_tree=options.tree_mask is not None,
        has_bit_decoding=config.CACHE_FP8 > 0 and not config.NATIVE_FP8,
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
        alone = _launcher(prefill_kernel, fixed, tiles, config=config)
        return alone, alone
    size, rows = SPLIT_SIZE, min(16, tiles.block_m)
    return (
        _launcher(split_rows_kernel, fixed, tiles, config=config, SPLIT_SIZE=size),
        _launcher(
            split_kv_kernel, fixed, tiles, config=config, SPLIT_SIZE=size,
            COMBINE_ROWS=rows,
        ),
    )  # fmt: skip


def _reqs_per_pass(num_reqs: int) -> int:
    """Return how many requests a program counts at once."""
    return next((n for n in REQS_PER_PASS if num_reqs <= n), REQS_PER_PASS[-1])


def _launcher(
    kernel: Any,
    fixed: dict[str, Any],
    tiles: Tiles,
    inputs: tuple[Any, Any] | None = None,
    is_dependent: bool = False,
    **constants: Any,
) -> Launcher:
    """Return a launcher of a kernel.

    Args:
        inputs: Optional. What converts the tensors of a launch, and the NamedTuple in which the
            kernel takes its pointers. If None, those of a call to paged attention.
        is_dependent: as in `Launcher`.
    """
    lower, tensors = inputs or (_lower_tensors, Tensors)
    return Launcher(
        kernel,
        lower,
        fixed | constants,
        tiles.num_warps,
        tiles.num_stages,
        groups=(tensors, OptionTensors),
        is_dependent=is_dependent,
    )


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
    head_size, value_size = query.shape[-1], value.shape[-1]
    cache_fp8 = _fp8_kind(key.dtype)
    return Config(
        GROUP_SIZE=query.shape[1] // value.shape[-2],
        HEAD_DIM=head_size,
        BLOCK_D=max(16, next_power_of_2(head_size)),
        V_HEAD_DIM=value_size,
        BLOCK_DV=max(16, next_power_of_2(value_size)),
        BLOCK_SIZE=0 if block_table is None else key.shape[1],
        masks=masks,
        scores=scores,
        CACHE_FP8=cache_fp8,
        OUT_FP8=_fp8_kind(out.dtype),
        NATIVE_FP8=cache_fp8 > 0 and has_native_fp8(query.device),
        PIN_FP8_V=False,
        BLOCK_M=0,
        BLOCK_N=0,
        MASK_ALL_TILES=False,
        CLEAR_PADDING=False,
        INDEX_64=(
            INTERPRETED
            or max(_extent(key), _extent(value)) >= 2**31
            # the number of entries is not in the signature: any stride may pass 2**31
            or (block_table is not None and block_table.stride(1) > 1)
        ),
        UPCAST=must_widen(query.dtype),
        ROW_SUMS=INTERPRETED and options.batch_invariant,
    )


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


def _lower_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    partials: int,
    semaphores: Tensor | None,
) -> Tensors:
    """Return the tensors of a launch.

    Args:
        workspace: Optional. Log-sum-exps of all partial results, then their values.
        partials: number of those log-sum-exps.
    """
    return Tensors(
        q=query,
        k=as_bits(key),
        v=as_bits(value),
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=lengths,
        out=as_bits(out),
        lse=lse,
        partial_out=None if workspace is None else workspace[partials:],
        partial_lse=workspace,
        semaphores=semaphores,
    )


def as_bits(tensor: Tensor) -> Tensor:
    """Return FP8 numbers as bytes, which the kernels decode themselves."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def _fp8_kind(dtype: torch.dtype) -> int:
    """Return 1 or 2 for an FP8 dtype, its index in FP8_DTYPES plus 1; otherwise 0."""
    return FP8_DTYPES.index(dtype) + 1 if dtype in FP8_DTYPES else 0

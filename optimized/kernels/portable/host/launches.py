"""Launches of the portable kernels: which kernel a batch gets, and over how many programs.

The tiles are those of the call's signature, see make_launches.py. A kernel depends on bounds of the
batch too, such as the number of requests. Its launcher is made when a batch first needs it.
"""

from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from ....runtime.launcher import INTERPRETED, Launcher, next_power_of_2
from ..append import append_kernel
from ..arguments import Config, ShortDecode, StreamK, Tensors
from ..decode import decode_kernel
from ..short_decode import short_decode_kernel
from ..tables.kernel_tables import DEFAULT, KernelTables, TileKey
from .decode_sizes import (
    TILE_ROWS,
    ShortSplits,
    count_parts,
    count_time,
    split_short_decodes,
)
from .make_launcher import lower_call, make_launcher
from .tuning import PROGRAMS, Tiles

REQS_PER_PASS = (8, 32, 64) if INTERPRETED else (32, 128, 1024)
"""Requests whose tiles a decode program counts at once: for a small batch, the lanes of a warp."""
BRIEF = 2048
"""Keys of sequences that are so short that the size of the kernel's code matters."""
COMBINED_AT_ONCE = 8192
"""Numbers of partial results that a program holds while it combines them: with 4 warps, 64
registers of each thread."""


class DecodeKernel(NamedTuple):
    """A decode kernel with the arguments of the portable one.

    Args:
        kernel: the kernel.
        tiles: its tiles.
        programs: programs that share a multiprocessor.
        registers: registers of a thread, at most, with which they do.
    """

    kernel: Any
    tiles: Tiles
    programs: int
    registers: int


@dataclass
class Launches:
    """The kernels of a call's signature, and how a batch is split for them.

    Args:
        fixed: arguments of all launches, by name.
        config: constants of all launches; those of tiles are the prefill's.
        decode_tiles, small_batch_tiles: tiles of decodes, and of decodes too few to fill the chip.
        row_tiles: tiles of split requests of any number of rows, fewest rows first.
        decodes: launches of the decode kernel, made when they are first needed.
        short_decodes: launches of the kernel for short decodes, as well.
        appends: launches of the kernels for split requests of any number of rows, as well.
        prefills: launches for all other requests: one program per query tile, and one per split
            of its keys. The second one is launched only for batch-invariant rows.
        group_size: query heads per kv head.
        kv_heads, value_size: of the cache.
        has_decode: whether the decode kernel is used: the rows of one token fit its tile, and rows
            need not be batch-invariant.
        short_rows: rows of a decode request, at most; 0 if the decode kernel is not used.
        prefill_tiles: tiles of prefills.
        tile_key: key of the tiles of prefills in tables; those of others have a role and rows.
        split_size: keys per split of batch-invariant rows; 0 if rows are not split.
        max_visible_keys: Optional. Keys that the rows of a decode request attend to, at most. If
            None, the options do not limit them.
        masks_all_tiles: whether a decode masks every KV tile.
        full_reqs: fewer requests than that are a small batch, which does not fill the chip.
        processors: multiprocessors of the chip.
        tables: the tables that the tiles were chosen from, for all that a batch decides.
    """

    fixed: dict[str, Any]
    config: Config
    decode_tiles: Tiles
    small_batch_tiles: Tiles
    row_tiles: tuple[Tiles, ...]
    prefills: tuple[Launcher, Launcher]
    group_size: int
    kv_heads: int
    value_size: int
    has_decode: bool
    short_rows: int
    prefill_tiles: Tiles
    tile_key: TileKey
    split_size: int
    max_visible_keys: int | None
    masks_all_tiles: bool
    full_reqs: int
    processors: int
    tables: KernelTables
    decodes: dict[tuple[Any, ...], tuple[Launcher, int, int]] = field(
        default_factory=dict
    )
    short_decodes: dict[tuple[int, int], Launcher] = field(default_factory=dict)
    appends: dict[tuple[Any, ...], tuple[Launcher, int, int]] = field(
        default_factory=dict
    )

    @property
    def block_m(self) -> int:
        """Rows of a prefill tile."""
        return self.prefill_tiles.block_m

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
        other: DecodeKernel | None = None,
    ) -> tuple[Launcher, int, int]:
        """Return the launch of the decode kernel, the keys of its tiles, and its most segments.

        Args:
            num_reqs, max_query_len, max_key_len: bounds of the batch.
            partial_rows: rows of a request, at most.
            other: Optional. A kernel with the same arguments in place of the portable one.
        """
        combine_rows = next_power_of_2(max(partial_rows, 1))
        per_pass = reqs_per_pass(num_reqs)
        is_small_batch = num_reqs < self.full_reqs
        # the code of a second loop costs short sequences more than the masks of one
        masks_all_tiles = (
            self.masks_all_tiles
            or other is not None
            or max_query_len > 1
            or max_key_len <= BRIEF
        )
        has_many_reqs = num_reqs > per_pass
        key = (
            combine_rows, per_pass, has_many_reqs, is_small_batch, masks_all_tiles,
            id(other),
        )  # fmt: skip
        known = self.decodes.get(key)
        if known is None:
            kernel, registers = decode_kernel, None
            tiles = self.small_batch_tiles if is_small_batch else self.decode_tiles
            of_processor = tiles.programs or (1 if is_small_batch else PROGRAMS)
            thresholds = self.tables.thresholds
            if other is not None:
                # a kernel that no table is for
                kernel, tiles, of_processor, registers = other
                thresholds = DEFAULT.thresholds
            programs = self.processors * of_processor
            numbers = combine_rows * self.config.BLOCK_DV
            config = self.config._replace(
                BLOCK_M=self.short_rows if other is None else max(8, combine_rows),
                BLOCK_N=tiles.block_n,
                PIN_FP8_V=True,
                CLEAR_PADDING=True,
                MASK_ALL_TILES=masks_all_tiles,
            )
            plan = StreamK(
                MIN_TILES=max(1, thresholds.min_segment // tiles.block_n),
                QUERY_TILES=False,
                REQS_PER_PASS=per_pass,
                MANY_REQS=has_many_reqs,
                COMBINE_ROWS=combine_rows,
                COMBINE_SPLITS=_splits_at_once(numbers),
            )
            launcher = make_launcher(
                kernel, self.fixed, tiles, registers=registers, config=config, plan=plan
            )
            known = (launcher, tiles.block_n, max(1, programs // self.kv_heads))
            self.decodes[key] = known
        return known

    def short_splits(
        self, num_reqs: int, partial_rows: int, max_key_len: int
    ) -> ShortSplits:
        """Return how the kernel for few decodes divides a batch.

        Args:
            num_reqs, max_key_len: bounds of the batch.
            partial_rows: rows of a request, at most.
        """
        tiles = self.small_batch_tiles
        block_n = tiles.block_n
        num_tiles = -(-self.bound_keys(max_key_len, block_n) // block_n)
        # two programs share an SM if they have the tiles of large batches
        of_processor = tiles.programs or (PROGRAMS if tiles == self.decode_tiles else 1)
        found: list[tuple[float, ShortSplits]] = []
        for parts in sorted({1, count_parts(self.group_size)}):
            numbers = self.count_numbers(partial_rows // parts)
            splits = split_short_decodes(
                num_reqs, self.kv_heads * parts, num_tiles, block_n, self.processors,
                self.processors * of_processor, self.tables.thresholds, numbers,
            )  # fmt: skip
            if not splits:
                break
            time = count_time(max(num_tiles, 1), splits, numbers)
            found.append((time, ShortSplits(splits, parts)))
        return min(found, default=(0.0, ShortSplits(0, 1)), key=itemgetter(0))[1]

    def count_numbers(self, rows: int) -> int:
        """Return the numbers of a partial result of some rows, as they are combined."""
        return next_power_of_2(max(rows, 1)) * self.config.BLOCK_DV

    def short_decode(self, partial_rows: int, parts: int = 1) -> Launcher:
        """Return the launch of the kernel for few decodes.

        Args:
            partial_rows: rows of a request and a part, at most.
            parts: parts of the query heads that share a kv head.
        """
        combine_rows = next_power_of_2(max(partial_rows, 1))
        launcher = self.short_decodes.get((combine_rows, parts))
        if launcher is None:
            tiles, group_size = self.small_batch_tiles, self.group_size // parts
            # of whole tokens
            rows = self.short_rows // self.group_size * group_size
            config = self.config._replace(
                GROUP_SIZE=group_size,
                BLOCK_M=self.short_rows
                if parts == 1
                else max(TILE_ROWS, next_power_of_2(rows)),
                BLOCK_N=tiles.block_n,
                PIN_FP8_V=True,
                CLEAR_PADDING=True,
                MASK_ALL_TILES=True,
            )
            plan = ShortDecode(
                COMBINE_ROWS=combine_rows,
                COMBINE_SPLITS=_splits_at_once(self.count_numbers(partial_rows)),
                PARTS=parts,
            )
            fixed = self.fixed | {"decode_rows": self.short_rows // parts}
            launcher = make_launcher(
                short_decode_kernel, fixed, tiles, config=config, plan=plan
            )
            self.short_decodes[combine_rows, parts] = launcher
        return launcher

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
        per_pass = reqs_per_pass(num_reqs)
        key = (block_m, per_pass, num_reqs > per_pass, is_dependent, tiles)
        known = self.appends.get(key)
        if known is None:
            if tiles is None:
                tiles = next(
                    tiles for tiles in self.row_tiles if tiles.block_m == block_m
                )
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
                MIN_TILES=max(1, self.tables.thresholds.min_segment // tiles.block_n),
                QUERY_TILES=True,
                REQS_PER_PASS=per_pass,
                MANY_REQS=num_reqs > per_pass,
                COMBINE_ROWS=rows,
                COMBINE_SPLITS=_splits_at_once(rows * config.BLOCK_DV),
            )
            launcher = make_launcher(
                kernel, self.fixed, tiles, (lower or lower_call, tensors),
                is_dependent, config=config, plan=plan, IS_DEPENDENT=is_dependent,
            )  # fmt: skip
            of_processor = tiles.programs or (PROGRAMS if tiles.num_warps <= 4 else 1)
            programs = self.processors * of_processor
            known = (launcher, tiles.block_n, max(1, programs // self.kv_heads))
            self.appends[key] = known
        return known


def reqs_per_pass(num_reqs: int) -> int:
    """Return how many requests a program counts at once."""
    return next((n for n in REQS_PER_PASS if num_reqs <= n), REQS_PER_PASS[-1])


def _splits_at_once(numbers: int) -> int:
    """Return how many partial results of so many numbers each are combined at once."""
    return max(1, min(8, COMBINED_AT_ONCE // numbers))

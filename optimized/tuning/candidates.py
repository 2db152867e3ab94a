"""Candidates of a choice: the values that are tried, and those that no program could hold."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

from ..kernels.portable.host.cost import FLOP_PER_US
from ..kernels.portable.host.decode_sizes import estimate_shared_memory
from ..kernels.portable.host.tuning import Tiles
from ..kernels.portable.tables.kernel_tables import TileKey

MOST_REGISTERS = 224
"""Registers of a thread that a tile of scores and the accumulator take, at most. A thread has 255,
and the rest is needed too."""
BLOCK_N = (16, 32, 64, 128, 256)
WARPS = (2, 4, 8)
STAGES = {True: (1, 2, 3, 5, 7), False: (1, 2, 3, 4, 5)}
"""Pipeline stages, of loads through the block table and others. An even number of the first has as
many KV tiles in flight as the odd one before it; 2 only lets the block table be read ahead."""
PROGRAMS = {"decode": (1, 2, 3, 4), "small batch": (1, 2), "append": (1, 2)}


class Space(Protocol):
    """The values of a choice."""

    def neighbours(self, value: Any) -> list[Any]:
        """Return the values that differ from a value in one step."""

    def grid(self) -> list[Any]:
        """Return all values."""


@dataclass(frozen=True)
class TileSpace:
    """Tiles of a key on a chip.

    Args:
        key: the key.
        default: the tiles that are used without tables.
        programs: programs per SM that these stand for; 0 for prefills.
        shared_memory: bytes that one program may have; 0 if any number fits.
    """

    key: TileKey
    default: Tiles
    programs: int
    shared_memory: int

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """The values of each field that are tried."""
        is_prefill = self.key.role == "prefill"
        return {
            "block_m": tuple(FLOP_PER_US) if is_prefill else (self.default.block_m,),
            "block_n": BLOCK_N,
            "num_warps": WARPS,
            "num_stages": STAGES[self.key.is_paged],
            "programs": PROGRAMS.get(self.key.role, (0,)),
        }

    def neighbours(self, value: Tiles) -> list[Tiles]:
        """Return the tiles that differ in one step of one field, and that fit."""
        found = []
        for name, axis in self.axes.items():
            here = getattr(value, name)
            if name == "programs":
                # the default stands for a number without naming it
                here = here or self.programs
            below = [other for other in axis if other < here][-1:]
            above = [other for other in axis if other > here][:1]
            found += [replace(value, **{name: other}) for other in (*above, *below)]
        return [tiles for tiles in found if self.fits(tiles)]

    def grid(self) -> list[Tiles]:
        """Return all tiles that fit."""
        axes = self.axes
        tiles = (
            Tiles(**dict(zip(axes, chosen, strict=True)))
            for chosen in product(*axes.values())
        )
        return [one for one in tiles if self.fits(one)]

    def fits(self, tiles: Tiles) -> bool:
        """Return whether a program may have the registers and the shared memory."""
        rows = self.key.rows or tiles.block_m
        numbers = rows * (tiles.block_n + self.key.value_size)
        if numbers > MOST_REGISTERS * 32 * tiles.num_warps:
            return False
        taken = estimate_shared_memory(self.key, tiles)
        return self.shared_memory == 0 or taken <= self.shared_memory


@dataclass(frozen=True)
class NumberSpace:
    """Values of a threshold: powers of two times the default.

    Args:
        default: the value that is used without tables. If it is an integer, all values are.
    """

    default: float

    def neighbours(self, value: float) -> list[float]:
        """Return the next smaller value, and the next larger one."""
        grid = self.grid()
        index = grid.index(value)
        return [*grid[max(0, index - 1) : index], *grid[index + 1 : index + 2]]

    def grid(self) -> list[float]:
        """Return all values."""
        kind = type(self.default)
        values = (kind(self.default * 2.0**exponent) for exponent in range(-2, 3))
        return [value for value in values if value]

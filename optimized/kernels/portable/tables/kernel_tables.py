"""Tables of a device: the choices of the portable kernels that `pagetwin tune` measures.

The default tables are the constants of host/tuning.py and host/cost.py. A tuning file adds tiles
for some kinds of calls, and replaces thresholds and rates. Calls with batch-invariant rows always
have the default tables, so their bits do not depend on a file.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ..host.cost import Rates
from ..host.tuning import Thresholds, Tiles

ROLES = ("decode", "small batch", "append", "prefill")
"""Kernels that have tiles: decodes, decodes too few to fill the chip, split requests of any number
of rows, and prefills."""


class TileKey(NamedTuple):
    """Everything that decides whether a tile fits a chip, and nearly everything its time needs.

    Args:
        role: one of ROLES.
        rows: rows of the tile. 0 for prefills, which choose their own.
        head_size, value_size: elements of a key and of a value, rounded up to a power of two.
        query_bytes: bytes of an element of the queries.
        cache_format: name of the cache's format.
        is_paged: whether loads go through the block table.
        options: "window", "bias" and "tree", as far as a call has them.
    """

    role: str
    rows: int
    head_size: int
    value_size: int
    query_bytes: int
    cache_format: str
    is_paged: bool
    options: tuple[str, ...]


@dataclass(frozen=True)
class KernelTables:
    """Tiles, thresholds and rates of the portable kernels on a device.

    Args:
        tiles: tiles that replace the default ones, for calls with exactly this key.
        thresholds: limits between kernels.
        rates: rates of the cost model.
    """

    tiles: tuple[tuple[TileKey, Tiles], ...] = ()
    thresholds: Thresholds = field(default_factory=Thresholds)
    rates: Rates = field(default_factory=Rates)

    @cached_property
    def _by_key(self) -> dict[TileKey, Tiles]:
        return dict(self.tiles)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the contents; "default" for the default tables."""
        if self == DEFAULT:
            return "default"
        known = (sorted(self.tiles, key=repr), self.thresholds, self.rates)
        return hashlib.sha256(repr(known).encode()).hexdigest()[:12]

    def find(self, key: TileKey, default: Tiles) -> Tiles:
        """Return the tiles of a key, or the given ones if the tables do not have it."""
        return self._by_key.get(key, default)

    def with_tiles(self, key: TileKey, tiles: Tiles) -> "KernelTables":
        """Return tables in which a key has these tiles."""
        return replace(self, tiles=(*(self._by_key | {key: tiles}).items(),))


DEFAULT = KernelTables()

"""Rows of a tuning file: what was measured of one choice, as JSON and as a change of the tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

from .....contract.cache_formats import FORMATS
from ..host.cost import FLOP_PER_US, Rates
from ..host.tuning import MAX_HEAD_SIZE, Thresholds, Tiles
from .kernel_tables import ROLES, KernelTables, TileKey

Choice: TypeAlias = Tiles | Rates | int | float
POWERS = tuple(1 << exponent for exponent in range(4, 9))
WARPS = (1, 2, 4, 8, 16)
MOST_STAGES = MOST_PROGRAMS = 8
OPTIONS = ("bias", "tree", "window")
LARGEST = 1e12


@dataclass(frozen=True)
class TunedRow:
    """One choice that was measured.

    Args:
        key: of tiles, or the name of a threshold, or "rates".
        default, choice: what the default tables have, and what was chosen.
        default_us, choice_us: median microseconds with both, by workload. They were measured in
            alternation.
    """

    key: TileKey | str
    default: Choice
    choice: Choice
    default_us: Mapping[str, float] = field(default_factory=dict)
    choice_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The row in words."""
        if isinstance(self.key, str):
            return self.key.replace("_", " ")
        key = self.key
        heads = "/".join(map(str, dict.fromkeys((key.head_size, key.value_size))))
        rows = f", {key.rows} rows" if key.rows else ""
        cache = "" if key.cache_format == "auto" else f", {key.cache_format}"
        options = "".join(f", {option}" for option in key.options)
        return f"{key.role}{rows}, heads of {heads}{cache}{options}"

    @property
    def ratio(self) -> float:
        """The geometric mean of the workloads' ratios of both times; 1 if nothing was changed."""
        ratios = [
            self.choice_us[name] / default for name, default in self.default_us.items()
        ]
        if self.choice == self.default or not ratios:
            return 1.0
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    def change(self, tables: KernelTables) -> KernelTables:
        """Return tables with this choice."""
        return change_tables(tables, self.key, self.choice)

    def to_record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            "name": self.name,
            "ratio": round(self.ratio, 4),
            "key": self.key if isinstance(self.key, str) else _key_record(self.key),
            "default": _plain(self.default),
            "choice": _plain(self.choice),
            "default_us": dict(self.default_us),
            "choice_us": dict(self.choice_us),
        }


def change_tables(
    tables: KernelTables, key: TileKey | str, choice: Any
) -> KernelTables:
    """Return tables in which a key has a choice."""
    if isinstance(key, TileKey):
        return tables.with_tiles(key, choice)
    if key == "rates":
        return replace(tables, rates=choice)
    return replace(tables, thresholds=replace(tables.thresholds, **{key: choice}))


def _key_record(key: TileKey) -> dict[str, Any]:
    return key._asdict() | {"options": list(key.options)}


def _plain(choice: Choice) -> Any:
    return choice if isinstance(choice, int | float) else asdict(choice)


def parse_row(record: Any, place: str) -> TunedRow:
    """Return a row of a file.

    Args:
        place: where the row is, for errors.

    Raises:
        ValueError: a field is missing or unknown, or has a value that no kernel takes.
    """
    names = ("name", "ratio", *(field.name for field in fields(TunedRow)))
    found = _fields(record, names, place)
    key = _parse_key(found["key"], f"{place}.key")
    default, choice = (
        _parse_choice(key, found[name], f"{place}.{name}")
        for name in ("default", "choice")
    )
    times = []
    for name in ("default_us", "choice_us"):
        given = _expect(
            isinstance(found[name], dict),
            found[name],
            f"{place}.{name}",
            "times by workload",
        )
        times.append(
            {
                str(workload): _number(us, f"{place}.{name}")
                for workload, us in given.items()
            }
        )
    _expect(
        times[0].keys() == times[1].keys(),
        sorted(times[1]),
        f"{place}.choice_us",
        "the workloads of default_us",
    )
    return TunedRow(key, default, choice, *times)


def _parse_key(given: Any, place: str) -> TileKey | str:
    if isinstance(given, str):
        names = ("rates", *(field.name for field in fields(Thresholds)))
        return str(_one_of(given, names, place))
    found = _fields(given, TileKey._fields, place)
    sizes = tuple(1 << exponent for exponent in range(4, MAX_HEAD_SIZE.bit_length()))
    for name, known in (
        ("role", ROLES),
        ("rows", (0, *POWERS)),
        ("head_size", sizes),
        ("value_size", sizes),
        ("query_bytes", (2, 4)),
        ("cache_format", tuple(FORMATS)),
        ("is_paged", (False, True)),
    ):
        _one_of(found[name], known, f"{place}.{name}")
    options = found["options"]
    is_known = isinstance(options, list) and options == [
        option for option in OPTIONS if option in options
    ]
    _expect(
        is_known, options, f"{place}.options", f"some of {list(OPTIONS)}, in this order"
    )
    return TileKey(**found | {"options": tuple(options)})


def _parse_choice(key: TileKey | str, given: Any, place: str) -> Choice:
    if key == "rates":
        found = _fields(given, [field.name for field in fields(Rates)], place)
        flops = found.pop("flop_per_us")
        is_list = isinstance(flops, list) and len(flops) == len(FLOP_PER_US)
        _expect(is_list, flops, f"{place}.flop_per_us", f"{len(FLOP_PER_US)} numbers")
        numbers = {
            name: _number(value, f"{place}.{name}") for name, value in found.items()
        }
        return Rates(tuple(_number(flop, place) for flop in flops), **numbers)
    if isinstance(key, str):
        number = _number(given, place)
        is_whole = type(getattr(Thresholds(), key)) is int
        _expect(not is_whole or type(given) is int, given, place, "an integer")
        return number
    found = _fields(given, [field.name for field in fields(Tiles)], place)
    for name, known in (
        ("block_m", POWERS),
        ("block_n", POWERS),
        ("num_warps", WARPS),
        ("num_stages", range(1, MOST_STAGES + 1)),
        ("programs", range(MOST_PROGRAMS + 1)),
    ):
        _one_of(found[name], known, f"{place}.{name}")
    tiles = Tiles(**found)
    if key.role == "prefill":
        _one_of(tiles.block_m, tuple(FLOP_PER_US), f"{place}.block_m")
    if key.role == "append":
        _one_of(tiles.block_m, (key.rows,), f"{place}.block_m")
    return tiles


def _fields(given: Any, names: Sequence[str], place: str) -> dict[str, Any]:
    is_whole = isinstance(given, dict) and given.keys() == {*names}
    shown = sorted(given) if isinstance(given, dict) else given
    _expect(is_whole, shown, place, f"the fields {', '.join(names)}")
    return dict(given)


def _one_of(given: Any, known: Sequence[Any], place: str) -> Any:
    is_known = any(type(given) is type(value) and given == value for value in known)
    return _expect(is_known, given, place, f"one of {', '.join(map(str, known))}")


def _number(given: Any, place: str) -> float:
    is_number = type(given) in (int, float) and 0 < given < LARGEST
    number: float = _expect(is_number, given, place, "a number above 0")
    return number


def _expect(is_right: bool, given: Any, place: str, expected: str) -> Any:
    if not is_right:
        shown = repr(given)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ValueError(f"{place} = {shown}: expected {expected}")
    return given

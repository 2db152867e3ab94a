"""Tuning files: which chip and kernels they were measured with, and whether they fit here."""

import hashlib
import json
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch

from .....contract.tested_versions import installed
from ....runtime.chip import describe_chip
from ..host.decode_sizes import estimate_shared_memory
from ..host.tuning import Tiles
from .kernel_tables import DEFAULT, KernelTables, TileKey
from .tuned_rows import TunedRow, parse_row

LAYOUT = 1
"""Number of the layout of these files. Files with another number are not read."""
LARGEST_FILE = 1 << 22
ADVICE = "run `pagetwin tune` on this machine"


@cache
def hash_kernels() -> str:
    """Return twelve hexadecimal digits of the sources of the portable kernels."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def describe_measured(device: torch.device) -> dict[str, Any]:
    """Return the chip and the versions that the times of a file depend on, as JSON."""
    return {
        "chip": describe_chip(device)._asdict(),
        "versions": {name: installed(name) for name in ("pagetwin", "triton")},
        "kernels": hash_kernels(),
    }


def read_tables(path: Path, device: torch.device) -> KernelTables:
    """Return the tables of a tuning file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a tuning file, has another layout, or was measured on another chip
            or with other versions or kernels; or a row has tiles that do not fit the chip.
    """
    record = _read(path)
    measured = describe_measured(device)
    for name in ("chip", "versions"):
        given = record.get(name)
        for field, expected in measured[name].items():
            found = given.get(field) if isinstance(given, dict) else None
            if found != expected:
                of_file = f"{name}.{field}" if name == "chip" else field
                raise ValueError(
                    f"tuning file {path} is for {of_file} = {found!r}: expected {expected!r},"
                    f" which is here; {ADVICE}"
                )
    if record.get("kernels") != measured["kernels"]:
        raise ValueError(
            f"tuning file {path} was measured with other kernels of pagetwin"
            f" ({record.get('kernels')!r}, not {measured['kernels']!r}); {ADVICE}"
        )
    rows = read_rows(record, path)
    for row in rows:
        if isinstance(row.key, TileKey) and isinstance(row.choice, Tiles):
            _check_memory(row.key, row.choice, measured["chip"]["shared_memory"], path)
    return reduce(lambda tables, row: row.change(tables), changed(rows), DEFAULT)


def changed(rows: list[TunedRow]) -> list[TunedRow]:
    """Return the rows whose choice is not the default."""
    return [row for row in rows if row.choice != row.default]


def read_rows(record: dict[str, Any], path: Path) -> list[TunedRow]:
    """Return the rows of a tuning file.

    Raises:
        ValueError: a row is not one, or two have the same key.
    """
    given = record.get("rows")
    if not isinstance(given, list):
        raise ValueError(f"tuning file {path} has no list of rows; {ADVICE}")
    try:
        rows = [parse_row(row, f"rows[{index}]") for index, row in enumerate(given)]
    except ValueError as error:
        raise ValueError(f"tuning file {path}: {error}") from None
    keys = [row.key for row in rows]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise ValueError(
                f"tuning file {path}: rows[{index}] has the key of an earlier row: expected one"
                " row per key"
            )
    return rows


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON of a tuning file with this layout."""
    with path.open("rb") as file:
        text = file.read(LARGEST_FILE + 1)
    if len(text) > LARGEST_FILE:
        raise ValueError(
            f"{path} has more than {LARGEST_FILE:,} bytes: expected a tuning file; {ADVICE}"
        )
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or "layout" not in record:
        raise ValueError(
            f"{path} is not a tuning file: expected JSON with a layout; {ADVICE}"
        )
    if record["layout"] != LAYOUT:
        raise ValueError(
            f"tuning file {path} has layout {record['layout']!r}: expected {LAYOUT}; {ADVICE}"
        )
    return record


def _check_memory(key: TileKey, tiles: Tiles, most: int, path: Path) -> None:
    """Raise if a chip has too little shared memory for a tile; the interpreter has any."""
    taken = estimate_shared_memory(key, tiles)
    if most and taken > most:
        raise ValueError(
            f"tuning file {path}: {key.role} tiles of {tiles.block_m} x {tiles.block_n} with"
            f" {tiles.num_stages} stages take {taken:,} bytes of shared memory: expected at most"
            f" {most:,}, which this chip has; {ADVICE}"
        )

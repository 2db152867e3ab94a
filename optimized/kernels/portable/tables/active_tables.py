"""The tables of each device: from a loaded file, from the environment, or the default ones.

The first plan on a device decides. `PAGETWIN_TUNING` names a file, which has to fit the device, or
is "off". Without it, the file of the chip in the cache folder is read if there is one. If that does
not fit, a warning says why, and the default tables are used: a file that was only
found must not stop a server.
"""

import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ....runtime.chip import Chip, describe_chip
from ....runtime.launcher import INTERPRETED
from . import kernel_tables
from .kernel_tables import KernelTables
from .tuning_file import read_tables

VARIABLE = "PAGETWIN_TUNING"
OFF = "off"


class ActiveTables(NamedTuple):
    """Tables that are in use.

    Args:
        tables: the tables. If None, the default ones.
        path: Optional. The file that they were read from.
    """

    tables: KernelTables | None = None
    path: Path | None = None


class _Trial(threading.local):
    """Tables that this thread tries instead of the active ones; None if it does not."""

    tables: KernelTables | None = None


_ACTIVE: dict[tuple[str, int], ActiveTables] = {}
_LOCK = threading.Lock()
_TRIAL = _Trial()


def find_tables(device: torch.device, is_invariant: bool = False) -> KernelTables:
    """Return the tables from which a plan on a device is made.

    Args:
        is_invariant: whether rows are batch-invariant. Their tables are always the default ones.

    Raises:
        ValueError, OSError: the file that PAGETWIN_TUNING names does not fit, or cannot be read.
    """
    if is_invariant:
        return kernel_tables.DEFAULT
    return _TRIAL.tables or find_active(device).tables or kernel_tables.DEFAULT


def find_active(device: torch.device) -> ActiveTables:
    """Return the tables in use on a device, and the file that they are from.

    Raises:
        ValueError, OSError: as `find_tables`.
    """
    key = _key_of(device)
    active = _ACTIVE.get(key)
    if active is None:
        with _LOCK:
            active = _ACTIVE.get(key)
            if active is None:
                active = _ACTIVE[key] = _choose(device)
    return active


def activate(device: torch.device, active: ActiveTables) -> None:
    """Use tables for all plans on a device that are made from now on."""
    with _LOCK:
        _ACTIVE[_key_of(device)] = active


@contextmanager
def trying(tried: KernelTables) -> Iterator[None]:
    """Make plans from these tables within this context, in this thread.

    The caller keeps them: a call of `paged_attention` in the context would be planned for all.
    """
    before, _TRIAL.tables = _TRIAL.tables, tried
    try:
        yield
    finally:
        _TRIAL.tables = before


def cache_file(chip: Chip) -> Path:
    """Return the path of a chip's file in the cache folder.

    Example:
        ~/.cache/pagetwin/tuning/nvidia-h200-132.json, of a chip with 132 multiprocessors.
    """
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    name = re.sub(r"[^a-z0-9]+", "-", chip.name.lower()).strip("-")
    return Path(root, "pagetwin", "tuning", f"{name}-{chip.multiprocessors}.json")


def _key_of(device: torch.device) -> tuple[str, int]:
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return device.type, index


def _choose(device: torch.device) -> ActiveTables:
    """Return the tables of a device for which none were loaded."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() == OFF:
        return ActiveTables()
    if given:
        path = Path(given).expanduser()
        return ActiveTables(read_tables(path, device), path)
    if INTERPRETED or device.type != "cuda":
        return ActiveTables()
    try:
        path = cache_file(describe_chip(device))
    except RuntimeError:  # without a home folder
        return ActiveTables()
    try:
        if not path.exists():
            return ActiveTables()
        return ActiveTables(read_tables(path, device), path)
    except (ValueError, OSError) as error:
        warnings.warn(
            f"{error}; the default tables are used (PAGETWIN_TUNING=off ends this warning)",
            stacklevel=2,
        )
        return ActiveTables()

"""Loading and unloading of tuning files."""

import os
from pathlib import Path

import torch

from ...contract.tuning_classes import TuningInUse
from ..dispatch import cascade, dispatch
from ..kernels.portable.tables import kernel_tables
from ..kernels.portable.tables.active_tables import ActiveTables, activate, find_active
from ..kernels.portable.tables.tuning_file import read_tables


def load_tuning(
    path: str | os.PathLike[str] | None, device: torch.device | str = "cuda"
) -> TuningInUse:
    """Make all further plans on a device from the tables of a tuning file.

    Plans that were made before are dropped, so the next calls compile what they need; `warm_up`
    compiles it in advance. A captured CUDA graph keeps the kernels that it was captured with.

    Args:
        path: a file of `pagetwin tune`. If None, the default tables are used again.
        device: the device. Others keep their tables.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a tuning file, has another layout, or was measured on another chip
            or with other versions. Nothing is changed then.
    """
    device = torch.device(device)
    active = ActiveTables()
    if path is not None:
        active = ActiveTables(read_tables(Path(path), device), Path(path))
    activate(device, active)
    # after the tables: a thread that finds an empty cache plans from the new ones
    for pipeline in (dispatch.PIPELINE, cascade.PIPELINE):
        pipeline.forget_plans()
    return tuning_in_use(device)


def tuning_in_use(device: torch.device | str = "cuda") -> TuningInUse:
    """Return which tables plans on a device are made from, and the file that they are from.

    Raises:
        OSError, ValueError: the file that the environment variable PAGETWIN_TUNING names cannot be
            read, or does not fit the device.
    """
    active = find_active(torch.device(device))
    return TuningInUse(
        (active.tables or kernel_tables.DEFAULT).fingerprint, active.path
    )

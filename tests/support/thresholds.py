"""Thresholds between kernels that tests set: those of the interpreter are for small batches."""

from dataclasses import replace

import pytest
from pagetwin.optimized.kernels.portable.host import launches
from pagetwin.optimized.kernels.portable.host.tuning import Thresholds
from pagetwin.optimized.kernels.portable.tables import kernel_tables as tables

OF_A_CHIP = Thresholds(min_segment=512, short_tiles=20)
"""Those of compiled kernels."""


def set_thresholds(patch: pytest.MonkeyPatch, **changes: float) -> None:
    """Let the default tables have other thresholds, by name."""
    thresholds = replace(tables.DEFAULT.thresholds, **changes)
    default = replace(tables.DEFAULT, thresholds=thresholds)
    for module in (tables, launches):
        patch.setattr(module, "DEFAULT", default)

"""The groups of `tests/gpu/sanitized.py` launch their kernels, which needs no GPU to be seen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
RUN = """
import torch
from support.compile_kernels import pretend

pretend(90, [])
import sanitized
from pagetwin.optimized.dispatch import cascade, dispatch

torch.Tensor.isfinite = lambda tensor: torch.ones(1, dtype=torch.bool)
for name, group in sanitized.GROUPS.items():
    for family in sanitized.FAMILIES:
        family.is_hopper = lambda device: True
    dispatch.PIPELINE.plans.clear()
    cascade.PIPELINE.plans.clear()
    print(name, *sanitized.run_group(name, "cpu"))
"""


@pytest.mark.extended
def test_every_group_of_the_sanitizer_launches_its_kernels() -> None:
    """Several kernels had not run under the sanitizer, and nothing said so."""
    folders = [TESTS / "gpu", TESTS, *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment["PAGETWIN_CHECK_VALUES"] = "0"  # as for the tensors of a GPU
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 17

"""Does every kernel compile for the chips it is meant for, and does it fit their registers?

No GPU is needed: compile_kernels.py runs in a process of its own, without the interpreter, and what
it prints stands in the summary of the test run.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compile_kernels import CHIPS
from compiler_process import json_lines

SCRIPT = Path(__file__).parent / "compile_kernels.py"


def launched_kernels() -> set[str]:
    """Return the names of the portable kernels of the twin and the benchmark.

    The kernels in `sm90` have compile tests of their own.
    """
    folder = Path(__file__).parents[1] / "optimized"
    files = [
        path.relative_to(folder).with_suffix("")
        for path in folder.rglob("*.py")
        if "sm90" not in path.parts
    ]
    names = [".".join(("pagetwin.optimized", *file.parts)) for file in files]
    return {
        name
        for module in (*names, "pagetwin.tools.bench.read_kernels")
        for name, value in vars(import_module(module)).items()
        if name.endswith("_kernel") and hasattr(value, "fn")
    }


@pytest.mark.compile
# an RTX 3090 gets the tiles of an RTX 5090
@pytest.mark.parametrize("chip", [each for each in CHIPS if each != 86])
def test_every_kernel_compiles_for(
    chip: int, report_lines: Callable[..., None]
) -> None:
    lines = json_lines(SCRIPT, chip)
    for line in lines:
        report_lines(
            f"sm_{chip:<4} {line['case']:<20} {line['kernel']:<21}"
            f" {line['registers']:>3} registers {line['stack']:>4} bytes spilled"
            f" {line['shared']:>7} bytes shared {line['warps']:>2} warps"
        )
    assert {line["kernel"] for line in lines} == launched_kernels()
    for line in lines:
        assert line["shared"] <= CHIPS[chip][0], line
        # a few bytes are a few registers; more means that the tile is too large for the chip
        assert line["stack"] <= 512, line
        if line["case"].startswith(("decode, bf16", "few decodes, bf16")):
            # a few numbers may wait on the stack for a request's last key, none within its keys
            assert line["reloads"] == 0 and line["stack"] <= 16, line
            # 16 bytes at a time: an element at a time would be a copy for each of a tile's rows
            assert 0 < line["copies"] <= 64, line
        elif chip >= 90 > line["registers"]:
            # triton 3.6's ptxas sets 8 bytes aside with registers to spare
            assert line["stack"] <= 8, line


@pytest.mark.parametrize(("chip", "largest"), [(86, 512), (90, 1024)])
def test_a_head_whose_tile_does_not_fit_the_chip_is_refused(
    chip: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 head of 1,024 once asked a small chip for 128 KiB, and the launch failed."""
    tuning = import_module("pagetwin.optimized.launch.tuning")
    shared_memory, _ = CHIPS[chip]
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(shared_memory_per_block_optin=shared_memory),
    )
    device = torch.device("cuda", 7)  # asked about nowhere else: answers are remembered
    tuning._table.cache_clear()
    try:
        assert tuning.max_head_size(torch.float32, device) == largest
        assert tuning.max_head_size(torch.bfloat16, device) == 1024
    finally:
        tuning._table.cache_clear()

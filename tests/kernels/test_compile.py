"""Does every kernel compile for the chips it is meant for, and does it fit their registers?

No GPU is needed: compile_kernels.py runs in a process of its own, without the interpreter, and what
it prints is in the summary of the test run.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.compile_kernels import CHIPS
from support.compiler_process import json_lines

SCRIPT = Path(__file__).parents[1] / "support/compile_kernels.py"


def launched_kernels() -> set[str]:
    """Return the names of the portable kernels of the twin and the benchmark.

    The kernels in `sm90` have compile tests of their own.
    """
    folder = Path(__file__).parents[2] / "optimized"
    former = folder / "launch.py"  # raises, and says where its modules are now
    files = [
        path.relative_to(folder).with_suffix("")
        for path in folder.rglob("*.py")
        if "sm90" not in path.parts and path != former
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
@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip != 86])
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
        elif line["case"].startswith("latents, bf16") and "reloads" in line:
            # 64 rows take what a thread has, and nothing in the loop waits on the stack
            assert line["reloads"] == 0, line
            assert 0 < line["copies"] <= 64, line
        elif chip >= 90 > line["registers"]:
            # ptxas sets bytes aside with registers to spare, which no instruction may use
            assert line["spills"] == 0, line


@pytest.mark.parametrize(("chip", "largest"), [(86, 512), (90, 1024)])
def test_a_head_whose_tile_does_not_fit_the_chip_is_rejected(
    chip: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 head of 1,024 once asked a small chip for 128 KiB, and the launch failed."""
    tuning = import_module("pagetwin.optimized.kernels.portable.host.tuning")
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


ROWS_OF_A_TOKEN = [
    # chip, query heads per kv head, padded head sizes, dtype, rows of a decode tile
    (86, 48, (128, 128), torch.bfloat16, 64),
    (86, 16, (1024, 1024), torch.bfloat16, 16),
    (86, 32, (1024, 512), torch.bfloat16, 32),
    (86, 64, (1024, 512), torch.bfloat16, 0),
    (80, 64, (1024, 512), torch.bfloat16, 64),
    (90, 64, (1024, 1024), torch.bfloat16, 0),
    (90, 65, (64, 64), torch.bfloat16, 0),
    (80, 1, (1024, 1024), torch.float32, 16),
    (80, 32, (1024, 1024), torch.float32, 0),
    (80, 64, (512, 512), torch.float32, 0),
    (86, 16, (512, 512), torch.float32, 16),
    (86, 32, (512, 512), torch.float32, 0),
]


@pytest.mark.parametrize(("chip", "group", "sizes", "dtype", "rows"), ROWS_OF_A_TOKEN)
def test_the_rows_of_a_token_that_fit_no_decode_tile_have_none(
    chip: int,
    group: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Latents with 64 heads asked a chip with 99 KiB of shared memory for 160 KiB."""
    decode_sizes = import_module(
        "pagetwin.optimized.kernels.portable.host.decode_sizes"
    )
    tuning = import_module("pagetwin.optimized.kernels.portable.host.tuning")
    monkeypatch.setattr(decode_sizes, "INTERPRETED", False)
    monkeypatch.setattr(decode_sizes, "find_shared_memory", lambda _: CHIPS[chip][0])
    found = decode_sizes.choose_short_rows(
        group, tuning.Tiles(16, 16, 8, 1), sum(sizes), dtype, torch.device("cuda")
    )
    assert found == rows


def test_two_kv_tiles_are_in_flight_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 rows of 256 asked an A100, which has 163 KiB of shared memory, for 168.5."""
    decode_sizes = import_module(
        "pagetwin.optimized.kernels.portable.host.decode_sizes"
    )
    tuning = import_module("pagetwin.optimized.kernels.portable.host.tuning")
    monkeypatch.setattr(decode_sizes, "INTERPRETED", False)
    of_device = (torch.bfloat16, torch.device("cuda"))
    for chip, size, rows, stages in (
        (80, 256, 64, 3), (80, 256, 32, 5), (90, 256, 64, 5), (80, 128, 64, 5)
    ):  # fmt: skip
        memory = CHIPS[chip][0]
        monkeypatch.setattr(decode_sizes, "find_shared_memory", lambda _, m=memory: m)
        decode = tuning.Tiles(16, 16384 // size, 4, 3)
        deeper = tuning.Tiles(16, 16384 // size, 4, 5)
        found = decode_sizes.limit_stages(
            deeper, decode, rows, (size, size), *of_device
        )
        assert found.num_stages == stages, (chip, size, rows)

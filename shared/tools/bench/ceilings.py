"""Ceilings: the bandwidth and throughput that the GPU reaches at best.

They are measured in the run that is compared with them, because cards differ and a datasheet is not
a measurement: contiguous reads, reads of blocks through a table, copies, a matrix product, and an
empty kernel.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .timing import Stopwatch, captured
from .workloads import Workload

READ_BYTES = 4 << 30
COPY_BYTES = 2 << 30
PAGE_BYTES = 16 * 8 * 128 * 2
"""The keys of a block: 16 tokens, 8 heads of 128, 16 bits."""
MATRIX = 8192
REPEATS = 20


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings: GB (10**9 bytes) per second, TFLOP per second, microseconds.

    Args:
        read_gb_per_s: Contiguous reads of 4 GiB.
        read_pages_gb_per_s: The same, 16 tokens at a time, through a block table.
        copy_gb_per_s: Copies; bytes read plus bytes written.
        matmul_tflop_per_s: A bf16 matrix product of 8,192 cubed.
        empty_us: A graph with one kernel that stores a number.
    """

    read_gb_per_s: float
    read_pages_gb_per_s: float
    copy_gb_per_s: float
    matmul_tflop_per_s: float
    empty_us: float

    def floor(self, workload: Workload) -> tuple[float, str]:
        """Return the lower bound of a workload's time in microseconds, and what sets it.

        Example:
            read 4,000 GB/s, matmul 800 TFLOP/s, empty 4 us; 1.2 GB and 80 GFLOP: 300 us of
            reads, 100 us of operations, so (300.0, "reads").
        """
        what, rate = "reads", self.read_gb_per_s
        if workload.kind == "write":
            what, rate = "copies", self.copy_gb_per_s
        floors = {
            what: workload.bytes / rate / 1e3,
            "operations": workload.flops / self.matmul_tflop_per_s / 1e6,
            "launch": self.empty_us,
        }
        what = max(floors, key=lambda floor: floors[floor])
        return floors[what], what

    def to_record(self) -> dict[str, float]:
        """Return all ceilings as JSON."""
        return {name: round(value, 2) for name, value in asdict(self).items()}


def measure_ceilings(stopwatch: Stopwatch) -> Ceilings:
    """Return the ceilings of the current GPU."""
    # triton is optional, and needed on a GPU only
    from . import read_kernels

    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    programs = read_kernels.PROGRAMS_PER_SM * processors
    sums = torch.zeros(programs, dtype=torch.int32, device=device)
    source = torch.randint(0, 99, (READ_BYTES // 4,), dtype=torch.int32, device=device)
    pages = source.view(-1, PAGE_BYTES // 4)
    table = torch.randperm(len(pages), device=device).int()
    halves = source.view(2, -1)
    one, other = (
        torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    product = torch.empty_like(one)
    assert halves[0].nbytes == COPY_BYTES
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: read_kernels.read(source, sums),
        "read_pages": lambda: read_kernels.read_pages(pages, table, sums),
        "copy": lambda: halves[0].copy_(halves[1]),
        "matmul": lambda: torch.mm(one, other, out=product),
        "empty": lambda: read_kernels.do_nothing(sums),
    }
    us = {}
    for name, call in calls.items():
        call()
        stopwatch.wait()
        graph = captured(call)
        timed = call if graph is None else graph.replay
        us[name] = statistics.median(stopwatch.time(timed) for _ in range(REPEATS))
    return Ceilings(
        read_gb_per_s=READ_BYTES / us["read"] / 1e3,
        read_pages_gb_per_s=READ_BYTES / us["read_pages"] / 1e3,
        copy_gb_per_s=2 * COPY_BYTES / us["copy"] / 1e3,
        matmul_tflop_per_s=2 * MATRIX**3 / us["matmul"] / 1e6,
        empty_us=us["empty"],
    )

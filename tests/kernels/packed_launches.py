"""Print what calls with groups of five give the driver, on a machine without a GPU.

    PYTHONPATH=tests python tests/kernels/packed_launches.py FOLDER

FOLDER gets the pretended driver, as in direct_launches.py. One JSON object per length of the
requests: how many tensor maps of a launch have the box of 12 tokens and 5 heads, and how many that
of 8 and 8, which Triton's type declares; whether the third call is repeated; and how many of the
former a launch has while a profiler is on.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # tensors on the host stand for those of a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"

import json
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from support.direct_launches import empty, pretend, read_log, vector

REQS = 28
TRUE_BOX, TYPE_BOX = (64, 5, 12), (64, 8, 8)


def count_maps(log: bytes, box: tuple[int, int, int]) -> int:
    """Return how many tensor maps have a box of these columns, heads and tokens."""
    return log.count(struct.pack("<3Q", *box))


def main(folder: Path) -> None:
    """Print what this module says."""
    driver = pretend(folder)
    import pagetwin.optimized as twin
    from pagetwin.optimized.dispatch import pipeline
    from pagetwin.optimized.kernels.sm90.prefill import packed
    from pagetwin.optimized.runtime import launcher, workspace
    from pagetwin.optimized.runtime.repeat import repeated_call

    def allocate(device: Any, counters: int, numbers: int) -> Any:
        return torch.zeros(counters, dtype=torch.int32), torch.empty(numbers)

    planned: list[Any] = []
    attend_anew = pipeline._attend_anew

    def note(*given: Any) -> Any:
        planned.append(1)
        return attend_anew(*given)

    changed: Any = pipeline
    changed._attend_anew = note
    changed = workspace
    changed._allocate = allocate
    changed.make_kept = lambda make, device: make()
    for length in (37, 128):
        query, out = (empty(REQS * length, 10, 128) for _ in range(2))
        caches = [empty(60, 16, 2, 128) for _ in range(2)]
        table = empty(REQS, 70, dtype=torch.int32)
        starts = vector([length * index for index in range(REQS + 1)])
        lens = vector([300] * REQS)
        logs = []
        for _ in range(3):
            planned.clear()
            twin.paged_attention(
                query, *caches, table, starts, lens, length, 300, out=out
            )
            logs.append(read_log(driver))
        is_repeated = not planned
        modules: tuple[Any, ...] = (launcher, packed, repeated_call)
        own = [module.is_profiled for module in modules]
        for module in modules:
            module.is_profiled = lambda: True
        twin.paged_attention(query, *caches, table, starts, lens, length, 300, out=out)
        for module, is_profiled in zip(modules, own, strict=True):
            module.is_profiled = is_profiled
        line = {
            "length": length,
            "true": [count_maps(log, TRUE_BOX) for log in logs],
            "type": [count_maps(log, TYPE_BOX) for log in logs],
            "is_repeated": is_repeated,
            "profiled": count_maps(read_log(driver), TRUE_BOX),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Compilation of every rung for a GPU, without one: registers, spills, shared memory.

    PYTHONPATH=.typing python tests/benchmarks/ladder/compile_rungs.py [90]

Each rung's launches are recorded on a tiny batch and compiled with its real settings. Prints one
JSON object per line: rung, kernel, registers, stack bytes (spills), shared memory, warps,
seconds.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from pagetwin.examples.ladder.batches import random_batch
from pagetwin.examples.ladder.rungs import RUNGS
from support.compile_kernels import compile_launch, pretend


def main(chip: int) -> None:
    """Compile the kernels of all rungs; compile_kernels.py compiles what ships."""
    launches: list[Any] = []
    pretend(chip, launches)
    heads = (32, 8, 128)
    batches = {
        "decode": random_batch((1,) * 2, (99, 20), heads, torch.bfloat16, "cpu"),
        "prefill": random_batch((99, 2), (99, 20), heads, torch.bfloat16, "cpu"),
    }
    for rung in RUNGS:
        if rung.file == "shipped":
            continue
        batch = batches[rung.kind]
        launches.clear()
        rung.prepare(batch, torch.empty_like(batch.query))()
        for kernel, values, options in launches:
            used = compile_launch(kernel, values, options, chip)
            del used["cubin"]
            line = {"rung": rung.name, "kernel": kernel.__name__} | used
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 90)

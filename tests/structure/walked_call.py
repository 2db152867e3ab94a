"""Prints the functions that a decode enters on its way from `paged_attention` to the launch.

    PYTHONPATH=tests python tests/structure/walked_call.py

Without a GPU: Triton's driver is replaced, and the launch itself is not made. The call is planned,
but not repeated. It prints one JSON value: for each function the folder of `optimized/` that calls
it, its own folder, and its name.
"""

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from support.compile_kernels import pretend

ROOT = Path(__file__).parents[2]
FLOORS = ("attention", "dispatch", "kernels", "runtime")
"""Folders of `optimized/` that a call goes through, from the first one to the last."""


def decode() -> dict[str, Any]:
    """Return the arguments of a decode of three requests."""
    rows = torch.zeros(3, 8, 64, dtype=torch.float16)
    cache = torch.zeros(2, 60, 16, 2, 64, dtype=torch.float16)
    return {
        "query": rows,
        "key_cache": cache[0],
        "value_cache": cache[1],
        "block_table": torch.zeros(3, 20, dtype=torch.int32),
        "query_start_loc": torch.arange(4, dtype=torch.int32),
        "seq_lens": torch.full((3,), 300, dtype=torch.int32),
        "max_query_len": 1,
        "max_seq_len": 300,
        "out": torch.zeros_like(rows),
    }


def floor_of(frame: FrameType) -> str:
    """Return the folder of `optimized/` that a function is in, "shared", or "" elsewhere."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    top, *inner = path.relative_to(ROOT).parts
    if top == "optimized" and inner[0] in FLOORS:
        return inner[0]
    return top if top == "shared" else ""


def walk() -> list[tuple[str, str, str]]:
    """Return the functions that a planned decode enters: floors of the caller and of each one."""
    pretend(90, [])
    # as for tensors on a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"
    import pagetwin.optimized as twin
    from pagetwin.optimized.dispatch.dispatch import PIPELINE
    from pagetwin.optimized.runtime.launcher import Launcher

    call: Any = Launcher.__call__
    launched: list[Any] = []
    replaced: Any = Launcher
    replaced.__call__ = lambda self, grid, *_: launched.append(grid)
    found: list[tuple[str, str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        floor = floor_of(frame)
        if event == "call" and floor and not launched:
            caller = frame.f_back
            while caller is not None and not floor_of(caller):
                caller = caller.f_back
            name = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
            found.append(("" if caller is None else floor_of(caller), floor, name))

    for _ in range(2):
        # the second call is planned, and would be repeated after it was recorded
        PIPELINE.plans.repeats.clear()
        launched.clear()
        found.clear()
        sys.setprofile(note)
        twin.paged_attention(**decode())
        sys.setprofile(None)
    replaced.__call__ = call
    return found


if __name__ == "__main__":
    print(json.dumps(walk()))

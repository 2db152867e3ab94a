"""Print how a tuning run compiles candidates, with a compiler and a driver that do nothing.

    PYTHONPATH=tests:tests/launch python tests/tuning/tuned_ahead.py

Tensors are on the host and an H100 is pretended, so Triton's own launch runs, as in
tests/launch/compiled_ahead.py. Kernels with 8 warps cannot be compiled. One JSON object: how many
candidates were timed and left out, the warps and programs that were chosen, how many kernels
threads compiled, how many the main thread compiled, and which names those had.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # tensors on the host stand for those of a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"
    os.environ["PAGETWIN_TUNING"] = "off"

import json
from importlib import import_module
from typing import Any

import torch
from compiled_ahead import DEVICE, Machine, start
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.tuning_classes import TuningCase, TuningInputs, TuningJob
from support.scripted_clock import ScriptedClock

WARPS_THAT_FAIL = 8


class PickyMachine(Machine):
    """A compiler that fails for one number of warps."""

    def compile(self, src: Any, target: Any, options: Any, **named: Any) -> Any:
        """Return what Triton's compiler returns, without code."""
        if options["num_warps"] == WARPS_THAT_FAIL:
            raise RuntimeError("too many warps")
        return super().compile(src, target, options, **named)


def make_inputs() -> TuningInputs:
    """Return 40 decodes, whose results are right whatever they are."""
    reqs, keys = 40, 512
    query = torch.zeros(reqs, 32, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 64, 16, 8, 128, dtype=torch.bfloat16)
    arguments = {
        "query": query,
        "key_cache": cache[0],
        "value_cache": cache[1],
        "block_table": torch.zeros(reqs, keys // 16, dtype=torch.int32),
        "query_start_loc": torch.arange(reqs + 1, dtype=torch.int32),
        "seq_lens": torch.full((reqs,), keys, dtype=torch.int32),
        "max_query_len": 1,
        "max_seq_len": keys,
        "out": torch.empty_like(query),
        "options": AttentionOptions(),
    }
    return TuningInputs(arguments, lambda out: "")


def prefer(value: Any) -> float:
    """Return a time that falls with warps and programs."""
    return 100.0 - value.num_warps - 3 * (value.programs or 2)


def main() -> None:
    """Tune decodes."""
    machine = PickyMachine()
    twin = start(machine)
    ahead = import_module("pagetwin.optimized.runtime.compile_ahead")
    gpu = torch.device("cuda", DEVICE)
    trial: Any = import_module("pagetwin.optimized.tuning.trial")
    trial.launch_compiled = lambda launch, number, device: ahead.launch_compiled(
        launch, number, gpu
    )
    run: Any = import_module("pagetwin.optimized.tuning.tune")
    run.check_launch = lambda tensor: None
    case = TuningCase("40 x 512", make_inputs)
    report = twin.tune_kernels(
        [TuningJob("decode", (case,))], ScriptedClock(prefer), 1e6, gpu
    )
    (row,) = report.record["rows"]
    in_main = [name for name, is_main, _ in machine.compiled if is_main]
    line = {
        "tried": report.tried,
        "skipped": report.skipped,
        "wrong": report.wrong,
        "ended": report.ended,
        "chip": report.record["chip"],
        "choice": row["choice"],
        "in_threads": len(machine.compiled) - len(in_main),
        "in_main": len(in_main),
        "launched": len(machine.launched),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()

"""The recorder on a GPU: clean steps raise nothing, planted bugs are found, and what it costs.

    python tests/gpu/recorder.py OUTDIR
    python tests/gpu/recorder.py OUTDIR --only cost --cases 1      the cost alone, first case

It prints one line per check, ends with 1 if one of them is wrong, and writes the figures to
OUTDIR/recorder.json. The cost is measured on decode steps of a model with the sizes of Llama 3 8B
(random weights): captured as a CUDA graph, and eager. Steps with and without the recorder
alternate, so both have the same temperature.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_steps import BLOCK, Decoder
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import RecordedOperations, Recorder, RecorderSettings

FAULTS = {
    "": "nothing",
    "slot": "slots",
    "buffer": "graph buffers",
    "length in the graph": "attention",
    "slot in the graph": "cache write",
}
"""The faults of captured steps, and the law that each violates first."""


def make(folder: Path, every: int, **sizes: Any) -> tuple[Recorder, Decoder]:
    """Return a recorder and a decoder that it checks."""
    recorder = Recorder(RecorderSettings(folder, sample_every=every))
    run = RecordedOperations(load_implementation("optimized"), recorder)
    return recorder, Decoder(run, **sizes)


def replay(recorder: Recorder, model: Decoder, fault: str, due: int, steps: int) -> str:
    """Replay a captured step with a fault; return what is found first.

    Args:
        recorder, model: as `make` gives them.
        fault: one of FAULTS.
        due: the first step with the fault, from 1.
        steps: how many steps are replayed.
    """
    graph = model.capture(recorder)
    for step in range(1, steps + 1):
        model.advance()
        if step == due and fault == "buffer":
            model.seq_lens = model.seq_lens.clone()
        if step == due and fault == "slot":
            model.slots[3] = model.slots[1]
        recorder.begin_step(model.tensors(), replays_graph=True)
        # the kernels read other lengths than those that the recorder was told
        shorter = int(step >= due and fault == "length in the graph")
        model.seq_lens -= shorter
        # and other slots; a token of slot 0 is then not stored
        before = int(step >= due and fault == "slot in the graph")
        model.slots -= before
        graph.replay()
        model.seq_lens += shorter
        model.slots += before
    recorder.finish()
    return described(recorder)


def described(recorder: Recorder) -> str:
    """Return the law that was violated first, or why nothing was found."""
    if not recorder.is_on:
        return f"the recorder failed in step {recorder.step}"
    return recorder.findings[0].law if recorder.findings else "nothing"


def check_eager(recorder: Recorder, model: Decoder) -> str:
    """Run 40 eager decode steps; return what is found."""
    for _ in range(40):
        model.advance()
        recorder.schedule(model.scheduled(), BLOCK)
        recorder.begin_step(model.tensors())
        model.layers_forward()
    recorder.finish()
    return described(recorder)


def check(folder: Path) -> bool:
    """Print one line per check; return whether all of them gave what is expected."""
    sizes = {"reqs": 24, "seq_len": 700, "layers": 3, "with_linear": False}
    recorder, model = make(folder, 1, **sizes)
    rows = [("eager", "nothing", check_eager(recorder, model), recorder)]
    for fault, law in FAULTS.items():
        recorder, model = make(folder, 1, **sizes)
        first = replay(recorder, model, fault, due=33, steps=48)
        rows.append((f"graph, {fault or 'clean'}", law, first, recorder))
    for name, law, first, recorder in rows:
        state = "ok" if first == law else f"WRONG, expected {law}"
        found = [finding.found for finding in recorder.findings]
        print(f"{name}: {first}: {state} {recorder.checked} {found}", flush=True)
    return all(first == law for _, law, first, _ in rows)


def seconds(step: Callable[[], None], count: int) -> float:
    """Return the seconds per step of a segment."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def measure(folder: Path, graphs: bool, segments: int, **sizes: Any) -> dict[str, Any]:
    """Return milliseconds per step with and without the recorder, and its host time."""
    every = RecorderSettings(folder).sample_every
    recorder, model = make(folder, every, **sizes)
    plain, recorded = load_implementation("optimized"), model.run
    model.run = plain
    without = model.capture(None) if graphs else None
    model.run = recorded
    with_it = model.capture(recorder) if graphs else None
    host: list[float] = []

    def step_without() -> None:
        model.run = plain
        model.advance()
        if without is not None:
            without.replay()
        else:
            model.layers_forward()

    def step_with() -> None:
        model.run = recorded
        model.advance()
        began = time.perf_counter()
        recorder.schedule(next(planned), BLOCK)
        recorder.begin_step(model.tensors())
        host.append(time.perf_counter() - began)
        if with_it is not None:
            with_it.replay()
        else:
            model.layers_forward()

    times: dict[str, list[float]] = {"without": [], "with": []}
    # an engine has its rows anyway, so making them is not counted
    start, plan = model.lens.clone(), []
    for _ in range(every):
        model.lens += 1
        plan.append(model.scheduled())
    for segment in range(segments):
        model.lens.copy_(start)
        times["without"].append(seconds(step_without, every))
        model.lens.copy_(start)
        planned = iter(plan)
        # the steps without the recorder wrote to the same blocks
        recorder.blocks_changed(range(model.caches[0][0].shape[0]))
        times["with"].append(seconds(step_with, every))
        if not segment:
            times = {"without": [], "with": []}
            host.clear()
    medians = {
        name: statistics.median(measured) * 1e3 for name, measured in times.items()
    }
    return {
        "device": torch.cuda.get_device_name(),
        **sizes,
        "graphs": graphs,
        "sample_every": every,
        "ms": medians,
        "ratio": medians["with"] / medians["without"],
        "host_us": statistics.median(host) * 1e6,
        "host_us_max": max(host) * 1e6,
        "checked": recorder.checked,
        "findings": [finding.found for finding in recorder.findings],
        "is_on": recorder.is_on,
    }


COSTS = ((32, True), (16, False), (16, True))
"""Layers, and whether the steps are captured, of each measurement of the cost."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path())
    parser.add_argument("--only", choices=["checks", "cost"])
    parser.add_argument("--cases", type=int, default=len(COSTS))
    parser.add_argument(
        "--segments", type=int, default=3, help="the first is not counted"
    )
    asked = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(message).600s")
    out, folder = asked.out, asked.out / "cases"
    is_right = asked.only == "cost" or check(folder)
    rows = []
    for layers, graphs in COSTS[: 0 if asked.only == "checks" else asked.cases]:
        sizes = {"reqs": 64, "seq_len": 1024, "layers": layers, "with_linear": True}
        row = measure(folder, graphs, asked.segments, **sizes)
        rows.append(row)
        print(json.dumps(row), flush=True)
        (out / "recorder.json").write_text(json.dumps(rows, indent=1))
        torch.cuda.empty_cache()
    for case in folder.glob("*.pt"):
        case.unlink()
    raise SystemExit(0 if is_right else 1)


if __name__ == "__main__":
    main()

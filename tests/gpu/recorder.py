"""The recorder on a GPU: clean steps raise nothing, planted bugs are found, and what it costs.

    python tests/gpu/recorder.py OUTDIR
    python tests/gpu/recorder.py OUTDIR --only cost --cases 1      the cost alone, first case

It prints one line per check, and writes the figures to OUTDIR/recorder.json. The cost is measured
on decode steps of a model with the sizes of Llama 3 8B (random weights): captured as a CUDA graph,
and eager. Steps with and without the recorder alternate, so both have the same temperature.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import RecordedOperations, Recorder, RecorderSettings
from pagetwin.recorder.laws.schedule import ScheduledRow
from pagetwin.recorder.step import StepTensors

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
HIDDEN, INNER = 4096, 14336
DEVICE = "cuda"


@dataclass
class Decoder:
    """Decode steps of a model; its metadata are in persistent buffers, as in an engine.

    Args:
        run: operations, recorded or not.
        reqs, seq_len, layers: sizes; every step makes each sequence one token longer.
        with_linear: whether the layers have their projections too.
    """

    run: Any
    reqs: int
    seq_len: int
    layers: int
    with_linear: bool

    def __post_init__(self) -> None:
        width = -(-(self.seq_len + 2048) // BLOCK)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(self.reqs * width, generator=generator)
        self.rows = order.view(self.reqs, width).to(torch.int32)
        self.lens = torch.full((self.reqs,), self.seq_len, dtype=torch.int32)
        self.block_table = self.rows.to(DEVICE)
        self.seq_lens = self.lens.to(DEVICE)
        starts = torch.arange(self.reqs + 1, dtype=torch.int32)
        self.query_start_loc = starts.to(DEVICE)
        self.slots = torch.zeros(self.reqs, dtype=torch.int64, device=DEVICE)
        shape = (self.reqs * width, BLOCK, KV_HEADS, SIZE)
        self.caches = [
            tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
            for _ in range(self.layers)
        ]
        self.x = torch.randn(self.reqs, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        if self.with_linear:
            wide = (HEADS + 2 * KV_HEADS) * SIZE
            shapes = [(HIDDEN, wide), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER)]
            shapes.append((INNER, HIDDEN))
            self.weights = [
                [
                    torch.randn(each, device=DEVICE, dtype=torch.bfloat16) * 0.01
                    for each in shapes
                ]
                for _ in range(self.layers)
            ]
        # large queries give large weights, so that one key more or less can be seen in bfloat16
        self.qkv = 2 * torch.randn(
            self.reqs, HEADS + 2 * KV_HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16
        )
        self.max_seq_len = width * BLOCK

    def tensors(self) -> StepTensors:
        return StepTensors(
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.slots,
            1,
            int(self.lens.max()),
            BLOCK,
        )

    def advance(self) -> None:
        """Write the metadata of the next step to the buffers."""
        self.lens += 1
        last = self.lens.long() - 1
        blocks = self.rows.gather(1, (last // BLOCK)[:, None])[:, 0].long()
        self.seq_lens.copy_(self.lens.pin_memory(), non_blocking=True)
        self.slots.copy_(
            (blocks * BLOCK + last % BLOCK).pin_memory(), non_blocking=True
        )

    def scheduled(self) -> list[ScheduledRow]:
        """Return what a scheduler would tell about the step."""
        used = -(-int(self.lens.max()) // BLOCK)
        rows = self.rows[:, :used].tolist()
        lens = self.lens.tolist()
        return [
            ScheduledRow(index, length - 1, 1, row[: -(-length // BLOCK)])
            for index, (length, row) in enumerate(zip(lens, rows, strict=True))
        ]

    def layers_forward(self) -> None:
        """Run all layers on the buffers."""
        x = self.x
        for index, (key_cache, value_cache) in enumerate(self.caches):
            qkv = self.qkv
            if self.with_linear:
                qkv = (x @ self.weights[index][0]).view(self.reqs, -1, SIZE)
            query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            self.run.reshape_and_cache(key, value, key_cache, value_cache, self.slots)
            out = self.run.paged_attention(
                query,
                key_cache,
                value_cache,
                self.block_table,
                self.query_start_loc,
                self.seq_lens,
                1,
                self.max_seq_len,
            )
            if self.with_linear:
                x = x + out.flatten(1) @ self.weights[index][1]
                gate, up = (x @ self.weights[index][2]).chunk(2, dim=1)
                x = x + torch.nn.functional.silu(gate) * up @ self.weights[index][3]

    def capture(self, recorder: Recorder | None) -> torch.cuda.CUDAGraph:
        """Return a graph of a step."""
        self.layers_forward()
        torch.cuda.synchronize()
        if recorder is not None:
            recorder.begin_capture(self.tensors())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.layers_forward()
        return graph


def make(folder: Path, every: int, **sizes: Any) -> tuple[Recorder, Decoder]:
    """Return a recorder and a decoder that it checks."""
    recorder = Recorder(RecorderSettings(folder, sample_every=every))
    run = RecordedOperations(load_implementation("optimized"), recorder)
    return recorder, Decoder(run, **sizes)


def check_graph(folder: Path, bug: str) -> str:
    """Return the findings of 48 replays, with a bug from the 33rd on."""
    recorder, model = make(folder, 1, reqs=24, seq_len=700, layers=3, with_linear=False)
    graph = model.capture(recorder)
    for step in range(1, 49):
        model.advance()
        if bug and step == 33:
            if bug == "buffer":
                model.seq_lens = model.seq_lens.clone()
            if bug == "slot":
                model.slots[3] = model.slots[5]
        if bug == "length in the graph" and step >= 33:
            # the kernels read other lengths than those that the recorder was told
            recorder.begin_step(model.tensors(), replays_graph=True)
            model.seq_lens -= 1
            graph.replay()
            model.seq_lens += 1
            continue
        recorder.begin_step(model.tensors(), replays_graph=True)
        graph.replay()
    recorder.finish()
    found = [f"step {recorder.step}"] if not recorder.is_on else []
    found += [f"{each.law}: {each.found}" for each in recorder.findings]
    return f"{recorder.checked} {found or 'nothing found'}"


def check_eager(folder: Path) -> str:
    """Return the findings of 40 eager decode steps."""
    recorder, model = make(folder, 1, reqs=24, seq_len=700, layers=3, with_linear=False)
    for _ in range(40):
        model.advance()
        recorder.schedule(model.scheduled(), BLOCK)
        recorder.begin_step(model.tensors())
        model.layers_forward()
    recorder.finish()
    state = "" if recorder.is_on else "THE RECORDER FAILED"
    return f"{recorder.checked} {[each.found for each in recorder.findings]} {state}"


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
    medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
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
        "findings": [each.found for each in recorder.findings],
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
    if asked.only != "cost":
        print("eager clean:", check_eager(folder), flush=True)
        for bug in ("", "slot", "buffer", "length in the graph"):
            print(f"graph {bug or 'clean'}:", check_graph(folder, bug), flush=True)
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


if __name__ == "__main__":
    main()

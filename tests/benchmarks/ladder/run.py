"""Check and time every rung of the ladder on a GPU.

    PYTHONPATH=.typing python tests/benchmarks/ladder/run.py --json FILE [--limit SECONDS]

Run it from the root of a checkout, on a machine with a CUDA device. First all kernels are
compiled, in several processes. For each workload, some tokens of every rung are compared with
float64, within the budgets of pagetwin.contract.budgets. Correct rungs are captured as CUDA
graphs. The graphs are replayed in turn, in an order that is drawn again each time, each after 256
MiB were written to flush the L2 cache. The figure is the median of 30 runs.

The record is written after each workload, and names what the time limit left out. `python
docs/hooks/page_data.py ladder FILE` keeps what the pages show of it. `--smoke` runs tiny batches,
also without a GPU, in Triton's interpreter; their times have no meaning.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import triton
from pagetwin.examples.ladder.batches import (
    LadderBatch,
    LadderTruth,
    random_batch,
    truth,
)
from pagetwin.examples.ladder.rungs import Rung
from pagetwin.optimized.dispatch import families
from triton.runtime.jit import JITFunction

from benchmarks.ladder import portable
from benchmarks.ladder.portable import PORTABLE_FAMILIES, RUNGS

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
HEADS = (32, 8, 128)
FLUSH_BYTES = 256 << 20
REPEATS = 30
FEWEST_REPEATS = 5
SECONDS_A_RUNG = 1.5
"""A slow rung is replayed less often, but not less than five times."""
SAMPLED = {"decode": 12, "prefill": 40}
"""Tokens that are judged, with all their heads."""
Lens = tuple[tuple[int, ...], tuple[int, ...]]
Record = dict[str, Any]


def workloads(smoke: bool = False) -> dict[str, tuple[str, Lens]]:
    """Return kind, new tokens and keys of each workload by its name."""
    ragged = np.random.default_rng(0).lognormal(np.log(1500), 0.8, 256)
    ragged = np.clip(np.round(ragged), 16, 16384).astype(int).tolist()
    decodes = {
        "decode-64x4k": [4096] * 64,
        "decode-256-ragged": ragged,
        "decode-1x128k": [131072],
        "decode-16x512": [512] * 16,
    }
    prefills = {"prefill-1x8k": [8192], "prefill-8x2k": [2048] * 8}
    if smoke:
        decodes = {"decode-tiny": [40, 7, 150]}
        prefills = {"prefill-tiny": [19, 4]}
    return {
        name: (
            kind,
            ((1,) * len(lens) if kind == "decode" else tuple(lens), tuple(lens)),
        )
        for kind, group in (("decode", decodes), ("prefill", prefills))
        for name, lens in group.items()
    }


def rungs_of(kind: str) -> list[tuple[int, Rung]]:
    """Return the rungs of a ladder with their places in RUNGS.

    Where no kernel is for one chip only, what other chips get is what ships, and is left out.
    """
    one_for_all = families.FAMILIES == PORTABLE_FAMILIES
    return [
        (place, rung)
        for place, rung in enumerate(RUNGS)
        if rung.kind == kind and not (one_for_all and rung.file == portable.__name__)
    ]


def compile_all(seconds: float) -> dict[int, str]:
    """Compile all rungs in processes side by side, and return what stopped which of them.

    This process then loads the kernels from Triton's cache. A compiler that
    aborts takes its own process with it, and its rungs are left out.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for kind in SAMPLED:
        for place, rung in rungs_of(kind):
            groups.setdefault((kind, rung.file), []).append(place)
    started = [
        (
            places,
            subprocess.Popen(
                [sys.executable, __file__, "--compile", ",".join(map(str, places))],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            ),
        )
        for places in groups.values()
    ]
    end = time.monotonic() + seconds
    failed = {}
    for places, process in started:
        try:
            _, errors = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            errors = "compiling took too long"
            process.wait()
        if process.returncode:
            said = errors.strip().splitlines() or [f"exit code {process.returncode}"]
            failed |= dict.fromkeys(places, f"does not compile: {said[-1][:300]}")
    return failed


def compile_only(places: list[int]) -> None:
    """Compile some rungs as they will be launched, without a launch."""
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, warmup=True, **options)

    JITFunction.run = compiled
    for rung in (RUNGS[place] for place in places):
        lens: list[Lens] = [((1,) * 3, (99, 20, 40))]
        if rung.kind == "prefill":
            lens = [((99, 20, 40), (99, 20, 40))]
        if rung.file in ("shipped", portable.__name__):
            # it chooses by the batch what it compiles
            lens = [own for kind, own in workloads().values() if kind == rung.kind]
        for lens_of_batch in lens:
            batch = random_batch(*lens_of_batch, HEADS, torch.bfloat16, "cuda")
            rung.prepare(batch, torch.empty_like(batch.query))()


@contextmanager
def watched(kernels: list[Record]) -> Iterator[None]:
    """Note what the kernels that are launched use, each kernel once."""
    run = JITFunction.run

    def noted(self: JITFunction, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options)
        used = {
            "kernel": self.__name__,
            "registers": getattr(kernel, "n_regs", None),
            "spilled": getattr(kernel, "n_spills", None),
            "shared": getattr(getattr(kernel, "metadata", None), "shared", None),
        }
        if used not in kernels:
            kernels.append(used)
        return kernel

    JITFunction.run = noted
    try:
        yield
    finally:
        JITFunction.run = run


def ready(
    rung: Rung,
    batch: LadderBatch,
    right: LadderTruth,
    on_gpu: bool,
    kernels: list[Record],
) -> tuple[Callable[[], Any], float]:
    """Return what replays a rung, and the share of a row's budget that it used at most.

    Raises:
        ArithmeticError: some row is beyond its budget, at the first launch or in a replay.
    """
    out = torch.full_like(batch.query, float("nan"))
    launch = rung.prepare(batch, out)
    with watched(kernels):
        launch()
    worst = 0.0
    for turn in ("first launch", "second launch"):
        verdict = right.judge(out)
        if not verdict.ok:
            raise ArithmeticError(f"{turn}: {verdict}")
        worst = max(worst, verdict.worst)
        if turn == "first launch":
            # what is left for the next step must be right too
            replay = captured(launch) if on_gpu else launch
            out.fill_(float("nan"))
            replay()
    return replay, worst


def captured(launch: Callable[[], Any]) -> Callable[[], None]:
    """Return the replay of a launch's CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def replay(_needed: object = launch) -> None:
        # a graph knows addresses only: what they belong to must live as long
        graph.replay()

    return replay


def time_in_turn(
    replays: dict[str, Callable[[], Any]], on_gpu: bool, repeats: int, end: float
) -> dict[str, list[float]]:
    """Return microseconds of each, replayed in turn with nothing left in the L2 cache."""
    flush = torch.empty(FLUSH_BYTES if on_gpu else 1, dtype=torch.int8)
    flush = flush.to("cuda" if on_gpu else "cpu")
    times: dict[str, list[float]] = {name: [] for name in replays}
    order = random.Random(0)
    for turn in range(repeats):
        names = [
            name
            for name, own in times.items()
            if turn < FEWEST_REPEATS or sum(own) < 1e6 * SECONDS_A_RUNG
        ]
        order.shuffle(names)
        for name in names:
            flush.zero_()
            if on_gpu:
                begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begins.record()
                replays[name]()
                ends.record()
                ends.synchronize()
                times[name].append(1e3 * begins.elapsed_time(ends))
            else:
                begin = time.perf_counter()
                replays[name]()
                times[name].append(1e6 * (time.perf_counter() - begin))
        if turn + 1 >= FEWEST_REPEATS and time.monotonic() > end:
            break
    return times


def measure(
    record: Record,
    device: str,
    dtype: torch.dtype,
    smoke: bool,
    end: float,
    failed: dict[int, str],
    written: Callable[[], None],
) -> None:
    """Judge and time all rungs on all workloads, as long as there is time."""
    on_gpu = device == "cuda"
    heads = (8, 2, 32) if smoke else HEADS
    for name, (kind, lens) in workloads(smoke).items():
        if time.monotonic() > end:
            record["left_out"].append(name)
            continue
        batch = random_batch(*lens, heads, dtype, device)
        right = truth(batch, SAMPLED[kind])
        record["workloads"][name] = {
            "kind": kind,
            "bytes": batch.bytes,
            "flops": batch.flops,
        }
        replays: dict[str, Callable[[], Any]] = {}
        rows = {}
        for place, rung in rungs_of(kind):
            row = rows[rung.name] = {"rung": rung.name, "workload": name}
            record["results"].append(row)
            if place in failed:
                row["failed"] = failed[place]
                continue
            kernels = record["kernels"].setdefault(rung.name, [])
            try:
                replay, worst = ready(rung, batch, right, on_gpu, kernels)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:400]
                continue
            row["share_of_budget"] = round(worst, 3)
            replays[rung.name] = replay
        repeats = 2 if smoke else REPEATS
        for rung_name, times in time_in_turn(replays, on_gpu, repeats, end).items():
            low, median, high = statistics.quantiles(times, n=4)
            rows[rung_name] |= {
                "median_us": round(median, 2),
                "quartiles_us": [round(low, 2), round(high, 2)],
                "runs": len(times),
            }
        written()


def new_record(device: str, commit: str) -> Record:
    """Return a record that says where it is made, and of what rungs."""
    name = "Triton's interpreter"
    driver = ""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            driver = (done.stdout.strip().splitlines() or [""])[0]
        except OSError:
            pass  # the figures do not need it
    places = sorted(place for kind in SAMPLED for place, _ in rungs_of(kind))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "flush_bytes": FLUSH_BYTES,
        "sampled_tokens": SAMPLED,
        "rungs": [
            {
                "name": rung.name,
                "kind": rung.kind,
                "number": rung.number,
                "title": rung.title,
                "file": rung.file,
                "tried": rung.tried,
            }
            for rung in (RUNGS[place] for place in places)
        ],
        "workloads": {},
        "results": [],
        "kernels": {},
        "left_out": [],
    }


def current_commit() -> str:
    """Return the checkout's commit, or nothing where git or its tree is missing."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def shown(record: Record) -> str:
    """Return the medians as lines of text, a workload after the other."""
    lines = []
    for workload in record["workloads"]:
        lines.append(workload)
        for row in record["results"]:
            if row["workload"] == workload:
                time_taken = f"{row['median_us']:12,.1f} us" if "runs" in row else ""
                lines.append(f"{time_taken:>16} {row['rung']} {row.get('failed', '')}")
    return "\n".join(lines)


def main() -> int:
    """Run the ladder; return 1 if a rung failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--limit", type=float, default=150, help="seconds, all told")
    parser.add_argument("--commit", default=None, help="what is measured")
    parser.add_argument("--smoke", action="store_true", help="tiny batches, no figures")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        compile_only([int(place) for place in asked.compile.split(",")])
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not asked.smoke:
        parser.error(
            "no CUDA device was found: with --smoke the rungs are tried without"
        )
    if asked.json is None:
        parser.error("--json: expected the path of the record")
    begin = time.monotonic()
    place = asked.json
    record = new_record(device, asked.commit or current_commit())

    def written() -> None:
        record["seconds"] = round(time.monotonic() - begin, 1)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    failed = {}
    if device == "cuda":
        failed = compile_all(0.5 * asked.limit)
        record["compiled_seconds"] = round(time.monotonic() - begin, 1)
    # the interpreter's bfloat16 arithmetic is wrong
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    end = begin + asked.limit
    measure(record, device, dtype, asked.smoke, end, failed, written)
    written()
    print(shown(record))
    print(f"{record['seconds']:.0f} s; written to {place}")
    broken = [row for row in record["results"] if "failed" in row]
    return int(bool(broken or record["left_out"]))


if __name__ == "__main__":
    sys.exit(main())

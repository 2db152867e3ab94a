"""What tuned tables gain: workloads of the benchmark with the portable kernels alone.

    python tests/gpu/tuned_tables.py tune FILE.json ['decode-*' ...] --minutes 5
    python tests/gpu/tuned_tables.py compare OUT.json ['decode-*' ...] --tables FILE.json ...

`tune` measures tables for the layers of the workloads, as `pagetwin tune` does for a model; with
`--exhaustive` it tries all values. `compare` times each workload with the default tables and with
those of the files, in alternation, by the method of `pagetwin bench`. Kernels for Hopper are
switched off in both. A file of another chip is compared too: its rows are used as they are.

The last line says how many workloads take more than 1.02 or less than 0.95 of the default's time.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pagetwin.optimized import tune_kernels
from pagetwin.optimized.dispatch import cascade, choice, dispatch
from pagetwin.optimized.kernels.portable.host.family import FAMILIES
from pagetwin.optimized.kernels.portable.tables.active_tables import (
    ActiveTables,
    activate,
    find_tables,
)
from pagetwin.optimized.kernels.portable.tables.kernel_tables import (
    DEFAULT,
    KernelTables,
)
from pagetwin.optimized.kernels.portable.tables.tuning_file import read_rows
from pagetwin.optimized.runtime.launcher import next_power_of_2
from pagetwin.tools.bench.inputs import Inputs
from pagetwin.tools.bench.libraries.library import Prepared
from pagetwin.tools.bench.libraries.ours import Ours
from pagetwin.tools.bench.machine import describe_card, describe_machine
from pagetwin.tools.bench.run import Benchmark
from pagetwin.tools.bench.settings import BenchSettings
from pagetwin.tools.bench.workloads import Workload, choose_workloads
from pagetwin.tools.tune.clock import BenchClock
from pagetwin.tools.tune.jobs import TunedLayer, choose_jobs
from pagetwin.tools.tune.layers import FORMATS, LayerSizes
from pagetwin.tools.tune.report import write_tuning

WORST, BETTER = 1.02, 0.95
MOST_BYTES = 2 << 30
FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


class OursWithTables(Ours):
    """Ours with certain tables.

    Args:
        device: as in `Ours`.
        name: in the record: "ours", and a word for the file.
        tables: the tables.
    """

    def __init__(self, device: str, name: str, tables: KernelTables) -> None:
        super().__init__(device)
        self.name, self.title = name, name
        self.tables = tables

    def prepare(self, inputs: Inputs) -> Prepared:
        prepared = super().prepare(inputs)

        def call() -> Any:
            use_tables(inputs.device, self.tables)
            return prepared.call()

        return replace(prepared, call=call)


def use_tables(device: torch.device, tables: KernelTables) -> None:
    """Plan with these tables. Plans are kept while the tables are the same, also in a capture."""
    if find_tables(device) is tables:
        return
    activate(device, ActiveTables(tables))
    for pipeline in (dispatch.PIPELINE, cascade.PIPELINE):
        pipeline.forget_plans()


def read_any(path: Path) -> KernelTables:
    """Return the tables of a file, whatever chip it is of."""
    rows = read_rows(json.loads(path.read_text(encoding="utf-8")), path)
    return reduce(lambda tables, row: row.change(tables), rows, DEFAULT)


def find_layers(workloads: list[Workload], processors: int) -> list[TunedLayer]:
    """Return the layers of paged workloads whose kernels have tables, one for each set of keys."""
    found: dict[tuple[Any, ...], TunedLayer] = {}
    for workload in workloads:
        name = workload.cache_format or FP8.get(workload.kv_dtype, "auto")
        is_paged = workload.kind not in ("latent", "encoder", "write")
        has_values = workload.value_size == workload.head_size
        if not is_paged or not has_values or name not in FORMATS:
            continue
        sizes = LayerSizes(
            workload.query_heads, workload.kv_heads, workload.head_size,
            workload.sliding_window, is_main=max(workload.query_lens) > 1,
        )  # fmt: skip
        dtype = str(workload.dtype).removeprefix("torch.")
        layer = TunedLayer(sizes, dtype, name, MOST_BYTES, processors)
        rows = max(16, next_power_of_2(layer.group_size))
        key = (workload.head_size, sizes.window is None, name, dtype, rows)
        known = found.setdefault(key, layer)
        if sizes.is_main:
            main = replace(known.layer, is_main=True)
            found[key] = replace(known, layer=main)
    return list(found.values())


def tune(asked: argparse.Namespace, workloads: list[Workload], device: str) -> int:
    """Measure tables for the layers of the workloads, and write them."""
    processors = 4
    if device == "cuda":
        processors = torch.cuda.get_device_properties(0).multi_processor_count
    layers = find_layers(workloads, processors)
    if asked.smoke:
        layers = [replace(layer, is_tiny=True, dtype="float16") for layer in layers]
    report = tune_kernels(
        choose_jobs(layers),
        BenchClock(device),
        60 * asked.minutes,
        device,
        asked.exhaustive,
        lambda done, words: print(done, words, flush=True),
    )
    machine, card = describe_machine(device), describe_card()
    write_tuning(
        asked.out,
        report,
        {
            "date": machine["date"],
            "commit": asked.commit or machine["commit"],
            "driver": None if card is None else card["driver"],
        },
    )
    for row in report.record["rows"]:
        print(f"{row['ratio']:.3f} {row['name']}: {row['choice']}")
    print(f"{report.ended}; {report.tried} timed, {report.skipped} left out")
    print(f"wrong: {list(report.wrong)}")
    return int(bool(report.wrong) or "lost" in report.ended)


def compare(asked: argparse.Namespace, workloads: list[Workload], device: str) -> int:
    """Time the workloads with all tables, and print the ratios."""
    libraries: list[Any] = [OursWithTables(device, "ours", DEFAULT)]
    for path in asked.tables:
        libraries.append(OursWithTables(device, f"ours-{path.stem}", read_any(path)))
    settings = BenchSettings(
        tuple(workloads), device, rounds=asked.rounds, repeats=asked.repeats
    )
    bench = Benchmark(settings, libraries, json_file=asked.out)
    if asked.commit:
        bench.machine["commit"] = asked.commit
    record = bench.run()
    use_tables(torch.device(device), DEFAULT)
    lost = False
    for library in libraries[1:]:
        ratios = {}
        for workload in workloads:
            entries = bench.entries[workload.name]
            default, tuned = entries["ours"].median, entries[library.name].median
            if default is not None and tuned is not None:
                ratios[workload.name] = tuned / default
            elif default is not None:
                lost = True
                print(f"{workload.name}: {entries[library.name].reason}")
        for name, ratio in sorted(ratios.items(), key=lambda pair: pair[1]):
            print(f"{ratio:.3f} {name}")
        slower = sum(ratio > WORST for ratio in ratios.values())
        faster = sum(ratio < BETTER for ratio in ratios.values())
        print(
            f"{library.title}: {len(ratios)} workloads, {slower} above {WORST},"
            f" {faster} below {BETTER}"
        )
    return int(lost or record["ended"] != "complete")


def main() -> int:
    """Run the part that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("part", choices=("tune", "compare"))
    add("out", type=Path)
    add("names", nargs="*", help="workloads or patterns; all")
    add("--suite", default="all")
    add("--tables", type=Path, nargs="+", default=[])
    add("--minutes", type=float, default=5.0)
    add("--exhaustive", action="store_true")
    add("--rounds", type=int, default=3)
    add("--repeats", type=int, default=15)
    add("--commit", help="default: what git says")
    add("--smoke", action="store_true", help="tiny batches on the CPU, without times")
    asked = parser.parse_args()
    device = "cpu" if asked.smoke else "cuda"
    workloads = [
        workload.tiny() if asked.smoke else workload
        for workload in choose_workloads(asked.names, asked.suite)
        if workload.kind != "write"
    ]
    with mock.patch.object(choice.families, "FAMILIES", FAMILIES):
        part = tune if asked.part == "tune" else compare
        return part(asked, workloads, device)


if __name__ == "__main__":
    sys.exit(main())

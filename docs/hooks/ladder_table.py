"""Times, resources and source of each rung of the ladder of kernels.

The figures come from the record that tests/benchmarks/ladder/run.py writes. The kernels are shown
from their files.
"""

import ast
import json
import textwrap
from pathlib import Path
from typing import Any

from page_data import DATA

FOLDER = Path(__file__).parents[2] / "shared" / "examples" / "ladder"
NO_RUN = "*No run is recorded yet.*"
Record = dict[str, Any]


def ladder_run(record: Path | None = None) -> str:
    """Return where and when the rungs were timed."""
    if (run := _record(record)) is None:
        return NO_RUN
    sampled = run["sampled_tokens"]
    words = (
        f"On {_article(run['device'])} with torch {run['torch']} and Triton {run['triton']},"
        f" {run['date']}{_commit(run)}. Every rung was checked on {sampled['decode']} tokens of"
        f" a decode batch and {sampled['prefill']} of a prefill batch, with all heads, at the"
        " first launch and in a replay."
    )
    if run["left_out"]:
        words += f" The time limit left out {', '.join(run['left_out'])}."
    return words


def ladder_table(kind: str, record: Path | None = None) -> str:
    """Return microseconds of each rung of a ladder, and its speedup over the rung below."""
    if (run := _record(record)) is None:
        return NO_RUN
    rungs = [rung for rung in _rungs(run, kind) if not rung["tried"]]
    names = _workloads(run, kind)
    lines = _head(["rung", "what it changes"], names)
    for below, rung in zip([None, *rungs], rungs, strict=False):
        cells = [_cell(run, rung, below, name) for name in names]
        lines.append(f"| {rung['number']} | {rung['title']} | {' | '.join(cells)} |")
    reached = [_rate(run, kind, rungs[-1], name) for name in names]
    lines.append(f"| | *rung {rungs[-1]['number']} reaches* | {' | '.join(reached)} |")
    return "\n".join(lines)


def ladder_tried(kind: str, record: Path | None = None) -> str:
    """Return what was tried on a rung, with the speedup over that rung."""
    if (run := _record(record)) is None:
        return NO_RUN
    rungs = _rungs(run, kind)
    names = _workloads(run, kind)
    lines = _head(["on rung", "what was tried"], names)
    for rung in rungs:
        if rung["tried"]:
            base = next(
                candidate
                for candidate in rungs
                if candidate["number"] == rung["number"] and not candidate["tried"]
            )
            cells = [_cell(run, rung, base, name) for name in names]
            row = f"| {rung['number']} | {rung['title']} | {' | '.join(cells)} |"
            lines.append(row)
    return "\n".join(lines)


def ladder_resources(kind: str, record: Path | None = None) -> str:
    """Return the resources of the kernels of a ladder: registers, spills, shared memory."""
    if (run := _record(record)) is None:
        return NO_RUN
    lines = [
        "| rung | kernel | registers | registers spilled | KiB shared memory |",
        "|---|---|---:|---:|---:|",
    ]
    for rung in _rungs(run, kind):
        for kernel in run["kernels"].get(rung["name"], []):
            name = (
                f"{rung['number']}, {rung['title']}"
                if rung["tried"]
                else rung["number"]
            )
            shared = _number((kernel["shared"] or 0) / 1024)
            lines.append(
                f"| {name} | `{kernel['kernel']}` | {kernel['registers']}"
                f" | {kernel['spilled']} | {shared} |"
            )
    return "\n".join(lines)


def ladder_rung(name: str) -> str:
    """Return the docstring of a rung's file, and its kernels, folded."""
    path = FOLDER / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    summary, _, words = (ast.get_docstring(tree) or "").partition("\n\n")
    lines = source.splitlines()
    kernels = "\n\n\n".join(
        "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno])
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(
            "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
        )
    )
    shown = f'??? example "{path.name}"\n\n' + textwrap.indent(
        f"```python\n{kernels}\n```", "    "
    )
    return f"*{summary}* {words}" + (f"\n\n{shown}" if kernels else "")


def _record(path: Path | None) -> Record | None:
    path = path or DATA / "ladder.json"
    if not path.exists():
        return None
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def _article(device: str) -> str:
    return f"an {device}" if device.startswith("NVIDIA") else device


def _commit(run: Record) -> str:
    return f", commit {run['commit']}" if run["commit"] else ""


def _rungs(run: Record, kind: str) -> list[Record]:
    found = [rung for rung in run["rungs"] if rung["kind"] == kind]
    if not found:
        raise ValueError(f"kind = {kind!r}: expected decode or prefill")
    return found


def _workloads(run: Record, kind: str) -> list[str]:
    return [
        name for name, workload in run["workloads"].items() if workload["kind"] == kind
    ]


def _head(columns: list[str], names: list[str]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |" + "".join(f" {name} |" for name in names),
        "|" + "---|" * len(columns) + "---:|" * len(names),
    ]


def _result(run: Record, rung: Record, workload: str) -> Record:
    return next(
        row
        for row in run["results"]
        if row["rung"] == rung["name"] and row["workload"] == workload
    )


def _cell(run: Record, rung: Record, other: Record | None, workload: str) -> str:
    """Return microseconds, and the speedup over another rung."""
    row = _result(run, rung, workload)
    if "failed" in row:
        return "failed"
    cell = f"{_number(row['median_us'])} µs"
    against = None if other is None else _result(run, other, workload)
    if against is not None and "failed" not in against:
        cell += f"<br>&times; {against['median_us'] / row['median_us']:.2f}"
    return cell


def _rate(run: Record, kind: str, rung: Record, workload: str) -> str:
    """Return bytes per second of a decode, operations per second of a prefill."""
    row = _result(run, rung, workload)
    if "failed" in row:
        return "failed"
    if kind == "decode":
        return (
            f"{run['workloads'][workload]['bytes'] / row['median_us'] / 1e3:,.0f} GB/s"
        )
    return (
        f"{run['workloads'][workload]['flops'] / row['median_us'] / 1e6:,.0f} TFLOP/s"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"

"""Tables and plots of the benchmark: the newest runs, the workloads, published figures."""

import re
import tempfile
from pathlib import Path
from typing import Any

from page_data import DATA, bench_runs
from pagetwin.tools.bench.plot import write_plots
from pagetwin.tools.bench.tables import (
    aim_lines,
    ceiling_words,
    error_notes,
    markdown_table,
    reasons,
)
from pagetwin.tools.bench.workloads import (
    best_published,
    load_workloads,
    published_figures,
)

NOTHING = "*No run is recorded yet.*"


def _runs(suite: str, folder: Path) -> list[dict[str, Any]]:
    """Return the runs of the "standard" or "extended" suite, the newest first.

    The workloads of each run are in the order of the suites.
    """
    order = [*load_workloads("all")]
    runs = bench_runs("bench_extended" if suite == "extended" else "bench", folder)
    for run in runs:
        run["workloads"].sort(key=lambda workload: order.index(workload["name"]))
    return runs


def bench_plots(folder: Path = DATA) -> dict[str, bytes]:
    """Return the newest run's plots by file name: one for light pages, one for dark pages."""
    runs = _runs("standard", folder)
    if not runs:
        return {}
    with tempfile.TemporaryDirectory() as place:
        drawn = write_plots(runs[0], Path(place) / "bench.svg", has_roofline=False)
        return {path.name: path.read_bytes() for path in drawn}


def bench_plot(folder: Path = DATA) -> str:
    """Return the Markdown of the newest run's plot."""
    if not _runs("standard", folder):
        return NOTHING
    what = (
        "One bar per workload: the share of its ceiling that our kernel reaches, with a marker per"
        " other implementation. The table below has the ratios."
    )
    pictures = "\n".join(
        f"![{what}](pictures/bench{dark}.svg#only-{page})"
        for dark, page in (("", "light"), ("-dark", "dark"))
    )
    return f'<div class="drawing plot" tabindex="0" markdown>\n\n{pictures}\n\n</div>'


KINDS = {
    "decode": "decodes",
    "mla": "latent decodes (MLA)",
    "cross": "cross-attention",
    "verify": "verification of drafts",
    "chunk": "chunks of a prompt",
    "prefill": "prefills",
    "encoder": "encoders",
    "mixed": "mixed batches",
    "cascade": "cascades",
    "write": "cache writes",
}
"""Kinds of workloads, by the beginning of their names."""


def bench_kinds(folder: Path = DATA) -> str:
    """Return one row per kind of workload: our best and worst ratio to the best other kernel.

    The newest time of each workload on the device of the newest run counts. Baselines that read
    gathered keys, and our own kernels with other options, are left out.
    """
    standard = _runs("standard", folder)
    if not standard:
        return NOTHING
    device = standard[0]["machine"]["device"]
    runs = [
        run
        for run in (*standard, *_runs("extended", folder))
        if run["machine"]["device"] == device
    ]
    rows: dict[str, list[tuple[float, str, str, float, float]]] = {}
    seen = set()
    for run in runs:
        for workload in run["workloads"]:
            if workload["name"] in seen:
                continue
            seen.add(workload["name"])
            found = _best_other(workload)
            kind = KINDS.get(workload["name"].partition("-")[0])
            if found is not None and kind is not None:
                rows.setdefault(kind, []).append(found)
    dates = sorted({run["machine"]["date"][:10] for run in runs})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = [
        f"{device}, {days}. A ratio is our time divided by that of the best other kernel that reads"
        " the same pages: below 1, pagetwin is faster.",
        "",
        "| kind | count | best ratio | worst ratio, and the µs of both |",
        "|---|---:|---|---|",
    ]
    for kind in KINDS.values():
        found = sorted(rows.get(kind, []))
        if not found:
            continue
        best, worst = found[0], found[-1]
        lines.append(
            f"| {kind} | {len(found)} | {best[0]:.3f}: `{best[1]}`"
            f" | {worst[0]:.3f}: `{worst[1]}`, {worst[3]:,.1f} and {worst[4]:,.1f} ({worst[2]}) |"
        )
    return "\n".join(lines)


def _best_other(
    workload: dict[str, Any],
) -> tuple[float, str, str, float, float] | None:
    """Return ratio, workload, name of the best other kernel, our time and its time.

    The ratio is the recorded one: the median of the rounds' ratios.
    """
    aim = workload.get("aim") or {}
    name = workload.get("best_peer") or aim.get("baseline")
    ratio = workload.get("ratio_to_best_peer") or aim.get("ratio")
    if name is None or ratio is None or name.startswith("ours"):
        return None
    times = [workload["results"][it]["median_us"] for it in ("ours", name)]
    return ratio, workload["name"], name, times[0], times[1]


def bench_table(folder: Path = DATA) -> str:
    """Return each device's newest run: its table, its ceilings, what was not timed and why."""
    parts = []
    for run in _runs("standard", folder):
        parts += [
            _conditions(run),
            "\n".join(markdown_table(run)),
            "\n".join(f"- {_plain(line)}" for line in reasons(run)),
        ]
    return "\n\n".join(part for part in parts if part) or NOTHING


def bench_extended(folder: Path = DATA) -> str:
    """Return the runs of the extended suite: ratios and aims, or that there is none.

    The newest run comes first. Of an older one, only workloads are shown that no newer one of the
    same device has timed.
    """
    parts: list[str] = []
    for run in _runs("extended", folder):
        notes = [*error_notes(run), *reasons(run)]
        parts += [
            _conditions(run),
            "\n".join(aim_lines(run)),
            "\n".join(f"- {_plain(line)}" for line in notes),
        ]
    if not parts:
        return "*No run of the extended suite is recorded yet.*"
    return "\n\n".join(part for part in parts if part)


def _conditions(record: dict[str, Any]) -> str:
    """Return machine, versions, rounds and ceilings of a record, and what limits its use."""
    machine = record["machine"]
    commit = (machine["commit"] or "unknown").split(",")[0][:12]
    parts = [
        f"{machine['device']}, {machine['date'][:10]}, commit {commit}, torch"
        f" {machine['versions']['torch']}, triton {machine['versions']['triton']};"
        " microseconds, the median of"
        f" {record['settings']['rounds']} rounds of {record['settings']['repeats']} runs."
        f" {ceiling_words(record)}"
    ]
    if not record["complete"]:
        parts.append(f"This run is not complete: {record['ended']}.")
    if record["meaningless"]:
        parts.append("These are tiny workloads; their times have no meaning.")
    return "\n\n".join(parts)


def bench_workloads() -> str:
    """Return one row per standard workload: its batch, its bytes and its operations."""
    lines = [
        "| workload | batch | heads, head size | GB | GFLOP |",
        "|---|---|---|---:|---:|",
    ]
    for workload in load_workloads().values():
        heads = f"{workload.query_heads} on {workload.kv_heads}, {workload.head_size}"
        flops = f"{workload.flops / 1e9:,.0f}" if workload.flops else "-"
        lines.append(
            f"| `{workload.name}` | {workload.about} | {heads}"
            f" | {workload.bytes / 1e9:,.3f} | {flops} |"
        )
    return "\n".join(lines)


def bench_extended_workloads() -> str:
    """Return one row per workload of the extended suite: its batch, baselines, aim and source."""
    lines = [
        "| workload | batch | heads, head size | baseline | aim | found in |",
        "|---|---|---|---|---:|---|",
    ]
    for workload in load_workloads("extended").values():
        size = f"{workload.head_size}"
        if workload.value_size != workload.head_size:
            size += f" and {workload.value_size}"
        heads = f"{workload.query_heads} on {workload.kv_heads}, {size}"
        named = " or ".join(f"`{name}`" for name in workload.baselines) or "the fastest"
        lines.append(
            f"| `{workload.name}` | {workload.about} | {heads} | {named} | {workload.aim:.2f} |"
            f" {workload.source} |"
        )
    return "\n".join(lines)


def bench_published() -> str:
    """Return the published figures of other implementations: one row per workload."""
    stored = published_figures("NVIDIA H200")
    assert stored is not None
    names = ("fa3", "flashinfer", "xqa", "vllm", "xformers")
    lines = [
        f"{stored['source']}. {stored['about']}",
        "",
        f"| workload | {' | '.join(names)} | best |",
        "|---|" + "---:|" * (len(names) + 1),
    ]
    for name, figures in stored["workloads"].items():
        best = best_published(stored, name)
        off = figures.get("inaccurate", {})
        cells = [
            f"{figures[library]:g}"
            if library in figures
            else f"({off[library]:g})"
            if library in off
            else ""
            for library in names
        ]
        shown = "" if best is None else f"{best[1]:g} ({best[0]})"
        lines.append(f"| `{name}` | {' | '.join(cells)} | {shown} |")
    return "\n".join(lines)


def _plain(words: str) -> str:
    """Return text in which no path or name is read as Markdown."""
    return re.sub(r"([*_<])", r"\\\1", words)

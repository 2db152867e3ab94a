"""Plots of a benchmark record: roofline, and the share of the ceiling per workload.

The roofline shows arithmetic intensity and throughput; no dot can be above the line. The right plot
shows each workload's share of its ceiling: a bar for ours, a mark per other library. Each plot is
drawn for light and for dark pages.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import whole_file
from ..palette import DARK, LIGHT, SERIES, plot_style
from .tables import timed_names

MARKERS = dict(
    zip(
        ("fa3", "flashinfer", "vllm", "xformers", "torch-flash", "torch-cudnn"),
        zip(SERIES, "os^vPX", strict=True),
        strict=True,
    )
)


def write_plots(
    record: Mapping[str, Any], path: Path, has_roofline: bool = True
) -> list[Path]:
    """Write the light plot to a path and the dark one next to it, and return both paths.

    Args:
        record: The record of a benchmark.
        path: Where the light plot is written.
        has_roofline: Whether the roofline is drawn beside the shares.
    """
    paths = [path, path.with_stem(f"{path.stem}-dark")]
    for colors, file in zip((LIGHT, DARK), paths, strict=True):
        figure = draw_benchmark(record, colors, has_roofline)
        has_date = {"metadata": {"Date": None}} if file.suffix == ".svg" else {}
        with whole_file(file) as unfinished:
            figure.savefig(unfinished, dpi=160, facecolor=colors["page"], **has_date)
    return paths


def draw_benchmark(
    record: Mapping[str, Any], colors: Mapping[str, str], has_roofline: bool = True
) -> Any:
    """Return the figure of a record.

    Args:
        record: The record of a benchmark.
        colors: LIGHT or DARK.
        has_roofline: Whether the roofline is drawn beside the shares.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = plot_style(colors, font_size=9.5)
    rows = [
        workload
        for workload in record["workloads"]
        if workload["results"]["ours"].get("median_us")
    ]
    with matplotlib.rc_context(style):
        height = 1.9 + 0.31 * max(len(rows), 6)
        width = 13 if has_roofline else 8
        figure = Figure(figsize=(width, height), layout="constrained")
        title = f"{record['machine']['device']}, {record['machine']['date'][:10]}"
        if record["meaningless"]:
            title = "tiny workloads in an interpreter: these times have no meaning"
        figure.suptitle(title, x=0.01, ha="left", color=colors["faint"])
        if record["ceilings"] is None or not has_roofline:
            _draw_shares(figure.subplots(), record, rows, colors)
        else:
            left, right = figure.subplots(1, 2, width_ratios=(5, 7))
            _draw_roofline(left, record, rows, colors)
            _draw_shares(right, record, rows, colors)
    return figure


def _draw_roofline(
    axes: Any,
    record: Mapping[str, Any],
    rows: list[Mapping[str, Any]],
    colors: Mapping[str, str],
) -> None:
    ceilings = record["ceilings"]
    peak = ceilings["matmul_tflop_per_s"]
    read = ceilings["read_gb_per_s"] / 1e3
    dots = [
        (number, row["flops"] / row["bytes"], row["results"]["ours"])
        for number, row in enumerate(rows, 1)
        if row["flops"]
    ]
    ends = [intensity for _, intensity, _ in dots] or [1.0]
    begin, end = min(*ends, 1.0) / 2, max(*ends, peak / read) * 4
    ridge = peak / read
    axes.plot(
        [begin, ridge, end], [begin * read, peak, peak], color=colors["ink"], lw=1.4
    )
    axes.text(end, peak * 1.08, f"{peak:,.0f} TFLOP/s", ha="right", color=colors["ink"])
    middle = (begin * ridge) ** 0.5
    axes.text(
        middle * 0.8,
        middle * read * 1.1,
        f"{1e3 * read:,.0f} GB/s",
        ha="right",
        color=colors["ink"],
    )
    for _, intensity, ours in dots:
        axes.plot(intensity, ours["tflop_per_s"], "o", ms=6, color=colors["a-line"])
    for numbers, intensity, speed in _neighbours(dots):
        is_high = speed > peak / 3
        axes.annotate(
            ", ".join(map(str, numbers)),
            (intensity, speed),
            xytext=(0, -15) if is_high else (9, -4),
            textcoords="offset points",
            ha="center" if is_high else "left",
            fontsize=8.5,
            color=colors["faint"],
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte (numbers: see the right)")
    axes.set_ylabel("TFLOP/s (ours)")
    axes.set_title("roofline", loc="left")
    axes.minorticks_off()


def _neighbours(
    dots: list[tuple[int, float, Mapping[str, Any]]],
) -> list[tuple[list[int], float, float]]:
    """Return number, center and lowest throughput of groups of dots that share one label."""
    groups: list[list[tuple[int, float, float]]] = []
    for number, intensity, ours in sorted(dots, key=lambda dot: (dot[1], dot[0])):
        speed = ours["tflop_per_s"]
        for group in groups:
            _, first_intensity, first_speed = group[0]
            if intensity < first_intensity * 2.5 and (
                1 / 1.35 < speed / first_speed < 1.35
            ):
                group.append((number, intensity, speed))
                break
        else:
            groups.append([(number, intensity, speed)])
    found = []
    for group in groups:
        # logarithmic axes: the middle of two dots is their geometric mean
        middle = math.prod(point[1] for point in group) ** (1 / len(group))
        lowest = min(point[2] for point in group)
        found.append((sorted(point[0] for point in group), middle, lowest))
    return found


def _draw_shares(
    axes: Any,
    record: Mapping[str, Any],
    rows: list[Mapping[str, Any]],
    colors: Mapping[str, str],
) -> None:
    names = timed_names(record)
    has_floor = record["ceilings"] is not None
    seen = set()
    for row, workload in enumerate(rows):
        times = {
            name: workload["results"][name]["median_us"]
            for name in names
            if workload["results"][name]["status"] == "timed"
        }
        best = workload["floor_us"] if has_floor else min(times.values())
        for name, us in times.items():
            seen.add(name)
            if name == "ours":
                axes.barh(row, best / us, 0.62, color=colors["a-line"], label="")
                continue
            color, marker = MARKERS.get(name, (colors["faint"], "D"))
            axes.plot(
                best / us,
                row,
                marker,
                ms=6,
                color=color,
                markeredgecolor=colors["page"],
                markeredgewidth=0.8,
            )
        if workload["published"] is not None:
            axes.plot(
                best / workload["published"]["us"],
                row,
                "|",
                ms=15,
                mew=1.8,
                color=colors["ink"],
            )
    labels = [
        f"{workload['name']}  {number}" for number, workload in enumerate(rows, 1)
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=colors["ink"])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.02)
    axes.set_xlabel(
        "share of the ceiling (floor / time)" if has_floor else "fastest / time"
    )
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _legend(axes, [name for name in names if name in seen], record, colors)


def _legend(
    axes: Any, names: list[str], record: Mapping[str, Any], colors: Mapping[str, str]
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for name in names:
        if name == "ours":
            handles.append(Patch(facecolor=colors["a-line"], label="ours"))
            continue
        color, marker = MARKERS.get(name, (colors["faint"], "D"))
        handles.append(Line2D([], [], marker=marker, ls="", color=color, label=name))
    if record["published"] is not None:
        handles.append(
            Line2D([], [], marker="|", ls="", ms=12, mew=1.8, color=colors["ink"])
        )
        handles[-1].set_label("best published")
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=min(len(handles), 3 if len(handles) == 6 else 5),
        borderaxespad=0.2,
        columnspacing=1.2,
        handletextpad=0.4,
    )

"""The five pictures of a replay's report, as SVG."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..palette import LIGHT, REQUESTS, SERIES, plot_style
from .run import CACHED, FREE, StepRecord

INK, QUIET, LINE = LIGHT["ink"], LIGHT["faint"], LIGHT["line"]
BLUE, GREY, PALE = LIGHT["a-line"], LIGHT["off-line"], LIGHT["off"]
ORANGE, GREEN, RED = REQUESTS[1], SERIES[1], SERIES[0]
COLOR_OF_TWIN = (BLUE, ORANGE, GREEN, SERIES[2])

MAX_ROWS, MAX_COLUMNS, MAX_LARGE_DOTS = 400, 1200, 2500

STYLE: Any = plot_style(LIGHT, font_size=10)


def draw_holders(records: Sequence[StepRecord]) -> str:
    """Return the holder of every block over time: one row per block, one column per step."""
    holders = np.stack([record.holders for record in records], axis=1)
    shared = np.stack([record.shared for record in records], axis=1)
    rows = _stride(holders.shape[0], MAX_ROWS)
    columns = _stride(holders.shape[1], MAX_COLUMNS)
    holders = holders[::rows, ::columns]
    # every shared block is marked, also in a row that is not drawn
    where, when = shared[:, ::columns].nonzero()
    palette = ListedColormap([LIGHT["page"], PALE, *_request_colors()])
    num_colors = len(_request_colors())
    picture = np.where(
        holders >= 0, 2 + holders % num_colors, np.where(holders == CACHED, 1, 0)
    )
    assert FREE < 0 <= picture.min()
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=5.2)
        edges = (records[0].step - 0.5, records[-1].step + 0.5)
        extent = (*edges, len(records[0].holders) - 0.5, -0.5)
        axes.imshow(
            picture,
            cmap=palette,
            vmin=-0.5,
            vmax=num_colors + 1.5,
            aspect="auto",
            interpolation="nearest",
            extent=extent,
        )
        axes.scatter(
            records[0].step + when * columns,
            where,
            s=5 if len(where) <= MAX_LARGE_DOTS else 0.6,
            color=INK,
            linewidths=0,
            rasterized=len(where) > MAX_LARGE_DOTS,
        )
        axes.grid(visible=False)
        axes.set_ylabel("block" if rows == 1 else f"block (1 of {rows} drawn)")
        _count_steps(axes)
        _legend(
            axes,
            [
                *(
                    Patch(facecolor=color, label=f"request {number}")
                    for number, color in enumerate(_request_colors()[:3])
                ),
                Patch(facecolor="white", label="...", alpha=0),
                Line2D([], [], marker="o", ls="", ms=4, color=INK, label="shared"),
                Patch(facecolor=PALE, label="cached"),
                Patch(facecolor="white", edgecolor=LINE, label="free"),
            ],
        )
        return _svg(figure)


def draw_batches(records: Sequence[StepRecord], token_budget: int) -> str:
    """Return each step's tokens, and its running and waiting requests."""
    steps = _steps(records)
    decode = np.array([record.decode_tokens for record in records])
    prefill = np.array([record.prefill_tokens for record in records])
    recomputed = np.array([record.recomputed_tokens for record in records])
    with matplotlib.rc_context(STYLE):
        figure, (tokens, requests) = _two_axes(height=4.6)
        _bars(tokens, steps, decode, 0 * decode, ORANGE)
        _bars(tokens, steps, prefill, decode, BLUE)
        _bars(tokens, steps, recomputed, decode + prefill - recomputed, RED)
        tokens.axhline(token_budget, color=INK, lw=1, ls=(0, (4, 3)))
        tokens.set_ylabel("new tokens")
        _legend(
            tokens,
            [
                Patch(facecolor=BLUE, label="prefill"),
                Patch(facecolor=ORANGE, label="decode"),
                Patch(facecolor=RED, label="recomputed"),
                Line2D([], [], color=INK, ls=(0, (4, 3)), lw=1, label="token budget"),
            ],
        )
        running = [record.running for record in records]
        waiting = [record.waiting for record in records]
        requests.step(steps, running, where="mid", color=GREEN, lw=1.8, label="running")
        requests.step(steps, waiting, where="mid", color=QUIET, lw=1.8, label="waiting")
        requests.set_ylabel("requests")
        requests.set_ylim(bottom=0)
        requests.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        _legend(requests, requests.get_legend_handles_labels()[0])
        _count_steps(requests)
        return _svg(figure)


def draw_occupancy(records: Sequence[StepRecord]) -> str:
    """Return the used, cached and free blocks of each step, and its preemptions."""
    steps = _steps(records)
    used = np.array([record.used for record in records])
    cached = np.array([record.cached for record in records])
    total = used[0] + cached[0] + records[0].free
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=3.2)
        axes.fill_between(steps, used, step="mid", color=BLUE, lw=0, label="in use")
        axes.fill_between(
            steps, used, used + cached, step="mid", color=GREY, lw=0, label="cached"
        )
        axes.fill_between(
            steps,
            used + cached,
            total,
            step="mid",
            facecolor="white",
            edgecolor=LINE,
            lw=0.6,
            label="free",
        )
        times = [record.step for record in records if record.preempted]
        axes.scatter(
            times,
            [total * 1.05] * len(times),
            marker="v",
            s=34,
            color=RED,
            linewidths=0,
            label="preemption",
        )
        axes.set_ylim(0, total * 1.12)
        axes.set_ylabel("blocks")
        _legend(axes, axes.get_legend_handles_labels()[0])
        _count_steps(axes)
        return _svg(figure)


def draw_agreement(records: Sequence[StepRecord], labels: Sequence[str]) -> str:
    """Return the worst error of each step with attention, as a share of the row's error budget."""
    least = 1e-4
    records = [record for record in records if record.has_attention]
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=3.0)
        wide_first = len(labels) > 1
        for index, label in enumerate(labels):
            shares = [max(record.verdicts[index].worst, least) for record in records]
            # a wide pale line first, so that two equal lines are both visible
            axes.plot(
                _steps(records),
                shares,
                color=_color(index),
                lw=4.5 if wide_first and index == 0 else 1.4,
                alpha=0.35 if wide_first and index == 0 else 1,
                label=label,
            )
        axes.axhline(1, color=RED, lw=1.4)
        axes.annotate(
            "error budget",
            (0.004, 1),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color=RED,
        )
        axes.set_yscale("log")
        lowest = min(
            (verdict.worst for record in records for verdict in record.verdicts),
            default=least,
        )
        axes.set_ylim(max(least, min(0.02, lowest / 2)), 3)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.minorticks_off()
        axes.set_ylabel("worst error / error budget")
        _legend(axes, axes.get_legend_handles_labels()[0])
        _count_steps(axes)
        return _svg(figure)


def draw_times(figures: Mapping[str, Any]) -> str:
    """Return the seconds of each stage and twin."""
    twins = figures["seconds"]["twins"]
    stages = list(next(iter(twins.values())))
    height = 0.8 / len(twins)
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=0.9 + 0.34 * len(twins) * len(stages))
        shown = []
        for index, (label, times) in enumerate(twins.items()):
            for row, stage in enumerate(stages):
                total = times[stage]["total"]
                y = row + (index - (len(twins) - 1) / 2) * height
                if total is None:
                    text, total = " in attention", 0.0
                else:
                    median = _duration(times[stage]["median"])
                    text = f" {_duration(total)}, {median} per step"
                    shown.append(total)
                axes.barh(y, total, height * 0.88, color=_color(index), label=label)
                axes.text(max(total, min(shown, default=1)), y, text, va="center")
        axes.set_xscale("log")
        most, fewest = max(shown, default=1), min(shown, default=1)
        axes.set_xlim(fewest / 3, most * 12)
        axes.set_yticks(range(len(stages)), stages)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.minorticks_off()
        axes.set_xlabel("seconds in all steps (logarithmic axis)")
        handles = [
            Patch(facecolor=_color(index), label=label)
            for index, label in enumerate(twins)
        ]
        _legend(axes, handles)
        return _svg(figure)


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(11, height), layout="constrained")
    return figure, figure.subplots()


def _two_axes(height: float) -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(11, height), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    return figure, (upper, lower)


def _bars(
    axes: Axes,
    steps: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any],
    below: np.ndarray[Any, Any],
    color: str,
) -> None:
    # one polygon instead of one bar per step
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    axes.stairs(below + counts, edges, baseline=below, fill=True, color=color, lw=0)


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    # above the axes, so that no data are covered
    axes.legend(
        handles=list(handles),
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(handles),
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=1.4,
        handletextpad=0.5,
    )


def _steps(records: Sequence[StepRecord]) -> np.ndarray[Any, Any]:
    return np.array([record.step for record in records])


def _count_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.margins(x=0.005)


def _color(twin: int) -> str:
    return COLOR_OF_TWIN[twin % len(COLOR_OF_TWIN)]


def _request_colors() -> list[Any]:
    """Return eighteen fills: the nine of the palette, then the same ones mixed with ink."""
    colors = [to_rgb(color) for color in REQUESTS]
    ink = to_rgb(INK)
    mixed = [
        tuple(0.6 * part + 0.4 * dark for part, dark in zip(color, ink, strict=True))
        for color in colors
    ]
    return [*colors, *mixed]


def _stride(count: int, maximum: int) -> int:
    return -(-count // maximum)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(
        text, format="svg", dpi=200, metadata={"Date": None, "Creator": None}
    )
    return text.getvalue()

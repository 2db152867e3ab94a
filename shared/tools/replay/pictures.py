"""What does a replay look like?

Five pictures, each answering one question, drawn as SVG so that they stay sharp and need no file
beside the page.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .run import CACHED, FREE, StepRecord

INK, QUIET, LINE = "#1f2933", "#7b8794", "#d9dee5"
BLUE, ORANGE, GREEN, RED = "#2f6fb0", "#e08a2e", "#4d9a6a", "#c8414b"
GREY = "#c3cad3"
COLOR_OF_TWIN = (BLUE, ORANGE, GREEN, "#8a63b8")

ROWS_AT_MOST, COLUMNS_AT_MOST, DOTS_AT_MOST = 400, 1200, 2500

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#edf0f4",
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "text.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "pagetwin",
}


def draw_owners(records: Sequence[StepRecord]) -> str:
    """Return who owns which block over time: blocks up, steps to the right."""
    owners = np.stack([record.owners for record in records], axis=1)
    shared = np.stack([record.shared for record in records], axis=1)
    rows = _every(owners.shape[0], ROWS_AT_MOST)
    columns = _every(owners.shape[1], COLUMNS_AT_MOST)
    owners = owners[::rows, ::columns]
    # shared blocks are few: each is marked, also in a row that is not drawn
    where, when = shared[:, ::columns].nonzero()
    palette = ListedColormap(["#ffffff", "#e6eaef", *_request_colors()])
    num_colors = len(_request_colors())
    picture = np.where(
        owners >= 0, 2 + owners % num_colors, np.where(owners == CACHED, 1, 0)
    )
    assert FREE < 0 <= picture.min()
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=5.2)
        extent = (-0.5, len(records) - 0.5, len(records[0].owners) - 0.5, -0.5)
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
            when * columns,
            where,
            s=5 if len(where) <= DOTS_AT_MOST else 0.6,
            color=INK,
            linewidths=0,
            rasterized=len(where) > DOTS_AT_MOST,
        )
        axes.grid(visible=False)
        axes.set_ylabel("block" if rows == 1 else f"block (one in {rows} drawn)")
        _count_steps(axes)
        _legend(
            axes,
            [
                *(
                    Patch(facecolor=color, label=f"request {number}")
                    for number, color in enumerate(_request_colors()[:3])
                ),
                Patch(facecolor="white", label="... and so on", alpha=0),
                Line2D([], [], marker="o", ls="", ms=4, color=INK, label="shared"),
                Patch(facecolor="#e6eaef", label="cached"),
                Patch(facecolor="white", edgecolor=LINE, label="free"),
            ],
        )
        return _svg(figure)


def draw_batches(records: Sequence[StepRecord], token_budget: int) -> str:
    """Return each step's tokens, and the requests that run and wait."""
    steps = np.arange(len(records))
    decode = np.array([record.decode_tokens for record in records])
    prefill = np.array([record.prefill_tokens for record in records])
    again = np.array([record.recomputed_tokens for record in records])
    with matplotlib.rc_context(STYLE):
        figure, (tokens, requests) = _two_axes(height=4.6)
        _bars(tokens, steps, decode, 0 * decode, ORANGE)
        _bars(tokens, steps, prefill, decode, BLUE)
        _bars(tokens, steps, again, decode + prefill - again, RED)
        tokens.axhline(token_budget, color=INK, lw=1, ls=(0, (4, 3)))
        tokens.set_ylabel("new tokens")
        _legend(
            tokens,
            [
                Patch(facecolor=BLUE, label="prefill"),
                Patch(facecolor=ORANGE, label="decode"),
                Patch(facecolor=RED, label="computed again"),
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
    """Return how full the cache is, and when somebody had to start over."""
    steps = np.arange(len(records))
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
        times = [place for place, each in enumerate(records) if each.preempted]
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
    """Return each step's worst error as a share of what the row may lose."""
    least = 1e-4
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=3.0)
        wide_first = len(labels) > 1
        for place, label in enumerate(labels):
            shares = [max(record.verdicts[place].worst, least) for record in records]
            # a wide pale line first, so that twins that agree are both seen
            axes.plot(
                shares,
                color=_color(place),
                lw=4.5 if wide_first and place == 0 else 1.4,
                alpha=0.35 if wide_first and place == 0 else 1,
                label=label,
            )
        axes.axhline(1, color=RED, lw=1.4)
        axes.annotate(
            "the budget",
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
        axes.set_ylabel("worst error / budget")
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
        for place, (label, times) in enumerate(twins.items()):
            for row, stage in enumerate(stages):
                total = times[stage]["total"]
                y = row + (place - (len(twins) - 1) / 2) * height
                if total is None:
                    text, total = " in attention", 0.0
                else:
                    median = _duration(times[stage]["median"])
                    text = f" {_duration(total)}, {median} a step"
                    shown.append(total)
                axes.barh(y, total, height * 0.88, color=_color(place), label=label)
                axes.text(max(total, min(shown, default=1)), y, text, va="center")
        axes.set_xscale("log")
        most, fewest = max(shown, default=1), min(shown, default=1)
        axes.set_xlim(fewest / 3, most * 12)
        axes.set_yticks(range(len(stages)), stages)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.minorticks_off()
        axes.set_xlabel("seconds in all steps, on a logarithmic axis")
        handles = [
            Patch(facecolor=_color(place), label=label)
            for place, label in enumerate(twins)
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
    # one shape instead of a thousand bars
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    axes.stairs(below + counts, edges, baseline=below, fill=True, color=color, lw=0)


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    # above the axes: nothing is covered, however the data lie
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


def _count_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.margins(x=0.005)


def _color(place: int) -> str:
    return COLOR_OF_TWIN[place % len(COLOR_OF_TWIN)]


def _request_colors() -> list[Any]:
    # neighbours in the trace get colours far apart
    table: Any = matplotlib.colormaps["tab20"]
    colors = [*table.colors[0::2], *table.colors[1::2]]
    # the greys stand for cached
    return [color for color in colors if max(color) - min(color) > 0.1]


def _every(count: int, at_most: int) -> int:
    return -(-count // at_most)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(
        text, format="svg", dpi=200, metadata={"Date": None, "Creator": None}
    )
    return text.getvalue()

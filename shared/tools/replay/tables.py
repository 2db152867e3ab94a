"""The tables that a replay prints in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from .figures import describe_machine, scaled_lengths


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the tables of a replay."""
    console.print(_traffic(figures))
    console.print(_agreement(figures))
    console.print(_times(figures))


def _traffic(figures: Mapping[str, Any]) -> Table:
    table = Table(title="Traffic", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    tokens, blocks = figures["tokens"], figures["blocks"]
    table.add_row("steps", f"{figures['steps']:,}", "")
    table.add_row(
        "requests",
        f"{figures['requests']:,}",
        f"at most {figures['running_at_most']} running,"
        f" {figures['waiting_at_most']} waiting",
    )
    for scaled_length in scaled_lengths(figures):
        table.add_row(
            scaled_length.name, f"{scaled_length.tokens:,}", scaled_length.words
        )
    table.add_row("prefill tokens", f"{tokens['prefill']:,}", "")
    table.add_row("decode tokens", f"{tokens['decode']:,}", "")
    table.add_row("recomputed tokens", f"{tokens['recomputed']:,}", "included above")
    table.add_row(
        "prefix hits",
        f"{tokens['found_in_prefix_cache']:,}",
        "tokens found in the cache"
        f" ({tokens['regained_after_preemption']:,} more after a preemption)",
    )
    table.add_row("preemptions", f"{figures['preemptions']:,}", "")
    share = blocks["used_at_most"] / blocks["total"]
    table.add_row(
        "blocks in use",
        f"{blocks['used_at_most']:,}",
        f"at most, of {blocks['total']:,} ({share:.0%})",
    )
    return table


def _agreement(figures: Mapping[str, Any]) -> Table:
    table = Table(title="Agreement with the reference in float64", title_justify="left")
    table.add_column("twin", style="bold")
    for name in ("worst error", "error budget", "share of the budget", "in step"):
        table.add_column(name, justify="right")
    for label, worst in figures["agreement"].items():
        table.add_row(
            label,
            f"{worst['error']:.3g}",
            f"{worst['budget']:.3g}",
            f"{worst['worst_share_of_budget']:.0%}",
            str(worst["step"]),
        )
    return table


def _times(figures: Mapping[str, Any]) -> Table:
    twins = figures["seconds"]["twins"]
    first = next(iter(twins))
    # how long an interpreter takes says nothing of a kernel
    is_interpreted = figures["settings"]["is_interpreted"]
    title = f"Time ({describe_machine(figures)})"
    table = Table(title=title, title_justify="left")
    table.add_column("stage", style="bold")
    for label in twins:
        table.add_column(f"{label}\nseconds", justify="right")
        table.add_column("median\nms per step", justify="right")
        if label != first and not is_interpreted:
            # ratio of the medians, because a first step may include the compilation of a kernel
            table.add_column(f"{first}\n/ {label}", justify="right", style="dim")
    for stage in twins[first]:
        row = [stage]
        for label, times in twins.items():
            spent, base = times[stage], twins[first][stage]
            if spent["total"] is None:
                row += ["in attention", ""]
            else:
                row += [f"{spent['total']:.3f}", f"{spent['median'] * 1000:.3g}"]
            if label != first and not is_interpreted:
                both = base["median"] and spent["median"]
                row.append(f"{base['median'] / spent['median']:.2g}x" if both else "")
        table.add_row(*row)
    table.add_row("oracle", f"{figures['seconds']['oracle']:.3f}")
    table.add_row("wall", f"{figures['seconds']['wall']:.3f}")
    return table

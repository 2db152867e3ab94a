"""Tables of a benchmark record, for the terminal and as Markdown."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

Record = Mapping[str, Any]
MANY = 16
"""Workloads that a line of reasons names, if they are more than half of all."""


def timed_names(record: Record) -> list[str]:
    """Return the libraries that were timed in at least one workload, ours first."""
    return [
        name
        for name in record["implementations"]
        if any(
            workload["results"].get(name, {}).get("status") == "timed"
            for workload in record["workloads"]
        )
    ]


def one_line(workload: Record, meaningless: str | None) -> str:
    """Return the medians of one workload so far, in one line."""
    parts = []
    for name, entry in workload["results"].items():
        if entry["status"] == "timed":
            kernels = f" ({kernel_words(entry)})" if entry.get("kernels") else ""
            time = show_us(entry["median_us"], _label(meaningless, name))
            parts.append(f"{name} {time}{kernels}")
        elif entry["status"] in ("wrong", "failed"):
            parts.append(f"{name} {entry['status'].upper()}: {entry['reason']}")
    return f"{workload['name']}: {', '.join(parts) or 'nothing was timed'}"


def versioned_name(record: Record, name: str | None) -> str:
    """Return the name of a library with the version that ran.

    Example:
        "fa3, vLLM 0.33.0", of operators of vLLM 0.33.0.
    """
    if name is None:
        return ""
    version = record["implementations"][name].get("version")
    return f"{name}, {version.removeprefix('operators of ')}" if version else name


def kernel_words(entry: Record) -> str:
    """Return the names of the kernels that ran. Empty if they are not known."""
    return " + ".join(entry.get("kernels", ()))


def show_us(us: float, meaningless: str | None = None) -> str:
    """Return microseconds with three or four digits.

    Example:
        19.07 is "19.1 us", 261.7 "262 us"; 131,000 of an interpreter "interpreter 131 ms".
    """
    if meaningless:
        return f"{meaningless} {us / 1e3:.3g} ms"
    return f"{us:,.1f} us" if us < 100 else f"{us:,.0f} us"


def _label(meaningless: str | None, name: str) -> str | None:
    """Return the label of a library's times. Torch's operators are never interpreted."""
    return "tiny" if meaningless and name.startswith("torch") else meaningless


def result_table(record: Record) -> Table:
    """Return one row per workload and one column per library that was timed."""
    names = timed_names(record)
    meaningless = record["meaningless"]
    device = record["machine"]["device"]
    title = f"Attention on {device}" + (
        ": tiny versions, whose times have no meaning"
        if meaningless
        else ", microseconds"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("workload", style="bold", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    if record["ceilings"] is not None:
        for heading in ("floor", "of it", "GB/s", "TFLOP/s"):
            table.add_column(heading, justify="right", style="dim")
    if len(names) > 1 and not meaningless:
        table.add_column("ours / best", justify="right")
        if "fa3" in names:
            table.add_column("ours / fa3", justify="right")
    if record["published"] is not None:
        table.add_column("ours / published", justify="right")
    has_kernels = any(
        "kernels" in workload["results"]["ours"] for workload in record["workloads"]
    )
    if has_kernels:
        table.add_column("kernels of ours", style="dim")
    for workload in record["workloads"]:
        cells = _cells(record, workload, names)
        if has_kernels:
            cells.append(kernel_words(workload["results"]["ours"]))
        table.add_row(*cells)
    return table


AIM_HEADINGS = (
    "workload",
    "ours",
    "baseline",
    "us",
    "ratio",
    "aim",
    "met",
    "kernels of ours",
)


def aim_rows(record: Record) -> list[list[str]]:
    """Return one row per workload that has an aim, with the columns of AIM_HEADINGS.

    A baseline's time is in parentheses if its error exceeds the error budget.
    """
    meaningless, rows = record["meaningless"], []
    for workload in record["workloads"]:
        aim = workload.get("aim")
        if aim is None:
            continue
        ours = workload["results"]["ours"]
        row = [workload["name"], _cell_words(ours, meaningless)]
        name, value = aim["baseline"], aim["ratio"]
        if name is None:
            wanted = " or ".join(aim["named"]) or "any"
            row += [wanted if meaningless else f"{wanted}: not timed", ""]
        else:
            is_named = name in aim["named"] or not aim["named"]
            row.append(
                name if is_named else f"{name}, without {', '.join(aim['named'])}"
            )
            row.append(
                _cell_words(workload["results"][name], _label(meaningless, name))
            )
        row.append("" if value is None else f"{value:.3f}")
        row.append(f"{aim['at_most']:.2f}")
        row.append({True: "yes", False: "no", None: ""}[aim["met"]])
        rows.append([*row, kernel_words(ours)])
    return rows


def aim_table(record: Record) -> Table | None:
    """Return the table of ratios and aims, or None if no workload has an aim."""
    rows = aim_rows(record)
    if not rows:
        return None
    table = Table(title=aim_words(record), title_justify="left")
    for heading in AIM_HEADINGS:
        is_number = heading in ("ours", "us", "ratio", "aim")
        table.add_column(heading, justify="right" if is_number else "left")
    colors = {"yes": "green", "no": "yellow"}
    for row in rows:
        color = colors.get(row[6])
        table.add_row(*row[:6], f"[{color}]{row[6]}[/]" if color else "", row[7])
    return table


def aim_words(record: Record) -> str:
    """Return how many aims are met, in one sentence."""
    aims = [
        workload["aim"]["met"]
        for workload in record["workloads"]
        if workload.get("aim")
    ]
    compared = [met for met in aims if met is not None]
    words = f"{sum(compared)} of {len(aims)} aims are met"
    without = len(aims) - len(compared)
    return f"{words}; {without} have no ratio" if without else words


def aim_lines(record: Record) -> list[str]:
    """Return the table of ratios and aims as lines of Markdown. Empty without an aim."""
    rows = aim_rows(record)
    if not rows:
        return []
    return [
        f"{aim_words(record)}.",
        "",
        f"| {' | '.join(AIM_HEADINGS)} |",
        "|---|---:|---|---:|---:|---:|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def error_notes(record: Record) -> list[str]:
    """Return the errors of libraries that were timed outside of the error budget."""
    notes = []
    for workload in record["workloads"]:
        ours = workload["results"]["ours"].get("error")
        for name, entry in workload["results"].items():
            if entry["status"] == "timed" and not entry.get("within_budget", True):
                beside = "" if ours is None else f", ours {ours:.2g}"
                why = (
                    "its error exceeds the budget, because it rounds queries or weights to"
                    " fewer bits"
                )
                if workload.get("kind") == "write":
                    why = "some of its codes are next to the nearest"
                notes.append(
                    f"{name} in {workload['name']}: {why}; relative error"
                    f" {entry['error']:.2g}{beside}"
                )
    return notes


def _cells(record: Record, workload: Record, names: list[str]) -> list[str]:
    meaningless = record["meaningless"]
    ours = workload["results"]["ours"]
    row = [workload["name"]]
    row += [
        _cell(workload["results"][name], _label(meaningless, name)) for name in names
    ]
    if record["ceilings"] is not None:
        share = ours.get("share_of_ceiling")
        row += [
            f"{workload['floor_us']:,.1f}",
            "" if share is None else f"{share:.0%}",
            f"{ours.get('gb_per_s', 0):,.0f}" if "gb_per_s" in ours else "",
            f"{ours.get('tflop_per_s', 0):,.0f}" if workload["flops"] and share else "",
        ]
    if len(names) > 1 and not meaningless:
        best = workload["best_peer"]
        value = workload["ratio_to_best_peer"]
        row.append(
            "" if value is None else f"{_ratio(value)} {versioned_name(record, best)}"
        )
        if "fa3" in names:
            row.append(_ratio(workload["ratio_to_fa3"]))
    if record["published"] is not None:
        known = workload["published"]
        missing = known is None or known["ratio"] is None
        row.append("" if missing else f"{_ratio(known['ratio'])} {known['by']}")
    return row


def _cell(entry: Record, meaningless: str | None) -> str:
    if entry["status"] == "timed":
        return _cell_words(entry, meaningless)
    if entry["status"] in ("wrong", "failed"):
        return f"[bold red]{entry['status']}[/]"
    return f"[dim]{'-' if entry['status'] == 'declined' else entry['status']}[/]"


def _cell_words(entry: Record, meaningless: str | None) -> str:
    """Return the time of an entry, or its status. An error outside of the budget: (time)."""
    if entry["status"] != "timed":
        return "-" if entry["status"] == "declined" else str(entry["status"])
    words = show_us(entry["median_us"], meaningless).removesuffix(" us")
    return words if entry.get("within_budget", True) else f"({words})"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    colour = "green" if value <= 1 else "yellow"
    return f"[{colour}]{value:.3f}[/]"


def reasons(record: Record) -> list[str]:
    """Return why libraries were not timed, one line per reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, implementation in record["implementations"].items():
        if implementation["missing"]:
            found[name, "missing", implementation["missing"]] = []
    for workload in record["workloads"]:
        for name, entry in workload["results"].items():
            if entry["status"] in ("wrong", "failed", "declined"):
                key = (name, entry["status"], entry["reason"])
                found.setdefault(key, []).append(workload["name"])
            elif entry["status"] == "not run":
                key = (name, "not run", record["ended"])
                found.setdefault(key, []).append(workload["name"])
    every = [workload["name"] for workload in record["workloads"]]
    return [
        f"{name} {status}{_where(names, every)}: {reason}"
        for (name, status, reason), names in found.items()
    ]


def _where(names: list[str], every: list[str]) -> str:
    """Return in which workloads, shorter if many are more than half of all."""
    others = [name for name in every if name not in names]
    if len(names) > MANY and len(names) > len(others):
        return f" in all but {', '.join(others)}" if others else " in all"
    return f" in {', '.join(names)}" if names else ""


def ceiling_words(record: Record) -> str:
    """Return the ceilings of a run as a sentence."""
    ceilings = record["ceilings"]
    if ceilings is None:
        return "No ceilings: there is no GPU, or not enough free memory."
    return (
        f"Ceilings of this run: reading {ceilings['read_gb_per_s']:,.0f} GB/s, through a block"
        f" table {ceilings['read_pages_gb_per_s']:,.0f}, copying"
        f" {ceilings['copy_gb_per_s']:,.0f}, bf16 products"
        f" {ceilings['matmul_tflop_per_s']:,.0f} TFLOP/s, an empty kernel"
        f" {ceilings['empty_us']:.1f} us."
    )


def markdown(record: Record) -> str:
    """Return a record as a page of Markdown."""
    machine = record["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    card = machine.get("card_before") or {}
    commit, *changed = (machine["commit"] or "unknown").split(",")
    words = [
        ", ".join([f"Commit {commit[:12]}", *changed]).replace(",  ", ", "),
        versions,
    ]
    if (tables := machine.get("tables", "default")) != "default":
        words.append(f"tables {tables}")
    if card:
        words.append(f"driver {card['driver']}, power limit {card['power_limit']}")
    lines = [
        f"# Attention on {machine['device']}, {machine['date'][:10]}",
        "",
        f"{'; '.join(words)}.",
        "",
    ]
    if record["meaningless"]:
        lines += ["Tiny versions of all workloads: the times have no meaning.", ""]
    if not record["complete"]:
        lines += [f"This run is not complete: {record['ended']}.", ""]
    lines += [ceiling_words(record), "", *markdown_table(record), ""]
    if aims := aim_lines(record):
        lines += [*aims, ""]
    lines += [f"- {line}" for line in [*error_notes(record), *reasons(record)]]
    if record["published"] is not None:
        lines += ["", f"Published: {record['published']['source']}."]
    lines += ["", f"Method: {record['method']}."]
    return "\n".join(lines) + "\n"


def markdown_table(record: Record) -> list[str]:
    """Return the lines of a table: one row per workload, medians in microseconds."""
    names, meaningless = timed_names(record), record["meaningless"]
    headings = ["workload", *names, "ours, quartiles", "host us", "of the ceiling"]
    headings += ["ours / best baseline", "ours / published"]
    lines = [
        f"| {' | '.join(headings)} |",
        "|---|" + "---:|" * (len(headings) - 1),
    ]
    for workload in record["workloads"]:
        ours = workload["results"]["ours"]
        cells = [workload["name"]]
        for name in names:
            entry = workload["results"][name]
            cells.append(_cell_words(entry, _label(meaningless, name)))
        is_shown = ours["status"] == "timed" and not meaningless
        cells.append(
            " to ".join(show_us(us).removesuffix(" us") for us in ours["quartiles_us"])
            if is_shown
            else ""
        )
        cells.append(f"{ours['host_us']:,.0f}" if is_shown else "")
        share = ours.get("share_of_ceiling")
        cells.append("" if share is None else f"{share:.0%} ({workload['floor_of']})")
        value, known = workload["ratio_to_best_peer"], workload["published"]
        best = versioned_name(record, workload["best_peer"])
        cells.append("" if value is None else f"{value:.3f} ({best})")
        has_ratio = known is not None and known["ratio"] is not None
        cells.append(f"{known['ratio']:.3f} ({known['by']})" if has_ratio else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines

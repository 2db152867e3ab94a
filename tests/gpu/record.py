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
Record = dict[str, Any]


def environment() -> dict[str, str]:
    """Return the environment in which the checkout can be imported, in any folder."""
    paths = [str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def run_limited(
    command: list[str], seconds: float, log: Path, **variables: str
) -> tuple[int | None, str]:
    """Run a command for at most that long and return its code (None: too long) and output.

    The variables are added to its environment. It is asked to stop before it is killed, together
    with the processes it started, since pytest then still writes what it knows.
    """
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment() | variables,
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
    command += [
        "-n",
        str(workers),
        "-m",
        "not slow and not compile and not site",
        f"--junit-xml={report}",
        *extra,
    ]
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
        command = [sys.executable, "-c", "from pagetwin.tools.cli import app; app()"]
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
    script = Path(__file__).with_name("timing.py").resolve()
    command = [sys.executable, str(script), str(lines), "--device", device]
    command += ["--smoke"] * smoke
    code, output = run_limited(command, limit, folder / "times.log")
    rows = []
    if lines.exists():
        rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    found: Record = {
        "ok": code == 0 and all("failed" not in row for row in rows),
        "ended": describe(code, limit),
        "rows": rows,
        "method": "median of up to 30 runs between CUDA events, the L2 cache flushed before"
        " each; a run is the replay of the call's captured graph, or the call itself where it"
        " cannot be captured; host us: the median time until a call returns, checks and"
        " launches included",
    }
    if code != 0:
        found["tail"] = output[-2000:]
    return found


def describe(code: int | None, limit: float) -> str:
    """Return in words how a command ended."""
    return f"stopped after its {limit:.0f} s" if code is None else f"exit code {code}"


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
    kind, _, index = device.partition(":")
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(int(index or 0))
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
            figure["worst_share_of_budget"] for figure in figures["agreement"].values()
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
        lines += [
            f"- failed: {failure['test']}" for failure in part.get("failures", [])
        ]
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
        lines += [
            "| case | implementation | median us | TB/s | TFLOP/s | runs | host us |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for row in parts["times"].get("rows", []):
            median = row.get("median_us")
            if median is None:
                words = f"| {row['case']} | {row.get('implementation', '')} |"
                lines.append(f"{words} failed: {row['failed'][:80]} | | | | |")
                continue
            speed = f"{row['bytes'] / median / 1e6:.2f}"
            flops = f"{row['flops'] / median / 1e6:.0f}" if row["flops"] else ""
            lines.append(
                f"| {row['case']} | {row['implementation']} | {median:,.1f} | {speed}"
                f" | {flops} | {row['runs']}{'' if row['graph'] else ', no graph'}"
                f" | {row['host_us']:,.0f} |"
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
    return {k: v for k, v in vars(asked).items() if k != "folder"}


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
    asked = parser.parse_args()
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

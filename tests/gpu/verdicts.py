"""Verdicts on the kernels of other projects: every adapter checked on a GPU, as one record.

    python tests/gpu/verdicts.py OUTDIR --commit $(git rev-parse HEAD)

Runs `pagetwin check` on each adapter in docs/adapters, and on both twins. Adapters whose library is
not installed are recorded with the reason. Each check has a time limit. Laws whose time is over are
recorded as not finished, with the number of cases that held. The record is written to OUTDIR
as <date>-<device>-verdicts.json. `python docs/hooks/page_data.py verdicts RECORD` keeps what the
documentation shows of it.
"""

import argparse
import importlib.metadata
import json
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record import ROOT, Record, describe_machine, run_limited

ADAPTERS = ROOT / "docs" / "adapters"
TWINS = ("optimized", "reference")
BACKEND, LEFT_OUT = "PAGETWIN_FLASHINFER_BACKEND", "PAGETWIN_FLASHINFER_LEFT_OUT"
VARIANTS = {
    "flashinfer_latent_fa3": ("flashinfer_latent", {BACKEND: "fa3"}),
    # each option has kernels of its own, which take ten minutes to compile
    "flashinfer_paged_fa3": (
        "flashinfer_paged",
        {BACKEND: "fa3", LEFT_OUT: "logits_soft_cap sliding_window"},
    ),
}
"""Verdicts on another kernel of an adapter: the adapter, and variables of its environment."""
ONLY = {"vllm_spans": "images and prefixes of codes"}
"""Words of the laws that an adapter is for, if it is not for all."""
LIBRARIES = {
    "cudnn_paged": "nvidia-cudnn-frontend",
    "flash_attention_3_latent": "vllm",
    "flash_attention_3_paged": "vllm",
    "flash_attention_3_sparse": "vllm",
    "flash_attention_paged": "flash-attn",
    "flash_attn_names": "triton",
    "flashinfer_decode": "flashinfer-python",
    "flashinfer_latent": "flashinfer-python",
    "flashinfer_latent_fa3": "flashinfer-python",
    "flashinfer_output": "flashinfer-python",
    "flashinfer_paged": "flashinfer-python",
    "flashinfer_paged_fa3": "flashinfer-python",
    "flashinfer_xqa": "flashinfer-python",
    "flashmla_fp8": "vllm",
    "flashmla_latent": "vllm",
    "flashmla_sparse": "vllm",
    "flex_compiled": "torch",
    "flex_paged": "torch",
    "torch_sdpa": "torch",
    "torch_varlen": "torch",
    "vllm_cache": "vllm",
    "vllm_formats": "vllm",
    "vllm_spans": "vllm",
    "vllm_unified": "vllm",
    "xformers_split_k": "xformers",
}
"""The package whose kernels an adapter calls."""
GRACE = 90.0
"""Seconds of a check beyond its limit: imports, cases that are running, the search for NaN."""
FAILED = ("broken", "crashed", "hangs", "out of memory", "missing", "not tried")
LONGEST = 600
"""Characters of a counterexample or a message that a record keeps."""


def judge_here(implementation: str, lines: Path, asked: argparse.Namespace) -> int:
    """Check one implementation in this process, and write one line of JSON per law."""
    from pagetwin.conformance.api.check import check_implementation
    from pagetwin.conformance.base.results import Result

    with lines.open("w", encoding="utf-8") as sink:

        def keep(result: Result) -> None:
            words = asdict(result) | {"status": str(result.status), "details": {}}
            sink.write(json.dumps(words) + "\n")
            sink.flush()

        try:
            report = check_implementation(
                implementation,
                only=asked.only,
                examples=asked.examples,
                device=asked.device,
                seconds_of_a_law=asked.seconds_of_a_law,
                seconds_of_a_case=asked.seconds_of_a_case,
                minutes=asked.limit / 60,
                workers=asked.workers,
                on_result=keep,
            )
        except (ImportError, ValueError) as error:
            sink.write(json.dumps({"why": str(error)}) + "\n")
            return 2
        sink.write(json.dumps({"symptoms": json.loads(report.to_json())["symptoms"]}))
    return 0


def library_of(name: str, given: list[str]) -> str:
    """Return the library that an adapter calls, with its version.

    Args:
        name: The adapter.
        given: What the command line says about libraries, each "adapter=library and version".
    """
    for words in given:
        adapter, _, library = words.partition("=")
        if adapter == name:
            return library
    package = LIBRARIES.get(name, "pagetwin")
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def judge(name: str, asked: argparse.Namespace) -> Record:
    """Return the verdict on one implementation, from a process of its own."""
    is_twin = name in TWINS
    adapter, environment = VARIANTS.get(name, (name, {}))
    implementation = name if is_twin else str(ADAPTERS / f"{adapter}.py")
    lines = asked.folder / f"{name}.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, __file__, str(asked.folder), "--one", implementation]
    command += ["--lines", str(lines), "--device", asked.device]
    command += [
        "--only",
        asked.only or ONLY.get(name, ""),
        "--examples",
        str(asked.examples),
    ]
    command += ["--workers", str(asked.workers)]
    command += ["--limit", str(asked.limit)]
    command += ["--seconds-of-a-law", str(asked.seconds_of_a_law)]
    command += ["--seconds-of-a-case", str(asked.seconds_of_a_case)]
    begin = time.perf_counter()
    log = asked.folder / f"{name}.log"
    code, said = run_limited(command, asked.limit + GRACE, log, **environment)
    verdict = summarize(lines)
    verdict = {"adapter": name, "library": library_of(name, asked.library)} | verdict
    verdict["seconds"] = round(time.perf_counter() - begin, 1)
    if code is None:
        verdict["ended"] = f"stopped after {asked.limit + GRACE:g} s"
    elif "why" not in verdict and not verdict["laws"]:
        verdict["why"] = (
            said.strip().splitlines()[-1][:LONGEST] if said else "no output"
        )
    return verdict


def summarize(lines: Path) -> Record:
    """Return the counts and the laws of the lines that a check has written."""
    found = [
        json.loads(line)
        for line in (
            lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
        )
    ]
    if why := [entry["why"] for entry in found if "why" in entry]:
        return {"why": why[0], "counts": {}, "laws": [], "undeclared": {}}
    results = [entry for entry in found if "law" in entry]
    counts = Counter(result["status"] for result in results)
    judged = [
        result
        for result in results
        if result["status"] != "undeclared"
        and (result["status"] != "not finished" or result["cases"])
    ]
    reasons = Counter(
        "operations that are not declared"
        if result["reason"].startswith("needs ")
        else result["reason"]
        for result in results
        if result["status"] == "undeclared"
    )
    symptoms = [entry["symptoms"] for entry in found if "symptoms" in entry]
    late = counts["not finished"]
    ended = f"{late} laws are not finished" if late else "all laws ended"
    return {
        "ended": ended if symptoms else "stopped",
        "counts": dict(sorted(counts.items())),
        "cases": sum(result["cases"] - result["skipped"] for result in judged),
        "laws": [
            law_of(result)
            for result in sorted(judged, key=lambda result: result["law"])
        ],
        "symptoms": symptoms[0] if symptoms else [],
        "undeclared": dict(reasons.most_common()),
    }


def law_of(result: dict[str, Any]) -> Record:
    """Return what the record keeps of the result of a law."""
    found = {name: result[name] for name in ("law", "status", "cases", "skipped")}
    if result["status"] == "not finished":
        return found | {"reason": result["reason"], "case": result["case"][:LONGEST]}
    if result["status"] not in FAILED:
        return found
    kept = ("case", "what", "where", "found", "right", "message", "reason", "cause")
    return found | {name: result[name][:LONGEST] for name in kept if result[name]}


def write_record(record: Record, folder: Path) -> Path:
    """Write a record, named after its date and device, and return its path."""
    device = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()).strip("-")
    path = folder / f"{record['date'][:10]}-{device}-verdicts.json"
    text = json.dumps(record, indent=1).replace(f"{ROOT}/", "")
    path.write_text(text + "\n", encoding="utf-8")
    return path


def words_of(verdict: Record) -> str:
    """Return a verdict in a few lines: the counts, and each failure."""
    lines = [
        f"{verdict['adapter']}: {verdict.get('why') or verdict['counts']}"
        f" {verdict.get('ended', '')} {verdict['seconds']} s"
    ]
    shown = ("message", "cause", "where", "found", "right", "case")
    for law in verdict["laws"]:
        if law["status"] in FAILED:
            words = " | ".join(law[name] for name in shown if name in law)
            lines.append(f"  {law['status']}: {law['law']}\n    {words[:420]}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the record is written")
    parser.add_argument(
        "--adapters", help="comma-separated; default: all, and both twins"
    )
    parser.add_argument("--only", default="", help="words of the laws")
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--workers", type=int, default=6, help="processes per adapter")
    parser.add_argument("--together", type=int, default=3, help="adapters at a time")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds per adapter"
    )
    parser.add_argument("--seconds-of-a-law", type=float, default=60.0)
    parser.add_argument(
        "--seconds-of-a-case", type=float, default=120.0, help="compilation included"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="default: what git says")
    parser.add_argument(
        "--note", action="append", default=[], help="kept in the record"
    )
    parser.add_argument(
        "--library",
        action="append",
        default=[],
        help="of an adapter whose library is not installed as a package: adapter=library version",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.folder = asked.folder.resolve()
    return asked


def main() -> int:
    """Check the adapters, and return 0 if a record was written."""
    asked = parse()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.one:
        return judge_here(asked.one, asked.lines, asked)
    names = [path.stem for path in sorted(ADAPTERS.glob("*.py"))]
    names += [*VARIANTS, *TWINS]
    names = asked.adapters.split(",") if asked.adapters else names
    record = describe_machine(asked.commit, asked.device)
    settings = ("only", "examples", "limit", "seconds_of_a_law", "seconds_of_a_case")
    record["settings"] = {name: getattr(asked, name) for name in settings}
    record["notes"] = asked.note
    record["verdicts"] = []
    with ThreadPoolExecutor(asked.together) as pool:
        for verdict in pool.map(lambda name: judge(name, asked), names):
            record["verdicts"].append(verdict)
            path = write_record(record, asked.folder)
            print(words_of(verdict), flush=True)
    print(f"record: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

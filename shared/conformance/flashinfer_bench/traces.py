"""Traces: what a solution did on each workload, and the verdict of the laws, as JSON.

Each workload is one case of a law, tried in a worker process: a kernel that crashes or hangs ends
one process, and the other workloads are judged in a fresh one. A result is right if each of its
rows stays within its error budget. The reference is timed before the first worker process starts,
and again in it: the smaller latency counts.
"""

import importlib.metadata
import math
import platform
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import torch

from ..base.results import Result, Status
from ..reports.report import Report
from ..running.worker import SECONDS_OF_A_LAW, Job, Worker
from .adapter import DTYPE_OF, SHAPE_OF
from .export import trace_of
from .measuring import time_reference, with_baseline
from .solutions import Solution
from .workloads import Plan, workloads_of

LAWS = {
    "paged_attention": "every new token attends to its sequence up to itself",
    "latent_decode_attention": "a decode over latents is full multi head attention",
    "select_keys": "keys without a score are never selected",
    "sparse_attention": "a query attends to the slots that its row names",
    "reshape_and_cache": "each token is written to its slot and nothing else changes",
    "merge_attn_states": "two partial results combine by their weight",
}
"""The law that judges the workloads of an operation."""
LIBRARIES = ("pagetwin", "torch", "triton", "numpy")


def judge_workloads(
    solution: Solution, device: str, seconds_of_a_case: float
) -> list[dict[str, Any]]:
    """Return the traces of a solution on the workloads of its definition.

    Args:
        solution: The solution.
        device: The device of the tensors.
        seconds_of_a_case: A workload that takes longer hangs.
    """
    workloads = workloads_of(solution.definition)
    # no process of the solution runs yet, which could keep the host busy
    baselines = [
        _baseline_of(solution, workload.plan, torch.device(device))
        for workload in workloads
    ]
    worker = Worker(solution.file, device, SECONDS_OF_A_LAW, seconds_of_a_case)
    law = LAWS[solution.definition.family.operation]
    traces = []
    try:
        for workload, baseline in zip(workloads, baselines, strict=True):
            job = Job(law, case=repr(workload.plan), is_measured=True)
            result = worker.try_law(job, "attention")
            numbers = result.details.get("measured", {})
            if "latency_ms" in numbers:
                numbers = with_baseline(numbers, baseline)
                details = result.details | {"measured": numbers}
                result = replace(result, details=details)
            found = evaluation_of(result, device)
            traces.append(trace_of(workload, solution.name, found))
    finally:
        worker.stop()
    return traces


def _baseline_of(solution: Solution, plan: Plan, device: torch.device) -> float:
    """Return the latency of the reference in ms, on as many threads as a worker process has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return time_reference(solution.definition, plan, device)
    finally:
        torch.set_num_threads(threads)


def with_laws(traces: list[dict[str, Any]], report: Report) -> list[dict[str, Any]]:
    """Return traces whose logs say how the laws ended, the same for all."""
    counts = ", ".join(f"{count} {name}" for name, count in report.counts().items())
    lines = [f"laws of pagetwin: {counts}"]
    lines += [
        f"{symptom.title}: {symptom.first.law}: {symptom.first.summary}"
        for symptom in report.symptoms()
    ]
    words = "\n".join(lines)
    found = []
    for trace in traces:
        evaluation = trace["evaluation"]
        log = f"{evaluation['log']}\n{words}".strip()
        found.append(trace | {"evaluation": evaluation | {"log": log}})
    return found


def status_of(result: Result) -> str:
    """Return the result of a workload in the words of FlashInfer-Bench."""
    if result.status == Status.HELD:
        return "PASSED"
    if result.status == Status.HANGS:
        return "TIMEOUT"
    if result.status == Status.BROKEN and not result.message:
        return "INCORRECT_NUMERICAL"
    if SHAPE_OF in result.message:
        return "INCORRECT_SHAPE"
    if DTYPE_OF in result.message:
        return "INCORRECT_DTYPE"
    return "RUNTIME_ERROR"


def evaluation_of(result: Result, device: str) -> dict[str, Any]:
    """Return the evaluation of a workload in the schema of flashinfer-trace."""
    status, numbers = status_of(result), result.details.get("measured", {})

    def some(*names: str) -> dict[str, float | str]:
        return {name: _finite(numbers[name]) for name in names}

    errors, latency = None, None
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        errors = some("max_relative_error", "max_absolute_error")
    if status == "PASSED":
        latency = some("latency_ms", "reference_latency_ms", "speedup_factor")
    return {
        "status": status,
        "environment": environment_of(device),
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "log": result.summary,
        "correctness": errors,
        "performance": latency,
    }


def _finite(number: float) -> float | str:
    """Return a number that JSON has; an infinite error is a text, as in FlashInfer-Bench."""
    return "Infinity" if math.isinf(number) else number


def environment_of(device: str) -> dict[str, Any]:
    """Return the hardware and the versions of the libraries."""
    libs = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            libs[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        libs["cuda"] = torch.version.cuda
    is_cuda = torch.device(device).type == "cuda"
    hardware = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
    return {"hardware": hardware, "libs": libs}

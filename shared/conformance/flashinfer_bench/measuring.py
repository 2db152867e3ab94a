"""Errors and latency of a solution on a workload, measured in the worker process."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .adapter import SolutionCall
from .definitions import Definition
from .workloads import Plan, inputs_of

CALLS = 5
"""Calls whose mean is the latency, after one that is not counted."""
TINY = 1e-8
"""What FlashInfer-Bench adds to the denominator of a relative error."""


def measure(
    operation: Callable[..., Any], plan: Plan, device: torch.device
) -> dict[str, float]:
    """Return the largest errors of a solution, and the latencies of it and of the reference.

    Args:
        operation: The operation of a `SolutionCall`.
        plan: The plan of a workload of its definition.
        device: The device of the tensors.
    """
    call: SolutionCall = operation.__self__  # type: ignore[attr-defined]
    inputs = inputs_of(call.definition, plan, device)
    run = load_reference(call.definition)
    exact = {
        name: each.double()
        if isinstance(each, Tensor) and each.dtype.is_floating_point
        else each
        for name, each in inputs.items()
    }
    found, right = call.run(inputs), run(*exact.values())
    absolute = relative = 0.0
    for one, other in zip(found, right, strict=True):
        error = (one.double() - other.double()).abs()
        absolute = max(absolute, float(error.nan_to_num(torch.inf).max()))
        share = error / (other.double().abs() + TINY)
        relative = max(relative, float(share.nan_to_num(torch.inf).max()))
    given = call.prepare(inputs)
    latency = _mean_ms(lambda: call.function(*given), device)
    baseline = _mean_ms(lambda: run(*inputs.values()), device)
    return {
        "max_absolute_error": absolute,
        "max_relative_error": relative,
        "latency_ms": latency,
        "reference_latency_ms": baseline,
        "speedup_factor": baseline / latency,
    }


def load_reference(definition: Definition) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function `run` of a definition's reference."""
    names: dict[str, Any] = {}
    exec(definition.reference, names)
    run: Callable[..., tuple[Tensor, Tensor]] = names["run"]
    return run


def _mean_ms(function: Callable[[], Any], device: torch.device) -> float:
    """Return the mean duration of a call in milliseconds, with its kernels and without a queue."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    function()
    wait()
    begin = time.perf_counter()
    for _ in range(CALLS):
        function()
        wait()
    return (time.perf_counter() - begin) * 1000 / CALLS

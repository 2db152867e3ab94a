"""Errors and latency of a solution on a workload, measured in the worker process.

Each timed call has keys and values of its own, in the tensors of the call before it; queries and
lengths are the same. What distinguishes the calls is drawn by the system after all other calls of
the workload, so that no earlier call has seen it. Each result is kept, and judged after the last
call: it must be nearest to the right one of its own call, and within its error budgets. A solution
that stores results, computes after it has returned, or is less exact when it is timed, is found by
this.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from inspect import unwrap
from random import SystemRandom
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..candidates.guard.interference import GUARD, expect_no_threads
from ..checks.expect import Disagreement
from .adapter import SolutionCall
from .definitions import Definition
from .measuring_selections import draw_seed, draw_weights, expect_selected
from .timed_results import Outputs, doubled, expect_within_budgets
from .workloads import Plan, inputs_of

FACTORS = (-1.0, 1.0, 0.5, -0.5, 0.25, -0.25)
"""Bounds of the factors of keys and values. Each head has them in a drawn order, one per call."""
LEAST = 0.7
"""The smallest share of its bound that a factor has."""
CALLS = len(FACTORS) - 1
"""Calls whose mean is the latency. The first call is not counted."""
HEADS = ("num_kv_heads", "num_heads")
"""Axes whose elements have factors of their own."""
QUERIES = ("q", "q_nope", "q_pe")
"""Inputs that are the same in all timed calls."""
SELECT = "select_keys"
"""The operation whose outputs are slots in any order."""
TINY = 1e-8
"""What FlashInfer-Bench adds to the denominator of a relative error."""

Factors = dict[str, Tensor]
"""Factors of inputs, by name."""
Clock = Callable[[], float]


def measure(
    operation: Callable[..., Any], plan: Plan, device: torch.device
) -> dict[str, float]:
    """Return the largest errors of a solution, and the latencies of it and of the reference.

    Args:
        operation: The operation of a `SolutionCall`.
        plan: The plan of a workload of its definition.
        device: The device of the tensors.
    """
    call = _call_of(operation)
    inputs = inputs_of(call.definition, plan, device)
    if call.definition.family.operation == SELECT:
        # slots are right or wrong; the timed calls say which
        off = math.inf
        with suppress(Disagreement):
            expect_selected(call.definition, inputs, call.run(inputs)[0], "")
            off = 0.0
        return {"max_absolute_error": off, "max_relative_error": off}
    run = load_reference(call.definition)
    right = run(*doubled(inputs).values())
    found = call.run(inputs)
    absolute = relative = 0.0
    for one, other in zip(found, right, strict=True):
        error = (one.double() - other.double()).abs()
        absolute = max(absolute, float(error.nan_to_num(torch.inf).max()))
        share = error / (other.double().abs() + TINY)
        relative = max(relative, float(share.nan_to_num(torch.inf).max()))
    return {"max_absolute_error": absolute, "max_relative_error": relative}


def time_calls(
    operation: Callable[..., Any], plan: Plan, device: torch.device
) -> dict[str, float]:
    """Return the latencies of a solution and of the reference, in ms, and their ratio.

    Args:
        operation, plan, device: As for `measure`.

    Raises:
        Disagreement: The result of a timed call is not that for the inputs of this call, or the
            solution has left a thread that runs.
        Exception: The solution raised an error, or an output has another form than before.
    """
    call = _call_of(operation)
    definition, clock = call.definition, perf_counter
    inputs = inputs_of(definition, plan, device)
    given = call.prepare(inputs)
    results: list[Outputs] = []
    seconds: list[float] = []
    factors = draw_factors(definition)
    for own_factors in factors:
        _copy_into(inputs, scaled(definition, plan, device, own_factors))
        with GUARD.around(definition.family.operation):
            took, found = _timed(lambda: call.function(*given), device, clock)
            # copied at once: what is written after the call has returned does not count
            results.append(_copied(call.outputs(inputs, given, found)))
        seconds.append(took)
    every = [scaled(definition, plan, device, own_factors) for own_factors in factors]
    if definition.family.operation == SELECT:
        for number, (own, result) in enumerate(zip(every, results, strict=True)):
            what = f"topk_indices of timed call {number}"
            expect_selected(definition, own, result[0], what)
        return _with_latency(definition, plan, device, clock, seconds)
    run = load_reference(definition)
    right = [run(*doubled(inputs_of_call).values()) for inputs_of_call in every]
    expect_own_results(definition, results, right)
    for number, (own, result) in enumerate(zip(every, results, strict=True)):
        expect_within_budgets(definition, run, own, result, number)
    return _with_latency(definition, plan, device, clock, seconds)


def _with_latency(
    definition: Definition,
    plan: Plan,
    device: torch.device,
    clock: Clock,
    seconds: list[float],
) -> dict[str, float]:
    """Return the mean latency of calls but the first, and that of the reference."""
    expect_no_threads()
    latency = sum(seconds[1:]) / CALLS
    baseline = time_reference(definition, plan, device, clock)
    return with_baseline({"latency_ms": latency * 1000}, baseline)


def time_reference(
    definition: Definition,
    plan: Plan,
    device: torch.device,
    clock: Clock = perf_counter,
) -> float:
    """Return the mean latency of a definition's reference on a plan, in ms."""
    run = load_reference(definition)
    given = list(inputs_of(definition, plan, device).values())
    waits = [_timed(lambda: run(*given), device, clock)[0] for _ in FACTORS]
    return sum(waits[1:]) / CALLS * 1000


def with_baseline(numbers: dict[str, float], latency_ms: float) -> dict[str, float]:
    """Return measurements with the smallest latency of the reference that is known so far.

    Args:
        numbers: Measurements of a solution, among them its latency.
        latency_ms: A latency of the reference.
    """
    known = numbers.get("reference_latency_ms", latency_ms)
    baseline = min(known, latency_ms)
    return numbers | {
        "reference_latency_ms": baseline,
        "speedup_factor": baseline / numbers["latency_ms"],
    }


def expect_own_results(
    definition: Definition, results: list[Outputs], right: list[Outputs]
) -> None:
    """Raise a Disagreement if a row of a result is nearer to the right row of another call.

    Args:
        definition: The definition whose outputs they are.
        results: The results of calls of the same lengths with different numbers.
        right: The results of the reference for the inputs of each call.
    """
    for output, name in enumerate(definition.outputs):
        wanted = torch.stack([result[output].double().flatten(1) for result in right])
        for call, result in enumerate(results):
            found = result[output].double().flatten(1).nan_to_num(torch.inf)
            # [calls, rows]: the distance of each row to the right one of each call
            far = (found - wanted).abs().sum(2)
            nearest = far.min(0).values
            wrong = (far[call] > nearest) | far[call].isinf()
            if wrong.any():
                row = int(wrong.nonzero()[0])
                element = int((found[row] - wanted[call, row]).abs().argmax())
                raise Disagreement(
                    f"{name} of a timed call, whose keys and values differ from those before",
                    f"call {call}, row {row}, element {element}",
                    f"{float(found[row, element]):.6g}",
                    f"{float(wanted[call, row, element]):.6g}",
                )


def load_reference(definition: Definition) -> Callable[..., Outputs]:
    """Return the function `run` of a definition's reference."""
    names: dict[str, Any] = {}
    exec(definition.reference, names)
    run: Callable[..., Outputs] = names["run"]
    return run


def _call_of(operation: Callable[..., Any]) -> SolutionCall:
    """Return the calls of a solution from its operation, which may be guarded."""
    call: SolutionCall = unwrap(operation).__self__
    return call


def draw_factors(definition: Definition) -> list[Factors]:
    """Return the factors of the keys and values, or partial results, of each timed call.

    Args:
        definition: The definition, whose inputs they are.

    Returns:
        For each call and input [heads, 1], or [1] for an input without heads.
    """
    pick = SystemRandom()
    if definition.family.operation == SELECT:
        return [draw_seed(pick) for _ in FACTORS]
    calls: list[Factors] = [{} for _ in FACTORS]
    for name, axes in definition.inputs.items():
        if axes is None or len(axes) < 3 or name in QUERIES:
            continue
        own = next((axis for axis in HEADS if axis in axes), None)
        count = 1 if own is None else definition.constants[own]
        orders = [pick.sample(FACTORS, len(FACTORS)) for _ in range(count)]
        for call, factors in enumerate(calls):
            drawn = [order[call] * pick.uniform(LEAST, 1.0) for order in orders]
            factors[name] = torch.tensor(drawn)
            if own is not None:
                factors[name] = factors[name][:, None]
    return calls


def scaled(
    definition: Definition, plan: Plan, device: torch.device, factors: Factors
) -> dict[str, Any]:
    """Return the inputs of a plan, some of them multiplied by factors and rounded."""
    if definition.family.operation == SELECT:
        return draw_weights(inputs_of(definition, plan, device), factors)
    return {
        name: (value * factors[name].to(device)).to(value.dtype)
        if name in factors
        else value
        for name, value in inputs_of(definition, plan, device).items()
    }


def _copy_into(inputs: dict[str, Any], others: dict[str, Any]) -> None:
    for name, value in others.items():
        if isinstance(value, Tensor):
            inputs[name].copy_(value)


def _copied(outputs: Outputs) -> Outputs:
    return tuple(output.clone() for output in outputs)


def _timed(
    function: Callable[[], Any], device: torch.device, clock: Clock
) -> tuple[float, Any]:
    """Return the seconds of a call with its kernels and without a queue, and its result."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begin = clock()
    found = function()
    wait()
    return clock() - begin, found

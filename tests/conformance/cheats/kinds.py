"""Kinds of kernels whose results do not come from the inputs of their calls.

Each kind takes a correct function, and returns one that gives right results without computing them,
or that changes what they are compared with. `adapter_of` and `source_of` write them as an adapter
and as the source of a solution. The suite must find each one, and say what it did.
"""

import gc
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import torch

Function = Callable[..., Any]


def tensors_of(args: tuple, given: dict) -> list:
    return [
        tensor
        for tensor in (*args, *given.values())
        if isinstance(tensor, torch.Tensor)
    ]


def answer(result: Any, args: tuple, given: dict) -> Any:
    """Write a stored result to the outputs that are passed, and return it."""
    stored, lse = result
    if given.get("lse") is not None and lse is not None:
        given["lse"].copy_(lse)
    if given.get("out") is not None:
        return given["out"].copy_(stored)
    return stored


def result_of(found: Any, given: dict) -> tuple:
    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone()
        return tuple(tensor.clone() for tensor in value)

    lse = given.get("lse")
    return copied(found), None if lse is None else lse.clone()


def stored_by(key: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a kind that keeps the result of each call by a key of its arguments."""

    def kind(function: Function) -> Function:
        results: dict = {}

        def call(*args: Any, **given: Any) -> Any:
            where = key(*args, **given)
            if where not in results:
                found = function(*args, **given)
                results[where] = result_of(found, given)
                return found
            return answer(results[where], args, given)

        return call

    return kind


def fingerprint(*args: Any, **given: Any) -> tuple:
    tensors = tensors_of(args, given)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    lens = tuple(tuple(tensor.tolist()) for tensor in tensors if tensor.dim() == 1)
    return shapes, lens, tuple(tensors[0].flatten()[:4].tolist())


def addresses(*args: Any, **given: Any) -> tuple:
    tensors = tensors_of(args, given)
    inputs = [
        tensor
        for tensor in tensors
        if tensor.dim() > 2 and tensor is not given.get("out")
    ]
    return tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in inputs)


def sums(*args: Any, **given: Any) -> tuple:
    """Lengths and sums of queries: a light digest of what is not the cache."""
    tensors = tensors_of(args, given)
    return *fingerprint(*args, **given)[:2], tensors[0].double().sum().item()


last_output = stored_by(fingerprint)
same_addresses = stored_by(addresses)
sum_of_queries = stored_by(sums)


def same_objects(function: Function) -> Function:
    """Keep results by the caches' own objects, as a dictionary of weak keys does."""
    results: dict = {}

    def call(*args: Any, **given: Any) -> Any:
        caches = [tensor for tensor in tensors_of(args, given) if tensor.dim() > 2][:3]
        lens = fingerprint(*args, **given)[1]
        for (kept, kept_lens), result in results.items():
            same = all(one is other for one, other in zip(kept, caches, strict=False))
            if same and kept_lens == lens:
                return answer(result, args, given)
        found = function(*args, **given)
        results[tuple(caches), lens] = result_of(found, given)
        return found

    return call


def untouched_output(function: Function) -> Function:
    """Leave an output as it is that holds numbers already."""

    def call(*args: Any, **given: Any) -> Any:
        outputs = [given.get("out"), *args[-2:]]
        out = next(
            (value for value in outputs if isinstance(value, torch.Tensor)), None
        )
        if given.get("out") is not None and not out.isnan().any():
            return out
        return function(*args, **given)

    return call


def calls_reference(function: Function) -> Function:
    """Return what the reference computes, and hide its errors."""
    from pagetwin.reference.attention import paged

    def call(*args: Any, **given: Any) -> Any:
        try:
            return paged.paged_attention(*args, **given)
        except Exception:
            return function(*args, **given)

    return call


def reads_caller(function: Function) -> Function:
    """Search the frames of the caller for the expected result."""

    def call(*args: Any, **given: Any) -> Any:
        frame = sys._getframe(1)
        while frame is not None:
            if "answer" in frame.f_locals:
                break
            frame = frame.f_back
        return function(*args, **given)

    return call


def searches_memory(function: Function) -> Function:
    """Search all objects for a tensor of the output's shape."""

    def call(*args: Any, **given: Any) -> Any:
        gc.get_objects()
        return function(*args, **given)

    return call


def detects_suite(function: Function) -> Function:
    """Compute carefully only if the stack shows that the suite calls."""

    def call(*args: Any, **given: Any) -> Any:
        files = [frame.filename for frame in traceback.extract_stack()]
        found = function(*args, **given)
        if not any("conformance" in file for file in files):
            found.zero_()
        return found

    return call


def counts_calls(function: Function) -> Function:
    """Compute the first calls of some lengths, and repeat the last result from then on."""
    calls: dict = {}

    def call(*args: Any, **given: Any) -> Any:
        where = fingerprint(*args, **given)[:2]
        number, result = calls.get(where, (0, None))
        if number >= 4:
            return answer(result, args, given)
        found = function(*args, **given)
        calls[where] = number + 1, result_of(found, given)
        return found

    return call


def writes_inputs(function: Function) -> Function:
    """Set the values to 0, from which the right result is 0."""

    def call(*args: Any, **given: Any) -> Any:
        for tensor in [
            tensor for tensor in tensors_of(args, given) if tensor.dim() > 2
        ][1:3]:
            tensor.zero_()
        return function(*args, **given)

    return call


def replaces_comparator(function: Function) -> Function:
    """Let the comparison of results find no error."""

    def call(*args: Any, **given: Any) -> Any:
        from pagetwin.conformance.candidates.calls import calling
        from pagetwin.conformance.running import screening

        def is_right(*args: Any, **given: Any) -> None:
            return None

        calling.expect_right = is_right
        for module in (screening, *list(sys.modules.values())):
            if hasattr(module, "expect_right"):
                module.expect_right = is_right
        found = function(*args, **given)
        first = found if isinstance(found, torch.Tensor) else found[0]
        first += 1
        return found

    return call


def replaces_clock(function: Function) -> Function:
    """Let no time pass."""

    def call(*args: Any, **given: Any) -> Any:
        now = math.pi
        time.perf_counter = lambda: now
        return function(*args, **given)

    return call


class Later(torch.Tensor):
    """A tensor whose elements are computed when they are read."""


def lazy_result(function: Function) -> Function:
    """Return a tensor of a class that computes later."""

    def call(*args: Any, **given: Any) -> Any:
        found = function(*args, **given)
        if isinstance(found, torch.Tensor):
            return found.as_subclass(Later)
        return tuple(tensor.as_subclass(Later) for tensor in found)

    return call


def after_return(function: Function) -> Function:
    """Compute in another thread, after the call has returned."""

    def call(*args: Any, **given: Any) -> Any:
        found = function(*args, **given)
        every = [found] if isinstance(found, torch.Tensor) else list(found)
        right = [tensor.clone() for tensor in every]
        for tensor in every:
            tensor.zero_()

        def write() -> None:
            time.sleep(0.2)
            for tensor, value in zip(every, right, strict=True):
                tensor.copy_(value)

        threading.Thread(target=write, daemon=True).start()
        return found

    return call


def moves_result(found: Any) -> Any:
    """Make a result wrong by half of it and a half."""
    first = found if isinstance(found, torch.Tensor) else found[0]
    first.mul_(1.5).add_(0.5)
    return found


def changes_defaults(function: Function) -> Function:
    """Let the comparison assume larger rounding errors, by its default arguments."""

    def call(*args: Any, **given: Any) -> Any:
        from pagetwin.contract import budgets

        for compare in (budgets.judge_rows, budgets.row_budgets, budgets.allowed_range):
            compare.__kwdefaults__ = {"weight_error": 1e9}
        return moves_result(function(*args, **given))

    return call


def changes_constants(function: Function) -> Function:
    """Let the comparison assume larger rounding errors, by its constants."""

    def call(*args: Any, **given: Any) -> Any:
        from pagetwin.contract import budgets

        budgets.ROUNDINGS_INSIDE, budgets.FACTOR = 10**9, 1e9
        return moves_result(function(*args, **given))

    return call


def changes_verdict(function: Function) -> Function:
    """Let each verdict be right, by an attribute of its class."""

    def call(*args: Any, **given: Any) -> Any:
        from pagetwin.contract import budgets

        budgets.Verdict.ok = property(lambda self: True)
        return moves_result(function(*args, **given))

    return call


def hides_builtin(function: Function) -> Function:
    """Let each error be 0, by a function that hides a builtin one."""

    def call(*args: Any, **given: Any) -> Any:
        from pagetwin.contract import budgets

        budgets.float = lambda number: 0.0
        return moves_result(function(*args, **given))

    return call


def rejects_cases(function: Function) -> Function:
    """Let Hypothesis draw another case where this one is difficult."""

    def call(*args: Any, **given: Any) -> Any:
        if any(sum(lens) % 16 == 1 for lens in fingerprint(*args, **given)[1]):
            from hypothesis import reject

            reject()
        return function(*args, **given)

    return call


def raises_outside(function: Function) -> Function:
    """Say that a call is outside of the support, whatever SUPPORT declares."""

    def call(*args: Any, **given: Any) -> Any:
        from pagetwin.conformance.base.support import OutsideSupport

        raise OutsideSupport("more than one block")

    return call


def repoints_output(function: Function) -> Function:
    """Let the output refer to other memory, and leave its own unwritten."""

    def call(*args: Any, **given: Any) -> Any:
        found = function(*args, **given)
        every = [given.get("out"), *args[-2:]]
        for value in every:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                right = value.clone()
                value.fill_(torch.nan)
                value.data = right
        return found

    return call


def own_methods(function: Function) -> Function:
    """Return zeros whose own methods compute the result when they are read."""

    def call(*args: Any, **given: Any) -> Any:
        found = function(*args, **given)
        first = found if isinstance(found, torch.Tensor) else found[0]
        right = first.clone()
        first.zero_()
        for name in ("cpu", "double", "clone", "float", "flatten", "to"):
            setattr(first, name, getattr(right, name))
        return found

    return call


def leaves_modes(function: Function) -> Function:
    """Set a seed, TF32 and other global modes."""

    def call(*args: Any, **given: Any) -> Any:
        torch.set_grad_enabled(False)
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("medium")
        return function(*args, **given)

    return call


def profiles_judge(function: Function) -> Function:
    """Write the expected result to the output when the comparison begins."""

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "judge_rows":
            candidate, exact, *_ = frame.f_locals.values()
            candidate.copy_(exact.reshape(candidate.shape))

    def call(*args: Any, **given: Any) -> Any:
        sys.setprofile(profile)
        return moves_result(function(*args, **given))

    return call


def reads_traceback(function: Function) -> Function:
    """Compute carefully only if the frame of an error leads to the suite."""

    def call(*args: Any, **given: Any) -> Any:
        try:
            raise KeyError
        except KeyError as error:
            frame: Any = error.__traceback__.tb_frame  # type: ignore[union-attr]
        files = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        found = function(*args, **given)
        is_judged = any("conformance" in file for file in files)
        return found if is_judged else moves_result(found)

    return call


def asks_logging(function: Function) -> Function:
    """Compute carefully only if a frame that `logging` reads leads to the suite."""

    def call(*args: Any, **given: Any) -> Any:
        frame, files = logging.currentframe(), []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        found = function(*args, **given)
        is_judged = any("conformance" in file for file in files)
        return found if is_judged else moves_result(found)

    return call


def copies_reference(function: Function) -> Function:
    """Return what the reference computes that is loaded from its files under another name."""
    from pagetwin.reference.attention import paged

    name = "pagetwin.reference.attention.mine"
    spec: Any = spec_from_file_location(name, paged.__file__)
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)

    def call(*args: Any, **given: Any) -> Any:
        return copy.paged_attention(*args, **given)

    return call


def stale_plan(function: Function) -> Function:
    """Copy lengths once per tensor, as a plan does that is made at the first step."""
    plans: list = []

    def call(*args: Any, **given: Any) -> Any:
        lens = [
            tensor
            for tensor in tensors_of(args, given)
            if tensor.dim() == 1 and not tensor.is_floating_point()
        ]
        ids = [id(tensor) for tensor in lens]
        known = [plan for plan in plans if [id(tensor) for tensor in plan[0]] == ids]
        if not known:
            known = [(lens, [tensor.clone() for tensor in lens])]
            plans.extend(known)
        _, copies = known[0]
        planned = {id(one): other for one, other in zip(lens, copies, strict=True)}
        args = tuple(planned.get(id(value), value) for value in args)
        named = {name: planned.get(id(value), value) for name, value in given.items()}
        return function(*args, **named)

    return call


def stale_scale(function: Function) -> Function:
    """Keep the scale of the first call with the same caches, as a captured launch does."""
    scales: list = []

    def call(*args: Any, **given: Any) -> Any:
        caches = [tensor for tensor in tensors_of(args, given) if tensor.dim() > 2][:3]
        for kept, scale in scales:
            if all(one is other for one, other in zip(kept, caches, strict=False)):
                return function(*args, **{**given, "scale": scale})
        scales.append((caches, given.get("scale")))
        return function(*args, **given)

    return call


def static_output(function: Function) -> Function:
    """Return one tensor per shape wherever no output is passed."""
    buffers: dict = {}

    def call(*args: Any, **given: Any) -> Any:
        found = function(*args, **given)
        if given.get("out") is not None or not isinstance(found, torch.Tensor):
            return found
        key = tuple(found.shape), found.dtype
        return buffers.setdefault(key, torch.empty_like(found)).copy_(found)

    return call


def versions(function: Function) -> Function:
    """Keep the last result by tensors and the number of their changes that torch counts."""
    last: list = []

    def call(*args: Any, **given: Any) -> Any:
        results = (given.get("out"), given.get("lse"))
        inputs = [
            tensor
            for tensor in tensors_of(args, given)
            if not any(tensor is result for result in results)
        ]
        if any(tensor.is_inference() for tensor in inputs):
            return function(*args, **given)
        now = [(tensor, tensor._version) for tensor in inputs]
        if last and len(last[0]) == len(now):
            pairs = zip(last[0], now, strict=True)
            if all(one[0] is two[0] and one[1] == two[1] for one, two in pairs):
                return answer(last[1], args, given)
        found = function(*args, **given)
        last[:] = now, result_of(found, given)
        return found

    return call


def last_requests(function: Function) -> Function:
    """Compute the first 256 rows, and repeat the last of them."""

    def call(*args: Any, **given: Any) -> Any:
        found = function(*args, **given)
        if isinstance(found, torch.Tensor) and len(found) > 256:
            found[256:] = found[255]
        return found

    return call


def knows_factors(function: Function) -> Function:
    """Compute results for some multiples of keys and values in advance, and return the nearest."""
    results: dict = {}

    def call(*args: Any, **given: Any) -> Any:
        out = given.get("out")
        wide = [tensor for tensor in tensors_of(args, given) if tensor.dim() > 2]
        caches = [tensor for tensor in wide if tensor is not out][1:3]
        where, total = sums(*args, **given), caches[-1].nan_to_num().double().sum()
        if where not in results:
            found = {}
            for factor in (1.0, -1.0, 0.5, -0.5, 0.25, -0.25, 2.0):
                others = {id(tensor): tensor * factor for tensor in caches}
                own = {
                    name: others.get(id(value), value) for name, value in given.items()
                }
                result = function(
                    *(others.get(id(value), value) for value in args), **own
                )
                found[factor] = result_of(result, given)
            results[where] = total, found
        first, found = results[where]
        ratio = float(total / first)
        nearest = min(found, key=lambda factor: abs(factor - ratio))
        return answer(found[nearest], args, given)

    return call


def fp8_later(function: Function) -> Function:
    """Round keys and values to 8 bits, from the third call of equal lengths on."""
    calls: dict = {}

    def call(*args: Any, **given: Any) -> Any:
        where = fingerprint(*args, **given)[:2]
        calls[where] = calls.get(where, 0) + 1
        if calls[where] < 3:
            return function(*args, **given)
        caches = [tensor for tensor in tensors_of(args, given) if tensor.dim() > 2][1:3]
        coarse = {
            id(tensor): tensor.to(torch.float8_e4m3fn).to(tensor.dtype)
            for tensor in caches
        }
        own = {name: coarse.get(id(value), value) for name, value in given.items()}
        return function(*(coarse.get(id(value), value) for value in args), **own)

    return call


def slows_reference(function: Function) -> Function:
    """Keep the host busy in another thread while no call is made."""
    ended = [math.inf]

    def burn() -> None:
        while True:
            if 0.03 < time.monotonic() - ended[0] < 3:
                sum(range(200_000))
            else:
                time.sleep(0.005)

    def call(*args: Any, **given: Any) -> Any:
        if not any(thread.name == "burn" for thread in threading.enumerate()):
            threading.Thread(target=burn, name="burn", daemon=True).start()
        ended[0] = math.inf
        found = function(*args, **given)
        ended[0] = time.monotonic()
        return found

    return call


KINDS = (
    *("last_output", "same_objects", "same_addresses", "sum_of_queries"),
    *("untouched_output", "calls_reference", "reads_caller", "searches_memory"),
    *("detects_suite", "counts_calls", "writes_inputs", "replaces_comparator"),
    *("replaces_clock", "lazy_result", "after_return"),
    *("changes_defaults", "changes_constants", "changes_verdict", "hides_builtin"),
    *("rejects_cases", "raises_outside", "repoints_output", "own_methods"),
    *("leaves_modes", "profiles_judge", "reads_traceback", "asks_logging"),
    "copies_reference",
    *("stale_plan", "stale_scale", "static_output", "versions", "last_requests"),
    *("knows_factors", "fp8_later", "slows_reference"),
)

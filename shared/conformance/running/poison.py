"""Search for the cache slot whose poison reached an output.

Every slot that is not allocated holds NaN. If an output is NaN, the failing call is repeated with
the NaN of half of these slots replaced by 0, until one slot is left whose NaN alone makes the
output NaN. The search runs in a process of its own, because the kernel under test may crash.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ...contract.operations import load_implementation
from ..base.child_process import lines_of, start
from ..base.results import (
    AROUND,
    AROUND_QUERY,
    NOT_WRITTEN,
    WITHOUT_POISON,
    Result,
    Status,
    size_of_input,
)
from ..candidates.candidate import load_candidate
from ..candidates.setting import Setting
from ..cases.forms import words_of_strides
from ..checks.canaries import memory_of
from ..laws.law import Law
from .trial import find_law, make_case, make_setting, run_law

SECONDS = 60.0
"""Time limit of the whole search."""
MAX_ELEMENTS = 1 << 24
"""Larger caches are not searched."""
SENTINEL = 12345.0
"""The value of outputs that are allocated to find elements that are not written."""
OPERATION = "paged_attention"

Slot = tuple[str, int, int]
"""Name of the cache, block and slot."""


def explain_nans(
    implementation: str,
    device: str,
    results: Sequence[Result],
    seconds: float = SECONDS,
) -> list[Result]:
    """Return the results with the cause of each NaN that was found.

    Args:
        implementation: As in `check_implementation`.
        device: The device of the tensors.
        results: Results of laws. Those that are not NaN are returned as they are.
        seconds: Time limit of the search.
    """
    # the time may be over before the end, and small inputs are the ones to read first
    wanted = sorted(
        (result for result in results if _is_nan(result)), key=size_of_input
    )
    if not wanted:
        return list(results)
    causes = _search(implementation, device, wanted, min(seconds, SECONDS))
    return [replace(result, cause=causes.get(result.law, "")) for result in results]


def explain_nan(law: Law, setting: Setting, case: str) -> str:
    """Return where the NaN in an output comes from, or an empty string if that is not found.

    Args:
        law: The law that found NaN.
        setting: The candidate, the reference and the device.
        case: The case as Python.
    """
    call = _last_call(law, setting, case)
    return "" if call is None else call.cause()


def main(say: Callable[[str], None]) -> None:
    """Search for the causes of the failures that standard input lists."""
    request = json.loads(sys.stdin.read())
    setting = make_setting(load_candidate(request["implementation"]), request["device"])
    torch.set_num_threads(1)
    for name, case in request["failures"]:
        say(json.dumps([name, explain_nan(find_law(name), setting, case)]))


def _is_nan(result: Result) -> bool:
    failed = result.status in (Status.BROKEN, Status.KNOWN)
    return failed and result.found == "nan" and bool(result.case)


def _search(
    implementation: str, device: str, failures: Sequence[Result], seconds: float
) -> dict[str, str]:
    """Return the causes that were found before a crash or the time limit, by law."""
    process = start(__name__, device, subprocess.DEVNULL)
    request = {
        "implementation": implementation,
        "device": device,
        "failures": [(failure.law, failure.case) for failure in failures],
    }
    try:
        said, _ = process.communicate(json.dumps(request), seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    return dict(json.loads(line) for line in lines_of(iter(said.splitlines(True))))


def _last_call(law: Law, setting: Setting, case: str) -> "_Call | None":
    """Return the last attention call before the law fails, or None if it made none."""
    function = setting.candidate.operations.get(OPERATION)
    if function is None:
        return None
    calls: list[_Call] = []

    @wraps(function)
    def recorded(*args: Any, **given: Any) -> Any:
        calls[:] = [_Call(function, args, given)]
        calls[0].output = function(*args, **given)
        return calls[0].output

    candidate = setting.candidate.with_operations(**{OPERATION: recorded})
    try:
        run_law(law, replace(setting, candidate=candidate), make_case(law, case))
    except Exception:
        return calls[0] if calls else None
    return None


class _Call:
    """One call of attention that can be repeated with other content in its caches."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        given: Mapping[str, Any],
    ) -> None:
        order = list(_parameters())
        self.function = function
        self.arguments = dict(zip(order, args, strict=False)) | dict(given)
        self.output: Any = None

    def cause(self) -> str:
        """Return where the NaN in the output comes from, or an empty string."""
        caches: dict[str, Tensor] = {
            name: self.arguments[name]
            for name in ("key_cache", "value_cache")
            if isinstance(self.arguments.get(name), Tensor)
        }
        if not isinstance(self.output, Tensor) or len(caches) < 2:
            return ""
        if any(cache.numel() > MAX_ELEMENTS for cache in caches.values()):
            return ""
        nan = self.output.float().isnan()
        if not bool(nan.any()):
            return ""
        # the views that the call got are modified, so the strides are the same
        before = {name: cache.clone() for name, cache in caches.items()}
        try:
            return self._cause(nan, before)
        finally:
            for name, cache in before.items():
                caches[name].copy_(cache)

    def _cause(self, nan: Tensor, before: dict[str, Tensor]) -> str:
        slots: list[Slot] = [
            (name, *place)
            for name, cache in before.items()
            for place in cache.float().isnan().all(-1).all(-1).nonzero().tolist()
        ]
        token = int(nan.flatten(1).any(1).nonzero()[0])
        if self._is_nan(nan, before, []):
            same = self._repeat(before, [], SENTINEL) == SENTINEL
            if bool((same & nan).any()):
                return f"the output of token {token} {NOT_WRITTEN}"
            return self._without_slots(token, nan, before)
        while len(slots) > 1:
            half = slots[: len(slots) // 2]
            slots = (
                half if self._is_nan(nan, before, half) else slots[len(slots) // 2 :]
            )
        if not slots or not self._is_nan(nan, before, slots):
            return ""  # several slots are needed together
        return self._describe(token, *slots[0])

    def _without_slots(self, token: int, nan: Tensor, before: dict[str, Tensor]) -> str:
        """Return where NaN comes from that no slot holds: from memory that strides skip?"""
        query = self.arguments["query"]
        for views, words in (
            ([self.arguments[name] for name in before], AROUND),
            ([query], AROUND_QUERY),
        ):
            memories = [memory_of(view).view(view.dtype) for view in views]
            if any(memory.numel() > MAX_ELEMENTS for memory in memories):
                return ""
            kept = [memory.clone() for memory in memories]
            own = query.clone()
            for memory in memories:
                memory.copy_(memory.float().nan_to_num(0.0, torch.inf, -torch.inf))
            query.copy_(own)  # the query keeps its own NaN
            is_nan = self._is_nan(nan, before, [])
            for memory, its in zip(memories, kept, strict=True):
                memory.copy_(its)
            if not is_nan:
                stored = (
                    ""
                    if query.is_contiguous() or words == AROUND
                    else words_of_strides("query", query)
                )
                found = f"the output of token {token} contains the poison of {words}"
                return f"{found}: {stored}" if stored else found
        return f"the output of token {token} {WITHOUT_POISON}"

    def _is_nan(
        self, nan: Tensor, before: dict[str, Tensor], slots: Sequence[Slot]
    ) -> bool:
        """Return whether the output is NaN if only these slots hold poison."""
        return bool((self._repeat(before, slots).float().isnan() & nan).any())

    def _repeat(
        self,
        before: dict[str, Tensor],
        slots: Sequence[Slot],
        fill: float = float("nan"),
    ) -> Tensor:
        """Return the output of the call if only these slots hold poison."""
        for name, cache in before.items():
            changed = cache.float().nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
            for _, block, slot in (slot for slot in slots if slot[0] == name):
                changed[block, slot] = torch.nan
            self.arguments[name].copy_(changed)
        for name in ("out", "lse"):
            if isinstance(self.arguments.get(name), Tensor):
                self.arguments[name].fill_(fill)
        output: Tensor = self.function(**self.arguments).clone()
        return output

    def _describe(self, token: int, cache: str, block: int, slot: int) -> str:
        """Return the sentence about one slot."""
        size = self.arguments["key_cache"].shape[1]
        seq_lens = self.arguments["seq_lens"].tolist()
        starts = self.arguments["query_start_loc"].tolist()
        rows = [
            row[: -(-seq_len // size)]
            for row, seq_len in zip(
                self.arguments["block_table"].tolist(), seq_lens, strict=False
            )
        ]
        own = max((req for req in range(len(rows)) if starts[req] <= token), default=0)
        where = "a block that no request uses"
        # the token's own request first, because requests may share a block
        for req in sorted(range(len(rows)), key=lambda req: req != own):
            if block in rows[req]:
                entry = len(rows[req]) - 1 - rows[req][::-1].index(block)
                where = (
                    f"position {entry * size + slot} of request {req}, which is past its"
                    f" seq_len = {seq_lens[req]}"
                )
                break
        return (
            f"the output of token {token} contains the poison of slot {slot} of block"
            f" {block} in {cache}: {where}"
        )


def _parameters() -> Sequence[str]:
    import inspect

    operation = getattr(load_implementation("reference"), OPERATION)
    return list(inspect.signature(operation).parameters)

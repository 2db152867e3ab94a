"""Probe: a first SUPPORT of a kernel, found by calling it.

One call of `paged_attention` that the kernel takes is the start. Then properties get other values:
dtypes, sizes, layouts, options. A kernel is compiled anew for most calls, so one call changes a
property of each kind. If it is not taken, its halves are tried.

What the kernel returns from is supported. What it raises for, or what ends its process, is not.
Results are compared too: a wrong one is supported and named in a comment, because only the author
knows whether it is a bug or out of scope.
"""

import math
import time
from collections.abc import Callable
from itertools import combinations, zip_longest
from typing import Any

from ...validation.options import OPTIONS as OPTION_FILES
from ..base.results import Result, Status
from ..cases.option_pairs import OPTIONS, PLAIN, Choice, allowed
from ..running.worker import Job, Worker
from .probe_calls import (
    CAUSAL,
    DTYPES,
    FIELDS,
    LAW,
    OPTION_NAMES,
    SCALES,
    SIZES,
    STORED,
    STRIDES,
    Change,
    bases,
    case_of,
    compatible,
    words,
)
from .probe_source import as_python, comments, layouts, lengths

MINUTES = 5.0
"""Time limit of a probe."""


def probe_support(
    implementation: str,
    device: str,
    seconds_of_a_case: float = 120.0,
    on_try: Callable[[str], None] = lambda what: None,
    minutes: float = MINUTES,
) -> str:
    """Return the source of a SUPPORT, with comments on calls that gave a wrong result.

    An interrupt has the effect of the time limit: what was found until then is returned.

    Args:
        implementation: As in `check_implementation`. Its own SUPPORT is ignored.
        device: The device of the tensors.
        seconds_of_a_case: A call that takes longer is not supported.
        on_try: Called with what is tried next, in words.
        minutes: Time limit. What has not been tried by then is not declared, and named in a
            comment.

    Raises:
        ValueError: The implementation has no `paged_attention`, or takes none of the calls.
        ImportError: It cannot be imported.
    """
    deadline = time.monotonic() + 60 * minutes
    worker = Worker(
        implementation, device, seconds_of_a_case=seconds_of_a_case, deadline=deadline
    )
    try:
        return _Probe(worker, on_try).source()
    finally:
        worker.stop()


class _Probe:
    """The calls that were tried, and what became of them."""

    def __init__(self, worker: Worker, on_try: Callable[[str], None]) -> None:
        self.worker, self.on_try = worker, on_try
        self.base: Choice = {}
        self.seed = 0
        self.options: dict[str, Any] = {}
        self.tensor_dtypes: dict[str, list[str]] = {}
        self.calls = 0
        self.together: list[set[Change]] = []
        """The changes of each call that was taken."""
        self.wrong: dict[str, list[Choice]] = {}
        """The changes of calls with a wrong result, by what was wrong."""
        self.is_first_wrong = False
        self.untried: dict[str, list[str]] = {}

    def taken(self, changes: list[Change]) -> list[Change]:
        """Return those changes of the first call that the kernel takes, together or alone.

        All are tried in one call. If it is not taken, or wrong, each half is tried.
        """
        if len(changes) < 2:
            return changes if changes and self.takes(dict(changes)) else []
        result = self._try(dict(changes))
        if result.status == Status.UNFINISHED:
            for change in changes:
                self._note_untried(dict([change]))
            return []
        if result.status == Status.HELD:
            self.together.append({*changes})
            return changes
        half = len(changes) // 2
        return self.taken(changes[:half]) + self.taken(changes[half:])

    def takes(self, changes: Choice) -> bool:
        """Return whether the kernel returns from the first call with some changes."""
        result = self._try(changes)
        if result.status == Status.UNFINISHED:
            self._note_untried(changes)
        is_taken = result.status == Status.HELD or _is_wrong(result)
        if is_taken:
            self.together.append({*changes.items()})
        if _is_wrong(result):
            self._note_wrong(changes, result)
        return is_taken

    def _try(self, changes: Choice) -> Result:
        """Return the result of the first call with some changes."""
        self.calls += 1
        self.on_try(f"call {self.calls}: {words(changes)}")
        options = self.options | {
            name: None for name in changes if name in ("out", "lse", *OPTION_NAMES)
        }
        if "scales" in changes:
            options |= {"k_scale": None, "v_scale": None}
        support = {"options": options, "tensor_dtypes": self.tensor_dtypes}
        law, case = case_of(self.base, self.seed, changes)
        job = Job(law, case=case, probe=support)
        try:
            return self.worker.try_law(job, "attention")
        except KeyboardInterrupt:
            self.worker.stop()
            self.worker.deadline = -math.inf
            return Result(LAW, "attention", Status.UNFINISHED)

    def _note_wrong(self, changes: Choice, result: Result) -> None:
        self.wrong.setdefault(result.symptom[1], []).append(changes)

    def _note_untried(self, changes: Choice) -> None:
        ((name, value),) = (
            changes.items() if len(changes) == 1 else [("", words(changes))]
        )
        self.untried.setdefault(name, []).append(value)

    def source(self) -> str:
        """Return the source of a SUPPORT."""
        self._find_base()
        for name, _ in self.taken([("out", "given"), ("lse", "given")]):
            self.options[name] = None
        values = self._find_values()
        found: dict[str, Any] = {"operations": ["paged_attention"]}
        found["devices"] = [self.worker.device.partition(":")[0]]
        found["dtypes"] = [dtype for dtype in DTYPES if dtype in values["dtype"]]
        for name, plural in FIELDS.items():
            if len(values[name]) < len(SIZES[name]):
                found[plural] = sorted(map(int, values[name]))
        found |= layouts(values) | lengths(values["batch"])
        chosen = self._find_options()
        found["cache_dtypes"] = [*found["dtypes"], *self._scales()]
        if never := self._never_together(chosen):
            found["never_together"] = never
        found |= {"options": self.options, "tensor_dtypes": self.tensor_dtypes}
        found["rejects"] = []
        lines = comments(self.wrong, self.untried)
        if self.is_first_wrong:
            lines.insert(
                0,
                "# Even the first call gave a wrong result: fix it, then probe again.",
            )
        return as_python(found, lines)

    def _find_base(self) -> None:
        """Find a call that the kernel takes, by dtype, sizes and kind of batch."""
        first = ""
        for self.seed, self.base in bases():
            result = self._try({})
            if result.status == Status.HELD:
                return
            if _is_wrong(result):
                names = ("batch", "dtype", "head_size", "block_size")
                self._note_wrong({name: self.base[name] for name in names}, result)
                self.is_first_wrong = True
                return
            if result.status == Status.UNFINISHED:
                over = f"the time was over after call {self.calls - 1}"
                first = f"{first}; {over}" if first else over
                break
            first = first or result.summary
        raise ValueError(
            f"{self.worker.implementation}: no call of paged_attention succeeded, such as head"
            f" size 128, blocks of 16: {first}"
        )

    def _find_values(self) -> dict[str, list[str]]:
        """Return the values of each property that are taken, those of the first call among them."""
        axes = {name: [str(size) for size in sizes] for name, sizes in SIZES.items()}
        axes |= {"dtype": [*DTYPES], "batch": ["mixed"]}
        axes["layout"] = [*OPTIONS["layout"].values]
        axes |= {name: [*forms] for name, forms in STRIDES.items()}
        if "out" not in self.options:
            axes.pop("out strides")
        found = {name: [self.base.get(name, "packed")] for name in axes}
        changes = [
            [(name, value) for value in values if value not in found[name]]
            for name, values in axes.items()
        ]
        for round_ in zip_longest(*changes):
            for name, value in self.taken([change for change in round_ if change]):
                found[name].append(value)
        if "mixed" not in found["batch"]:
            others = ("prefill", "verification", "decode")
            for value in (kind for kind in others if kind != self.base["batch"]):
                found["batch"] += [value] * self.takes({"batch": value})
        return found

    def _find_options(self) -> list[Change]:
        """Declare the options, and those of their values, that are taken. Return one of each."""
        chosen: dict[str, str] = {}
        columns = [
            [(name, value) for value in OPTIONS[name].values[1:] if value != "cross"]
            for name in OPTION_NAMES
        ]
        for round_ in zip_longest(*columns):
            rest = [change for change in round_ if change]
            rest = [
                change
                for change in rest
                if change[0] not in chosen or change[0] == "causal"
            ]
            while rest:
                group = compatible(self.base, rest)
                rest = [change for change in rest if change not in group]
                for name, value in self.taken(group):
                    chosen.setdefault(name, value)
                    if name == "causal":
                        kinds = [*self.options.get(name, ()), CAUSAL[value]]
                        self.options[name] = kinds
                    else:
                        self.options[name] = None
        if "sinks" not in chosen and "sinks" not in self.untried:
            self.tensor_dtypes = {"sinks": ["bfloat16"]}
            if self.takes({"sinks": "sinks"}):
                chosen["sinks"], self.options["sinks"] = "sinks", None
            else:
                self.tensor_dtypes = {}
        return [*chosen.items()]

    def _scales(self) -> list[str]:
        """Declare the scales of an FP8 cache, and return the FP8 dtypes that are taken."""
        caches: list[str] = []
        scales = [*SCALES]
        for cache, dtype in STORED.items():
            taken = [
                kind for kind in scales if self.takes({"cache": cache, "scales": kind})
            ]
            if not taken:
                continue
            if not caches:
                kinds = [SCALES[kind] for kind in taken]
                self.options |= {"k_scale": kinds, "v_scale": kinds}
            caches.append(dtype)
            scales = taken[:1]  # the scales of another dtype are not tried again
        return caches

    def _never_together(self, chosen: list[Change]) -> list[Change]:
        """Return the pairs of options that are taken alone and not together."""
        named = [(name, value) for name, value in chosen if name in OPTION_FILES]
        self.taken(compatible(self.base, named))
        return [
            (one[0], other)
            for one, (other, its) in combinations(named, 2)
            if (values := self._values_beside(one, other))
            and not self._are_together(
                one, (other, its if its in values else values[-1])
            )
        ]

    def _values_beside(self, change: Change, other: str) -> list[str]:
        """Return the values of another option that can be combined with a change."""
        beside = {name: its for name, its in self.base.items() if name != other}
        values = allowed(beside | dict([change]), other)
        return [value for value in values if value != PLAIN[other]]

    def _are_together(self, one: Change, other: Change) -> bool:
        """Return whether the kernel takes two changes in one call."""
        return any({one, other} <= changes for changes in self.together) or self.takes(
            dict((one, other))
        )


def _is_wrong(result: Result) -> bool:
    """Return whether the kernel returned, with a result that was not right."""
    return result.status == Status.BROKEN and bool(result.what)

"""Probe: a first SUPPORT of a kernel, found by calling it.

One call of `paged_attention` that the kernel takes is the start. Then one property at a time gets
another value: a dtype, a size, a layout, an option. What the kernel returns from is supported. What
it raises for, or what ends its process, is not. Results are compared too: a wrong one is supported
and named in a comment, because only the author knows whether it is a bug or out of scope.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import combinations, product
from typing import Any

from ...validation.options import OPTIONS as OPTION_FILES
from ..generators.option_pairs import OPTIONS, PLAIN, Choice, allowed
from .report import Result, Status
from .support import Support
from .worker import Job, Worker

LAW = "paged attention is right under any options"
SEEDS = range(4)
SIZES: dict[str, tuple[int, ...]] = {
    "head_size": (128, 64, 256, 32, 16, 80, 96, 112, 160, 192, 512, 24, 8, 1),
    "block_size": (16, 64, 256, 1, 3, 8, 24, 32, 48, 128, 512),
    "group": (1, 2, 3, 4, 5, 7, 8, 16),
}
DTYPES = ("bfloat16", "float16", "float32")
STORED = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
SCALES = {"numbers": "float", "one element": "one element", "each head": "per head"}
CAUSAL = {"no": "bool", "each request": "per request"}


def probe_support(
    implementation: str,
    device: str,
    seconds_of_a_case: float = 120.0,
    on_try: Callable[[str], None] = lambda what: None,
    minutes: float | None = None,
) -> str:
    """Return the source of a SUPPORT, with comments on calls that gave a wrong result.

    Args:
        implementation: As in `check_implementation`. Its own SUPPORT is ignored.
        device: The device of the tensors.
        seconds_of_a_case: A call that takes longer is not supported.
        on_try: Called with what is tried next, in words.
        minutes: Optional. Time limit. What has not been tried by then is not declared. If None,
            there is none.

    Raises:
        ValueError: The implementation has no `paged_attention`, or takes none of the calls.
        ImportError: It cannot be imported.
    """
    worker = Worker(implementation, device, seconds_of_a_case=seconds_of_a_case)
    if minutes is not None:
        worker.deadline = time.monotonic() + 60 * minutes
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
        self.support: dict[str, Any] = {"options": {}}
        self.wrong: list[str] = []
        self.untried: list[str] = []
        self.last = ""

    def takes(self, choice: Choice, what: str = "") -> bool:
        """Return whether the kernel returns from a call."""
        self.on_try(what)
        result = self._run(choice)
        if result.status == Status.BROKEN and result.what:
            self.wrong.append(f"{what}: {result.what}, {result.where}".lstrip(": "))
            return True
        self.last = result.summary
        if result.status == Status.UNFINISHED:
            self.untried.append(what)
        return result.status == Status.HELD

    def _run(self, choice: Choice) -> Result:
        case = repr((choice, self.seed))
        return self.worker.try_law(Job(LAW, case=case, probe=self.support), "attention")

    def source(self) -> str:
        """Return the source of a SUPPORT."""
        self._find_base()
        base_was_wrong = list(self.wrong)
        self._find_outputs()
        found: dict[str, Any] = {"operations": ["paged_attention"]}
        found["devices"] = [self.worker.device.partition(":")[0]]
        found["dtypes"] = self._values("dtype", DTYPES)
        for name, plural in (
            ("head_size", "head_sizes"),
            ("block_size", "block_sizes"),
            ("group", "group_sizes"),
        ):
            sizes = sorted(map(int, self._values(name, map(str, sorted(SIZES[name])))))
            if len(sizes) < len(SIZES[name]):
                found[plural] = sizes
        found |= self._layouts() | self._lengths()
        self._find_options()
        found["cache_dtypes"] = [*found["dtypes"], *self._scales()]
        options = dict(self.support["options"])
        if never := self._never_together(options):
            found["never_together"] = never
        found["options"] = options
        found["tensor_dtypes"] = self.support.get("tensor_dtypes", {})
        found["rejects"] = []
        return _as_python(found, base_was_wrong + self.wrong, self.untried)

    def _find_base(self) -> None:
        """Find a call that the kernel takes, by dtype, sizes and kind of batch."""
        plain = PLAIN | {"query": "apart", "lse": "none", "out": "made"}
        first = ""
        for batch, seed in product(("prefill", "decode"), SEEDS):
            for head, block, dtype in product(
                SIZES["head_size"][:5], SIZES["block_size"][:4], DTYPES
            ):
                if seed and (head, block) != (128, 16):
                    continue  # other seeds differ in the bounds of lengths
                self.seed = seed
                self.base = plain | {
                    "batch": batch,
                    "head_size": str(head),
                    "block_size": str(block),
                    "dtype": dtype,
                }
                if self.takes(self.base, f"{batch}, {dtype}, head size {head}"):
                    return
                first = first or self.last
        raise ValueError(
            f"{self.worker.implementation}: no call of paged_attention succeeded, such as head"
            f" size 128, blocks of 16: {first}"
        )

    def _find_outputs(self) -> None:
        """Find out whether an output and a log-sum-exp may be passed."""
        for name in ("out", "lse"):
            declared = self.support["options"]
            self.support = self.support | {"options": declared | {name: None}}
            if not self.takes(self.base | {name: "given"}, f"option {name}"):
                self.support = self.support | {"options": declared}

    def _values(self, name: str, values: Any) -> list[str]:
        """Return the values of an axis that are taken, the base's among them."""
        return [
            value
            for value in values
            if value == self.base[name]
            or self.takes(self.base | {name: value}, f"{name} {value}")
        ]

    def _layouts(self) -> dict[str, Any]:
        """Return the KV layouts, strides and alignment that are needed."""
        taken = self._values("layout", OPTIONS["layout"].values)
        found: dict[str, Any] = {}
        if "hnd" not in taken:
            found["kv_layouts"] = ["NHD"]
        if "every other element" not in taken:
            rows = "rows" if {"interleaved", "interleaved hnd"} & {*taken} else "packed"
            found["strides"] = {"key_cache": rows, "value_cache": rows}
            if rows == "rows" and "padded" not in taken:
                found["alignment"] = 16
        if not self.takes(self.base | {"query": "fused"}, "a fused query"):
            found.setdefault("strides", {})["query"] = "packed"
        return found

    def _lengths(self) -> dict[str, Any]:
        """Return the numbers of new tokens, if not all are taken."""
        taken = self._values("batch", ("mixed", "prefill", "verification", "decode"))
        if "mixed" in taken:
            return {}
        if "prefill" in taken:
            return {"query_lens": range(1, 1 << 20)}
        return {"query_lens": range(1, 6 if "verification" in taken else 2)}

    def _find_options(self) -> None:
        """Add the options, and those of their values, that are taken."""
        for name in (*OPTION_FILES, "scale", "value_head_size"):
            if name == "batch_invariant":
                continue
            values = [each for each in OPTIONS[name].values[1:] if each != "cross"]
            kept = self.support
            options = kept["options"] | {name: None}
            self.support = kept | {"options": options}
            taken = [
                each
                for each in values
                if self.takes(self.base | {name: each}, f"{name} {each}")
            ]
            if not taken and name == "sinks":
                dtypes = kept.get("tensor_dtypes", {}) | {name: ["bfloat16"]}
                self.support = self.support | {"tensor_dtypes": dtypes}
                taken = values * self.takes(self.base | {name: values[0]}, "sinks")
            if not taken:
                self.support = kept
            elif name == "causal":
                kinds = {name: [CAUSAL[each] for each in taken]}
                self.support = kept | {"options": options | kinds}

    def _scales(self) -> list[str]:
        """Add the scales of an FP8 cache, and return the FP8 dtypes that are taken."""
        kept = self.support
        found: dict[str, list[str]] = {}
        scales = {"k_scale": None, "v_scale": None}
        self.support = kept | {"options": kept["options"] | scales}
        for cache in STORED:
            stored = self.base | {"cache": cache}
            kinds = [
                SCALES[each]
                for each in SCALES
                if self.takes(stored | {"scales": each}, f"cache {cache}")
            ]
            found |= {cache: kinds} if kinds else {}
        options = dict.fromkeys(scales, next(iter(found.values()))) if found else {}
        self.support = kept | {"options": kept["options"] | options}
        return [STORED[each] for each in found]

    def _never_together(self, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Return the pairs of options that are taken alone and not together."""
        named = [name for name in options if name in OPTION_FILES]
        return [
            (one, other)
            for one, other in combinations(named, 2)
            if any(True for _ in self._pair(one, other))
            and not any(
                self.takes(choice, f"{one} with {other}")
                for choice in self._pair(one, other)
            )
        ]

    def _pair(self, one: str, other: str) -> Iterator[Choice]:
        """Yield the call with two options, if they can be combined at all."""
        value = "no" if one == "causal" else OPTIONS[one].values[-1]
        choice = self.base | {one: value}
        rest = {name: its for name, its in choice.items() if name != other}
        values = [each for each in allowed(rest, other) if each != PLAIN[other]]
        if values:
            yield choice | {other: values[-1]}


def _as_python(found: dict[str, Any], wrong: list[str], untried: list[str]) -> str:
    """Return the source of a Support, with comments."""
    options = found["options"]
    if all(value is None for value in options.values()):
        found = found | {"options": [*options]}
    Support(**found)  # raises if it contradicts itself
    lines = ["from pagetwin.conformance import Support", ""]
    lines += [f"# wrong: {each}" for each in dict.fromkeys(wrong)]
    lines += [f"# not tried: {each}" for each in dict.fromkeys(untried)]
    lines.append("SUPPORT = Support(")
    for each in fields(Support):
        value = found.get(each.name)
        if value is not None and value != {}:
            lines.append(f"    {each.name}={value!r},")
    return "\n".join([*lines, ")"])

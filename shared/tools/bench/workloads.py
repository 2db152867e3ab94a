"""Workloads of the benchmark, and the minimum of bytes and operations that each one needs.

A workload is one batch: the number of requests, their lengths, the heads, the visible keys. Its
bytes and operations are the minimum for any kernel, so its floor depends on the machine alone.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...contract.kinds import FP8_DTYPES

KINDS = ("decode", "cross", "prefill", "mixed", "encoder", "write")
TINY_LEN = 48


@dataclass(frozen=True)
class Workload:
    """One batch.

    Args:
        name: Name of the workload.
        kind: One of KINDS. "encoder" has no cache, "write" is a cache write without attention.
        about: What it shows.
        query_lens: [reqs] new tokens of each request.
        kv_lens: [reqs] tokens of each request, the new ones included.
        query_heads, kv_heads, head_size: Sizes of the layer.
        block_size: Slots per block.
        dtype, kv_dtype: Dtype of queries and outputs, and of the cache.
        causal: Whether a query attends only to keys up to its own position.
        sliding_window: Optional. Keys that a query attends to, its own position included. If
            None, the window is unlimited.
    """

    name: str
    kind: str
    about: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    query_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    sliding_window: int | None = None

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.query_lens)

    @property
    def is_ragged(self) -> bool:
        """Whether two requests differ in length."""
        return len(set(zip(self.query_lens, self.kv_lens, strict=True))) > 1

    @property
    def is_quantised(self) -> bool:
        """Whether the cache is FP8, so that it is read with scales."""
        return self.kv_dtype in FP8_DTYPES

    @property
    def bytes(self) -> int:
        """Minimum of bytes moved: keys, values and queries read once, outputs written once.

        Example:
            One request, 2 new tokens of 10 in a window of 4, 2 query heads, 1 kv head of 8,
            16 bits: its queries attend to the last 5 keys, 5 * 1 * (8 + 8) * 2 = 160 bytes; queries
            and outputs are 2 * 2 * (8 + 8) * 2 = 128 more.
        """
        row = self.kv_heads * 2 * self.head_size
        if self.kind == "write":
            return self.tokens * row * (self.dtype.itemsize + self.kv_dtype.itemsize)
        read = sum(
            min(kv, (self.sliding_window or kv) + new - 1)
            for new, kv in zip(self.query_lens, self.kv_lens, strict=True)
        )
        rows = self.tokens * self.query_heads * 2 * self.head_size
        return read * row * self.kv_dtype.itemsize + rows * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Minimum of operations: 4 * head_size per query head, query and visible key.

        Example:
            One request, 2 new tokens of 10 in a window of 4: each attends to 4 keys. With 2 query
            heads of 8 that is 4 * 8 * 2 * 8 = 512.
        """
        if self.kind == "write":
            return 0
        pairs = 0
        for new, kv in zip(self.query_lens, self.kv_lens, strict=True):
            window = self.sliding_window or kv
            for index in range(new):
                pairs += min(kv - new + index + 1, window) if self.causal else kv
        return 4 * self.head_size * self.query_heads * pairs

    def tiny(self) -> "Workload":
        """Return a small version of the workload, to be run in an interpreter."""
        shown = sorted({0, len(self.kv_lens) - 1})
        group = self.query_heads // self.kv_heads
        return replace(
            self,
            query_lens=tuple(
                min(_tiny(self.query_lens[req]), _tiny(self.kv_lens[req]))
                for req in shown
            ),
            kv_lens=tuple(_tiny(self.kv_lens[req]) for req in shown),
            query_heads=2 * min(group, 2),
            kv_heads=2,
            head_size=32,
            sliding_window=None if self.sliding_window is None else 16,
        )


def _tiny(length: int) -> int:
    """Return a length of few blocks. Lengths up to 4 stay as they are."""
    return length if length <= 4 else min(max(length // 64, 5), TINY_LEN)


def load_workloads() -> dict[str, Workload]:
    """Return all workloads by name, in the order in which they are run."""
    path = Path(__file__).with_name("workloads.json")
    stored = json.loads(path.read_text(encoding="utf-8"))
    found = [_parse(stored["defaults"] | each) for each in stored["workloads"]]
    return {each.name: each for each in found}


def _parse(stored: dict[str, Any]) -> Workload:
    if stored["lens"] == "ragged":
        kv_lens = ragged_lens(stored["count"], **stored["ragged"])
        lens = [(1, kv) for kv in kv_lens]
    else:
        lens = [(new, kv) for count, new, kv in stored["lens"] for _ in range(count)]
    assert stored["kind"] in KINDS
    return Workload(
        name=stored["name"],
        kind=stored["kind"],
        about=stored["about"],
        query_lens=tuple(new for new, _ in lens),
        kv_lens=tuple(kv for _, kv in lens),
        query_heads=stored["num_query_heads"],
        kv_heads=stored["num_kv_heads"],
        head_size=stored["head_size"],
        block_size=stored["block_size"],
        dtype=getattr(torch, stored["dtype"]),
        kv_dtype=getattr(torch, stored["kv_dtype"]),
        causal=stored["causal"],
        sliding_window=stored.get("sliding_window"),
    )


def ragged_lens(
    count: int, seed: int, median: float, sigma: float, least: int, most: int
) -> list[int]:
    """Return [count] lengths whose logarithms are normal, rounded and clipped."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return [int(length) for length in np.clip(np.round(drawn), least, most)]


def choose_workloads(names: Sequence[str]) -> list[Workload]:
    """Return the workloads with these names or patterns ("decode-*"). Without names, all of them.

    Raises:
        ValueError: No workload has one of the names. The message lists similar names.
    """
    known = load_workloads()
    if not names:
        return list(known.values())
    chosen: dict[str, Workload] = {}
    for name in names:
        found = [each for each in known if fnmatchcase(each, name)]
        if not found:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"workload = {name!r}: {meant}expected some of {', '.join(known)},"
                " or a pattern such as 'decode-*'"
            )
        chosen |= {each: known[each] for each in found}
    return [each for each in known.values() if each.name in chosen]


def published_figures(device: str) -> dict[str, Any] | None:
    """Return published figures of other libraries on a GPU, or None if there are none."""
    path = Path(__file__).with_name("published.json")
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored if device == stored["device"] else None


def best_published(stored: dict[str, Any], name: str) -> tuple[str, float] | None:
    """Return the fastest accurate library of a workload, and its microseconds."""
    figures = stored["workloads"].get(name, {})
    libraries = {
        library: float(us)
        for library, us in figures.items()
        if library not in ("floor", "inaccurate")
    }
    return min(libraries.items(), key=lambda each: each[1]) if libraries else None

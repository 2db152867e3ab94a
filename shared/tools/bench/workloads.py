"""Workloads of the benchmark, and the minimum of bytes and operations that each one needs.

A workload is one batch: the number of requests, their lengths, the heads, the visible keys. Its
bytes and operations are the minimum for any kernel, so its floor depends on the machine alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...contract.cache_formats import FORMATS, CacheFormat, find_format
from ..bench_names import choose_names, read_suite
from .sparse.costs import SPARSE_KINDS, sparse_bytes, sparse_flops

KINDS = (
    "decode", "cross", "prefill", "mixed", "latent", "cascade", "encoder", "write",
    *SPARSE_KINDS,
)  # fmt: skip
TINY_LEN = 48


@dataclass(frozen=True)
class Workload:
    """One batch.

    Args:
        name: Name of the workload.
        kind: One of KINDS. "encoder" has no cache, "write" is a cache write without attention. In
            "latent" the values are the first elements of the keys. In "cascade" all requests
            share a prefix. In "sparse" each token attends to selected keys; "score" and "select"
            find them.
        about: What it shows.
        query_lens: [reqs] new tokens of each request.
        kv_lens: [reqs] tokens of each request, the new ones included.
        query_heads, kv_heads, head_size: Sizes of the layer.
        block_size: Slots per block.
        dtype, kv_dtype: Dtype of queries and outputs, and of the cache.
        causal: Whether a query attends only to keys up to its own position.
        sliding_window: Optional. Keys that a query attends to on each side, its own position
            included. If None, the window is unlimited.
        value_head_size: Optional. Elements of a value. If None, `head_size`.
        logits_soft_cap: Optional. Cap of the scores. If None, they are not capped.
        sinks, alibi: Whether each query head has a sink, or a slope for the distance.
        batch_invariant: Whether ours has to be batch-invariant.
        query_dtype: Optional. FP8 dtype that represents all queries exactly. If None, queries
            have any values of `dtype`.
        shared_prefix: Tokens at the start of each request that all requests share.
        cache_format: Optional. A format that measures its scales. If None, the cache has numbers of
            `kv_dtype`, FP8 ones with the scale 1.
        in_page: Whether the scales of that format are in the pages of its codes.
        nope_head_size: Of latents: elements of an expanded key without position. They and the rope
            elements set the scale of the scores.
        selected: Of kinds "sparse" and "select": keys that a token selects. A token to which
            fewer are visible selects all of them.
        source: Where such a shape is found.
        baselines: Implementations to compare ours with. The fastest counts. If empty, all.
        aim: Optional. Largest ratio of our time to the baseline's that counts as met.
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
    value_head_size: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    batch_invariant: bool = False
    query_dtype: torch.dtype | None = None
    shared_prefix: int = 0
    nope_head_size: int | None = None
    selected: int = 0
    cache_format: str | None = None
    in_page: bool = False
    source: str = ""
    baselines: tuple[str, ...] = ()
    aim: float | None = None

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.value_head_size or self.head_size

    @property
    def shares_values(self) -> bool:
        """Whether the values are the first elements of the keys."""
        is_sparse = self.kind == "sparse" and self.kv_heads == 1
        return self.kind == "latent" or (is_sparse and self.value_size < self.head_size)

    @property
    def scale(self) -> float:
        """The factor of the dot products.

        Example:
            A latent of 512 elements and 64 of rope, from keys of 128 elements without position:
            (128 + 64) ** -0.5.
        """
        size = self.head_size
        if self.nope_head_size is not None:
            size = self.nope_head_size + self.head_size - self.value_size
        return float(size**-0.5)

    @property
    def features(self) -> set[str]:
        """What a library must support beyond a mask, a window and FP8 numbers, in words."""
        found = {
            "a soft cap": self.logits_soft_cap is not None,
            "a window to both sides": self.has_window_of_both_sides,
            "sinks": self.sinks,
            "ALiBi": self.alibi,
            "batch invariance": self.batch_invariant,
            "a latent cache": self.kind == "latent",
            "a shared prefix": self.kind == "cascade",
            "scales per token and head": self.form is not None
            and self.form.has_token_scales,
            "block scales": self.form is not None and self.form.has_global_scale,
            "values smaller than keys": self.kind != "latent"
            and self.value_size != self.head_size,
        }
        return {name for name, is_needed in found.items() if is_needed}

    @property
    def has_window_of_both_sides(self) -> bool:
        """Whether a query attends to a window of earlier and of later keys."""
        return self.sliding_window is not None and not self.causal

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
        """Whether the cache has codes, so that it is read with scales."""
        return self.form is not None or find_format(self.kv_dtype).is_quantised

    @property
    def form(self) -> CacheFormat | None:
        """The format that measures scales, or None."""
        return None if self.cache_format is None else FORMATS[self.cache_format]

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a key or value of so many elements in the cache."""
        if self.form is None:
            return size * self.kv_dtype.itemsize
        assert self.form.dtype is not None
        codes = self.form.elements(size) * self.form.dtype.itemsize
        return codes + self.form.scale_bytes(size)

    @property
    def bytes(self) -> int:
        """Minimum of bytes moved: keys, values and queries read once, outputs written once.

        A shared prefix is read once. The values of a latent cache are part of its keys.

        Example:
            One request, 2 new tokens of 10 in a window of 4, 2 query heads, 1 kv head of 8,
            16 bits: its queries attend to the last 5 keys, 5 * 1 * (8 + 8) * 2 = 160 bytes; queries
            and outputs are 2 * 2 * (8 + 8) * 2 = 128 more.
        """
        if self.kind in SPARSE_KINDS:
            return sparse_bytes(self)
        both = self.head_size + self.value_size
        row = self.row_bytes(self.head_size)
        if self.kind != "latent":
            row += self.row_bytes(self.value_size)
        row *= self.kv_heads
        if self.kind == "write":
            given = self.kv_heads * both * self.dtype.itemsize
            return self.tokens * (row + given)
        read = sum(
            min(kv, (self.sliding_window or kv) + new - 1)
            for new, kv in zip(self.query_lens, self.kv_lens, strict=True)
        )
        read -= self.shared_prefix * (len(self.kv_lens) - 1)
        rows = self.tokens * self.query_heads * both
        return read * row + rows * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Minimum of operations: 2 per element of a key or value, query head and visible key.

        Example:
            One request, 2 new tokens of 10 in a window of 4: each attends to 4 keys. With 2 query
            heads of 8 that is 4 * 8 * 2 * 8 = 512.
        """
        if self.kind == "write":
            return 0
        if self.kind in SPARSE_KINDS:
            return sparse_flops(self)
        pairs = 0
        for new, kv in zip(self.query_lens, self.kv_lens, strict=True):
            window = self.sliding_window or kv
            if self.has_window_of_both_sides:
                # of an encoder, less what is before the first key and after the last one
                reach = min(kv, window)
                pairs += kv * (2 * reach - 1) - reach * (reach - 1)
                continue
            if not self.causal:
                pairs += new * kv
                continue
            # the first queries see all keys up to their own position, the others a window
            first = kv - new + 1
            last = max(first - 1, min(kv, window))
            pairs += (first + last) * (last - first + 1) // 2 + window * (kv - last)
        return 2 * (self.head_size + self.value_size) * self.query_heads * pairs

    def tiny(self) -> "Workload":
        """Return a small version of the workload, to be run in an interpreter."""
        shown = sorted({0, len(self.kv_lens) - 1})
        group = self.query_heads // self.kv_heads
        kv_heads = min(self.kv_heads, 2)
        has_own_values = self.value_size != self.head_size
        return replace(
            self,
            query_lens=tuple(
                min(_tiny(self.query_lens[req]), _tiny(self.kv_lens[req]))
                for req in shown
            ),
            kv_lens=tuple(_tiny(self.kv_lens[req]) for req in shown),
            query_heads=kv_heads * min(group, 2),
            kv_heads=kv_heads,
            head_size=48 if has_own_values else 32,
            value_head_size=32 if has_own_values else None,
            nope_head_size=None if self.nope_head_size is None else 32,
            block_size=16,
            sliding_window=None if self.sliding_window is None else 16,
            shared_prefix=min(self.shared_prefix, 32),
            selected=min(self.selected, 16),
        )


def _tiny(length: int) -> int:
    """Return a length of few blocks. Lengths up to 4 stay as they are."""
    return length if length <= 4 else min(max(length // 64, 5), TINY_LEN)


def load_workloads(suite: str = "standard") -> dict[str, Workload]:
    """Return the workloads of a suite by name, in the order in which they are run.

    Raises:
        ValueError: The suite is not one of SUITES.
    """
    found = [_parse(stored) for stored in read_suite(suite)]
    return {workload.name: workload for workload in found}


def _parse(stored: dict[str, Any]) -> Workload:
    if stored["lens"] == "ragged":
        kv_lens = ragged_lens(stored["count"], **stored["ragged"])
        lens = [(1, kv) for kv in kv_lens]
    else:
        lens = [pair for entry in stored["lens"] for pair in _lens(entry)]
    assert stored["kind"] in KINDS
    query_dtype = stored.get("query_dtype")
    optional = {
        name: stored[name]
        for name in (
            "sliding_window", "value_head_size", "logits_soft_cap", "sinks", "alibi",
            "batch_invariant", "shared_prefix", "nope_head_size", "cache_format", "in_page",
            "selected", "source", "aim",
        )
        if name in stored
    }  # fmt: skip
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
        query_dtype=None if query_dtype is None else getattr(torch, query_dtype),
        baselines=tuple(stored.get("baselines", ())),
        **optional,
    )


def _lens(entry: list[int] | dict[str, Any]) -> list[tuple[int, int]]:
    """Return (new tokens, keys) of the requests of one entry of `lens`.

    Example:
        [2, 1, 4096] is two requests of 1 new token and 4,096 keys.
    """
    if isinstance(entry, list):
        count, new, keys = entry
        return [(new, keys)] * count
    count, random = entry["count"], np.random.default_rng(entry["seed"])

    def draw(numbers: int | list[int]) -> list[int]:
        if isinstance(numbers, int):
            return [numbers] * count
        low, high = numbers
        return [int(number) for number in random.integers(low, high, count)]

    news = draw(entry["new"])
    if "keys" in entry:
        return list(zip(news, draw(entry["keys"]), strict=True))
    before = draw(entry.get("before", 0))
    return [(new, old + new) for new, old in zip(news, before, strict=True)]


def ragged_lens(
    count: int, seed: int, median: float, sigma: float, least: int, most: int
) -> list[int]:
    """Return [count] lengths whose logarithms are normal, rounded and clipped."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return [int(length) for length in np.clip(np.round(drawn), least, most)]


def choose_workloads(names: Sequence[str], suite: str = "standard") -> list[Workload]:
    """Return the workloads of a suite with these names or patterns ("decode-*").

    Without names, all of them.

    Raises:
        ValueError: The suite is unknown, or none of its workloads has one of the names. The
            message lists similar names.
    """
    known = load_workloads(suite)
    return [known[name] for name in choose_names(names, suite)]


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
    return min(libraries.items(), key=lambda library: library[1]) if libraries else None

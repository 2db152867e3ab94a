"""Shrinking of failing cases to small, readable ones.

Hypothesis shrinks only what it drew, which for a batch is one seed. Therefore the batch itself is
simplified afterwards: requests are removed, lengths reduced, sizes and options set to their
default, one change at a time. A change is kept if the law is still broken.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from ..cases.batches import BatchPlan
from ..cases.option_pairs import OPTIONS, PLAIN, Choice, allowed
from ..cases.signatures import SignedBatch
from ..cases.views import Views


def shrink(case: Any, fails: Callable[[Any], bool], seconds: float) -> Any:
    """Return the simplest case found that still fails.

    Args:
        case: A failing case.
        fails: Returns whether a case fails.
        seconds: Time limit of the search.
    """
    deadline = time.perf_counter() + seconds
    seen = {repr(case)}
    while time.perf_counter() < deadline:
        for other in simpler(case):
            if time.perf_counter() > deadline:
                break
            if repr(other) in seen:
                continue
            seen.add(repr(other))
            if fails(other):
                case = other
                break
        else:
            break
    return case


def simpler(case: Any) -> Iterator[Any]:
    """Yield cases that are simpler by one change, the largest simplification first."""
    if isinstance(case, BatchPlan):
        yield from _simpler_plans(case)
    elif isinstance(case, dict) and case.keys() == OPTIONS.keys():
        yield from _simpler_choices(case)
    elif isinstance(case, (SignedBatch, Views)):
        yield from case.simpler()
    elif type(case) is tuple and any(
        isinstance(each, (BatchPlan, dict)) for each in case
    ):
        for place, each in enumerate(case):
            smaller = simpler(each)
            if type(each) is int and place:
                smaller = iter(range(min(each, 3)))  # the seed of a batch
            for other in smaller:
                yield (*case[:place], other, *case[place + 1 :])


def _simpler_plans(plan: BatchPlan) -> Iterator[BatchPlan]:
    """Yield plans with one request less, a field at its default, or shorter lengths."""
    lens = list(zip(plan.query_lens, plan.kv_lens, strict=True))

    def with_lens(pairs: list[tuple[int, int]]) -> BatchPlan:
        return replace(
            plan,
            query_lens=tuple(query_len for query_len, _ in pairs),
            kv_lens=tuple(kv_len for _, kv_len in pairs),
        )

    for req in range(len(lens)):
        yield with_lens(lens[:req] + lens[req + 1 :])
    plain = BatchPlan((), ())
    for each in fields(plan):
        if each.name not in ("query_lens", "kv_lens"):
            yield replace(plan, **{each.name: getattr(plain, each.name)})
    for name in ("kv_heads", "group", "seed"):
        yield replace(plan, **{name: min(getattr(plan, name), 1)})
    for req, (query_len, kv_len) in enumerate(lens):
        for shorter in (
            (min(query_len, 1), kv_len),
            (query_len, max(query_len, kv_len // 2)),
            (query_len, kv_len - plan.block_size),
            (query_len, kv_len - 1),
            (query_len - 1, kv_len),
        ):
            if 0 <= shorter[0] <= shorter[1]:
                yield with_lens([*lens[:req], shorter, *lens[req + 1 :]])


def _simpler_choices(choice: Choice) -> Iterator[Choice]:
    """Yield choices with one option at its first value, where that is a valid choice."""
    for name, plain in PLAIN.items():
        if name == "operation" or choice[name] == plain:
            continue
        rest = {other: value for other, value in choice.items() if other != name}
        if plain in allowed(rest, name):
            yield choice | {name: plain}

"""Shrinking of failing cases to small, readable ones.

Hypothesis shrinks only what it drew, which for a batch or a history is one seed. Therefore the case
itself is simplified afterwards: requests and actions are removed, lengths and numbers reduced,
sizes and options set to their default, one change at a time. A change is kept if the law is still
broken.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from ..cases.batches import BatchPlan
from ..cases.option_pairs import OPTIONS, PLAIN, Choice, allowed
from ..cases.steps import Runs


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
    elif hasattr(case, "simpler"):
        yield from case.simpler()
    elif type(case) is tuple and any(
        isinstance(part, (BatchPlan, dict)) for part in case
    ):
        for place, part in enumerate(case):
            smaller = simpler(part)
            if type(part) is int and place:
                smaller = iter(range(min(part, 3)))  # the seed of a batch
            for other in smaller:
                yield (*case[:place], other, *case[place + 1 :])
    elif isinstance(case, (list, tuple)):
        yield from _simpler_sequences(case)
    elif is_dataclass(case):
        yield from _simpler_records(case)


def stays_valid(case: Any) -> bool:
    """Return whether all simpler cases are valid if a case is.

    The numbers of other cases may no longer fit each other once one of them is smaller.
    """
    if type(case) is tuple:
        return any(isinstance(part, (BatchPlan, dict)) for part in case)
    return isinstance(case, (BatchPlan, dict)) or hasattr(case, "simpler")


def _simpler_sequences(values: Sequence[Any]) -> Iterator[Any]:
    """Yield lists or tuples with fewer dataclasses, or with one simpler element.

    An element of another kind is not removed, as its position has a meaning.
    """
    if all(is_dataclass(value) for value in values):
        for shorter in _shorter(values):
            yield _like(values, shorter)
    for place, value in enumerate(values):
        for other in _simpler_values(value):
            yield _like(values, [*values[:place], other, *values[place + 1 :]])


def _like(values: Sequence[Any], others: Sequence[Any]) -> Any:
    """Return other elements as a list or tuple of the same kind."""
    if isinstance(values, Runs):
        return Runs(*((value, 1) for value in others))
    return list(others) if isinstance(values, list) else tuple(others)


def _shorter(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the elements without one half of them, one quarter, and so on, down to one element."""
    length = (len(values) + 1) // 2
    while length:
        for start in range(0, len(values), length):
            yield [*values[:start], *values[start + length :]]
        length //= 2


def _simpler_records(record: Any) -> Iterator[Any]:
    """Yield dataclasses with shorter tuples, one field at its default, or one simpler field.

    Tuples of equal length become shorter together: they may be columns of one table. A field at its
    default stays as it is.
    """
    changed = {
        field.name: getattr(record, field.name)
        for field in fields(record)
        if field.init and getattr(record, field.name) != field.default
    }
    columns: dict[int, list[str]] = {}
    for name, value in changed.items():
        if isinstance(value, tuple):
            columns.setdefault(len(value), []).append(name)
    for names in columns.values():
        for rows in _shorter([*zip(*(changed[name] for name in names), strict=True)]):
            shorter = [*zip(*rows, strict=True)] or [()] * len(names)
            changes = zip(names, shorter, strict=True)
            yield from _replaced(
                record, {name: _like(changed[name], own) for name, own in changes}
            )
    for field in fields(record):
        if field.name in changed and field.default is not MISSING:
            yield from _replaced(record, {field.name: field.default})
    for name, value in changed.items():
        for other in _simpler_values(value):
            yield from _replaced(record, {name: other})


def _replaced(record: Any, changes: dict[str, Any]) -> Iterator[Any]:
    """Yield a dataclass with other fields, unless it rejects them."""
    try:
        other = replace(record, **changes)
    except Exception:
        return
    yield other


def _simpler_values(value: Any) -> Iterator[Any]:
    """Yield smaller numbers that are not negative, 0.0, False, or simpler parts of a case."""
    if type(value) in (bool, float) and value:
        yield type(value)()
    elif type(value) is int:
        smaller = {0, 1, value // 2, value - value // 4, value - value // 16, value - 1}
        yield from sorted(number for number in smaller if 0 <= number < value)
    else:
        yield from simpler(value)


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
    for field in fields(plan):
        if field.name not in ("query_lens", "kv_lens"):
            yield replace(plan, **{field.name: getattr(plain, field.name)})
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

"""The choice among kernel families: which launches compute a batch.

A batch whose requests all fit a decode tile is one launch of the role DECODE. Any other batch is
one launch of the role EVERY, which computes all requests, or a launch of the role DECODE for the
short requests and one of the role PREFILL for the long ones. The estimates of the families decide
between these two. Within a role the order of the families decides (families.py).
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any

from ..runtime.attention_call import AttentionCall
from ..runtime.cost_layer import BatchBounds, Layer, describe_layer
from ..runtime.family import ALWAYS, EVERYTHING, KernelFamily, Role, Task
from ..runtime.launcher import must_widen
from ..runtime.planning import planning
from . import families

TOKENS_PER_SHORT_REQ = 1024
"""With so many tokens per short request, a prefill launch computes the short requests too. Each has
a query tile of 128 to 192 rows of its own, so there are at most an eighth more tiles."""
MAX_CHOICES = 256
"""Choices that a plan keeps: one per combination of a batch's bounds."""
ONE_TOKEN = BatchBounds(1, 1, 1, 1)
"""A batch of one token."""


@dataclass(eq=False)
class AttentionPlan:
    """The launches of all calls with one signature.

    Args:
        preferred: plans for all requests that compute every batch that they take.
        every: plans for all requests that are compared with those for decodes and prefills.
        decodes: plans for short requests; none if the rows of a token fit no decode tile.
        prefills: plans for long requests. The last one takes every call.
        layer: what the estimates need to know.
        short_rows: rows (queries times group size) of a short request, at most; 0 without decodes.
        is_packed: whether `query_start_loc` and `lengths` are contiguous.
        upcasts_output: whether the output is written in float32 first.
    """

    preferred: tuple[Any, ...]
    every: tuple[Any, ...]
    decodes: tuple[Any, ...]
    prefills: tuple[Any, ...]
    layer: Layer
    short_rows: int
    is_packed: bool
    upcasts_output: bool
    _choices: dict[tuple[Any, ...], Task | None] = field(default_factory=dict)

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether all plans do nothing on the device that a recording does not note."""
        plans = (*self.preferred, *self.every, *self.decodes, *self.prefills)
        return all(plan.is_repeatable for plan in plans)

    def choose(
        self, every: Any, decode: Any, prefill: Any, batch: BatchBounds
    ) -> Task | None:
        """Return the task of a plan for all requests. None if the other two take less time.

        Args:
            every, decode, prefill: plans that take the call. `decode` may be None.
            batch: bounds of the batch.
        """
        key = (batch, id(every), id(decode), id(prefill))
        if key not in self._choices:
            if len(self._choices) >= MAX_CHOICES:
                self._choices.clear()
            estimate = every.estimate(self.layer, batch)
            others = prefill.estimate(self.layer, batch).time
            if decode is not None:
                others += decode.estimate(self.layer, batch).time
            is_least = estimate.time < others
            self._choices[key] = Task(division=estimate.division) if is_least else None
        return self._choices[key]


def plan_role(call: AttentionCall, role: Role) -> tuple[Any, ...]:
    """Return the plans of all families with a role that support calls with a signature.

    Raises:
        TypeError: a plan has no estimate.
    """
    return tuple(
        _checked(family, family.plan(call))
        for family in families.FAMILIES
        if family.role is role and family.supports(call)
    )


def _checked(family: KernelFamily, plan: Any) -> Any:
    if not callable(getattr(plan, "estimate", None)):
        raise TypeError(
            f"the kernel family {family.name!r} has no estimate: expected a method"
            " estimate(layer, batch) of its plan that returns an Estimate, with which dispatch"
            " compares it"
        )
    return plan


def make_attention_plan(call: AttentionCall) -> AttentionPlan:
    """Return the launch plan of all calls with this call's signature."""
    layer = describe_layer(call)
    with planning():
        of_all = plan_role(call, Role.EVERY)
        decodes = plan_role(call, Role.DECODE)
        prefills = plan_role(call, Role.PREFILL)
    if not decodes:
        # one launch computes a batch, the rows of no request too; the portable kernel clears them
        prefills = (
            *(plan for plan in prefills[:-1] if plan.clears_padding),
            prefills[-1],
        )
    are_preferred = [plan.estimate(layer, ONE_TOKEN) is ALWAYS for plan in of_all]
    starts, lengths = call.query_start_loc, call.lengths
    return AttentionPlan(
        preferred=tuple(compress(of_all, are_preferred)),
        every=tuple(compress(of_all, map(not_, are_preferred))),
        decodes=decodes,
        prefills=prefills,
        layer=layer,
        short_rows=decodes[-1].short_rows if decodes else 0,
        is_packed=starts.stride(0) == 1 and lengths.stride(0) == 1,
        upcasts_output=must_widen(call.out.dtype),
    )


def first_taking(plans: tuple[Any, ...], call: AttentionCall) -> Any:
    """Return the first plan that takes a call; None if there is none."""
    for plan in plans:
        if plan.takes(call):
            return plan
    return None


def launch_attention(
    plan: AttentionPlan, call: AttentionCall, prefix_len: int = 0
) -> None:
    """Launch what computes a batch, and clear the rows of no request.

    Args:
        prefix_len: 0, for calls without a shared prefix.
    """
    if plan.preferred:
        preferred = first_taking(plan.preferred, call)
        if preferred is not None:
            preferred.launch(call, EVERYTHING)
            return
    decode = first_taking(plan.decodes, call)
    if decode is None or (call.max_query_len * plan.layer.group_size > plan.short_rows):
        launch_long(plan, call, decode)
    else:
        decode.launch(call, EVERYTHING)


def launch_long(plan: AttentionPlan, call: AttentionCall, decode: Any) -> None:
    """Launch a batch whose longest request does not fit a decode tile.

    Args:
        decode: plan for the short requests; None if there is none.
    """
    prefill = first_taking(plan.prefills, call)
    every = first_taking(plan.every, call)
    if every is not None:
        batch = BatchBounds(
            call.query_start_loc.shape[0] - 1, call.query.shape[0],
            call.max_query_len, call.max_key_len,
        )  # fmt: skip
        task = plan.choose(every, decode, prefill, batch)
        if task is not None:
            every.launch(call, task)
            return
    short_rows = plan.short_rows
    if prefill.clears_padding and is_all_long(
        call, short_rows // plan.layer.group_size
    ):
        short_rows = 0
    elif decode is not None:
        decode.launch(call, EVERYTHING)
    prefill.launch(call, Task(short_rows))


def is_all_long(call: AttentionCall, short_len: int) -> bool:
    """Return whether a batch has no short requests, or few over few keys.

    The lengths are on the device. The host knows their maximum and their sum, which bound the
    number of short requests if every token belongs to a request. With padding there may be more.
    The prefill launch computes them right, and over many keys slower than a decode launch would.
    So if there are many keys, the lengths have to be equal, or that of one request.

    Args:
        call: the call.
        short_len: tokens of a short request, at most.

    Example:
        Two requests of at most 50 tokens, 99 tokens in all, short up to 8: a short request would
        leave 91 tokens for the other. So both are long.
    """
    tokens, reqs = call.query.shape[0], call.query_start_loc.shape[0] - 1
    longest = min(call.max_query_len, tokens)
    if longest <= short_len:
        return False
    if reqs == 1 or reqs * longest == tokens:
        return True
    short_reqs = max(0, reqs * longest - tokens) // (longest - short_len)
    return call.max_key_len <= longest and short_reqs * TOKENS_PER_SHORT_REQ <= tokens

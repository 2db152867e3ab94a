"""Partial results: programs in any order, a workspace of any content, and nothing outside of it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from pagetwin.conformance.cases.batches import NEEDLES, BatchPlan, build
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.dispatch import cascade, dispatch
from pagetwin.optimized.kernels.portable.host import make_launches as prepare
from pagetwin.optimized.kernels.portable.host import plan as portable
from pagetwin.optimized.kernels.sm90.append import family as append
from pagetwin.optimized.kernels.sm90.cascade import family as prefix
from pagetwin.optimized.kernels.sm90.invariant import family as invariant
from pagetwin.optimized.runtime.launcher import INTERPRETED
from support.forced_choices import one_launch_for_all
from support.planted_keys import share_prefix
from support.thresholds import set_thresholds
from support.twins import TWINS
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

pytestmark = pytest.mark.long

Order = Callable[[list[int]], Any]
GUARD = 256
"""Numbers before and after a workspace, 7, and counters before and after those of a launch, 99."""
ORDERS: dict[str, Order] = {
    "as launched": lambda programs: None,
    "reversed": lambda programs: programs.reverse(),
    "shuffled": lambda programs: Random(len(programs)).shuffle(programs),
}


class Lender:
    """Lends each launch a workspace full of NaN, between guards.

    Args:
        device: of the launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lent: list[tuple[Tensor, Tensor]] = []

    def find(
        self, _: torch.device, counters: int, numbers: int
    ) -> tuple[Tensor, Tensor]:
        """Return counters and numbers, as `find_workspace` does."""
        memory = torch.full((numbers + 2 * GUARD,), 7.0, device=self.device)
        arrivals = torch.full((counters + 2 * GUARD,), 99, device=self.device).int()
        found = arrivals[GUARD:-GUARD].zero_(), memory[GUARD:-GUARD].fill_(torch.nan)
        self.lent.append((arrivals, memory))
        return found

    def check(self) -> int:
        """Check guards and counters, and return how many numbers were stored."""
        stored = 0
        for arrivals, memory in self.lent:
            for tensor, content in ((arrivals, 99), (memory, 7)):
                guards = torch.cat((tensor[:GUARD], tensor[-GUARD:]))
                assert bool((guards == content).all())
            assert not bool(arrivals[GUARD:-GUARD].any())
            stored += int((~memory[GUARD:-GUARD].isnan()).sum())
        self.lent.clear()
        return stored


@pytest.fixture
def lender(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[Lender]:
    """Yield what lends all workspaces of portable kernels."""
    lender = Lender(device)
    for module in (portable, cascade):
        monkeypatch.setattr(module, "find_workspace", lender.find)
    # the interpreter has 4 multiprocessors: few decodes get up to 4 programs each
    set_thresholds(monkeypatch, short_tiles=8)
    # kernels for Hopper have other workspaces
    for family in (append, invariant, prefix):
        monkeypatch.setattr(family, "is_hopper", lambda device: False)
    # a call that was repeated would not be planned
    dispatch.PIPELINE.plans.clear()
    cascade.PIPELINE.plans.clear()
    with one_launch_for_all():
        yield lender


@pytest.fixture
def set_order(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Order], None]]:
    """Return a function that sets the order in which the interpreter runs programs."""
    chosen = ORDERS["as launched"]
    programs: list[int] = []
    place = interpreter_builder.set_grid_idx

    def set_index(x: int, y: int, z: int) -> None:
        width, height, depth = interpreter_builder.grid_dim
        at = (x * height + y) * depth + z
        if at == 0:
            programs[:] = range(width * height * depth)
            chosen(programs)
        at = programs[at]
        place(at // (height * depth), at // depth % height, at % depth)

    def choose(order: Order) -> None:
        nonlocal chosen
        chosen = order

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_index)
    yield choose


CALLS: dict[str, tuple[BatchPlan, dict[str, Any]]] = {
    "few decodes": (BatchPlan((1,), (250,), kv_heads=1, needle="last"), {}),
    "few drafts": (BatchPlan((0, 4), (130, 250), group=3, kv_heads=1), {}),
    "stream-K decodes": (BatchPlan((1,) * 5, (290, 1, 129, 64, 99), kv_heads=1), {}),
    "stream-K drafts": (
        BatchPlan((1, 1, 0, 1, 4), (130, 1, 5, 64, 290), group=3, kv_heads=1),
        {},
    ),
    "append": (BatchPlan((12, 9), (200, 130), group=4, kv_heads=1), {}),
    "splits": (BatchPlan((2,), (300,), kv_heads=1), {"batch_invariant": True}),
    "cascade": (BatchPlan((12, 1), (330, 200), group=4, kv_heads=1, padding=2), {}),
}
"""Calls whose requests are split over two to five programs in the interpreter."""


def attend(
    name: str, twin: Any, sinks: bool, plan: BatchPlan | None = None, **changes: Any
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a call, of which nothing but NaN was there before.

    Args:
        plan: Optional. The batch. If None, that of CALLS.
    """
    of_call, options = CALLS[name]
    plan = plan or of_call
    if changes["device"].type == "cuda":
        # a chip has more multiprocessors and longer splits than the interpreter
        plan = replace(
            plan, kv_lens=tuple(40 * kv_length for kv_length in plan.kv_lens)
        )
        if "max_seq_len" in changes:
            changes["max_seq_len"] *= 40
    batch = build(plan)
    if name == "cascade":
        batch = share_prefix(batch, 96)
        changes["common_prefix_len"] = 96
    arguments = batch.to(changes.pop("device")).arguments() | changes
    query = arguments["query"]
    if sinks:
        heads = query.shape[1]
        options = options | {"sinks": torch.linspace(-2, 3, heads, device=query.device)}
    out, lse = torch.full_like(query, torch.nan), query.new_empty(*query.shape[1::-1])
    attention = twin.cascade_attention if name == "cascade" else twin.paged_attention
    attention(**arguments, out=out, lse=lse, options=AttentionOptions(**options))
    return out, lse


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_order_of_programs_does_not_change_a_bit(
    name: str,
    sinks: bool,
    lender: Lender,
    set_order: Callable[[Order], None],
    device: torch.device,
) -> None:
    """The program that arrives last combines what others stored, and nothing else."""
    right = attend(name, TWINS["reference"], sinks, device=device)
    found = []
    for order in ORDERS.values():
        set_order(order)
        found.append(attend(name, TWINS["optimized"], sinks, device=device))
        assert lender.check() > 0
        torch.testing.assert_close(found[-1], right, atol=2e-6, rtol=2e-6)
    if INTERPRETED:
        for again in found[1:]:
            assert all(map(same_bits, again, found[0]))


def draw_batch(name: str, draw: Random) -> tuple[BatchPlan, int]:
    """Return a batch of several KV heads and requests, and the multiprocessors of the chip."""
    base, kv_heads = CALLS[name][0], draw.randint(2, 3)
    is_few, is_long = name.startswith("few"), max(base.query_lens) > 4
    reqs = draw.randint(2, 3) if is_few or is_long else draw.randint(4, 6)
    new = (9, 12) if is_long else (1, max(base.query_lens))
    batch = replace(
        base,
        query_lens=tuple(draw.randint(*new) for _ in range(reqs)),
        kv_lens=tuple(draw.randint(140, 260) for _ in range(reqs)),
        kv_heads=kv_heads,
        needle=draw.choice(NEEDLES),
        seed=draw.randrange(100),
    )
    # few decodes and splits get two programs each, or more
    programs = reqs * kv_heads * draw.randint(2, 4)
    is_full = name == "splits" or is_few
    return batch, programs if is_full else draw.randint(3, 2 * reqs * kv_heads)


@pytest.mark.skipif(not INTERPRETED, reason="a chip orders its programs itself")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_no_two_work_items_share_a_counter_or_a_partial_result(
    name: str,
    seed: int,
    lender: Lender,
    set_order: Callable[[Order], None],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """Whatever the number of KV heads, requests, splits and multiprocessors."""
    draw = Random(f"{name} {seed}")
    plan, processors = draw_batch(name, draw)
    monkeypatch.setattr(prepare, "count_processors", lambda device: processors)
    right = attend(name, TWINS["reference"], seed == 1, plan, device=device)
    for _ in range(3):
        set_order(draw.shuffle)
        found = attend(name, TWINS["optimized"], seed == 1, plan, device=device)
        assert lender.check() > 0
        torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-6)


UNDERSTATED = {"few drafts": 1, "stream-K drafts": 1, "append": 5, "cascade": 5}


@pytest.mark.usefixtures("unchecked_values")
@pytest.mark.parametrize("name", UNDERSTATED)
def test_understated_bounds_write_nothing_outside_of_the_workspace(
    name: str, lender: Lender, device: torch.device
) -> None:
    """The workspace has room for the rows of `max_query_len` tokens; others are not stored."""
    bounds = {"max_query_len": UNDERSTATED[name]}
    for changes in (bounds, bounds | {"max_seq_len": 99}):
        attend(name, TWINS["optimized"].raw, False, device=device, **changes)
        assert lender.check() > 0

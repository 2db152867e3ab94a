"""Traffic for a scheduler: requests that arrive over time, and a loop that serves them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from ...contract.scheduler_classes import Request, SchedulerOutput
from .block_histories import EXTRA_KEYS

STOP_TOKEN = 9


@dataclass(frozen=True)
class Arrival:
    """One request.

    Args:
        step: the step in which it arrives.
        prompt_len: tokens of its prompt.
        max_tokens: output tokens at most.
        family: requests of one family have equal prompts, up to the shorter length.
        stops_after: output tokens after which the stop token is sampled.
        priority: as in `Request`.
        extra: index of its extra keys.
        aborted_in: Optional. The step in which a client aborts it. If None, none does.
    """

    step: int
    prompt_len: int
    max_tokens: int
    family: int = 0
    stops_after: int = 99
    priority: int = 0
    extra: int = 0
    aborted_in: int | None = None

    @property
    def prompt(self) -> list[int]:
        """[prompt_len] token ids."""
        return [(position * 7 + self.family) % 5 for position in range(self.prompt_len)]

    def sample(self, request: Request) -> int:
        """Return the next sampled token; it is always the same at the same position."""
        if len(request.output_token_ids) == self.stops_after:
            return STOP_TOKEN
        return (request.num_tokens * 3 + self.prompt_len + self.family) % 5

    @property
    def output(self) -> list[int]:
        """All output tokens, if every one is sampled at its position."""
        request = Request("model", self.prompt, self.max_tokens, [STOP_TOKEN])
        while not request.is_finished:
            request.append_output_token(self.sample(request))
        return request.output_token_ids


@dataclass(frozen=True)
class Traffic:
    """Requests, and the limits under which they are served.

    Args:
        arrivals: the requests, in any order.
        num_blocks: blocks in the cache; raised to what the largest request needs.
        block_size: slots per block.
        token_budget: new tokens per step at most.
        max_running: running requests at most.
        policy: order of admission.
        window: Optional. The sliding window. If None, a request keeps all of its blocks.
        is_abort_late: whether requests are aborted while a step is computed, not before it.
        reset_in: Optional. The step before which the prefix cache is reset. If None, it is not.
        resets_running: whether running requests are preempted for it.
    """

    arrivals: tuple[Arrival, ...]
    num_blocks: int = 8
    block_size: int = 2
    token_budget: int = 8
    max_running: int = 4
    policy: str = "fcfs"
    window: int | None = None
    is_abort_late: bool = False
    reset_in: int | None = None
    resets_running: bool = False

    @property
    def blocks_per_request(self) -> list[int]:
        """Blocks that each request needs at most, with the null block if there is a window."""
        size = self.block_size
        needed = [
            -(-(arrival.prompt_len + arrival.max_tokens - 1) // size)
            for arrival in self.arrivals
        ]
        if self.window is None:
            return needed
        # what a chunk attends to, and itself, from any slot of a block on
        at_once = -(-(self.window - 1 + self.token_budget) // size) + 1
        return [min(count, at_once) + 1 for count in needed]

    @property
    def enough_blocks(self) -> int:
        """Blocks in the cache that is used: enough for any one request."""
        return max(self.num_blocks, *self.blocks_per_request, 1)

    def order(self, numbers: list[int]) -> list[int]:
        """Return requests in the order of their priority and arrival, if that is the policy."""
        if self.policy == "fcfs":
            return numbers
        return sorted(
            numbers,
            key=lambda number: (
                self.arrivals[number].priority,
                self.arrivals[number].step,
                number,
            ),
        )


def traffic_of(seed: int) -> Traffic:
    """Return traffic; in most cases the cache is too small for all requests at once."""
    pick = Random(seed)
    has_keys, has_aborts = pick.random() < 0.3, pick.random() < 0.3
    arrivals = tuple(
        Arrival(
            pick.choice([0, 0, 0, 1, 2, 5]),
            pick.choice([1, 2, 3, 4, 5, 7, 8, 13]),
            pick.choice([1, 2, 3, 6, 8]),
            pick.choice([0, 0, 1, 2]),
            pick.choice([99, 99, 99, 0, 1]),
            pick.choice([0, 0, 1, 2, -1]),
            pick.choice([0, 0, 1, 5, 6]) if has_keys else 0,
            pick.choice([None, 0, 1, 2, 3, 6]) if has_aborts else None,
        )
        for _ in range(pick.randint(1, 6))
    )
    return Traffic(
        arrivals,
        num_blocks=pick.choice([2, 4, 6, 10, 60]),
        block_size=pick.choice([1, 2, 2, 3, 4]),
        token_budget=pick.choice([1, 2, 3, 5, 8, 64]),
        max_running=pick.choice([1, 2, 3, 8]),
        policy=pick.choice(["fcfs", "fcfs", "priority"]),
        window=pick.choice([None, None, None, 1, 2, 4, 5]),
        is_abort_late=pick.choice([False, True]),
        reset_in=pick.choice([None, None, None, 0, 1, 2, 3, 5]),
        resets_running=pick.choice([False, True]),
    )


def traffics() -> st.SearchStrategy[Traffic]:
    """Return traffics, each derived from one seed.

    If their values are drawn one by one, Hypothesis repeats a few values of each, and few requests
    are preempted while others are recomputed.
    """
    return st.integers(0, 2**20).map(traffic_of)


@dataclass(frozen=True)
class Interruption:
    """What a client did between two steps, or while one was computed.

    Args:
        aborted: the requests that are to be aborted, and what `finish_requests` returned.
        unfinished: the requests of the scheduler before.
        was_reset: what `reset_prefix_cache` returned. None if it was not called.
        running, waiting: ids of the requests before the reset, in order.
    """

    aborted: tuple[list[int], Any]
    unfinished: list[int]
    was_reset: Any = None
    running: list[Any] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class ServedStep:
    """One step, with what was true before it was scheduled.

    Args:
        scheduler: the candidate's scheduler; its step is scheduled and not yet updated.
        manager: the block manager that it uses.
        output: the step.
        before: what a client did since the last step was scheduled.
        running: ids of the running requests before the step, in order.
        waiting: ids of the waiting requests before the step, in order.
        computed: tokens of each request that were in the cache before the step.
        recomputable: for each request the most tokens of it that ever were in the cache.
        rows: blocks of each running request before the step.
    """

    scheduler: Any
    manager: Any
    output: SchedulerOutput
    before: list[Interruption]
    running: list[Any]
    waiting: list[Any]
    computed: dict[Any, int]
    recomputable: dict[Any, int]
    rows: dict[Any, list[int]]

    @property
    def preempted(self) -> list[Any]:
        """Requests that lost their blocks because too few were left."""
        return self.output.preempted_req_ids[len(self.reset) :]

    @property
    def reset(self) -> list[Any]:
        """Requests that lost their blocks to a reset of the prefix cache, the last one first."""
        return [
            number
            for event in self.before
            for number in reversed(event.running)
            if event.was_reset
        ]


def make_requests(traffic: Traffic) -> list[Request]:
    """Return the requests of some traffic; their ids are their indices."""
    return [
        Request(
            number,
            arrival.prompt,
            arrival.max_tokens,
            [STOP_TOKEN],
            arrival.priority,
            EXTRA_KEYS[arrival.extra],
        )
        for number, arrival in enumerate(traffic.arrivals)
    ]


def serve(
    make_scheduler: Any, manager: Any, traffic: Traffic, requests: list[Request]
) -> Iterator[ServedStep]:
    """Serve all requests; yield each step once it is scheduled, before it is updated.

    Args:
        make_scheduler: the candidate's `Scheduler`.
        manager: a block manager whose blocks are all free.
        traffic: what arrives when, and the limits.
        requests: of `make_requests`; modified.
    """
    scheduler = make_scheduler(
        manager, traffic.token_budget, traffic.max_running, traffic.policy
    )
    order = sorted(
        range(len(requests)), key=lambda number: traffic.arrivals[number].step
    )
    most: dict[int, int] = dict.fromkeys(range(len(requests)), 0)
    limit = 50 + 20 * sum(
        arrival.prompt_len + arrival.max_tokens for arrival in traffic.arrivals
    )
    before: list[Interruption] = []
    for step in range(limit):
        while order and traffic.arrivals[order[0]].step <= step:
            scheduler.add_request(requests[order.pop(0)])
        if step == traffic.reset_in:
            before.append(_reset(scheduler, traffic))
        if not traffic.is_abort_late:
            before.append(_abort(scheduler, traffic, step))
        if not scheduler.num_unfinished_requests:
            if not order:
                return
            continue
        running = [request.request_id for request in scheduler.running]
        waiting = [request.request_id for request in scheduler.waiting]
        computed = {number: requests[number].num_computed_tokens for number in most}
        rows = {number: manager.get_block_ids(number) for number in running}
        output = scheduler.schedule()
        yield ServedStep(
            scheduler,
            manager,
            output,
            before,
            running,
            waiting,
            computed,
            dict(most),
            rows,
        )
        before = []
        if traffic.is_abort_late:
            before.append(_abort(scheduler, traffic, step))
        sampled = {}
        for scheduled in output.scheduled_requests:
            number = scheduled.request.request_id
            assert isinstance(number, int)
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            most[number] = max(most[number], end)
            if scheduled.samples_token:
                sampled[number] = traffic.arrivals[number].sample(scheduled.request)
        scheduler.update_from_output(output, sampled)
    raise AssertionError(f"not all requests are finished after {limit} steps")


def _unfinished(scheduler: Any) -> list[Any]:
    return [request.request_id for request in (*scheduler.running, *scheduler.waiting)]


def _abort(scheduler: Any, traffic: Traffic, step: int) -> Interruption:
    """Abort the requests whose clients go in a step."""
    unfinished = _unfinished(scheduler)
    numbers = [
        number
        for number, arrival in enumerate(traffic.arrivals)
        if arrival.aborted_in == step
    ]
    return Interruption((numbers, scheduler.finish_requests(numbers)), unfinished)


def _reset(scheduler: Any, traffic: Traffic) -> Interruption:
    """Reset the prefix cache."""
    unfinished = _unfinished(scheduler)
    running = [request.request_id for request in scheduler.running]
    waiting = [request.request_id for request in scheduler.waiting]
    was_reset = scheduler.reset_prefix_cache(traffic.resets_running)
    return Interruption(([], []), unfinished, was_reset, running, waiting)

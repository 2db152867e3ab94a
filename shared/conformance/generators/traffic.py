"""Traffic for a scheduler: requests that arrive over time, and a loop that serves them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from ...contract.scheduler_classes import Request, SchedulerOutput

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
    """

    step: int
    prompt_len: int
    max_tokens: int
    family: int = 0
    stops_after: int = 99

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
    """

    arrivals: tuple[Arrival, ...]
    num_blocks: int = 8
    block_size: int = 2
    token_budget: int = 8
    max_running: int = 4

    @property
    def blocks_per_request(self) -> list[int]:
        """Blocks that each request needs at most."""
        return [
            -(-(each.prompt_len + each.max_tokens - 1) // self.block_size)
            for each in self.arrivals
        ]

    @property
    def enough_blocks(self) -> int:
        """Blocks in the cache that is used: enough for any one request."""
        return max(self.num_blocks, *self.blocks_per_request, 1)


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    """Return traffic; in most cases the cache is too small for all requests at once.

    All values are derived from one seed. If they are drawn one by one, Hypothesis repeats a few
    values of each, and few requests are preempted while others are recomputed.
    """
    pick = Random(draw(st.integers(0, 2**20)))
    arrivals = tuple(
        Arrival(
            pick.choice([0, 0, 0, 1, 2, 5]),
            pick.choice([1, 2, 3, 4, 5, 7, 8, 13]),
            pick.choice([1, 2, 3, 6, 8]),
            pick.choice([0, 0, 1, 2]),
            pick.choice([99, 99, 99, 0, 1]),
        )
        for _ in range(pick.randint(1, 6))
    )
    return Traffic(
        arrivals,
        num_blocks=pick.choice([2, 4, 6, 10, 60]),
        block_size=pick.choice([1, 2, 2, 3, 4]),
        token_budget=pick.choice([1, 2, 3, 5, 8, 64]),
        max_running=pick.choice([1, 2, 3, 8]),
    )


@dataclass(frozen=True)
class ServedStep:
    """One step, with what was true before it was scheduled.

    Args:
        scheduler: the candidate's scheduler; its step is scheduled and not yet updated.
        manager: the block manager that it uses.
        output: the step.
        running: ids of the running requests before the step, in order.
        waiting: ids of the waiting requests before the step, in order.
        computed: tokens of each request that were in the cache before the step.
        recomputable: for each request the most tokens of it that ever were in the cache.
        rows: blocks of each running request before the step.
    """

    scheduler: Any
    manager: Any
    output: SchedulerOutput
    running: list[Any]
    waiting: list[Any]
    computed: dict[Any, int]
    recomputable: dict[Any, int]
    rows: dict[Any, list[int]]


def make_requests(traffic: Traffic) -> list[Request]:
    """Return the requests of some traffic; their ids are their indices."""
    return [
        Request(number, each.prompt, each.max_tokens, [STOP_TOKEN])
        for number, each in enumerate(traffic.arrivals)
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
    scheduler = make_scheduler(manager, traffic.token_budget, traffic.max_running)
    order = sorted(
        range(len(requests)), key=lambda number: traffic.arrivals[number].step
    )
    most: dict[int, int] = dict.fromkeys(range(len(requests)), 0)
    limit = 50 + 20 * sum(
        each.prompt_len + each.max_tokens for each in traffic.arrivals
    )
    for step in range(limit):
        while order and traffic.arrivals[order[0]].step <= step:
            scheduler.add_request(requests[order.pop(0)])
        if not scheduler.num_unfinished_requests:
            if not order:
                return
            continue
        running = [each.request_id for each in scheduler.running]
        waiting = [each.request_id for each in scheduler.waiting]
        computed = {number: requests[number].num_computed_tokens for number in most}
        rows = {number: manager.get_block_ids(number) for number in running}
        output = scheduler.schedule()
        yield ServedStep(
            scheduler, manager, output, running, waiting, computed, dict(most), rows
        )
        sampled = {}
        for each in output.scheduled_requests:
            number = each.request.request_id
            assert isinstance(number, int)
            end = each.num_computed_tokens + each.num_scheduled_tokens
            most[number] = max(most[number], end)
            if each.samples_token:
                sampled[number] = traffic.arrivals[number].sample(each.request)
        scheduler.update_from_output(output, sampled)
    raise AssertionError(f"not all requests are finished after {limit} steps")

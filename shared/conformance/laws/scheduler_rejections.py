"""Laws of the scheduler about invalid calls: each is rejected, and changes nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hypothesis import strategies as st

from ...contract.scheduler_classes import Request, RequestStatus
from ..candidates.setting import Setting
from ..cases.traffic import (
    Arrival,  # noqa: F401 (a failing case is evaluated here)
    ServedStep,
    Traffic,
    make_requests,
)
from ..checks.expect import expect_rejection, expect_same, expect_untimely
from ..checks.state import state_of
from .law import law
from .scheduler import TRAFFIC, serve_case

NOT_TOKENS = (None, -1, 2**63, 1.0, True, "5", [5])


def calls_in_a_step(
    step: ServedStep, earlier: ServedStep | None, requests: list[Request]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield calls that a scheduler rejects while its step is computed."""
    scheduler, output = step.scheduler, step.output
    update, end = scheduler.update_from_output, scheduler.finish_requests
    sampling = [
        scheduled_request.request.request_id
        for scheduled_request in output.scheduled_requests
        if scheduled_request.samples_token
    ]
    tokens: dict[Any, Any] = dict.fromkeys(sampling, 1)
    if earlier is not None:
        yield "an earlier output", partial(update, earlier.output, tokens)
    yield "no output", partial(update, None, tokens)
    yield "no tokens", partial(update, output, None)
    yield "a token of no request", partial(update, output, {**tokens, "else": 1})
    if sampling:
        rest = dict.fromkeys(sampling[:-1], 1)
        yield "a token is missing", partial(update, output, rest)
        for token in NOT_TOKENS:
            given = {**rest, sampling[-1]: token}
            yield f"the last token is {token!r}", partial(update, output, given)
    for request in requests:
        if request.arrival is not None:
            name = f"a request that is {request.status.name}"
            yield name, partial(scheduler.add_request, request)
    taken = [*scheduler.requests]
    again = Request(taken[0], [1], 1)
    yield "an id that is in use", partial(scheduler.add_request, again)
    yield "no request", partial(scheduler.add_request, {"request_id": 5})
    yield "no ids", partial(end, 5)
    yield "an id that is a list", partial(end, [*taken, [5]])
    yield "a status of running requests", partial(end, taken, RequestStatus.RUNNING)
    yield "no status", partial(end, taken, "FINISHED_ABORTED")


@law("Scheduler", cases=TRAFFIC, claim="rejects contents")
def an_invalid_call_between_two_calls_changes_nothing_in_the_scheduler(
    setting: Setting, cases: tuple[Traffic, ...]
) -> None:
    """No request, no queue, no block and no known content."""
    for traffic in cases:
        earlier, requests = None, make_requests(traffic)
        for step in serve_case(setting, traffic, requests):
            state = step.scheduler, step.manager, step.output, requests
            before = state_of(state)
            for name, call in calls_in_a_step(step, earlier, requests):
                expect_rejection(name, call)
                expect_same(f"state after {name}", state_of(state) == before, True)
            expect_untimely("schedule again", step.scheduler.schedule)
            expect_same("state after schedule", state_of(state) == before, True)
            earlier = step


@law("Scheduler", cases=st.sampled_from([0, 1, 2]), claim="rejects contents")
def a_step_one_of_whose_requests_was_freed_is_rejected(
    setting: Setting, which: int
) -> None:
    """By the block manager, which others may call. The step goes on once the request is ended."""
    manager = setting.truth.BlockManager(12, 2)
    scheduler = setting.candidate.Scheduler(manager, 16, 8)
    requests = [Request(name, [1, 2, 3], max_tokens=3) for name in "abc"]
    for request in requests:
        scheduler.add_request(request)
    output, tokens = scheduler.schedule(), {"a": 1, "b": 2, "c": 3}
    name = "abc"[which]
    manager.free(name)
    before = state_of((scheduler, requests))
    expect_rejection(
        f"{name} was freed", lambda: scheduler.update_from_output(output, tokens)
    )
    same = state_of((scheduler, requests)) == before
    expect_same(f"state after {name} was freed", same, True)
    scheduler.finish_requests(name)
    scheduler.update_from_output(output, tokens)
    counts = [len(request.output_token_ids) for request in requests]
    expect_same("tokens", counts, [int(other != name) for other in "abc"])
    expect_rejection(
        "the same output", lambda: scheduler.update_from_output(output, tokens)
    )


INVALID_REQUESTS: dict[str, Callable[[], Request]] = {
    "an empty prompt": lambda: Request("b", [], max_tokens=1),
    "no output tokens": lambda: Request("b", [1], max_tokens=0),
    "an id that is waiting": lambda: Request("a", [1], max_tokens=1),
    "a request that never fits": lambda: Request("b", [1] * 8, max_tokens=2),
    "an output that never fits": lambda: Request("b", [1], max_tokens=9),
}


@law(
    "Scheduler",
    cases=st.sampled_from(sorted(INVALID_REQUESTS)),
    claim="rejects contents",
)
def a_request_that_cannot_be_served_is_rejected(setting: Setting, name: str) -> None:
    manager = setting.truth.BlockManager(4, 2)
    scheduler = setting.candidate.Scheduler(manager, 8, 8)
    scheduler.add_request(Request("a", [1] * 8, max_tokens=1))
    expect_rejection(name, lambda: scheduler.add_request(INVALID_REQUESTS[name]()))
    expect_same("requests", scheduler.num_unfinished_requests, 1)


@law(
    "Scheduler",
    cases=st.sampled_from([{}, {"b": 1}, {"a": 1, "b": 1}]),
    claim="rejects contents",
)
def sampled_tokens_that_do_not_fit_the_step_are_rejected(
    setting: Setting, sampled: dict[str, int]
) -> None:
    """One token is expected per request that samples. Otherwise nothing changes."""
    manager = setting.truth.BlockManager(4, 2)
    scheduler = setting.candidate.Scheduler(manager, 4, 8)
    requests = [Request("a", [1, 2], max_tokens=3), Request("b", [1] * 4, max_tokens=1)]
    for request in requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    expect_rejection(
        "sampled tokens", lambda: scheduler.update_from_output(output, sampled)
    )
    counts = [request.num_computed_tokens for request in requests]
    expect_same("computed tokens", counts, [0, 0])
    scheduler.update_from_output(output, {"a": 7})
    expect_same("tokens", [request.num_tokens for request in requests], [3, 4])


@law(
    "Scheduler",
    cases=st.sampled_from([(0, 1), (1, 0), (-1, 1)]),
    claim="rejects shapes",
)
def a_scheduler_without_budget_or_requests_is_rejected(
    setting: Setting, limits: tuple[int, int]
) -> None:
    manager = setting.truth.BlockManager(4, 2)
    make: Any = setting.candidate.Scheduler
    expect_rejection(f"Scheduler{limits}", lambda: make(manager, *limits))
    expect_untimely("schedule without requests", make(manager, 8, 8).schedule)

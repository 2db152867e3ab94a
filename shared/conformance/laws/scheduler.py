"""Laws of the scheduler: token budget, order, chunked prefill, preemption and block tables.

Each case serves a whole workload step by step, with the block manager of the reference. A wrong
scheduler violates a law in some step, or leaves a request unfinished.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from hypothesis import strategies as st

from ...contract.block_classes import OutOfBlocks
from ...contract.scheduler_classes import Request, RequestStatus
from ..candidates.setting import Setting
from ..cases.traffic import (
    STOP_TOKEN,
    Arrival,
    ServedStep,
    Traffic,
    make_requests,
    serve,
    traffics,
)
from ..checks.expect import Disagreement, expect_rejection, expect_same
from .law import law

DIRECTED_TRAFFIC = (
    # two requests outgrow the cache; the second is preempted and admitted again
    Traffic((Arrival(0, 3, 6), Arrival(0, 4, 6, family=1)), num_blocks=5),
    # a long prompt in chunks, together with a decode
    Traffic(
        (Arrival(0, 2, 6, family=1), Arrival(1, 13, 2)), num_blocks=60, token_budget=5
    ),
    # equal prompts, one after the other
    Traffic((Arrival(0, 8, 1), Arrival(5, 8, 2), Arrival(5, 13, 1)), num_blocks=60),
    # three requests, of which the last two are preempted in one step or in two
    Traffic(
        (
            Arrival(0, 4, 6),
            Arrival(0, 2, 6, 1),
            Arrival(0, 2, 6, 2),
            Arrival(1, 1, 3, 3),
        ),
        num_blocks=4,
        block_size=2,
    ),
    # more running requests than tokens in the budget
    Traffic(tuple(Arrival(0, 1, 6, family) for family in range(3)), 60, 2, 2, 8),
    # two requests compute equal tokens; if preempted, the second would hit the blocks of the first
    Traffic((Arrival(0, 4, 6), Arrival(0, 4, 6)), num_blocks=5),
    # a preempted request is recomputed in chunks, of which the first ends after its prompt
    Traffic((Arrival(0, 4, 8), Arrival(0, 1, 8, family=1)), 4, 3, 3),
    # what a preempted request lost is recomputed in several steps
    Traffic((Arrival(0, 1, 6), Arrival(0, 3, 3, family=1)), 2, 4, 2),
    # one request at a time
    Traffic((Arrival(0, 5, 2), Arrival(0, 5, 2)), 60, 2, 64, 1),
    # the request that was added last goes first, and the first one is preempted
    Traffic(
        (
            Arrival(0, 3, 6, priority=2),
            Arrival(0, 3, 6, 1, priority=1),
            Arrival(1, 3, 6, 2, priority=1),
            Arrival(3, 3, 6, 2),
        ),
        num_blocks=8,
        policy="priority",
    ),
    # equal tokens for an adapter and without, with two images and with the same one
    Traffic(
        tuple(
            Arrival(2 * index, 8, 1, 0, extra=extra)
            for index, extra in enumerate([0, 3, 5, 6, 5])
        ),
        num_blocks=60,
    ),
    # a waiting request, a running one and one that has finished are aborted before a step
    Traffic(
        (
            Arrival(0, 4, 3, aborted_in=2),
            Arrival(0, 4, 3, 1, aborted_in=2),
            Arrival(0, 4, 3, 2, aborted_in=2),
            Arrival(0, 4, 1, 3, aborted_in=2),
        ),
        max_running=2,
    ),
    # all requests of a step are aborted while it is computed; others take their blocks
    Traffic(
        (
            Arrival(0, 5, 6, aborted_in=1),
            Arrival(0, 4, 6, 1, aborted_in=1),
            Arrival(0, 8, 3, 2),
            Arrival(1, 5, 1),
        ),
        num_blocks=6,
        max_running=2,
        is_abort_late=True,
    ),
    # running requests are preempted for a reset, and one of them is aborted before it is back
    Traffic(
        (Arrival(0, 4, 6), Arrival(0, 6, 6), Arrival(0, 3, 6, 1, aborted_in=2)),
        num_blocks=60,
        reset_in=2,
        resets_running=True,
    ),
    # the prefix cache is reset while no request runs, and while one does
    Traffic((Arrival(0, 4, 1), Arrival(2, 5, 3)), 60, reset_in=2),
    Traffic((Arrival(0, 4, 1), Arrival(2, 5, 3)), 60, reset_in=3),
    # a window: the cache holds fewer blocks than a request has tokens
    Traffic((Arrival(0, 13, 8), Arrival(0, 13, 8, 1)), 5, 2, 3, window=4),
    # a window of all tokens but the first ones, with prefix hits
    Traffic((Arrival(0, 13, 2), Arrival(9, 13, 8)), 60, 2, 4, window=5),
)
LARGE_TRAFFIC = (
    # more running requests than fit eight bits, with as many tokens in a step
    Traffic(
        tuple(Arrival(0, 2, 2, number % 5) for number in range(300)), 900, 2, 700, 290
    ),
    # chunks, prompts and rows that do not fit eight bits, of which one is preempted
    Traffic(
        (Arrival(0, 700, 3), Arrival(0, 300, 290, 1)),
        num_blocks=1200,
        block_size=1,
        token_budget=400,
    ),
)
TRAFFIC = st.one_of(st.just(DIRECTED_TRAFFIC), st.tuples(traffics()))
"""All directed cases at once, or one drawn case."""


def _for_each(
    body: Callable[[Setting, Traffic], None],
) -> Callable[[Setting, tuple[Traffic, ...]], None]:
    """Return the function of a law for several cases, given its function for one case."""

    @wraps(body)
    def run(setting: Setting, cases: tuple[Traffic, ...]) -> None:
        for case in cases:
            body(setting, case)

    return run


def serve_case(
    setting: Setting, traffic: Traffic, requests: list[Request] | None = None
) -> Iterator[ServedStep]:
    manager = setting.truth.BlockManager(
        traffic.enough_blocks, traffic.block_size, sliding_window=traffic.window
    )
    requests = make_requests(traffic) if requests is None else requests
    return serve(setting.candidate.Scheduler, manager, traffic, requests)


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def a_step_stays_within_the_token_budget_and_the_number_of_running_requests(
    setting: Setting, traffic: Traffic
) -> None:
    for step in serve_case(setting, traffic):
        counts = [
            scheduled.num_scheduled_tokens
            for scheduled in step.output.scheduled_requests
        ]
        if not counts or min(counts) < 1 or sum(counts) > traffic.token_budget:
            raise Disagreement(
                "new tokens of a step",
                f"budget {traffic.token_budget}",
                counts,
                "at least one per request, and at most the budget in all",
            )
        if len(step.scheduler.running) > traffic.max_running:
            raise Disagreement(
                "running requests",
                "as a whole",
                len(step.scheduler.running),
                f"at most {traffic.max_running}",
            )


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def every_request_finishes_with_the_tokens_that_were_sampled_for_it(
    setting: Setting, traffic: Traffic
) -> None:
    """Preemption and chunks change no token. A stop token ends the output and is included."""
    requests = make_requests(traffic)
    manager = None
    for step in serve_case(setting, traffic, requests):
        manager = step.manager
    for request, arrival in zip(requests, traffic.arrivals, strict=True):
        output, status = arrival.output, RequestStatus.FINISHED_LENGTH_CAPPED
        if output[-1] == STOP_TOKEN:
            status = RequestStatus.FINISHED_STOPPED
        if request.status == RequestStatus.FINISHED_ABORTED:
            status = request.status
            output = output[: len(request.output_token_ids)]
        expect_same("tokens", request.token_ids, arrival.prompt + output)
        expect_same("status", request.status, status)
    if manager is not None:
        expect_same("used blocks at the end", manager.num_used_blocks, 0)


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def a_scheduled_request_computes_its_next_known_tokens(
    setting: Setting, traffic: Traffic
) -> None:
    """At most once per step. The request samples a token if no known token is left."""
    for step in serve_case(setting, traffic):
        seen = set()
        for scheduled in step.output.scheduled_requests:
            request = scheduled.request
            name = f"request {request.request_id}"
            if request.request_id in seen:
                raise Disagreement(name, "in one step", "scheduled twice", "once")
            seen.add(request.request_id)
            expect_same(
                f"{name}, num_computed_tokens",
                scheduled.num_computed_tokens,
                request.num_computed_tokens,
            )
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            if end > request.num_tokens:
                raise Disagreement(name, "end of its tokens", end, request.num_tokens)
            samples = end == request.num_tokens
            expect_same(f"{name}, samples_token", scheduled.samples_token, samples)
            again = max(
                0, step.recomputable[request.request_id] - scheduled.num_computed_tokens
            )
            expect_same(
                f"{name}, num_recomputed_tokens",
                scheduled.num_recomputed_tokens,
                min(again, scheduled.num_scheduled_tokens),
            )


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def a_chunk_ends_with_the_known_tokens_or_with_the_budget(
    setting: Setting, traffic: Traffic
) -> None:
    for step in serve_case(setting, traffic):
        left = traffic.token_budget
        for scheduled in step.output.scheduled_requests:
            missing = scheduled.request.num_tokens - scheduled.num_computed_tokens
            expect_same(
                f"tokens of request {scheduled.request.request_id}",
                scheduled.num_scheduled_tokens,
                min(missing, left),
            )
            left -= scheduled.num_scheduled_tokens


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def the_rows_of_a_step_hold_its_tokens_and_no_block_more(
    setting: Setting, traffic: Traffic
) -> None:
    for step in serve_case(setting, traffic):
        for scheduled in step.output.scheduled_requests:
            number = scheduled.request.request_id
            row = step.manager.get_block_ids(number)
            expect_same(f"row of request {number}", list(scheduled.block_ids), row)
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            expect_same("blocks", len(row), -(-end // traffic.block_size))


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def a_step_lists_every_block_that_it_writes_for_the_first_time(
    setting: Setting, traffic: Traffic
) -> None:
    for step in serve_case(setting, traffic):
        expected = []
        for scheduled in step.output.scheduled_requests:
            number = scheduled.request.request_id
            held = step.rows.get(number, []) if number in step.running else []
            first = scheduled.num_computed_tokens // traffic.block_size
            expected += [
                block_id
                for index, block_id in enumerate(scheduled.block_ids)
                if index >= max(len(held), first)
            ]
        expect_same("new blocks", list(step.output.new_block_ids), expected)


@law("Scheduler", cases=TRAFFIC)
@_for_each
def a_running_request_goes_before_every_waiting_one(
    setting: Setting, traffic: Traffic
) -> None:
    """Thus a prompt never delays a decode. Running requests keep the order of admission."""
    for step in serve_case(setting, traffic):
        scheduled = [
            running.request.request_id for running in step.output.scheduled_requests
        ]
        preempted = step.preempted
        stay = [number for number in step.running if number not in preempted]
        running = [number for number in scheduled if number in step.running]
        expect_same("running requests first", scheduled[: len(running)], running)
        expect_same("in order of admission", running, stay[: len(running)])
        if len(running) < len(stay):
            # they are left out only if the token budget is used up
            count = step.output.total_num_scheduled_tokens
            expect_same("tokens of the step", count, traffic.token_budget)


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def requests_are_admitted_in_the_order_in_which_they_wait(
    setting: Setting, traffic: Traffic
) -> None:
    """A preempted request is placed at the front of the waiting queue, or by its priority."""
    admitted_before: list[Any] = []
    for step in serve_case(setting, traffic):
        scheduled = [
            running.request.request_id for running in step.output.scheduled_requests
        ]
        admitted = [number for number in scheduled if number not in step.running]
        expect_same("admitted requests", admitted, step.waiting[: len(admitted)])
        expect_same("order", step.waiting, traffic.order(step.waiting))
        left = list(reversed(step.preempted)) + step.waiting[len(admitted) :]
        waiting = [request.request_id for request in step.scheduler.waiting]
        expect_same("waiting requests", waiting, traffic.order(left))
        expect_same("num_waiting_reqs", step.output.num_waiting_reqs, len(waiting))
        admitted_before += [
            request_id for request_id in admitted if request_id not in admitted_before
        ]
    if traffic.policy == "fcfs":
        arrivals = traffic.arrivals
        by_arrival = sorted(
            admitted_before,
            key=lambda request_id: (arrivals[request_id].step, request_id),
        )
        expect_same("order of first admission", admitted_before, by_arrival)


@law("Scheduler", cases=TRAFFIC)
@_for_each
def a_request_waits_only_for_token_budget_blocks_or_the_limit_of_running_requests(
    setting: Setting, traffic: Traffic
) -> None:
    for step in serve_case(setting, traffic):
        scheduler, manager = step.scheduler, step.manager
        left = traffic.token_budget - step.output.total_num_scheduled_tokens
        is_full = len(scheduler.running) >= traffic.max_running
        if not scheduler.waiting or not left or is_full:
            continue
        if step.preempted:
            continue
        request = scheduler.waiting[0]
        hits = manager.get_computed_blocks(request.token_ids, request.extra_keys)
        size = traffic.block_size
        end = min(request.num_tokens, len(hits) * size + left)
        cached = set(manager.cached_blocks()) - set(hits)
        num_available = manager.num_free_blocks + len(cached)
        num_needed = -(-end // size) - len(hits)
        if num_needed <= num_available:
            raise Disagreement(
                f"request {request.request_id}",
                f"{num_needed} blocks needed, {num_available} available",
                "waits",
                "admitted",
            )


@law("Scheduler", cases=TRAFFIC)
@_for_each
def the_request_admitted_last_is_preempted_first(
    setting: Setting, traffic: Traffic
) -> None:
    """Or that of the lowest priority. All of its blocks are freed.

    A step that preempts admits no request.
    """
    for step in serve_case(setting, traffic):
        reset = step.output.preempted_req_ids[: len(step.reset)]
        expect_same("preempted for a reset", reset, step.reset)
        preempted = list(step.preempted)
        last = list(reversed(traffic.order(step.running)))[: len(preempted)]
        expect_same("preempted requests", preempted, last)
        if not preempted:
            continue
        scheduled = [
            running.request.request_id for running in step.output.scheduled_requests
        ]
        admitted = [number for number in scheduled if number not in step.running]
        expect_same("requests admitted in a step that preempts", admitted, [])
        for request in step.scheduler.waiting:
            expect_same("computed tokens", request.num_computed_tokens, 0)
            expect_rejection(
                "row of a waiting request",
                partial(step.manager.get_block_ids, request.request_id),
            )


@law("Scheduler", cases=TRAFFIC)
@_for_each
def no_request_is_preempted_while_enough_blocks_are_left(
    setting: Setting, traffic: Traffic
) -> None:
    """Without the last preemption of a step, too few blocks would be available."""
    # with a window, requests release blocks later in the step
    for step in serve_case(setting, replace(traffic, window=None)):
        preempted = list(step.preempted)
        if not preempted:
            continue
        # blocks that the last preemption freed: no remaining request holds them
        stay = [number for number in step.running if number not in preempted]
        held = {block_id for number in stay for block_id in step.rows[number]}
        victim = step.rows[preempted[-1]]
        num_freed = sum(block_id not in held for block_id in victim)
        # blocks that the preempted request needed, if it was the one that found no free block
        request = step.scheduler.requests[preempted[-1]]
        left = traffic.token_budget - step.output.total_num_scheduled_tokens
        computed = step.computed[request.request_id]
        end = computed + min(left, request.num_tokens - computed)
        num_needed = max(0, -(-end // traffic.block_size) - len(victim))
        manager = step.manager
        num_left = manager.num_free_blocks + manager.num_cached_blocks - num_freed
        if num_left >= num_needed:
            raise Disagreement(
                "preempted requests",
                f"{num_left} blocks are left, {num_needed} needed",
                preempted,
                preempted[:-1],
            )


@law("Scheduler", cases=TRAFFIC)
@_for_each
def nothing_is_preempted_if_all_requests_fit(
    setting: Setting, traffic: Traffic
) -> None:
    roomy = replace(traffic, num_blocks=sum(traffic.blocks_per_request))
    for step in serve_case(setting, roomy):
        expect_same("preempted requests", list(step.preempted), [])


@law("Scheduler", cases=TRAFFIC)
@_for_each
def a_token_is_computed_once_unless_it_is_a_prefix_hit_or_is_preempted(
    setting: Setting, traffic: Traffic
) -> None:
    """New requests start after their prefix hits, preempted ones after their regained tokens."""
    requests = make_requests(traffic)
    computed = hits = again = 0
    for step in serve_case(setting, traffic, requests):
        output = step.output
        prefix = regained = 0
        for scheduled in output.scheduled_requests:
            computed += scheduled.num_scheduled_tokens
            again += scheduled.num_recomputed_tokens
            number = scheduled.request.request_id
            if number in step.waiting:
                if scheduled.request.num_preemptions:
                    regained += scheduled.num_computed_tokens
                else:
                    prefix += scheduled.num_computed_tokens
        expect_same("num_prefix_hit_tokens", output.num_prefix_hit_tokens, prefix)
        expect_same("num_regained_tokens", output.num_regained_tokens, regained)
        hits += prefix
    needed = sum(request.num_tokens - 1 for request in requests)
    aborted = RequestStatus.FINISHED_ABORTED
    # a regained token that this request had not computed itself is also a hit
    if not any(
        request.num_preemptions or request.status == aborted for request in requests
    ):
        expect_same("tokens computed and found", computed - again + hits, needed)


@law("Scheduler", cases=TRAFFIC)
@_for_each
def an_aborted_request_frees_its_blocks_and_is_never_scheduled_again(
    setting: Setting, traffic: Traffic
) -> None:
    """It keeps the tokens that it has. An id that is unknown or finished is ignored."""
    requests = make_requests(traffic)
    tokens: dict[int, list[int]] = {}
    for step in serve_case(setting, traffic, requests):
        for event in step.before:
            numbers, found = event.aborted
            right = [number for number in numbers if number in event.unfinished]
            expect_same("aborted requests", list(found), right)
            tokens |= {number: list(requests[number].token_ids) for number in right}
        held = [number for number in tokens if step.manager.num_blocks_of(number)]
        expect_same("aborted requests that hold blocks", held, [])
        scheduled = [
            scheduled_request.request.request_id
            for scheduled_request in step.output.scheduled_requests
        ]
        again = [number for number in scheduled if number in tokens]
        expect_same("aborted requests that are scheduled", again, [])
    for number, known in tokens.items():
        expect_same("tokens", requests[number].token_ids, known)


@law("Scheduler", cases=TRAFFIC, edges=[LARGE_TRAFFIC])
@_for_each
def a_step_lists_the_requests_that_ended_since_the_last_one(
    setting: Setting, traffic: Traffic
) -> None:
    requests = make_requests(traffic)
    known: set[Any] = set()
    for step in serve_case(setting, traffic, requests):
        finished = {request.request_id for request in requests if request.is_finished}
        expect_same(
            "finished_req_ids",
            sorted(step.output.finished_req_ids),
            sorted(finished - known),
        )
        known = finished


@law("Scheduler", cases=TRAFFIC)
@_for_each
def after_a_reset_of_the_prefix_cache_no_request_uses_what_was_computed_before(
    setting: Setting, traffic: Traffic
) -> None:
    """Running requests are preempted for it, and keep their order, or it is not reset."""
    for step in serve_case(setting, traffic):
        for event in step.before:
            if event.was_reset is None:
                continue
            is_right = traffic.resets_running or not event.running
            expect_same("was_reset", event.was_reset, is_right)
            if not event.was_reset:
                continue
            hits = step.output.num_prefix_hit_tokens + step.output.num_regained_tokens
            expect_same("tokens found in the cache", hits, 0)
            order = traffic.order(event.running + event.waiting)
            left = [request_id for request_id in order if request_id in step.waiting]
            added = [
                request_id for request_id in step.waiting if request_id not in order
            ]
            expect_same("waiting", step.waiting, traffic.order(left + added))


@law("Scheduler", cases=st.sampled_from([(8, 2), (9, 2), (13, 4), (3, 4), (1, 1)]))
def a_prompt_that_is_in_the_cache_is_computed_from_its_first_unknown_block_on(
    setting: Setting, case: tuple[int, int]
) -> None:
    prompt_len, size = case
    traffic = Traffic(
        (Arrival(0, prompt_len, 1), Arrival(1, prompt_len, 1)), 60, size, 64, 4
    )
    first, second = serve_case(setting, traffic)
    expect_same("tokens", first.output.total_num_scheduled_tokens, prompt_len)
    hits = (prompt_len - 1) // size * size
    expect_same("prefix hits", second.output.num_prefix_hit_tokens, hits)
    expect_same("tokens", second.output.total_num_scheduled_tokens, prompt_len - hits)


@law("Scheduler", cases=st.sampled_from([3, 4, 5]))
def a_step_requests_a_copy_of_a_shared_block_before_it_is_written(
    setting: Setting, prompt_len: int
) -> None:
    manager = setting.truth.BlockManager(9, 4)
    scheduler = setting.candidate.Scheduler(manager, 64, 4)
    scheduler.add_request(Request("a", [1] * prompt_len, max_tokens=3))
    scheduler.update_from_output(scheduler.schedule(), {"a": 2})
    manager.fork("a", "held")
    output = scheduler.schedule()
    before, after = manager.get_block_ids("held"), manager.get_block_ids("a")
    index = prompt_len // 4
    expected = [(before[index], after[index])] if prompt_len % 4 else []
    expect_same("blocks to copy", list(output.blocks_to_copy), expected)
    expect_same(
        "new blocks", list(output.new_block_ids), [] if expected else [after[1]]
    )


@law("Scheduler", cases=st.sampled_from([0, 1]))
def a_scheduler_whose_blocks_are_held_by_others_raises_out_of_blocks(
    setting: Setting, num_steps: int
) -> None:
    """The request stays in the scheduler, and runs once the blocks are freed."""
    manager = setting.truth.BlockManager(3, 1)
    scheduler = setting.candidate.Scheduler(manager, 8, 8)
    request = Request("a", [1], max_tokens=3)
    scheduler.add_request(request)
    for _ in range(num_steps):
        scheduler.update_from_output(scheduler.schedule(), {"a": 2})
    manager.allocate_slots("other", 0, 3 - num_steps)
    try:
        found = scheduler.schedule()
    except OutOfBlocks:
        manager.free("other")
        expect_same("tokens", scheduler.schedule().total_num_scheduled_tokens, 1)
        expect_same("preemptions", request.num_preemptions, 0)
        return
    raise Disagreement("schedule", "as a whole", found, "OutOfBlocks")

"""The steps of a scheduler whose requests arrive over time."""

from collections import deque
from collections.abc import Iterator, Sequence

from ...contract.integers import as_ints
from ...contract.scheduler_classes import Request, SchedulerOutput
from ...validation.scheduler import check_arrivals
from .scheduler import Scheduler


def schedule_arrivals(
    scheduler: Scheduler, requests: Sequence[Request], arrival_steps: Sequence[int]
) -> Iterator[tuple[int, SchedulerOutput]]:
    """Yield every step until all requests are finished.

    The caller passes each step to `scheduler.update_from_output` before it takes the next one.

    Args:
        scheduler: a scheduler without requests; modified.
        requests: all requests.
        arrival_steps: the first step that each request can take part in, from 0.

    Raises:
        TypeError, ValueError: there is not one step per request.

    Yields:
        The number of the step, and what the scheduler decided. Numbers are skipped where no
        request is waiting or running.
    """
    arrival_steps = as_ints("arrival_steps", arrival_steps)
    check_arrivals(len(requests), arrival_steps)
    order = sorted(range(len(requests)), key=lambda index: arrival_steps[index])
    arriving, step = deque(order), 0
    while arriving or scheduler.num_unfinished_requests:
        if not scheduler.num_unfinished_requests:
            step = max(step, arrival_steps[arriving[0]])
        while arriving and arrival_steps[arriving[0]] <= step:
            scheduler.add_request(requests[arriving.popleft()])
        yield step, scheduler.schedule()
        step += 1

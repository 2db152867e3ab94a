"""The requests of a trace as the scheduler takes them, and how many blocks they would use."""

from collections.abc import Hashable, Sequence

from ...contract.scheduler_classes import Request, SchedulerOutput
from ...reference.batch.arrivals import schedule_arrivals
from ...reference.batch.scheduler import Scheduler
from ...reference.cache.block_manager import BlockManager
from .tokens import Tokens
from .trace import TraceRequest


def make_requests(
    trace: Sequence[TraceRequest], sequences: Sequence[Tokens]
) -> list[Request]:
    """Return one request per entry of a trace; its id is its index.

    Args:
        trace: the entries.
        sequences: the tokens of each request, prompt and output.
    """
    return [
        Request(
            request_id=number,
            prompt_token_ids=sequence[: entry.prompt_len].tolist(),
            max_tokens=entry.output_len,
        )
        for number, (entry, sequence) in enumerate(zip(trace, sequences, strict=True))
    ]


def arrival_steps(trace: Sequence[TraceRequest], steps_per_second: float) -> list[int]:
    """Return the first step that each request of a trace can take part in."""
    return [int(entry.arrival * steps_per_second) for entry in trace]


def next_tokens(
    output: SchedulerOutput, sequences: Sequence[Tokens]
) -> dict[Hashable, int]:
    """Return the tokens that the requests of a step sample: the trace fixes them."""
    return {
        scheduled_request.request.request_id: int(
            sequences[_number(scheduled_request.request)][
                scheduled_request.request.num_tokens
            ]
        )
        for scheduled_request in output.scheduled_requests
        if scheduled_request.samples_token
    }


def peak_blocks(
    trace: Sequence[TraceRequest],
    sequences: Sequence[Tokens],
    steps_per_second: float,
    block_size: int,
    token_budget: int,
    max_running: int,
) -> int:
    """Return how many blocks the traffic uses at once if the cache never fills up.

    The scheduler runs without any tensors.
    """
    unlimited = sum(-(-len(tokens) // block_size) for tokens in sequences)
    manager = BlockManager(unlimited, block_size)
    scheduler = Scheduler(manager, token_budget, max_running)
    requests = make_requests(trace, sequences)
    arrivals = arrival_steps(trace, steps_per_second)
    peak = 0
    for _, output in schedule_arrivals(scheduler, requests, arrivals):
        peak = max(peak, manager.num_used_blocks)
        scheduler.update_from_output(output, next_tokens(output, sequences))
    return peak


def _number(request: Request) -> int:
    assert isinstance(request.request_id, int)
    return request.request_id

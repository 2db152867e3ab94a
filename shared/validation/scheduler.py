"""Validation of the scheduler's requests and sampled tokens."""

from collections.abc import Collection, Hashable, Mapping

from ..contract.scheduler_classes import Request, SchedulerOutput
from .primitives import check_positive


def check_new_request(
    request: Request, known: Collection[Hashable], num_blocks: int, block_size: int
) -> None:
    """Raise ValueError for a request that is empty, is known already, or can never fit."""
    where = f"request {request.request_id!r}"
    if request.request_id in known:
        raise ValueError(
            f"{where} is waiting or running already: expected a new request_id"
        )
    if len(request.prompt_token_ids) == 0:
        raise ValueError(f"{where} has an empty prompt: expected at least one token")
    check_positive(max_tokens=request.max_tokens)
    needed = -(-request.max_tokens_in_cache // block_size)
    if needed > num_blocks:
        raise ValueError(
            f"num_blocks = {num_blocks}: {where} needs {needed} blocks of {block_size} slots for"
            f" its {request.max_tokens_in_cache} tokens and can never run; expected at least"
            f" {needed} blocks, a shorter prompt or a smaller max_tokens"
        )


def check_has_requests(num_unfinished: int) -> None:
    """Raise RuntimeError if there is nothing to schedule."""
    if not num_unfinished:
        raise RuntimeError(
            "no request is waiting or running: expected add_request(...) first; see"
            " has_unfinished_requests"
        )


def check_sampled_tokens(
    output: SchedulerOutput, sampled_token_ids: Mapping[Hashable, int]
) -> None:
    """Raise ValueError unless exactly the requests that sample a token have one."""
    expected = {
        each.request.request_id
        for each in output.scheduled_requests
        if each.samples_token
    }
    for request_id in sampled_token_ids.keys() ^ expected:
        problem = "is missing" if request_id in expected else "is not expected"
        raise ValueError(
            f"sampled_token_ids[{request_id!r}] {problem}: expected one token for each scheduled"
            " request whose samples_token is True"
        )

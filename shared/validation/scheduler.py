"""Validation of the scheduler's requests, steps and sampled tokens."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from torch import Tensor

from ..contract.checks import check_hashable
from ..contract.integers import LARGEST, as_int
from ..contract.scheduler_classes import (
    Request,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
)

POLICIES = ("fcfs", "priority")


class BlocksOfScheduler(Protocol):
    """What the scheduler's checks read of a block manager."""

    num_blocks: int
    block_size: int
    sliding_window: int | None

    def num_blocks_of(self, request_id: Hashable) -> int:
        """Return how many entries a request's row has."""


def check_policy(policy: str) -> None:
    """Raise TypeError or ValueError for an unknown policy."""
    if not isinstance(policy, str):
        raise TypeError(f"policy = {policy!r:.60}: expected one of {POLICIES}")
    if policy not in POLICIES:
        raise ValueError(f"policy = {policy!r:.60}: expected one of {POLICIES}")


def check_new_request(
    request: Request,
    known: Collection[Hashable],
    blocks: BlocksOfScheduler,
    token_budget: int,
) -> None:
    """Raise an error for a request that was used, is known already, or can never fit."""
    if not isinstance(request, Request):
        raise TypeError(f"request = {request!r:.60}: expected a Request")
    where = f"request {request.request_id!r}"
    if request.request_id in known:
        raise ValueError(
            f"{where} is waiting or running already: expected a new request_id"
        )
    if request.arrival is not None or request.is_finished:
        raise ValueError(
            f"{where} was used before ({request.status.name.lower()}): expected a new Request, with"
            " the tokens so far as its prompt if it goes on"
        )
    if blocks.num_blocks_of(request.request_id):
        raise ValueError(
            f"{where} holds blocks already: expected a request_id that the block manager does not"
            " know; free it first"
        )
    check_fits(
        request,
        blocks.num_blocks,
        blocks.block_size,
        token_budget,
        blocks.sliding_window,
    )


def check_fits(
    request: Request,
    num_blocks: int,
    block_size: int,
    token_budget: int,
    sliding_window: int | None = None,
) -> None:
    """Raise ValueError for a request that needs more blocks than a cache has.

    Args:
        request: the request.
        num_blocks: blocks in the cache.
        block_size: slots per block.
        token_budget: new tokens of a step at most.
        sliding_window: Optional. With a window, the blocks of the tokens that a chunk attends to
            are enough, and one block is the null block. If None, all tokens are kept.
    """
    needed = -(-request.max_tokens_in_cache // block_size)
    if sliding_window is not None:
        at_once = -(-(sliding_window - 1 + token_budget) // block_size) + 1
        needed = min(needed, at_once) + 1
    if needed > num_blocks:
        raise ValueError(
            f"num_blocks = {num_blocks}: request {request.request_id!r} needs {needed} blocks of"
            f" {block_size} slots for its {request.max_tokens_in_cache} tokens and can never run;"
            f" expected at least {needed} blocks, a shorter prompt or a smaller max_tokens"
        )


def check_no_step(step: SchedulerOutput | None) -> None:
    """Raise RuntimeError while a step has been scheduled and not been updated."""
    if step is not None:
        raise RuntimeError(
            "the last step has not been passed to update_from_output(...): expected that first;"
            " to give the step up, end its requests with finish_requests(...) before"
        )


def check_can_schedule(
    running: Sequence[Request],
    waiting: Iterable[Request],
    max_running: int,
    blocks: BlocksOfScheduler,
) -> None:
    """Raise RuntimeError if there is nothing to schedule, or blocks do not belong to requests.

    Args:
        running: requests that hold blocks.
        waiting: requests that hold none, the one to be admitted next first.
        max_running: running requests at most.
        blocks: the block manager, which others may have called too.
    """
    candidates = [*islice(waiting, max(0, max_running - len(running)))]
    if not running and not candidates:
        raise RuntimeError(
            "no request is waiting or running: expected add_request(...) first; see"
            " num_unfinished_requests"
        )
    for request in running:
        num_slots = blocks.num_blocks_of(request.request_id) * blocks.block_size
        if num_slots < max(1, request.num_computed_tokens):
            raise RuntimeError(_describe_lost_blocks(request, num_slots))
    for request in candidates:
        if blocks.num_blocks_of(request.request_id):
            raise RuntimeError(
                f"request {request.request_id!r} is waiting and holds blocks: expected that only"
                " the scheduler allocates blocks for it; free it on the block manager"
            )


def check_step(
    output: SchedulerOutput, step: SchedulerOutput | None, blocks: BlocksOfScheduler
) -> list[ScheduledRequest]:
    """Return the requests of a step that were not ended since; raise if one lost its blocks.

    Args:
        output: the step that is said to be computed.
        step: the step that was scheduled last. None if it has been updated.
        blocks: the block manager.
    """
    if not isinstance(output, SchedulerOutput):
        raise TypeError(f"output = {output!r:.60}: expected a SchedulerOutput")
    if output is not step:
        problem = "it was passed before" if step is None else "another one is scheduled"
        raise ValueError(
            f"output is not the step to be updated, {problem}: expected what schedule() returned"
            " last, once"
        )
    live = []
    for scheduled in output.scheduled_requests:
        request = scheduled.request
        if request.is_finished:
            continue
        num_slots = blocks.num_blocks_of(request.request_id) * blocks.block_size
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        if num_slots < end:
            raise ValueError(_describe_lost_blocks(request, num_slots))
        is_as_before = request.num_computed_tokens == scheduled.num_computed_tokens
        if not is_as_before or len(request.token_ids) < end:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, of which"
                f" {request.num_computed_tokens} are computed: expected"
                f" {scheduled.num_computed_tokens} and {end} tokens at least, as when the step was"
                " scheduled"
            )
        live.append(scheduled)
    return live


def _describe_lost_blocks(request: Request, num_slots: int) -> str:
    return (
        f"request {request.request_id!r} is running and holds {num_slots} slots: expected those"
        f" that the scheduler allocated; the block manager was told to free it, so end it with"
        " finish_requests(...)"
    )


def check_sampled_tokens(
    live: Sequence[ScheduledRequest],
    scheduled_requests: Sequence[ScheduledRequest],
    sampled_token_ids: Mapping[Hashable, int],
) -> dict[Hashable, int]:
    """Return the token of each request that samples one; raise an error for any other.

    Args:
        live: the requests of the step that were not ended since it was scheduled.
        scheduled_requests: all of its requests. A token of one that was ended is left out.
        sampled_token_ids: the tokens.
    """
    if not isinstance(sampled_token_ids, Mapping):
        raise TypeError(
            f"sampled_token_ids = {sampled_token_ids!r:.60}: expected a mapping from request_id"
            " to token"
        )
    tokens = {}
    for scheduled in live:
        if scheduled.samples_token:
            request_id = scheduled.request.request_id
            token = sampled_token_ids.get(request_id)
            if token is None:
                raise ValueError(_describe_token(request_id, "is missing"))
            if type(token) is not int or not 0 <= token <= LARGEST:
                token = as_int(f"sampled_token_ids[{request_id!r}]", token)
            tokens[request_id] = token
    if len(sampled_token_ids) != len(tokens):
        ended = {
            scheduled_request.request.request_id
            for scheduled_request in scheduled_requests
        }
        ended -= {scheduled.request.request_id for scheduled in live}
        for request_id in sampled_token_ids.keys() - tokens.keys() - ended:
            raise ValueError(_describe_token(request_id, "is not expected"))
    return tokens


def _describe_token(request_id: Hashable, problem: str) -> str:
    return (
        f"sampled_token_ids[{request_id!r}] {problem}: expected one token for each scheduled"
        " request whose samples_token is True"
    )


def check_finished_status(status: RequestStatus) -> None:
    """Raise an error for a status that does not end a request."""
    if not isinstance(status, RequestStatus):
        raise TypeError(f"finished_status = {status!r:.60}: expected a RequestStatus")
    if status <= RequestStatus.PREEMPTED:
        raise ValueError(
            f"finished_status = {status.name}: expected a status that begins with FINISHED"
        )


def as_request_ids(request_ids: Any) -> list[Hashable]:
    """Return request ids in a list; a string is one id."""
    if isinstance(request_ids, str):
        return [request_ids]
    is_right = isinstance(request_ids, Collection)
    if not is_right or isinstance(request_ids, (bytes, Tensor)):
        raise TypeError(
            f"request_ids = {request_ids!r:.60}: expected a collection of request ids, such as"
            " ['a']"
        )
    found = list(request_ids)
    for index, request_id in enumerate(found):
        check_hashable(f"request_ids[{index}]", request_id)
    return found


def check_arrivals(num_requests: int, arrival_steps: Sequence[int]) -> None:
    """Raise an error unless there is one step per request."""
    if len(arrival_steps) != num_requests:
        raise ValueError(
            f"arrival_steps has {len(arrival_steps)} entries: expected {num_requests}, one for"
            " each request"
        )

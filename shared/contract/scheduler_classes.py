"""Requests, and what the scheduler decides about them in one step."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

from .checks import check_hashable, check_prompt, check_unfinished
from .extra_keys import NO_EXTRA_KEYS, ExtraKeys, check_extra_keys
from .integers import as_int, as_int_set, as_ints


class RequestStatus(IntEnum):
    """Where a request is between its arrival and its end (vLLM's names).

    The statuses after PREEMPTED are those of finished requests.
    """

    WAITING = auto()
    """It holds no blocks and has not been admitted."""
    RUNNING = auto()
    """It holds blocks."""
    PREEMPTED = auto()
    """It lost its blocks and waits to be admitted again."""
    FINISHED_STOPPED = auto()
    """It sampled a stop token."""
    FINISHED_LENGTH_CAPPED = auto()
    """It sampled `max_tokens` tokens."""
    FINISHED_ABORTED = auto()
    """It was ended by `finish_requests`."""


@dataclass(eq=False)
class Request:
    """One request: its tokens, and how far it is computed.

    An object serves one scheduler, once. To compute a request again, make a new one.

    Args:
        request_id: any hashable value, unique among the unfinished requests of a scheduler.
        prompt_token_ids: the tokens known from the start; at least one.
        max_tokens: output tokens at most, from 1.
        stop_token_ids: tokens that end the output. The stop token is part of the output.
        priority: of two requests the one with the lower number goes first, if the scheduler's
            policy is "priority".
        extra_keys: what its keys depend on besides its tokens, for the prefix cache.

    Raises:
        TypeError: a field has another type. NumPy's integers are taken, bools and floats are not.
        ValueError: the prompt is empty, a token is negative, or a number is out of range.

    Source:
        vLLM's `Request` (V1), of which these are the fields that scheduling reads.

    Example:
        >>> request = Request("a", [5, 6, 7], max_tokens=2)
        >>> request.append_output_token(9)
        >>> request.num_tokens, request.output_token_ids, request.is_finished
        (4, [9], False)
        >>> request.append_output_token(9)
        >>> request.status.name
        'FINISHED_LENGTH_CAPPED'
    """

    request_id: Hashable
    prompt_token_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: Collection[int] = frozenset()
    priority: int = 0
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    token_ids: list[int] = field(init=False)
    """The prompt and the output so far."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    """Where the request is."""
    arrival: int | None = field(default=None, init=False)
    """Its number among all requests that its scheduler was given; None before."""
    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose keys and values are in the cache."""
    max_computed_tokens: int = field(default=0, init=False)
    """The largest value that `num_computed_tokens` had; above it after a preemption."""
    num_preemptions: int = field(default=0, init=False)
    """How often the request lost its blocks and had to be computed again."""

    def __post_init__(self) -> None:
        check_hashable("request_id", self.request_id)
        self.token_ids = as_ints("prompt_token_ids", self.prompt_token_ids)
        check_prompt(self.request_id, self.token_ids)
        # copies: the caller may modify its lists afterwards
        self.prompt_token_ids = tuple(self.token_ids)
        self.max_tokens = as_int("max_tokens", self.max_tokens, smallest=1)
        self.stop_token_ids = as_int_set("stop_token_ids", self.stop_token_ids)
        self.priority = as_int("priority", self.priority, smallest=-(2**63))
        check_extra_keys(self.extra_keys)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens known from the start."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and the output."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_tokens_in_cache(self) -> int:
        """Slots that the request needs at most; the last output token is never stored."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def is_finished(self) -> bool:
        """Whether its last token was a stop token or the `max_tokens`-th, or it was aborted."""
        return self.status > RequestStatus.PREEMPTED

    def append_output_token(self, token_id: int) -> None:
        """Add a sampled token to the sequence; a stop token or the last one finishes the request.

        Raises:
            TypeError: the token is not an integer.
            ValueError: it is negative, or the request is finished.
        """
        check_unfinished(self.request_id, self.is_finished)
        token_id = as_int("token_id", token_id)
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.status = RequestStatus.FINISHED_STOPPED
        elif self.num_tokens >= self.num_prompt_tokens + self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED


@dataclass(frozen=True)
class ScheduledRequest:
    """What one request computes in one step.

    Args:
        request: the request.
        num_computed_tokens: tokens that are in the cache before the step.
        num_scheduled_tokens: new tokens of the step, from 1.
        num_recomputed_tokens: new tokens that had been computed before a preemption.
        block_ids: the request's row of the block table, long enough for the new tokens.
        samples_token: whether the step computes the last known token, so that the next token can
            be sampled. It is False for a chunk that ends before the end of the prompt.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_recomputed_tokens: int
    block_ids: list[int]
    samples_token: bool


@dataclass
class SchedulerOutput:
    """One step as the scheduler decided it.

    Args:
        scheduled_requests: the requests that compute tokens, in the order in which they were
            scheduled.
        new_block_ids: blocks that were handed out for new content. What they hold is undefined.
        blocks_to_copy: (source, destination) pairs for `copy_blocks`, to be copied in this order
            before the step writes anything.
        preempted_req_ids: requests that lost their blocks in this step, or since the last one.
        finished_req_ids: requests that finished or were aborted since the last step. A new request
            may have the id of one of them.
        num_prefix_hit_tokens: tokens that newly admitted requests found in the cache.
        num_regained_tokens: tokens that preempted requests found there when they came back.
        num_waiting_reqs: requests that have not been admitted.
    """

    scheduled_requests: list[ScheduledRequest] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    preempted_req_ids: list[Hashable] = field(default_factory=list)
    finished_req_ids: list[Hashable] = field(default_factory=list)
    num_prefix_hit_tokens: int = 0
    num_regained_tokens: int = 0
    num_waiting_reqs: int = 0

    @property
    def num_scheduled_tokens(self) -> dict[Hashable, int]:
        """New tokens of each request, by its id."""
        return {
            scheduled.request.request_id: scheduled.num_scheduled_tokens
            for scheduled in self.scheduled_requests
        }

    @property
    def total_num_scheduled_tokens(self) -> int:
        """New tokens of the step."""
        return sum(
            scheduled.num_scheduled_tokens for scheduled in self.scheduled_requests
        )

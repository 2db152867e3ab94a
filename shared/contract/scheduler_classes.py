"""Requests, and what the scheduler decides about them in one step."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """One request: its tokens, and how far it is computed.

    Args:
        request_id: any hashable value, unique among the requests of a scheduler.
        prompt_token_ids: the tokens known from the start; at least one.
        max_tokens: output tokens at most, from 1.
        stop_token_ids: tokens that end the output. The stop token is part of the output.

    Source:
        vLLM's `Request` (V1), of which these are the fields that scheduling reads.

    Example:
        >>> request = Request("a", [5, 6, 7], max_tokens=2)
        >>> request.append_output_token(9)
        >>> request.num_tokens, request.output_token_ids, request.is_finished
        (4, [9], False)
    """

    request_id: Hashable
    prompt_token_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: Collection[int] = frozenset()
    token_ids: list[int] = field(init=False)
    """The prompt and the output so far."""
    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose keys and values are in the cache."""
    max_computed_tokens: int = field(default=0, init=False)
    """The largest value that `num_computed_tokens` had; above it after a preemption."""
    num_preemptions: int = field(default=0, init=False)
    """How often the request lost its blocks and had to be computed again."""

    def __post_init__(self) -> None:
        self.token_ids = [int(token) for token in self.prompt_token_ids]

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
        """Whether the last token was the last one: a stop token, or the `max_tokens`-th."""
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        if num_output_tokens == 0:
            return False
        stops = self.token_ids[-1] in self.stop_token_ids
        return stops or num_output_tokens >= self.max_tokens

    def append_output_token(self, token_id: int) -> None:
        """Add a sampled token to the sequence."""
        self.token_ids.append(int(token_id))


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
        preempted_req_ids: requests that lost their blocks in this step.
        num_prefix_hit_tokens: tokens that newly admitted requests found in the cache.
        num_regained_tokens: tokens that preempted requests found there when they came back.
        num_waiting_reqs: requests that have not been admitted.
    """

    scheduled_requests: list[ScheduledRequest] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    preempted_req_ids: list[Hashable] = field(default_factory=list)
    num_prefix_hit_tokens: int = 0
    num_regained_tokens: int = 0
    num_waiting_reqs: int = 0

    @property
    def num_scheduled_tokens(self) -> dict[Hashable, int]:
        """New tokens of each request, by its id."""
        return {
            each.request.request_id: each.num_scheduled_tokens
            for each in self.scheduled_requests
        }

    @property
    def total_num_scheduled_tokens(self) -> int:
        """New tokens of the step."""
        return sum(each.num_scheduled_tokens for each in self.scheduled_requests)

"""Scheduler: which request computes how many tokens in the next step.

**Continuous batching.** Requests enter and leave between steps; a step computes one flat batch of
new tokens. Requests are served in the order in which they were added.

**Decode first, chunked prefill.** A step has a token budget. Running requests take from it first;
most of them decode and need one token each. What is left goes to the prompts of waiting requests. A
prompt that is longer than the rest of the budget is computed in chunks, over several steps.

**Prefix hits.** An admitted request takes the blocks that already hold its first tokens, and starts
computing after them.

**Preemption by recomputation.** If a running request needs a block and none is left, the request
that was admitted last loses all of its blocks and is the first to be admitted again. Its tokens are
kept, so only their keys and values are computed again.
"""

from collections import deque
from collections.abc import Hashable, Mapping

from ...contract.block_classes import OutOfBlocks, SlotAllocation
from ...contract.scheduler_classes import Request, ScheduledRequest, SchedulerOutput
from ...validation.primitives import check_positive
from ...validation.scheduler import (
    check_has_requests,
    check_new_request,
    check_sampled_tokens,
)
from ..cache.block_manager import BlockManager


class Scheduler:
    """Continuous batching over a KV cache of limited size.

    Args:
        block_manager: the cache's blocks. The scheduler allocates and frees them.
        token_budget: new tokens of a step at most, from 1.
        max_running: running requests at most, from 1.

    Raises:
        ValueError: a number is out of range.

    Source:
        vLLM's `Scheduler` (V1), where the limits are `max_num_batched_tokens` and `max_num_seqs`.
        Continuous batching: Yu et al., "Orca", OSDI 2022. Preemption: Kwon et al., SOSP 2023.
        Chunked prefill: Agrawal et al., "Sarathi-Serve", OSDI 2024.

    Example:
        >>> blocks = BlockManager(num_blocks=4, block_size=2)
        >>> scheduler = Scheduler(blocks, token_budget=4, max_running=8)
        >>> scheduler.add_request(Request("a", [5, 6, 7], max_tokens=3))
        >>> scheduler.add_request(Request("b", [5, 6, 8, 9], max_tokens=2))
        >>> first = scheduler.schedule()
        >>> first.num_scheduled_tokens
        {'a': 3, 'b': 1}
        >>> scheduler.update_from_output(first, {"a": 4})
        >>> second = scheduler.schedule()
        >>> second.num_scheduled_tokens
        {'a': 1, 'b': 3}
        >>> scheduler.update_from_output(second, {"a": 4, "b": 1})
        >>> third = scheduler.schedule()
        >>> third.num_scheduled_tokens, third.preempted_req_ids
        ({'a': 1}, ['b'])
        >>> scheduler.update_from_output(third, {"a": 4})
        >>> fourth = scheduler.schedule()
        >>> fourth.num_scheduled_tokens, fourth.num_regained_tokens
        ({'b': 3}, 2)
    """

    def __init__(
        self, block_manager: BlockManager, token_budget: int, max_running: int
    ) -> None:
        """Make a scheduler without requests."""
        check_positive(token_budget=token_budget, max_running=max_running)
        self.block_manager = block_manager
        self.token_budget = token_budget
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        """Requests that hold no blocks; the one to be admitted next at the front."""
        self.running: list[Request] = []
        """Requests that hold blocks; the one to be preempted next at the end."""

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self.waiting) + len(self.running)

    def add_request(self, request: Request) -> None:
        """Let a request wait for its turn, after all that were added before.

        Args:
            request: a request of which nothing is computed.

        Raises:
            ValueError: its prompt is empty, its id is in use, or it can never fit in the cache.
        """
        check_new_request(
            request,
            {each.request_id for each in (*self.waiting, *self.running)},
            self.block_manager.num_blocks,
            self.block_manager.block_size,
        )
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and allocate the blocks that it writes.

        The step has to be computed and passed to `update_from_output` before the next call.

        Returns:
            The requests that compute tokens, at least one, and how many.

        Raises:
            RuntimeError: no request is waiting or running.
            OutOfBlocks: no request can run, because blocks are held that this scheduler did not
                allocate.
        """
        check_has_requests(self.num_unfinished_requests)
        output = SchedulerOutput()
        token_budget = self.token_budget
        # step: schedule the running requests, the one admitted first before all others
        index = 0
        while index < len(self.running) and token_budget:
            request = self.running[index]
            num_new_tokens = min(
                request.num_tokens - request.num_computed_tokens, token_budget
            )
            allocation = self._allocate_or_preempt(request, num_new_tokens, output)
            if allocation is None:
                break
            self._add_to_step(output, request, num_new_tokens, allocation)
            token_budget -= num_new_tokens
            index += 1
        # step: admit waiting requests, unless blocks ran out in this step
        while (
            self.waiting
            and token_budget
            and not output.preempted_req_ids
            and len(self.running) < self.max_running
        ):
            # step: look up the first tokens of the next request in the prefix cache
            request = self.waiting[0]
            computed_blocks = self.block_manager.get_computed_blocks(request.token_ids)
            num_hit_tokens = len(computed_blocks) * self.block_manager.block_size
            # step: schedule a chunk that fits the budget, or wait for blocks
            num_new_tokens = min(request.num_tokens - num_hit_tokens, token_budget)
            try:
                allocation = self.block_manager.allocate_slots(
                    request.request_id, num_hit_tokens, num_new_tokens, computed_blocks
                )
            except OutOfBlocks:
                if not self.running:
                    raise
                break
            self.running.append(self.waiting.popleft())
            request.num_computed_tokens = num_hit_tokens
            if request.num_preemptions:
                output.num_regained_tokens += num_hit_tokens
            else:
                output.num_prefix_hit_tokens += num_hit_tokens
            self._add_to_step(output, request, num_new_tokens, allocation)
            token_budget -= num_new_tokens
        output.num_waiting_reqs = len(self.waiting)
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: Mapping[Hashable, int]
    ) -> None:
        """Record that a step is computed: its keys and values are in the cache.

        Args:
            output: what `schedule` returned last.
            sampled_token_ids: the next token of each request whose `samples_token` is True.

        Raises:
            ValueError: a token is missing, or is not expected; nothing has changed.
        """
        check_sampled_tokens(output, sampled_token_ids)
        for scheduled in output.scheduled_requests:
            request = scheduled.request
            # step: count the tokens, and make their full blocks known to others
            request.num_computed_tokens += scheduled.num_scheduled_tokens
            request.max_computed_tokens = max(
                request.max_computed_tokens, request.num_computed_tokens
            )
            self.block_manager.cache_full_blocks(
                request.request_id, request.token_ids, request.num_computed_tokens
            )
            # step: append the sampled token; a finished request frees its blocks
            if scheduled.samples_token:
                request.append_output_token(sampled_token_ids[request.request_id])
            if request.is_finished:
                self.running.remove(request)
                self.block_manager.free(request.request_id)

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, output: SchedulerOutput
    ) -> SlotAllocation | None:
        """Return a running request's new blocks; None if it had to be preempted itself."""
        while True:
            try:
                return self.block_manager.allocate_slots(
                    request.request_id, request.num_computed_tokens, num_new_tokens
                )
            except OutOfBlocks:
                if len(self.running) == 1:
                    raise
                # step: preempt the request that was admitted last; it is admitted again first
                victim = self.running.pop()
                self.block_manager.free(victim.request_id)
                victim.num_computed_tokens = 0
                victim.num_preemptions += 1
                self.waiting.appendleft(victim)
                output.preempted_req_ids.append(victim.request_id)
                if victim is request:
                    return None

    def _add_to_step(
        self,
        output: SchedulerOutput,
        request: Request,
        num_new_tokens: int,
        allocation: SlotAllocation,
    ) -> None:
        """Record a request that computes tokens in this step."""
        num_computed = request.num_computed_tokens
        num_lost = max(0, request.max_computed_tokens - num_computed)
        output.new_block_ids += allocation.new_block_ids
        output.blocks_to_copy += allocation.blocks_to_copy
        output.scheduled_requests.append(
            ScheduledRequest(
                request=request,
                num_computed_tokens=num_computed,
                num_scheduled_tokens=num_new_tokens,
                num_recomputed_tokens=min(num_lost, num_new_tokens),
                block_ids=self.block_manager.get_block_ids(request.request_id),
                samples_token=num_computed + num_new_tokens == request.num_tokens,
            )
        )

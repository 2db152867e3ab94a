"""Scheduler: which request computes how many tokens in the next step.

**Continuous batching.** Requests enter and leave between steps; a step computes one flat batch of
new tokens. Requests are served in the order in which they were added, or by their priority.

**Decode first, chunked prefill.** A step has a token budget. Running requests take from it first;
most of them decode and need one token each. What is left goes to the prompts of waiting requests. A
prompt that is longer than the rest of the budget is computed in chunks, over several steps.

**Prefix hits.** An admitted request takes the blocks that already hold its first tokens, and starts
computing after them.

**Preemption by recomputation.** If a running request needs a block and none is left, the request
that was admitted last loses all of its blocks and is the first to be admitted again. Its tokens are
kept, so only their keys and values are computed again. With priorities it is the request of the
lowest priority.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from copy import deepcopy

from ...contract.argument_types import typed
from ...contract.block_classes import OutOfBlocks, SlotAllocation
from ...contract.integers import as_int
from ...contract.scheduler_classes import (
    Request,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
)
from ...validation.scheduler import (
    as_request_ids,
    check_can_schedule,
    check_finished_status,
    check_new_request,
    check_no_step,
    check_policy,
    check_sampled_tokens,
    check_step,
)
from ..cache.block_manager import BlockManager


class Scheduler:
    """Continuous batching over a KV cache of limited size.

    Args:
        block_manager: the cache's blocks. The scheduler allocates and frees them.
        token_budget: new tokens of a step at most, from 1.
        max_running: running requests at most, from 1.
        policy: "fcfs": requests are admitted in the order in which they were added. "priority":
            the one with the lowest number goes first, and of equals the one added first.

    Raises:
        TypeError, ValueError: a number is not an integer or out of range, or the policy is
            unknown.

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
        self,
        block_manager: BlockManager,
        token_budget: int,
        max_running: int,
        policy: str = "fcfs",
    ) -> None:
        """Make a scheduler without requests."""
        if not callable(getattr(block_manager, "allocate_slots", None)):
            raise TypeError(
                f"block_manager = {block_manager!r:.60}: expected a BlockManager"
            )
        check_policy(policy)
        self.block_manager = block_manager
        self.token_budget = as_int("token_budget", token_budget, smallest=1)
        self.max_running = as_int("max_running", max_running, smallest=1)
        self.policy = policy
        self.requests: dict[Hashable, Request] = {}
        """The requests that are waiting or running, by their ids."""
        self.waiting: deque[Request] = deque()
        """Requests that hold no blocks; the one to be admitted next at the front."""
        self.running: list[Request] = []
        """Requests that hold blocks; the one to be preempted next at the end."""
        self._num_added = 0
        # the step that has been scheduled and not been updated
        self._step: SchedulerOutput | None = None
        # requests that lost their blocks since the last step was scheduled
        self._preempted_req_ids: list[Hashable] = []
        self._finished_req_ids: list[Hashable] = []

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self.requests)

    def add_request(self, request: Request) -> None:
        """Let a request wait for its turn.

        Args:
            request: a request that no scheduler has been given before.

        Raises:
            TypeError: it is not a Request.
            ValueError: it was used before, its id is in use, or it can never fit in the cache.
        """
        check_new_request(request, self.requests, self.block_manager, self.token_budget)
        request.arrival = self._num_added
        self._num_added += 1
        self.requests[request.request_id] = request
        # wait after all that were added before, or by priority
        self._insert(self.waiting, request)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and allocate the blocks that it writes.

        The step has to be computed and passed to `update_from_output` before the next call.

        Returns:
            The requests that compute tokens, at least one, and how many.

        Raises:
            RuntimeError: no request is waiting or running, the last step has not been passed to
                `update_from_output`, or the block manager has lost blocks of a request. Nothing
                has changed.
            OutOfBlocks: no request can run, because blocks are held that this scheduler did not
                allocate. Nothing has changed.
        """
        check_no_step(self._step)
        check_can_schedule(
            self.running, self.waiting, self.max_running, self.block_manager
        )
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
            computed_blocks = self.block_manager.get_computed_blocks(
                request.token_ids, request.extra_keys
            )
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
            self.waiting.popleft()
            self._insert(self.running, request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_hit_tokens
            if request.num_preemptions:
                output.num_regained_tokens += num_hit_tokens
            else:
                output.num_prefix_hit_tokens += num_hit_tokens
            self._add_to_step(output, request, num_new_tokens, allocation)
            token_budget -= num_new_tokens
        output.num_waiting_reqs = len(self.waiting)
        output.preempted_req_ids[:0] = self._preempted_req_ids
        output.finished_req_ids = self._finished_req_ids
        self._preempted_req_ids, self._finished_req_ids = [], []
        self._step = output
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: Mapping[Hashable, int]
    ) -> None:
        """Record that a step is computed: its keys and values are in the cache.

        A request that was aborted since the step was scheduled is left out: its token may be given
        or not, and is ignored.

        Args:
            output: what `schedule` returned last.
            sampled_token_ids: the next token of each request whose `samples_token` is True.

        Raises:
            TypeError: a token is not an integer.
            ValueError: the step is not the last one, a token is missing or not expected, or a
                request of the step has lost its blocks. Nothing has changed.
        """
        live = check_step(output, self._step, self.block_manager)
        tokens = check_sampled_tokens(
            live, output.scheduled_requests, sampled_token_ids
        )
        self._step = None
        for scheduled in live:
            request = scheduled.request
            # step: count the tokens, and make their full blocks known to others
            request.num_computed_tokens += scheduled.num_scheduled_tokens
            request.max_computed_tokens = max(
                request.max_computed_tokens, request.num_computed_tokens
            )
            self.block_manager.cache_full_blocks(
                request.request_id,
                request.token_ids,
                request.num_computed_tokens,
                request.extra_keys,
            )
            # step: append the sampled token; a finished request frees its blocks
            if scheduled.samples_token:
                request.append_output_token(tokens[request.request_id])
            if request.is_finished:
                self.running.remove(request)
                del self.requests[request.request_id]
                self.block_manager.free(request.request_id)
                self._finished_req_ids.append(request.request_id)

    def finish_requests(
        self,
        request_ids: Collection[Hashable] | str,
        finished_status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> list[Hashable]:
        """End requests from outside, for example because a client has gone.

        Their blocks are freed at once. A step that is being computed may still write to them; it
        is over before the next step writes. Its full blocks stay known only if an earlier step
        computed them.

        Args:
            request_ids: the requests; a string is one id. An id that is unknown or finished is
                ignored, because a client may come too late.
            finished_status: the status that they get.

        Returns:
            The ids of the requests that were ended.

        Raises:
            TypeError: it is not a collection of ids, or not a status.
            ValueError: the status is one of unfinished requests. Nothing has changed.

        Source:
            vLLM's method of that name, which its engines call `abort_requests`.

        Example:
            >>> scheduler = Scheduler(BlockManager(4, 2), token_budget=4, max_running=8)
            >>> scheduler.add_request(Request("a", [5, 6, 7], max_tokens=3))
            >>> step = scheduler.schedule()
            >>> scheduler.finish_requests(["a", "b"]), scheduler.block_manager.num_free_blocks
            (['a'], 4)
            >>> scheduler.update_from_output(step, {"a": 4})
            >>> step.scheduled_requests[0].request.output_token_ids
            []
        """
        check_finished_status(finished_status)
        ended = []
        for request_id in as_request_ids(request_ids):
            request = self.requests.pop(request_id, None)
            if request is None:
                continue
            # take it out of its queue, and free its blocks
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                if self.block_manager.num_blocks_of(request_id):
                    self.block_manager.free(request_id)
            else:
                self.waiting.remove(request)
            request.status = finished_status
            ended.append(request_id)
        self._finished_req_ids += ended
        return ended

    @typed
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the content of all cached blocks, for example because the model has new weights.

        Args:
            reset_running_requests: whether running requests are preempted first, so that none
                keeps keys of before. They are computed again from their first token.

        Returns:
            Whether it was forgotten. Nothing changes while a request holds blocks.

        Raises:
            RuntimeError: requests shall be preempted whose step has not been passed to
                `update_from_output`. Nothing has changed.

        Source:
            vLLM's method of that name.
        """
        if reset_running_requests and self.running:
            check_no_step(self._step)
            if self.block_manager.num_requests > len(self.running):
                return False
            # preempt all, the one admitted last first, so that they keep their order
            while self.running:
                self._preempted_req_ids.append(self._preempt_last())
        return self.block_manager.reset_prefix_cache()

    def _insert(self, queue: deque[Request] | list[Request], request: Request) -> None:
        """Insert a request at the end of a queue, or by its priority and its arrival."""
        if self.policy == "priority":
            insort(
                queue, request, key=lambda waiting: (waiting.priority, waiting.arrival)
            )
        else:
            queue.append(request)

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
                if request is self.running[0] and not output.preempted_req_ids:
                    self._check_fits_alone(request, num_new_tokens)
                # step: preempt the request that was admitted last; it is admitted again first
                output.preempted_req_ids.append(self._preempt_last())
                if request.status == RequestStatus.PREEMPTED:
                    return None

    def _check_fits_alone(self, request: Request, num_new_tokens: int) -> None:
        """Raise OutOfBlocks if a request cannot run even if all others are preempted."""
        if self.block_manager.num_requests == len(self.running):
            return
        trial = deepcopy(self.block_manager)
        for other in self.running:
            if other is not request:
                trial.free(other.request_id)
        trial.allocate_slots(
            request.request_id, request.num_computed_tokens, num_new_tokens
        )

    def _preempt_last(self) -> Hashable:
        """Take all blocks from the running request at the end; return its id."""
        victim = self.running.pop()
        self.block_manager.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        if self.policy == "priority":
            self._insert(self.waiting, victim)
        else:
            self.waiting.appendleft(victim)
        return victim.request_id

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

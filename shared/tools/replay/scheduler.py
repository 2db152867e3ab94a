"""Who computes how many tokens in this step?

Requests come and go while the batch runs: a step takes every running request one token further,
and spends what is left of its token budget on the prompts of new ones, a long prompt in several
chunks. Who came first is served first. When the cache is full, a new request waits; when a running
one needs a block and there is none, the youngest running request gives all of its blocks back and
starts over later. Its tokens stay known, so it only computes their keys and values again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .tokens import Tokens
from .trace import TraceRequest


@dataclass(eq=False)
class Request:
    """A request on its way.

    Args:
        number: its place in the trace.
        arrival_step: the first step it can take part in.
        tokens: [prompt_len + output_len] all it will ever consist of.
        prompt_len: tokens known from the start.
        num_known: the prompt and the tokens generated so far.
        num_computed: tokens whose keys and values are in the cache.
        num_ever_computed: the most that `num_computed` ever was.
        row: its blocks, in sequence order.
        contents: what its full blocks hold, see BlockManager.remember.
        preemptions: how often it had to start over.
    """

    number: int
    arrival_step: int
    tokens: Tokens
    prompt_len: int
    num_known: int = 0
    num_computed: int = 0
    num_ever_computed: int = 0
    row: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_known = self.prompt_len

    @property
    def num_to_compute(self) -> int:
        """Tokens it computes in all; nobody asks for the keys of its last one."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Turn:
    """What one request does in one step.

    Args:
        request: the request.
        num_tokens: new tokens it computes.
        num_computed: tokens that were in the cache before.
        num_recomputed: new tokens that had been computed before a preemption.
    """

    request: Request
    num_tokens: int
    num_computed: int
    num_recomputed: int


@dataclass(frozen=True)
class Schedule:
    """One step as the scheduler decided it.

    Args:
        step: the clock; it jumps where nothing was to be done.
        turns: the requests that compute something, in the order they were chosen.
        new_blocks: blocks that were handed out for new content.
        preempted: numbers of the requests that gave their blocks back.
        num_prefix_tokens: tokens that new requests found in the cache.
        num_regained_tokens: tokens that preempted requests found there when they came back.
        num_waiting: requests that have arrived and do not run.
    """

    step: int
    turns: list[Turn]
    new_blocks: list[int]
    preempted: list[int]
    num_prefix_tokens: int
    num_regained_tokens: int
    num_waiting: int


def make_requests(
    trace: Sequence[TraceRequest], tokens: Sequence[Tokens], steps_per_second: float
) -> list[Request]:
    """Return the requests of a trace, their arrival counted in steps."""
    return [
        Request(
            number=entry.number,
            arrival_step=int(entry.arrival * steps_per_second),
            tokens=sequence,
            prompt_len=entry.prompt_len,
        )
        for entry, sequence in zip(trace, tokens, strict=True)
    ]


class Scheduler:
    """Continuous batching over a cache of limited size.

    Args:
        requests: all there will be, by arrival.
        manager: the blocks.
        token_budget: new tokens a step computes at most, from 1.
        max_running: requests that run at once at most, from 1.

    Raises:
        ValueError: a number out of range, or a request that can never fit in the cache.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        manager: BlockManager,
        token_budget: int,
        max_running: int,
    ) -> None:
        for name, number in (
            ("token_budget", token_budget),
            ("max_running", max_running),
        ):
            if number < 1:
                raise ValueError(f"{name} = {number}: expected at least 1")
        for request in requests:
            needed = _blocks(request.num_to_compute, manager.block_size)
            if needed > manager.num_blocks:
                raise ValueError(
                    f"num_blocks = {manager.num_blocks}: request {request.number} needs"
                    f" {needed} blocks of {manager.block_size} slots for its"
                    f" {request.num_to_compute} tokens and can never run; expected at least"
                    f" {needed} blocks, or a smaller scale"
                )
        self.manager = manager
        self.token_budget = token_budget
        self.max_running = max_running
        self.step = 0
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.finished: list[Request] = []
        self._arriving = deque(requests)

    def schedule(self) -> Schedule | None:
        """Return the next step, its blocks already owned; None when all is done."""
        self._receive()
        if not self.running and not self.waiting:
            if not self._arriving:
                return None
            # nothing to do until the next request arrives
            self.step = self._arriving[0].arrival_step
            self._receive()
        turns: list[Turn] = []
        new_blocks: list[int] = []
        preempted: list[int] = []
        budget = self.token_budget
        # step: take every running request further, the oldest first
        for request in list(self.running):
            wanted = min(request.num_known - request.num_computed, budget)
            if wanted == 0 or request not in self.running:
                continue
            needed = self._missing_blocks(request, request.num_computed + wanted)
            while request in self.running and not self.manager.can_take([], needed):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim.number)
            if request not in self.running:
                break
            new_blocks += self._extend(request, needed)
            turns.append(_turn(request, wanted))
            budget -= wanted
        # step: let waiting requests in, the first one first
        prefix, regained = 0, 0
        while (
            self.waiting
            and budget
            and not preempted
            and len(self.running) < self.max_running
        ):
            request = self.waiting[0]
            shared = self.manager.find_prefix(request.tokens[: request.num_known])
            found = len(shared) * self.manager.block_size
            wanted = min(request.num_known - found, budget)
            needed = _blocks(found + wanted, self.manager.block_size) - len(shared)
            if not self.manager.can_take(shared, needed):
                break
            self.waiting.popleft()
            self.running.append(request)
            self.manager.share(shared)
            request.row = list(shared)
            request.num_computed = found
            if request.preemptions:
                regained += found
            else:
                prefix += found
            new_blocks += self._extend(request, needed)
            turns.append(_turn(request, wanted))
            budget -= wanted
        assert turns, "a step in which nobody computes anything"
        return Schedule(
            step=self.step,
            turns=turns,
            new_blocks=new_blocks,
            preempted=preempted,
            num_prefix_tokens=prefix,
            num_regained_tokens=regained,
            num_waiting=len(self.waiting),
        )

    def commit(self, schedule: Schedule) -> None:
        """Take note that the step is computed: its keys and values are in the cache."""
        for turn in schedule.turns:
            request = turn.request
            request.num_computed += turn.num_tokens
            request.num_ever_computed = max(
                request.num_ever_computed, request.num_computed
            )
            computed = request.tokens[: request.num_computed]
            self.manager.remember(request.row, computed, request.contents)
            if request.num_computed == request.num_known:
                request.num_known += 1
            if request.num_computed == request.num_to_compute:
                self.running.remove(request)
                self.finished.append(request)
                self._give_back(request)
        self.step = schedule.step + 1

    def _receive(self) -> None:
        while self._arriving and self._arriving[0].arrival_step <= self.step:
            self.waiting.append(self._arriving.popleft())

    def _missing_blocks(self, request: Request, num_tokens: int) -> int:
        return _blocks(num_tokens, self.manager.block_size) - len(request.row)

    def _extend(self, request: Request, count: int) -> list[int]:
        blocks = self.manager.allocate(count)
        request.row += blocks
        return blocks

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.num_computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        self.manager.release(request.row)
        request.row = []
        request.contents = []


def blocks_at_once(
    requests: Sequence[Request], block_size: int, token_budget: int, max_running: int
) -> int:
    """Return how many blocks the requests would use at once if there were no end of them.

    Nothing is computed: the scheduler runs alone, on copies.
    """
    copies = [
        Request(each.number, each.arrival_step, each.tokens, each.prompt_len)
        for each in requests
    ]
    endless = sum(_blocks(len(each.tokens), block_size) for each in requests)
    manager = BlockManager(endless, block_size)
    scheduler = Scheduler(copies, manager, token_budget, max_running)
    most = 0
    while (schedule := scheduler.schedule()) is not None:
        most = max(most, manager.num_used)
        scheduler.commit(schedule)
    return most


def _turn(request: Request, num_tokens: int) -> Turn:
    again = request.num_ever_computed - request.num_computed
    return Turn(
        request=request,
        num_tokens=num_tokens,
        num_computed=request.num_computed,
        num_recomputed=min(max(again, 0), num_tokens),
    )


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)

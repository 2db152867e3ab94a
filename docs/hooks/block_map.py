"""Recordings of the block map: what scheduler and block manager decided, step by step.

The page plays these recordings and computes no decision of its own. Each one runs the same traffic,
the beginning of the Mooncake trace with shortened prompts and answers, through `Scheduler` and
`BlockManager` of `pagetwin.reference`. Only the block size and prefix caching differ.
"""

import json
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any

from pagetwin.contract.block_classes import OutOfBlocks
from pagetwin.contract.scheduler_classes import SchedulerOutput
from pagetwin.reference import (
    BlockManager,
    Scheduler,
    compute_slot_mapping,
)
from pagetwin.tools.replay.tokens import draw_tokens
from pagetwin.tools.replay.trace import TraceRequest, read_trace, scale_trace
from pagetwin.tools.replay.traffic import make_requests, next_tokens

BLOCK_SIZES = (16, 4, 1)
NUM_SLOTS = 512
REQUESTS = 18
PROMPT_SCALE, OUTPUT_SCALE = 1 / 128, 1 / 16
STEPS_PER_SECOND = 2
TOKEN_BUDGET, MAX_RUNNING = 64, 8
FORK_STEP, FORK_LENGTH = 6, 8
"""In this step a second answer to a running request begins, and it ends after so many tokens."""

Step = dict[str, Any]


@cache
def recordings() -> dict[str, dict[str, Any]]:
    """Return all recordings, by block size and whether prefix caching is on."""
    return {
        f"{size}-{int(caching)}": record(size, caching)
        for size in BLOCK_SIZES
        for caching in (True, False)
    }


def block_map_data() -> str:
    """Return all recordings as a JavaScript file that assigns them to `blockMapData`."""
    text = json.dumps(recordings(), separators=(",", ":"))
    return f"window.blockMapData = {text};\n"


def make_trace() -> list[TraceRequest]:
    """Return the traffic: prompts and answers are shortened by different factors."""
    original = read_trace("mooncake", REQUESTS)
    return [
        replace(short, output_len=max(2, round(request.output_len * OUTPUT_SCALE)))
        for request, short in zip(
            original, scale_trace(original, PROMPT_SCALE), strict=True
        )
    ]


def record(block_size: int, caching: bool) -> dict[str, Any]:
    """Return the steps of one run.

    Args:
        block_size: Slots per block; the cache has NUM_SLOTS slots.
        caching: Whether the block manager remembers the content of full blocks.
    """
    trace = make_trace()
    sequences = draw_tokens(trace, seed=0)
    requests = make_requests(trace, sequences)
    arrivals = [int(arriving.arrival * STEPS_PER_SECOND) for arriving in trace]
    manager = BlockManager(
        NUM_SLOTS // block_size, block_size, seed=0, enable_caching=caching
    )
    scheduler = Scheduler(manager, TOKEN_BUDGET, MAX_RUNNING)
    steps: list[Step] = []
    sibling: _Sibling | None = None
    while len(steps) < 400:
        number = len(steps)
        for request in requests:
            if arrivals[int(str(request.request_id))] == number:
                scheduler.add_request(request)
        if not scheduler.num_unfinished_requests:
            if number > max(arrivals):
                break
            steps.append(_idle(manager))
            continue
        before = {running_request.request_id for running_request in scheduler.running}
        output = scheduler.schedule()
        step = describe_step(scheduler, output, before)
        if number >= FORK_STEP and sibling is None:
            sibling = _fork(scheduler, manager)
        if sibling is not None:
            sibling.extend(step)
        step["blocks"] = states_of(manager)
        scheduler.update_from_output(output, next_tokens(output, sequences))
        step["finished"] += [
            str(scheduled.request.request_id)
            for scheduled in output.scheduled_requests
            if scheduled.request.is_finished
        ]
        steps.append(step)
    return {
        "blockSize": block_size,
        "numBlocks": manager.num_blocks,
        "prompts": [arriving.prompt_len for arriving in trace],
        "colours": colours_of(steps),
        "steps": steps,
    }


def colours_of(steps: list[Step]) -> dict[str, int]:
    """Return the number of each request's colour, from 0.

    From its first step to its last, no other request has it, so two colours on the page are two
    requests.
    """
    last = {
        request["id"]: number
        for number, step in enumerate(steps)
        for request in step["running"]
    }
    colours: dict[str, int] = {}
    for number, step in enumerate(steps):
        for request in step["running"]:
            if request["id"] not in colours:
                taken = {colours[name] for name in colours if last[name] >= number}
                colours[request["id"]] = next(
                    colour for colour in range(len(last)) if colour not in taken
                )
    return colours


def describe_step(
    scheduler: Scheduler, output: SchedulerOutput, before: set[Hashable]
) -> Step:
    """Return a step of the scheduler, before it is computed.

    Args:
        scheduler: The scheduler.
        output: Its decision.
        before: Requests that were running before the step.
    """
    manager = scheduler.block_manager
    new_tokens = output.num_scheduled_tokens
    running = [
        _row(
            manager,
            str(request.request_id),
            manager.get_block_ids(request.request_id),
            request.num_computed_tokens,
            new_tokens.get(request.request_id, 0),
            request.num_prompt_tokens,
            request.request_id not in before,
        )
        for request in scheduler.running
    ]
    return {
        "running": running,
        "waiting": [str(request.request_id) for request in scheduler.waiting],
        "preempted": [str(request_id) for request_id in output.preempted_req_ids],
        "copies": [list(copy) for copy in output.blocks_to_copy],
        "fresh": list(output.new_block_ids),
        "finished": [],
    }


def _row(
    manager: BlockManager,
    name: str,
    block_ids: list[int],
    computed: int,
    new: int,
    prompt: int,
    is_admitted: bool,
) -> dict[str, Any]:
    """Return one running request: its block-table row, and the slots that it writes."""
    slots = compute_slot_mapping(
        False, computed + new, computed, 0, manager.block_size, block_ids
    )
    return {
        "id": name,
        "row": block_ids,
        "computed": computed,
        "new": new,
        "prompt": prompt,
        "hit": computed if is_admitted else 0,
        "slots": _ranges(slots.tolist()),
    }


class _Sibling:
    """A second answer to a request (parallel sampling): it shares blocks until it writes."""

    def __init__(self, manager: BlockManager, name: str, computed: int) -> None:
        self.manager, self.name = manager, name
        self.prompt = self.computed = computed
        self.is_finished = False

    def extend(self, step: Step) -> None:
        """Compute one more token, and add it to a step."""
        if self.is_finished:
            return
        try:
            allocation = self.manager.allocate_slots(self.name, self.computed, 1)
        except OutOfBlocks:
            self._finish(step)
            return
        row = self.manager.get_block_ids(self.name)
        step["running"].append(
            _row(self.manager, self.name, row, self.computed, 1, self.prompt, False)
        )
        step["copies"] += [list(copy) for copy in allocation.blocks_to_copy]
        step["fresh"] += allocation.new_block_ids
        self.computed += 1
        if self.computed - self.prompt == FORK_LENGTH:
            self._finish(step)

    def _finish(self, step: Step) -> None:
        self.manager.free(self.name)
        self.is_finished = True
        step["finished"].append(self.name)


def _fork(scheduler: Scheduler, manager: BlockManager) -> _Sibling | None:
    """Return a copy of the first request that decodes and whose last block is partly filled."""
    for request in scheduler.running:
        computed = request.num_computed_tokens
        if computed >= request.num_prompt_tokens and (
            computed % manager.block_size or manager.block_size == 1
        ):
            name = f"{request.request_id}b"
            manager.fork(request.request_id, name)
            return _Sibling(manager, name, computed)
    return None


def _idle(manager: BlockManager) -> Step:
    """Return a step in which no request is waiting or running."""
    names: tuple[Hashable, ...] = (
        "running",
        "waiting",
        "preempted",
        "copies",
        "fresh",
        "finished",
    )
    return {str(name): [] for name in names} | {"blocks": states_of(manager)}


def states_of(manager: BlockManager) -> str:
    """Return one character per block: 1 to 9 for its reference count, c if cached, . if free."""
    cached = set(manager.cached_blocks())
    return "".join(
        str(min(9, manager.ref_cnt(block)))
        if manager.ref_cnt(block)
        else "c"
        if block in cached
        else "."
        for block in range(manager.num_blocks)
    )


def _ranges(slots: list[int]) -> list[list[int]]:
    """Return consecutive numbers as [first, last] pairs."""
    found: list[list[int]] = []
    for slot in slots:
        if found and found[-1][1] == slot - 1:
            found[-1][1] = slot
        else:
            found.append([slot, slot])
    return found

"""How do requests of a decoder-only model run as one flat batch?

The scheduler and the block manager are those of the replay, which also decides who computes how
much. What is new here: the tokens are not known before, a step's logits give them.
"""

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tools.replay.block_manager import BlockManager
from ...tools.replay.scheduler import Request, Schedule, Scheduler
from ...validation.integrations import (
    check_calls,
    check_keeps_only_keys,
    check_prompts,
    check_takes_keywords,
)
from .attention import count_calls
from .paged_batch import PagedBatch
from .statistics import Statistics


def run_requests(
    model: Any,
    prompts: Sequence[Any],
    arrivals: Sequence[int],
    implementation: str,
    max_new_tokens: int,
    block_size: int,
    num_blocks: int | None,
    max_batch_tokens: int,
    max_running: int,
    ends: frozenset[int],
    poison: bool,
    statistics: Statistics,
) -> list[list[int]]:
    """Return each prompt's new tokens; the arguments are those of `generate`."""
    config = model.config.get_text_config(decoder=True)
    most = None if num_blocks is None else num_blocks * block_size
    check_prompts(prompts, config.vocab_size, max_new_tokens - 1, most)
    parameters = signature(model.forward).parameters
    kinds = {each.kind for each in parameters.values()}
    name = type(model).__name__
    check_keeps_only_keys(name, bool(getattr(model, "_is_stateful", False)))
    check_takes_keywords(name, Parameter.VAR_KEYWORD in kinds)
    takes_logits_to_keep = "logits_to_keep" in parameters
    requests = [
        Request(
            number=number,
            arrival_step=arrivals[number],
            tokens=np.array([*prompt, *[0] * max_new_tokens], dtype=np.int64),
            prompt_len=len(prompt),
        )
        for number, prompt in enumerate(prompts)
    ]
    if num_blocks is None:
        counts = [-(-each.num_to_compute // block_size) for each in requests]
        num_blocks = max(1, sum(counts))
    manager = BlockManager(num_blocks, block_size)
    by_arrival = sorted(requests, key=lambda request: request.arrival_step)
    scheduler = Scheduler(by_arrival, manager, max_batch_tokens, max_running)
    batch = PagedBatch(implementation, num_blocks, block_size, model.device)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    written: set[int] = set()
    num_layers = config.num_hidden_layers
    while (schedule := scheduler.schedule()) is not None:
        # step: forget what nobody owns any more
        if poison:
            written = _forget_unowned(batch, manager, schedule, written)
        # step: lay the new tokens of all requests in one row
        turns = schedule.turns
        batch.begin_step(
            [turn.num_tokens for turn in turns],
            [turn.num_computed for turn in turns],
            [turn.request.row for turn in turns],
        )
        row: list[int] = []
        last_places = []
        asking: list[Request] = []
        for turn in turns:
            computed = turn.num_computed + turn.num_tokens
            row += turn.request.tokens[turn.num_computed : computed].tolist()
            # a request in the middle of its prompt asks for no token
            if computed == turn.request.num_known:
                asking.append(turn.request)
                last_places.append(len(row) - 1)
        # step: run the model on it
        places = torch.tensor(last_places, dtype=torch.int64, device=model.device)
        inputs = batch.model_inputs(row)
        if takes_logits_to_keep:
            inputs["logits_to_keep"] = places
        with count_calls(model) as calls:
            answer = model(**inputs).logits[0]
        check_calls(name, calls, num_layers)
        answer = answer if takes_logits_to_keep else answer[places]
        # step: take the most likely token of each request that is past its prompt
        for request, scores, token in zip(
            asking, answer, answer.argmax(1).tolist(), strict=True
        ):
            request.tokens[request.num_known] = token
            if token in ends:
                request.tokens = request.tokens[: request.num_known + 1]
            if statistics.keep_logits:
                logits[request.number].append(scores)
        _add(statistics, schedule, block_size)
        statistics.calls.update(calls)
        scheduler.commit(schedule)
    if statistics.keep_logits:
        statistics.logits += [torch.stack(each) for each in logits]
    return [request.tokens[request.prompt_len :].tolist() for request in requests]


def _forget_unowned(
    batch: PagedBatch, manager: BlockManager, schedule: Schedule, written: set[int]
) -> set[int]:
    """Fill what nobody owns with NaN; return the blocks whose content counts now."""
    kept = {*manager.cached_blocks()}
    kept |= {block_id for block_id in written if manager.users(block_id)}
    batch.forget(sorted((written - kept) | {*schedule.new_blocks}))
    return kept | {*schedule.new_blocks}


def _add(statistics: Statistics, schedule: Schedule, block_size: int) -> None:
    """Add what a step did."""
    turns = schedule.turns
    in_prompt = [turn.num_computed < turn.request.prompt_len for turn in turns]
    statistics.steps += 1
    statistics.mixed_steps += any(in_prompt) and not all(in_prompt)
    # counted in the first chunk of a prompt that is not taken whole
    statistics.chunked_prompts += sum(
        turn.request.num_ever_computed == 0
        and turn.num_computed + turn.num_tokens < turn.request.prompt_len
        for turn in turns
    )
    statistics.preemptions += len(schedule.preempted)
    found = schedule.num_prefix_tokens + schedule.num_regained_tokens
    statistics.shared_blocks += found // block_size

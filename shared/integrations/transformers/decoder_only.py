"""Decoder-only models: continuous batching with the scheduler and the block manager."""

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from ...bookkeeping.batch.arrivals import schedule_arrivals
from ...bookkeeping.batch.scheduler import Scheduler
from ...bookkeeping.cache.block_manager import BlockManager
from ...contract.scheduler_classes import Request, ScheduledRequest, SchedulerOutput
from ...recorder import Recorder
from ...validation.integrations import (
    check_attends_everywhere,
    check_calls,
    check_pages_used,
    check_prompts,
    check_takes_keywords,
)
from .attention import count_calls
from .paged_batch import PagedBatch
from .settings import Settings
from .statistics import Statistics


def run_requests(
    model: Any,
    prompts: Sequence[Any],
    arrivals: Sequence[int],
    settings: Settings,
    poison: bool,
    statistics: Statistics,
    recorder: Recorder | None = None,
) -> list[list[int]]:
    """Return each prompt's new tokens; the arguments are those of `generate`."""
    config = model.config.get_text_config(decoder=True)
    block_size, num_blocks = settings.block_size, settings.num_blocks
    max_new_tokens = settings.max_new_tokens
    max_tokens = None if num_blocks is None else num_blocks * block_size
    check_prompts(prompts, config.vocab_size, max_new_tokens - 1, max_tokens)
    takes_logits_to_keep = _check_model(model)
    requests = [
        Request(number, prompt, max_new_tokens, settings.stop_token_ids)
        for number, prompt in enumerate(prompts)
    ]
    if num_blocks is None:
        counts = [settings.blocks_of(each.max_tokens_in_cache) for each in requests]
        num_blocks = max(1, sum(counts))
    # shuffled, so that no block table is 0, 1, 2, ... by chance
    manager = BlockManager(num_blocks, block_size, seed=0)
    scheduler = Scheduler(manager, settings.max_batch_tokens, settings.max_running)
    batch = PagedBatch(
        settings.implementation, num_blocks, block_size, model.device, recorder
    )
    logits: list[list[Tensor]] = [[] for _ in prompts]
    written: set[int] = set()
    for _, output in schedule_arrivals(scheduler, requests, arrivals):
        if recorder is not None:
            recorder.schedule_output(output, block_size)
        batch.copy_blocks(output.blocks_to_copy)
        # step: fill blocks without known content with NaN
        if poison:
            written = _poison_unknown(batch, manager, output, written)
        # step: concatenate the new tokens of all requests, and run the model
        with count_calls(model) as calls:
            rows = _run_step(
                model, batch, output.scheduled_requests, takes_logits_to_keep
            )
        check_calls(type(model).__name__, calls, config.num_hidden_layers)
        check_pages_used(
            type(model).__name__, len(batch.layers_run), config.num_hidden_layers
        )
        # step: take the most likely token of each request whose known tokens are computed
        sampling = [
            each.request for each in output.scheduled_requests if each.samples_token
        ]
        ids = [request.request_id for request in sampling]
        sampled = dict(zip(ids, rows.argmax(1).tolist(), strict=True))
        if statistics.keep_logits:
            for request, row in zip(sampling, rows, strict=True):
                logits[requests.index(request)].append(row)
        _add(statistics, output, block_size)
        statistics.calls.update(calls)
        scheduler.update_from_output(output, sampled)
    if statistics.keep_logits:
        statistics.logits += [torch.stack(each) for each in logits]
    if recorder is not None:
        recorder.finish()
    return [request.output_token_ids for request in requests]


def _check_model(model: Any) -> bool:
    """Return whether the model takes `logits_to_keep`; raise if a layer has another state."""
    parameters = signature(model.forward).parameters
    kinds = {each.kind for each in parameters.values()}
    name = type(model).__name__
    check_attends_everywhere(name, bool(getattr(model, "_is_stateful", False)))
    check_takes_keywords(name, Parameter.VAR_KEYWORD in kinds)
    return "logits_to_keep" in parameters


def _run_step(
    model: Any,
    batch: PagedBatch,
    scheduled: Sequence[ScheduledRequest],
    takes_logits_to_keep: bool,
) -> Tensor:
    """Return [sampled tokens, vocabulary] the logits from which a step samples."""
    batch.begin_step(
        [each.num_scheduled_tokens for each in scheduled],
        [each.num_computed_tokens for each in scheduled],
        [each.block_ids for each in scheduled],
    )
    tokens: list[int] = []
    logits_indices = []
    for each in scheduled:
        end = each.num_computed_tokens + each.num_scheduled_tokens
        tokens += each.request.token_ids[each.num_computed_tokens : end]
        if each.samples_token:
            logits_indices.append(len(tokens) - 1)
    indices = torch.tensor(logits_indices, dtype=torch.int64, device=model.device)
    inputs = batch.model_inputs(tokens)
    if takes_logits_to_keep:
        inputs["logits_to_keep"] = indices
    logits: Tensor = model(**inputs).logits[0]
    return logits if takes_logits_to_keep else logits[indices]


def _poison_unknown(
    batch: PagedBatch, manager: BlockManager, output: SchedulerOutput, written: set[int]
) -> set[int]:
    """Fill blocks whose content is not needed with NaN; return the blocks that are needed."""
    kept = {*manager.cached_blocks()}
    kept |= {block_id for block_id in written if manager.ref_cnt(block_id)}
    new = {*output.new_block_ids}
    batch.poison(sorted((written - kept) | new))
    return kept | new


def _add(statistics: Statistics, output: SchedulerOutput, block_size: int) -> None:
    """Add the counts of a step."""
    scheduled = output.scheduled_requests
    prefills = [
        each.num_computed_tokens < each.request.num_prompt_tokens for each in scheduled
    ]
    statistics.steps += 1
    statistics.mixed_steps += any(prefills) and not all(prefills)
    # counted with the first chunk of a prompt
    statistics.chunked_prompts += sum(
        each.request.max_computed_tokens == 0
        and each.num_computed_tokens + each.num_scheduled_tokens
        < each.request.num_prompt_tokens
        for each in scheduled
    )
    statistics.preemptions += len(output.preempted_req_ids)
    num_hit_tokens = output.num_prefix_hit_tokens + output.num_regained_tokens
    statistics.shared_blocks += num_hit_tokens // block_size

"""Decoder-only models: continuous batching with the scheduler and the block manager."""

from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from ...contract.scheduler_classes import Request, ScheduledRequest, SchedulerOutput
from ...recorder import Recorder
from ...reference.batch.arrivals import schedule_arrivals
from ...reference.batch.scheduler import Scheduler
from ...reference.cache.block_manager import BlockManager
from ...validation.integrations import read_prompts
from ...validation.library_models import (
    check_attends_everywhere,
    check_calls,
    check_num_layers,
    check_pages_used,
    check_rope_length,
    check_row_scale,
    check_table_length,
    check_takes_keywords,
)
from .attention import count_calls, use_attention
from .models.positions import decoder_of, rope_limit, scales_by_row, table_limit
from .models.probe import check_steps
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
    block_size, num_blocks = settings.block_size, settings.num_blocks
    config = model.config.get_text_config(decoder=True)
    max_tokens = None if num_blocks is None else num_blocks * block_size
    num_output_tokens = settings.max_new_tokens - 1
    prompts = read_prompts(prompts, config.vocab_size, num_output_tokens, max_tokens)
    requests, num_layers = _make_requests(model, config, prompts, settings)
    takes_logits_to_keep = "logits_to_keep" in signature(model.forward).parameters
    if num_blocks is None:
        counts = [
            settings.blocks_of(request.max_tokens_in_cache) for request in requests
        ]
        num_blocks = max(1, sum(counts))
    # shuffled, so that no block table is 0, 1, 2, ... by chance
    manager = BlockManager(num_blocks, block_size, seed=0)
    max_batch_tokens = min(settings.max_batch_tokens, _most_rows(model))
    scheduler = Scheduler(manager, max_batch_tokens, settings.max_running)
    batch = PagedBatch(
        settings.implementation, num_blocks, block_size, model.device, recorder,
        settings.cache_format,
    )  # fmt: skip
    logits: list[list[Tensor]] = [[] for _ in prompts]
    written: set[int] = set()
    settings.streams.put_prompts(prompts)
    with use_attention(model, settings.implementation):
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
            check_calls(type(model).__name__, calls, num_layers)
            check_pages_used(type(model).__name__, len(batch.layers_run), num_layers)
            # step: choose the next token of each request whose known tokens are computed
            sampling = [
                scheduled.request
                for scheduled in output.scheduled_requests
                if scheduled.samples_token
            ]
            numbers = [requests.index(request) for request in sampling]
            given = [prompts[number] for number in numbers]
            outputs = [request.output_token_ids for request in sampling]
            chosen = settings.sampler.choose(numbers, given, outputs, rows, given)
            _add(statistics, output, block_size)
            statistics.calls.update(calls)
            ids = [request.request_id for request in sampling]
            sampled = dict(zip(ids, chosen, strict=True))
            scheduler.update_from_output(output, sampled)
            # step: pass the tokens on
            for number, token, row in zip(numbers, chosen, rows, strict=True):
                settings.streams.put(number, token)
                if requests[number].is_finished:
                    settings.streams.end(number)
                if statistics.keep_logits:
                    logits[number].append(row)
    if statistics.keep_logits:
        statistics.logits += [torch.stack(request_logits) for request_logits in logits]
    if recorder is not None:
        recorder.finish()
    return [request.output_token_ids for request in requests]


def _make_requests(
    model: Any, config: Any, prompts: Sequence[Sequence[int]], settings: Settings
) -> tuple[list[Request], int]:
    """Return a request per prompt, and the number of layers.

    Raises:
        NotImplementedError: the model is not exact in steps.
        ValueError: a prompt is too long for the model's table of positions.
    """
    name = type(model).__name__
    num_layers = check_num_layers(name, config)
    requests = [
        Request(number, prompt, settings.max_new_tokens, settings.stop_token_ids)
        for number, prompt in enumerate(prompts)
    ]
    kinds = {
        parameter.kind for parameter in signature(model.forward).parameters.values()
    }
    check_attends_everywhere(name, bool(getattr(model, "_is_stateful", False)))
    check_takes_keywords(name, Parameter.VAR_KEYWORD in kinds)
    frequencies, table = rope_limit(config), table_limit(decoder_of(model))
    for number, request in enumerate(requests):
        length = request.max_tokens_in_cache
        check_rope_length(name, length, frequencies)
        check_table_length(f"prompts[{number}]", length, table)
    check_steps(model, prompts, num_layers)
    return requests, num_layers


def _most_rows(model: nn.Module) -> int:
    """Return the most tokens of a step for which no layer scales its queries by row."""
    scaled: list[Any] = [module for module in model.modules() if scales_by_row(module)]
    for module in scaled:
        check_row_scale(type(module).__name__, 1, module.floor_scale)
    return min((module.floor_scale - 1 for module in scaled), default=2**31)


def _run_step(
    model: Any,
    batch: PagedBatch,
    scheduled: Sequence[ScheduledRequest],
    takes_logits_to_keep: bool,
) -> Tensor:
    """Return [sampled tokens, vocabulary] the logits from which a step samples."""
    batch.begin_step(
        [request.num_scheduled_tokens for request in scheduled],
        [request.num_computed_tokens for request in scheduled],
        [request.block_ids for request in scheduled],
    )
    tokens: list[int] = []
    logits_indices = []
    for scheduled_request in scheduled:
        end = (
            scheduled_request.num_computed_tokens
            + scheduled_request.num_scheduled_tokens
        )
        tokens += scheduled_request.request.token_ids[
            scheduled_request.num_computed_tokens : end
        ]
        if scheduled_request.samples_token:
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
        scheduled_request.num_computed_tokens
        < scheduled_request.request.num_prompt_tokens
        for scheduled_request in scheduled
    ]
    statistics.steps += 1
    statistics.mixed_steps += any(prefills) and not all(prefills)
    # counted with the first chunk of a prompt
    statistics.chunked_prompts += sum(
        scheduled_request.request.max_computed_tokens == 0
        and scheduled_request.num_computed_tokens
        + scheduled_request.num_scheduled_tokens
        < scheduled_request.request.num_prompt_tokens
        for scheduled_request in scheduled
    )
    statistics.preemptions += len(output.preempted_req_ids)
    num_hit_tokens = output.num_prefix_hit_tokens + output.num_regained_tokens
    statistics.shared_blocks += num_hit_tokens // block_size

"""Encoder-decoder models: requests in waves, with the encoder's keys and values in pages.

A wave is as many requests as fit. Their inputs are padded and encoded together. The encoder's keys
and values are written to pages once, without the padding, and each decoder step reads them through
a block table of their own. A finished request leaves its wave, and its blocks are freed.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from ...validation.integrations import (
    check_decoder_prompt,
    check_features,
    check_wave_fits,
    read_prompts,
)
from ...validation.library_models import (
    check_encoder_decoder,
    check_no_merged_attention,
    check_no_shared_capacity,
    check_table_length,
)
from .attention import use_attention
from .models.positions import decoder_of, table_limit
from .models.probe import check_decoding
from .paged_cache import PagedCache
from .settings import Settings
from .statistics import Statistics
from .steps.wave_steps import decode, encode, encoder_inputs


@dataclass
class _WaveRequest:
    """A request of a wave.

    Args:
        number: index of the prompt.
        encoder_len: keys of its encoder.
        tokens: output tokens so far.
        logits: [vocabulary] logits of each output token, if they are kept.
    """

    number: int
    encoder_len: int
    tokens: list[int]
    logits: list[Tensor]


def run_waves(
    model: Any,
    prompts: Sequence[Any],
    settings: Settings,
    decoder_prompt: Sequence[int] | None,
    statistics: Statistics,
) -> list[list[int]]:
    """Return each prompt's new tokens; the arguments are those of `generate`."""
    name, config = type(model).__name__, model.config
    check_encoder_decoder(name, config)
    check_no_merged_attention(name, map(type, model.modules()))
    for module in model.modules():
        fraction = getattr(module, "moe_eval_capacity_token_fraction", None)
        check_no_shared_capacity(name, fraction)
    start = _start_token(model)
    if decoder_prompt is None and start is not None:
        decoder_prompt = [start]
    first_tokens = check_decoder_prompt(decoder_prompt, config.vocab_size)
    if any(isinstance(prompt, Tensor) for prompt in prompts):
        check_features(prompts)
    else:
        prompts = read_prompts(prompts, config.vocab_size, 0, None)
    decoder_len = len(first_tokens) + settings.max_new_tokens - 1
    requests = [
        _WaveRequest(number, _encoder_len(model, prompt), [], [])
        for number, prompt in enumerate(prompts)
    ]
    _check_lengths(model, requests, decoder_len)
    check_decoding(model, prompts, first_tokens)
    waves = list(_split_into_waves(requests, decoder_len, settings))
    settings.streams.put_prompts([first_tokens] * len(prompts))
    with use_attention(model, settings.implementation):
        for wave in waves:
            inputs = [prompts[request.number] for request in wave]
            _run_wave(model, wave, inputs, first_tokens, settings, statistics)
    if statistics.keep_logits:
        statistics.logits += [torch.stack(request.logits) for request in requests]
    return [request.tokens for request in requests]


def _check_lengths(
    model: Any, requests: Sequence[_WaveRequest], decoder_len: int
) -> None:
    """Raise ValueError for a sequence that is longer than a table of positions."""
    encoder, decoder = table_limit(model.get_encoder()), table_limit(decoder_of(model))
    for request in requests:
        check_table_length(f"prompts[{request.number}]", request.encoder_len, encoder)
    check_table_length("decoder_prompt with max_new_tokens", decoder_len, decoder)


def _run_wave(
    model: Any,
    wave: list[_WaveRequest],
    prompts: Sequence[Any],
    first_tokens: Sequence[int],
    settings: Settings,
    statistics: Statistics,
) -> None:
    """Run the requests of a wave to their ends; their tokens and logits are added to them."""
    # step: encode the wave's inputs, padded to one length
    inputs, mask = encoder_inputs(model, prompts)
    encoded, calls = encode(model, inputs)
    statistics.calls.update(calls)
    statistics.encoder_runs += 1
    # step: allocate pages for the decoder, and for the keys and values of the encoder
    decoder_len = len(first_tokens) + settings.max_new_tokens - 1
    lengths = [request.encoder_len for request in wave]
    caches = [
        PagedCache(
            max(1, count),
            settings.block_size,
            settings.implementation,
            lengths=stored,
            cache_format=settings.cache_format,
        )
        for count, stored in (
            (len(wave) * settings.blocks_of(decoder_len), None),
            (sum(map(settings.blocks_of, lengths)), lengths),
        )
    ]
    cache = EncoderDecoderCache(*caches)
    tokens = torch.tensor([first_tokens] * len(wave), device=model.device)
    # step: decode until every request of the wave is finished
    while wave:
        logits, calls = decode(model, tokens, encoded, mask, cache)
        statistics.calls.update(calls)
        statistics.steps += 1
        _choose(wave, prompts, first_tokens, logits[:, -1], settings, statistics)
        unfinished = [
            index
            for index, request in enumerate(wave)
            if request.tokens[-1] not in settings.stop_token_ids
            and len(request.tokens) < settings.max_new_tokens
        ]
        if len(unfinished) < len(wave):
            kept = torch.tensor(unfinished, dtype=torch.int64, device=model.device)
            for index, request in enumerate(wave):
                if index not in unfinished:
                    settings.streams.end(request.number)
            wave = [wave[index] for index in unfinished]
            prompts = [prompts[index] for index in unfinished]
            encoded = copy.copy(encoded)
            encoded.last_hidden_state = encoded.last_hidden_state[kept]
            mask = None if mask is None else mask[kept]
            for kv_cache in caches:
                kv_cache.batch_select_indices(kept)
        tokens = torch.tensor(
            [[request.tokens[-1]] for request in wave], device=model.device
        )


def _choose(
    wave: Sequence[_WaveRequest],
    prompts: Sequence[Any],
    first_tokens: Sequence[int],
    logits: Tensor,
    settings: Settings,
    statistics: Statistics,
) -> None:
    """Add the next token of each request of a wave."""
    numbers = [request.number for request in wave]
    chosen = settings.sampler.choose(
        numbers,
        [first_tokens] * len(wave),
        [request.tokens for request in wave],
        logits,
        prompts,
    )
    for request, scores, token in zip(wave, logits, chosen, strict=True):
        request.tokens.append(token)
        settings.streams.put(request.number, token)
        if statistics.keep_logits:
            request.logits.append(scores)


def _split_into_waves(
    requests: Sequence[_WaveRequest], decoder_len: int, settings: Settings
) -> Iterator[list[_WaveRequest]]:
    """Yield as many requests at once as fit, in their order."""
    waiting = list(requests)
    decoder_blocks, num_blocks = settings.blocks_of(decoder_len), settings.num_blocks
    while waiting:
        count, encoder_blocks, longest = 0, 0, 0
        for request in waiting[: settings.max_running]:
            blocks = settings.blocks_of(request.encoder_len)
            check_wave_fits(request.number, blocks, decoder_blocks, num_blocks)
            longest = max(longest, request.encoder_len)
            used = max(encoder_blocks + blocks, (count + 1) * decoder_blocks)
            is_full = num_blocks is not None and used > num_blocks
            is_long = (count + 1) * longest > settings.max_batch_tokens
            if count and (is_full or is_long):
                break
            count, encoder_blocks = count + 1, encoder_blocks + blocks
        yield waiting[:count]
        waiting = waiting[count:]


def _start_token(model: Any) -> int | None:
    """Return the first token of every output; None if the model has none."""
    for owner, name in (
        (model.config, "decoder_start_token_id"),
        (model.generation_config, "decoder_start_token_id"),
        (model.config, "bos_token_id"),
    ):
        token: int | None = getattr(owner, name, None)
        if token is not None:
            return token
    return None


def _encoder_len(model: Any, prompt: Any) -> int:
    """Return the number of keys that the encoder computes for a prompt."""
    if not isinstance(prompt, Tensor):
        return len(prompt)
    return int(model._get_feat_extract_output_lengths(torch.tensor(prompt.shape[-1])))

"""Encoder-decoder models: requests in waves, with the encoder's keys and values in pages.

A wave is as many requests as fit. Their inputs are padded and encoded together. The encoder's keys
and values are written to pages once, without the padding, and each decoder step reads them through
a block table of their own. A finished request leaves its wave, and its blocks are freed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ...validation.integrations import (
    check_calls,
    check_decoder_prompt,
    check_features,
    check_no_merged_attention,
    check_prompts,
    check_wave_fits,
)
from .attention import count_calls
from .paged_cache import PagedCache
from .settings import Settings
from .statistics import Statistics


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
    config = model.config
    check_no_merged_attention(type(model).__name__, map(type, model.modules()))
    start = [_start_token(model)] if decoder_prompt is None else decoder_prompt
    first_tokens = check_decoder_prompt(start, config.vocab_size)
    if any(isinstance(prompt, Tensor) for prompt in prompts):
        check_features(prompts)
    else:
        check_prompts(prompts, config.vocab_size, 0, None)
    decoder_len = len(first_tokens) + settings.max_new_tokens - 1
    requests = [
        _WaveRequest(number, _encoder_len(model, prompt), [], [])
        for number, prompt in enumerate(prompts)
    ]
    for wave in _split_into_waves(requests, decoder_len, settings):
        inputs = [prompts[each.number] for each in wave]
        _run_wave(model, wave, inputs, first_tokens, settings, statistics)
    if statistics.keep_logits:
        statistics.logits += [torch.stack(each.logits) for each in requests]
    return [request.tokens for request in requests]


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
    inputs, mask = _encoder_inputs(model, prompts)
    with count_calls(model) as calls:
        encoded = model.get_encoder()(**inputs)[0]
    check_calls(type(model).__name__, calls, _num_layers(model.get_encoder()))
    statistics.calls.update(calls)
    statistics.encoder_runs += 1
    # step: allocate pages for the decoder, and for the keys and values of the encoder
    decoder_len = len(first_tokens) + settings.max_new_tokens - 1
    lengths = [each.encoder_len for each in wave]
    caches = [
        PagedCache(
            max(1, count), settings.block_size, settings.implementation, lengths=stored
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
        logits = _decode(model, tokens, encoded, mask, cache, statistics)
        chosen = logits.argmax(1).tolist()
        for request, scores, token in zip(wave, logits, chosen, strict=True):
            request.tokens.append(token)
            if statistics.keep_logits:
                request.logits.append(scores)
        unfinished = [
            index
            for index, request in enumerate(wave)
            if request.tokens[-1] not in settings.stop_token_ids
            and len(request.tokens) < settings.max_new_tokens
        ]
        if len(unfinished) < len(wave):
            kept = torch.tensor(unfinished, dtype=torch.int64, device=model.device)
            wave = [wave[index] for index in unfinished]
            encoded = encoded[kept]
            mask = None if mask is None else mask[kept]
            for each in caches:
                each.batch_select_indices(kept)
        tokens = torch.tensor(
            [[request.tokens[-1]] for request in wave], device=model.device
        )


def _decode(
    model: Any,
    tokens: Tensor,
    encoded: Tensor,
    mask: Tensor | None,
    cache: EncoderDecoderCache,
    statistics: Statistics,
) -> Tensor:
    """Return [reqs, vocabulary] the logits after each request's last token."""
    with count_calls(model) as calls:
        logits: Tensor = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=mask,
            decoder_input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    # each layer has self-attention and cross-attention
    check_calls(type(model).__name__, calls, 2 * _num_layers(model.get_decoder()))
    statistics.calls.update(calls)
    statistics.steps += 1
    return logits


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


def _encoder_inputs(
    model: Any, prompts: Sequence[Any]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the encoder's keyword arguments, and the mask of the columns that are tokens."""
    device = model.device
    if isinstance(prompts[0], Tensor):
        features = torch.stack([prompt.to(device, model.dtype) for prompt in prompts])
        return {"input_features": features}, None
    longest = max(len(prompt) for prompt in prompts)
    padding = model.config.pad_token_id or 0
    ids = [[*prompt, *[padding] * (longest - len(prompt))] for prompt in prompts]
    shown = [[column < len(prompt) for column in range(longest)] for prompt in prompts]
    mask = torch.tensor(shown, dtype=torch.int64, device=device)
    input_ids = torch.tensor(ids, device=device)
    return {"input_ids": input_ids, "attention_mask": mask}, mask


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


def _num_layers(stack: Any) -> int:
    """Return the number of layers of an encoder or a decoder."""
    return len(stack.layers if hasattr(stack, "layers") else stack.block)

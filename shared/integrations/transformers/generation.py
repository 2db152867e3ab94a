"""Generation: many prompts at once over a paged KV cache.

A decoder-only model runs with continuous batching: each step is one flat batch of decodes and
prompt chunks. An encoder-decoder model runs in waves: the inputs of a wave are encoded together,
their keys and values are written to pages once, and the decoder reads them in every step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...recorder import Recorder, recorder_from_environment
from ...validation.integrations import (
    check_arrivals,
    check_limits,
    check_option_unused,
    check_prompt_list,
    check_streamers,
    load_named,
)
from ...validation.library_formats import read_cache_format
from .decoder_only import run_requests
from .encoder_decoder import run_waves
from .sampling.sampler import Sampler, complete_config, draw_seeds
from .sampling.streams import Streams
from .settings import Settings
from .statistics import Statistics


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]] | Sequence[Tensor],
    implementation: str = "optimized",
    max_new_tokens: int | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    max_batch_tokens: int = 2048,
    max_running: int = 64,
    eos_token_id: int | Sequence[int] | None = None,
    arrival_steps: Sequence[int] | None = None,
    decoder_prompt: Sequence[int] | None = None,
    poison: bool = False,
    statistics: Statistics | None = None,
    recorder: Recorder | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | Sequence[int] | None = None,
    streamer: Any | Sequence[Any] | None = None,
    cache_format: str = "auto",
) -> list[list[int]]:
    """Return the next tokens of each prompt: the most likely ones, or sampled ones.

    The model's attention implementation is the twin during the call, and is restored afterwards.
    A decoder-only model first runs a few tokens in the library's way and in steps. If the logits
    differ, an error is raised: such a model derives something from the other tokens of a step.

    Args:
        model: a model of transformers with a language head, in evaluation mode.
        prompts: token ids of each prompt. For an encoder-decoder model, the input of its encoder:
            token ids, or for speech the features, [bands, frames] each.
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations.
        max_new_tokens: Optional. Output tokens per prompt at most. If None, those of
            `generation_config`, or 16.
        block_size: slots per block.
        num_blocks: Optional. Blocks in each layer's cache. With few blocks, requests wait and are
            preempted. If None, as many as all prompts need at once.
        max_batch_tokens: new tokens per step at most; a longer prompt runs in chunks. For an
            encoder-decoder model, tokens that are encoded together.
        max_running: running requests at most.
        eos_token_id: Optional. Token ids that end an output; they are part of it. If None, those
            of `generation_config` or of the model's own, as in the library. If empty, no token
            ends an output.
        arrival_steps: Optional. The first step that each prompt can take part in. If None, all
            arrive at once. Not for encoder-decoder models.
        decoder_prompt: Optional. First tokens of every output of an encoder-decoder model; they
            are not returned. If None, the model's `decoder_start_token_id`, or its `bos_token_id`
            if it has none.
        poison: whether every block without needed content is filled with NaN, so that a wrong read
            gives NaN. It costs time.
        statistics: Optional. Counts are added to it, modified in place. If None, nothing is
            counted.
        recorder: Optional. Checks each step of a decoder-only model (docs/recorder.md). If None,
            the environment variable PAGETWIN_RECORD decides.
        generation_config: Optional. How tokens are chosen: the library's own processors and
            sampling, for one sequence per prompt. What it leaves out is that of the model's own
            generation_config, as in the library. If None, the most likely token is chosen.
        seed: Optional. A seed per prompt, or one number, from which the prompts count on. With
            equal logits, a prompt's tokens are those of `torch.manual_seed(seed)` and
            `model.generate` for that prompt alone. If None, seeds are drawn from torch's.
        streamer: Optional. A streamer of the library per prompt, or one for one prompt; None for
            a prompt that is not streamed.
        cache_format: name of the cache format of all layers (docs/cache_formats.md): `auto` keeps
            keys and values as they are, others store codes. Given scales are 1.

    Returns:
        For each prompt its new tokens.

    Raises:
        TypeError: prompts are anything but token ids of each prompt, for instance a flat list, a
            string or a tensor; or a number is not an integer.
        ValueError: a limit is less than 1, no prompt is given, a prompt is empty, has an unknown
            token, never fits in the cache or is too long for the model's table of positions, the
            implementation cannot be loaded, or the cache format is unknown or does not take the
            head size of a layer.
        NotImplementedError: a layer of the model does not use the twin, the twin cannot compute
            it exactly, or `generation_config` asks for a search.
        RuntimeError: another thread runs a model with the same configuration on another twin.

    Source:
        Continuous batching: Yu et al., "Orca", OSDI 2022. Paged KV cache: Kwon et al., SOSP 2023.
        Chunked prefill: Agrawal et al., "Sarathi-Serve", OSDI 2024.
    """
    takes_features = getattr(model, "main_input_name", "input_ids") != "input_ids"
    check_prompt_list(prompts, takes_features)
    streams = Streams(check_streamers(streamer, len(prompts)))
    with torch.no_grad(), streams:
        load_named(implementation)
        read_cache_format(cache_format)
        config, stops = complete_config(
            model, generation_config, eos_token_id, max_new_tokens is not None
        )
        if max_new_tokens is None:
            max_new_tokens = 16 if config is None else config.max_new_tokens
        limits: dict[str, Any] = check_limits(
            max_new_tokens=max_new_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
        )
        seeds = draw_seeds(seed, len(prompts), config)
        settings = Settings(
            implementation=implementation,
            stop_token_ids=stops,
            sampler=Sampler(model, config, seeds, limits["max_new_tokens"]),
            streams=streams,
            cache_format=cache_format,
            **limits,
        )
        statistics = Statistics() if statistics is None else statistics
        if model.config.is_encoder_decoder:
            check_option_unused("arrival_steps", arrival_steps, "an encoder-decoder")
            return run_waves(model, prompts, settings, decoder_prompt, statistics)
        check_option_unused("decoder_prompt", decoder_prompt, "decoder-only")
        arrivals = check_arrivals(arrival_steps, len(prompts))
        if recorder is None:
            recorder = recorder_from_environment(implementation)
        return run_requests(
            model, prompts, arrivals, settings, poison, statistics, recorder
        )

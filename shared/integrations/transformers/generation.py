"""How does a model of the library answer many prompts at once?

A model that only decodes runs as an engine runs it: a scheduler takes every running request a token
further, lets new prompts in, chunk by chunk, and all of it is one flat batch over a paged cache. A
model that encodes first runs in waves: a wave's inputs are encoded together, their keys and values
are written to pages once, and the decoder reads them in every step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...validation.integrations import (
    check_arrivals,
    check_attention_is_ours,
    check_limits,
    refuse_option_of_kind,
)
from .attention import register
from .decoder_only import run_requests
from .encoder_decoder import run_waves
from .statistics import Statistics


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]] | Sequence[Tensor],
    implementation: str = "optimized",
    max_new_tokens: int = 16,
    block_size: int = 16,
    num_blocks: int | None = None,
    max_batch_tokens: int = 2048,
    max_running: int = 64,
    eos_token_id: int | Sequence[int] | None = None,
    arrival_steps: Sequence[int] | None = None,
    decoder_prompt: Sequence[int] | None = None,
    poison: bool = False,
    statistics: Statistics | None = None,
) -> list[list[int]]:
    """Return the most likely next tokens of each prompt, one after another.

    The model's attention is the twin while this runs, and what it was afterwards.

    Args:
        model: a model of transformers with a language head, in evaluation mode.
        prompts: token ids of each prompt. For an encoder-decoder model what its encoder reads:
            token ids, or for speech the features, [bands, frames] each.
        implementation: "reference", "optimized", or the dotted name of a package with the same
            files.
        max_new_tokens: tokens of an answer at most.
        block_size: slots in a block.
        num_blocks: blocks in each layer's cache; None: as many as all prompts need at once. With
            fewer, requests wait and start over.
        max_batch_tokens: new tokens a step computes at most; a longer prompt runs in chunks. Of
            an encoder-decoder model: tokens that are encoded together.
        max_running: requests that run at once at most.
        eos_token_id: tokens that end an answer, of which they are the last one; None: none does.
        arrival_steps: the first step that each prompt can take part in; None: all come at once.
            Not for encoder-decoder models.
        decoder_prompt: what every answer of an encoder-decoder model begins with, not returned;
            None: the model's `decoder_start_token_id`.
        poison: whether every block that nobody owns is filled with NaN, so that who reads it
            cannot go unnoticed; costs time.
        statistics: changed: what happened is added to it; None: not wanted.

    Returns:
        For each prompt its new tokens.

    Raises:
        ValueError: a limit below 1, an empty prompt, a token that the model does not have, a
            prompt that never fits in the cache, or an implementation that cannot be loaded.
        NotImplementedError: a model with a layer that does not attend through the twin, or that
            the twin cannot run exactly.

    Source:
        Continuous batching: Yu et al., "Orca", OSDI 2022; pages, sharing and preemption: Kwon et
        al., SOSP 2023; prompts in chunks beside decodes: Agrawal et al., "Sarathi", 2023.
    """
    check_limits(
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
    )
    if isinstance(eos_token_id, int):
        eos_token_id = [eos_token_id]
    ends = frozenset(eos_token_id or ())
    statistics = Statistics() if statistics is None else statistics
    is_encoder_decoder = bool(model.config.is_encoder_decoder)
    with torch.no_grad(), _attention(model, register(implementation)):
        if is_encoder_decoder:
            if arrival_steps is not None:
                refuse_option_of_kind(
                    "arrival_steps", arrival_steps, "an encoder-decoder"
                )
            return run_waves(
                model=model,
                prompts=prompts,
                implementation=implementation,
                max_new_tokens=max_new_tokens,
                block_size=block_size,
                num_blocks=num_blocks,
                max_batch_tokens=max_batch_tokens,
                max_running=max_running,
                ends=ends,
                decoder_prompt=decoder_prompt,
                statistics=statistics,
            )
        if decoder_prompt is not None:
            refuse_option_of_kind("decoder_prompt", decoder_prompt, "decoder-only")
        return run_requests(
            model=model,
            prompts=prompts,
            arrivals=check_arrivals(arrival_steps, len(prompts)),
            implementation=implementation,
            max_new_tokens=max_new_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            ends=ends,
            poison=poison,
            statistics=statistics,
        )


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Give the model another attention for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        check_attention_is_ours(
            type(model).__name__, model.config._attn_implementation, name
        )
        yield
    finally:
        model.set_attn_implementation(before)

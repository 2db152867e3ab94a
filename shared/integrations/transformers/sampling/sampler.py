"""The next token of each request, chosen with the library's own logits processors.

A `GenerationConfig` says how: temperature, top-k, top-p, penalties, forbidden and forced tokens.
The library builds the processors. Each request has processors and random numbers of its own, so
its choice depends on its own tokens, logits and seed, and not on the other requests of a step.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ....validation.integrations import (
    check_generation_config,
    check_is_config,
    check_no_max_length,
    check_seeds,
    read_id_or_ids,
)


class Sampler:
    """Chooses the next tokens of the requests of a call.

    Args:
        model: the model.
        config: Optional. The settings of the call, completed by those of the model. If None, the
            most likely token is chosen.
        seeds: [prompts] the seed of each request's random numbers. Unused unless the configuration
            samples.
        max_new_tokens: output tokens per prompt at most.
    """

    def __init__(
        self,
        model: Any,
        config: GenerationConfig | None,
        seeds: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        self._model, self._config = model, config
        self._seeds, self._max_new_tokens = seeds, max_new_tokens
        self._processors: dict[int, Any] = {}
        self._generators: dict[int, torch.Generator] = {}

    def choose(
        self,
        numbers: Sequence[int],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        logits: Tensor,
        inputs: Sequence[Any],
    ) -> list[int]:
        """Return the next token of some requests.

        Args:
            numbers: [reqs] which prompt of the call each request is.
            prompts: [reqs] the tokens from which each output continues.
            outputs: [reqs] the output tokens so far.
            logits: [reqs, vocabulary].
            inputs: [reqs] what the model was given: token ids, those of the encoder if it has one,
                or features, of which the processors do not know.
        """
        if self._config is None:
            chosen: list[int] = logits.argmax(1).tolist()
            return chosen
        found = []
        for index, number in enumerate(numbers):
            prompt = prompts[index]
            if number not in self._processors:
                self._processors[number] = self._make_processors(
                    len(prompt), inputs[index]
                )
            ids = torch.tensor([[*prompt, *outputs[index]]], device=logits.device)
            # the library processes and draws in float32, in every dtype of the model
            scores = logits[index : index + 1].float()
            scores = self._processors[number](ids, scores.clone())
            found.append(self._take(number, scores))
        return found

    def _take(self, number: int, scores: Tensor) -> int:
        """Return a token by its processed scores, [1, vocabulary]."""
        assert self._config is not None
        if not self._config.do_sample:
            return int(scores.argmax(1))
        if number not in self._generators:
            generator = torch.Generator(scores.device)
            self._generators[number] = generator.manual_seed(self._seeds[number])
        weights = scores.softmax(dim=-1)
        drawn = torch.multinomial(weights, 1, generator=self._generators[number])
        return int(drawn)

    def _make_processors(self, prompt_len: int, given: Any) -> Any:
        """Return the processors of one request; some depend on the length of its prompt."""
        config = copy.deepcopy(self._config)
        assert config is not None
        config.max_length = prompt_len + self._max_new_tokens
        if config.min_new_tokens is not None:
            config.min_length = prompt_len + config.min_new_tokens
        device = self._model.device
        self._model._prepare_special_tokens(config, device=device)
        ids = given[None] if isinstance(given, Tensor) else torch.tensor([list(given)])
        return self._model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt_len,
            encoder_input_ids=ids.to(device),
            device=device,
            model_kwargs={},
        )


def complete_config(
    model: Any, config: GenerationConfig | None, eos_token_id: Any, has_limit: bool
) -> tuple[GenerationConfig | None, frozenset[int]]:
    """Return the settings of a call, completed by those of the model, and its end tokens.

    Args:
        model: the model.
        config: Optional. The settings that the caller gave. If None, the most likely token is
            chosen.
        eos_token_id: Optional. Token ids that end an output. If None, those of the settings.
        has_limit: whether the caller says how many tokens an output has at most.

    Raises:
        NotImplementedError: the settings ask for more than one sequence or a search.
        TypeError: a token id is not an integer.
    """
    own = getattr(model, "generation_config", None)
    if config is not None:
        check_is_config(config, GenerationConfig)
        check_no_max_length(config, has_limit)
        config, _ = model._prepare_generation_config(config)
        if config.max_new_tokens is None:
            config.max_new_tokens = 16
        check_generation_config(config)
    if eos_token_id is None:
        eos_token_id = getattr(config or own or model.config, "eos_token_id", None)
    stops = [] if eos_token_id is None else read_id_or_ids("eos_token_id", eos_token_id)
    if config is not None:
        config.eos_token_id = stops or None
    return config, frozenset(stops)


def draw_seeds(
    seed: Any, num_prompts: int, config: GenerationConfig | None
) -> list[int]:
    """Return a seed per prompt.

    Args:
        seed: Optional. A seed per prompt; or one number, the seed of the first prompt, from which
            the others count on. If None, the seeds are drawn from torch's own random numbers.
        num_prompts: number of prompts.
        config: Optional. The settings of the call. If they do not sample, nothing is drawn.
    """
    if seed is None and (config is None or not config.do_sample):
        return [0] * num_prompts
    if seed is None:
        drawn: list[int] = torch.randint(2**62, (num_prompts,), device="cpu").tolist()
        return drawn
    return check_seeds(seed, num_prompts)

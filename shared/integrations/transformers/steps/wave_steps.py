"""One run of an encoder, and one run of a decoder on paged caches."""

from collections import Counter
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ....validation.library_models import check_calls
from ..attention import count_calls

OLD_CACHE = "past_key_values"
"""The name of the keyword `cache` before transformers 5.24."""


def encoder_inputs(
    model: Any, prompts: Sequence[Any]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the encoder's keyword arguments, and the mask of the columns that are tokens.

    Args:
        model: the model.
        prompts: token ids of each prompt, which are padded on the right; or features of one shape.
    """
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


def encode(model: Any, inputs: dict[str, Tensor]) -> tuple[Any, Counter[str]]:
    """Return the encoder's output, and the calls of its layers.

    Raises:
        NotImplementedError: a layer did not run on the twin.
    """
    encoder = model.get_encoder()
    with count_calls(model) as calls:
        encoded = encoder(**inputs)
    check_calls(type(model).__name__, calls, num_layers(encoder))
    return encoded, calls


def decode(
    model: Any, tokens: Tensor, encoded: Any, mask: Tensor | None, cache: Any
) -> tuple[Tensor, Counter[str]]:
    """Return [reqs, tokens, vocabulary] the logits of new tokens, and the calls of the layers.

    Args:
        model: the model.
        tokens: [reqs, tokens] the new tokens of each request.
        encoded: what the encoder returned.
        mask: Optional. [reqs, encoder columns] the columns that are tokens. If None, all are.
        cache: the cache of the decoder and the encoder.

    Raises:
        NotImplementedError: a layer did not run on the twin.
    """
    keyword = "cache" if "cache" in signature(model.forward).parameters else OLD_CACHE
    with count_calls(model) as calls:
        logits: Tensor = model(
            encoder_outputs=encoded,
            attention_mask=mask,
            decoder_input_ids=tokens,
            use_cache=True,
            **{keyword: cache},
        ).logits
    # each layer has self-attention and cross-attention
    check_calls(type(model).__name__, calls, 2 * num_layers(model.get_decoder()))
    return logits, calls


def num_layers(stack: Any) -> int:
    """Return the number of layers of an encoder or a decoder."""
    return len(stack.layers if hasattr(stack, "layers") else stack.block)

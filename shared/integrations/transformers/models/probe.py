"""A run of a few tokens that shows whether a twin and its pages are exact for a model.

A step has the tokens of several requests in one row, and a request may need several steps. That is
exact only if a token's logits depend on its own sequence and position. Models break this in many
ways: positions that are counted in the row, a shift or a convolution over the row, statistics of
the row. So before `generate` uses a model, it compares: four tokens in one run of the library's own
attention, and the same four tokens for two requests, in chunks and in another order. An
encoder-decoder model is compared in the same way, with two inputs that are padded to one length.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ....validation.library_models import (
    check_calls,
    check_exact_run,
    check_pages_used,
)
from ..attention import count_calls, use_attention
from ..paged_batch import PagedBatch
from ..steps.wave_steps import encoder_inputs, num_layers
from .library_copy import library_copy

NUM_TOKENS = 4

LIMITS = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 0.05}
"""The largest relative difference of logits by the dtype of the arithmetic. Rounding is a tenth of
it or less. Another position changes the logits of small models with random weights by 0.1 to 2."""

LOW_PRECISION = 0.2
"""The limit for dtypes with fewer bits, such as bfloat16 with 8 bits of mantissa."""


def check_steps(
    model: Any, prompts: Sequence[Sequence[int]], expected_calls: int
) -> None:
    """Raise NotImplementedError if a model is not exact in steps.

    It costs three runs of the model, of four and five tokens and of three.

    Args:
        model: a decoder-only model.
        prompts: token ids of each prompt.
        expected_calls: attention layers of the model.
    """
    tokens = a, b, c, d = _different_tokens(model, prompts)
    # step: run the tokens at once, as the library does
    ids = torch.tensor([tokens], device=model.device)
    alone = library_copy(model)(input_ids=ids, use_cache=False).logits[0]
    # step: run them for two requests; in the second step the requests change places
    batch = PagedBatch("reference", 2, NUM_TOKENS, model.device)
    with use_attention(model, "reference"):
        batch.begin_step([2, 3], [0, 0], [[1], [0]])
        first = _run(model, batch, [a, b, a, b, c], expected_calls)
        batch.begin_step([1, 2], [3, 2], [[0], [1]])
        second = _run(model, batch, [d, c, d], expected_calls)
    # step: compare
    requests = (
        torch.cat([first[:2], second[1:]]),
        torch.cat([first[2:], second[:1]]),
    )
    for found in requests:
        _compare(model, found, alone)


def check_decoding(
    model: Any, prompts: Sequence[Any], first_tokens: Sequence[int]
) -> None:
    """Raise NotImplementedError if an encoder-decoder model is not exact in a padded batch.

    It costs three runs of the model, of at most four tokens each; for features, two runs of the
    whole first input.

    Args:
        model: an encoder-decoder model.
        prompts: token ids or features that the encoder takes, of each prompt.
        first_tokens: token ids that the decoder takes.
    """
    inputs_of_encoder = [prompts[0]]
    if not isinstance(prompts[0], Tensor):
        different = _different_tokens(model, prompts)
        inputs_of_encoder = [different, different[-1:]]
    tokens = _different_tokens(model, [first_tokens])
    decoder_ids = torch.tensor([tokens] * len(inputs_of_encoder), device=model.device)
    # step: run each input alone, as the library does
    alone, library = [], library_copy(model)
    for prompt in inputs_of_encoder:
        inputs, _ = encoder_inputs(model, [prompt])
        run = library(**inputs, decoder_input_ids=decoder_ids[:1], use_cache=False)
        alone.append(run.logits[0])
    # step: run the inputs together
    inputs, _ = encoder_inputs(model, inputs_of_encoder)
    with use_attention(model, "reference"), count_calls(model) as calls:
        run = model(**inputs, decoder_input_ids=decoder_ids, use_cache=False)
    num_encoder, num_decoder = (
        num_layers(part) for part in (model.get_encoder(), model.get_decoder())
    )
    check_calls(type(model).__name__, calls, num_encoder + 2 * num_decoder)
    # step: compare
    for found, expected in zip(run.logits, alone, strict=True):
        _compare(model, found, expected)


def _different_tokens(model: Any, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return a few tokens of the prompts; after them others, as equal tokens hide a shift."""
    config = model.config.get_text_config(decoder=True)
    special = [
        value for name, value in vars(config).items() if name.endswith("token_id")
    ]
    others = (token for token in range(config.vocab_size) if token not in special)
    found: list[int] = []
    for token in chain(*prompts, others):
        if token not in found:
            found.append(int(token))
        if len(found) == NUM_TOKENS:
            break
    return [found[index % len(found)] for index in range(NUM_TOKENS)]


def _compare(model: Any, found: Tensor, expected: Tensor) -> None:
    limit = _limit(model)
    check_exact_run(type(model).__name__, _deviation(found, expected, limit), limit)


def _limit(model: Any) -> float:
    """Return the limit for the lowest precision that a model computes in."""
    device = model.device.type
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    limits = [LIMITS.get(dtype, LOW_PRECISION) for dtype in dtypes]
    if torch.float32 in dtypes and torch.get_float32_matmul_precision() != "highest":
        # TF32 has the mantissa of float16
        limits.append(LIMITS[torch.float16])
    return max(limits)


def _run(
    model: Any, batch: PagedBatch, tokens: Sequence[int], expected_calls: int
) -> Tensor:
    """Return [tokens, vocabulary] the logits of a step."""
    name = type(model).__name__
    with count_calls(model) as calls:
        logits: Tensor = model(**batch.model_inputs(tokens)).logits[0]
    check_calls(name, calls, expected_calls)
    check_pages_used(name, len(batch.layers_run), expected_calls)
    return logits


def _deviation(found: Tensor, expected: Tensor, limit: float) -> float:
    """Return the difference of the worst row, relative to the spread of a row.

    In a low precision a single row may choose another expert, so it is that of the second worst.
    """
    found, expected = found.double(), expected.double()
    spread = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
    relative = (found - expected).norm(dim=1) / spread
    # rows of equal or infinite logits say nothing
    told = relative[(spread > 0) & spread.isfinite()].nan_to_num(torch.inf)
    rows: list[float] = sorted([0.0, 0.0, *told.tolist()])
    place = -1 if limit <= LIMITS[torch.float32] else -2
    return rows[place]

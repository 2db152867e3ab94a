"""The token ids of each request of a trace.

A trace holds lengths and no text, so the tokens are drawn. A named block of a prompt is drawn from
its name, so prompts that begin with the same names begin with the same tokens. All other tokens are
drawn from the request's number, so they are equal only by chance.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .trace import TraceRequest

VOCABULARY = 4096
"""Token ids are in range(VOCABULARY)."""

Tokens = NDArray[np.int64]

# part of each seed, so that a block and a request of the same number differ
_NAMED_BLOCK, _PROMPT, _OUTPUT = 1, 2, 3


def draw_tokens(trace: Sequence[TraceRequest], seed: int) -> list[Tokens]:
    """Return each request's tokens, its prompt and then its output.

    Args:
        trace: the requests.
        seed: seed of all draws, from 0.

    Returns:
        For each request [prompt_len + output_len] token ids below VOCABULARY.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed}: expected at least 0")
    blocks: dict[tuple[int, int], Tokens] = {}
    sequences = []
    for request in trace:
        pieces = []
        for hash_id in request.hash_ids:
            block = (hash_id, request.tokens_per_hash)
            if block not in blocks:
                blocks[block] = _draw(
                    seed, _NAMED_BLOCK, hash_id, request.tokens_per_hash
                )
            pieces.append(blocks[block])
        if not pieces:
            pieces.append(_draw(seed, _PROMPT, request.number, request.prompt_len))
        prompt = np.concatenate(pieces)[: request.prompt_len]
        assert len(prompt) == request.prompt_len, (
            "the prompt is longer than its named blocks"
        )
        output = _draw(seed, _OUTPUT, request.number, request.output_len)
        sequences.append(np.concatenate([prompt, output]))
    return sequences


def _draw(seed: int, kind: int, number: int, count: int) -> Tokens:
    generator = np.random.default_rng([seed, kind, number])
    return generator.integers(0, VOCABULARY, count, dtype=np.int64)

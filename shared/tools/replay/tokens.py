"""Which tokens does each request consist of?

A trace holds lengths, not text, so the tokens are drawn, but not freely: a named block of a prompt
is drawn from its name, so prompts that begin with the same names begin with the same tokens.
Everything else is drawn from the request's number, so it is equal to nothing by intention.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .trace import TraceRequest

VOCABULARY = 4096
"""Token ids run from 0 to this, exclusive."""

Tokens = NDArray[np.int64]

# what is drawn, so that a block and a request of one number do not begin alike
_NAMED_BLOCK, _PROMPT, _ANSWER = 1, 2, 3


def draw_tokens(trace: Sequence[TraceRequest], seed: int) -> list[Tokens]:
    """Return each request's tokens, its prompt and then its answer.

    Args:
        trace: the requests.
        seed: what all draws start from, from 0.

    Returns:
        For each request [prompt_len + output_len] token ids below VOCABULARY.

    Raises:
        ValueError: a negative seed.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed}: expected at least 0")
    blocks: dict[tuple[int, int], Tokens] = {}
    sequences = []
    for request in trace:
        parts = []
        for hash_id in request.hash_ids:
            block = (hash_id, request.tokens_per_hash)
            if block not in blocks:
                blocks[block] = _draw(
                    seed, _NAMED_BLOCK, hash_id, request.tokens_per_hash
                )
            parts.append(blocks[block])
        if not parts:
            parts.append(_draw(seed, _PROMPT, request.number, request.prompt_len))
        prompt = np.concatenate(parts)[: request.prompt_len]
        assert len(prompt) == request.prompt_len, "a prompt longer than its blocks"
        answer = _draw(seed, _ANSWER, request.number, request.output_len)
        sequences.append(np.concatenate([prompt, answer]))
    return sequences


def _draw(seed: int, kind: int, number: int, count: int) -> Tokens:
    generator = np.random.default_rng([seed, kind, number])
    return generator.integers(0, VOCABULARY, count, dtype=np.int64)

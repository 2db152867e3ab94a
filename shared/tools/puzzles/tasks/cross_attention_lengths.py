"""Puzzle 9: the lengths of cross-attention."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..puzzle import Case, Function, Hint, Puzzle

TEMPLATE = '''\
"""Puzzle 9: the lengths of cross-attention.

In an encoder-decoder model the decoder's tokens also attend to the encoder's tokens. The
encoder runs once per request, in the step in which the decoder computes its first tokens.
That step writes the encoder's keys and values to the cache. All later steps read them.
"""

import torch
from torch import Tensor


def cross_attention_lengths(
    query_lens: Tensor, computed_lens: Tensor, encoder_lens: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the lengths with which one step runs cross-attention.

    The tensors may have any strides: they need not be contiguous.

    Args:
        query_lens: [reqs] int32 new decoder tokens of each request.
        computed_lens: [reqs] int32 decoder tokens computed in earlier steps.
        encoder_lens: [reqs] int32 encoder tokens of each request.
        block_size: slots per cache block.

    Returns:
        Four int32 tensors:
        query_start_loc [reqs + 1]: the first query of each request, and the number of all.
        kv_lens [reqs]: keys that each request's queries attend to. No causal mask applies.
        new_kv_lens [reqs]: keys that this step writes to the cache.
        num_blocks [reqs]: cache blocks that hold the keys.

    Example:
        Request 0 begins: 2 decoder tokens, none computed, 5 encoder tokens. They are
        written now, and need 2 blocks of 4 slots. Request 1 has computed 3 decoder tokens
        before and brings 1. Its 4 encoder tokens are in the cache, in 1 block.

        >>> query_start_loc, kv_lens, new_kv_lens, num_blocks = cross_attention_lengths(
        ...     query_lens=torch.tensor([2, 1], dtype=torch.int32),
        ...     computed_lens=torch.tensor([0, 3], dtype=torch.int32),
        ...     encoder_lens=torch.tensor([5, 4], dtype=torch.int32),
        ...     block_size=4,
        ... )
        >>> query_start_loc.tolist(), kv_lens.tolist()
        ([0, 2, 3], [5, 4])
        >>> new_kv_lens.tolist(), num_blocks.tolist()
        ([5, 0], [2, 1])
    """
    raise NotImplementedError
'''
Lengths = tuple[Tensor, Tensor, Tensor, Tensor]


def cases() -> Iterator[Case]:
    """Yield all lengths of one request, then of two."""
    one = sorted(product((1, 2), (0, 1, 2), (1, 2, 3, 4)), key=sum)
    for block_size, (new, done, keys) in product((2, 3), one):
        yield case_of([new], [done], [keys], block_size)
    for first, second in product(one[::3], one[1::5]):
        query, computed, encoder = (
            list(pair) for pair in zip(first, second, strict=True)
        )
        yield case_of(query, computed, encoder, 2)
    yield case_of([], [], [], 2)


def case_of(
    query_lens: list[int], computed_lens: list[int], encoder_lens: list[int], size: int
) -> Case:
    """Return a case from Python lists."""
    return {
        "query_lens": torch.tensor(query_lens, dtype=torch.int32),
        "computed_lens": torch.tensor(computed_lens, dtype=torch.int32),
        "encoder_lens": torch.tensor(encoder_lens, dtype=torch.int32),
        "block_size": size,
    }


def right(
    query_lens: Tensor, computed_lens: Tensor, encoder_lens: Tensor, block_size: int
) -> Lengths:
    """Return the lengths, counted request by request."""
    starts = [0]
    for length in query_lens.tolist():
        starts.append(starts[-1] + length)
    new = [
        0 if computed else encoder
        for computed, encoder in zip(
            computed_lens.tolist(), encoder_lens.tolist(), strict=True
        )
    ]
    blocks = [len(range(0, length, block_size)) for length in encoder_lens.tolist()]
    found = (starts, encoder_lens.tolist(), new, blocks)
    first, keys, written, needed = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in found
    )
    return first, keys, written, needed


def replaced(index: int, change: Any) -> Function:
    """Return a wrong answer with one other result, computed from the case."""

    def wrong(**case: Any) -> Lengths:
        found = list(right(**case))
        found[index] = change(case).int()
        first, keys, written, needed = found
        return first, keys, written, needed

    return wrong


def of_other_lengths(change: Any) -> Function:
    """Return a wrong answer in which the keys of each request are counted otherwise."""

    def wrong(**case: Any) -> Lengths:
        lens = change(case).int()
        first, _, _, blocks = right(**(case | {"encoder_lens": lens}))
        return first, lens, right(**case)[2], blocks

    return wrong


def seq_lens(case: Case) -> Tensor:
    """Return the decoder's sequence lengths."""
    found: Tensor = case["query_lens"] + case["computed_lens"]
    return found


PUZZLE = Puzzle(
    number=9,
    name="cross_attention_lengths",
    title="the lengths of cross-attention",
    page="ideas/cross_attention",
    template=TEMPLATE,
    results={
        "query_start_loc": ("entry",),
        "kv_lens": ("request",),
        "new_kv_lens": ("request",),
        "num_blocks": ("request",),
    },
    cases=cases,
    right=right,
    hints=(
        Hint(
            "no_zero",
            "query_start_loc begins with 0, the start of request 0. It has one entry more than"
            " there are requests; the last one is the number of all queries.",
            replaced(0, lambda case: case["query_lens"].cumsum(0)),
        ),
        Hint(
            "starts_of_context",
            "query_start_loc counts the queries of this step. Decoder tokens of earlier steps"
            " are not among them.",
            replaced(
                0, lambda case: torch.cat([torch.zeros(1), seq_lens(case).cumsum(0)])
            ),
        ),
        Hint(
            "decoder_keys",
            "These are the lengths of the decoder's sequences. In cross-attention the keys are"
            " the encoder's tokens.",
            replaced(1, seq_lens),
        ),
        Hint(
            "decoder_keys",
            "These are the lengths of the decoder's sequences. In cross-attention the keys are"
            " the encoder's tokens.",
            of_other_lengths(seq_lens),
        ),
        Hint(
            "growing_keys",
            "The number of keys grows with the decoder's tokens. The encoder ran once, so its"
            " keys stay the same in all steps.",
            replaced(1, lambda case: case["encoder_lens"] + case["computed_lens"]),
        ),
        Hint(
            "growing_keys",
            "The number of keys grows with the decoder's tokens. The encoder ran once, so its"
            " keys stay the same in all steps.",
            of_other_lengths(lambda case: case["encoder_lens"] + case["computed_lens"]),
        ),
        Hint(
            "written_again",
            "The encoder's keys are written again in a later step. They are in the cache once"
            " the decoder has computed a token.",
            replaced(2, lambda case: case["encoder_lens"]),
        ),
        Hint(
            "prompt_of_one",
            "A first step with one query was taken for a decode. Whether a step is the first"
            " one follows from the computed tokens, not from the number of queries.",
            replaced(2, lambda case: case["encoder_lens"] * (case["query_lens"] > 1)),
        ),
        Hint(
            "query_keys_written",
            "The keys that are written are the encoder's, not those of the new decoder tokens.",
            replaced(2, lambda case: case["query_lens"]),
        ),
        Hint(
            "block_edge",
            "The last block is missing when it is not full. Round up.",
            replaced(3, lambda case: case["encoder_lens"] // case["block_size"]),
        ),
        Hint(
            "block_edge_full",
            "There is one block too many when the last block is exactly full.",
            replaced(3, lambda case: case["encoder_lens"] // case["block_size"] + 1),
        ),
    ),
    idea="Ask of each result: does it count queries or keys? Queries are the decoder's new"
    " tokens. Keys are the encoder's tokens, and they do not change after the first step.",
)

"""What are the keys, values and queries of each token?

There is no language model here. A token's key and value are the sum of two rows of seeded tables,
one for the token and one for its position, so equal prefixes have equal keys and values, as in a
real model. Queries are drawn alike, with one difference: most of them are needles. They look for
one key, at a place where kernels go wrong (the first, the last, both sides of a block's edge), so
that a key which is dropped or doubled changes the answer and not just its last digits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .settings import Settings
from .tokens import VOCABULARY, Tokens

POSITIONS = 1021
"""Rows of the position tables; a prime, so that no block size divides it."""

NEEDLE_SCORE = 12.0
"""The scaled score of a needle; all other scores are about NEEDLE_SCORE / sqrt(head_size)."""


@dataclass(frozen=True)
class LayerInputs:
    """What one layer gets in one step.

    Args:
        query: [tokens, query_heads, head_size].
        key, value: [tokens, kv_heads, head_size].
    """

    query: Tensor
    key: Tensor
    value: Tensor


class Model:
    """Tables from which every token's key, value and query follow."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        generator = torch.Generator().manual_seed(settings.seed)

        def table(rows: int, heads: int) -> Tensor:
            shape = (settings.layers, rows, heads, settings.head_size)
            # the sum of two rows has variance 1
            drawn: Tensor = torch.randn(shape, generator=generator) * 0.5**0.5
            return drawn.to(settings.device)

        kv_heads, query_heads = settings.kv_heads, settings.query_heads
        self._key = (table(VOCABULARY, kv_heads), table(POSITIONS, kv_heads))
        self._value = (table(VOCABULARY, kv_heads), table(POSITIONS, kv_heads))
        self._query = (table(VOCABULARY, query_heads), table(POSITIONS, query_heads))

    def inputs(
        self,
        sequences: Sequence[Tokens],
        num_computed_tokens: Sequence[int],
        query_lens: Sequence[int],
    ) -> list[LayerInputs]:
        """Return the new tokens' queries, keys and values, for each layer.

        Args:
            sequences: for each request its tokens, at least as far as they are computed now.
            num_computed_tokens: for each request where its new tokens start.
            query_lens: for each request how many they are.
        """
        parts = zip(sequences, num_computed_tokens, query_lens, strict=True)
        tokens, positions, needle_tokens, needle_positions, is_needle = (
            [],
            [],
            [],
            [],
            [],
        )
        for sequence, first, count in parts:
            new = np.arange(first, first + count)
            sought, found = self._needles(sequence, new)
            tokens.append(sequence[new])
            positions.append(new)
            needle_tokens.append(sequence[sought])
            needle_positions.append(sought)
            is_needle.append(found)
        token, position = self._join(tokens), self._join(positions)
        needle = (self._join(needle_tokens), self._join(needle_positions))
        mask = self._join(is_needle)[:, None, None]
        group_size = self.settings.query_heads // self.settings.kv_heads
        strength = NEEDLE_SCORE / self.settings.head_size**0.5
        dtype = self.settings.torch_dtype
        layers = []
        for layer in range(self.settings.layers):
            sought_key = _rows(self._key, layer, *needle)
            looking = strength * sought_key.repeat_interleave(group_size, dim=1)
            query = torch.where(
                mask, looking, _rows(self._query, layer, token, position)
            )
            layers.append(
                LayerInputs(
                    query=query.to(dtype),
                    key=_rows(self._key, layer, token, position).to(dtype),
                    value=_rows(self._value, layer, token, position).to(dtype),
                )
            )
        return layers

    def _needles(
        self, sequence: Tokens, new: Tokens
    ) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return the position each query looks for, and whether it looks for one at all."""
        draw = _scramble(sequence[new] * POSITIONS + new)
        edge = new - new % self.settings.block_size
        anywhere = (draw >> 3) % (new + 1)
        places = np.stack([np.zeros_like(new), new, edge, edge - 1, anywhere])
        kind = draw % 8
        sought = places[np.minimum(kind, 4), np.arange(len(new))]
        return np.clip(sought, 0, new), kind < 6

    def _join(self, parts: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.settings.device)


def _scramble(numbers: Tokens) -> Tokens:
    """Return numbers below 2**16 that look drawn, always the same for the same number."""
    mixed = (numbers * 2654435761) % 2**32
    mixed = ((mixed ^ (mixed >> 15)) * 40503) % 2**32
    return mixed >> 16


def _rows(
    tables: tuple[Tensor, Tensor], layer: int, token: Tensor, position: Tensor
) -> Tensor:
    of_token, of_position = tables
    return of_token[layer, token] + of_position[layer, position % POSITIONS]

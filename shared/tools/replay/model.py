"""Synthetic queries, keys and values of each token.

No language model is involved. A token's key and value are the sum of two rows of seeded tables: one
for the token and one for its position. So equal prefixes have equal keys and values, as in a real
model. Queries are drawn in the same way, but most of them are needles: they are aligned with one
key at a position where kernels go wrong (the first key, the last key, both sides of a block
boundary). A key that is dropped or read twice then changes the result visibly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .settings import ReplaySettings
from .tokens import VOCABULARY, Tokens

POSITIONS = 1021
"""Rows of the position tables. It is a prime, so no block size divides it."""

NEEDLE_SCORE = 12.0
"""The scaled score of a needle; all other scores are about NEEDLE_SCORE / sqrt(head_size)."""


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of one layer in one step.

    Args:
        query: [tokens, query_heads, head_size].
        key, value: [tokens, kv_heads, head_size].
    """

    query: Tensor
    key: Tensor
    value: Tensor


class SyntheticModel:
    """Seeded tables that define every token's query, key and value."""

    def __init__(self, settings: ReplaySettings) -> None:
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
            sequences: the tokens of each request, at least as far as this step computes them.
            num_computed_tokens: [reqs] index of each request's first new token.
            query_lens: [reqs] new tokens of each request.
        """
        new_tokens, new_positions = [], []
        needle_tokens, needle_positions, is_needle = [], [], []
        for sequence, first, count in zip(
            sequences, num_computed_tokens, query_lens, strict=True
        ):
            positions = np.arange(first, first + count)
            targets, found = self._needles(sequence, positions)
            new_tokens.append(sequence[positions])
            new_positions.append(positions)
            needle_tokens.append(sequence[targets])
            needle_positions.append(targets)
            is_needle.append(found)
        token, position = self._concat(new_tokens), self._concat(new_positions)
        needle = (self._concat(needle_tokens), self._concat(needle_positions))
        mask = self._concat(is_needle)[:, None, None]
        group_size = self.settings.query_heads // self.settings.kv_heads
        strength = NEEDLE_SCORE / self.settings.head_size**0.5
        dtype = self.settings.torch_dtype
        layers = []
        for layer in range(self.settings.layers):
            target_key = _rows(self._key, layer, *needle)
            aligned = strength * target_key.repeat_interleave(group_size, dim=1)
            query = torch.where(
                mask, aligned, _rows(self._query, layer, token, position)
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
        self, sequence: Tokens, positions: Tokens
    ) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return the position of each query's needle, and whether it has one."""
        draw = _scramble(sequence[positions] * POSITIONS + positions)
        edge = positions - positions % self.settings.block_size
        anywhere = (draw >> 3) % (positions + 1)
        choices = np.stack(
            [np.zeros_like(positions), positions, edge, edge - 1, anywhere]
        )
        kind = draw % 8
        targets = choices[np.minimum(kind, 4), np.arange(len(positions))]
        return np.clip(targets, 0, positions), kind < 6

    def _concat(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.settings.device)


def _scramble(numbers: Tokens) -> Tokens:
    """Return pseudo-random numbers below 2**16, always the same for the same number."""
    mixed = (numbers * 2654435761) % 2**32
    mixed = ((mixed ^ (mixed >> 15)) * 40503) % 2**32
    return mixed >> 16


def _rows(
    tables: tuple[Tensor, Tensor], layer: int, token: Tensor, position: Tensor
) -> Tensor:
    of_token, of_position = tables
    return of_token[layer, token] + of_position[layer, position % POSITIONS]

"""Option: name, meaning, validation and generator of one attention option."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions


@dataclass(frozen=True)
class OptionCall:
    """The call whose options are validated.

    Args:
        options: All options of the call.
        query: [tokens, query_heads, head_size].
        reqs: Number of requests.
    """

    options: AttentionOptions
    query: Tensor
    reqs: int

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.query.shape[1]


@dataclass(frozen=True)
class Drawing:
    """A batch for which the laws draw options.

    Args:
        pick: Source of random choices.
        query_lens, key_lens: Queries and keys of each request.
        heads: Number of query heads.
        padding: Rows past the last request.
        device: Device of the tensors that are drawn.
    """

    pick: Random
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    heads: int
    padding: int
    device: torch.device


@dataclass(frozen=True)
class Option:
    """One option of attention.

    Args:
        name: Field of `AttentionOptions`.
        meaning: Its meaning in a few words, for the table of options.
        default: The behaviour of a call that does not set it, in a few words.
        values: Names of the values that the laws draw. The first one is off.
        draw: Makes the value of a name for a batch.
        validate: Raises if a value that is not None is wrong for a call.
    """

    name: str
    meaning: str
    default: str
    values: tuple[str, ...]
    draw: Callable[[str, Drawing], Any]
    validate: Callable[[Any, OptionCall], None]

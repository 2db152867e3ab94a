"""Option: everything that is declared of one attention option besides its field."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..contract.attention_options import AttentionOptions


@dataclass(frozen=True)
class OptionCall:
    """The call whose options are validated.

    Args:
        options: All options of the call.
        query: [tokens, query_heads, head_size].
        reqs: Number of requests.
        contents: Whether elements of tensors are read.
    """

    options: AttentionOptions
    query: Tensor
    reqs: int
    contents: bool

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
class Rejected:
    """Values of another option that cannot be combined with an option.

    Args:
        other: The other option, or another property of calls that
            `conformance/cases/option_pairs.py` names.
        values: Names of its values that raise together with any value but the first.
        reason: The reason, for the table of pairs.
        words: A part of the error message.
    """

    other: str
    values: tuple[str, ...]
    reason: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of attention.

    Args:
        name: Field of `AttentionOptions`.
        meaning: Its meaning in a few words, for the table of options.
        default: The behaviour of a call that does not set it, in a few words.
        heading: Heading of its column in the table of pairs. If empty, it has no column.
        values: Names of the values that the laws draw. The first one is off.
        draw: Makes the value of a name for a batch.
        validate: Raises if a value that is not None is wrong for a call.
        rejected: What cannot be combined with it. A pair is declared by one of its options.
            Cross-attention with more queries than keys needs no declaration: it rejects all
            options that are declared BY_POSITION.
    """

    name: str
    meaning: str
    default: str
    heading: str = ""
    values: tuple[str, ...]
    draw: Callable[[str, Drawing], Any]
    validate: Callable[[Any, OptionCall], None]
    rejected: tuple[Rejected, ...] = ()

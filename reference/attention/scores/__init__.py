"""Scores: what is done to the scaled dot products.

Every file of this folder is one option and has its name. It defines `modify`. The exception is
sinks, which take part in the softmax: softmax.py calls them.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from ....contract.attention_options import AttentionOptions
from ....contract.option_files import import_option_files
from ..requests.request import RequestView

ScoreFunction: TypeAlias = Callable[[Tensor, Any, RequestView], Tensor]
"""Takes scores, an option's value and a request; returns scores."""

MODIFICATIONS: dict[str, ScoreFunction] = {
    name: file.modify
    for name, file in import_option_files(__name__, __path__).items()
    if hasattr(file, "modify")
}
"""Score functions by option, in the order of `AttentionOptions`, in which they are applied."""


def modify_scores(
    scores: Tensor, request: RequestView, options: AttentionOptions
) -> Tensor:
    """Return [query_heads, queries, keys], scaled scores with all modifications."""
    for name, modify in MODIFICATIONS.items():
        if getattr(options, name) is not None:
            scores = modify(scores, getattr(options, name), request)
    return scores

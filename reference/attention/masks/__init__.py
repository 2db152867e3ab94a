"""Masks: which keys each query attends to.

Every file of this folder is one option and has its name. It defines `visible` or `also_visible`. A
key is visible if `visible` of all options agree, or if `also_visible` of one option is true.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ....contract.attention_options import AttentionOptions
from ....contract.option_files import import_option_files
from ..requests.request import RequestView

Mask: TypeAlias = Callable[[Any, RequestView], Tensor]
"""Takes an option's value and a request; returns [queries, keys] bool."""

_FILES = import_option_files(__name__, __path__)
LIMITS: dict[str, Mask] = {
    name: file.visible for name, file in _FILES.items() if hasattr(file, "visible")
}
"""Masks by option. A key is visible if all of these agree..."""

ADDITIONS: dict[str, Mask] = {
    name: file.also_visible
    for name, file in _FILES.items()
    if hasattr(file, "also_visible")
}
"""...or if one of these does."""


def visible_keys(request: RequestView, options: AttentionOptions) -> Tensor:
    """Return [queries, keys] bool, which query attends to which key."""
    shape = len(request.query_position), len(request.key_position)
    visible = torch.ones(shape, dtype=torch.bool, device=request.keys.device)
    for name, mask in LIMITS.items():
        if getattr(options, name) is not None:
            visible &= mask(getattr(options, name), request)
    for name, mask in ADDITIONS.items():
        if getattr(options, name) is not None:
            visible |= mask(getattr(options, name), request)
    return visible


def zero_masked(value: Tensor, visible: Tensor) -> Tensor:
    """Return [keys, heads, elements], with 0 for the values of keys that no query attends to.

    Such rows may hold NaN, and 0 * NaN = NaN.
    """
    return value.masked_fill(~visible.any(0)[:, None, None], 0.0)

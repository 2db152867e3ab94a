"""Scales of cache formats: what is validated, and what laws draw, one file per format.

Each file defines `validate`, which raises if a scale does not fit the format, and `draw`, which
returns scales of keys or values for the laws.
"""

from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import FORMATS, find_format, import_format_files

FILES = import_format_files(__name__, __path__)


def check_format_scale(
    name: str,
    scale: Tensor | float | None,
    cache: Tensor,
    contents: bool,
    other: Tensor | float | None = None,
) -> None:
    """Raise if a scale of a cache does not fit its format.

    Args:
        name: Name of the argument.
        scale: What was given.
        cache: [num_blocks, block_size, kv_heads, elements] the keys or the values.
        contents: Whether numbers of tensors are read.
        other: Optional. Scale of the other half of the cache, which tells the format if this one is
            missing.
    """
    given = other if scale is None else scale
    if given is None:
        reject_missing(name, cache.dtype)
    form = find_format(cache.dtype, given)
    validate: Any = FILES[form.file].validate
    validate(name, scale, cache, contents)


def reject_missing(name: str, dtype: torch.dtype) -> None:
    """Raise if a cache without scales may have several formats, all of which measure their own."""
    forms = [form for form in FORMATS.values() if form.dtype == dtype]
    kinds = {form.scales: form for form in reversed(forms)}
    if len(kinds) > 1 and all(form.is_measured for form in forms):
        fitting = " or ".join(
            f"{form.scales[0].value} for {form.name}"
            for form in sorted(kinds.values(), key=forms.index)
        )
        raise ValueError(
            f"{name} = None: expected scales, as the cache is {dtype}: {fitting}"
        )

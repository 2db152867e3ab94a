"""Scales of cache formats: what is validated, and what laws draw, one file per format.

Each file defines `validate`, which raises if a scale does not fit the format, and `draw`, which
returns scales of keys or values for the laws.
"""

from typing import Any

from torch import Tensor

from ...contract.cache_formats import find_format, import_format_files

FILES = import_format_files(__name__, __path__)


def check_format_scale(
    name: str, scale: Tensor | float | None, key_cache: Tensor, contents: bool
) -> None:
    """Raise if a scale of a cache does not fit its format.

    Args:
        name: Name of the argument.
        scale: What was given.
        key_cache: [num_blocks, block_size, kv_heads, head_size].
        contents: Whether numbers of tensors are read.
    """
    form = find_format(key_cache.dtype, scale)
    validate: Any = FILES[form.file].validate
    validate(name, scale, key_cache, contents)

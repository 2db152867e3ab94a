"""Cache formats: how the slots of a cache hold keys and values, one file per format.

Each file defines `store`, which turns numbers into the elements of the cache, and `load`, which
turns them into numbers again.
"""

import torch
from torch import Tensor

from ....contract.cache_formats import find_format, import_format_files

FILES = import_format_files(__name__, __path__)


def encode(
    numbers: Tensor,
    cache: Tensor,
    scale: Tensor | float | None,
    name: str | None = None,
    global_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return keys or values of one token as their cache holds them, and the scales of its slot.

    Args:
        numbers: [kv_heads, elements].
        cache: [num_blocks, block_size, kv_heads, elements].
        scale: Optional. Scale of the cache. If None, it is not quantized.
        name: Optional. Name of the format, as in `find_format`.
        global_scale: Optional. What block scales are multiplied by. If None, there are none.

    Returns:
        [kv_heads, elements] in the dtype of the cache; and [kv_heads], [kv_heads, blocks], or None
        if scales are not measured.
    """
    form = find_format(cache.dtype, scale, name)
    if form.channels_per_scale:
        scale = global_scale
    encoded: tuple[Tensor, Tensor | None] = FILES[form.file].store(
        numbers, scale, cache.dtype
    )
    return encoded


def load_slots(
    cache: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    scale: Tensor | float | None,
    global_scale: float | None = None,
) -> Tensor:
    """Return the keys or the values of some slots as numbers: [slots, kv_heads, elements].

    Args:
        cache: [num_blocks, block_size, kv_heads, elements].
        block_ids, offsets: [slots].
        dtype: Of the arithmetic and of the result.
        scale: Optional. Scale of the cache. If None, it is not quantized.
        global_scale: Optional. What block scales are multiplied by. If None, there are none.
    """
    form = find_format(cache.dtype, scale)
    if form.is_measured and isinstance(scale, Tensor):
        scale = scale[block_ids, offsets]
    numbers: Tensor = FILES[form.file].load(cache[block_ids, offsets], scale, dtype)
    return numbers if global_scale is None else numbers * global_scale

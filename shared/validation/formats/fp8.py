"""Validation of the scales of an FP8 cache: one number, or one per kv head."""

from torch import Tensor

from ..scales import check_scale


def validate(
    name: str, scale: Tensor | float | None, cache: Tensor, contents: bool
) -> None:
    """Raise if the scale is missing, or is not a finite number above 0 for all or for each head."""
    if scale is None:
        raise ValueError(
            f"{name} = None: expected a scale, as the cache is {cache.dtype}; 1.0"
            " takes its numbers as they are"
        )
    check_scale(name, scale, {"key_cache": cache}, cache.shape[2], contents)
